"""Which cards disagree with the ledger, and when that counts."""

import pytest

from cardwise.core.api import names
from extender.reporting.ledgercheck import MIN_DISAGREEMENT_SECONDS
from extender.reporting.statuses import Disagreement, compute_node_totals
from tests.extender.statuscluster import CARDS, K80, World, card, er_object, er_path, holding

CARD = names.extended_resource_name("GPU-A")


class Standby(World):
    """A standby, which checks cards but writes no status."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.node("n1", card("GPU-A"))
        self.hold("a", "n1", ("0", "GPU-A", 4096, 0))
        self.report_memory(4096)

    def report_memory(self, memory: int, uuid: str = "GPU-A", node: str = "n1") -> None:
        """Set the allocated memory in the card's status."""
        card = er_object(uuid, node)
        card["status"]["allocated"] = {"memoryMiB": memory}
        self.api.write_object(CARDS, card)

    def counts_after(self, seconds: float) -> dict[str, int]:
        self.run(seconds)
        return {kind: count for kind, count in self.writer.ledger_check.counts().items() if count}


@pytest.fixture
def world() -> Standby:
    return Standby()


def test_all_is_well(world):
    assert world.counts_after(200) == {}
    assert set(world.writer.ledger_check.counts()) == set(Disagreement)


def test_a_status_that_says_other_counts_after_a_minute_and_until_it_is_right(world):
    world.report_memory(1000)
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS - 5) == {}
    assert world.counts_after(40) == {"status": 1}
    world.report_memory(4096)
    assert world.counts_after(35) == {}


def test_a_status_that_was_late_for_less_than_a_minute_never_counts(world):
    for _ in range(5):
        world.report_memory(1000)
        assert world.counts_after(40) == {}
        world.report_memory(4096)
        assert world.counts_after(40) == {}


def test_the_status_of_a_busy_card_that_follows_late_is_no_disagreement(world):
    for i in range(8):
        world.report_memory(1000 + i)
        assert world.counts_after(40) == {}
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS + 40) == {"status": 1}, "it has stopped following"


def test_an_unreported_card_is_no_difference(world):
    world.api.write_object(CARDS, er_object("GPU-A", "n1"))
    assert world.counts_after(200) == {}


def unseen(world) -> None:
    """Change the status without an event."""
    world.run(1)
    world.state.changed.clear()


def test_what_is_held_on_a_card_that_the_node_does_not_have(world):
    unseen(world)
    world.state.ledger.set_holding(holding("b", "n1", ("0", "GPU-B", 100, 0)))
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS + 40) == {"missing": 1}


def test_a_card_that_shrank_under_its_pods(world):
    unseen(world)
    world.state.ledger.set_cards("n1", [card("GPU-A", mem=4000)])
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS + 40) == {"overcommitted": 1}


def test_a_running_total_that_lost_count(world):
    unseen(world)
    world.state.ledger.node("n1").used[0] -= 1
    assert compute_node_totals(world.state.ledger, "n1").wrong == [(CARD, Disagreement.TOTAL)]
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS + 40) == {"total": 1}


def test_the_same_card_may_disagree_in_several_ways_and_goes_with_its_node(world):
    world.report_memory(1)
    world.state.ledger.set_cards("n1", [card("GPU-A", mem=4000)])
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS + 40) == {"status": 1, "overcommitted": 1}
    world.api.remove(er_path("GPU-A"))
    world.state.ledger.release("a")
    world.state.ledger.set_cards("n1", [])
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS) == {}


def test_every_node_is_looked_at_in_half_a_minute(world):
    for i in range(100):
        world.state.ledger.set_cards(f"other-{i}", [card(f"GPU-{i}")])
        world.report_memory(0, f"GPU-{i}", f"other-{i}")
    unseen(world)
    for i in range(100):
        world.state.ledger.set_holding(holding(f"p{i}", f"other-{i}", ("0", f"GPU-{i}", K80, 0)))
    assert world.counts_after(MIN_DISAGREEMENT_SECONDS + 35) == {"status": 100}
