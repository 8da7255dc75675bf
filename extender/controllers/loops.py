"""The background threads of the extender: they expire reservations, look up Bindings without a response, requeue pods
and write statuses.

The state and the controllers decide which work is due. Writes to objects of other owners are made in separate threads,
because a slow write must not delay the expiry of plans.
"""

from collections.abc import Callable, Sequence

import structlog
from prometheus_client import Counter

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.backoff import LEADER_RETRY_AFTER, Backoff
from cardwise.kube.client import KubeClient
from cardwise.runtime.loops import Loop, run_steps
from extender.binding import binder
from extender.controllers.gangcontroller import GangController
from extender.controllers.nominationwriter import NominationWriter
from extender.leadership.fence import Fence
from extender.leadership.leadership import Leadership
from extender.state import State

_log = structlog.get_logger(__name__)

_STEP_SECONDS = 0.5
_REPORT_SECONDS = 0.25
_GANG_SECONDS = 0.1
_NOMINATE_SECONDS = 0.02
_CLAIM_SECONDS = 0.02
_REQUEUE_TIMEOUT = 1.0  # seconds for the write to a node; then another node is tried
_MAX_REQUEUE_TRIES = 8  # maximum number of nodes that are tried without a pause
_REQUEUE_SECONDS = 3.0  # seconds of such tries after which there is a pause
# Seconds between two steps after which this process was paused. kube-scheduler waits as long for a call, so a call may
# have timed out in the pause.
_STALLED_SECONDS = 1.0
_STOP_SECONDS = 5.0

Step = Callable[[], None]

THREAD_FAILURES = Counter(
    "cardwise_extender_thread_failures",
    "Unexpected errors from which a thread recovered; see the log",
    ["thread"],
)


class Loops:
    """The threads. Start them in the process that serves.

    There is one thread for each argument with steps, one for `step` and one for `requeue_pods`. Each thread repeats its
    steps. PodGroups have their own thread, since a tenant can make writes to PodGroups slow. Preemption has its own
    thread, too. The victims of a big gang need hundreds of calls. These must not delay the work for pods on
        overcommitted cards, or for pods without a card.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        *,
        reports: Sequence[Step] = (),
        statuses: Sequence[Step] = (),
        podgroups: Sequence[Step] = (),
        gangs: GangController | None = None,
        evictions: Sequence[Step] = (),
        preemption: Sequence[Step] = (),
        nominating: NominationWriter | None = None,
        workload: Sequence[Step] = (),
        claims: Sequence[Step] = (),
        leadership: Leadership | None = None,
        fence: Fence | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._fence = fence or Fence(client, clock)
        self._state = state
        self._leadership = leadership or Leadership()
        self._clock = clock
        self._idle_since: float | None = None
        self._requeue_backoff = Backoff(initial=0.5, cap=2.0, max_retry_after=LEADER_RETRY_AFTER)
        self._requeue_not_before = float("-inf")
        self._gangs = gangs
        self._nominating = nominating
        threads: dict[str, tuple[float, Sequence[Step]]] = {
            "expiry": (_STEP_SECONDS, [self.step]),
            "requeue": (_STEP_SECONDS, [self.requeue_pods]),
            "reports": (_REPORT_SECONDS, reports),
            "statuses": (_REPORT_SECONDS, statuses),
            "podgroups": (_REPORT_SECONDS, podgroups),
            "evictions": (_STEP_SECONDS, evictions),
            "preemption": (_STEP_SECONDS, preemption),
            "workload": (_STEP_SECONDS, workload),
            "claims": (_CLAIM_SECONDS, claims),
            "gangs": (_GANG_SECONDS, [gangs.step] if gangs is not None else []),
            "nominations": (_NOMINATE_SECONDS, [nominating.step] if nominating is not None else []),
        }
        failed = "a step failed; the loop continues"
        self._loops = [
            Loop(name, run_steps(steps), failed=failed, failures=THREAD_FAILURES, every=seconds, clock=clock)
            for name, (seconds, steps) in threads.items()
            if steps
        ]

    def start(self) -> None:
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        for loop in self._loops:
            loop.request_stop()
        until = self._clock.now() + _STOP_SECONDS
        for loop in self._loops:
            loop.stop(max(0.0, until - self._clock.now()))
        if self._gangs is not None:
            self._gangs.stop()
        if self._nominating is not None:
            self._nominating.stop()

    def step(self) -> None:
        """Compute classes of cards again, end expired reservations, and look up Bindings without a response."""
        if self._idle_since is not None and self._clock.now() - self._idle_since > _STALLED_SECONDS:
            # After a time-out of filter kube-scheduler tries the pod again, but not after a time-out of preempt.
            _log.warning("this process was paused; requeueing pending pods")
            with self._state.queue() as queue:
                queue.requeue_all_after_takeover()
        self._state.classify_cards()
        self._state.expire_reservations()
        binder.confirm_bindings(
            self._state.overdue_bindings(), self._fence, self._state, self._leadership, clock=self._clock
        )
        self._idle_since = self._clock.now()

    def requeue_pods(self) -> None:
        """Annotate the node from `State.next_requeue_node`, so that kube-scheduler tries the pending pods again.

        If the write fails because of the node, other nodes are tried at once. For example, the node's annotations may
        be at the API's limit, or the Node object may be too large for a quick write. After an error of the API server
        itself, the next node is tried after a pause.
        """
        began = self._clock.now()
        if began < self._requeue_not_before:
            return
        retry_after = None
        for _ in range(_MAX_REQUEUE_TRIES):
            node = self._state.next_requeue_node()
            if node is None:
                return
            error = requeue_by_node(self._client, node, self._clock)
            with self._state.queue() as queue:
                if error is None:
                    queue.on_requeued(node)
                else:
                    queue.on_requeue_failed(node)
            if error is None:
                self._requeue_backoff.reset()
                return
            retry_after = error.retry_after
            if errors.would_fail_other_writes(error) or self._clock.now() - began > _REQUEUE_SECONDS:
                break
        self._requeue_not_before = self._clock.now() + self._requeue_backoff.next_delay(retry_after)


def requeue_by_node(client: KubeClient, node: str, clock: Clock) -> errors.KubeError | None:
    """Change an annotation of the node, so that kube-scheduler tries the pending pods again.

    Returns the error if the write failed, else None.
    """
    patch = {"metadata": {"annotations": {names.REQUEUE: str(clock.wall_ns())}}}
    try:
        client.patch(paths.nodes(node), patch, "merge", timeout=_REQUEUE_TIMEOUT)
    except errors.KubeError as error:
        _log.warning(
            "failed to requeue pending pods by changing this node; trying another node", node=node, error=str(error)
        )
        return error
    _log.debug("requeued pending pods", node=node)
    return None
