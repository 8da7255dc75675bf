"""Who may tell the cluster something, and when: the leader, once everything that it watches has been listed."""

import pytest

from extender.controllers.reporters import Reporters
from extender.reporting.listers import Listers
from extender.state import State
from tests.extender.statusworlds import CARDS, Watched, er_object
from tests.fakes.clock import FakeClock


class Recorder:
    def record(self, *_):
        pass


class World:
    def __init__(self):
        self.knows = self.leads = True
        seen = Listers()
        clock = FakeClock()
        self.api = Watched(seen, clock)
        self.state = State(clock=clock)
        self.reporters = Reporters(
            self.api.client(),
            self.state,
            seen,
            Recorder(),
            knows=lambda: self.knows,
            leads=lambda: self.leads,
            clock=clock,
        )
        self.api.put(CARDS, er_object("GPU-1", "n1"))
        self.api.show()

    def told(self):
        """What a round writes."""
        for step in (*self.reporters.steps, self.reporters.gangs):
            step()
        return {call.verb for call in self.api.requests}


@pytest.fixture
def world():
    return World()


def test_the_leader_that_knows_all_makes_classes_and_writes_statuses(world):
    assert world.told() == {"create", "patch"}


@pytest.mark.parametrize("lacking", ["knows", "leads"])
def test_nothing_is_told_by_who_does_not_lead_or_does_not_know_all(world, lacking):
    setattr(world, lacking, False)
    assert world.told() == set()


def test_before_all_is_known_nothing_is_counted(world):
    world.state.set_node("n1")
    world.knows = False
    world.told()
    assert world.state.changed_nodes() == {"n1"}
