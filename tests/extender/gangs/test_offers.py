"""The table of offered nodes: what it may take, and whose shapes go."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from extender.gangs import offers
from extender.gangs.offers import OfferTable

SETS = [frozenset(f"n{i}-{j}" for j in range(i)) for i in range(8)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(SETS)),
        st.tuples(st.sampled_from("ab")),
    )
)


def set_many(table: OfferTable, gang: str, count: int, size: int) -> None:
    for i in range(count):
        table.set(gang, f"shape{i}", frozenset(f"{gang}-{i}-{j}" for j in range(size)))


def test_a_gang_with_many_different_offers_loses_its_oldest_and_others_keep_theirs(monkeypatch):
    """4,000 members with a node affinity of their own took the extender's 2 GiB after one filter call each."""
    monkeypatch.setattr(offers, "_MAX_NAMES", 100)
    table = OfferTable()
    set_many(table, "fair", 2, 20)
    set_many(table, "evil", 10, 20)
    assert list(table.get("fair")) == ["shape0", "shape1"]
    assert list(table.get("evil")) == ["shape7", "shape8", "shape9"]
    table.remove("evil")
    set_many(table, "other", 3, 20)
    assert len(table.get("other")) == 3


def test_a_shape_that_is_offered_again_is_the_latest(monkeypatch):
    monkeypatch.setattr(offers, "_MAX_NAMES", 60)
    table = OfferTable()
    set_many(table, "g", 3, 20)
    table.set("g", "shape0", table.get("g")["shape0"])
    table.set("g", "more", frozenset("abc"))
    assert list(table.get("g")) == ["shape2", "shape0", "more"]


def test_equal_offers_of_a_gang_count_once(monkeypatch):
    monkeypatch.setattr(offers, "_MAX_NAMES", 25)
    table, shared = OfferTable(), frozenset(f"n{i}" for i in range(20))
    for i in range(50):
        table.set("g", f"shape{i}", shared)
    assert len(table.get("g")) == 50


@given(STEPS)
def test_the_names_are_counted_right(steps):
    table, expected = OfferTable(), defaultdict[str, dict[str, frozenset[str]]](dict)
    for gang, *offer in steps:
        if offer:
            shape, nodes = offer
            table.set(gang, shape, nodes)
            expected[gang][shape] = nodes
        else:
            table.remove(gang)
            expected.pop(gang, None)
    for gang in "ab":
        assert dict(table.get(gang)) == expected.get(gang, {})
    assert table._total == sum(len(nodes) for shapes in expected.values() for nodes in set(shapes.values()))
    table.clear()
    assert table._total == 0
