"""The engine and its scored policies: known scores, and the cards that a pod gets."""

from dataclasses import replace

import pytest

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import CardMps, mps_client
from cardwise.core.api.request import ContainerRequest, DeviceRequest, Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.fragments import FragmentMeasure
from cardwise.core.placement.scored.nodetable import NodeTable, tie_break_rank
from cardwise.core.placement.scored.scoring import WeightedShape
from cardwise.core.placement.scored.shapes import RequestShape, RequestSize
from cardwise.core.placement.scored.workload import InvalidWorkload, Workload
from cardwise.core.values.quantity import MiB, Percent
from tests.core.placement.scored.engines import CARD, Loads, knows, load, share, whole, world
from tests.theory import theory_of


def cards_of(placed):
    return [share.index for share in placed.assignment.shares()]


# Fragments, by the formula of FGD's paper.


def fragmentation(*workload):
    total = sum(weight for _, weight in workload)
    weighted = [WeightedShape(RequestShape(request_size), weight / total) for request_size, weight in workload]
    return FragmentMeasure(weighted)


def lines(**nodes):
    ledger, loads, _ = world(**nodes)
    table = NodeTable()
    for name in nodes:
        table.set_node(name, ledger.node(name), loads.free_load(name))
    return table.lines.pick(slice(0, len(nodes)))


WHOLE, HALF, NO_GPU = (
    RequestSize(1, 0, 0, "", 4000, 0),
    RequestSize(1, 500, 0, "", 2000, 0),
    RequestSize(0, 0, 0, "", 1000, 0),
)


def fragments(policy, of):
    return float(of.free.sum() - policy.useful_mib(of).sum())


def test_cards_that_are_too_small_for_a_request_are_fragments_to_it():
    policy = fragmentation((WHOLE, 1), (HALF, 1))
    assert fragments(policy, lines(n=[1000, 300])) == pytest.approx(300)  # to both
    assert fragments(policy, lines(n=[700, 300])) == pytest.approx((1000 + 300) / 2)  # a whole card fits nowhere


def test_all_memory_is_a_fragment_for_requests_without_cards_or_without_free_cpu():
    assert fragments(fragmentation((WHOLE, 1), (NO_GPU, 1)), lines(n=[1000])) == pytest.approx(500)
    starving = RequestSize(1, 500, 0, "", 200_000, 0)
    assert fragments(fragmentation((HALF, 1), (starving, 1)), lines(n=[1000])) == pytest.approx(500)


def test_requests_beyond_the_most_frequent_95_percent_do_not_count():
    rare = RequestSize(1, 900, 0, "", 0, 0)
    assert fragments(fragmentation((HALF, 97), (rare, 3)), lines(n=[700])) == 0.0
    assert fragments(fragmentation((HALF, 9), (rare, 1)), lines(n=[700])) == pytest.approx(70)


def test_fragments_are_those_of_the_example():
    theory, measure = theory_of("cardwise.core.placement.scored.fragments"), fragmentation((WHOLE, 1), (HALF, 1))
    assert f"half request {CARD // 2} MiB; a node has two cards of {CARD} MiB, one empty and one with 300 MiB" in theory
    assert f"Only the {fragments(measure, lines(n=[1000, 300])):g} MiB are a fragment, to both requests" in theory
    after = lines(n=[700, 300])
    assert "A share of 300 MiB on the first card leaves 700 and 300 MiB." in theory
    to_whole, to_half = (fragments(fragmentation((request_size, 1)), after) for request_size in (WHOLE, HALF))
    assert f"the fragments are {to_whole:g} MiB to the one request and {to_half:g} MiB to the other" in theory
    assert f"on average {fragments(measure, after):g} MiB" in theory


def test_free_cards_count_in_cards_whatever_their_size():
    small = fragmentation((WHOLE, 1), (HALF, 1))
    big = FragmentMeasure([WeightedShape(RequestShape(HALF._replace(mem=50_000)), 1.0)])
    assert small.useful_mib(lines(n=[1000])).sum() == pytest.approx(1000)
    assert big.useful_mib(lines(n=[1000])).sum() == 0.0


# The cards that a pod gets.


def test_a_share_goes_where_it_leaves_what_others_can_use():
    policy = "priced"
    # The workload consists of half cards: 500 of an empty card leave capacity for one; 700 free minus 200 still hold
    # one.
    _, _, engine = world(n1=[1000], n2=[700])
    placed = engine.place(share(200), load(), policy)
    assert (placed.node, cards_of(placed)) == ("n2", [0])


def test_binpack_would_take_the_half_that_priced_leaves():
    _, _, engine = world(n1=[500], n2=[700])
    assert engine.place(share(200), load(), "binpack").node == "n1"
    assert engine.place(share(200), load(), "priced").node == "n2"
    assert engine.place(share(200), load(), "spread").node == "n2"


def test_equal_nodes_are_taken_in_an_order_of_our_own():
    policy = "priced"
    names = [f"n{i}" for i in range(20)]
    _, _, engine = world(**{name: [1000, 1000] for name in names})
    assert engine.place(share(500), load(), policy).node == min(names, key=tie_break_rank)
    assert engine.place(share(500), load(), policy, nodes={"n3", "n7"}).node == min("n3", "n7", key=tie_break_rank)


def test_whole_cards_and_several_shares_are_given_together():
    policy = "priced"
    _, _, engine = world(seen=((whole(2), load()), (share(500), load())), n1=[1000, 400, 1000], n2=[1000, 500])
    assert engine.place(whole(2), load(), policy).node == "n1"
    split = PodRequest(containers=(ContainerRequest(key="0", name="main", cards=2, mem=MiB(1000)),))
    placed = engine.place(split, load(), policy, nodes={"n1"})
    assert [(share.index, share.mem) for share in placed.assignment.shares()] == [(0, 500), (2, 500)]
    assert engine.place(whole(3), load(), policy) is None


def test_a_pod_that_names_no_model_avoids_the_scarce_model():
    ledger, loads = Ledger(), Loads()
    for name in ("common-1", "common-2", "common-3", "scarce"):
        of = "scarce" if name == "scarce" else "common"
        ledger.set_cards(name, [Card(index=0, uuid=name, mem=MiB(CARD), model=of, classes=frozenset({of}))])
        loads[name] = Load(100_000, 100_000, 10)
    engine = Engine(ledger, loads)
    knows(engine, [(whole(), load()), (whole(resource_class="scarce"), load())])
    for i in range(3):
        placed = engine.place(whole(), load(), "priced")
        assert placed.node != "scarce"
        ledger.set_holding(Holding(str(i), "ns", "p", placed.node, placed.assignment))
    assert engine.place(whole(resource_class="scarce"), load(), "priced").node == "scarce"


def test_before_anything_is_learned_and_for_what_is_too_manifold_binpack_decides():
    policy = "priced"
    ledger, loads, taught = world(n1=[500], n2=[700])
    fresh = Engine(ledger, loads)
    assert fresh.place(share(200), load(), policy).node == "n1"
    two = PodRequest(containers=(*share(200).containers, ContainerRequest(key="1", name="side", cards=1)))
    assert taught.place(two, load(), policy) is None  # a share and a whole card: no node has capacity for both
    with_device = PodRequest(containers=(), devices=(DeviceRequest("0", "rdma", 1),))
    assert taught.place(with_device, load(), policy) is None


def test_scores_say_the_order_in_which_nodes_would_be_taken():
    _, _, engine = world(n1=[500], n2=[700], n3=[100])
    scores = engine.scores(share(200), load(), "priced", ["n1", "n2", "n3", "unknown"])
    assert sorted(scores) == ["n1", "n2"]
    assert max(scores, key=scores.__getitem__) == engine.place(share(200), load(), "priced").node
    assert engine.scores(share(200), load(), "binpack", ["n1"]) is None


# The workload.


def test_the_workload_survives_as_text():
    engine = world(seen=[(share(500), load()), (share(500), load()), (whole(8, "a100"), load(cpu=9))])[2]
    again = Workload()
    again.load(engine.workload.dump())
    assert again.counts == engine.workload.counts
    assert again.dump() == engine.workload.dump()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"version":2,"requests":[]}',
        '{"version":1,"requests":[[1,2]]}',
        '{"version":1,"requests":[[-1,0,0,"",0,0,1]]}',
    ],
)
def test_a_workload_that_is_none_is_refused_and_changes_nothing(text):
    workload = Workload()
    workload.count_arrival(RequestSize(1, 500, 0, "", 0, 0))
    with pytest.raises(InvalidWorkload):
        workload.load(text)
    assert workload.counts == {RequestSize(1, 500, 0, "", 0, 0): 1.0}


def test_learning_is_due_after_half_as_many_further_arrivals():
    workload = Workload()
    due = []
    for count in range(1, 60):
        workload.count_arrival(RequestSize(1, 500, 0, "", 0, 0))
        if workload.is_learning_due:
            due.append(count)
            workload.mark_learned()
    assert due == [16, 24, 36, 54]


def test_what_was_seen_long_ago_fades_and_the_rarest_are_forgotten():
    workload = Workload()
    for _ in range(15_000):
        workload.count_arrival(RequestSize(1, 500, 0, "", 0, 0))
    for i in range(2000):
        workload.count_arrival(RequestSize(1, 100, 0, "", i, 0))
    assert len(workload.counts) <= 512
    assert workload.counts[RequestSize(1, 500, 0, "", 0, 0)] == 15_000
    for _ in range(40_000):
        workload.count_arrival(RequestSize(1, 300, 0, "", 0, 0))
    assert workload.counts[RequestSize(1, 500, 0, "", 0, 0)] < workload.counts[RequestSize(1, 300, 0, "", 0, 0)] / 2


# MPS: pods without it stay together.


def managed_world(**nodes):
    """As `world`, with MPS ready on each card; `hold_share` lets a pod with this demand hold 100 MiB of a card."""
    ledger, _, engine = world(**nodes)
    for name in nodes:
        ledger.set_cards(name, [replace(card, mps=CardMps(ready=True)) for card in ledger.node(name).cards])

    def hold_share(node, index, demand):
        held = Assignment({"0": (CardShare(index, f"{node}-{index}", MiB(100), Percent(0), MiB(CARD)),)})
        client = mps_client(Isolation(demand), 0)
        ledger.set_holding(Holding(f"{node}-{index}-{demand}", "d", "x", node, held, mps_client=client))

    return ledger, engine, hold_share


def isolated(mem, demand, cards=1):
    container_request = ContainerRequest(key="0", name="main", cards=cards, mem=MiB(mem * cards))
    return PodRequest(containers=(container_request,), isolation=Isolation(demand))


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("policy", ["priced", "binpack", "spread"])
def test_a_share_without_mps_closes_a_card_only_where_no_other_takes_it(policy, cards):
    _, engine, hold_share = managed_world(n1=[1000] * 2, n2=[1000] * 2, n3=[1000] * 2)
    hold_share("n1", 0, "advisory")
    hold_share("n2", 0, "none")
    hold_share("n2", 1, "none")
    pod_request = isolated(500, "none", cards)
    assert engine.place(pod_request, load(), policy).node == "n2"
    scores = engine.scores(pod_request, load(), policy, ["n1", "n2", "n3"])
    assert scores is None or max(scores, key=scores.get) == "n2"
    assert engine.place(isolated(950, "none"), load(), policy).node in ("n1", "n3")


@pytest.mark.parametrize("policy", ["priced", "binpack", "spread"])
def test_a_share_with_mps_takes_the_last_empty_card_of_a_node_only_where_no_other_has_space(policy):
    _, engine, hold_share = managed_world(n1=[1000] * 2)
    hold_share("n1", 1, "advisory")
    assert cards_of(engine.place(isolated(500, "advisory"), load(), policy)) == [1]
    assert cards_of(engine.place(isolated(950, "advisory"), load(), policy)) == [0]
