"""Reads from the living members of a gang how many pods it needs.

Looked up for pods of gangs only, from the API server's cache: it may be behind, and the extender sees what slips
through. Whoever reaches the webhook can name gangs, so there are `_MOST_LOOKS` a second at most. That a gang says a
number is remembered for a while, since its pods come by the hundred.
"""

from typing import Any

import msgspec
import structlog
from msgspec import Struct

from cardwise.clock import Clock
from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.nesting import bounded

_TRUSTED = 10.0  # seconds
_MOST = 10_000  # gangs that are remembered
_MOST_LOOKS = 50  # a second
_FEW = 50  # members that are looked at, where the API server's cache counts them
_MOST_BYTES = 8 << 20  # of all members, where it does not: a tenant's may have hundreds of MiB, and we have 512

_log = structlog.get_logger("webhook.gangnumbers")


class _Pod(Struct):
    metadata: dict[str, Any]


_decode = bounded(msgspec.json.Decoder(wire.ListOf[_Pod]).decode)


class GangNumbers:
    """Methods may be called from any thread."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._looks = (float("-inf"), 0)  # since when, and how many
        self._agreed: dict[tuple[str, str, int], float] = {}  # until when

    def other(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        """A living pod of the gang that says another number, and which; None where none is known."""
        key, now = (namespace, gang, number), self._clock.now()
        if self._agreed.get(key, now) > now:
            return None
        since, looks = self._looks
        if now - since >= 1:
            since, looks = now, 0
        if looks >= _MOST_LOOKS:
            return None
        self._looks = since, looks + 1
        said = self._said(namespace, gang)
        found = next(((name, other) for name, other in said.items() if other != number), None)
        if found is None and said:
            if len(self._agreed) >= _MOST:
                self._agreed = {}
            self._agreed[key] = now + _TRUSTED
        return found

    def _said(self, namespace: str, gang: str) -> dict[str, int]:
        """The numbers by the names of the pods. Nothing where the API server does not answer."""
        query = {
            "labelSelector": f"{names.GANG}={gang}",
            "fieldSelector": "status.phase!=Failed",
            "resourceVersion": "0",
            "limit": str(_FEW),
        }
        try:
            path = paths.pods(namespace)
            found = self._client.request("GET", path, query=query, timeout=1.0, most=_MOST_BYTES)
            pods = _decode(found).items or ()
        except (errors.KubeError, msgspec.DecodeError) as error:
            _log.warning("a gang's pods are not compared", namespace=namespace, gang=gang, error=str(error))
            return {}
        living = (pod.metadata for pod in pods if not pod.metadata.get("deletionTimestamp"))
        return {metadata["name"]: number for metadata in living if (number := _number(metadata)) is not None}


def _number(metadata: dict[str, Any]) -> int | None:
    try:
        said = gangs.membership({"metadata": metadata})
    except InvalidRequest:
        return None  # made while nobody checked
    return said.minimum if said is not None else None
