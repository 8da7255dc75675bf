"""While pods arrive and end, `priced` avoids nodes that will soon be empty."""

import numpy as np
import pytest

from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import place_on
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.expectedcapacity import ExpectedCapacity
from cardwise.core.placement.scored.nodetable import CLIENTS_OF_UNSHARED_CARD
from cardwise.core.placement.scored.shapes import RequestShape, RequestSize
from cardwise.core.placement.scored.workload import learn_workload
from cardwise.core.values.quantity import MiB
from tests.theory import theory_of

LOAD = Load(0, 0, 1)


def whole(cards):
    return PodRequest(containers=(ContainerRequest(key="0", name="main", cards=cards),))


class Busy:
    """Nodes with four cards, on which pods of one card each arrive and end; a node's name gives their number."""

    def __init__(self, **nodes):
        self.ledger, self.at = Ledger(), 0
        for name in nodes:
            self.ledger.set_cards(name, [Card(index=i, uuid=f"{name}-{i}", mem=MiB(1000)) for i in range(4)])
        self.engine = Engine(self.ledger, self)
        for name, pods in nodes.items():
            for _ in range(pods):
                self.occupy(name)
        for cards, often in ((1, 40), (4, 2)):
            for _ in range(often):
                self.engine.count_arrival(whole(cards), LOAD)
        self.engine.use_workload(learn_workload(self.engine.learning_input()))

    def free_load(self, node):
        return Load(1000, 1000, 100) if self.ledger.node(node) else None

    def occupy(self, node):
        placed = place_on(self.ledger.kinds, self.ledger.node(node), whole(1), "binpack")
        self.at += 1
        self.ledger.set_holding(Holding(f"{self.at}", "ns", "p", node, placed.assignment))
        self.engine.place(whole(1), LOAD, "binpack")  # it reads the changes
        return f"{self.at}"

    def come_and_go(self, node):
        """Repeat arrivals and ends until the engine has scanned them."""
        for _ in range(220):
            uid = self.occupy(node)
            self.ledger.release(uid)
            self.engine.place(whole(1), LOAD, "priced")


@pytest.mark.parametrize("nodes", [{"a": 1, "b": 3}, {"b": 1, "a": 3}])
def test_where_pods_leave_a_pod_goes_to_the_node_that_is_last_to_be_empty(nodes):
    busy = Busy(**nodes)
    busy.come_and_go("a")
    fullest = max(nodes, key=nodes.__getitem__)
    assert busy.engine.place(whole(1), LOAD, "priced").node == fullest


def make_measure(*workload):
    """The expected capacity of requests for these numbers of cards, with their weights."""
    expected = ExpectedCapacity(
        [RequestShape(RequestSize(cards, mem, 0, "", 0, 0), kinds) for cards, mem, kinds, _ in workload]
    )
    expected.set_weights(np.array([weight for *_, weight in workload]))
    return expected


def expected_capacity(measure, clients, kind=None):
    counts = np.array([clients])
    return float(measure.node_values(counts, np.zeros_like(counts) if kind is None else np.array([kind]))[0])


def test_the_fewer_shares_are_in_the_way_the_more_a_node_is_worth():
    measure = make_measure((2, 0, None, 1.0))
    empty, single, two, four = (
        expected_capacity(measure, clients) for clients in ([0, 0, 9], [0, 1, 9], [1, 1, 9], [2, 2, 9])
    )
    assert empty > single > two > four > 0
    assert two / single == pytest.approx(single / empty)
    assert expected_capacity(measure, [0, CLIENTS_OF_UNSHARED_CARD, CLIENTS_OF_UNSHARED_CARD]) == 0
    assert expected_capacity(measure, [0]) == 0


def test_the_example_of_the_docstring():
    theory, cards, measure = (
        theory_of("cardwise.core.placement.scored.expectedcapacity"),
        4,
        make_measure((4, 0, None, 1.0)),
    )
    assert f"a request for {cards} cards has a weight of 1" in theory

    def node_value(shares: int) -> float:
        return expected_capacity(measure, [1] * shares + [0] * (cards - shares))

    empty, one_share, two, three, four = map(node_value, range(5))
    assert f"It counts {empty:g} on an empty node of {cards} cards, {one_share:g} on a node with one share" in theory
    assert f", and {three:g} on a node with three" in theory
    assert f"the value of an empty node times {one_share / empty:g} for each blocking share" in theory
    first, second = one_share - two, three - four
    assert f"costs {one_share:g} - {two:g} = {first:g}, and on the second {three:g} - {four:g} = {second:g}" in theory
    assert first > second, "so the pod goes to the second node"


def test_only_requests_for_several_whole_cards_wait_for_nodes_to_be_empty():
    assert expected_capacity(make_measure((1, 0, None, 1.0), (2, 500, None, 1.0)), [0, 0]) == 0


def test_cards_that_the_request_cannot_have_do_not_count():
    measure = make_measure((2, 0, frozenset({1}), 1.0))
    assert (
        expected_capacity(measure, [0, 0, 1], kind=[0, 1, 1])
        == expected_capacity(measure, [9, 0, 1], kind=[0, 1, 1])
        > 0
    )
    assert expected_capacity(measure, [0, 0, 1], kind=[0, 0, 1]) == 0
