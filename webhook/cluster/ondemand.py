"""Look-ups at the API server while a review waits, for what no watch shows.

Each answer counts for a while and each kind of look-up has a bound, so that nobody can make the API server work, or our
threads wait, by posting pods.
"""

import threading
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import structlog
from msgspec import Struct

from cardwise.clock import Clock
from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import Foreign
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.nesting import bounded, following
from cardwise.runtime.logs import LineLimit

_LIST_SECONDS: Final = 2.0  # that a list may take

_AGREED_SECONDS: Final = 10.0  # for which a gang's number is remembered
_MOST: Final = 10_000  # gangs that are remembered
_MOST_LOOKS: Final = 50  # a second
_FEW: Final = 50  # members that are looked at, where the API server's cache counts them
_MOST_BYTES: Final = 8 << 20  # of all members, where it does not: a tenant's may have hundreds of MiB, and we have 512
_MOST_LIST_BYTES: Final = 16 << 20  # some 8,000 classes or namespaces

PODGROUPS: Final = f"/apis/{Foreign.KUBERNETES}/v1beta1"
_SERVED_SECONDS: Final = 30.0  # for which discovery's answer counts

_decode_list = following(msgspec.json.Decoder(wire.List).decode)
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode

_log = structlog.get_logger("webhook.gangnumbers")  # as lines of the log have called it


class FreshList:
    """Objects that the watch has not shown yet: one list answers for every name for a while.

    So any number of unknown names, in one pod or in thousands of pods, costs one list call. Methods may be called from
    any thread: while one lists, the others wait for that list.
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        clock: Clock,
        *,
        query: Mapping[str, str] | None = None,
        trusted: float = 1.0,
    ) -> None:
        """`trusted`: for how many seconds a list counts, and the API server's refusal of it."""
        self._client = client
        self._path = path
        self._query = query
        self._trusted = trusted
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._found: dict[str, Json] | errors.KubeError = {}

    def get(self, name: str) -> Json | None:
        """The object as it was `trusted` seconds ago at most, None where there was none. Raises KubeError."""
        with self._lock:
            if self._clock.now() >= self._until:
                self._found = self._list()
                self._until = self._clock.now() + self._trusted
            found = self._found
        if isinstance(found, errors.KubeError):
            raise found
        return found.get(name)

    def _list(self) -> dict[str, Json] | errors.KubeError:
        try:
            page = self._client.request(
                "GET", self._path, query=self._query, timeout=_LIST_SECONDS, most=_MOST_LIST_BYTES
            )
            objects = [_decode_object(wire.trim(bytes(raw))) for raw in _decode_list(page).items or ()]
        except errors.NotFound:
            return {}  # their CRD is not installed
        except errors.KubeError as error:
            return error
        except (msgspec.DecodeError, RecursionError) as error:
            return errors.Unreachable(f"GET {self._path}: not a List: {error}")
        return {obj["metadata"]["name"]: obj for obj in objects}


class _Meta(Struct, rename="camel"):
    """No more than is looked at: what a tenant writes into `managedFields` would take many times its size."""

    name: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Pod(Struct):
    metadata: _Meta


_decode = bounded(msgspec.json.Decoder(wire.ListOf[_Pod]).decode)


class GangNumbers:
    """How many pods a gang needs, as its living members say it.

    Looked up for pods of gangs only, from the API server's cache: it may be behind, and the extender sees what slips
    through. Whoever reaches the webhook can name gangs, so there are `_MOST_LOOKS` a second at most. That a gang says a
    number is remembered for a while, since its pods come by the hundred. Methods may be called from any thread.
    """

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._lines = LineLimit(_log, clock)
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
            self._agreed[key] = now + _AGREED_SECONDS
        return found

    def _said(self, namespace: str, gang: str) -> dict[str, int]:
        """The numbers by the names of the pods. Nothing where the API server does not answer."""
        query = {"fieldSelector": "status.phase!=Failed", "resourceVersion": "0", "limit": str(_FEW)}
        try:
            path, query = paths.pods(namespace), query | paths.with_label(names.GANG, gang)
            found = self._client.request("GET", path, query=query, timeout=1.0, most=_MOST_BYTES)
            pods = _decode(found).items or ()
        except (errors.KubeError, msgspec.DecodeError) as error:
            self._lines.log(
                "warning", namespace, "a gang's pods are not compared", namespace=namespace, gang=gang, error=str(error)
            )
            return {}
        living = (pod.metadata for pod in pods if not pod.metadata.deletion_timestamp)
        return {meta.name: number for meta in living if (number := _number(meta)) is not None}


def _number(meta: _Meta) -> int | None:
    try:
        said = gangs.membership({"metadata": {"labels": meta.labels, "annotations": meta.annotations}})
    except InvalidRequest:
        return None  # made while nobody checked
    return said.minimum if said is not None else None


class PodGroups:
    """Whether the cluster serves the PodGroups of Kubernetes.

    Where it does not (before 1.37, or without the feature gate GenericWorkload), the API server drops the field
    `spec.schedulingGroup` of a pod, but only after the mutating webhooks have seen it. It is asked when a pod names
    one. Methods may be called from any thread.
    """

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._known = float("-inf"), False  # until when, and what

    def served(self) -> bool:
        """Whether the API is served, by discovery, which all known users may ask. Raises KubeError."""
        until, found = self._known
        if self._clock.now() >= until:
            found = self._ask()
            self._known = self._clock.now() + _SERVED_SECONDS, found
        return found

    def _ask(self) -> bool:
        try:
            resources = self._client.get(PODGROUPS, timeout=2.0, most=_MOST_BYTES).get("resources") or ()
        except errors.NotFound:
            return False
        return any(one.get("name") == "podgroups" for one in resources)
