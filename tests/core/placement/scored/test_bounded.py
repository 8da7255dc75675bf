"""The engine when a decision must not score all nodes: the work that it leaves to `run_background_step`, and the errors
that it never makes.
"""

import random

import numpy as np
import pytest

from cardwise.core.api import request
from cardwise.core.api.cards import Card
from cardwise.core.placement import fitting
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.nodefeatures import NodeFeatures
from cardwise.core.placement.scored.nodetable import NodeTable
from cardwise.core.placement.scored.pricing import Pricing
from cardwise.core.placement.scored.rows import SAMPLE_NODES, ShapeScores
from cardwise.core.placement.scored.scoring import WeightedShape, WorkloadModel
from cardwise.core.placement.scored.shapes import RequestShape, RequestSize
from cardwise.core.placement.searching import CheckLimit, SearchTooLong
from cardwise.core.values.quantity import MiB
from tests.build import container, pod
from tests.core.placement.scored.engines import CARD, fill, knows, load, share, warm, world


def test_a_sample_of_many_stale_nodes_decides_and_the_rest_is_warmed():
    names = [f"n{i}" for i in range(1200)]
    ledger, loads, _ = world(**{name: [1000] for name in names}, best=[150])
    engine = Engine(ledger, loads, max_scored_nodes=100)
    assert not engine.can_decide("priced")  # none of the 1200 nodes has been scored yet
    warm(engine)
    assert not engine.can_decide("priced")  # nothing has been learned
    knows(engine, [(share(470), load())])
    assert engine.place(share(150), load(), "priced").node == "best"  # as `binpack` chooses
    warm(engine)
    assert engine.can_decide("priced")
    assert engine.place(share(150), load(), "priced") is not None  # it scores a sample
    assert not engine.run_background_step(64), "of sizes that come but once nothing is scored beforehand"
    assert engine.place(share(150), load(), "priced") is not None
    assert engine.run_background_step(64)
    warm(engine)
    # An empty card would no longer have capacity for a second share of 470.
    assert engine.place(share(150), load(), "priced").node == "best"


def test_a_new_workload_is_scanned_in_steps_and_old_scores_are_used_until_then():
    ledger, loads, _ = world(n1=[500], n2=[700])
    engine = Engine(ledger, loads, max_scored_nodes=1)
    knows(engine, [(share(500), load())])
    engine.place(share(300), load(), "priced")
    warm(engine)
    # n1 would no longer have capacity for a share of 500
    assert engine.place(share(300), load(), "priced").node == "n2"
    knows(engine, [(share(700), load())] * 99)
    assert engine.place(share(300), load(), "priced").node == "n2"
    warm(engine)
    assert engine.place(share(300), load(), "priced").node == "n1"  # the new workload consists of shares of 700


def bounded(frees, max_scored_nodes=20):
    """An engine that can decide by `priced` among more nodes than it scores at once."""
    ledger, loads, _ = world(**frees)
    engine = Engine(ledger, loads, max_scored_nodes=max_scored_nodes)
    warm(engine)
    knows(engine, [(share(470), load())])
    engine.place(share(150), load(), "priced")
    warm(engine)
    assert engine.can_decide("priced")
    return ledger, loads, engine


def test_where_all_that_fits_has_changed_a_node_is_found_all_the_same():
    _, _, engine = bounded({f"n{i}": [1000] for i in range(200)})
    for i in range(200):
        engine.mark_changed(f"n{i}")
    among = {f"n{i}" for i in range(100, 200)}
    assert engine.place(share(150), load(), "priced", among).node in among


def test_what_has_just_got_room_is_found_before_a_pod_is_refused():
    ledger, loads, engine = bounded({f"n{i}": [100] for i in range(200)})
    assert engine.place(share(150), load(), "priced") is None
    ledger.release("n77-0-900")
    for name in sorted(loads):
        engine.mark_changed(name)
    assert engine.place(share(150), load(), "priced").node == "n77"


def test_scarce_cards_are_not_given_away_because_others_have_changed():
    ledger, _, engine = bounded({f"n{i}": [1000] for i in range(100)} | {f"z{i}": [1000] for i in range(30)})
    for i in range(30):
        scarce = Card(index=0, uuid=f"z{i}-0", mem=MiB(CARD), model="m", classes=frozenset({"gold"}), priority=5)
        ledger.set_cards(f"z{i}", [scarce])
    warm(engine)
    assert engine.place(share(150), load(), "priced").node.startswith("n")
    for i in range(100):
        engine.mark_changed(f"n{i}")
    assert engine.place(share(150), load(), "priced").node.startswith("n")


def test_nodes_that_have_just_filled_get_no_score():
    ledger, loads, engine = bounded({f"n{i}": [1000] for i in range(100)})
    for i in range(60):
        fill(ledger, f"n{i}", 0, CARD)
    scores = engine.scores(share(150), load(), "priced", set(loads))
    assert set(scores) == {f"n{i}" for i in range(60, 100)}


def test_among_a_few_nodes_it_decides_as_if_it_knew_all():
    draw = random.Random(5)
    frees = {f"n{i}": [draw.randrange(0, CARD, 10) for _ in range(4)] for i in range(300)}
    _, _, engine = bounded(frees, max_scored_nodes=30)
    _, _, all_knowing = bounded(frees, max_scored_nodes=None)
    for mem in range(100, 900, 20):
        among = set(draw.sample(sorted(frees), 20))
        placed, best = (each_engine.place(share(mem), load(), "priced", among) for each_engine in (engine, all_knowing))
        assert (placed and placed.node) == (best and best.node)


@pytest.mark.parametrize("eligible", [290, 310, 590])
def test_the_few_nodes_with_room_among_those_that_a_pod_may_have_are_found(eligible):
    fitting_nodes = {f"n{i}" for i in range(600 - eligible, 600 - eligible + 3)}
    others = {f"n{i}" for i in range(600 - eligible)}
    frees = {f"n{i}": [1000 if f"n{i}" in others | fitting_nodes else 50] for i in range(600)}
    _, _, engine = bounded(frees, max_scored_nodes=30)
    among = {name for name in frees if name not in others}
    for mem in range(100, 900, 40):
        placed = engine.place(share(mem), load(), "priced", among)
        assert placed is not None
        assert placed.node in fitting_nodes


def test_a_decision_that_finds_no_room_has_asked_once():
    _, loads, engine = bounded({f"n{i}": [100] for i in range(200)})
    for name in sorted(loads):
        engine.mark_changed(name)
    assert engine.place(share(777), load(), "priced") is None
    assert [row.decisions for row in engine._rows.values() if row.shape.request_size.mem == 777] == [1]


class FirstOnes:
    """A fake random generator that draws in order."""

    def choice(self, slots, count, *, replace):
        assert not replace
        return slots[:count]

    def shuffle(self, slots):
        pass


def row_of(fitting, nodes):
    """A row of this number of nodes, of which the first `fitting` take a share of 500."""
    ledger, loads, _ = world(**{f"n{i:04d}": [1000 if i < fitting else 100] for i in range(nodes)})
    table = NodeTable()
    for name in sorted(loads):
        table.set_node(name, ledger.node(name), loads.free_load(name))
    shape = RequestShape(RequestSize(1, 500, 0, "", 0, 0))
    scoring = Pricing(WorkloadModel([WeightedShape(shape, 1.0)], typical_card_mib=1000.0, prices={}))
    return table, loads, ledger, ShapeScores(table, NodeFeatures(table, scoring), shape)


@pytest.mark.parametrize("fitting", [SAMPLE_NODES - 1, SAMPLE_NODES, SAMPLE_NODES + 1, 4 * SAMPLE_NODES + 40])
def test_a_sample_hides_no_node_that_fits(fitting):
    table, _, _, row = row_of(fitting, 4 * SAMPLE_NODES + 100)
    row.score_for_decision(20, FirstOnes())
    scored = int((row.points[: len(table)] > -np.inf).sum())
    assert scored == min(fitting, SAMPLE_NODES)
    row.refresh(row.stale_slots())
    assert int((row.points[: len(table)] > -np.inf).sum()) == fitting


def test_a_row_is_as_far_behind_as_all_nodes_when_these_have_become_more_than_there_was_place_for():
    table, loads, ledger, row = row_of(10, 60)
    row.refresh(row.stale_slots())
    assert row.max_stale() == 0
    for i in range(10):
        table.set_node(f"m{i}", ledger.node("n0000"), loads.free_load("n0000"))
    assert row.max_stale() >= len(row.stale_slots()) >= 70


def test_nodes_that_have_gone_are_not_scanned():
    ledger, loads, _ = world(**{f"n{i}": [1000, 1000] for i in range(10)})
    table, alone = NodeTable(), NodeTable()
    for name in sorted(loads):
        table.set_node(name, ledger.node(name), loads.free_load(name))
    for name in sorted(loads)[1:]:
        table.set_node(name, None, None)
    alone.set_node("n0", ledger.node("n0"), loads.free_load("n0"))
    policy = Pricing(
        WorkloadModel(
            [WeightedShape(RequestShape(RequestSize(2, 0, 0, "", 1000, 1000)), 1.0)], typical_card_mib=1000.0, prices={}
        )
    )
    seen = [policy.measure_supply(of.lines, policy.node_features(of.lines)) for of in (table, alone)]
    assert np.array_equal(*seen)
    assert seen[0][0] == 1  # of the pair of cards, one copy on one node


def test_a_holding_on_a_node_that_has_changed_is_never_above_its_card():
    ledger, _, engine = bounded({f"n{i}": [1000] for i in range(60)})
    for count in range(200):
        placed = engine.place(share(470), load(), "priced")
        if placed is None:
            break
        ledger.set_holding(Holding(f"p{count}", "ns", "p", placed.node, placed.assignment))
    assert count == 120
    assert all(free >= 0 for node in ledger.nodes() for free in node.free)


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_decision_tries_no_more_nodes_than_others_may_wait_for(is_scored, monkeypatch):
    """More containers than a card takes clients: the scores know memory and SMs, and each node is tried in vain."""
    ledger, loads, _ = world(**{f"n{i:03}": [1000] for i in range(300)})
    engine = Engine(ledger, loads, max_scored_nodes=400)
    if is_scored:
        knows(engine, [(share(470), load())])
        warm(engine)
    tried = []
    has_capacity = fitting.has_capacity

    def count(*args):
        tried.append(args)
        return has_capacity(*args)

    monkeypatch.setattr(fitting, "has_capacity", count)
    pod_request = request.parse(pod(containers=[container(f"c{i}", gpu_mem=1) for i in range(49)]))
    with pytest.raises(SearchTooLong):
        engine.place(pod_request, load(), "priced", limit=CheckLimit(100))
    assert len(tried) <= 101
    tried.clear()
    assert engine.place(pod_request, load(), "priced") is None
    assert len(tried) > 101, "without the limit"
