"""Leader election by a Lease of coordination.k8s.io: of several processes only its holder may act.

The thread around `election.py`, which says why two never hold at once. Who is about to write
asks `holds` with the seconds that the write may take, at every write, and never keeps the answer.
"""

import logging
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

import structlog

from cardwise.clock import BOOT, Clock
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.leases.election import Election, LeaseCall
from cardwise.kube.recovery import Outage
from cardwise.supervision import supervised_thread

_log = structlog.get_logger("cardwise.kube.lease")

_FAREWELL_CALLS = 3  # the first finds that a lost answer had been a yes, the second reads, the third gives back
_FAREWELL_SECONDS = 1.0


def new_identity() -> str:
    """A name that no other process has or had. Call it after the fork: two with one name are not told apart."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}"


class LeaderElector:
    """A thread that acquires and renews; start it in the process that serves, with an `identity()` of its own.

    `margin` (default: a tenth of `duration`) is how much earlier than others we think that our Lease ends; it covers
    clocks of unequal rates. `on_change(leading)` is called by the thread, so it must return soon: renewals wait. It
    may come late when the API server hangs; `leader`, `holds` and `epoch` never do. At stop `on_change(False)` comes
    before the Lease is given back, and may wait for work that `holds` had allowed. While `able` says no, which it must
    do at once, the Lease is neither taken nor renewed. `settled`: what a Lease that is given back says of what was done
    in its name (`Election.release_call`), asked after that.

    A Lease that does not exist is created, and held only after `duration`: it may have been deleted under somebody.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration: float = 15.0,
        renew_every: float = 2.0,
        margin: float | None = None,
        clock: Clock = BOOT,
        on_change: Callable[[bool], None] | None = None,
        able: Callable[[], bool] = lambda: True,
        settled: Callable[[], bool] = lambda: False,
    ) -> None:
        margin = duration / 10 if margin is None else margin
        self.identity = identity
        self._election = Election(namespace, name, identity, duration=duration, margin=margin, renew_every=renew_every)
        self._client = client
        self._collection = paths.leases(namespace)
        self._path = paths.leases(namespace, name)
        self._timeout = duration / 3  # a silent API server leaves time for a second attempt
        self._clock = clock
        self._on_change = on_change
        self._able = able
        self._settled = settled
        self._backoff = Backoff(initial=min(0.1, renew_every), cap=renew_every)
        self._announced_epoch = 0  # the epoch that on_change was told of, 0 for none
        self._holder: str | None = None
        self._last_error = ""
        self._outage = Outage(client.recovery, self, clock)
        self._stopping = threading.Event()
        self._thread = supervised_thread(self._run, "lease", clock)

    @property
    def is_leader(self) -> bool:
        return self.holds_lease()

    @property
    def epoch(self) -> int:
        """Grows at each acquisition, also when nobody else was leader in between."""
        return self._election.period.epoch

    @property
    def token(self) -> str:
        """Which Lease it is, and how many holders it has had; see `Election.token`."""
        return self._election.token

    @property
    def tenure(self) -> int:
        """Grows whenever another process may have had the Lease; see `Election`."""
        return self._election.tenure

    @property
    def is_successor(self) -> bool:
        """Whether the Lease was taken from a holder that had released it and settled all."""
        return self._election.is_successor

    @property
    def holder(self) -> str | None:
        """The holder of the Lease when it was last seen; "" for nobody, None if that is not known."""
        return self._holder

    def holds_lease(self, margin: float = 0.0, epoch: int | None = None) -> bool:
        """Whether the Lease will still be ours in `margin` seconds, and, if given, has been since `epoch` began."""
        claim = self._election.period  # read once: the thread replaces it whole
        if self._stopping.is_set() or (epoch is not None and epoch != claim.epoch):
            return False
        return claim.is_valid(self._clock.now(), margin)

    def remaining_seconds(self) -> float:
        """For how many seconds it is ours if no renewal comes; 0 when it is not."""
        claim, now = self._election.period, self._clock.now()
        return claim.until - now if claim.is_valid(now) and not self._stopping.is_set() else 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """`holds` is False at once; then the Lease is given back, so that a standby takes over without waiting."""
        self._stopping.set()
        if self._thread.is_alive():
            self._clock.join(self._thread, timeout)

    def step(self) -> float:
        """One exchange with the API server; the seconds to wait before the next."""
        if not self._able():
            if self._last_error != "unable":
                _log.warning("not running for leader: this process cannot act", lease=self._path)
            self._last_error = "unable"
            self._announce()
            return min(self._backoff.next_delay(), self._election.seconds_to_change(self._clock.now()) + 0.001)
        call = self._election.next_call(self._clock.now(), self._client.server_time())
        error = self._exchange(call, self._timeout)
        now = self._clock.now()
        if error is None:
            self._outage.mark_succeeded()
        if error is not None:
            delay = self._backoff.next_delay()
            self._log_error(call, error)
        elif (delay := self._election.seconds_to_call(now)) > 0:
            self._backoff.reset()
            self._last_error = ""
        self._announce()
        # A call too many when the claim begins or ends does no harm.
        return min(delay, self._election.seconds_to_change(now) + 0.001)

    def release(self) -> None:
        """Gives the Lease back if it is ours."""
        for _ in range(_FAREWELL_CALLS):
            call = self._election.release_call(self._clock.now(), self._client.server_time(), settled=self._settled())
            if call is None:
                return
            error = self._exchange(call, _FAREWELL_SECONDS)
            if error is not None:
                _log.info("failed to release the lease", lease=self._path, error=str(error))

    def _run(self) -> None:
        delay = 0.0
        while not self._clock.wait(self._stopping, delay):
            try:
                delay = self.step()
            except Exception:  # noqa: BLE001 - the outermost loop: without it nobody would ever lead again
                _log.exception("leader election failed; trying again")
                delay = self._backoff.next_delay()
        self._announce()
        try:
            self.release()
        except Exception:  # noqa: BLE001 - it then ends by itself
            _log.exception("failed to release the lease", lease=self._path)

    def _exchange(self, call: LeaseCall, timeout: float) -> errors.KubeError | None:
        try:
            lease = self._send(call, timeout)
            self._election.on_answer(call, lease, self._clock.now(), self._client.server_time())
        except errors.KubeError as error:
            self._election.on_failure(call, error)
            return error
        return None

    def _send(self, call: LeaseCall, timeout: float) -> dict[str, Any]:
        if call.kind == "get":
            return self._client.get(self._path, timeout=timeout)
        if call.kind == "create":
            return self._client.create(self._collection, call.body, timeout=timeout)
        return self._client.update(self._path, call.body, timeout=timeout)

    def _announce(self) -> None:
        holder = self._election.holder
        if holder != self._holder:
            self._holder = holder
            _log.info("lost the lease to another holder", lease=self._path, holder=holder, identity=self.identity)
        leading = self.epoch if self.is_leader else 0
        announced, self._announced_epoch = self._announced_epoch, leading
        # At the end always: who asks `holds` may have acted before this thread could say that we led.
        if leading == announced and not self._stopping.is_set():
            return
        if announced:
            level = logging.INFO if self._stopping.is_set() else logging.WARNING
            _log.log(level, "no longer leader", lease=self._path, identity=self.identity, epoch=announced)
        if announced or not leading:
            self._call_back(leading=False)
        if leading:
            _log.info("leader", lease=self._path, identity=self.identity, epoch=leading)
            self._call_back(leading=True)

    def _call_back(self, *, leading: bool) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(leading)
        except Exception:  # noqa: BLE001 - somebody else's code must not cost the Lease
            _log.exception("a callback of the leader election failed", leading=leading)

    def _log_error(self, call: LeaseCall, error: errors.KubeError) -> None:
        """Logs news only: the same every two seconds would bury all else."""
        if isinstance(error, errors.Conflict) or (isinstance(error, errors.NotFound) and call.kind != "create"):
            return  # somebody else was first, or it is not there yet: that is how an election goes
        self._outage.mark_failed()
        trouble = f"{call.kind} {error.status} {error.reason}"
        if trouble != self._last_error:
            _log.warning(
                "failed to renew the lease: no answer from the API server",
                lease=self._path,
                call=call.kind,
                error=str(error),
            )
        self._last_error = trouble
