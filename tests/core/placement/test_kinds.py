"""Kinds of cards, and which of them a request may have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api import quotas, request
from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.placement import fitting
from cardwise.core.placement import kinds as kinds_module
from cardwise.core.placement.kinds import ANY_CARD, UNKNOWN_KIND, CardKinds
from tests.build import asking


def card(*classes, model="", priority=0):
    return Card(index=0, uuid="u", mem=100, model=model, classes=frozenset(classes), priority=priority)


EVERY_CARD, OF_A, K80 = (
    QuotaEntry(shares=1),
    QuotaEntry(resource_class="a", shares=1),
    QuotaEntry(model="Tesla K80", shares=1),
)


def test_cards_of_equal_classes_model_and_priority_are_one_kind():
    kinds = CardKinds()
    first = kinds.add_card(card("a", "b", model="Tesla K80"))
    assert kinds.add_card(card("b", "a", model="Tesla K80")) == first
    others = {kinds.add_card(c) for c in (card("a", model="Tesla K80"), card("a", "b"), card("a", "b", priority=1))}
    assert len(others | {first}) == 4
    assert kinds.get(first) == (frozenset({"a", "b"}), "Tesla K80", 0)


def test_a_class_allows_the_kinds_that_are_in_it_and_closed_entries_take_kinds_away():
    kinds = CardKinds()
    a, ab, none = kinds.add_card(card("a", model="Tesla K80")), kinds.add_card(card("a", "b")), kinds.add_card(card())
    assert kinds.allowed("") is None
    assert kinds.allowed("a") == {a, ab}
    assert kinds.allowed("b") == {ab}
    assert kinds.allowed("c") == frozenset()
    assert kinds.allowed("", [OF_A]) == {none}
    assert kinds.allowed("a", [K80]) == {ab}
    assert kinds.allowed("a", [EVERY_CARD]) == frozenset()
    assert kinds.allowed("", [QuotaEntry(resource_class="unknown", shares=1)]) is None


@given(
    st.lists(st.builds(card, *[st.sampled_from("abc")] * 2, model=st.sampled_from(["", "m", "n"])), max_size=6),
    st.sampled_from(["", "a", "d"]),
    st.builds(QuotaEntry, resource_class=st.sampled_from(["", "a", "b", "d"]), model=st.sampled_from(["", "m", "o"])),
)
def test_what_an_entry_counts_is_found_as_kind_by_kind(cards, resource_class, entry):
    kinds = CardKinds()
    of_class, counted = set(), set()
    for one_card in cards:
        number = kinds.add_card(one_card)
        if not resource_class or resource_class in one_card.classes:
            of_class.add(number)
        if entry.covers(one_card.classes, one_card.model):
            counted.add(number)
    assert kinds.covered_kinds(entry) == counted
    assert kinds.is_class_covered(resource_class, entry) == (bool(cards) and of_class <= counted)
    assert kinds.is_class_counted(resource_class, entry) == bool(of_class & counted)
    assert kinds.smallest(resource_class, entry) == (100 if of_class & counted else 0)


def test_many_entries_and_kinds_cost_their_sum_and_not_their_product(monkeypatch):
    """Compromised nodes may report each card as another model, and a namespace may have an entry for each of many."""
    compared = []
    covers = QuotaEntry.covers
    monkeypatch.setattr(QuotaEntry, "covers", lambda *fields: compared.append(fields) or covers(*fields))
    kinds = CardKinds()
    for i in range(1000):
        kinds.add_card(card(model=f"m{i}"))
    headroom = [quotas.headroom(QuotaEntry(model=f"m{i}", memory=0), quotas.NO_CHARGE) for i in range(0, 1000, 10)]
    pod_request = request.parse(asking("p", gpu_mem=40, gpu_count=2))
    plan = fitting.make_search_plan(fitting.card_requests(pod_request), kinds, headroom)
    assert len(plan.typed_requests[0].levels[0][1]) == 900
    assert not compared


def test_a_copy_knows_what_was_found_before_it(monkeypatch):
    kinds = CardKinds()
    a, b = kinds.add_card(card("a")), kinds.add_card(card("b"))
    assert kinds.allowed("a") == {a}
    duplicate = kinds.copy()
    kinds.add_card(card("a", "c"))
    assert len(kinds.allowed("a")) == 2
    monkeypatch.setattr(CardKinds, "_find_kinds", None)
    assert duplicate.allowed("a") == {a}
    monkeypatch.undo()
    assert duplicate.allowed("b") == {b}


def test_the_kinds_that_are_remembered_are_few(monkeypatch):
    monkeypatch.setattr(kinds_module, "_MAX_CACHED_KINDS", 1000)
    kinds = CardKinds()
    for i in range(100):
        kinds.add_card(card(f"c{i}"))
    for i in range(100):
        kinds.levels("", [QuotaEntry(resource_class=f"c{i}")])
    assert max(len(kinds._allowed), len(kinds._levels)) * 100 <= 1100


def test_an_answer_is_remembered_until_the_kinds_change():
    kinds = CardKinds()
    a = kinds.add_card(card("a"))
    assert kinds.allowed("a") is None, "all that there are"
    other = kinds.add_card(card("b"))
    assert kinds.allowed("a") == {a}
    kinds.remove_card(other)
    assert kinds.allowed("a") is None
    assert kinds.add_card(card("b")) not in (a, other), "the integer of a kind that is gone is not given again"


def test_a_kind_is_gone_with_its_last_card():
    kinds = CardKinds()
    a = kinds.add_card(card("a"))
    kinds.add_card(card("a"))
    kinds.remove_card(a)
    assert kinds.get(a).classes == {"a"}
    kinds.remove_card(a)
    with pytest.raises(KeyError):
        kinds.get(a)


def test_a_request_without_a_class_tries_the_lowest_priority_first():
    kinds = CardKinds()
    plain, other = kinds.add_card(card()), kinds.add_card(card("a"))
    assert kinds.levels("") == ANY_CARD
    scarce = kinds.add_card(card("a", "b", priority=7))
    left_over = kinds.add_card(card("old", priority=-1))
    assert kinds.levels("") == ((0, {left_over}), (1, {plain, other}), (2, {scarce}))
    assert kinds.levels("", [OF_A]) == ((0, {left_over}), (1, {plain}), (2, frozenset()))
    assert kinds.levels("a") == ((0, {other, scarce}),), "to who names the class its cards are equal"
    kinds.remove_card(scarce)
    kinds.remove_card(left_over)
    assert kinds.levels("") == ANY_CARD


def test_an_unknown_card_counts_everywhere_since_it_may_be_of_any_class_and_model():
    kinds = CardKinds()
    assert all(kinds.is_covered(UNKNOWN_KIND, entry) for entry in (EVERY_CARD, OF_A, K80))
