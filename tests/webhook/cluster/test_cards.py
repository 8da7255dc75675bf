"""Sizes of cards, while cards change."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api import classes
from cardwise.core.api.selectors import Expression
from cardwise.core.values.quantity import MiB
from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE
from tests.build import resource_class
from webhook.cluster import cards as module
from webhook.cluster.cards import CardFacts, CardSizes, CardSums

KEPT_BACK = MiB(100)


def a_class(model="t4"):
    return classes.parse(resource_class(model=model))


def card(node, memory=16_000, model="t4", **fields):
    return CardFacts(node, MiB(memory), {"model": model}, **fields)


def add_cards(sums, **facts_by_name):
    """Add these cards."""
    for name, facts in facts_by_name.items():
        sums.on_change(name, None, facts)
    return sums


def test_card_is_added_changed_and_removed():
    sums = add_cards(CardSums(KEPT_BACK), a=card("n1"), b=card("n1", 8_000), c=card("n2", 4_000))
    assert sums.class_sizes(None) == CardSizes(MiB(15_900), 2, MiB(3_900), (MiB(15_900), MiB(7_900)))
    sums.on_change("c", card("n2", 4_000), card("n1", 4_000))
    assert sums.class_sizes(None).max_cards == 3
    sums.on_delete("a", card("n1"))
    assert sums.class_sizes(None) == CardSizes(MiB(7_900), 2, MiB(3_900), (MiB(7_900), MiB(3_900)))
    assert sums.sizes_on({"n2"}, None) == CardSizes()


def test_edited_class_is_recounted():
    sums = add_cards(CardSums(KEPT_BACK), a=card("n1"), b=card("n1", 8_000, "p100"))
    assert [sums.class_sizes(a_class(model)).largest for model in ("t4", "p100", "t4")] == [15_900, 7_900, 15_900]


def test_mps_scopes_are_those_of_the_cards():
    sums = add_cards(CardSums(KEPT_BACK), a=card("n1", mps="card"), b=card("n1", mps="node"), c=card("n2", mps="node"))
    assert sums.mps_scopes() == {"card", "node"}
    sums.on_delete("a", card("n1", mps="card"))
    sums.on_change("b", card("n1", mps="node"), card("n1"))
    assert sums.mps_scopes() == {"node"}


def test_node_daemons_prevail_by_nodes_and_not_by_cards():
    node = {f"c{i}": card("n1", mps="node") for i in range(8)}
    sums = add_cards(CardSums(KEPT_BACK), **node)
    assert sums.do_node_daemons_prevail()
    add_cards(sums, a=card("n2", mps="card"))
    assert not sums.do_node_daemons_prevail(), "one node of two is not most"
    add_cards(sums, b=card("n3", mps="node"), c=card("n4"))
    assert sums.do_node_daemons_prevail(), "nodes without MPS do not count"
    for i in range(8):
        sums.on_delete(f"c{i}", card("n1", mps="node"))
        assert sums.do_node_daemons_prevail() == (i < 7)
    sums.on_delete("b", card("n3", mps="node"))
    assert (sums.mps_scopes(), sums.do_node_daemons_prevail()) == ({"card"}, False)


def test_the_maximum_number_of_shares_is_that_of_the_gpu_that_takes_most():
    sums = CardSums(KEPT_BACK)
    assert sums.max_clients() == 0, "no GPU is known"
    add_cards(sums, a=card("n1"), b=card("n1", max_clients=60), c=card("n2", max_clients=99, other=True))
    assert sums.max_clients() == 60
    sums.on_delete("b", card("n1", max_clients=60))
    assert sums.max_clients() == 48
    sums.on_change("a", card("n1"), card("n1", max_clients=16))
    assert sums.max_clients() == 16


def test_changed_node_recounts_only_its_own_cards(monkeypatch):
    """Each review used to recount all cards of the cluster."""
    sums = CardSums(KEPT_BACK)
    for node in range(500):
        for i in range(8):
            sums.on_change(f"{node}-{i}", None, card(f"n{node}"))
    wanted, looked = a_class(), Counter()

    def includes(_, facts):
        looked[facts.node] += 1
        return facts.labels["model"] == "t4"

    monkeypatch.setattr(module._Membership, "includes", includes)
    assert sums.class_sizes(wanted).max_cards == 8
    assert looked.total() == 4000
    looked.clear()
    for i in range(10):
        sums.on_change("0-0", card("n0"), card("n0", model=f"x{i}"))
        assert sums.class_sizes(wanted).max_cards == 8
    assert looked == {"n0": 80}


UNLISTED = [CardSums.unlisted_class_sizes, CardSums.reviewed_class_sizes]


@pytest.mark.parametrize("compare", UNLISTED)
def test_reviewed_class_is_compared_without_the_lock(monkeypatch, compare):
    sums = CardSums(MiB(0))
    add_cards(sums, a=card("n1"), b=card("n2"))
    free = []
    includes = module._Membership.includes

    def observe(membership, facts):
        free.append(not sums._lock.locked())
        return includes(membership, facts)

    monkeypatch.setattr(module._Membership, "includes", observe)
    compare(sums, a_class("none"))
    assert free == [True] * 2


@pytest.fixture
def comparisons(monkeypatch):
    """Records the keys of the conditions with which cards are compared."""
    keys, matches = [], Expression.matches

    def observe(condition, text):
        keys.append(condition.key)
        return matches(condition, text)

    monkeypatch.setattr(Expression, "matches", observe)
    return keys


def alternatives(key, count):
    """A class that selects no card, by as many conditions as alternatives."""
    conditions = [{"matchExpressions": [{"key": key, "operator": "Gt", "values": [f"{9 + i}E"]}]} for i in range(count)]
    return classes.parse(resource_class(selector=conditions))


def many_cards(nodes=500):
    sums = CardSums(MiB(0))
    for node in range(nodes):
        for i in range(8):
            labels = {"model": "t4", "memory": "16000Mi", "uuid": str(node * 8 + i)}
            sums.on_change(f"{node}-{i}", None, CardFacts(f"n{node}", MiB(16_000), labels))
    return sums


@pytest.mark.parametrize("compare", [*UNLISTED, CardSums.class_sizes, lambda sums, of: sums.sizes_on({"n1", "n2"}, of)])
def test_cards_that_are_equal_for_a_class_are_compared_once(compare, comparisons):
    assert compare(many_cards(), alternatives("memory", 64)) == CardSizes()
    assert len(comparisons) == 64


def test_cards_of_a_class_on_selected_nodes_are_compared_once(comparisons):
    sums, wanted = many_cards(10), alternatives("uuid", 1)
    for node in range(10):
        assert sums.sizes_on({f"n{node}"}, wanted) == CardSizes()
    assert len(comparisons) == 80


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(alternatives("uuid", 64), id="labels that all cards have different"),
        pytest.param(
            classes.parse(
                {"metadata": {"name": "c"}, "spec": {"selector": {"matchLabels": {str(i): "x" for i in range(256)}}}}
            ),
            id="many labels",
        ),
    ],
)
def test_work_for_a_reviewed_class_is_limited(wanted, comparisons, monkeypatch):
    sums, read = many_cards(), Counter()

    class Labels(dict):
        def get(self, key, default=None):
            read["labels"] += 1
            return super().get(key, default)

    for cards in sums._cards.values():
        cards.update({name: replace(facts, labels=Labels(facts.labels)) for name, facts in cards.items()})
    assert sums.reviewed_class_sizes(wanted) is None
    one_node = 8 * 256
    assert len(comparisons) <= (module._MAX_STEPS + one_node) / module._COMPARISON_STEPS + one_node
    assert read["labels"] <= module._MAX_STEPS + len(comparisons) + one_node


def test_cards_per_node_are_limited_as_in_the_extender():
    sums = CardSums(KEPT_BACK)
    for i in range(2 * MAX_CARDS_PER_NODE):
        sums.on_change(f"c{i}", None, card("n1"))
    assert sums.class_sizes(None).max_cards == MAX_CARDS_PER_NODE
    for i in range(2 * MAX_CARDS_PER_NODE):
        sums.on_delete(f"c{i}", card("n1"))
    assert sums.class_sizes(None) == CardSizes()


changes = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.none()
        | st.builds(card, st.sampled_from(["n1", "n2", "n3"]), st.integers(1, 4), st.sampled_from(["t4", "p100"])),
        st.booleans(),
    )
)


@pytest.mark.parametrize("model", ["t4", ""])
@given(changes=changes)
def test_cached_sums_equal_a_full_recount(model, changes):
    kept, there = CardSums(MiB(1)), {}
    wanted = a_class(model) if model else None
    for name, new, is_read in changes:
        old = there.pop(name, None)
        if new is not None:
            there[name] = new
            kept.on_change(name, old, new)
        elif old is not None:
            kept.on_delete(name, old)
        if is_read:
            assert kept.class_sizes(wanted) == add_cards(CardSums(MiB(1)), **there).class_sizes(wanted)
