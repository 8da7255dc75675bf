"""Lists whole objects, for commands that look once."""

from collections.abc import Iterator, Mapping

from cardwise.core.values.decoded import Json
from cardwise.kube import wire
from cardwise.kube.client import KubeClient


def objects(client: KubeClient, path: str, query: Mapping[str, str] | None = None) -> Iterator[Json]:
    """Decoded, page by page. Raises `KubeError`."""
    return client.items(path, wire.ListOf[Json], query)
