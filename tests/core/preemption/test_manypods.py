"""Preemption on nodes with many pods: the work grows with their number, not with its square."""

import pytest

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.preemption import preemption
from cardwise.core.preemption.preemption import FullNode, Preemptor, Resident
from tests.working import work


def node_with(pods: int, *, cards: int = 1) -> FullNode:
    """A full node: each pod holds 10 MiB of a card, and a millicore."""
    ledger, residents = Ledger(max_clients=pods), []
    mem = 10 * pods // cards
    ledger.set_cards("n", [Card(index=i, uuid=f"GPU-{i}", mem=mem) for i in range(cards)])
    for i in range(pods):
        share = CardShare(i % cards, f"GPU-{i % cards}", 10, 0, mem)
        holding = Holding(f"r{i:04}", "d", f"r{i:04}", "n", Assignment({"0": (share,)}))
        ledger.set_holding(holding)
        residents.append(Resident(holding.uid, i, Load(1, 0, 1), holding))
    return FullNode(kinds=ledger.kinds, node=ledger.node("n"), free=Load(0, 0, 0), residents=residents)


def preemptor(mem: int, *, cards: int = 1, cpu: int = 0) -> Preemptor:
    """A pod with `mem` MiB of each card (0: whole cards), and `cpu` millicores."""
    container = ContainerRequest(key="0", name="c", cards=cards, mem=mem * cards)
    return Preemptor(request=PodRequest(containers=(container,)), load=Load(cpu, 0, 1), priority=1 << 20)


@pytest.mark.parametrize("pods", [96, 384])
def test_each_victim_of_kube_scheduler_is_explained_once(pods):
    node = node_with(pods, cards=8)
    chosen = [resident.uid for resident in node.residents]
    with work() as done:
        victims = preemption.least_harmful_victims(node, preemptor(0, cards=8), chosen)
    assert victims is not None
    assert set(victims.uids) == set(chosen)
    assert done.steps < 1500 * pods


def test_the_least_important_of_a_thousand_pods_are_candidates():
    node = node_with(1200)
    victims = preemption.least_harmful_victims(node, preemptor(10 * 400, cpu=400))
    assert victims is not None
    assert sorted(victims.uids) == [f"r{i:04}" for i in range(400)]


def test_a_pod_that_needs_the_end_of_a_thousand_others_preempts_none():
    """A deep recursion, and seconds of work: kubelets run 110 pods by default."""
    assert preemption.least_harmful_victims(node_with(1200), preemptor(10 * 1100, cpu=1100)) is None
