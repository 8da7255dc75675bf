"""Clears the MPS status of this node's cards when the MPS manager has ended. Then no MPS pod is placed here.

A manager that crashes leaves its last status. Then the card looks ready forever, but containers cannot start on it. The
device plugin reads from files on the node whether a manager runs. With `--mps=never` there will be no manager again, so
the status of an earlier manager is removed. Only a card that was left closed (in compute mode EXCLUSIVE_PROCESS) keeps
the status.
"""

from collections.abc import Callable
from pathlib import Path

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api.mps import CLOSED_BY_FORMER_MANAGER, MANAGER_GONE, MpsState
from cardwise.core.values.decoded import Json
from cardwise.gpus import mpsfiles
from cardwise.kube.objects.extendedresources import ExtendedResource, MpsStatus
from deviceplugin.grants.mpswait import HasManager

GRACE_SECONDS = 20.0  # time without a manager before its status is cleared; enough for the manager's restart or update


class StaleMpsStatus:
    """Corrects stale MPS statuses. Not thread-safe. The parameters are as for `grants.mpswait.MpsWait`."""

    def __init__(
        self,
        setting: HasManager,
        root: Path,
        has_manager: Callable[[], bool],
        clock: Clock = SYSTEM,
        mps_clock: Clock = BOOT,
    ) -> None:
        self._setting = setting
        self._root = root
        self._has_manager = has_manager
        self._clock = clock
        self._mps_clock = mps_clock
        self._stale_since: dict[str, float] = {}  # by UUID

    def correct_status(self, resource: ExtendedResource) -> Json:
        """Returns the merge patch that corrects a card's status; {} if the status needs no correction."""
        mps_status, uuid = resource.status.mps, resource.spec.uuid
        if self._setting is HasManager.NEVER:
            return self._correct_without_manager(mps_status, uuid)
        if mps_status is None:
            is_stale = self._has_manager() and not mpsfiles.is_manager_running(self._root)
        else:
            is_stale = mps_status.state != MpsState.DOWN and mpsfiles.is_state_stale(
                self._root, uuid, clock=self._mps_clock
            )
        if not is_stale:
            self._stale_since.pop(uuid, None)
            return {}
        now = self._clock.now()
        if now - self._stale_since.setdefault(uuid, now) < GRACE_SECONDS:
            return {}
        # Change only the state. From the other fields, the extender knows that the card has a manager.
        return self._down_patch(MANAGER_GONE)

    def _correct_without_manager(self, mps_status: MpsStatus | None, uuid: str) -> Json:
        """The patch for a card on a node without an MPS manager.

        An earlier manager's status would keep pods off the card for ever, so the status is removed. But a card that the
        manager left closed cannot be used, so its MPS state becomes Down.
        """
        if not mpsfiles.is_left_exclusive_by_former_manager(self._root, uuid):
            return {} if mps_status is None else {"mps": None}
        if mps_status is not None and mps_status.reason == CLOSED_BY_FORMER_MANAGER:
            return {}
        return self._down_patch(CLOSED_BY_FORMER_MANAGER)

    def _down_patch(self, reason: str) -> Json:
        transition_time = self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"mps": {"state": str(MpsState.DOWN), "reason": reason, "lastTransitionTime": transition_time}}
