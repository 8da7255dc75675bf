"""The figures of Alibaba's articles, and the reasons of refusal."""

import pytest

from cardwise.core import explanation, placement, request
from cardwise.core.cards import Card
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.verdict import Refusal
from tests.build import P100, cards, container, holding, ledger_with_free, pod


def place(ledger, policy="binpack", **asked):
    return placement.place(ledger, [n.name for n in ledger.nodes()], request.parse(pod(**asked)), policy)


def where(placed):
    return placed.node, placed.assignment.indices()


def test_the_node_where_one_card_fits_not_where_the_sum_fits():
    ledger = ledger_with_free(n1=[4069, 0], n2=[4069, 4069], n3=[8138, 0])
    assert where(place(ledger, gpu_mem=8138)) == ("n3", [0])


def test_the_card_with_the_smallest_free_memory_that_fits():
    assert where(place(ledger_with_free(n1=[12207, 8138, 4069, 16276]), gpu_mem=8138)) == ("n1", [1])


def test_spread_takes_the_emptiest_card():
    ledger = ledger_with_free(n1=[12207, 8138, 4069, 16276], n2=[16000, 0])
    assert where(place(ledger, "spread", gpu_mem=8138)) == ("n1", [3])


def test_three_replicas_of_1024_land_on_one_card():
    ledger = ledger_with_free(n1=[P100, P100], n2=[P100, P100], n3=[P100, P100])
    seen = set()
    for i in range(3):
        node, (index,) = where(place(ledger, gpu_mem=1024))
        ledger.hold(holding(f"r{i}", 1024, index, node=node))
        seen.add((node, index))
    assert len(seen) == 1


def test_whole_cards_take_empty_ones_only_and_several_containers_stay_together():
    ledger = ledger_with_free(n1=[P100 - 1, P100, P100])
    assert where(place(ledger, gpu_count=2)) == ("n1", [1, 2])
    mixed = [container("a", gpu_count=1), container("b", gpu_mem=500), container("c", gpu_mem=600)]
    placed = place(ledger, containers=mixed)
    by_container = {key: [s.index for s in shares] for key, shares in placed.assignment.containers.items()}
    assert by_container == {"0": [1], "1": [0], "2": [0]}


def test_a_split_share_takes_different_cards():
    assert where(place(ledger_with_free(n1=[5000, 9000, 4000]), gpu_mem=8000, gpu_count=2)) == ("n1", [0, 2])


def test_mixed_cards_in_one_node():
    ledger = Ledger()
    ledger.set_cards("n1", cards(11441, 24576, 11441))
    assert where(place(ledger, gpu_mem=12000)) == ("n1", [1])
    assert where(place(ledger, gpu_mem=11000)) == ("n1", [0])


def sick(*mems):
    return [Card(index=i, uuid=f"g{i}", mem=mem, healthy=False) for i, mem in enumerate(mems)]


@pytest.mark.parametrize(
    ("node_cards", "asked", "refusal"),
    [
        ([], {"gpu_mem": 1}, Refusal.NOT_OURS),
        (cards(100, 100), {"gpu_mem": 150}, Refusal.CARD_TOO_SMALL),
        (cards(100, 100), {"gpu_count": 3}, Refusal.TOO_FEW_CARDS),
        (sick(100), {"gpu_mem": 50}, Refusal.UNHEALTHY),
        (sick(100), {"gpu_count": 1}, Refusal.UNHEALTHY),
    ],
)
def test_refusals(node_cards, asked, refusal):
    ledger = Ledger()
    ledger.set_cards("n1", node_cards)
    placed = placement.place(ledger, ["n1"], request.parse(pod(**asked)), "binpack")
    assert placed.refusals == {"n1": refusal}


def test_fragmented_memory_is_refused_with_gpushares_text():
    refused = place(ledger_with_free(n1=[4069, 4069]), gpu_mem=8138).refusals["n1"]
    assert refused.text == "Insufficient GPU Memory in one device"
    assert refused.resolvable


def test_clients_and_cores_are_counted_per_card():
    ledger = Ledger(max_clients=1)
    ledger.set_cards("n1", cards(100))
    ledger.hold(holding("u", 10, 0, total=100))
    assert place(ledger, gpu_mem=10).refusals["n1"] is Refusal.TOO_MANY_CLIENTS
    ledger = Ledger()
    ledger.set_cards("n1", cards(100))
    placed = place(ledger, gpu_mem=10, gpu_core=60)
    ledger.hold(Holding("u", "d", "u", "n1", placed.assignment))
    assert place(ledger, gpu_mem=10, gpu_core=41).refusals["n1"] is Refusal.NO_CORE
    assert place(ledger, gpu_mem=10, gpu_core=40).node == "n1"


def test_headroom_is_kept_back():
    ledger = Ledger(headroom=100)
    ledger.set_cards("n1", cards(1000))
    assert place(ledger, gpu_mem=901).refusals["n1"] is Refusal.CARD_TOO_SMALL
    assert place(ledger, gpu_mem=2000, gpu_count=2).refusals["n1"] is Refusal.TOO_FEW_CARDS
    assert place(ledger, gpu_mem=901, gpu_core=10).refusals["n1"] is Refusal.CARD_TOO_SMALL
    assert place(ledger, gpu_mem=900).node == "n1"


def test_a_whole_card_is_what_the_headroom_leaves_of_it():
    ledger = Ledger(headroom=100)
    ledger.set_cards("n1", cards(1000))
    (share,) = place(ledger, gpu_count=1).assignment.shares()
    assert (share.mem, share.total) == (900, 1000)
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_count=2)), "binpack")
    assert [card.short for card in view.cards] == [0]


def test_a_card_of_which_the_headroom_leaves_nothing_is_not_given_away_whole():
    ledger = Ledger(headroom=100)
    ledger.set_cards("n1", cards(100, 100))
    assert place(ledger, gpu_count=1).refusals["n1"] is Refusal.NO_WHOLE_CARD


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("core", [{}, {"gpu_core": 10}])
def test_every_container_is_a_client_of_the_card(policy, core):
    ledger = Ledger(max_clients=4)
    ledger.set_cards("n1", cards(1000))
    for i in range(2):
        ledger.hold(holding(f"h{i}", 1, 0, total=1000))
    two = [container(name, gpu_mem=1, **core) for name in "ab"]
    assert place(ledger, policy, containers=[*two, container("c", gpu_mem=1)]).refusals == {
        "n1": Refusal.TOO_MANY_CLIENTS
    }
    placed = place(ledger, policy, containers=two)
    ledger.hold(Holding("two", "d", "two", "n1", placed.assignment))
    assert ledger.node("n1").clients == [4]


def test_containers_that_an_earlier_claim_brought_are_clients_too():
    ledger = Ledger(max_clients=2)
    ledger.set_cards("n1", cards(100, 100))
    together = [container("a", gpu_mem=20), container("b", gpu_mem=20)]
    placed = place(ledger, containers=[*together, container("c", gpu_mem=20, gpu_count=2)])
    assert isinstance(placed, placement.Unplaceable)


def test_explain_says_how_much_each_card_is_short_and_who_holds_it():
    ledger = ledger_with_free(n1=[4069, 2000])
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_mem=8138)), "binpack")
    assert view.refusal is Refusal.NO_MEMORY
    assert [(c.short, [h.name for h in c.holders]) for c in view.cards] == [(4069, ["n1-0"]), (6138, ["n1-1"])]
