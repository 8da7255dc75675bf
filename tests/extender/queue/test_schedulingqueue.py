"""The table of waiting pods by itself; what the extender does with it is in tests/extender/test_state.py and others."""

import pytest

from cardwise.core.api import request
from cardwise.core.api.request import PodRequest
from extender.queue import schedulingqueue
from extender.queue.schedulingqueue import SchedulingQueue
from extender.records.pod import WaitingPod
from extender.records.podinfo import WaitingRecord
from extender.records.podref import PodRef
from tests.build import asking

NODES = ("n1", "n2")


@pytest.fixture
def queue(clock) -> SchedulingQueue:
    return SchedulingQueue(clock)


def waiting(name: str, **fields) -> WaitingRecord:
    return WaitingRecord(uid=name, namespace="default", name=name, **fields)


def test_a_pod_that_was_not_tried_for_long_no_longer_waits(queue, clock):
    queue.set_refusal_reason("a", "never refused")
    assert queue.refusal_counts() == {}
    queue.mark_refused("a")
    queue.set_refusal_reason("a", "full")
    clock.advance(100.0)
    queue.mark_refused("a")
    assert queue.refusal_counts() == {"full": 1}
    clock.advance(601.0)
    assert queue.refusal_counts() == {}


def test_a_pod_that_filter_is_called_for_after_its_deletion_is_counted_for_seconds_only(queue, clock):
    for name in ("gone", "new"):
        queue.set_pod(waiting(name))
        queue.mark_refused(name)
        queue.set_refusal_reason(name, "full")
    queue.remove_pod("gone")
    queue.mark_refused("gone")  # kube-scheduler has not heard of it
    queue.set_refusal_reason("gone", "full")
    clock.advance(3.0)
    assert queue.refusal_counts() == {"full": 1}


def test_a_pod_that_filter_knows_before_the_watch_is_one_row(queue):
    queue.mark_refused("a")
    queue.set_refusal_reason("a", "full")
    queue.set_pod(waiting("a", classes=frozenset({"k80"})))
    assert [pod.name for pod in queue.pods_requesting_class("k80")] == ["a"]
    assert queue.refusal_counts() == {"full": 1}
    queue.remove_pod("a")
    assert (list(queue.pods_requesting_class("k80")), queue.refusal_counts()) == ([], {})


def test_pods_that_filter_asks_about_after_they_have_gone_are_forgotten(queue, monkeypatch):
    monkeypatch.setattr(schedulingqueue, "_MAX_UNSEEN", 3)
    for name in ("shown", "a", "b", "c", "d"):
        queue.mark_refused(name)
        queue.set_refusal_reason(name, "full")
        if name == "shown":
            queue.set_pod(waiting("shown"))
    assert queue.refusal_counts() == {"full": 4}
    assert not queue.is_unschedulable("a")


def test_changes_that_the_scheduler_sees_requeue_only_just_refused_pods(queue, clock):
    queue.mark_refused("a")
    clock.advance(1.0)
    queue.requeue_all("n1", seen_by_scheduler=True)
    assert queue.next_requeue_node(NODES) == "n1"
    clock.advance(2.0)
    queue.requeue_all("n1", seen_by_scheduler=True)
    assert queue.next_requeue_node(NODES) is None


def test_a_pod_refused_until_a_time_is_requeued_then(queue, clock):
    queue.mark_refused("a")
    queue.requeue_all_at(clock.now() + 5.0)
    assert queue.next_requeue_node(NODES) is None
    clock.advance(5.0)
    assert queue.next_requeue_node(NODES) == "n1"
    clock.advance(5.0)
    assert queue.next_requeue_node(NODES) is None, "once"


def test_without_pending_pods_none_is_requeued(queue, clock):
    queue.mark_refused("a")
    queue.mark_placed("a")
    queue.requeue_all("n1")
    queue.requeue_all_at(0.0)
    assert queue.next_requeue_node(NODES) is None
    queue.mark_refused("b")
    clock.advance(5.0)
    assert queue.next_requeue_node(NODES) is None, "what moved before it waited"


def test_a_touch_that_failed_is_due_again(queue, clock):
    queue.mark_refused("a")
    queue.requeue_all("n2")
    assert queue.next_requeue_node(("n2",)) == "n2"
    queue.remove_pod("a")
    queue.on_requeue_failed("n2")
    assert queue.next_requeue_node(("n2",)) == "n2", "at once, and there is no other"


def test_another_node_is_touched_instead_of_one_that_could_not_be(queue, clock):
    queue.mark_refused("a")
    queue.requeue_all("n2")
    assert queue.next_requeue_node(NODES) == "n2"
    queue.on_requeue_failed("n2")
    assert queue.next_requeue_node(NODES) == "n1"
    queue.on_requeued("n1")
    assert queue.next_requeue_node(NODES) is None
    clock.advance(1.0)
    queue.requeue_all("n2")
    assert queue.next_requeue_node(NODES) == "n1", "n2 is remembered"
    queue.on_requeued("n1")
    clock.advance(300.0)
    queue.requeue_all("n2")
    assert queue.next_requeue_node(NODES) == "n2", "but not for ever"


def test_if_no_node_could_be_touched_the_one_that_failed_longest_ago_is_next(queue, clock):
    queue.mark_refused("a")
    queue.requeue_all()
    tried = []
    for _ in range(4):
        tried.append(queue.next_requeue_node(NODES))
        queue.on_requeue_failed(tried[-1])
        clock.advance(1.0)
    assert tried == ["n1", "n2", "n1", "n2"]


def test_without_a_node_the_one_that_was_touched_last_is_touched(queue, clock):
    queue.mark_refused("a")
    queue.requeue_all("n2")
    queue.on_requeued(queue.next_requeue_node(NODES))
    clock.advance(1.0)
    queue.requeue_all()
    assert queue.next_requeue_node(NODES) == "n2"


def never(_: int) -> bool:
    return False


def test_capacity_moves_no_pod_that_awaits_a_plan(queue, clock):
    queue.mark_refused("member", awaits_plan=0)
    queue.on_capacity_freed("n1", can_preempt=never)
    assert queue.next_requeue_node(NODES) is None
    queue.requeue_all()  # there is a plan, or a quota was raised
    assert queue.next_requeue_node(NODES) is not None
    clock.advance(2.0)
    queue.mark_refused("single")
    queue.on_capacity_freed("n1", can_preempt=never)
    assert queue.next_requeue_node(NODES) == "n1"


@pytest.mark.parametrize("leaves", ["mark_placed", "remove_pod", "mark_refused"])
def test_only_pods_that_are_refused_now_count_as_awaiting_a_plan(queue, leaves):
    queue.mark_refused("member", awaits_plan=0)
    queue.mark_refused("other")
    getattr(queue, leaves)("member")
    queue.on_capacity_freed("n1", can_preempt=never)
    assert queue.next_requeue_node(NODES) == "n1"


def test_members_that_could_evict_pods_are_moved_by_capacity(queue, clock):
    queue.mark_refused("low", awaits_plan=0)
    queue.mark_refused("high", awaits_plan=10)
    queue.on_capacity_freed("n1", can_preempt=lambda priority: priority > 5)
    assert queue.next_requeue_node(NODES) == "n1"
    clock.advance(2.0)
    queue.remove_pod("high")
    queue.on_capacity_freed("n1", can_preempt=lambda priority: priority > 5)
    assert queue.next_requeue_node(NODES) is None


def await_preemption(queue: SchedulingQueue, name: str, mem: int) -> None:
    pod_request = request.parse(asking(name, gpu_mem=mem))
    assert pod_request is not None
    pod = WaitingPod(PodRef(name, "default", name), pod_request)
    queue.set_pod(waiting(name, waiting_pod=pod))
    queue.mark_refused(name)
    queue.await_preemption(pod, "binpack", NODES, gang=None)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_search_in_vain_delays_equal_pods_without_comparing_their_requests(queue, clock, monkeypatch, is_full):
    if is_full:
        monkeypatch.setattr(schedulingqueue, "_MAX_PREEMPTING", 9)
    for i in range(8):
        await_preemption(queue, f"equal{i}", 1000)
    await_preemption(queue, "other", 2000)
    queue.stop_awaiting_preemption("equal7")
    if is_full:
        await_preemption(queue, "equal7", 1000)
    clock.advance(60.0)
    pending = queue.next_preemption(lambda uid: uid == "other")
    compared = []

    def compare(pod_request: PodRequest, other: object) -> bool:
        compared.append(pod_request)
        return pod_request.containers == getattr(other, "containers", None)

    monkeypatch.setattr(PodRequest, "__eq__", compare)
    queue.on_searched(pending, 0.001, in_vain=True)
    assert len(compared) <= 2, "7 pods are equal"
    recorded = [f"equal{i}" for i in range(8) if queue.preemption_nodes(f"equal{i}")]
    assert len(recorded) == (0 if is_full else 7)
    clock.advance(1.0)
    assert queue.next_preemption(lambda _: False).claimant.uid == "other"
