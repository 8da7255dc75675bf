"""The types of the gangs' interface: settings, the answers to filter and bind, the permits that binds wait for, the
writes that are due.

`gangs` decides.
"""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from cardwise.core.api import policies
from cardwise.core.gangs.gangs import GangPatience
from cardwise.core.values.refusals import Refusal
from extender.records.podref import PodRef


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSettings:
    """Settings of gangs.

    policy: the placement policy of pods without a policy annotation.
    max_waiting: maximum number of binds that may wait at the same time.
    """

    patience: GangPatience = field(default_factory=GangPatience)
    policy: str = policies.DEFAULT_POLICY
    max_waiting: int = 0


@dataclass(slots=True, eq=False)
class Permit:
    """The outcome of a gang's plan. The bind threads of the gang wait for the outcome.

    key: "namespace/name" of the gang.
    since: when the gang was planned, in seconds of the clock.
    done: set when the outcome is decided.
    allowed: whether the threads may post their Bindings; if not, the binds fail with `reason`.
    """

    key: str
    since: float
    done: threading.Event = field(default_factory=threading.Event)
    allowed: bool = False
    reason: str = ""

    def decide(self, *, allowed: bool, reason: str = "") -> None:
        """Set the outcome, and let the waiting threads continue."""
        self.allowed, self.reason = allowed, reason
        self.done.set()


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """The member's node in the plan of its gang."""

    node: str


@dataclass(frozen=True, slots=True)
class PlacedAlone:
    """The gang runs already, so the pod is placed like a pod without a gang."""


# The answer of `Gangs.filter_member`.
MemberPlace = PlannedNode | PlacedAlone | Refusal


@dataclass(frozen=True, slots=True)
class BindNow:
    """The Binding may be posted at once: the pod has no gang, or its gang is being bound, or runs."""


@dataclass(frozen=True, slots=True)
class BindRefused:
    """The bind call fails for this reason; kube-scheduler tries the pod again."""

    reason: str


# The answer of `Gangs.request_permit`.
PermitAnswer = Permit | BindNow | BindRefused


class DueWork(NamedTuple):
    """The due writes: gates to remove, and members to evict; each member to evict has the text of its event."""

    ungate: list[PodRef]
    evict: list[tuple[PodRef, str]]
