"""Victims by card: pods whose containers need cards of their own, on a full node."""

from dataclasses import replace

import pytest

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement import fitting
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Scorer
from cardwise.core.preemption import cardvictims, preemption
from cardwise.core.preemption.preemption import FullNode, Preemptor, Resident, Victims
from cardwise.core.preemption.setcover import CoverEffort, Victim
from tests.theory import theory_of
from tests.working import work

MEM = 16276  # MiB of a card
PODS_PER_CARD = 2
CPU = 1000  # free millicores of the node


def full_node(cards: int, *, classed: int | None = None) -> FullNode:
    """A node whose cards hold `PODS_PER_CARD` pods each. `classed`: how many of its cards, the last ones, are of the
    class "x"; None: all.
    """
    ledger, residents = Ledger(), []
    first_classed = 0 if classed is None else cards - classed
    of_class = [frozenset({"x"}) if i >= first_classed else frozenset() for i in range(cards)]
    ledger.set_cards("n", [Card(index=i, uuid=f"GPU-{i}", mem=MEM, classes=of_class[i]) for i in range(cards)])
    for i in range(cards):
        for j in range(PODS_PER_CARD):
            share = CardShare(i, f"GPU-{i}", MEM // PODS_PER_CARD, 0, MEM)
            holding = Holding(f"r{i}-{j}", "d", f"r{i}-{j}", "n", Assignment({"0": (share,)}))
            ledger.set_holding(holding)
            residents.append(Resident(holding.uid, 0, Load(0, 0, 1), holding))
    return FullNode(kinds=ledger.kinds, node=ledger.node("n"), free=Load(CPU, 0, 110), residents=residents)


def pod_of(*containers: tuple[int, int, str]) -> PodRequest:
    """A pod with a container for each tuple: number of cards, MiB of each (0 for whole cards), and class."""
    return PodRequest(
        containers=tuple(
            ContainerRequest(key=str(i), name=f"c{i}", cards=cards, mem=cards * mem, resource_class=of_class)
            for i, (cards, mem, of_class) in enumerate(containers)
        )
    )


def victims_for(node: FullNode, request: PodRequest, load: Load = Load(0, 0, 1)) -> Victims | None:
    return preemption.least_harmful_victims(node, Preemptor(request=request, load=load, priority=9))


def unlike_shares(count: int) -> list[tuple[int, int, str]]:
    """Containers with tiny shares of two cards, no two of the same size."""
    return [(2, 12 + i, "x") for i in range(count)]


@pytest.mark.parametrize(("cards", "shares"), [(8, 3), (8, 6), (8, 15), (4, 8)])
def test_choices_that_lead_nowhere_cost_effort(cards, shares):
    """All but two cards are taken whole, so all the shares must be on these two."""
    request = pod_of(*unlike_shares(shares), (cards - 2, 0, ""))
    with work() as done:
        victims = victims_for(full_node(cards), request)
    assert victims is not None
    whole_cards, shared_cards = (cards - 2) * PODS_PER_CARD, 2
    assert len(victims.uids) == whole_cards + shared_cards
    assert done.steps < 500_000


@pytest.mark.parametrize("shares", [3, 8])
def test_a_search_without_a_set_ends_when_its_effort_is_spent(shares):
    """Cards can be cleared, but no eviction frees the cpu that the pod requests."""
    request = pod_of(*unlike_shares(shares), (6, 0, ""))
    with work() as done:
        assert victims_for(full_node(8), request, Load(CPU + 1, 0, 1)) is None
    assert done.steps < 500_000


def test_shares_that_fill_all_cards_find_one_each():
    request = pod_of(*((2, 12_000 + i, "") for i in range(4)))
    victims = victims_for(full_node(8), request)
    assert victims is not None
    assert len(victims.uids) == 16
    assert len({share.uuid for share in victims.assignment.shares()}) == 8


@pytest.mark.parametrize("shares", [1, 3, 8])
def test_whole_cards_leave_those_of_a_class_to_requests_that_need_them(shares):
    """The two cards of the class are the only ones for the shares, and any six are good enough as whole cards."""
    victims = victims_for(full_node(8, classed=2), pod_of((6, 0, ""), *unlike_shares(shares)))
    assert victims is not None
    shares_of_class = [share for share in victims.assignment.shares() if not share.whole]
    assert {share.index for share in shares_of_class} == {6, 7}


def test_a_pod_with_a_thousand_cards_is_no_deep_recursion():
    assert victims_for(full_node(8), pod_of(*((8, 1 + i, "") for i in range(200)))) is None


def test_where_pods_only_terminate_the_engine_alone_chooses_the_cards():
    """What was freed for a pod is found again, also for a pod with so many cards that no victims are searched for."""
    node = full_node(16)
    terminating = replace(node, residents=[resident._replace(is_leaving=True) for resident in node.residents])
    request = pod_of(*((16, 100 + i, "") for i in range(16)))
    assert victims_for(node, request) is None
    victims = victims_for(terminating, request)
    assert victims is not None
    assert victims.uids == ()
    assert victims.assignment is not None


def test_placements_that_are_tried_cost_effort(monkeypatch):
    """Whether each victim must go is a placement of its own: with the effort spent, the others count as needed."""
    placements = []
    place_on = Scorer.place_on

    def count_placement(self, node, effort=None):
        placements.append(effort)
        return place_on(self, node, effort)

    monkeypatch.setattr(Scorer, "place_on", count_placement)
    monkeypatch.setattr(preemption, "_PLACEMENT_STEPS", 10)
    request = pod_of(*unlike_shares(2), (6, 0, ""))  # three requests: two steps for each placement
    victims = victims_for(full_node(8), request)
    assert victims is not None
    assert len(victims.uids) == 14
    *tried, last = placements
    assert len(tried) == 5
    assert last is None, "the last one has an effort of its own"


def test_the_example_of_the_docstring(monkeypatch):
    theory, gib, requested, size = theory_of("cardwise.core.preemption.cardvictims"), 1024, 8, 10
    pods_by_card = ((5, 5), (10,), (9, 1))
    ledger, candidates, sizes_by_name = Ledger(), list[list[Victim]](), dict[str, int]()
    ledger.set_cards("n", [Card(index=i, uuid=f"GPU-{i}", mem=size * gib) for i in range(len(pods_by_card))])
    for i, sizes in enumerate(pods_by_card):
        candidates.append([])
        for j, pod_size in enumerate(sizes):
            share = CardShare(i, f"GPU-{i}", pod_size * gib, 0, size * gib)
            holding = Holding(f"r{i}-{j}", "d", f"r{i}-{j}", "n", Assignment({"0": (share,)}))
            ledger.set_holding(holding)
            amounts = cardvictims.freed_amounts(ledger.node("n"), holding)
            candidates[i].append(Victim(holding.uid, amounts, (f"budget-{holding.uid}",)))
            sizes_by_name[holding.uid] = pod_size
    evaluated, evaluate = list[set[int]](), cardvictims._CardChoice._evaluate

    def record_evaluated(choice, uses):
        evaluated.append(set(uses))
        evaluate(choice, uses)

    monkeypatch.setattr(cardvictims._CardChoice, "_evaluate", record_evaluated)

    def cheapest(cards: int, victims: list[Victim], protected: str = "") -> tuple[int, str]:
        """The cost and the pods of the result, if the budget of the protected pod allows no eviction."""
        evaluated.clear()
        plan = fitting.make_search_plan(
            fitting.card_requests(pod_of((cards, requested * gib, ""))), ledger.kinds, headroom=()
        )
        budgets = {budget: int(budget != f"budget-{protected}") for victim in victims for budget in victim.budgets}
        cover = cardvictims.find_cheapest_victims(
            ledger.node("n"),
            plan,
            victims,
            needs={},
            allowed=budgets,
            is_valid=lambda _cover: True,
            effort=CoverEffort(),
        )
        assert cover is not None
        sizes = sorted((sizes_by_name[victim.name] for victim in cover.victims), reverse=True)
        return cover.cost, ", ".join(map(str, sizes))

    assert f"a pod requests {requested} GiB of each of 2 cards. Three full cards of {size} GiB hold" in theory
    (a, b), (c,), (d, e) = pods_by_card
    assert f"pods of {a} and {b} GiB (card 0), of {c} GiB (card 1), and of {d} and {e} GiB (card 2)" in theory
    of_card_0, of_card_1, of_card_2 = (cheapest(1, victims)[0] for victims in candidates)
    assert f"To clear one card costs {of_card_0}, {of_card_1} and {of_card_2}." in theory
    all_candidates = [victim for victims in candidates for victim in victims]
    cost, pods = cheapest(2, all_candidates)
    assert f"So cards 1 and 2 are tried first: {{{pods}}} at a cost of {cost}." in theory
    assert evaluated == [{1, 2}], "the other choices are skipped"
    assert f"Any choice with card 0 costs {of_card_0 + min(of_card_1, of_card_2)} or more and is skipped." in theory
    cost, pods = cheapest(2, all_candidates, protected=candidates[1][0].name)
    assert f"If the budget of the {c} GiB pod forbids its eviction, card 1 comes last" in theory
    assert f"Then the result is {{{pods}}} at a cost of {cost}." in theory
    assert evaluated == [{2, 0}]
