"""Lists whole objects, for commands that look once."""

from collections.abc import Iterator, Mapping
from typing import Any

from cardwise.kube import wire
from cardwise.kube.client import KubeClient


def objects(client: KubeClient, path: str, query: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Decoded, page by page. Raises `KubeError`."""
    return client.items(path, wire.ListOf[dict[str, Any]], query)
