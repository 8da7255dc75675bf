"""The rules of the audit: which use of a card by processes is a violation of the grants of their pods.

Theory of operation. MPS limits are per process and lifted by one environment variable, and a card without MPS has none.
So the audit compares the use that the driver reports with the shares that were granted, by container where the
processes' containers are known, else by pod. A CUDA context uses memory beyond the share, so each process is allowed a
tolerance. Pure, so that accusations can be property-tested.

Example: a container with a share of 4096 MiB has two processes of 2500 and 2400 MiB, and the tolerance is 300 MiB for
each process. It uses 4900 MiB, and 4096 + 2 * 300 = 4696 MiB are allowed: a MemoryOverrun.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cardwise.core.values.quantity import MiB


class Reason(StrEnum):
    """The kind of a violation; also the reason of the Kubernetes event."""

    MEMORY_OVERRUN = "MemoryOverrun"
    WRONG_GPU = "WrongGPU"  # the pod has shares, but none of this card
    MPS_BYPASSED = "MPSBypassed"  # it has a share, and uses the closed card without MPS while no server runs
    GPU_WITHOUT_GRANT = "GPUWithoutGrant"  # the pod, or the container, has no share at all
    UNKNOWN_PROCESS = "UnknownProcess"  # of no pod, or of a pod that is gone


# Violations of pods that hold a share; only these are evicted.
EVICTABLE = frozenset({Reason.MEMORY_OVERRUN, Reason.WRONG_GPU, Reason.MPS_BYPASSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """A process on a card.

    memory: in MiB, None if the driver does not report it.
    pod: the UID of its pod, "" for none.
    container: the runtime's ID of its container, "" if unknown.
    bypasses_mps: whether it is not a client of the MPS server that the card is closed for.
    """

    card: str
    pid: int
    memory: MiB | None = None
    pod: str = ""
    container: str = ""
    bypasses_mps: bool = False


@dataclass(frozen=True, slots=True)
class PodGrant:
    """A pod's shares.

    shares: MiB by container key and card.
    keys: container keys by the runtime's ID, as far as known.
    """

    shares: Mapping[tuple[str, str], MiB] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


ViolationKey = tuple[Reason, str, str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violation.

    pod: the UID of the pod, "" for a process of no pod.
    container: a container key, "" for the whole pod.
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
        """The identity of the violation, which stays the same while processes of the pod come and go."""
        pids = self.pids if self.reason is Reason.UNKNOWN_PROCESS else ()
        return self.reason, self.card, self.pod, self.container, pids


def find_violations(uses: Iterable[ProcessUse], pods: Mapping[str, PodGrant], tolerance: MiB) -> list[Violation]:
    """The violations, each once, in a stable order.

    pods: the grants of the node's pods, by UID.
    tolerance: MiB allowed for each process beyond the share: its CUDA context.
    """
    violations = []
    by_place: dict[tuple[str, str], list[ProcessUse]] = {}
    for use in uses:
        if use.pod in pods:
            by_place.setdefault((use.pod, use.card), []).append(use)
        else:
            violations.append(_violation(Reason.UNKNOWN_PROCESS, [use]))
    for (pod, _), pod_uses in by_place.items():
        violations += _pod_violations(pod_uses, pods[pod], tolerance)
    return sorted(violations, key=lambda finding: finding.key)


def _pod_violations(uses: Sequence[ProcessUse], pod: PodGrant, tolerance: MiB) -> list[Violation]:
    """The violations of one pod on one card: by container if the processes' containers are known, else all in one."""
    card = uses[0].card
    if not pod.shares:
        return [_violation(Reason.GPU_WITHOUT_GRANT, uses)]
    if any(use.container not in pod.keys for use in uses):
        shares = [mem for (_, card_uuid), mem in pod.shares.items() if card_uuid == card]
        return _check_use(uses, "", shares, tolerance) if shares else [_violation(Reason.WRONG_GPU, uses)]
    by_key: dict[str, list[ProcessUse]] = {}
    for use in uses:
        by_key.setdefault(pod.keys[use.container], []).append(use)
    violations = []
    for key, key_uses in by_key.items():
        if (key, card) in pod.shares:
            violations += _check_use(key_uses, key, [pod.shares[key, card]], tolerance)
        else:
            elsewhere = any(holder == key for holder, _ in pod.shares)
            violations.append(_violation(Reason.WRONG_GPU if elsewhere else Reason.GPU_WITHOUT_GRANT, key_uses, key))
    return violations


def _check_use(uses: Sequence[ProcessUse], key: str, shares: Sequence[MiB], tolerance: MiB) -> list[Violation]:
    if bypasses_mps := [use for use in uses if use.bypasses_mps]:
        return [_violation(Reason.MPS_BYPASSED, bypasses_mps, key)]
    granted = MiB(sum(shares))
    finding = _violation(Reason.MEMORY_OVERRUN, uses, key, granted)
    return [finding] if finding.used > granted + tolerance * len(uses) else []


def _violation(reason: Reason, uses: Sequence[ProcessUse], key: str = "", granted: MiB = MiB(0)) -> Violation:
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
    """A violation that was found in `looks` audits in a row, since `since` (seconds of the caller's clock)."""

    finding: Violation
    looks: int
    since: float

    def is_report_due(self, looks: int, every: int) -> bool:
        """Whether to report it at this audit: at the `looks`-th audit in a row, and then at every `every`-th.

        A process of no pod is reported once.
        """
        repeats = self.looks - looks
        if self.finding.reason is Reason.UNKNOWN_PROCESS:
            return repeats == 0
        return repeats >= 0 and repeats % every == 0


def update_standing(
    previous: Mapping[ViolationKey, StandingViolation],
    violations: Iterable[Violation],
    now: float,
    unseen: Collection[str] = (),
) -> dict[ViolationKey, StandingViolation]:
    """The standing violations after one more audit. Those of cards that were `unseen` stay as they were.

    now: seconds of the caller's clock.
    """
    standing = {key: violation for key, violation in previous.items() if violation.finding.card in unseen}
    for finding in violations:
        last = previous.get(finding.key)
        standing[finding.key] = StandingViolation(finding, 1 + (last.looks if last else 0), last.since if last else now)
    return standing
