"""What one pod holds of cards and devices."""

from dataclasses import dataclass
from typing import Final

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON, MpsClient

REPORTED: Final = "reported"  # the mark of what a node reports of a pod that is gone


@dataclass(frozen=True, slots=True)
class Holding:
    """What one pod holds. `mark`: why it counts, if there is no bound pod (reserved, or its pod is gone). `mps_client`:
    how the pod uses MPS. `charged`: quotas count it.
    """

    uid: str
    namespace: str
    name: str
    node: str
    assignment: Assignment
    mark: str = ""
    mps_client: MpsClient = COMMON
    charged: bool = True

    @property
    def marked_name(self) -> str:
        """The pod's name, and its mark in brackets if it has one."""
        return f"{self.name} ({self.mark})" if self.mark else self.name

    def counts_like(self, other: "Holding") -> bool:
        """Whether no count changes if this takes the place of the other."""
        mine = self.node, self.namespace, self.mps_client, self.assignment, self.charged
        return mine == (other.node, other.namespace, other.mps_client, other.assignment, other.charged)
