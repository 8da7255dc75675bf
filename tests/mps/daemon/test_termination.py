"""Whose clients are detached, and when."""

from datetime import UTC, datetime

import pytest

from mps.daemon.termination import TerminatingPods
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


def step(
    terminating_pods: TerminatingPods, pods: list[PodView], api: float | None, mono: float, node: float | None = None
):
    """`node`: by the node's clock, if that differs from the API server's. `api` None: the API server's is unknown."""
    seconds = api if node is None else node
    assert seconds is not None
    return terminating_pods.due_pods(
        pods,
        api_time=None if api is None else datetime.fromtimestamp(api, UTC),
        node_time=datetime.fromtimestamp(seconds, UTC),
        monotonic=mono,
    )


def due(terminating_pods: TerminatingPods, due_pod: PodView, api: float | None, mono: float, node: float | None = None):
    now, later = step(terminating_pods, [due_pod], api, mono, node)
    return bool(now), later


@pytest.fixture
def terminating_pods():
    return TerminatingPods()


def test_clients_have_their_grace_but_for_the_last_seconds(terminating_pods):
    due_pod = ending(1030.0, 30.0)
    assert due(terminating_pods, due_pod, 1000.0, 5.0) == (False, 27.0)
    assert due(terminating_pods, due_pod, 1026.9, 31.9)[0] is False
    assert due(terminating_pods, due_pod, 1027.1, 32.1)[0] is True


@pytest.mark.parametrize("node_ahead", [-3600.0, 0.0, 27.0, 3600.0])
@pytest.mark.parametrize(
    "api",
    [1000.0, 970.0, 8200.0, -6200.0, None],
    ids=["API server", "another, 30 s behind", "another, two hours ahead", "another, two hours behind", "unknown"],
)
def test_a_pod_that_was_seen_before_its_deletion_has_its_grace_whatever_the_nodes_clock_says(
    terminating_pods, node_ahead, api
):
    def times(second: float) -> tuple[float | None, float, float]:
        return None if api is None else api + second, 5.0 + second, 1000.0 + second + node_ahead

    due(terminating_pods, pod(), *times(-1.0))
    detached = [second for second in range(29) if due(terminating_pods, ending(1030.0, 30.0), *times(second))[0]]
    assert detached == [27, 28]


@pytest.mark.parametrize("node_ahead", [-3600.0, 0.0, 27.0, 3600.0])
@pytest.mark.parametrize("late", [0, 4, 10, 20, 27, 60])
def test_a_deletion_that_was_seen_late_is_over_when_the_kubelet_ends_the_pod(terminating_pods, late, node_ahead):
    """The watch was interrupted, and the kubelet's was not."""
    due(terminating_pods, pod(), 999.0, 4.0, 999.0 + node_ahead)
    detached = next(
        second
        for second in range(late, 200)
        if due(terminating_pods, ending(1030.0, 30.0), 1000.0 + second, 5.0 + second, 1000.0 + second + node_ahead)[0]
    )
    assert detached == max(27, late)


@pytest.mark.parametrize("node_ahead", [-3600.0, 0.0, 27.0, 3600.0])
def test_a_deletion_that_was_there_at_the_start_has_what_is_left_of_it_by_the_api_servers_clock(
    terminating_pods, node_ahead
):
    assert due(terminating_pods, ending(1030.0, 30.0), 1020.0, 5.0, 1020.0 + node_ahead) == (False, 7.0)
    assert due(terminating_pods, ending(1030.0, 30.0), 1000.0, 11.9, 1000.0 + node_ahead)[0] is False, "it is set back"
    assert due(terminating_pods, ending(1030.0, 30.0), 1000.0, 12.0, 1000.0 + node_ahead)[0] is True


@pytest.mark.parametrize(("api", "node", "remaining"), [(8220.0, 1020.0, 7.0), (8220.0, 8220.0, None)])
def test_a_deletion_that_was_there_at_the_start_is_compared_with_the_clock_that_can_be_right(
    terminating_pods, api, node, remaining
):
    """Its pod would be over for two hours by that of an API server that had not written the deletion."""
    now, later = due(terminating_pods, ending(1030.0, 30.0), api, 5.0, node)
    assert (now, later) == (remaining is None, remaining)


def test_without_the_api_servers_time_a_deletion_that_was_there_at_the_start_is_compared_with_the_nodes(
    terminating_pods,
):
    assert due(terminating_pods, ending(1030.0, 30.0), None, 5.0, 1020.0) == (False, 7.0)


def test_a_clock_of_the_api_server_that_goes_back_makes_no_grace_longer(terminating_pods):
    assert due(terminating_pods, ending(1330.0, 30.0), 1000.0, 5.0) == (False, 27.0)


def test_a_manager_that_starts_late_is_not_late(terminating_pods):
    assert due(terminating_pods, ending(1030.0, 30.0), 1028.0, 5.0)[0] is True


def test_a_pod_that_is_deleted_again_has_the_shorter_grace_from_then_on(terminating_pods):
    due(terminating_pods, pod(), 990.0, 0.0)
    assert due(terminating_pods, ending(1060.0, 60.0), 1000.0, 10.0) == (False, 57.0)
    assert due(terminating_pods, ending(1030.0, 10.0), 1020.0, 30.0) == (False, 7.0)
    assert due(terminating_pods, ending(1030.0, 10.0), 1027.0, 37.0)[0] is True


def test_a_short_grace_is_halved_and_none_is_now(terminating_pods):
    assert due(terminating_pods, ending(1002.0, 2.0), 1000.0, 0.0) == (False, 1.0)
    assert due(terminating_pods, ending(1000.0, 0.0), 1000.0, 0.0)[0] is True


def test_who_is_not_deleted_or_holds_nothing_is_left_alone(terminating_pods):
    others = [pod("a"), pod_without_share("b", ends_at=0.0), pod("c", finished=True, ends_at=0.0, deadline=0.0)]
    assert step(terminating_pods, others, 1000.0, 0.0) == ([], None)


def test_a_pods_own_deadline_is_an_end_as_well(terminating_pods):
    due_pod = pod(deadline=1000.0, spec_grace=30.0)
    assert due(terminating_pods, due_pod, 900.0, 0.0) == (False, 127.0)
    assert due(terminating_pods, due_pod, 1026.0, 126.0) == (False, 1.0)
    assert due(terminating_pods, due_pod, 1027.0, 127.0) == (True, None)


def test_its_own_deadline_is_by_the_clock_of_the_node_whose_kubelet_keeps_it(terminating_pods):
    due_pod = pod(deadline=1000.0, spec_grace=30.0)
    assert due(terminating_pods, due_pod, 5000.0, 0.0, 1026.0) == (False, 1.0)


def test_a_pod_that_is_deleted_before_its_deadline_ends_as_it_was_told(terminating_pods):
    due_pod = pod(deadline=1000.0, spec_grace=30.0, ends_at=1300.0, grace=300.0)
    assert due(terminating_pods, due_pod, 1100.0, 0.0) == (False, 197.0)


def test_a_pod_that_vanishes_is_due_at_once_until_it_has_no_clients(terminating_pods):
    due_pod, other = pod("forced"), pod("other")
    assert step(terminating_pods, [due_pod, other], 1000.0, 0.0) == ([], None)
    for _ in range(2):
        assert step(terminating_pods, [other], 1001.0, 1.0) == ([due_pod], None)
        assert terminating_pods.force_deleted == [due_pod]
    terminating_pods.mark_detached("forced")
    assert step(terminating_pods, [other], 1002.0, 2.0) == ([], None)
    assert terminating_pods.force_deleted == []


def test_a_pod_that_vanished_and_is_bound_here_again_is_not_due(terminating_pods):
    """A restored etcd shows it without a node for a while."""
    again = pod("again")
    step(terminating_pods, [again], 1000.0, 0.0)
    assert step(terminating_pods, [], 1001.0, 1.0) == ([again], None)
    assert step(terminating_pods, [again], 1002.0, 2.0) == ([], None)
    assert terminating_pods.force_deleted == []
    assert step(terminating_pods, [], 1003.0, 3.0) == ([again], None), "it vanished once more"


def test_who_had_finished_and_a_mirror_that_goes_leave_nobody_to_detach(terminating_pods):
    finished = [pod("done", finished=True), pod("mirror", cgroup_uid="static"), pod_without_share("free")]
    step(terminating_pods, finished, 0.0, 0.0)
    assert step(terminating_pods, [], 1.0, 1.0) == ([], None)
