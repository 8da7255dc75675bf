"""Leader election without I/O: when the Lease is ours, which request to send next, and what a response means.

It has no clock, thread or network, so that tests can try every order of events; `lease` carries it out.

Theory of operation: why two processes never hold the Lease at once, whatever is lost, late or done twice.

- The holder counts from before it sent the renewing write, and stops `margin` early. All others count the whole
  duration from when they received that write. Clocks are never compared; a margin of a tenth of the duration allows for
  clocks that run five percent fast or slow.
- No holder has the Lease for longer than `MAX_DURATION`: `Election` refuses such a setting, and a holder counts its own
  setting, not the one in the Lease. So waiting for that long after the last change is enough, even if somebody has
  written an hour into the Lease.
- A write replaces exactly the version that was read (the API server compares resourceVersion).
- The process that creates the Lease waits for a whole duration first: the Lease may have been deleted under a holder
  that has not noticed.
- A released Lease is taken at once only if the release is the last event: a restored backup brings back a release of
  an earlier holder while another one leads. The release names its time, and is taken for the last event only if it is
  younger than a duration by the API server's clock, and later than every version that this process has seen. Any other
  Lease without a holder is waited for, as if it had one.
- A version that is seen again does not prove that nobody has had the Lease since: etcd may have been restored to just
  that version while this process stood still, and the holder of that time still goes by its own count. So after
  `SILENCE` durations without an answer, the next answer is taken for the first one: its version is waited for, also if
  it is this process's own. A version that was replaced less than `SILENCE` durations ago is not restored by anybody:
  the API servers must be stopped and started for it.
- A lost response is recognized later by the exact times that were written, never by the identity: an earlier process
  of that identity may still run.

Example, with a duration of 5 s and a margin of 0.5 s: A sends a renewal at 10.0 s and stops. By its own count it holds
the Lease until 14.5 s. B reads the renewal at 10.2 s, and takes the Lease at 15.2 s at the earliest: 0.7 s later.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.kube import errors

CallKind = Literal["get", "create", "update", "release"]

SILENCE = 3  # durations; see above
MAX_DURATION = 60.0  # seconds; a correct holder's Lease is no longer
_MAX_TRANSITIONS = 2**31 - 1  # the API's limit
_RELEASED_SECONDS = 1  # the duration in a released Lease, as client-go writes it; no correct holder's is as short
_REMEMBERED = 16  # writes without an answer; one more than these is only found again by waiting


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a Lease says. `holder` is "" when it was released, None when it cannot be read: then somebody has it."""

    version: str
    holder: str | None
    seconds: float  # 0 when not said
    acquired: str
    renewed: str
    transitions: int
    uid: str
    released: bool  # by a holder, not only without one
    settled: bool  # released by a holder that had settled all


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """A request to send now; `body` for all but get."""

    kind: CallKind
    sent: float
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LeasePeriod:
    """From when until when the Lease is ours, on the local clock. Immutable: other threads read it whole."""

    epoch: int = 0
    begins: float = -math.inf
    until: float = -math.inf

    def is_valid(self, now: float, margin: float = 0.0) -> bool:
        return self.begins <= now < self.until - margin


@dataclass(frozen=True, slots=True)
class _Seen:
    """A version of the Lease.

    - since: when it was first seen.
    - mine: whether this very process wrote it.
    - free: whether it is the release by the last holder.
    """

    lease: dict[str, Any]
    record: LeaseRecord
    since: float
    mine: bool
    free: bool = False


class Election:
    """One candidate. Alternate `call` with `on_answer` or `on_failure`; an answer that was given up on must not come
    later.

    `period`, `tenure` and `is_successor` may be read by any thread, all else belongs to one.

    - tenure: grows whenever another process may have had the Lease. Two equal numbers: none has, whatever the Lease
      says. What it says may repeat: a backup that is restored, or an edit, brings back an earlier `leaseTransitions`,
      and a backup even the same version.
    - is_successor: the last holder released the Lease and had settled all (`release_call`), and this process took it
      from there.
    """

    def __init__(
        self, namespace: str, name: str, identity: str, *, duration: float, margin: float, renew_every: float
    ) -> None:
        if not identity:
            raise ValueError("an empty identity means that nobody holds the Lease")
        if not (margin >= 0 and 0 < renew_every < duration - margin):
            raise ValueError(
                f"renew_every ({renew_every}) must be positive and less than duration ({duration}) - margin ({margin})"
            )
        if duration > MAX_DURATION:
            raise ValueError(f"duration ({duration}) must be at most {MAX_DURATION:.0f}: others wait no longer for us")
        self.period = LeasePeriod()
        self.tenure = 0
        self.is_successor = False
        self._metadata = {"name": name, "namespace": namespace}
        self._identity = identity
        self._duration = duration
        self._valid = duration - margin
        self._renew_every = renew_every
        self._silence = SILENCE * duration
        self._answered_at = -math.inf  # when the last call that was answered was sent
        self._seen: _Seen | None = None
        self._latest = ("", 0, "")  # the UID of the Lease, and the highest count and renewTime that were seen of it
        self._absent = False
        self._reread = False
        self._renew_at = -math.inf
        self._written = datetime.min.replace(tzinfo=UTC)
        self._unanswered: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)

    @property
    def holder(self) -> str | None:
        """The holder of the Lease when it was last seen; "" and None as in `LeaseRecord`."""
        return None if self._seen is None else self._seen.record.holder

    @property
    def token(self) -> str:
        """UID of the Lease that was last seen, and how often it had gone from one holder to another; "" for none.

        For the policy and for people: a Lease that is restored or edited may give the same token to two holders.
        """
        return "" if self._seen is None else f"{self._seen.record.uid}/{self._seen.record.transitions}"

    def next_call(self, now: float, wall: datetime) -> LeaseCall:
        """What to send now. `wall`: the API server's time; it is written."""
        if self._absent:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._metadata}
            # Not remembered: a Lease that we created unknowingly must be waited for as anybody's.
            return LeaseCall("create", now, {**body, "spec": self._spec(wall, None)})
        seen = self._seen
        if seen is None or self._reread or self._was_silent(now) or not self._may_take(seen, now):
            return LeaseCall("get", now)
        spec = self._spec(wall, seen.record)
        self._unanswered.append((self._identity, spec["renewTime"]))
        return LeaseCall("update", now, {**seen.lease, "spec": spec})

    def release_call(self, now: float, wall: datetime, *, settled: bool = False) -> LeaseCall | None:
        """What to send to give the Lease back; None when that is done, or when it is not ours to give.

        `wall`: the API server's time; a successor compares it with the time of its own answer.
        `settled`: it says that nothing that was done in its name is under way; only the very next holder goes by that.
        """
        seen = self._seen
        # A claim that has not begun is not given back: who took it at once would not wait for what we wait for.
        if seen is None or not seen.mine or not self.period.is_valid(now):
            return None
        if self._reread:
            return LeaseCall("get", now)
        stamp = self._stamp(wall)
        # As client-go leaves it: held by nobody, for a second.
        spec = {
            "holderIdentity": "",
            "leaseDurationSeconds": _RELEASED_SECONDS,
            "acquireTime": stamp,
            "renewTime": stamp,
            "leaseTransitions": seen.record.transitions,
        }
        metadata = _as_dict(seen.lease.get("metadata"))
        if settled:
            annotations = _as_dict(metadata.get("annotations"))
            # Names this very release, so that it says nothing of a Lease that was restored or taken since.
            metadata = {**metadata, "annotations": {**annotations, names.FENCED: f"{seen.record.uid}/{stamp}"}}
        return LeaseCall("release", now, {**seen.lease, "metadata": metadata, "spec": spec})

    def on_answer(self, call: LeaseCall, lease: dict[str, Any], now: float, wall: datetime) -> None:
        """The API server said yes, with this Lease. Raises `Unreachable` when that is none.

        `wall`: the API server's time, by this answer.
        """
        record = parse_lease(lease)
        if not record.version:
            raise errors.Unreachable(f"the answer is no Lease: {wording.quote_text(lease)}")
        written = (call.body or {}).get("spec", {})
        wrote = bool(written) and (record.holder, record.renewed) == (written["holderIdentity"], written["renewTime"])
        before, self._absent, self._reread = self._seen, False, False
        trusted = call.kind == "create" or not self._was_silent(now)  # a Lease that we created is waited for anyway
        self._answered_at = call.sent
        if wrote and trusted and call.kind != "release":
            self._unanswered.clear()
            if before is None:  # created: what was there before may have been another's
                self.tenure += 1
                self.is_successor = False
            elif not before.mine:
                self.is_successor = before.free and before.record.settled
            self._remember_version(record)
            self._seen = _Seen(lease, record, now, mine=True)
            self._renew_at = call.sent + self._renew_every
            self.period = self._claimed_period(call, now)
            return
        if trusted and before is not None and before.record == record:
            return
        mine = trusted and (record.holder, record.renewed) in self._unanswered
        if not mine:
            # The claim ends first: who reads the new tenure must not take it for that of the former claim.
            self.period = replace(self.period, until=-math.inf)
            self.tenure += 1
            self.is_successor = False
            # What was sent names an earlier version: it has been replaced, or it fails.
            self._unanswered.clear()
        free = self._is_last_release(record, wall)
        self._remember_version(record)
        self._seen = _Seen(lease, record, now, mine, free)

    def on_failure(self, call: LeaseCall, error: errors.KubeError) -> None:
        """The API server said no, or nothing: then the call may have been carried out, or will be. The claim stays."""
        if call.kind == "create":
            self._absent, self._seen = False, None
        elif isinstance(error, errors.NotFound):
            self._absent, self._seen = True, None
        elif call.kind != "get":
            self._reread = True

    def seconds_to_call(self, now: float) -> float:
        """Seconds until the next call is due."""
        seen = self._seen
        if seen is None or self._reread:
            return 0.0
        if seen.mine:
            return max(0.0, self._renew_at - now)
        if self._may_take(seen, now):
            return 0.0
        # Twice as often as the holder writes, so that a Lease that was given back is soon taken.
        return min(self._renew_every / 2, self._expiry(seen) - now)

    def seconds_to_change(self, now: float) -> float:
        """Seconds until the claim begins or ends by itself."""
        if now < self.period.begins:
            return self.period.begins - now
        return self.period.until - now if now < self.period.until else math.inf

    def _was_silent(self, now: float) -> bool:
        return now - self._answered_at >= self._silence

    def _may_take(self, seen: _Seen, now: float) -> bool:
        return seen.mine or seen.free or now >= self._expiry(seen)

    def _is_last_release(self, record: LeaseRecord, wall: datetime) -> bool:
        """Whether the last holder released the Lease with this version, so nobody can have taken it since.

        A version that was put back has an earlier time. When in doubt no: that costs a wait and a fence, no more.
        """
        uid, transitions, renewed = self._latest
        if not record.released or (
            uid == record.uid and (record.transitions < transitions or record.renewed <= renewed)
        ):
            return False
        try:
            age = (wall - datetime.fromisoformat(record.renewed)).total_seconds()
        except (ValueError, TypeError):  # not a time, or without a zone
            return False
        return abs(age) < self._duration

    def _remember_version(self, record: LeaseRecord) -> None:
        uid, transitions, renewed = self._latest
        if uid != record.uid:  # another object, whose count and times begin anew
            transitions, renewed = 0, ""
        self._latest = record.uid, max(transitions, record.transitions), max(renewed, record.renewed)

    def _expiry(self, seen: _Seen) -> float:
        # Another process may run with another duration, and anybody may have written any.
        return seen.since + max(self._duration, min(seen.record.seconds, MAX_DURATION))

    def _claimed_period(self, call: LeaseCall, now: float) -> LeasePeriod:
        until, claim = call.sent + self._valid, self.period
        if call.kind == "create":
            return LeasePeriod(claim.epoch + 1, now + self._duration, until)
        return replace(claim, until=until, epoch=claim.epoch if now < claim.until else claim.epoch + 1)

    def _spec(self, wall: datetime, before: LeaseRecord | None) -> dict[str, Any]:
        stamp = self._stamp(wall)
        again = before is not None and before.holder == self._identity
        transitions = 0 if before is None else before.transitions + (not again)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration),
            "acquireTime": before.acquired or stamp if before is not None and again else stamp,
            "renewTime": stamp,
            "leaseTransitions": min(transitions, _MAX_TRANSITIONS),
        }

    def _stamp(self, wall: datetime) -> str:
        # Never twice the same, also when the clock is set back: a write that changes nothing gets no new version, and
        # nobody would see the renewal.
        self._written = max(wall, self._written + timedelta(microseconds=1))
        return self._written.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_lease(lease: dict[str, Any]) -> LeaseRecord:
    """Any answer at all. `version` is "" when it is no object of the API."""
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
