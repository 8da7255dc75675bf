"""Waits until MPS is ready on a container's card before the container starts, and returns its MPS daemons.

docs/design/0005-mps.md has the rules. Each start checks the rules with files on the node, without the API server. Only
one fact is saved: that this node has an MPS manager.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api import isolation, mps, names
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import mpsfiles
from cardwise.gpus.mpsfiles import CardState
from deviceplugin.grants.grants import Grant

MAX_WAIT_SECONDS = 10.0  # maximum wait for MPS; the kubelet waits 30 s for PreStartContainer
_POLL_SECONDS = 0.2
_MANAGER_MARK_FILE = "mps-manager-seen"
_DAEMON_CHANGED = "the MPS daemon of its GPU has just changed"


class HasManager(StrEnum):
    """Whether the node has an MPS manager, the option --mps.

    NEVER: the node will never have a manager. SEEN: it has one once one has run here. ALWAYS: it has one, also before
    one has run.
    """

    NEVER = "never"
    SEEN = "seen"
    ALWAYS = "always"


class MpsNotReady(Exception):
    """The container cannot start now; the message is for the pod's events."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a container may start with MPS.

    problem: why the container must not start now; None if it may start.
    folders: the folders of the MPS daemons that the container gets.
    """

    problem: str | None = None
    folders: tuple[str, ...] = ()


class _Need(NamedTuple):
    """What a container needs of MPS before it starts.

    demand: what its pod demands.
    required_state: the MPS state to wait for.
    is_met_without_mps: whether the demand is met if MPS is unavailable on the container's cards.
    """

    demand: Isolation
    required_state: MpsState
    is_met_without_mps: bool


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
        kernel_obstacles: Mapping[str, str | None],
        reserve_wait: Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]],
        is_active: Callable[[], bool],
    ) -> Grant:
        """Wait for MPS; returns the grant with the daemons that its container gets. Raises MpsNotReady.

        kernel_obstacles: why the driver limits no memory on a card, by UUID, as `isolation.kernel_limit_obstacle`.
        reserve_wait: reserves a wait slot for a waiting start, as `WaitSlots.reserve`.
        is_active: returns whether the kubelet still waits for the response.
        """
        need = self._find_need(grant, kernel_obstacles)
        readiness = self._check_readiness(grant, need)
        if readiness.problem:
            with reserve_wait() as has_slot:
                readiness = self._wait_ready(grant, need, readiness, lambda: has_slot() and is_active())
        if readiness.problem:
            raise MpsNotReady(readiness.problem)
        return msgspec.structs.replace(grant, mps=readiness.folders)

    def confirm_ready(self, grant: Grant, kernel_obstacles: Mapping[str, str | None]) -> None:
        """Check again that MPS is ready, right before the grant is delivered. Raises MpsNotReady."""
        readiness = self.check_readiness(grant, kernel_obstacles)
        if readiness.problem or readiness.folders != grant.mps:
            raise MpsNotReady(readiness.problem or _DAEMON_CHANGED)

    def check_readiness(self, grant: Grant, kernel_obstacles: Mapping[str, str | None]) -> Readiness:
        """Whether the container may start with MPS at present, without waiting."""
        try:
            return self._check_readiness(grant, self._find_need(grant, kernel_obstacles))
        except MpsNotReady as error:
            return Readiness(str(error))

    def _wait_ready(
        self, grant: Grant, need: _Need | None, readiness: Readiness, may_wait: Callable[[], bool]
    ) -> Readiness:
        deadline = self._clock.now() + MAX_WAIT_SECONDS
        while readiness.problem and self._clock.now() < deadline and may_wait():
            self._clock.sleep(_POLL_SECONDS)
            readiness = self._check_readiness(grant, need)
        return readiness

    def _find_need(self, grant: Grant, kernel_obstacles: Mapping[str, str | None]) -> _Need | None:
        """What the container needs of MPS; None if it starts without regard to MPS.

        Raises MpsNotReady if waiting does not help: the node cannot give the memory tier that the pod demands.
        """
        if not grant.pod_shares:
            return None
        try:
            demand = isolation.parse_isolation(grant.isolation) if grant.isolation else Isolation.ADVISORY
        except InvalidRequest as error:
            raise MpsNotReady(f"pod {grant.pod}: {error}; create the pod again") from error
        has_manager = self.has_manager()
        is_met_without_mps = True
        for shares in grant.assignment().containers.values() if grant.is_agent else (grant.shares,):
            obstacle = _describe_kernel_obstacle(shares, kernel_obstacles)
            whole, has_limit = all(share.whole for share in shares), obstacle is None
            if not isolation.is_met(demand, whole=whole, has_mps=has_manager, has_kernel_limit=has_limit):
                raise MpsNotReady(self._describe_unmet_demand(grant, demand, obstacle))
            is_met_without_mps &= isolation.is_met(demand, whole=whole, has_mps=False, has_kernel_limit=has_limit)
        if not has_manager:
            return None
        return _Need(demand, MpsState.READY if demand.uses_mps else MpsState.OFF, is_met_without_mps)

    def _describe_unmet_demand(self, grant: Grant, demand: Isolation, kernel_obstacle: str | None) -> str:
        """Why the node cannot give the memory tier that the pod demands. `kernel_obstacle`: why not by the driver."""
        if demand is Isolation.KERNEL:
            return (
                f"pod {grant.pod} demands {names.ISOLATION}: {demand}, and the driver does not limit its memory: "
                f"{kernel_obstacle}; create it again with a weaker demand, or on a node whose driver can do it"
            )
        reason = (
            "--mps=never" if self._setting is HasManager.NEVER else f"no manager has run here ({self._root} is empty)"
        )
        return (
            f"pod {grant.pod} requires MPS ({names.ISOLATION}), which this node does not have: {reason}; create it "
            f"again without the annotation, or on a node where cardwise-mps runs"
        )

    def has_manager(self) -> bool:
        """Whether this node has an MPS manager, running or not.

        After a reboot the kubelet may start a container before the manager runs. Even then the container must not run
        without MPS.
        """
        if self._setting is not HasManager.SEEN:
            return self._setting is HasManager.ALWAYS
        on_disk = self._manager_mark_file.exists()
        self._has_manager = self._has_manager or on_disk or (self._root / mps.LOCK_FILE).exists()
        if self._has_manager and not on_disk:
            with contextlib.suppress(OSError):  # after a failure, the manager is forgotten at the next reboot
                self._manager_mark_file.touch()
        return self._has_manager

    def _check_readiness(self, grant: Grant, need: _Need | None) -> Readiness:
        if need is None:
            is_closed = any(
                mpsfiles.is_left_exclusive_by_former_manager(self._root, share.uuid) for share in grant.shares
            )
            return Readiness(mps.CLOSED_BY_FORMER_MANAGER if is_closed and not grant.is_agent else None)
        shares = grant.pod_shares if grant.is_agent else grant.shares
        # Read once, so that all checks of a start are of the same states.
        states = {share.uuid: mpsfiles.find_daemon_state(self._root, share.uuid) for share in shares}
        starts_without_mps = need.required_state is MpsState.OFF or _has_whole_cards_only(grant, states.values())
        if grant.is_agent:
            return Readiness() if starts_without_mps else self._check_for_agent(grant, states)
        is_unavailable = all(
            status is not None and status.state is MpsState.UNAVAILABLE for _, status in states.values()
        )
        if starts_without_mps or (is_unavailable and need.is_met_without_mps):
            return Readiness(self._unready_reason(shares, states, MpsState.OFF))
        folders = _list_folders(shares, states)
        if None in folders:
            return Readiness(self._unready_reason(shares, states, MpsState.READY) or _DAEMON_CHANGED)
        if len(folders) > 1:
            return self._check_several_cards(grant, states, need)
        return Readiness(self._unready_reason(shares, states, MpsState.READY), tuple(map(str, folders)))

    def _check_several_cards(self, grant: Grant, states: Mapping[str, CardState], need: _Need) -> Readiness:
        """Check a container with cards of several daemons: a process can use only one daemon."""
        reason = (
            f"pod {grant.pod} has shares of several GPUs in one container, each with an MPS daemon of its own; a "
            "process can use one (cardwise-mps --scope=node has one for all)"
        )
        if not need.is_met_without_mps:
            return Readiness(reason)
        off_problem = self._unready_reason(grant.shares, states, MpsState.OFF)
        return Readiness(
            f"{reason}; the container starts without MPS once MPS is off on all of them: {off_problem}"
            if off_problem
            else None
        )

    def _check_for_agent(self, grant: Grant, states: Mapping[str, CardState]) -> Readiness:
        """Check the start of the share agent. The agent waits for MPS itself, so it only needs the daemons' folders."""
        shares_by_container = grant.assignment().containers.values()
        if any(
            len(folders := _list_folders(shares, states)) > 1 and None not in folders for shares in shares_by_container
        ):
            return Readiness()  # a container with cards of several daemons starts only without MPS
        folders = _list_folders(grant.pod_shares, states)
        if None in folders:
            return Readiness(self._unready_reason(grant.pod_shares, states, MpsState.READY) or _DAEMON_CHANGED)
        return Readiness(folders=tuple(map(str, folders)))

    def _unready_reason(
        self, shares: Sequence[CardShare], states: Mapping[str, CardState], required_state: MpsState
    ) -> str | None:
        problems = (
            mpsfiles.unready_reason_of(
                self._root,
                states[share.uuid],
                share.uuid,
                required_state=required_state,
                memory_limit=share.mem,
                clock=self._mps_clock,
            )
            for share in shares
        )
        return next((problem for problem in problems if problem is not None), None)


def _has_whole_cards_only(grant: Grant, states: Iterable[CardState]) -> bool:
    """Whether the pod runs without MPS, because it has only whole cards, each with an MPS daemon of its own.

    A daemon that serves all cards of the node goes on for other pods, and closes all these cards to processes without
    MPS.
    """
    return all(share.whole for share in grant.pod_shares) and not any(
        status is not None and status.scope is DaemonScope.NODE for _, status in states
    )


def _list_folders(shares: Sequence[CardShare], states: Mapping[str, CardState]) -> list[Path | None]:
    """The folders of the daemons that serve these cards, each once; None for a card without a daemon."""
    return list(dict.fromkeys(states[share.uuid][0] for share in shares))


def _describe_kernel_obstacle(shares: Sequence[CardShare], kernel_obstacles: Mapping[str, str | None]) -> str | None:
    """Why the driver does not limit the memory of a container with these shares; None if it does."""
    if len(shares) != 1:
        return "the driver limits shares of a single GPU only"
    return kernel_obstacles[shares[0].uuid]
