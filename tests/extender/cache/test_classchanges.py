"""A class that many cards are in, or leave: they follow some at a time."""

from cardwise.core.placement.ledger import Ledger
from extender.cache.inventory import _CARDS_PER_HOLD
from tests.build import extended_resource, resource_class
from tests.extender.states import as_card, as_class, make_state
from tests.fakes.clock import FakeClock

NODES = [f"n{i:03}" for i in range(3 * _CARDS_PER_HOLD // 2)]


def test_the_cards_of_a_class_follow_its_change_in_short_holds_of_the_lock(monkeypatch):
    """A class that contained 40,000 cards held the lock for 1.4 s: its leader lost calls, and nearly the Lease."""
    state, set_cards = make_state(FakeClock()), Ledger.set_cards
    for node in NODES:
        state.set_node(node)
    for index in (0, 1):  # cards are listed by their UUIDs, and not by node
        for node in NODES:
            state.set_card(*as_card(extended_resource(index, node=node)))
    state.classify_cards()
    changed, holds = list[str](), list[int]()

    def record(ledger, node, cards):
        changed.append(node)
        return set_cards(ledger, node, cards)

    def classified() -> int:
        with state.view() as ledger:
            return sum("big" in card.classes for node in NODES for card in ledger.node(node).cards)

    monkeypatch.setattr(Ledger, "set_cards", record)
    state.set_class(as_class(resource_class("big", model="P100")))
    assert 0 < classified() < 2 * len(NODES)
    while state._inventory.has_unclassified_cards:
        changed.clear()
        state.snapshot()
        holds.append(len(changed))
    assert max(holds) <= _CARDS_PER_HOLD // 2
    assert classified() == 2 * len(NODES)
    state.set_card(*as_card(extended_resource(2, node="n000")))
    state.set_class(as_class(resource_class("big", model="another")))
    state.remove_card(as_card(extended_resource(1, node="n001"))[0])
    state.classify_cards()
    assert classified() == 0
