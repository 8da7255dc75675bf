"""Whose clients are detached, and when."""

import pytest

from mps.daemon.termination import Terminations
from mps.host.pods import PodView
from tests.mps import records

HELD = {"0": (records.share(0, 5),)}


def pod(uid: str = "e", **fields) -> PodView:
    return records.pod(uid, HELD, **fields)


def pod_without_share(uid: str, **fields) -> PodView:
    """It holds nothing."""
    return records.pod(uid, **fields)


def ending(ends: float, grace: float) -> PodView:
    return pod(ends_at=ends, grace=grace)


def due(terminations: Terminations, due_pod: PodView, wall: float, mono: float):
    now, later = terminations.due([due_pod], wall, mono)
    return bool(now), later


@pytest.fixture
def terminations():
    return Terminations(3.0)


def test_clients_have_their_grace_but_for_the_last_seconds(terminations):
    due_pod = ending(1030.0, 30.0)
    assert due(terminations, due_pod, 1000.0, 5.0) == (False, 27.0)
    assert due(terminations, due_pod, 1026.9, 31.9)[0] is False
    assert due(terminations, due_pod, 1027.1, 32.1)[0] is True


def test_a_clock_that_differs_does_not_make_it_late(terminations):
    due_pod = ending(1330.0, 30.0)  # the API server's is 5 minutes ahead
    due(terminations, due_pod, 1000.0, 5.0)
    assert due(terminations, due_pod, 1028.0, 33.0)[0] is True


def test_a_manager_that_starts_late_is_not_late(terminations):
    assert due(terminations, ending(1030.0, 30.0), 1028.0, 5.0)[0] is True


def test_a_short_grace_is_halved_and_none_is_now(terminations):
    assert due(terminations, ending(1002.0, 2.0), 1000.0, 0.0) == (False, 1.0)
    assert due(terminations, ending(1000.0, 0.0), 1000.0, 0.0)[0] is True


def test_who_is_not_deleted_or_holds_nothing_is_left_alone(terminations):
    others = [pod("a"), pod_without_share("b", ends_at=0.0), pod("c", finished=True, ends_at=0.0, deadline=0.0)]
    assert terminations.due(others, 1000.0, 0.0) == ([], None)


def test_a_pods_own_deadline_is_an_end_as_well(terminations):
    due_pod = pod(deadline=1000.0, spec_grace=30.0)
    assert due(terminations, due_pod, 900.0, 0.0) == (False, 127.0)
    assert due(terminations, due_pod, 1026.0, 126.0) == (False, 1.0)
    assert due(terminations, due_pod, 1027.0, 127.0) == (True, None)


def test_a_pod_that_is_deleted_before_its_deadline_ends_as_it_was_told(terminations):
    due_pod = pod(deadline=1000.0, spec_grace=30.0, ends_at=1300.0, grace=300.0)
    assert due(terminations, due_pod, 1100.0, 0.0) == (False, 197.0)


def test_a_pod_that_vanishes_is_due_at_once_until_it_has_no_clients(terminations):
    due_pod, other = pod("forced"), pod("other")
    assert terminations.due([due_pod, other], 1000.0, 0.0) == ([], None)
    for _ in range(2):
        assert terminations.due([other], 1001.0, 1.0) == ([due_pod], None)
        assert terminations.force_deleted == [due_pod]
    terminations.mark_detached("forced")
    assert terminations.due([other], 1002.0, 2.0) == ([], None)
    assert terminations.force_deleted == []


def test_who_had_finished_and_a_mirror_that_goes_leave_nobody_to_detach(terminations):
    terminations.due(
        [pod("done", finished=True), pod("mirror", cgroup_uid="static"), pod_without_share("free")], 0.0, 0.0
    )
    assert terminations.due([], 1.0, 1.0) == ([], None)
