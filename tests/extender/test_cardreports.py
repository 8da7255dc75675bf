"""Reports of one node do not delay reports of others, and of a burst only the newest counts."""

import pytest

from cardwise.kube.objects.extendedresources import ContainerShare
from extender.cardreports import CardReports
from tests.build import P100, extended_resource
from tests.extender.states import as_card
from tests.fakes.clock import FakeClock
from tests.theory import theory_of


class Recorder:
    """A handler that records the last report of each card, and the number of calls."""

    def __init__(self) -> None:
        self.cards = {}
        self.calls = []
        self.fails = 0

    def on_change(self, key, old, new):
        if self.fails:
            self.fails -= 1
            raise OSError("no")
        assert self.cards.get(key) == old, "the object that it was given last"
        self.cards[key] = new
        self.calls.append(key)

    def on_delete(self, key, old):
        assert self.cards.pop(key) == old
        self.calls.append(key)

    def on_synced(self):
        pass


class World:
    """The reports of nodes, as a reflector delivers them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.heard = Recorder()
        self.reports = CardReports(self.heard, self.clock)
        self.known = {}

    def put_card(self, index, node, shares=0, generation=0, **fields):
        """`generation`: of the pods that hold the shares."""
        key, bare = as_card(extended_resource(index, node=node, **fields))
        new = bare._replace(
            reported_shares=tuple(ContainerShare(f"{generation}-{i}", "x", "y", 1, 0) for i in range(shares))
        )
        old, self.known[key] = self.known.get(key), new
        self.reports.on_change(key, old, new)
        return key

    def remove(self, key):
        self.reports.on_delete(key, self.known.pop(key))

    def pass_time(self, seconds):
        for _ in range(round(seconds * 4)):
            self.clock.advance(0.25)
            self.reports.hand_over_waiting()


@pytest.fixture
def world():
    new_world = World()
    for index in range(8):
        new_world.put_card(index, "evil")
    new_world.put_card(0, "honest")
    new_world.reports.on_synced()
    return new_world


def flood(world, seconds, first=0):
    """Twenty reports of 512 new shares a second, over eight cards."""
    for generation in range(first, first + 20 * seconds):
        world.put_card(generation % 8, "evil", 512, generation)
        if generation % 5 == 4:
            world.pass_time(0.25)


def test_a_node_that_floods_has_few_reports_handed_over_and_others_all(world):
    before = len(world.heard.calls)
    flood(world, 30)
    assert len(world.heard.calls) - before <= 8 + 30 / 5 + 1
    for generation in range(5):
        key = world.put_card(0, "honest", 50, generation)
        assert world.heard.cards[key] is world.known[key], "at once"


def test_the_example_of_the_docstring(world):
    theory, reports, shares = theory_of("extender.cardreports"), 20, 512
    assert f"a node writes {reports} reports a second, each with {shares} new shares" in theory
    for index in range(8):
        world.put_card(index, "evil", shares)
    world.pass_time(60)

    before = len(world.heard.calls)
    former, *_ = (card for card in world.heard.cards.values() if card.node == "evil")
    renewed = former._replace(reported_shares=tuple(ContainerShare(f"n{i}", "x", "y", 1, 0) for i in range(shares)))
    cost = world.reports._change_cost(former, renewed)
    assert f"A report costs {cost:,}: 1, and 1 for each share that is new or gone" in theory
    for generation in range(1, reports + 1):
        world.put_card(generation % 8, "evil", shares, generation)
    assert f"So {len(world.heard.calls) - before} of the reports are handed over at once" in theory
    before = len(world.heard.calls)
    flood(world, 50, first=reports + 1)
    assert f"and then one in {50 / (len(world.heard.calls) - before):.0f} seconds" in theory


def test_the_newest_of_each_card_is_handed_over_in_the_end(world):
    flood(world, 10)
    assert world.heard.cards != world.known
    world.pass_time(60)
    assert world.heard.cards == world.known
    key = world.put_card(3, "evil", 1, 999)
    assert world.heard.cards[key] is world.known[key], "at once again"


def test_the_cards_of_a_node_take_turns(world):
    flood(world, 60)
    late = world.heard.calls[-8:]
    assert len(set(late)) == 8


def test_a_cordon_does_not_wait(world):
    flood(world, 5)
    key = world.put_card(3, "evil", 512, 1000, unschedulable=True)
    assert world.heard.cards[key].card.cordoned
    assert world.heard.cards[key].reported_shares != world.known[key].reported_shares
    calls = len(world.heard.calls)
    world.put_card(3, "evil", 512, 1001)
    world.put_card(3, "evil", 512, 1002, unschedulable=True)
    assert len(world.heard.calls) == calls, "it is cordoned already"
    world.put_card(3, "evil", 512, 1003)
    world.pass_time(60)
    assert not world.heard.cards[key].card.cordoned


def test_cards_that_come_go_and_move_while_they_wait(world):
    flood(world, 5)
    passing = world.put_card(20, "evil", 512)
    world.remove(passing)
    gone = next(key for key, card in world.known.items() if card.node == "evil")
    world.remove(gone)
    assert gone in world.heard.cards, "its end waits as well"
    moving = next(key for key, card in world.known.items() if card.node == "evil")
    world.known[moving] = world.known[moving]._replace(node="other")
    world.reports.on_change(moving, None, world.known[moving])
    assert world.heard.cards[moving].node == "other"
    world.pass_time(60)
    assert world.heard.cards == world.known


def test_a_card_that_changes_all_the_time_is_charged_for_what_its_node_holds(world):
    for index in range(8):
        world.put_card(index, "evil", 500)
    world.pass_time(60)
    calls = len(world.heard.calls)
    for generation in range(100):
        world.put_card(0, "evil", 500, mem=P100 - generation % 2)
    assert len(world.heard.calls) - calls <= 3


def test_what_the_handler_fails_on_is_tried_again(world):
    flood(world, 5)
    world.heard.fails = 1
    with pytest.raises(OSError, match="no"):
        world.pass_time(60)
    world.pass_time(60)
    assert world.heard.cards == world.known


@pytest.mark.parametrize("then", ["stays", "is deleted"])
def test_a_card_that_moves_while_it_waits_and_the_handler_fails_on_is_not_forgotten(world, then):
    """The handler's record of the card was lost: the card stayed for ever after it was deleted."""
    flood(world, 5)
    key = next(key for key, card in world.known.items() if card.node == "evil")
    world.known[key] = world.known[key]._replace(node="other")
    world.heard.fails = 1
    with pytest.raises(OSError, match="no"):
        world.reports.on_change(key, None, world.known[key])
    if then == "is deleted":
        world.remove(key)
    else:
        world.reports.on_change(key, None, world.known[key])  # as the reflector does
    world.pass_time(60)
    assert world.heard.cards == world.known
    counts = {
        node: sum(len(card.reported_shares) for card in world.known.values() if card.node == node)
        for node in ("evil", "other")
    }
    assert {node: count for node, count in counts.items() if count} == dict(world.reports._shares)


def test_a_new_card_that_the_handler_fails_on_leaves_nothing_when_it_is_deleted(world):
    """The handler may have handled half of it, and its shares would become negative."""
    world.heard.fails = 1
    with pytest.raises(OSError, match="no"):
        world.put_card(20, "evil", 5)
    key = next(reversed(world.known))
    world.heard.cards[key] = world.known[key]
    world.remove(key)
    assert world.heard.cards == world.known
    assert dict(world.reports._shares) == {}


def test_before_the_first_list_is_complete_nothing_waits():
    world = World()
    for index in range(20):
        world.put_card(index, "evil", 512)
    assert world.heard.cards == world.known
