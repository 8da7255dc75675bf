"""Whole objects of a list, for commands that look once."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cardwise.kube import wire
from cardwise.kube.client import KubeClient


def objects(client: KubeClient, path: str, query: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Decoded, page by page. Raises `KubeError`."""
    for page in client.list_pages(path, query):
        for raw in msgspec.json.decode(page, type=wire.List).items or ():
            yield msgspec.json.decode(raw, type=dict[str, Any])
