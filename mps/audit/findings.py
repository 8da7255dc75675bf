"""The rules of the audit: what processes have of the cards, against what their pods were given.

Pure, so that who is accused can be property-tested. MPS limits are per process and lifted by one bad variable, and a
card without MPS has none at all: what was granted and what is used must be compared by somebody.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cardwise.core.values.quantity import MiB


class Reason(StrEnum):
    """What is wrong; also the reason of the Kubernetes event."""

    MEMORY_OVERRUN = "MemoryOverrun"
    WRONG_CARD = "WrongCard"  # the pod has shares, but none of this card
    PAST_MPS = "PastMps"  # it has a share, and came upon the closed card by itself while no server was there
    CARD_WITHOUT_GRANT = "CardWithoutGrant"  # the pod, or the container, has no share at all
    UNKNOWN_PROCESS = "UnknownProcess"  # of no pod, or of one that is gone


# Of pods that hold a share of Cardwise; only these are evicted.
OF_A_HOLDER = frozenset({Reason.MEMORY_OVERRUN, Reason.WRONG_CARD, Reason.PAST_MPS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """A process on a card. `memory` is None where the driver does not say.

    `pod` is the UID of its pod, "" for none; `container` the runtime's ID of its container, "" where nobody says it.
    `past`: it is no client of the MPS server that the card is closed for.
    """

    card: str
    pid: int
    memory: MiB | None = None
    pod: str = ""
    container: str = ""
    past: bool = False


@dataclass(frozen=True, slots=True)
class PodGrant:
    """What a pod has: MiB by container key and card. `keys`: the container key by the runtime's ID, as far as known."""

    shares: Mapping[tuple[str, str], MiB] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


About = tuple[Reason, str, str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that should not be. `container` is a key, "" for the pod as a whole; `used` and `granted` in MiB."""

    reason: Reason
    card: str
    pids: tuple[int, ...]
    pod: str = ""
    container: str = ""
    used: MiB = MiB(0)
    granted: MiB = MiB(0)

    @property
    def about(self) -> About:
        """A key of the matter, which stays the same while processes of the pod come and go."""
        pids = self.pids if self.reason is Reason.UNKNOWN_PROCESS else ()
        return self.reason, self.card, self.pod, self.container, pids


def compare(uses: Iterable[ProcessUse], pods: Mapping[str, PodGrant], tolerance: MiB) -> list[Violation]:
    """Each matter once, in a stable order. `pods` are those of the node, by UID; `tolerance` is for each process, whose
    own context is no part of the share.
    """
    found = []
    by_place: dict[tuple[str, str], list[ProcessUse]] = {}
    for use in uses:
        if use.pod in pods:
            by_place.setdefault((use.pod, use.card), []).append(use)
        else:
            found.append(_finding(Reason.UNKNOWN_PROCESS, [use]))
    for (pod, _), theirs in by_place.items():
        found += _of_pod(theirs, pods[pod], tolerance)
    return sorted(found, key=lambda finding: finding.about)


def _of_pod(uses: Sequence[ProcessUse], pod: PodGrant, tolerance: MiB) -> list[Violation]:
    """The violations of one pod on one card: by container if the processes' containers are known, else all in one."""
    card = uses[0].card
    if not pod.shares:
        return [_finding(Reason.CARD_WITHOUT_GRANT, uses)]
    if any(use.container not in pod.keys for use in uses):
        shares = [mem for (_, where), mem in pod.shares.items() if where == card]
        return _judge(uses, "", shares, tolerance) if shares else [_finding(Reason.WRONG_CARD, uses)]
    by_key: dict[str, list[ProcessUse]] = {}
    for use in uses:
        by_key.setdefault(pod.keys[use.container], []).append(use)
    found = []
    for key, theirs in by_key.items():
        if (key, card) in pod.shares:
            found += _judge(theirs, key, [pod.shares[key, card]], tolerance)
        else:
            elsewhere = any(holder == key for holder, _ in pod.shares)
            found.append(_finding(Reason.WRONG_CARD if elsewhere else Reason.CARD_WITHOUT_GRANT, theirs, key))
    return found


def _judge(uses: Sequence[ProcessUse], key: str, shares: Sequence[MiB], tolerance: MiB) -> list[Violation]:
    if past := [use for use in uses if use.past]:
        return [_finding(Reason.PAST_MPS, past, key)]
    granted = MiB(sum(shares))
    finding = _finding(Reason.MEMORY_OVERRUN, uses, key, granted)
    return [finding] if finding.used > granted + tolerance * len(uses) else []


def _finding(reason: Reason, uses: Sequence[ProcessUse], key: str = "", granted: MiB = MiB(0)) -> Violation:
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
    """A matter that was found `looks` times in a row, since `since` (seconds of the caller's clock)."""

    finding: Violation
    looks: int
    since: float

    def to_tell(self, looks: int, every: int) -> bool:
        """Whether this look is one to speak at: the `looks`-th in a row, and then each `every`-th.

        A process of no pod is told once: nobody's events say more of it.
        """
        late = self.looks - looks
        if self.finding.reason is Reason.UNKNOWN_PROCESS:
            return late == 0
        return late >= 0 and late % every == 0


def follow(
    before: Mapping[About, StandingViolation], found: Iterable[Violation], now: float, unseen: Collection[str] = ()
) -> dict[About, StandingViolation]:
    """What stands after one more look. Of cards that were `unseen` nothing is known, so theirs stands as it did."""
    standing = {about: kept for about, kept in before.items() if kept.finding.card in unseen}
    for finding in found:
        last = before.get(finding.about)
        standing[finding.about] = StandingViolation(
            finding, 1 + (last.looks if last else 0), last.since if last else now
        )
    return standing
