"""Leader election by a Lease of coordination.k8s.io: of several processes, only the holder of the Lease may act.

This is the thread that runs `election.py`, which explains why two processes never hold the Lease at once. Before every
write, the caller must call `holds_lease` with the seconds that the write may take; it must not reuse an earlier result.
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

# Calls to release the Lease. The first call may conflict with a renewal of this process whose response was lost. Then
# the second call reads the Lease, and the third releases it.
_RELEASE_ATTEMPTS = 3
_RELEASE_SECONDS = 1.0  # seconds; the timeout of each of these calls


def new_identity() -> str:
    """A new identity that no other process has. Call this after a fork, since each process needs its own identity."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}"


class LeaderElector:
    """A thread that acquires and renews the Lease. Start it in the serving process, with a `new_identity()`.

    A missing Lease is created, but held only after `duration`: the Lease may have been deleted while another process
    held it.

    duration: seconds for which a renewal is valid.
    renew_every: seconds between two renewals.
    margin: the seconds by which this process stops using its Lease before other processes consider it expired. Needed
        because clocks may run at different rates; None for a tenth of `duration`.
    on_change: called by the thread with True when this process becomes leader, and with False when it no longer is. It
        must return soon, since no renewal is sent during the call. The call may be late when the API server hangs;
        `is_leader`, `holds_lease` and `epoch` are never late. At the stop, `on_change(False)` is called before the
        Lease is released, and may wait for work that `holds_lease` has allowed.
    can_act: returns at once whether this process can act. The Lease is acquired and renewed only if it returns True.
    settled: returns whether no request sent under the Lease is in flight (`Election.release_call`); called at the
        release.
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
        can_act: Callable[[], bool] = lambda: True,
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
        self._can_act = can_act
        self._settled = settled
        self._backoff = Backoff(initial=min(0.1, renew_every), cap=renew_every)
        self._announced_epoch = 0  # the epoch that was passed to on_change, 0 for none
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
        """A number that grows each time this process acquires the Lease, even if no other process was leader before."""
        return self._election.period.epoch

    @property
    def token(self) -> str | None:
        """The Lease's UID and its number of changes of holder; see `Election.token`."""
        return self._election.token

    @property
    def tenure(self) -> int:
        """A number that grows whenever another process may have held the Lease; see `Election`."""
        return self._election.tenure

    @property
    def is_successor(self) -> bool:
        """Whether the former holder had released the Lease after the end of all its requests; see `Election`."""
        return self._election.is_successor

    @property
    def holder(self) -> str | None:
        """The last observed holder of the Lease; "" for no holder; None if unknown."""
        return self._holder

    def holds_lease(self, margin: float = 0.0, epoch: int | None = None) -> bool:
        """Whether this process will still hold the Lease in `margin` seconds, in the epoch `epoch` if given."""
        period = self._election.period  # read once, because the thread replaces the object
        if self._stopping.is_set() or (epoch is not None and epoch != period.epoch):
            return False
        return period.is_valid(self._clock.now(), margin)

    def remaining_seconds(self) -> float:
        """The seconds until the Lease of this process ends without another renewal; 0 if this process is not the
        holder.
        """
        period, now = self._election.period, self._clock.now()
        return period.until - now if period.is_valid(now) and not self._stopping.is_set() else 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop leading at once, then release the Lease. So a standby can take over without waiting."""
        self._stopping.set()
        if self._thread.is_alive():
            self._clock.join(self._thread, timeout)

    def step(self) -> float:
        """Make one call to the API server. Returns the seconds to wait before the next call."""
        if not self._can_act():
            if self._last_error != "unable":
                _log.warning("not running for leader: this process cannot act", lease=self._path)
            self._last_error = "unable"
            self._report_changes()
            return min(self._backoff.next_delay(), self._election.seconds_to_change(self._clock.now()) + 0.001)
        call = self._election.next_call(self._clock.now(), self._client.server_time())
        error = self._call_and_update(call, self._timeout)
        now = self._clock.now()
        if error is None:
            self._outage.mark_succeeded()
        if error is not None:
            delay = self._backoff.next_delay()
            self._log_error(call, error)
        elif (delay := self._election.seconds_to_call(now)) > 0:
            self._backoff.reset()
            self._last_error = ""
        self._report_changes()
        # An additional call when the period begins or ends does no harm.
        return min(delay, self._election.seconds_to_change(now) + 0.001)

    def release(self) -> None:
        """Release the Lease if this process holds it."""
        for _ in range(_RELEASE_ATTEMPTS):
            call = self._election.release_call(self._clock.now(), self._client.server_time(), settled=self._settled())
            if call is None:
                return
            error = self._call_and_update(call, _RELEASE_SECONDS)
            if error is not None:
                _log.info("failed to release the lease", lease=self._path, error=str(error))

    def _run(self) -> None:
        delay = 0.0
        while not self._clock.wait(self._stopping, delay):
            try:
                delay = self.step()
            except Exception:  # noqa: BLE001 - the outermost loop: without it this process would never lead again
                _log.exception("leader election failed; trying again")
                delay = self._backoff.next_delay()
        self._report_changes()
        try:
            self.release()
        except Exception:  # noqa: BLE001 - the Lease then expires
            _log.exception("failed to release the lease", lease=self._path)

    def _call_and_update(self, call: LeaseCall, timeout: float) -> errors.KubeError | None:
        try:
            lease = self._send(call, timeout)
            self._election.on_response(call, lease, self._clock.now(), self._client.server_time())
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

    def _report_changes(self) -> None:
        holder = self._election.holder
        if holder != self._holder:
            self._holder = holder
            _log.info("lost the lease to another holder", lease=self._path, holder=holder, identity=self.identity)
        leading = self.epoch if self.is_leader else 0
        announced, self._announced_epoch = self._announced_epoch, leading
        # The end is announced even if the beginning was not: a caller of `holds_lease` may have acted before this
        # thread could announce the leadership.
        if leading == announced and not self._stopping.is_set():
            return
        if announced:
            level = logging.INFO if self._stopping.is_set() else logging.WARNING
            _log.log(level, "no longer leader", lease=self._path, identity=self.identity, epoch=announced)
        if announced or not leading:
            self._call_on_change(leading=False)
        if leading:
            _log.info("became leader", lease=self._path, identity=self.identity, epoch=leading)
            self._call_on_change(leading=True)

    def _call_on_change(self, *, leading: bool) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(leading)
        except Exception:  # noqa: BLE001 - a failing callback must not cost the Lease
            _log.exception("a callback of the leader election failed", leading=leading)

    def _log_error(self, call: LeaseCall, error: errors.KubeError) -> None:
        """Log the error, unless it equals the last error, because the same error would be logged every two seconds."""
        if isinstance(error, errors.Conflict) or (isinstance(error, errors.NotFound) and call.kind != "create"):
            return  # another process was first, or the Lease does not exist yet: normal in an election
        self._outage.mark_failed()
        summary = f"{call.kind} {error.status} {error.reason}"
        if summary != self._last_error:
            _log.warning(
                "failed to renew the lease: no answer from the API server",
                lease=self._path,
                call=call.kind,
                error=str(error),
            )
        self._last_error = summary
