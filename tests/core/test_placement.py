"""The figures of Alibaba's articles, types and quotas, and the reasons of refusal."""

import pytest

from cardwise.core import explanation, placement, quotas, request
from cardwise.core.cards import Card
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.quotas import Charge, Entry
from cardwise.core.verdict import Refusal
from tests.build import P100, cards, container, holding, ledger_with_free, pod


def place(ledger, policy="binpack", **asked):
    return placement.place(ledger, [n.name for n in ledger.nodes()], request.parse(pod(**asked)), policy)


K80, V100 = ({"mem": 11441, "model": "Tesla K80", "classes": frozenset({"k80"})},
             {"mem": 16160, "model": "Tesla V100", "classes": frozenset({"v100", "fast"}), "priority": 5})  # fmt: skip


def typed_ledger(**nodes):
    """Nodes of cards such as K80."""
    ledger = Ledger()
    for node, kinds in nodes.items():
        ledger.set_cards(node, [Card(index=i, uuid=f"GPU-{node}-{i}", **kind) for i, kind in enumerate(kinds)])
    return ledger


def of_class(device_class, **asked):
    made = container(device_class, **asked)
    made["resources"]["limits"][f"cardwise.dev/{device_class}"] = str(asked.get("gpu_count", 1))
    return made


def quota(ledger, *entries):
    return [quotas.room(entry, ledger.used("default", entry)) for entry in entries]


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


def test_a_class_is_told_apart_card_by_card():
    ledger = typed_ledger(n1=[K80, V100], n2=[K80, K80])
    assert where(place(ledger, containers=[of_class("v100", gpu_mem=100)])) == ("n1", [1])
    assert where(place(ledger, containers=[of_class("k80", gpu_count=2)])) == ("n2", [0, 1])
    refused = place(ledger, containers=[of_class("v100", gpu_count=2)]).refusals
    assert refused == {"n1": Refusal.TOO_FEW_CARDS, "n2": Refusal.NO_SUCH_TYPE}
    refused = place(ledger, containers=[of_class("k80", gpu_mem=12000)]).refusals
    assert refused == {"n1": Refusal.CARD_TOO_SMALL, "n2": Refusal.CARD_TOO_SMALL}
    assert set(place(ledger, containers=[of_class("a100", gpu_mem=1)]).refusals.values()) == {Refusal.NO_SUCH_TYPE}


def test_containers_of_a_pod_share_a_card_per_class():
    several = [of_class("k80", gpu_mem=10), of_class("v100", gpu_mem=10), of_class("k80", gpu_mem=20)]
    placed = place(typed_ledger(n1=[V100, K80, K80]), containers=[*several, container("any", gpu_count=1)])
    by_container = [[s.index for s in placed.assignment.containers[key]] for key in "0123"]
    assert by_container == [[1], [0], [1], [2]]


def test_scarce_cards_stay_free_for_who_asks_for_them():
    ledger = typed_ledger(n1=[V100, K80], n2=[V100])
    ledger.hold(holding("v", 16000, 0, node="n2", total=16160))
    for policy in ("binpack", "spread"):
        assert where(place(ledger, policy, gpu_mem=100)) == ("n1", [1])
        assert where(place(ledger, policy, gpu_mem=12000)) == ("n1", [0])
        assert where(place(ledger, policy, gpu_count=1)) == ("n1", [1])
        assert place(ledger, policy, containers=[of_class("fast", gpu_mem=100)]).assignment.shares()[0].total == 16160


def test_a_quota_steers_what_names_no_type_and_refuses_the_rest():
    ledger = typed_ledger(n1=[K80, V100], n2=[K80])
    full = quota(ledger, Entry(model="Tesla K80", memory=999))

    def ask(rooms, **asked):
        made = request.parse(pod(**asked))
        return placement.place(ledger, ["n1", "n2"], made, "binpack", rooms)

    assert where(ask(full, gpu_mem=999)) == ("n1", [0])
    assert where(ask(full, gpu_mem=1000)) == ("n1", [1])
    assert ask(full, gpu_mem=17000).refusals["n1"] is Refusal.CARD_TOO_SMALL, "the quota is not why"
    named = ask(full, containers=[of_class("k80", gpu_mem=1000)])
    assert set(named.refusals.values()) == {Refusal.QUOTA}
    assert not Refusal.QUOTA.resolvable, "nobody else's pods are preempted for it"
    assert ask(quota(ledger, Entry(cards=1)), gpu_count=2).refusals == {
        "n1": Refusal.QUOTA,
        "n2": Refusal.TOO_FEW_CARDS,
    }


def test_a_quota_counts_all_cards_of_a_request_together():
    ledger = typed_ledger(n1=[K80, K80, V100])
    one = quota(ledger, Entry(device_class="k80", shares=1))
    split = request.parse(pod(gpu_mem=200, gpu_count=2))
    assert where(placement.place(ledger, ["n1"], split, "binpack", one)) == ("n1", [0, 2])
    unlimited = placement.place(ledger, ["n1"], split, "binpack")
    assert where(unlimited) == ("n1", [0, 1])
    assert placement.exceeded(ledger, unlimited, one) == [one[0].entry]
    assert placement.place_on(ledger.node("n1"), split, "binpack", quota(ledger, Entry(shares=1))) is Refusal.QUOTA


def test_what_a_namespace_has_used_of_a_quota():
    ledger = typed_ledger(n1=[K80, V100])
    every, k80 = Entry(shares=9), Entry(device_class="k80", shares=9)
    placed = place(ledger, containers=[of_class("k80", gpu_count=1), of_class("v100", gpu_mem=100)])
    ledger.hold(Holding("u", "default", "u", "n1", placed.assignment))
    assert ledger.used("default", every) == Charge(2, 11541, 1)
    assert ledger.used("default", k80) == Charge(1, 11441, 1)
    assert ledger.used("other", every) == Charge()
    ledger.set_cards("n1", [])
    assert ledger.used("default", every) == Charge(2, 11541, 1), "held on cards that nobody reports now"
    assert ledger.used("default", k80) == Charge(1, 11441, 1), "it counts as what it was until it is back"
    ledger.release("u")
    assert ledger.used("default", every) == Charge()


def test_explain_says_which_cards_are_not_for_the_request():
    ledger = typed_ledger(n1=[K80, V100, {"mem": 1000}])
    rooms = quota(ledger, Entry(device_class="k80", shares=0))
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_mem=17000)), "binpack", rooms)
    assert [(c.closed, c.short) for c in view.cards] == [("quota", 0), ("", 840), ("", 16000)]
    asked = request.parse(pod(containers=[of_class("k80", gpu_mem=1)]))
    (view,) = explanation.explain(ledger, ["n1"], asked, "binpack", rooms)
    assert view.refusal is Refusal.QUOTA
    assert [c.closed for c in view.cards] == ["quota", "type", "type"]
    assert [c.classes for c in view.cards] == [{"k80"}, {"v100", "fast"}, set()]
    (view,) = explanation.explain(ledger, ["n1"], asked, "binpack")
    assert (view.refusal, [c.closed for c in view.cards]) == (None, ["", "type", "type"])


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
