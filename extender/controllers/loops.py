"""Loops for what happens with time: holds end, lost answers to Bindings are looked up, pods are woken.

Apart because these are the loops of the extender's own; everything that they decide is decided in the state, or beside
it for what is told to the cluster. That has a thread of its own: no slow write of a status may keep a plan from ending.
"""

import threading
from collections.abc import Callable, Sequence

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.binding import binder
from extender.controllers.aheadwriter import AheadWriter
from extender.controllers.gangkeeper import GangKeeper
from extender.leadership.fence import Fence
from extender.leadership.leadership import Alone, Leadership
from extender.state import State

_log = structlog.get_logger(__name__)

_STEP_SECONDS = 0.5
_TELL_SECONDS = 0.25
_GANG_SECONDS = 0.1
_AHEAD_SECONDS = 0.02
_TOUCH_SECONDS = 2.0  # plans and ghosts wait for it to end
_STALLED_SECONDS = 2.0  # between two rounds: then calls of kube-scheduler, which waits a second, got no answer
_STOP_SECONDS = 5.0

Step = Callable[[], None]


class Loop:
    """A thread that takes all steps again and again. One that fails is logged and does not keep the others."""

    def __init__(self, name: str, seconds: float, steps: Sequence[Step], clock: Clock) -> None:
        self._name = name
        self._seconds = seconds
        self._steps = steps
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Says so; does not wait."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._clock.join(self._thread, max(0.0, seconds))

    def _run(self) -> None:
        while not self._clock.wait(self._stopping, self._seconds):
            for step in self._steps:
                try:
                    step()
                except Exception:  # noqa: BLE001 - see below
                    # The outermost loop: without it shares of lost pods would never be freed.
                    _log.exception("a step failed; the loop goes on", loop=self._name)


class Loops:
    """Start it in the process that serves. `tell`: steps that write to the cluster what is in use; `tell_gangs`: those
    that write PodGroups; `keep`: who looks after gangs; `evict`: who evicts; `nominate`: who nominates ahead; `learn`:
    who learns the workload.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        *,
        tell: Sequence[Step] = (),
        tell_gangs: Sequence[Step] = (),
        keep: GangKeeper | None = None,
        evict: Sequence[Step] = (),
        nominate: AheadWriter | None = None,
        learn: Sequence[Step] = (),
        leadership: Leadership | None = None,
        fence: Fence | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._fence = fence or Fence(client, clock)
        self._state = state
        self._leadership = leadership or Alone()
        self._clock = clock
        self._rests_since: float | None = None
        self._keep = keep
        self._nominate = nominate
        self._loops = [
            Loop("upkeep", _STEP_SECONDS, [self.step], clock),
            Loop("statuses", _TELL_SECONDS, tell, clock),
        ]
        if tell_gangs:
            self._loops.append(Loop("podgroups", _TELL_SECONDS, tell_gangs, clock))
        if evict:
            self._loops.append(Loop("evictions", _STEP_SECONDS, evict, clock))
        if learn:
            self._loops.append(Loop("workload", _STEP_SECONDS, learn, clock))
        if keep is not None:
            self._loops.append(Loop("gangs", _GANG_SECONDS, [keep.step], clock))
        if nominate is not None:
            self._loops.append(Loop("nominating", _AHEAD_SECONDS, [nominate.step], clock))

    def start(self) -> None:
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        for loop in self._loops:
            loop.stop()
        until = self._clock.now() + _STOP_SECONDS
        for loop in self._loops:
            loop.join(until - self._clock.now())
        if self._keep is not None:
            self._keep.stop()
        if self._nominate is not None:
            self._nominate.stop()

    def step(self) -> None:
        """One round."""
        if self._rests_since is not None and self._clock.now() - self._rests_since > _STALLED_SECONDS:
            # kube-scheduler comes back by itself to pods whose filter timed out, but not to those whose preempt did.
            _log.warning("this process stood still; waiting pods are tried again")
            self._state.waiters.wake_all()
        binder.look_up(self._fence, self._state, self._leadership, clock=self._clock)
        node = self._state.waiters.touch_due()
        if node is not None and not touch(self._client, node, self._clock):
            self._state.waiters.touch_failed(node)
        self._rests_since = self._clock.now()


def touch(client: KubeClient, node: str, clock: Clock) -> bool:
    """Changes an annotation of the node, which makes kube-scheduler try the waiting pods again; whether it could."""
    patch = {"metadata": {"annotations": {names.NODE_CHANGED: str(clock.wall_ns())}}}
    try:
        client.patch(paths.nodes(node), patch, "merge", timeout=_TOUCH_SECONDS)
    except errors.KubeError as error:
        _log.warning("cannot wake waiting pods", node=node, error=str(error))
        return False
    _log.debug("woke waiting pods", node=node)
    return True
