"""Waits until MPS is ready on a container's card before the container starts, and returns its MPS daemons.

docs/design/0005-mps.md has the rules. Each start checks the rules with files on the node, without the API server. Only
one fact is saved: that this node has an MPS manager.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api import mps, names
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import MpsState
from cardwise.core.values.wording import quote_text
from cardwise.gpus import mpsfiles
from deviceplugin.grants.grants import Grant

MAX_WAIT_SECONDS = 10.0  # maximum wait for MPS; the kubelet waits 30 s for PreStartContainer
_POLL_SECONDS = 0.2
_MANAGER_MARK_FILE = "mps-manager-seen"
_DAEMON_CHANGED = "the MPS daemon of its GPU has just changed"


class HasManager(StrEnum):
    """Whether the node has an MPS manager, the option --mps.

    NEVER: it has none, and will have none.
    SEEN: it has one once one has run here.
    ALWAYS: it has one, also before one has run.
    """

    NEVER = "never"
    SEEN = "seen"
    ALWAYS = "always"


class MpsNotReady(Exception):
    """The container cannot start now; the message is for the pod's events."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a container may start with MPS.

    problem: why the container may not start now, None if it may start.
    folders: the folders of the MPS daemons that the container gets.
    """

    problem: str | None = None
    folders: tuple[str, ...] = ()


class MpsWait:
    """Waits for MPS: call `wait_ready` before a container starts, and `confirm_ready` before its grant is delivered."""

    def __init__(
        self, setting: HasManager, root: Path, state_dir: Path, clock: Clock = SYSTEM, mps_clock: Clock = BOOT
    ) -> None:
        """setting: whether the node has an MPS manager.
        root: the --mps-root of the MPS manager.
        state_dir: must survive reboots.
        mps_clock: the clock of the manager.

        Raises OSError.
        """
        self._setting = setting
        self._root = root
        self._manager_mark_file = state_dir / _MANAGER_MARK_FILE
        self._has_manager = False
        self._clock = clock
        self._mps_clock = mps_clock
        if setting is HasManager.NEVER:
            self._manager_mark_file.unlink(missing_ok=True)
        self.has_manager()  # saves that the node has a manager, even if no container starts before the next reboot

    def wait_ready(
        self,
        grant: Grant,
        reserve_wait: Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]],
        is_active: Callable[[], bool],
    ) -> Grant:
        """Wait for MPS; returns the grant with the daemons that its container gets. Raises MpsNotReady.

        reserve_wait: reserves a wait slot for a waiting start, as `WaitSlots.reserve`.
        is_active: returns whether the kubelet still waits for the response.
        """
        required_state = self._required_state(grant)
        readiness = self._check_readiness(grant, required_state)
        if readiness.problem:
            with reserve_wait() as has_slot:
                readiness = self._wait_ready(grant, required_state, readiness, lambda: has_slot() and is_active())
        if readiness.problem:
            raise MpsNotReady(readiness.problem)
        return msgspec.structs.replace(grant, mps=readiness.folders)

    def confirm_ready(self, grant: Grant) -> None:
        """Check again that MPS is ready, right before the grant is delivered. Raises MpsNotReady."""
        readiness = self._check_readiness(grant, self._required_state(grant))
        if readiness.problem or readiness.folders != grant.mps:
            raise MpsNotReady(readiness.problem or _DAEMON_CHANGED)

    def _wait_ready(
        self, grant: Grant, required_state: MpsState | None, readiness: Readiness, may_wait: Callable[[], bool]
    ) -> Readiness:
        deadline = self._clock.now() + MAX_WAIT_SECONDS
        while readiness.problem and self._clock.now() < deadline and may_wait():
            self._clock.sleep(_POLL_SECONDS)
            readiness = self._check_readiness(grant, required_state)
        return readiness

    def _required_state(self, grant: Grant) -> MpsState | None:
        """The MPS state to wait for; None if the container starts without regard to MPS. Raises MpsNotReady."""
        if not grant.pod_shares:
            return None
        demand = _parse_demand(grant)
        has_manager = self.has_manager()
        if demand is Isolation.MPS and not has_manager:
            reason = (
                "--mps=never"
                if self._setting is HasManager.NEVER
                else f"no manager has run here ({self._root} is empty)"
            )
            raise MpsNotReady(
                f"pod {grant.pod} requires MPS ({names.ISOLATION}), which this node does not have: {reason}; create it "
                f"again without the annotation, or on a node where cardwise-mps runs"
            )
        if not has_manager:
            return None
        return MpsState.READY if demand.uses_mps else MpsState.OFF

    def has_manager(self) -> bool:
        """Whether this node has an MPS manager, running or not.

        After a reboot the kubelet may start a container before the manager runs. Even then the container must not run
        without MPS.
        """
        if self._setting is not HasManager.SEEN:
            return self._setting is HasManager.ALWAYS
        on_disk = self._manager_mark_file.exists()
        self._has_manager = self._has_manager or on_disk or (self._root / mps.LOCK).exists()
        if self._has_manager and not on_disk:
            with contextlib.suppress(OSError):  # after a failure, the manager is forgotten at the next reboot
                self._manager_mark_file.touch()
        return self._has_manager

    def _check_readiness(self, grant: Grant, required_state: MpsState | None) -> Readiness:
        if required_state is None:
            is_closed = any(mpsfiles.is_closed_by_former_manager(self._root, share.uuid) for share in grant.shares)
            return Readiness(mps.CLOSED_BY_FORMER_MANAGER if is_closed and not grant.is_agent else None)
        if grant.is_agent:
            return self._check_for_agent(grant, required_state)
        if required_state is MpsState.OFF or self._is_unavailable(grant):
            return Readiness(self._unready_reason(grant.shares, MpsState.OFF))
        folders = self._find_daemon_folders(grant.shares)
        if None in folders:
            return Readiness(self._unready_reason(grant.shares, MpsState.READY) or _DAEMON_CHANGED)
        if len(folders) > 1:
            return self._check_several_cards(grant)
        return Readiness(self._unready_reason(grant.shares, MpsState.READY), tuple(map(str, folders)))

    def _is_unavailable(self, grant: Grant) -> bool:
        """Whether the container starts without MPS, because MPS is unavailable on all its cards."""
        if _parse_demand(grant) is Isolation.MPS:
            return False
        statuses = [mpsfiles.find_daemon_state(self._root, share.uuid)[1] for share in grant.shares]
        return all(status is not None and status.state is MpsState.UNAVAILABLE for status in statuses)

    def _check_several_cards(self, grant: Grant) -> Readiness:
        """Check a container with cards of several daemons: a process can use only one daemon."""
        reason = (
            f"pod {grant.pod} has shares of several GPUs in one container, each with an MPS daemon of its own; a "
            "process can use one (cardwise-mps --scope=node has one for all)"
        )
        if _parse_demand(grant) is Isolation.MPS:
            return Readiness(reason)
        off_problem = self._unready_reason(grant.shares, MpsState.OFF)
        return Readiness(
            f"{reason}; the container starts without MPS once MPS is off on all of them: {off_problem}"
            if off_problem
            else None
        )

    def _check_for_agent(self, grant: Grant, required_state: MpsState) -> Readiness:
        """Check the start of the share agent. The agent waits for MPS itself, so it only needs the daemons' folders."""
        if required_state is MpsState.OFF:
            return Readiness()
        shares_by_container = grant.assignment().containers.values()
        if any(
            len(folders := self._find_daemon_folders(shares)) > 1 and None not in folders
            for shares in shares_by_container
        ):
            return Readiness()  # a container with cards of several daemons starts only without MPS
        folders = self._find_daemon_folders(grant.pod_shares)
        if None in folders:
            return Readiness(self._unready_reason(grant.pod_shares, required_state) or _DAEMON_CHANGED)
        return Readiness(folders=tuple(map(str, folders)))

    def _find_daemon_folders(self, shares: Sequence[CardShare]) -> list[Path | None]:
        """The folders of the daemons that serve these cards, each once; None for a card without a daemon."""
        return list(dict.fromkeys(mpsfiles.find_daemon_state(self._root, share.uuid)[0] for share in shares))

    def _unready_reason(self, shares: Sequence[CardShare], required_state: MpsState) -> str | None:
        problems = (
            mpsfiles.unready_reason(
                self._root, share.uuid, required_state=required_state, memory_limit=share.mem, clock=self._mps_clock
            )
            for share in shares
        )
        return next((problem for problem in problems if problem is not None), None)


def _parse_demand(grant: Grant) -> Isolation:
    """What the pod demands; `Isolation.ADVISORY` without the annotation. Raises MpsNotReady."""
    try:
        return Isolation(grant.isolation) if grant.isolation else Isolation.ADVISORY
    except ValueError as error:
        raise MpsNotReady(
            f"annotation {names.ISOLATION}: {quote_text(grant.isolation)} is not a tier of isolation; create the pod "
            f"again with one of {', '.join(Isolation)}"
        ) from error
