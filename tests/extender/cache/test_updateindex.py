"""Nodes may change faster than their cards are indexed: neither a call nor a hold of the lock lasts longer for it."""

import pytest

from cardwise.core.api import request
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from extender.cache import cache
from extender.nomination.nominator import NominationSettings
from extender.placing.placing import PlacementRequest
from extender.records.podref import PodRef
from extender.state import State
from tests.build import asking, extended_resource
from tests.extender.nominationcluster import World
from tests.extender.states import as_card
from tests.fakes.clock import FakeClock

NODES = [f"n{i:03}" for i in range(200)]
MAX_PAUSES = 200  # pauses after which a call counts as endless


class Storm(FakeClock):
    """A clock that changes all nodes in each pause, while `state` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.pauses = 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.state is not None:
            self.pauses += 1
            assert self.pauses < MAX_PAUSES, "the call does not end while nodes change"
            for name in NODES:
                self.state._ledger._mark_changed(name)


@pytest.fixture
def storm(monkeypatch):
    """A state whose nodes change without end, and by hold of the lock, how many nodes were indexed."""
    monkeypatch.setattr(cache, "_NODES_INDEXED_PER_LOCK", 8)
    monkeypatch.setattr(cache, "_MAX_UNINDEXED_NODES", 16)
    clock = Storm()
    state = State(clock=clock, nomination_settings=NominationSettings(above_nodes=0))
    for name in NODES:
        state.set_node(name)
        state.set_card(*as_card(extended_resource(0, node=name)))
    state.warm_caches()
    indexed: list[int] = []
    refresh = Ledger._refresh

    def count(ledger: Ledger, nodes: int | None = None) -> object:
        indexed.append(min(ledger.unindexed_count, nodes or len(NODES)))
        return refresh(ledger, nodes)

    monkeypatch.setattr(Ledger, "_refresh", count)
    clock.state = state
    clock.sleep(0.0)
    return state, indexed


def test_the_index_is_warmed_for_all_nodes(storm):
    state, _ = storm
    state._clock.state = None
    state.warm_caches()
    assert state._ledger.unindexed_count <= cache._NODES_INDEXED_PER_LOCK


def test_filter_places_a_pod_while_nodes_change_faster_than_they_are_indexed(storm):
    state, indexed = storm
    pod_request = request.parse(asking("p", gpu_mem=1000))
    placement = state.plan_pod(PlacementRequest(PodRef("uid-p", "default", "p"), pod_request, NODES, "binpack"))
    assert isinstance(placement, Placement)
    assert placement.node == "n000"
    assert max(indexed) <= 8


def test_a_pod_is_not_nominated_while_nodes_change_faster_than_they_are_indexed(monkeypatch):
    world = World("n1", "n2")
    world.create("p", 1000)
    monkeypatch.setattr(cache, "_MAX_UNINDEXED_NODES", 1)
    assert world.nominate_all() == {}
    assert world.reserved() == {}
