"""Leadership: of several extenders the one answers that holds the Lease and knows what the others have bound.

A *term* is one time of holding the Lease. At its beginning pods and quotas are listed anew, because the watch may not
have delivered yet what another extender has bound until a moment ago. A call that began in one term posts nothing in
another; the binder asks before every write. What was sent in time and comes late (the process, the network or an API
server stood still in between) only the API server can refuse: by the version of the pod, which a Binding names and the
beginning of a term changes (`fence`); and by the word of its term, which the policy `terms.cardwise.dev` compares with
the Lease.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.leases.lease import LeaderElector, identity
from extender.cache import statelock
from extender.leadership.fence import Fence
from extender.records.podref import PodRef
from extender.state import State

_log = structlog.get_logger(__name__)

_SAFETY_SECONDS = 1.0  # by which a write must have ended before the Lease does
_LOOK_SECONDS = 0.5  # between two looks at the Lease, whose own thread usually says it at once
_RENEWALS = 6  # in one duration
_PROVES_AT_ONCE = 2  # writes, beside all that a term has to do; the Lease is renewed meanwhile
_AGAIN_SECONDS = 20.0  # until what could not be changed when the term began is tried again

CatchUp = Callable[[Callable[[], bool]], bool]
"""Waits until all that was written before is known, as long as its argument is true; whether it is known."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Why no call can be answered now. `elsewhere`: another extender may answer it."""

    text: str
    elsewhere: bool


class Leadership:
    """Whether this extender answers, and what it may post; thread-safe. As it stands, the only extender there is has
    it: that one always answers (--no-lease).
    """

    def start(self) -> None:
        """In the process that serves."""

    def stop(self) -> None:
        """Nothing is posted any more; gives the Lease back once the writes under way have ended."""

    def term(self) -> int | None:
        """The term in which calls are answered now."""
        return 0

    def resumes(self) -> bool:
        """Whether nobody else has led since this extender did: it may go on with what it knows."""
        return True

    def denial(self) -> Denial | None:
        """Why they are not."""
        return None

    def word(self, term: int) -> str:
        """What a Binding of this term says of it; "" where nobody asks."""
        del term
        return ""

    @contextmanager
    def posting(self, term: int) -> Iterator[float]:
        """Around one write: the seconds that it may take. 0: it must not be made."""
        del term
        yield math.inf

    def summary(self) -> str:
        """A line for people."""
        return "leader: there is no lease (--no-lease)"


class ByLease(Leadership):
    """Who holds the Lease.

    `elect` makes the elector, which calls `on_change` and asks `able` and `settled`; after the fork, see
    `lease.identity`.
    """

    def __init__(
        self,
        name: str,
        elect: Callable[["ByLease"], LeaderElector],
        state: State,
        *,
        catch_up: CatchUp,
        fence: Fence,
        clock: Clock = SYSTEM,
    ) -> None:
        self._name = name
        self._elect = elect
        self._state = state
        self._catch_up = catch_up
        self._fence = fence
        self._clock = clock
        self._elector: LeaderElector | None = None
        self._term = 0  # the elector's epoch in which all is known; 0 for none
        self._settled_in = 0  # the epoch for which `_settle` is done, also where what follows has failed
        self._word = (0, "")  # of which term
        self._token = ""  # of the Lease, when the last term began
        self._void: tuple[str, set[str]] = ("", set())  # under which token of the Lease, by terms that did not begin
        self._unproven: frozenset[str] = frozenset()  # pods that could not be changed since it did
        self._again = 0.0  # when they are tried again
        self._posts = 0
        self._fewer = threading.Condition()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

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

    def term(self) -> int | None:
        term = self._term
        return term if self._elector is not None and self._elector.holds(epoch=term) else None

    def resumes(self) -> bool:
        return self._elector is not None and self._elector.token in ("", self._token)  # "": it is not known who has it

    def denial(self) -> Denial | None:
        elector = self._elector
        if elector is not None and elector.leader:
            if elector.holds(epoch=self._term):
                return None
            return Denial("not ready: still reading what another extender may have bound", elsewhere=False)
        holder = elector.holder if elector is not None else None
        if elector is not None and holder == elector.identity:
            return Denial(
                f"not the leader yet or any more: the lease {self._name} is too new or too old", elsewhere=True
            )
        who = "nobody" if holder == "" else holder or "another extender or nobody"
        return Denial(f"not the leader: {who} holds the lease {self._name}", elsewhere=True)

    def word(self, term: int) -> str:
        of, word = self._word
        return word if of == term else ""

    @contextmanager
    def posting(self, term: int) -> Iterator[float]:
        with self._fewer:
            self._posts += 1  # before it is asked whether it may: who stops waits for it
        left = self._left(term)
        try:
            yield left
        finally:
            with self._fewer:
                self._posts -= 1
                self._fewer.notify_all()

    def summary(self) -> str:
        denial = self.denial()
        if denial is not None:
            return denial.text
        return f"leader: this extender holds the lease {self._name}"

    def step(self) -> None:
        """Begins the term when the Lease is ours and all is known."""
        elector = self._elector
        if elector is None or not elector.leader:
            return
        epoch = elector.epoch

        def still() -> bool:
            return not self._stopping.is_set() and elector.holds(epoch=epoch)

        if epoch == self._term:
            self._prove(still)
            return
        token = elector.token
        word = f"{self._name}/{token}/{elector.identity}"
        if still() and (self._settled_in == epoch or self._settle(token, word, still)):
            self._settled_in = epoch
            self._state.forget_plans()
            self._state.warm()
            self._state.gangs.recover()
            with self._state.queue() as queue:
                queue.begin_turns()
                queue.move_all_of_others()
            self._word, self._token, self._void = (epoch, word), token, ("", set())
            self._again = self._clock.now() + _AGAIN_SECONDS
            self._term = epoch
            _log.info("answers from now on", lease=self._name, term=epoch)

    def _prove(self, still: Callable[[], bool]) -> None:
        """Changes the pods that could not be changed when the term began: until then a Binding from before may land.
        Who waits no more is bound or gone, and takes none.
        """
        if not self._unproven or self._clock.now() < self._again:
            return
        waiting = [pod for pod in self._waiting() if pod.uid in self._unproven]
        swept = self._fence.void_all(waiting, self._word[1], still, again=False, at_once=_PROVES_AT_ONCE)
        if swept is not None:
            self._unproven = swept.unproven
        self._again = self._clock.now() + _AGAIN_SECONDS

    def _waiting(self) -> list[PodRef]:
        """The pods that an extender may have been asked to bind."""
        with self._state.queue() as queue:
            return queue.bindable()

    def _settle(self, token: str, word: str, still: Callable[[], bool]) -> bool:
        """Whether all is known that was bound in former terms, and nothing of them lands from now on, but what is
        `_unproven`.

        Pods that come after the first list, or lose their gate then, were never shown to a former leader: it had lost
        the Lease before. So there are two lists at most, whatever comes meanwhile.
        """
        if not self._catch_up(still):
            return False
        if self._elector is not None and self._elector.heir and not self._term:
            return True  # the one before has heard the answers to all that it sent, and knew likewise
        waiting, before = self._waiting(), frozenset[str]()
        if token != self._void[0]:
            self._void = token, set()
        void = self._void[1]
        if token == self._token:
            # Nobody has had the Lease since our last term: what may be under way is our own.
            own, before = self._state.unheard(), self._unproven
            waiting = [pod for pod in waiting if pod.uid in own]
        else:
            # Where the API server is slow the Lease may end before all are void. Nobody has posted since, so the next
            # try goes on.
            waiting = [pod for pod in waiting if pod.uid not in void]
        swept = self._fence.void_all(waiting, word, still, void=void)
        if swept is None:
            return False
        self._unproven = swept.unproven | before
        # What landed after the list, the state does not have yet.
        return not swept.landed or self._catch_up(still)

    def _left(self, term: int) -> float:
        if self._elector is None:
            return 0.0
        left = self._elector.remaining() - _SAFETY_SECONDS
        # One question for both: between two, the term may have ended and another begun.
        return left if left > 0 and self._elector.holds(left, epoch=term) else 0.0

    def able(self) -> bool:
        """Whether this process can act."""
        return self._state.held() < statelock.YIELD

    def settled(self) -> bool:
        """Whether no Binding of this term, which is over, or of one before can land any more."""
        elector = self._elector
        if elector is None or elector.epoch != self._term:
            return False
        return not (self._posts or self._unproven or self._state.unheard())

    def on_change(self, leading: bool) -> None:
        """The Lease is ours now, or is it no more."""
        self._changed.set()
        if leading:
            return
        self._state.forget_plans()
        if self._stopping.is_set():
            # Only then may the Lease be given back. If it takes too long, the process ends and the Lease by itself.
            with self._fewer:
                self._clock.wait_for(self._fewer, lambda: not self._posts, None)

    def _run(self) -> None:
        backoff, pause = Backoff(initial=_LOOK_SECONDS), _LOOK_SECONDS
        while not self._stopping.is_set():
            self._clock.wait(self._changed, pause)
            self._changed.clear()
            try:
                self.step()
                backoff.reset()
                pause = _LOOK_SECONDS
            except Exception:  # noqa: BLE001 - the outermost loop: without it no term would ever begin again
                pause = backoff.next(_LOOK_SECONDS)
                _log.exception("the term could not begin; it is tried again", retry_in=round(pause, 1))


def by_lease(
    client: KubeClient,
    namespace: str,
    name: str,
    *,
    duration: float,
    state: State,
    catch_up: CatchUp,
    fence: Fence,
    clock: Clock = SYSTEM,
    lease_clock: Clock = BOOT,
) -> ByLease:
    """The leadership of one process among those that name the same Lease."""

    def elect(leadership: ByLease) -> LeaderElector:
        return LeaderElector(
            client,
            namespace,
            name,
            identity(),
            duration=duration,
            renew_every=min(2.0, duration / _RENEWALS),
            clock=lease_clock,
            on_change=leadership.on_change,
            able=leadership.able,
            settled=leadership.settled,
        )

    return ByLease(f"{namespace}/{name}", elect, state, catch_up=catch_up, fence=fence, clock=clock)
