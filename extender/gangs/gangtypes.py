"""The types of the gangs' interface: settings, the holds that binds wait for, what is to be written.

What is decided is in `gangs`.
"""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from cardwise.core.api import policies
from cardwise.core.gangs.gangs import GangPatience
from extender.records.podref import PodRef


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSettings:
    """`max_waiting`: how many binds may wait at once. `policy`: the placement policy of pods that name none."""

    patience: GangPatience = field(default_factory=GangPatience)
    policy: str = policies.DEFAULT
    max_waiting: int = 0


@dataclass(slots=True, eq=False)
class Permit:
    """The outcome of a gang's plan, for which its bind threads wait. `done`: it is decided. `allowed`: the threads post
    their Bindings; else they fail with `reason`.
    """

    key: str
    since: float
    done: threading.Event = field(default_factory=threading.Event)
    allowed: bool = False
    reason: str = ""

    def decide(self, *, allowed: bool, reason: str = "") -> None:
        self.allowed, self.reason = allowed, reason
        self.done.set()


class Work(NamedTuple):
    """What is to be written now: gates to remove, and members to evict, each with the text of its event."""

    ungate: list[PodRef]
    evict: list[tuple[PodRef, str]]
