"""How much idle memory the expected pods cannot use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.request import Load
from cardwise.core.defrag import fragmentation
from cardwise.core.defrag.fragmentation import Fragments, Memory
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.shapes import RequestSize
from tests.build import cards, holding, shares

ROOM = Load(1 << 40, 1 << 40, 100)


def ask_of(mem: int, *, count: int = 1, cpu: int = 0, resource_class: str = "") -> RequestSize:
    return RequestSize(count, mem, 0, resource_class, cpu, 0)


def fragments(ledger: Ledger, counts: dict[RequestSize, float], free: Load = ROOM) -> Fragments:
    measured = Fragments(fragmentation.typical_pods(counts, ledger.kinds))
    for node in ledger.nodes():
        measured.set_node(node.name, node, free)
    return measured


def test_what_is_too_small_for_some_of_the_pods_is_a_fragment_to_these():
    ledger = Ledger()
    ledger.set_cards("n1", cards(1000, 400))
    measured = fragments(ledger, {ask_of(300): 3, ask_of(500): 1})
    assert measured.memory_of_node("n1") == Memory(
        1400, 0, 1400, pytest.approx(100.0)
    )  # the 400 MiB, to a quarter of the pods
    assert measured.total().percent == pytest.approx(100 / 14)


def test_a_used_card_is_a_fragment_for_a_request_of_a_whole_card():
    ledger = Ledger()
    ledger.set_cards("n1", cards(1000, 1000))
    ledger.set_holding(holding("a", 200, 0, total=1000))
    assert fragments(ledger, {ask_of(0): 1}).memory_of_node("n1") == Memory(2000, 200, 1800, pytest.approx(800.0))
    measured = fragments(ledger, {ask_of(0, count=2): 1})
    assert measured.memory_of_node("n1") == Memory(2000, 200, 1800, pytest.approx(1800.0))  # one whole card is not two


def test_a_node_without_cpu_or_pods_left_is_of_no_use():
    ledger = Ledger()
    ledger.set_cards("n1", cards(1000))
    pods = {ask_of(100, cpu=2000): 1}
    assert fragments(ledger, pods, Load(1999, 1, 1)).total() == Memory(1000, 0, 1000, pytest.approx(1000.0))
    assert fragments(ledger, pods, Load(2000, 1, 1)).total() == Memory(1000, 0, 1000, 0.0)
    assert fragments(ledger, pods, Load(2000, 1, 0)).total() == Memory(1000, 0, 1000, pytest.approx(1000.0))


def test_what_takes_no_new_share_is_not_idle_and_what_has_shrunk_has_nothing_free():
    ledger = Ledger()
    odd = [
        Card(index=0, uuid="GPU-n1-0", mem=1000, healthy=False),
        Card(index=1, uuid="GPU-n1-1", mem=1000, cordoned=True),
        Card(index=2, uuid="GPU-n1-2", mem=100),
    ]
    ledger.set_cards("n1", odd)
    ledger.set_holding(holding("a", 300, 2, total=100))
    assert fragments(ledger, {ask_of(1): 1}).total() == Memory(2100, 300, 0, 0.0)
    crowded = Ledger(max_clients=1)
    crowded.set_cards("n1", [Card(index=0, uuid="GPU-n1-0", mem=1000)])
    crowded.set_holding(holding("a", 300, 0, total=1000))
    assert fragments(crowded, {ask_of(1): 1}).total() == Memory(1000, 300, 0, 0.0)
    assert Memory().percent == 0


def test_by_class_of_card():
    ledger = Ledger()
    small = Card(index=0, uuid="GPU-n1-0", mem=100, classes=frozenset({"small", "all"}))
    big = Card(index=1, uuid="GPU-n1-1", mem=1000, classes=frozenset({"big", "all"}))
    ledger.set_cards("n1", [small, big])
    measured = fragments(ledger, {ask_of(50, resource_class="small"): 1, ask_of(500): 1})
    assert measured.memory_by_class(ledger.kinds) == {
        "small": Memory(100, 0, 100, pytest.approx(50.0)),
        "all": Memory(1100, 0, 1100, pytest.approx(550.0)),
        "big": Memory(1000, 0, 1000, pytest.approx(500.0)),
    }


def test_a_node_that_is_gone_counts_no_more():
    ledger = Ledger()
    ledger.set_cards("n1", cards(1000))
    measured = fragments(ledger, {ask_of(2000): 1})
    assert measured.total() == Memory(1000, 0, 1000, pytest.approx(1000.0))
    measured.set_node("n1", None, None)
    assert (measured.total(), measured.memory_of_node("n1"), measured.memory_by_class(ledger.kinds)) == (
        Memory(),
        Memory(),
        {},
    )


def test_what_is_learned_later_counts_for_all_nodes():
    ledger = Ledger()
    ledger.set_cards("n1", cards(1000))
    measured = fragments(ledger, {ask_of(2000): 1})
    assert measured.total().fragmented == pytest.approx(1000)
    measured.set_expected_pods(fragmentation.typical_pods({ask_of(1000): 1}, ledger.kinds))
    assert measured.total().fragmented == 0


def test_where_nothing_comes_all_is_a_fragment():
    ledger = Ledger()
    ledger.set_cards("n1", cards(1000))
    assert fragments(ledger, {}).total() == Memory(1000, 0, 1000, 1000.0)


def test_without_a_learned_workload_the_holders_of_cards_are_the_expected_pods():
    whole = tuple(CardShare(i, f"GPU-n1-{i}", 16276, 100, 16276, whole=True) for i in (0, 1))
    two = shares(200, 0, 1)
    held = [
        holding("a", 500, 0),
        holding("b", 500, 1),
        Holding("c", "default", "c", "n1", Assignment({"0": whole})),
        Holding("d", "default", "d", "n1", Assignment({"0": two})),
        Holding("e", "default", "e", "n1", Assignment({"0": shares(100, 0), "1": shares(50, 0, core=10)})),
        Holding("f", "default", "f", "n1", Assignment({"0": shares(100, 0), "1": shares(50, 1)})),
    ]
    of_e = RequestSize(1, 150, 10, "", 0, 0)
    assert fragmentation.count_requests(held) == {
        ask_of(500): 2,
        ask_of(0, count=2): 1,
        ask_of(200, count=2): 1,
        of_e: 1,
    }


def test_requests_without_cards_can_be_left_out():
    plain = RequestSize(0, 0, 0, "", 1000, 0)
    assert fragmentation.only_card_requests({plain: 5, ask_of(10): 1}) == {ask_of(10): 1}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 900)), max_size=12),
    st.dictionaries(st.builds(ask_of, st.integers(0, 1000), count=st.integers(1, 3)), st.integers(1, 5), max_size=4),
)
def test_updates_node_by_node_equal_a_new_count(pods, counts):
    ledger = Ledger()
    for name in ("n0", "n1", "n2"):
        ledger.set_cards(name, cards(1000, 700, node=name))
    measured = fragments(ledger, counts)
    for i, (node, index, mem) in enumerate(pods):
        name = f"n{node}"
        ledger.set_holding(holding(f"p{i}", mem, index, node=name, total=1000))
        measured.set_node(name, ledger.node(name), ROOM)
        if i % 3 == 0:
            measured.total()
    anew = fragments(ledger, counts)
    for name in ("n0", "n1", "n2"):
        assert measured.memory_of_node(name) == pytest.approx(anew.memory_of_node(name))
    assert measured.total().fragmented == pytest.approx(anew.total().fragmented)
    of_nodes = [measured.memory_of_node(name).fragmented for name in ("n0", "n1", "n2")]
    assert sum(of_nodes) == pytest.approx(measured.total().fragmented)
