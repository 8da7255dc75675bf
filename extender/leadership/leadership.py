"""Leadership: of several extenders only the holder of the Lease serves calls, and only once it knows all Bindings of
the other extenders.

A *leader epoch* is the time from acquiring the Lease to losing it. When an epoch begins, pods and quotas are listed
again, because the watch may not show yet which pods another extender has just bound. A call that began in one epoch
posts nothing in another epoch: the binder checks the epoch before every write. A Binding that was sent in time may be
carried out late, if the process, the network or an API server was paused. Then only the API server can refuse it. So
each Binding names the pod's resourceVersion, which the new leader changes (`fence`). It also names the *fencing token*
of the epoch, which the policy `fencing.cardwise.dev` compares with the Lease.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.leases.lease import LeaderElector, new_identity
from cardwise.supervision import supervised_thread
from extender.cache import statelock
from extender.leadership.fence import Fence
from extender.records.podref import PodRef
from extender.state import State

_log = structlog.get_logger(__name__)

_SAFETY_SECONDS = 1.0  # a write must end so many seconds before the Lease expires
_CHECK_SECONDS = 0.5  # seconds between two checks of the Lease; usually the elector's thread reports changes sooner
_RENEWALS_PER_LEASE = 6  # renewals of the Lease in one lease duration
_MAX_PARALLEL_FENCES = 2  # parallel writes to unfenced pods, so that the Lease is still renewed in time
_FENCE_RETRY_SECONDS = 20.0  # seconds until pods that could not be changed when the epoch began are tried again

CatchUp = Callable[[Callable[[], bool]], bool]
"""Waits until the state has all earlier writes, or its argument returns False. Returns whether the state has them."""
FenceClaims = Callable[[Callable[[], bool]], bool]
"""Deletes the unfinished ResourceClaims of former leaders. Returns False if its argument returned False before."""


class LeaseBlockers(Protocol):
    """Returns why this process should leave the Lease to other extenders (`Informers.lease_blockers`).

    Each reason is one line.
    """

    def __call__(self, *, holds: bool, leads: bool) -> list[str]: ...


def _no_blockers(*, holds: bool, leads: bool) -> list[str]:
    del holds, leads
    return []


@dataclass(frozen=True, slots=True)
class Denial:
    """Why no call can be served now. `served_elsewhere`: whether another extender may serve the call."""

    text: str
    served_elsewhere: bool


class Leadership:
    """Whether this extender serves calls, and whether it may post Bindings. Thread-safe.

    This class is for a single extender, which always serves (--no-lease). `LeaseLeadership` is for several extenders.
    """

    def start(self) -> None:
        """Start in the process that serves, after the fork."""

    def stop(self) -> None:
        """Stop posting, and release the Lease once the writes in progress have ended."""

    def epoch(self) -> int | None:
        """The current leader epoch; None if this extender serves no calls."""
        return 0

    def is_uninterrupted(self) -> bool:
        """Whether this extender was also the last leader, so that its state is still complete."""
        return True

    def denial(self) -> Denial | None:
        """Why calls are not served; None if this extender serves calls."""
        return None

    def fencing_token(self, epoch: int) -> str | None:
        """The text that each Binding of this epoch contains; None if no policy compares it."""
        del epoch
        return None

    @contextmanager
    def allow_post(self, epoch: int) -> Iterator[float]:
        """Context manager for one write. Yields the seconds that the write may take; 0: do not write."""
        del epoch
        yield math.inf

    def summary(self) -> str:
        """One line about the leadership, for `/readyz?verbose`."""
        return "leader: there is no lease (--no-lease)"


class LeaseLeadership(Leadership):
    """Leadership by a Lease.

    name: "namespace/name" of the Lease.
    elect: makes the elector, which calls `on_lease_changed`, `can_lead` and `is_settled`. `elect` is called after the
        fork, see `lease.new_identity`.
    catch_up: see `CatchUp`.
    blockers: see `LeaseBlockers`.
    fence_claims: see `FenceClaims`.
    """

    def __init__(
        self,
        name: str,
        elect: Callable[["LeaseLeadership"], LeaderElector],
        state: State,
        *,
        catch_up: CatchUp,
        fence: Fence,
        blockers: LeaseBlockers = _no_blockers,
        fence_claims: FenceClaims = lambda _: True,
        clock: Clock = SYSTEM,
    ) -> None:
        self._name = name
        self._elect = elect
        self._state = state
        self._catch_up = catch_up
        self._fence = fence
        self._blockers = blockers
        self._fence_claims = fence_claims
        self._clock = clock
        self._elector: LeaderElector | None = None
        self._epoch = 0  # the current leader epoch, after catching up; 0 if this process does not lead
        self._fenced_epoch = 0  # the epoch for which `_fence_former_epochs` has succeeded, even if a later step failed
        self._fencing_token: tuple[int, str | None] = (0, None)  # an epoch and its fencing token
        self._tenure = 0  # the elector's tenure when the last epoch began
        self._fenced: tuple[int, set[str]] = (0, set())  # a tenure, and the pods fenced in it so far
        self._unfenced: frozenset[str] = frozenset()  # the UIDs of pods that were not fenced since the epoch began
        self._fence_retry_at = 0.0  # when the extender next tries to fence these pods
        self._posts = 0
        self._posts_changed = threading.Condition()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = supervised_thread(self._run, "leadership", clock)

    def start(self) -> None:
        self._elector = self._elect(self)
        self._elector.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._changed.set()
        if self._elector is not None:
            self._elector.stop()
        if self._thread.is_alive():
            self._clock.join(self._thread, 5.0)

    def epoch(self) -> int | None:
        epoch = self._epoch
        return epoch if self._elector is not None and self._elector.holds_lease(epoch=epoch) else None

    def is_uninterrupted(self) -> bool:
        return self._elector is not None and self._elector.tenure == self._tenure

    def denial(self) -> Denial | None:
        elector = self._elector
        if elector is not None and elector.is_leader:
            if elector.holds_lease(epoch=self._epoch):
                return None
            return Denial(
                "not ready: still listing the pods that a former leader may have bound", served_elsewhere=False
            )
        holder = elector.holder if elector is not None else None
        if elector is not None and holder == elector.identity:
            return Denial(
                f"not the leader: its period of the lease {self._name} has not begun or is over", served_elsewhere=True
            )
        holder_text = "no extender" if holder == "" else holder or "another extender or none"
        return Denial(f"not the leader: {holder_text} holds the lease {self._name}", served_elsewhere=True)

    def lease_blockers(self) -> list[str]:
        """Why this process neither acquires nor renews the Lease, one line for each reason."""
        holds = self._elector is not None and self._elector.is_leader
        return self._blockers(holds=holds, leads=self.epoch() is not None)

    def fencing_token(self, epoch: int) -> str | None:
        current, fencing_token = self._fencing_token
        return fencing_token if current == epoch else None

    @contextmanager
    def allow_post(self, epoch: int) -> Iterator[float]:
        with self._posts_changed:
            self._posts += 1  # before the check below: `stop` waits until this is 0 again
        remaining = self._remaining_seconds(epoch)
        try:
            yield remaining
        finally:
            with self._posts_changed:
                self._posts -= 1
                self._posts_changed.notify_all()

    def summary(self) -> str:
        denial = self.denial()
        text = f"leader: this extender holds the lease {self._name}" if denial is None else denial.text
        blockers = self.lease_blockers()
        return f"{text}; this extender leaves the lease to others: {blockers[0]}" if blockers else text

    def step(self) -> None:
        """Begin a leader epoch, once this process holds the Lease and has read all pods that other extenders bound."""
        elector = self._elector
        if elector is None or not elector.is_leader:
            return
        epoch = elector.epoch

        def still_leads() -> bool:
            return not self._stopping.is_set() and elector.holds_lease(epoch=epoch)

        if epoch == self._epoch:
            self._fence_remaining(still_leads)
            return
        tenure, fencing_token = elector.tenure, f"{self._name}/{elector.token or ''}/{elector.identity}"
        if still_leads() and (
            self._fenced_epoch == epoch
            or (self._fence_former_epochs(tenure, fencing_token, still_leads) and self._fence_claims(still_leads))
        ):
            self._fenced_epoch = epoch
            self._state.forget_plans()
            self._state.warm_caches()
            self._state.gangs.plan_partly_bound_gangs()
            with self._state.queue() as queue:
                queue.begin_retry_window()
                queue.requeue_all_after_takeover()
            self._fencing_token, self._tenure, self._fenced = (epoch, fencing_token), tenure, (0, set())
            self._fence_retry_at = self._clock.now() + _FENCE_RETRY_SECONDS
            self._epoch = epoch
            _log.info("became leader; serving scheduler calls", lease=self._name, epoch=epoch)

    def _fence_remaining(self, still_leads: Callable[[], bool]) -> None:
        """Try again to fence the pods that could not be fenced when the epoch began.

        Until they are fenced, an earlier Binding may still bind them. Pods that are no longer pending need not be
        fenced.
        """
        if not self._unfenced or self._clock.now() < self._fence_retry_at:
            return
        waiting = [pod for pod in self._pending_pods() if pod.uid in self._unfenced]
        summary = self._fence.fence_pods(
            waiting, self._fencing_token[1], still_leads, retry=False, at_once=_MAX_PARALLEL_FENCES
        )
        if summary is not None:
            self._unfenced = summary.unfenced
        self._fence_retry_at = self._clock.now() + _FENCE_RETRY_SECONDS

    def _pending_pods(self) -> list[PodRef]:
        """The pending pods for which kube-scheduler may have called bind."""
        with self._state.queue() as queue:
            return queue.bindable_pods()

    def _fence_former_epochs(self, tenure: int, fencing_token: str, still_leads: Callable[[], bool]) -> bool:
        """List the pods that were bound in former epochs, and fence the pending pods. Returns whether both succeeded.

        Afterwards no Binding of a former epoch can bind a pod, except the `_unfenced` pods.

        One list before the fencing is enough. Former leaders had lost the Lease by then, so none of them has posted a
        Binding for a pod that is created or loses its gate after the list. A second list is needed only if the fencing
        shows that a Binding has bound a pod after the first list.
        """
        if not self._catch_up(still_leads):
            return False
        if self._elector is not None and self._elector.is_successor and not self._epoch:
            # The former leader has released the Lease after the responses to all requests of its epoch and of earlier
            # epochs. This process has sent no Binding yet.
            return True
        pending_pods, uids_before = self._pending_pods(), frozenset[str]()
        if tenure != self._fenced[0]:
            self._fenced = tenure, set()
        fenced = self._fenced[1]
        if tenure == self._tenure:
            # No other process has had the Lease since this one: only Bindings of this process may be on their way.
            pending_uids, uids_before = self._state.pending_bindings(), self._unfenced
            pending_pods = [pod for pod in pending_pods if pod.uid in pending_uids]
        else:
            # With a slow API server the Lease may end before all pods are fenced. If no other process has had the Lease
            # since, the next attempt continues with the remaining pods.
            pending_pods = [pod for pod in pending_pods if pod.uid not in fenced]
        summary = self._fence.fence_pods(pending_pods, fencing_token, still_leads, fenced=fenced)
        if summary is None:
            return False
        self._unfenced = summary.unfenced | uids_before
        # If a Binding has bound a pod after the list, the state does not show this yet: list again.
        return not summary.landed or self._catch_up(still_leads)

    def _remaining_seconds(self, epoch: int) -> float:
        if self._elector is None:
            return 0.0
        remaining = self._elector.remaining_seconds() - _SAFETY_SECONDS
        # One call checks the time and the epoch: between two calls one epoch could end and another begin.
        return remaining if remaining > 0 and self._elector.holds_lease(remaining, epoch=epoch) else 0.0

    def can_lead(self) -> bool:
        """Whether this process may acquire or renew the Lease: it is not stuck, and its watches are current."""
        return self._state.lock_held_seconds() < statelock.YIELD_SECONDS and not self.lease_blockers()

    def is_settled(self) -> bool:
        """Whether no Binding of the ended epoch or of earlier epochs can still bind a pod."""
        elector = self._elector
        if elector is None or elector.epoch != self._epoch:
            return False
        return not (self._posts or self._unfenced or self._state.pending_bindings())

    def on_lease_changed(self, leading: bool) -> None:
        """Handle the event that the Lease was acquired (`leading`) or lost (not `leading`)."""
        self._changed.set()
        if leading:
            return
        self._state.forget_plans()
        if self._stopping.is_set():
            # Wait for the writes in progress: only then may the Lease be released. If this takes too long, the process
            # ends, and the Lease expires.
            with self._posts_changed:
                self._clock.wait_for(self._posts_changed, lambda: not self._posts, None)

    def _run(self) -> None:
        backoff, pause = Backoff(initial=_CHECK_SECONDS), _CHECK_SECONDS
        while not self._stopping.is_set():
            self._clock.wait(self._changed, pause)
            self._changed.clear()
            try:
                self.step()
                backoff.reset()
                pause = _CHECK_SECONDS
            except Exception:  # noqa: BLE001 - the outermost loop: without it no epoch would ever begin again
                pause = backoff.next_delay(_CHECK_SECONDS)
                _log.exception("failed to start as leader; trying again", retry_in=round(pause, 1))


def make_lease_leadership(
    client: KubeClient,
    namespace: str,
    name: str,
    *,
    duration: float,
    state: State,
    catch_up: CatchUp,
    fence: Fence,
    blockers: LeaseBlockers,
    fence_claims: FenceClaims = lambda _: True,
    clock: Clock = SYSTEM,
    lease_clock: Clock = BOOT,
) -> LeaseLeadership:
    """Make the leadership of one of several processes that use the same Lease.

    namespace, name: the namespace and the name of the Lease.
    duration: seconds for which an acquired or renewed Lease is valid.
    lease_clock: a clock that continues while the node is suspended.
    """

    def elect(leadership: LeaseLeadership) -> LeaderElector:
        return LeaderElector(
            client,
            namespace,
            name,
            new_identity(),
            duration=duration,
            renew_every=min(2.0, duration / _RENEWALS_PER_LEASE),
            clock=lease_clock,
            on_change=leadership.on_lease_changed,
            can_act=leadership.can_lead,
            settled=leadership.is_settled,
        )

    return LeaseLeadership(
        f"{namespace}/{name}",
        elect,
        state,
        catch_up=catch_up,
        fence=fence,
        blockers=blockers,
        fence_claims=fence_claims,
        clock=clock,
    )
