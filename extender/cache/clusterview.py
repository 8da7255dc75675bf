"""What planners read of the cluster: live, as part of `Cache`, or as a snapshot (docs/design/0032-snapshots.md).

A snapshot belongs to the planner that took it, which may change it and needs no lock for it. The live view is not
thread-safe: the state locks.
"""

from contextlib import AbstractContextManager, nullcontext

from cardwise.core.api.quotas import Headroom
from cardwise.core.placement.ledger import Ledger
from cardwise.kube.pods.budgets import Budgets
from extender.cache.gangcards import GangCards
from extender.cache.nodeload import NodeLoads
from extender.cache.nominations import Nominations
from extender.cache.quotas import Quotas


class ClusterView:
    """The cards and their holdings, cpu and memory of nodes, quotas, PodDisruptionBudgets, and what is reserved for
    nominated pods and for a gang.
    """

    def __init__(
        self,
        ledger: Ledger,
        loads: NodeLoads,
        *,
        quotas: Quotas,
        budgets: Budgets,
        nominations: Nominations,
        gang_cards: GangCards,
    ) -> None:
        self.ledger = ledger
        self.loads = loads
        self.limits = quotas
        self.budgets = budgets
        self.nominations = nominations
        self.gang_cards = gang_cards

    def snapshot(self) -> "ClusterView":
        """The cluster as it is now. Later changes of one are not seen in the other."""
        ledger, loads = self.ledger.snapshot(), self.loads.snapshot()
        return ClusterView(
            ledger,
            loads,
            quotas=self.limits.snapshot(),
            budgets=self.budgets.snapshot(),
            nominations=self.nominations.snapshot(loads),
            gang_cards=self.gang_cards.snapshot(ledger),
        )

    def headroom(self, namespace: str) -> list[Headroom]:
        """The amounts that the namespace's quotas still allow."""
        return self.limits.headroom(self.ledger, namespace)

    def headroom_excluding(self, namespace: str, uid: str) -> list[Headroom]:
        """As `headroom`, without the pod's own holding."""
        if not self.limits.has_quota(namespace):
            return []
        with self.exclude_pod(uid):
            return self.headroom(namespace)

    def exclude_pod(self, uid: str) -> AbstractContextManager[None]:
        """Context manager: inside, the pod's own reservation does not count."""
        return self.ledger.what_if(released=(uid,)) if self.ledger.holding(uid) is not None else nullcontext()
