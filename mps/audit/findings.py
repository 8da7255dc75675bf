"""The rules of the audit: which use of a card by processes violates the grants of their pods. Pure.

Theory of operation. MPS limits each process separately, so several processes together may exceed their share. One
environment variable switches the limits off, and cards without MPS have no limits at all. So the audit compares the
memory that the
driver reports with the granted shares: per container if the containers of all processes are known, else per pod. A CUDA
context uses memory beyond the share, so each process is allowed a tolerance.

Example: a container with a share of 4096 MiB has two processes of 2800 and 2700 MiB. The tolerance is 640 MiB for each
process. It uses 5500 MiB, and 4096 + 2 * 640 = 5376 MiB are allowed: a MemoryOverrun.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cardwise.core.values.quantity import MiB


class Reason(StrEnum):
    """The kind of a violation; also the reason of the Kubernetes event."""

    MEMORY_OVERRUN = "MemoryOverrun"
    WRONG_GPU = "WrongGPU"  # the pod has shares, but no share of this card
    MPS_BYPASSED = "MPSBypassed"  # the pod has a share, and uses the closed card without MPS while no server runs
    GPU_WITHOUT_GRANT = "GPUWithoutGrant"  # the pod or container has no share at all
    UNKNOWN_PROCESS = "UnknownProcess"  # the process belongs to no pod, or to a pod that does not exist any more


# Violations of pods that hold a share: only such pods are evicted.
EVICTABLE_REASONS = frozenset({Reason.MEMORY_OVERRUN, Reason.WRONG_GPU, Reason.MPS_BYPASSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """The use of a card by a process.

    card: UUID of the card.
    memory: MiB that the process uses; None if the driver does not report this.
    pod: UID of the process's pod; "" if it is in no pod.
    container: the runtime's ID of its container; "" if unknown.
    bypasses_mps: whether it uses a closed card without being a client of the card's MPS server.
    """

    card: str
    pid: int
    memory: MiB | None = None
    pod: str = ""
    container: str = ""
    bypasses_mps: bool = False


@dataclass(frozen=True, slots=True)
class PodGrant:
    """The shares of a pod.

    shares: MiB by container key and the card's UUID.
    keys: container keys by the runtime's container ID, as far as known.
    """

    shares: Mapping[tuple[str, str], MiB] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


ViolationKey = tuple[Reason, str, str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Use of a card that was not granted.

    card: UUID of the card.
    pod: UID of the pod; "" for a process that belongs to no pod.
    container: container key; "" for the whole pod.
    used, granted: MiB.
    """

    reason: Reason
    card: str
    pids: tuple[int, ...]
    pod: str = ""
    container: str = ""
    used: MiB = MiB(0)
    granted: MiB = MiB(0)

    @property
    def key(self) -> ViolationKey:
        """The identity of the violation. It stays the same when processes of the pod start or end."""
        pids = self.pids if self.reason is Reason.UNKNOWN_PROCESS else ()
        return self.reason, self.card, self.pod, self.container, pids


def find_violations(
    uses: Iterable[ProcessUse], grants_by_uid: Mapping[str, PodGrant], tolerance: MiB
) -> list[Violation]:
    """Find the violations, in a stable order.

    grants_by_uid: the grants of the node's pods, by UID.
    tolerance: MiB that each process may use beyond the share, for its CUDA context.
    """
    violations = []
    uses_by_pod_and_card: dict[tuple[str, str], list[ProcessUse]] = {}
    for use in uses:
        if use.pod in grants_by_uid:
            uses_by_pod_and_card.setdefault((use.pod, use.card), []).append(use)
        else:
            violations.append(_build_violation(Reason.UNKNOWN_PROCESS, [use]))
    for (pod, _), pod_uses in uses_by_pod_and_card.items():
        violations += _pod_violations(pod_uses, grants_by_uid[pod], tolerance)
    return sorted(violations, key=lambda violation: violation.key)


def _pod_violations(uses: Sequence[ProcessUse], pod_grant: PodGrant, tolerance: MiB) -> list[Violation]:
    """The violations of one pod on one card: per container if the container of each process is known, else per pod."""
    card = uses[0].card
    if not pod_grant.shares:
        return [_build_violation(Reason.GPU_WITHOUT_GRANT, uses)]
    if any(use.container not in pod_grant.keys for use in uses):
        shares = [mem for (_, card_uuid), mem in pod_grant.shares.items() if card_uuid == card]
        return _card_violations(uses, "", shares, tolerance) if shares else [_build_violation(Reason.WRONG_GPU, uses)]
    uses_by_key: dict[str, list[ProcessUse]] = {}
    for use in uses:
        uses_by_key.setdefault(pod_grant.keys[use.container], []).append(use)
    violations = []
    for key, key_uses in uses_by_key.items():
        if (key, card) in pod_grant.shares:
            violations += _card_violations(key_uses, key, [pod_grant.shares[key, card]], tolerance)
        else:
            has_other_card = any(holder == key for holder, _ in pod_grant.shares)
            violations.append(
                _build_violation(Reason.WRONG_GPU if has_other_card else Reason.GPU_WITHOUT_GRANT, key_uses, key)
            )
    return violations


def _card_violations(uses: Sequence[ProcessUse], key: str, shares: Sequence[MiB], tolerance: MiB) -> list[Violation]:
    if bypasses_mps := [use for use in uses if use.bypasses_mps]:
        return [_build_violation(Reason.MPS_BYPASSED, bypasses_mps, key)]
    granted = MiB(sum(shares))
    violation = _build_violation(Reason.MEMORY_OVERRUN, uses, key, granted)
    return [violation] if violation.used > granted + tolerance * len(uses) else []


def _build_violation(reason: Reason, uses: Sequence[ProcessUse], key: str = "", granted: MiB = MiB(0)) -> Violation:
    return Violation(
        reason=reason,
        card=uses[0].card,
        pids=tuple(sorted(use.pid for use in uses)),
        pod=uses[0].pod,
        container=key,
        used=MiB(sum(use.memory or 0 for use in uses)),
        granted=granted,
    )


@dataclass(frozen=True, slots=True)
class StandingViolation:
    """A violation that consecutive audits have found.

    passes: the number of these audits.
    since: the time of the first one, in seconds of the caller's clock.
    """

    violation: Violation
    passes: int
    since: float

    def is_report_due(self, required_passes: int, repeat_passes: int) -> bool:
        """Whether the present audit should report the violation.

        required_passes: how many consecutive audits must find the violation before its first report.
        repeat_passes: number of audits between two reports.

        A process that belongs to no pod is reported once.
        """
        repeats = self.passes - required_passes
        if self.violation.reason is Reason.UNKNOWN_PROCESS:
            return repeats == 0
        return repeats >= 0 and repeats % repeat_passes == 0


def update_standing_violations(
    previous: Mapping[ViolationKey, StandingViolation],
    violations: Iterable[Violation],
    now: float,
    unreadable_cards: Collection[str] = (),
) -> dict[ViolationKey, StandingViolation]:
    """Update the standing violations after one more audit.

    violations: the violations of this audit.
    now: seconds of the caller's clock.
    unreadable_cards: UUIDs of the cards that this audit could not read; their violations stay unchanged.
    """
    standing = {key: entry for key, entry in previous.items() if entry.violation.card in unreadable_cards}
    for violation in violations:
        former = previous.get(violation.key)
        passes, since = (former.passes, former.since) if former else (0, now)
        standing[violation.key] = StandingViolation(violation, passes + 1, since)
    return standing
