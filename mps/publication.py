"""Writes the MPS status of each card to the API server: `ExtendedResource.status.mps`, on change only.

The objects are the device plugin's; they may come later than we do, and be made anew without what we wrote.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps, names
from cardwise.core.api.mps import Status
from cardwise.core.values import wording
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.reflector import Reflector, Woken
from cardwise.runtime.loops import Loop
from mps import metrics

_log = structlog.get_logger(__name__)

_FAILED = "the cluster was not told of this node's MPS"
_EVERY_SECONDS = 30.0
_HELD_BACK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class _Status(msgspec.Struct):
    mps: dict[str, Any] | None = None


class _Resource(msgspec.Struct):
    metadata: wire.ObjectMeta
    status: _Status = msgspec.field(default_factory=_Status)


_decode = msgspec.json.Decoder(_Resource).decode


def _project(content: bytes) -> tuple[str, dict[str, Any]]:
    found = _decode(content)
    return found.metadata.name, found.status.mps or {}


def wanted(status: Status, uuid: str) -> dict[str, Any]:
    """`status.mps` of a card. Pure."""
    told = mps.wire(status, uuid)
    changed = datetime.fromtimestamp(status.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return told | {"reason": wording.message(told["reason"]), "lastChange": changed}


class Publication:
    """`statuses` yields the status of each card by UUID; `wake` after a change. `clock` is the one of the statuses."""

    def __init__(
        self, client: KubeClient, node: str, statuses: Callable[[], Mapping[str, Status]], clock: Clock = BOOT
    ) -> None:
        self._client = client
        self._statuses = statuses
        self._clock = clock
        self.problem = "the cluster has not been told of this node's MPS yet"
        self._loop = Loop(
            "publication",
            self._turn,
            failed=_FAILED,
            failures=metrics.THREADS,
            expected=(errors.KubeError,),
            every=_EVERY_SECONDS,
            clock=clock,
        )
        self._reflector: Reflector[dict[str, Any]] = Reflector(
            client,
            paths.extendedresources(),
            _project,
            Woken(self._loop.wake),
            query=paths.with_label(names.NODE_LABEL, node),
            name="extendedresources",
            clock=clock,
        )

    def start(self) -> None:
        self._reflector.start()
        self._loop.start()

    def wake(self) -> None:
        self._loop.wake()

    def stop(self) -> None:
        """Tells the last of it first, if the API server answers at all."""
        self._loop.stop(_STOP_SECONDS)
        self._reflector.stop()
        try:
            self._tell()
        except errors.KubeError as error:
            _log.warning("the cluster was not told of the end", error=str(error))

    def _turn(self) -> None:
        if not self._reflector.synced.is_set():
            return
        try:
            self._tell()
        except Exception as error:
            self.problem = f"{_FAILED}: {error}"
            raise
        self.problem = ""

    def _tell(self) -> None:
        known = self._reflector.store.snapshot()
        failed: errors.KubeError | None = None
        for uuid, status in self._statuses().items():
            name = names.extended_resource_name(uuid)
            told = wanted(status, uuid)
            # An object that is not there yet wakes us when it comes.
            if name not in known or known[name] == told:
                continue
            # Of what nobody looks at any more the device plugin says so, and would be contradicted each time.
            if mps.stale(status, self._clock.now()):
                self._loop.soon(_HELD_BACK_SECONDS)
                continue
            try:
                self._client.patch(paths.extendedresources(name, "status"), {"status": {"mps": told}}, "merge")
            except errors.NotFound:
                continue
            except errors.KubeError as error:
                if errors.is_of_server(error):
                    raise
                failed = failed or error  # the other cards are told of first
                continue
            _log.info("MPS of a card told", card=uuid, state=told["state"], ceiling=told["ceilingMiB"])
        if failed is not None:
            raise failed
