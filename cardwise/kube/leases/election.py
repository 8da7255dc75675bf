"""Leader election without I/O: whether this process holds the Lease, what to send next, and what a response means.

This module is free of clocks, threads and network, so tests can try every order of events. `lease` sends the requests.

Theory of operation: why two processes never hold the Lease at once, even if messages are lost, late or repeated.

- The holder counts the duration from before it sent the renewing write, and stops `margin` early. All other processes
  count the whole duration from when they received that write. Clocks of different machines are never compared; a margin
  of a tenth of the duration allows for clocks that run five percent fast or slow.
- No process holds the Lease for longer than `MAX_DURATION` after a renewal: `Election` refuses a longer setting, and a
  holder counts its own setting, not the duration in the Lease. So waiting for `MAX_DURATION` after the last change is
  enough, even if a user has written a duration of one hour into the Lease.
- A write replaces exactly the version that was read (the API server compares resourceVersion).
- A process that creates the Lease holds it only after a whole duration. Before its deletion, the Lease may have had a
    holder that has not noticed the deletion yet.
- A released Lease is acquired at once only if the release is the last event. After a restore of a backup, the Lease may
  show an old release while another process is the leader. A release contains its time. A candidate treats the release
  as the last event under two conditions. By the API server's clock, it is less than one lease duration old. It is also
  later than every version that this process has seen. For any other Lease without a holder, a candidate waits as for a
  Lease with a holder.
- A process may read a version again that it has seen before. Then etcd may have been restored to this version while the
  process was paused. Another process may have held the Lease before the restore, and still counts its own duration. So
  after `SILENT_DURATIONS` durations without a response, the next response is handled like the first one. The process
  waits until the Lease expires, even if it wrote the version itself. A version that was replaced less than
  `SILENT_DURATIONS` durations ago cannot be restored, because a restore requires stopping and starting the API servers.
- If the response to a write is lost, the process recognizes its write later by the exact times in the Lease, never by
  the identity: an earlier process with the same identity may still run.

Example, with a duration of 5 s and a margin of 0.5 s: A sends a renewal at 10.0 s and stops. By the holder's own count,
it holds the Lease until 14.5 s. B reads the renewal at 10.2 s, and takes the Lease at 15.2 s at the earliest: 0.7 s
later.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.kube import errors

CallKind = Literal["get", "create", "update", "release"]

SILENT_DURATIONS = 3  # lease durations without a response; see the theory of operation
MAX_DURATION = 60.0  # seconds; the maximum lease duration of a correct holder
_MAX_TRANSITIONS = 2**31 - 1  # changes of the holder; the API's limit
_RELEASED_SECONDS = 1  # seconds; the duration that client-go writes into a released Lease; holders have longer ones
_MAX_UNANSWERED = 16  # writes without a response that are remembered; after more, the process waits for the expiry


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The fields of a Lease.

    holder: the identity of the holder; "" for no holder. None if the field is invalid; then the Lease counts as held.
    seconds: the duration; 0 if missing.
    released: whether a holder released the Lease; a Lease can also lose its holder in other ways.
    settled: whether, at the release, no request that the holder sent under the Lease was still in flight.
    """

    version: str
    holder: str | None
    seconds: float
    acquired: str
    renewed: str
    transitions: int
    uid: str
    released: bool
    settled: bool


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """A request to the API server.

    sent: when it is sent, by the local clock.
    body: None for a get.
    """

    kind: CallKind
    sent: float
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LeaseTenure:
    """The period for which this process holds the Lease, by the local clock. Immutable: other threads read it."""

    epoch: int = 0
    begins: float = -math.inf
    until: float = -math.inf

    def is_valid(self, now: float, margin: float = 0.0) -> bool:
        return self.begins <= now < self.until - margin


@dataclass(frozen=True, slots=True)
class _ObservedLease:
    """A version of the Lease.

    since: when this process first observed the version, by the local clock.
    is_ours: whether this process wrote the version as the holder.
    is_free: whether the version is a release by the last holder, so that the Lease can be acquired at once.
    """

    lease: dict[str, Any]
    record: LeaseRecord
    since: float
    is_ours: bool
    is_free: bool = False


class Election:
    """One candidate. Alternate `next_call` with `on_response` or `on_failure`. After `on_failure`, do not pass a late
    response of that call.

    Any thread may read `period`, `tenure` and `is_successor`; all other attributes and the methods are for one thread.

    tenure: grows whenever another process may have held the Lease. While it stays the same, no other process has held
        the Lease. The content of the Lease cannot show this: a restored backup or an edit brings back an earlier
        `leaseTransitions`. A backup even brings back the same version.
    is_successor: whether this process acquired the Lease from a holder that had released it after the end of all its
        requests (`release_call`).
    """

    def __init__(
        self, namespace: str, name: str, identity: str, *, duration: float, margin: float, renew_every: float
    ) -> None:
        if not identity:
            raise ValueError("the identity is empty, which means a Lease without a holder")
        if not (margin >= 0 and 0 < renew_every < duration - margin):
            raise ValueError(
                f"renew_every ({renew_every}) must be positive and less than duration ({duration}) - margin ({margin})"
            )
        if duration > MAX_DURATION:
            raise ValueError(
                f"duration ({duration}) must be at most {MAX_DURATION:.0f}: other candidates wait no longer"
            )
        self.period = LeaseTenure()
        self.tenure = 0
        self.is_successor = False
        self._metadata = {"name": name, "namespace": namespace}
        self._identity = identity
        self._duration = duration
        self._valid = duration - margin
        self._renew_every = renew_every
        self._silent_seconds = SILENT_DURATIONS * duration
        self._answered_at = -math.inf  # when the last call with a response was sent
        self._observed: _ObservedLease | None = None
        self._latest_version = (
            "",
            0,
            "",
        )  # the UID of the Lease, and its highest observed leaseTransitions and renewTime
        self._is_absent = False
        self._must_reread = False
        self._renew_at = -math.inf
        self._last_stamp = datetime.min.replace(tzinfo=UTC)
        self._unanswered: deque[tuple[str, str]] = deque(maxlen=_MAX_UNANSWERED)

    @property
    def holder(self) -> str | None:
        """The last observed holder of the Lease; "" and None as in `LeaseRecord`."""
        return None if self._observed is None else self._observed.record.holder

    @property
    def token(self) -> str | None:
        """The UID and the `leaseTransitions` of the last observed Lease; None if none.

        For the admission policy and for users. Not unique: with a restored or edited Lease, two holders may have the
        same token.
        """
        return None if self._observed is None else f"{self._observed.record.uid}/{self._observed.record.transitions}"

    def next_call(self, now: float, server_time: datetime) -> LeaseCall:
        """The call to send now. `server_time`: the API server's time, which a write puts into the Lease."""
        if self._is_absent:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._metadata}
            # Not in `_unanswered`: if the response is lost, this process waits until the created Lease expires.
            return LeaseCall("create", now, {**body, "spec": self._make_spec(server_time, None)})
        observed = self._observed
        if observed is None or self._must_reread or self._was_long_silent(now) or not self._may_take(observed, now):
            return LeaseCall("get", now)
        spec = self._make_spec(server_time, observed.record)
        self._unanswered.append((self._identity, spec["renewTime"]))
        return LeaseCall("update", now, {**observed.lease, "spec": spec})

    def release_call(self, now: float, server_time: datetime, *, settled: bool = False) -> LeaseCall | None:
        """The call that releases the Lease; None if the Lease is released, or if this process does not hold it.

        server_time: the API server's time; a successor compares it with the time of its own response.
        settled: whether to record in the Lease that no request sent under it is in flight. Only the next holder relies
            on this.
        """
        observed = self._observed
        # Before its period begins, this process waits for a former holder. It does not release the Lease, because a
        # successor would not wait.
        if observed is None or not observed.is_ours or not self.period.is_valid(now):
            return None
        if self._must_reread:
            return LeaseCall("get", now)
        stamp = self._next_stamp(server_time)
        # A released Lease as client-go writes it: without a holder, and with a duration of one second.
        spec = {
            "holderIdentity": "",
            "leaseDurationSeconds": _RELEASED_SECONDS,
            "acquireTime": stamp,
            "renewTime": stamp,
            "leaseTransitions": observed.record.transitions,
        }
        metadata = _as_dict(observed.lease.get("metadata"))
        if settled:
            annotations = _as_dict(metadata.get("annotations"))
            # The annotation contains the UID and the time of this release, so it is valid for this release only.
            metadata = {**metadata, "annotations": {**annotations, names.FENCED: f"{observed.record.uid}/{stamp}"}}
        return LeaseCall("release", now, {**observed.lease, "metadata": metadata, "spec": spec})

    def on_response(self, call: LeaseCall, lease: dict[str, Any], now: float, server_time: datetime) -> None:
        """Handle a successful response. Raises `Unreachable` if it is not a Lease.

        lease: the body of the response.
        server_time: the API server's time, from this response.
        """
        record = parse_lease(lease)
        if not record.version:
            raise errors.Unreachable(f"the response is not a Lease: {wording.quote_text(lease)}")
        written_spec = (call.body or {}).get("spec", {})
        is_written = bool(written_spec) and (record.holder, record.renewed) == (
            written_spec["holderIdentity"],
            written_spec["renewTime"],
        )
        former, self._is_absent, self._must_reread = self._observed, False, False
        is_trusted = call.kind == "create" or not self._was_long_silent(
            now
        )  # after a creation this process waits anyway
        self._answered_at = call.sent
        if is_written and is_trusted and call.kind != "release":
            self._unanswered.clear()
            if former is None:  # created: another process may have held the former Lease
                self.tenure += 1
                self.is_successor = False
            elif not former.is_ours:
                self.is_successor = former.is_free and former.record.settled
            self._remember_version(record)
            self._observed = _ObservedLease(lease, record, now, is_ours=True)
            self._renew_at = call.sent + self._renew_every
            self.period = self._acquired_period(call, now)
            return
        if is_trusted and former is not None and former.record == record:
            return
        is_ours = is_trusted and (record.holder, record.renewed) in self._unanswered
        if not is_ours:
            # The period ends before the tenure changes, so that no thread reads the new tenure with the former period.
            self.period = replace(self.period, until=-math.inf)
            self.tenure += 1
            self.is_successor = False
            # Calls without a response were for an earlier version: their writes were overwritten, or will fail.
            self._unanswered.clear()
        is_free = self._is_last_release(record, server_time)
        self._remember_version(record)
        self._observed = _ObservedLease(lease, record, now, is_ours, is_free)

    def on_failure(self, call: LeaseCall, error: errors.KubeError) -> None:
        """Handle an error. If there was no response, the call may still be carried out. The period stays valid."""
        if call.kind == "create":
            self._is_absent, self._observed = False, None
        elif isinstance(error, errors.NotFound):
            self._is_absent, self._observed = True, None
        elif call.kind != "get":
            self._must_reread = True

    def seconds_to_call(self, now: float) -> float:
        """Seconds until the next call is due."""
        observed = self._observed
        if observed is None or self._must_reread:
            return 0.0
        if observed.is_ours:
            return max(0.0, self._renew_at - now)
        if self._may_take(observed, now):
            return 0.0
        # Twice as often as the holder writes, so that a released Lease is acquired soon.
        return min(self._renew_every / 2, self._expiry(observed) - now)

    def seconds_to_change(self, now: float) -> float:
        """Seconds until the current period begins or ends without another call; inf if there is no period."""
        if now < self.period.begins:
            return self.period.begins - now
        return self.period.until - now if now < self.period.until else math.inf

    def _was_long_silent(self, now: float) -> bool:
        return now - self._answered_at >= self._silent_seconds

    def _may_take(self, observed: _ObservedLease, now: float) -> bool:
        return observed.is_ours or observed.is_free or now >= self._expiry(observed)

    def _is_last_release(self, record: LeaseRecord, server_time: datetime) -> bool:
        """Whether this version is a release by the last holder, so that no process can have acquired the Lease since.

        A restored version has an earlier time. In doubt returns False: then this process only waits, and fences pods.
        """
        uid, transitions, renewed = self._latest_version
        if not record.released or (
            uid == record.uid and (record.transitions < transitions or record.renewed <= renewed)
        ):
            return False
        renewed_at = parse_timestamp(record.renewed)
        return renewed_at is not None and abs((server_time - renewed_at).total_seconds()) < self._duration

    def _remember_version(self, record: LeaseRecord) -> None:
        uid, transitions, renewed = self._latest_version
        if uid != record.uid:  # another Lease object: its transitions and times are not comparable
            transitions, renewed = 0, ""
        self._latest_version = record.uid, max(transitions, record.transitions), max(renewed, record.renewed)

    def _expiry(self, observed: _ObservedLease) -> float:
        # The holder may have another duration than this process, and a user may have written any duration.
        return observed.since + max(self._duration, min(observed.record.seconds, MAX_DURATION))

    def _acquired_period(self, call: LeaseCall, now: float) -> LeaseTenure:
        until, present = call.sent + self._valid, self.period
        if call.kind == "create":
            return LeaseTenure(present.epoch + 1, now + self._duration, until)
        return replace(present, until=until, epoch=present.epoch if now < present.until else present.epoch + 1)

    def _make_spec(self, server_time: datetime, former: LeaseRecord | None) -> dict[str, Any]:
        stamp = self._next_stamp(server_time)
        is_renewal = former is not None and former.holder == self._identity
        transitions = 0 if former is None else former.transitions + (not is_renewal)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration),
            "acquireTime": former.acquired or stamp if former is not None and is_renewal else stamp,
            "renewTime": stamp,
            "leaseTransitions": min(transitions, _MAX_TRANSITIONS),
        }

    def _next_stamp(self, server_time: datetime) -> str:
        # Each time is later than the one before, even if the clock is set back. With equal times a write would change
        # nothing and get no new version, so other candidates would not see the renewal.
        self._last_stamp = max(server_time, self._last_stamp + timedelta(microseconds=1))
        return self._last_stamp.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_lease(lease: dict[str, Any]) -> LeaseRecord:
    """Parse a response as a Lease. `version` is "" if the response is not an object of the API."""
    metadata, spec = _as_dict(lease.get("metadata")), _as_dict(lease.get("spec"))
    holder, uid, renewed = spec.get("holderIdentity"), _as_text(metadata.get("uid")), _as_text(spec.get("renewTime"))
    seconds = _as_count(spec.get("leaseDurationSeconds"))
    released = holder == "" and seconds == _RELEASED_SECONDS
    settled = _as_dict(metadata.get("annotations")).get(names.FENCED)
    return LeaseRecord(
        version=_as_text(metadata.get("resourceVersion")),
        holder=holder if isinstance(holder, str) else None,
        seconds=float(seconds),
        acquired=_as_text(spec.get("acquireTime")),
        renewed=renewed,
        transitions=_as_count(spec.get("leaseTransitions")),
        uid=uid,
        released=released,
        settled=released and settled == f"{uid}/{renewed}",
    )


def _as_dict(decoded: object) -> dict[str, Any]:
    return decoded if isinstance(decoded, dict) else {}


def _as_text(decoded: object) -> str:
    return decoded if isinstance(decoded, str) else ""


def _as_count(decoded: object) -> int:
    return decoded if isinstance(decoded, int) and decoded > 0 else 0
