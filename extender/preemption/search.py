"""Who must go on one node: with what is kept there for others, and the disruption budgets of the pods there."""

from collections.abc import Collection

from cardwise.core.preemption import preemption
from cardwise.core.preemption.preemption import Victims
from cardwise.kube.pods.budgets import Budgets
from extender.cache.nominated import NominatedPods
from extender.records.pod import WaitingPod


class VictimSearch:
    """Not thread-safe: the state locks."""

    def __init__(self, nominated: NominatedPods) -> None:
        self.budgets = Budgets()
        self._nominated = nominated

    def look(
        self,
        claimant: WaitingPod,
        policy: str,
        node: str,
        chosen: Collection[str] = (),
        *,
        own: Collection[str] = (),
    ) -> Victims | None:
        """Who must go on the node for the pod; None where nobody's going helps. `chosen`: kube-scheduler's own victims;
        `own`: pods of which nothing is kept from this one.
        """
        priority = claimant.request.priority
        kept = self._nominated.kept_on(node, {claimant.uid, *own}, priority)
        there = self._nominated.full(claimant, node, kept=kept, budgets=self.budgets)
        if there is None:
            return None
        return preemption.best(there, self._nominated.newcomer(claimant, policy, priority), chosen)
