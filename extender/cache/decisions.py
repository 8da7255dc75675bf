"""What this process has decided about a pod, and how far that has come.

Apart from the state, which says what of it counts: these are its words, spoken by filter and bind as well.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cardwise.core.api.assignment import Assignment
from cardwise.core.placement.ledger import Holding


class Stage(Enum):
    """How far a decision of ours has come that no watch event confirms yet; the value is the holding's mark."""

    PLANNED = "plan"  # filter has answered this node
    HELD = "gang"  # the same, for a member of a gang: it ends with the plan of the gang, not by itself
    BINDING = "binding"  # a thread is posting it
    UNSURE = "unsure"  # posted, and the answer was lost
    BOUND = "bound"  # posted and accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What to post. `unsure`: an earlier call may have posted it already, and nobody knows whether it will land."""

    assignment: Assignment
    unsure: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The pod has a node already, or may have: no other node is right."""

    node: str
    assignment: Assignment
    stage: Stage


@dataclass(slots=True)
class Tentative:
    """A decision with its age. `gone`: the pod vanished while a thread was posting. `term`: of leadership.py.

    `again`: not to be looked up before, after so many `tries` in vain.
    """

    holding: Holding
    stage: Stage
    since: float
    term: int = 0
    gone: bool = False
    tries: int = 0
    again: float = -math.inf


@dataclass(frozen=True, slots=True)
class Ghost:
    """What a pod held that vanished without proof that its containers had ended."""

    holding: Holding
    until: float


class Waiter(NamedTuple):
    """A pod without a node."""

    uid: str
    namespace: str
    name: str

    @property
    def pod(self) -> str:
        """As lines of the log name it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: how long a plan waits for its bind, and a vanished pod's share for its node to report it.

    `confirm`: after this a decision that no event has confirmed is looked up; longer than the API server may work on
    one request.
    """

    hold: float = 30.0
    ghost: float = 30.0
    confirm: float = 75.0
