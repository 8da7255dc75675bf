"""The cards and devices that one pod holds."""

from dataclasses import dataclass
from typing import Final

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON_CLIENT, MpsClient

REPORTED_PHASE: Final = "reported"  # the phase name of shares that a node still reports for a deleted pod


@dataclass(frozen=True, slots=True)
class Holding:
    """The cards and devices that one pod holds.

    phase_name: the phase of the pod's reservation, as in metrics and in `cardwise inspect`; "" for a bound pod.
    mps_client: how the pod uses MPS.
    charged: whether quotas count the holding.
    """

    uid: str
    namespace: str
    name: str
    node: str
    assignment: Assignment
    phase_name: str = ""
    mps_client: MpsClient = COMMON_CLIENT
    charged: bool = True

    @property
    def name_with_phase(self) -> str:
        """The pod's name, with the phase in brackets unless the pod is bound."""
        return f"{self.name} ({self.phase_name})" if self.phase_name else self.name

    def counts_like(self, other: "Holding") -> bool:
        """Whether all counts stay the same when this holding replaces the other."""
        mine = self.node, self.namespace, self.mps_client, self.assignment, self.charged
        return mine == (other.node, other.namespace, other.mps_client, other.assignment, other.charged)
