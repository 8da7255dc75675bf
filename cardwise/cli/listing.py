"""Whole objects of a list, for commands that look once."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cardwise.kube import wire
from cardwise.kube.client import KubeClient
from cardwise.kube.nesting import bounded

_decode_list = bounded(msgspec.json.Decoder(wire.List).decode)
_decode = bounded(msgspec.json.Decoder(dict[str, Any]).decode)


def objects(client: KubeClient, path: str, query: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Decoded, page by page. Raises `KubeError`."""
    for page in client.list_pages(path, query):
        for raw in _decode_list(page).items or ():
            yield _decode(bytes(raw))
