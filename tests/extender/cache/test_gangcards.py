"""The cards that are reserved for a gang: what a change releases, and what it costs."""

from dataclasses import replace

import pytest

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.quantity import MiB, Percent
from extender.cache.gangcards import GangCards
from tests.build import P100
from tests.extender.gangcluster import World, member
from tests.working import work

SHARE = CardShare(0, "GPU-n1-0", MiB(1), Percent(0), MiB(P100))


def holdings(count: int) -> list[Holding]:
    return [Holding(f"uid-{i}", "default", f"g{i}", "n1", Assignment({"0": (SHARE,)})) for i in range(count)]


@pytest.fixture
def gang() -> Gang:
    world = World({"n1": 1})
    world.create(member("g", "g", 2, gpu_mem=P100))
    return world.state.gangs.gang_of("uid-g")


def test_a_change_releases_what_is_not_reserved_any_more(gang):
    cards, reserved = GangCards(Ledger()), holdings(3)
    assert not cards.reserve(gang, reserved)
    assert not cards.reserve(gang, [replace(holding) for holding in reserved])
    assert not cards.reserve(gang, [*reversed(reserved), replace(reserved[0], uid="uid-more")])
    assert cards.reserve(gang, [*reserved[1:], replace(reserved[0], node="n2")])
    assert cards.reserve(None)
    assert not cards.reserve(gang, reserved)


def test_the_cost_of_each_step_grows_with_the_holdings_and_not_with_their_square(gang):
    """500 holdings on 3 nodes took 13 ms with the lock held."""

    def steps(count: int) -> int:
        cards = GangCards(Ledger())
        cards.reserve(gang, holdings(count))
        with work() as done:
            cards.reserve(gang, holdings(count))
        return done.steps

    assert steps(80) < 3 * steps(40)
