"""Which cards disagree, when that counts, and that nothing is forgotten."""

from contextlib import contextmanager

import pytest

from cardwise.core.api import names
from cardwise.core.placement.ledger import Ledger
from extender.controllers.ledgercheck import PATIENCE, Disagreement, LedgerCheck, differences
from extender.reporting.listers import CardLister
from tests.build import P100, cards, holding
from tests.extender.worlds import as_card, resource
from tests.fakes.clock import FakeClock

CARD = names.extended_resource_name("GPU-n1-0")


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ledger = Ledger()
        self.seen = CardLister()
        self.check = LedgerCheck(self, self.seen, clock=self.clock)

    @contextmanager
    def view(self):
        yield self.ledger

    def told(self, memory: int | None, *, node: str = "n1") -> None:
        """What the card's status says is allocated."""
        made = resource(0, node=node)
        if memory is not None:
            made["status"]["allocated"] = {"memoryMiB": memory}
        self.seen.put(*as_card(made))

    def run(self, seconds: float) -> dict[str, int]:
        for _ in range(int(seconds)):
            self.clock.advance(1)
            self.check.step()
        return {kind: count for kind, count in self.check.counts().items() if count}


@pytest.fixture
def world() -> World:
    made = World()
    made.ledger.set_cards("n1", cards(P100))
    made.ledger.hold(holding("a", 4096, 0))
    made.told(4096)
    return made


def test_all_is_well(world):
    assert world.run(200) == {}
    assert set(world.check.counts()) == set(Disagreement)


def test_a_status_that_says_other_counts_after_a_minute_and_until_it_is_right(world):
    world.told(1000)
    assert world.run(PATIENCE - 5) == {}
    assert world.run(40) == {"status": 1}
    world.told(4096)
    assert world.run(35) == {}


def test_a_status_that_was_late_for_less_than_a_minute_never_counts(world):
    for _ in range(5):
        world.told(1000)
        assert world.run(40) == {}
        world.told(4096)
        assert world.run(40) == {}


def test_the_status_of_a_busy_card_that_follows_late_is_no_disagreement(world):
    for i in range(8):
        world.told(1000 + i)
        assert world.run(40) == {}
    assert world.run(PATIENCE + 40) == {"status": 1}, "it has stopped following"


def test_a_card_of_which_nobody_has_told_is_no_difference(world):
    world.told(None)
    assert world.run(200) == {}


def test_what_is_held_on_a_card_that_the_node_does_not_have(world):
    world.ledger.hold(holding("b", 100, 1))
    assert world.run(PATIENCE + 40) == {"missing": 1}


def test_a_card_that_shrank_under_its_pods(world):
    world.ledger.set_cards("n1", cards(4000))
    assert world.run(PATIENCE + 40) == {"overfull": 1}


def test_a_running_total_that_lost_count(world):
    world.ledger.node("n1").used[0] -= 1
    assert differences(world.ledger, "n1", {}) == {(CARD, Disagreement.TOTAL)}
    assert world.run(PATIENCE + 40) == {"total": 1}


def test_the_same_card_may_disagree_in_several_ways_and_goes_with_its_node(world):
    world.told(1)
    world.ledger.set_cards("n1", cards(4000))
    assert world.run(PATIENCE + 40) == {"status": 1, "overfull": 1}
    world.seen.remove(CARD)
    world.ledger.release("a")
    world.ledger.set_cards("n1", [])
    assert world.run(PATIENCE) == {}


def test_every_node_is_looked_at_in_half_a_minute(world):
    for i in range(2, 102):
        world.ledger.set_cards(f"n{i}", cards(P100, node=f"n{i}"))
        world.told(5, node=f"n{i}")
    assert world.run(PATIENCE + 65) == {"status": 100}
