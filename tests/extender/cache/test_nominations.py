"""The cards that are reserved for each nominated pod: after repeated events, in a new epoch, and for gang members."""

import pytest

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import PodRequest
from extender.cache.nodeload import NodeLoads
from extender.cache.nominations import MemberReservation, NominatedPlace, Nominations
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef
from tests.build import shares

CARD, OTHER = (Assignment({"0": shares(100, index)}) for index in (0, 1))


@pytest.fixture
def nominations():
    return Nominations(NodeLoads())


def waiting(name, node=""):
    return WaitingPod(PodRef(f"uid-{name}", "d", name), PodRequest(containers=(), priority=5), nominated_node=node)


def reserved_by_pod(nominations):
    """By name of the pod: node and cards."""
    return [(pod.ref.name, node, place.assignment) for pod, node, place in nominations.reserved_places((), 0)]


def test_a_status_that_still_names_a_node_where_cards_were_kept_long_enough_keeps_none_again(nominations):
    nominations.set_node_from_status(waiting("p", "n1"), 0.0)
    assert reserved_by_pod(nominations) == [("p", "n1", None)]
    assert nominations.end_expired(60.0)
    nominations.set_node_from_status(waiting("p", "n1"), 61.0)
    assert reserved_by_pod(nominations) == []
    nominations.set_node_from_status(waiting("p", "n2"), 62.0)
    assert reserved_by_pod(nominations) == [("p", "n2", None)], "another node is another nomination"


def test_reserved_cards_are_computed_again_in_a_new_epoch(nominations):
    """Another leader may have reserved these cards for other pods."""
    nominations.set_places(waiting("untold"), {"n1": NominatedPlace(OTHER)}, 0.0)
    nominations.set_places(waiting("told"), {"n1": NominatedPlace(CARD, ("uid-victim",))}, 0.0)
    nominations.set_node_from_status(waiting("told", "n1"), 1.0)
    assert ("told", "n1", CARD) in reserved_by_pod(nominations)
    nominations.reset_to_statuses()
    assert reserved_by_pod(nominations) == [("told", "n1", None)]
    assert nominations.victim_nodes_by_uid() == {}


def test_a_member_that_is_nominated_itself_has_no_second_place_beside_the_first(nominations):
    rest = (MemberReservation(waiting("b"), "n2", OTHER), MemberReservation(waiting("c"), "n3", OTHER))
    nominations.set_own_place(waiting("a"), "n1", NominatedPlace(CARD, member_reservations=rest), 0.0)
    nominations.set_own_place(waiting("b"), "n4", NominatedPlace(CARD), 0.0)
    assert sorted(reserved_by_pod(nominations), key=str) == [("a", "n1", CARD), ("b", "n4", CARD), ("c", "n3", OTHER)]


def test_a_nomination_that_is_renewed_while_its_victim_ends_is_no_change_for_a_planner():
    """Its time is renewed each half second."""
    loads = NodeLoads()
    nominations = Nominations(loads)
    loads.set_pod("v", PodRecord("n1", uid="v", priority=0, assignment=Assignment({}), terminating=True))
    pod = WaitingPod(PodRef("u", "d", "p"), PodRequest(containers=(), priority=5))
    nominations.set_own_place(pod, "n1", NominatedPlace(victims=("v",)), 0.0)
    before = dict(nominations.by_pod())
    nominations.end_expired(1.0)
    assert nominations.get("u") is not before["u"]
    assert nominations.nodes_changed_since(before) == set()
    nominations.set_own_place(pod, "n2", NominatedPlace(victims=("v",)), 2.0)
    assert nominations.nodes_changed_since(before) == {"n1", "n2"}
