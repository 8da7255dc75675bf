"""The types of the gangs' interface: settings, the holds that binds wait for, what is to be written.

What is decided is in `gangs`.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from cardwise.core.api import policies
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import GangPatience, Member
from cardwise.core.placement.ledger import Holding, Ledger
from extender.cache.nodeload import NodeLoads
from extender.cache.reservations import Reservations
from extender.cache.unschedulable import UnschedulablePods
from extender.queue.ahead import Ahead
from extender.records.podref import PodRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`max_waiting`: how many binds may wait at once. `policy`: of placement, for pods that name none."""

    patience: GangPatience = field(default_factory=GangPatience)
    policy: str = policies.DEFAULT
    max_waiting: int = 0


@dataclass(slots=True, eq=False)
class Hold:
    """A plan, as those know it who wait in bind. `done`: it is decided; `go`: to be posted, else `reason`."""

    key: str
    since: float
    done: threading.Event = field(default_factory=threading.Event)
    go: bool = False
    reason: str = ""

    def settle(self, *, go: bool, reason: str = "") -> None:
        self.go, self.reason = go, reason
        self.done.set()


class Parts(NamedTuple):
    """The parts of the state that plans are made of. `freed` counts the times at which room may have come on cards or
    in quotas; `good`: whether a holding still stands; `headroom`: what quotas leave to a namespace; `kept`: around a
    plan for these pods of this priority, for what is kept from them; `may`: whether a gang of this priority may be
    planned now, see `turns`; `nominated`: the node where others have gone for the pod, or "".
    """

    ledger: Ledger
    reservations: Reservations
    loads: NodeLoads
    unschedulable: UnschedulablePods
    freed: Callable[[], int]
    good: Callable[[Holding, PodRequest], bool]
    headroom: Callable[[str], Sequence[Headroom]]
    kept: Callable[[Collection[str], int], AbstractContextManager[None]]
    may: Callable[[int], bool]
    nominated: Callable[[str], str]
    ahead: Callable[[], Ahead]


def no_place(member: Member) -> str:
    """Why a plan failed."""
    return f"there is no place for {member.name} beside the others"


class Work(NamedTuple):
    """What is to be written now: gates to take away, and members to evict with what to tell about each."""

    free: list[PodRef]
    evict: list[tuple[PodRef, str]]
