"""The order of nominations: as a sorted list would have it, and a namespace pauses in a few steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.request import PodRequest
from extender.queue import nominationorder
from extender.queue.nominationorder import NominationOrder, sort_key
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef
from tests.working import work

NAMESPACES = ("a", "b", "c")
SCHEDULERS = ("one", "two", "never")
MANY = 2000


def make_pod(
    uid: str, namespace: str = "a", *, priority: int = 0, created: str = "", scheduler: str = "one"
) -> WaitingPod:
    request = PodRequest(priority=priority, containers=())
    return WaitingPod(PodRef(uid, namespace, uid), request, created=created, scheduler=scheduler)


def pop(order: NominationOrder, paused: frozenset[str] = frozenset(), schedulers=("one",)) -> str | None:
    has_more, uid = True, None
    while has_more and uid is None:
        has_more, uid = order.pop(schedulers, paused)
    return uid


@pytest.fixture
def full() -> NominationOrder:
    """Many pods in namespace a, and then one in b."""
    order = NominationOrder()
    for i in range(MANY):
        order.add(make_pod(f"p{i:05}", created=f"{i:05}"))
    order.add(make_pod("other", "b", created="9"))
    return order


def test_a_namespace_with_many_pods_pauses_and_continues_in_a_few_steps(full):
    with work() as done:
        assert pop(full, frozenset({"a"})) == "other"
        assert pop(full, frozenset({"a", "x"})) is None
        assert pop(full, frozenset({"x"})) == "p00000"
    assert done.steps < 1000


@pytest.mark.parametrize("first", [0, 1], ids=["from-the-first", "the-first-last"])
def test_pods_that_were_tried_meanwhile_are_dropped_some_at_a_time(full, first):
    removed = [f"p{i:05}" for i in range(MANY - 1)]
    steps = []
    for uid in (*removed[first:], *removed[:first]):
        with work() as done:
            full.remove(uid)
        steps.append(done.steps)
    uid = None
    while uid is None:
        with work() as done:
            has_more, uid = full.pop(("one",), frozenset())
        steps.append(done.steps)
        assert has_more
    assert uid == f"p{MANY - 1:05}"
    assert max(steps) < 20 * nominationorder._MAX_DROPPED
    assert pop(full) == "other"
    assert pop(full) is None


def test_a_queue_of_a_scheduler_that_never_calls_does_not_grow():
    order = NominationOrder()
    order.add(make_pod("stays", scheduler="never"))
    for i in range(MANY):
        order.add(make_pod(f"p{i}", f"n{i}", scheduler="never"))
        order.add(make_pod(f"q{i}", created=f"{i}", scheduler="never"))
        order.add(make_pod(f"r{i}", scheduler=f"s{i}"))
        for name in "pqr":
            order.remove(f"{name}{i}")
    (scheduler,) = order._schedulers.values()
    (heap,) = scheduler.heaps.values()
    assert len(scheduler.firsts) + len(heap.entries) + len(heap.former) < 200
    assert pop(order, schedulers=("never",)) == "stays"
    assert not order._schedulers


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.builds(
                make_pod,
                st.integers(0, 30).map(str),
                st.sampled_from(NAMESPACES),
                priority=st.integers(0, 2),
                created=st.sampled_from(["1", "2", "3"]),
                scheduler=st.sampled_from(SCHEDULERS),
            ),
        ),
        st.tuples(st.just("remove"), st.integers(0, 30).map(str)),
        st.tuples(st.just("pop"), st.frozensets(st.sampled_from(NAMESPACES))),
    ),
    max_size=200,
)


@given(STEPS)
@settings(deadline=None)
def test_it_is_the_order_of_a_sorted_list(steps):
    before = nominationorder._MAX_DROPPED, nominationorder._MAX_DEAD_ENTRIES
    nominationorder._MAX_DROPPED, nominationorder._MAX_DEAD_ENTRIES = 2, 1  # type: ignore[misc]
    try:
        check_steps(steps)
    finally:
        nominationorder._MAX_DROPPED, nominationorder._MAX_DEAD_ENTRIES = before  # type: ignore[misc]


def check_steps(steps: list[tuple[str, object]]) -> None:
    order, pending = NominationOrder(), dict[str, WaitingPod]()  # in the order in which they were added
    for name, subject in steps:
        if isinstance(subject, WaitingPod):
            order.add(subject)
            pending.setdefault(subject.uid, subject)
        elif isinstance(subject, str):
            order.remove(subject)
            pending.pop(subject, None)
        else:
            assert name == "pop"
            assert isinstance(subject, frozenset)
            open_pods = [
                pod for pod in pending.values() if pod.ref.namespace not in subject and pod.scheduler != "never"
            ]
            first = min(open_pods, key=sort_key, default=None)
            assert pop(order, subject, ("one", "two")) == (first.uid if first is not None else None)
            if first is not None:
                del pending[first.uid]
