"""Clears the MPS status of this node's cards when the MPS manager is gone, so that no MPS pod is placed here.

A manager that crashes leaves its last status: the card looks ready for ever, and nothing starts on it. Files on the
node say whether a manager lives; the device plugin reads them. Where no manager is to come (`--mps=off`), what an
earlier one said is removed, except from a card that it left closed.
"""

from collections.abc import Callable
from pathlib import Path

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api.mps import LEFT_CLOSED, MANAGER_GONE, Mode, MpsState
from cardwise.core.values.decoded import Json
from cardwise.gpus import mpsnode
from cardwise.kube.wire import ExtendedResource, MpsStatus

PATIENCE = 20.0  # seconds; a manager that is replaced by the next is back by then


class StaleMpsStatus:
    """For one thread. `setting`, `root` and `mps_clock` as MpsWait has them, `managed` is its `has_manager`."""

    def __init__(
        self,
        setting: Mode,
        root: Path,
        managed: Callable[[], bool],
        clock: Clock = SYSTEM,
        mps_clock: Clock = BOOT,
    ) -> None:
        self._setting = setting
        self._root = root
        self._managed = managed
        self._clock = clock
        self._mps_clock = mps_clock
        self._silent_since: dict[str, float] = {}  # by UUID

    def correction(self, found: ExtendedResource) -> Json:
        """What to put into the card's status by a merge patch; {} where what is there may stay."""
        said, uuid = found.status.mps, found.spec.uuid
        if self._setting is Mode.OFF:
            return self._without_manager(said, uuid)
        if said is None:
            silent = self._managed() and not mpsnode.manager_lives(self._root)
        else:
            silent = said.state != MpsState.DOWN and mpsnode.silent(self._root, uuid, clock=self._mps_clock)
        if not silent:
            self._silent_since.pop(uuid, None)
            return {}
        now = self._clock.now()
        if now - self._silent_since.setdefault(uuid, now) < PATIENCE:
            return {}
        # The rest stays: it is what the manager will do again, and it makes the card a managed one.
        return self._down(MANAGER_GONE)

    def _without_manager(self, said: MpsStatus | None, uuid: str) -> Json:
        """What an earlier manager said would keep pods off for ever; but a card that it left closed serves none."""
        if not mpsnode.left_closed(self._root, uuid):
            return {} if said is None else {"mps": None}
        return {} if said is not None and said.reason == LEFT_CLOSED else self._down(LEFT_CLOSED)

    def _down(self, reason: str) -> Json:
        changed = self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"mps": {"state": str(MpsState.DOWN), "reason": reason, "lastChange": changed}}
