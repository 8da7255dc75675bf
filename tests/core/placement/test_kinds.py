"""Kinds of cards, and which of them a request may have."""

import pytest

from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.placement.kinds import ANY_CARD, UNKNOWN, CardKinds


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
    assert all(kinds.is_covered(UNKNOWN, entry) for entry in (EVERY_CARD, OF_A, K80))
