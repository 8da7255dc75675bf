"""Waits until MPS is ready on a container's card before the container starts, and says which daemon it connects to.

The rules are those of docs/design/0005-mps.md; what makes them true is read from the node's own files at each start, so
nothing here needs the API server, and nothing is remembered but that this node has a manager at all.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api import mps
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.mps import Mode, MpsState
from cardwise.core.values.wording import quoted
from cardwise.gpus import mpsfiles
from deviceplugin.grants.grants import Grant

SECONDS = 10.0  # of the kubelet's 30 for PreStartContainer
_PAUSE = 0.2
_SEEN = "mps-manager-seen"
_CHANGED = "MPS has changed on its card in this moment"


class NotYet(Exception):
    """The container may not start now; the message is for the pod's events."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """`problem`: why not now, "" if it may start. `homes`: the folders of the daemons that it is given."""

    problem: str = ""
    homes: tuple[str, ...] = ()


class MpsWait:
    """`wait` before a container starts, `confirm` right before its grant is delivered."""

    def __init__(
        self, setting: Mode, root: Path, state_dir: Path, clock: Clock = SYSTEM, mps_clock: Clock = BOOT
    ) -> None:
        """`state_dir` must survive reboots; `mps_clock` is the manager's. Raises OSError."""
        self._setting = setting
        self._root = root
        self._seen = state_dir / _SEEN
        self._managed = False
        self._clock = clock
        self._mps_clock = mps_clock
        if setting is Mode.OFF:
            self._seen.unlink(missing_ok=True)
        self.has_manager()  # also where nothing starts before the next reboot

    def wait(
        self, grant: Grant, seat: Callable[[], bool], leave: Callable[[], None], active: Callable[[], bool]
    ) -> Grant:
        """The grant with the daemons that its container is given. Raises NotYet.

        `seat` says whether one more call may wait; `leave` gives that back. `active`: somebody waits for the answer.
        """
        wanted = self._wanted(grant)
        readiness = self._look(grant, wanted)
        if readiness.problem and seat():
            try:
                readiness = self._in_time(grant, wanted, readiness, active)
            finally:
                leave()
        if readiness.problem:
            raise NotYet(readiness.problem)
        return msgspec.structs.replace(grant, mps=readiness.homes)

    def confirm(self, grant: Grant) -> None:
        """Whether it still holds. Raises NotYet."""
        readiness = self._look(grant, self._wanted(grant))
        if readiness.problem or readiness.homes != grant.mps:
            raise NotYet(readiness.problem or _CHANGED)

    def _in_time(
        self, grant: Grant, wanted: MpsState | None, readiness: Readiness, active: Callable[[], bool]
    ) -> Readiness:
        deadline = self._clock.now() + SECONDS
        while readiness.problem and self._clock.now() < deadline and active():
            self._clock.sleep(_PAUSE)
            readiness = self._look(grant, wanted)
        return readiness

    def _wanted(self, grant: Grant) -> MpsState | None:
        """The state to wait for; None where MPS is not in play. Raises NotYet."""
        if not grant.pod_shares:
            return None
        mode = _mode(grant.mps_mode, self._setting)
        here = self.has_manager()
        if mode is Mode.REQUIRED and not here:
            why = "--mps=off" if self._setting is Mode.OFF else f"no manager has run here ({self._root} is empty)"
            raise NotYet(
                f"pod {grant.pod} requires MPS ({mps.MODE}), which this node does not have: {why}; create it again "
                f"without, or on a node where cardwise-mps runs"
            )
        if not here:
            return None
        return MpsState.OFF if mode is Mode.OFF else MpsState.READY

    def has_manager(self) -> bool:
        """Whether this node has an MPS manager, running or not. After a reboot a container may start before it, and
        would run without MPS if only one that runs counted.
        """
        if self._setting is not Mode.PREFERRED:
            return self._setting is Mode.REQUIRED
        on_disk = self._seen.exists()
        self._managed = self._managed or on_disk or (self._root / mps.LOCK).exists()
        if self._managed and not on_disk:
            with contextlib.suppress(OSError):  # then the next reboot does not know, but this process does
                self._seen.touch()
        return self._managed

    def _look(self, grant: Grant, wanted: MpsState | None) -> Readiness:
        if wanted is None:
            closed = any(mpsfiles.is_left_closed(self._root, share.uuid) for share in grant.shares)
            return Readiness(mps.LEFT_CLOSED if closed and not grant.is_agent else "")
        if grant.is_agent:
            return self._look_for_agent(grant, wanted)
        if wanted is MpsState.OFF:
            return Readiness(self._problem(grant.shares, MpsState.OFF))
        homes = self._homes(grant.shares)
        if None in homes:
            return Readiness(self._problem(grant.shares, MpsState.READY) or _CHANGED)
        if len(homes) > 1:
            return self._look_at_several(grant)
        return Readiness(self._problem(grant.shares, MpsState.READY), tuple(map(str, homes)))

    def _look_at_several(self, grant: Grant) -> Readiness:
        """Each card has a daemon of its own, and a process can go through one only."""
        what = (
            f"pod {grant.pod} has shares of several cards in one container, each with an MPS daemon of its own; a "
            "process can use one (cardwise-mps --scope=node has one for all)"
        )
        if _mode(grant.mps_mode, self._setting) is Mode.REQUIRED:
            return Readiness(what)
        why = self._problem(grant.shares, MpsState.OFF)
        return Readiness(f"{what}; it starts without MPS once it is off on all of them: {why}" if why else "")

    def _look_for_agent(self, grant: Grant, wanted: MpsState) -> Readiness:
        """It waits by itself; it only needs something to look at."""
        if wanted is MpsState.OFF:
            return Readiness()
        by_container = grant.assignment().containers.values()
        if any(len(homes := self._homes(shares)) > 1 and None not in homes for shares in by_container):
            return Readiness()  # such a container can only start without MPS
        homes = self._homes(grant.pod_shares)
        if None in homes:
            return Readiness(self._problem(grant.pod_shares, wanted) or _CHANGED)
        return Readiness(homes=tuple(map(str, homes)))

    def _homes(self, shares: Sequence[CardShare]) -> list[Path | None]:
        """The folders of the daemons that serve these cards, each once."""
        return list(dict.fromkeys(mpsfiles.find_daemon_state(self._root, share.uuid)[0] for share in shares))

    def _problem(self, shares: Sequence[CardShare], wanted: MpsState) -> str:
        problems = (
            mpsfiles.unready_reason(
                self._root, share.uuid, required_state=wanted, memory_limit=share.mem, clock=self._mps_clock
            )
            for share in shares
        )
        return next(filter(None, problems), "")


def _mode(said: str, setting: Mode) -> Mode:
    """What holds for a pod: its own word, else the node's. Raises NotYet."""
    try:
        return Mode(said) if said else setting
    except ValueError as error:
        modes = ", ".join(Mode)
        raise NotYet(
            f"annotation {mps.MODE}: {quoted(said)} is no mode of MPS; create the pod again with one of {modes}"
        ) from error
