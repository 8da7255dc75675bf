"""Clears the MPS status of this node's cards when the MPS manager is gone, so that no MPS pod is placed here.

A manager that crashes leaves its last status: the card looks ready for ever, and nothing starts on it. The same happens
when the card is a new object, because the chart was installed anew without a manager. Files on the node say whether a
manager lives; the device plugin reads them.
"""

from collections.abc import Callable
from pathlib import Path

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api.mps import MANAGER_GONE, Mode, MpsState
from cardwise.core.values.decoded import Json
from cardwise.gpus import mpsnode
from cardwise.kube.wire import ExtendedResource

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
        if said is not None and self._setting is Mode.OFF:
            return {"mps": None}  # what a manager has left behind that was taken away would keep pods off for ever
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
        changed = self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"mps": {"state": str(MpsState.DOWN), "reason": MANAGER_GONE, "lastChange": changed}}
