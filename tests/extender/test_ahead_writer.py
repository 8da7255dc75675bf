"""How a nomination is written into the pod's status, and what happens where it cannot be."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cardwise.kube import errors
from extender.ahead import Nominee, Outcome
from extender.aheadwriter import AheadWriter
from tests.extender.aheadworlds import World
from tests.extender.worlds import P100, free

LATE, GONE = errors.Conflict(409, "Conflict"), errors.NotFound(404, "NotFound")


class Client:
    """Keeps what was written, and answers with these errors first."""

    def __init__(self, *answers: errors.KubeError) -> None:
        self.answers = list(answers)
        self.written: list[tuple[str, Any, str]] = []
        self.came = threading.Semaphore(0)
        self.pod: dict[str, Any] = {}
        self.meanwhile: Callable[[], object] = lambda: None

    def patch(self, path: str, change: object, kind: str, manager: str, *, timeout: float) -> dict[str, Any]:
        assert (manager, timeout) == ("cardwise-extender", 5.0)
        self.written.append((path, change, kind))
        self.meanwhile()
        self.came.release()
        if self.answers:
            raise self.answers.pop(0)
        return {}

    def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        assert (path, timeout) == ("/api/v1/namespaces/default/pods/p", 5.0)
        if not self.pod:
            raise GONE
        return self.pod


class Writing:
    """A writer of a world; `leads` may be changed."""

    def __init__(self, *answers: errors.KubeError, leads: bool = True) -> None:
        self.world = World("n1", "n2")
        self.client = Client(*answers)
        self.leads = leads
        self.writer = AheadWriter(self.client, self.world.state.ahead, active=self._active, clock=self.world.clock)  # type: ignore[arg-type]

    def round(self, *, writes: int) -> None:
        """One round, in which so many are written."""
        before = len(self.client.written)
        self.world.clock.advance(1.0)
        self.writer.step()
        for _ in range(writes):
            assert self.client.came.acquire(timeout=60), "what was decided is not written"
        self.writer.stop()
        assert len(self.client.written) - before == writes

    def _active(self) -> bool:
        return self.leads


@pytest.fixture
def nominee() -> Nominee:
    return Nominee("uid-p", "default", "p", "7", "n1")


def test_what_is_written():
    writing = Writing()
    writing.world.create("p", 100)
    writing.round(writes=1)
    change = {"metadata": {"uid": "uid-p", "resourceVersion": "7"}, "status": {"nominatedNodeName": "n1"}}
    assert writing.client.written == [("/api/v1/namespaces/default/pods/p/status", change, "merge")]


def test_many_are_written_in_one_round():
    writing = Writing()
    writing.round(writes=0)  # from then on their number is counted
    for i in range(20):
        writing.world.create(f"p{i}", 100)
    writing.round(writes=20)


def test_a_standby_writes_nothing():
    writing = Writing(leads=False)
    writing.world.create("p", 100)
    writing.round(writes=0)
    assert free(writing.world.state) == [P100]


@pytest.mark.parametrize("error", [LATE, GONE], ids=str)
def test_a_pod_that_has_changed_holds_nothing(error, nominee):
    writing = Writing(error)
    writing.world.create("p", 100)
    assert writing.world.ahead() == {"p": "n1"}
    writing.writer.write(nominee)
    assert free(writing.world.state) == [P100]
    assert writing.world.outcomes == [Outcome.LATE]
    writing.world.create("q", 100)
    writing.round(writes=1)


@pytest.mark.parametrize("error", [errors.Forbidden(403), errors.Unreachable("cut")], ids=str)
def test_where_writing_fails_it_rests(error, nominee):
    writing = Writing(error)
    writing.world.create("p", 100)
    assert writing.world.ahead() == {"p": "n1"}
    writing.writer.write(nominee)
    assert free(writing.world.state) == [P100]
    writing.world.create("q", 100)
    writing.round(writes=0)
    writing.world.clock.advance(5.0)
    writing.round(writes=1)


def test_nothing_is_written_for_a_pod_that_the_scheduler_has_come_to(nominee):
    writing = Writing()
    writing.world.create("p", 100)
    assert writing.world.ahead() == {"p": "n1"}
    writing.world.filter("p", "n1", "n2")
    writing.writer.write(nominee)
    assert writing.client.written == []


def test_a_failed_write_of_a_pod_that_the_scheduler_is_at_takes_nothing_from_it(nominee):
    writing = Writing(LATE)
    writing.world.create("p", 100)
    assert writing.world.ahead() == {"p": "n1"}
    writing.client.meanwhile = lambda: writing.world.filter("p", "n1")
    writing.writer.write(nominee)
    assert len(writing.client.written) == 1
    assert free(writing.world.state) == [P100 - 100]


def told(*, manager: str = "cardwise-extender", node: str = "n1", uid: str = "uid-p", **spec: str) -> dict[str, Any]:
    """A pod whose status names a node, as the API server answers."""
    fields = {"f:status": {"f:nominatedNodeName": {}}}
    return {
        "metadata": {
            "uid": uid,
            "resourceVersion": "9",
            "managedFields": [{"manager": "kubectl"}, {"manager": manager, "fieldsV1": fields}],
        },
        "spec": spec,
        "status": {"nominatedNodeName": node},
    }


def stale(writing: Writing) -> None:
    """What p's status says is not held for it, for longer than the scheduler needs to come."""
    writing.world.tell(writing.world.create("p", 100) | {"status": {"nominatedNodeName": "n1"}})
    writing.round(writes=0)
    writing.world.clock.advance(2.0)


def test_a_node_that_is_named_in_vain_is_taken_back(nominee):
    writing = Writing()
    writing.client.pod = told()
    stale(writing)
    writing.round(writes=1)
    change = {"metadata": {"uid": "uid-p", "resourceVersion": "9"}, "status": {"nominatedNodeName": None}}
    assert writing.client.written == [("/api/v1/namespaces/default/pods/p/status", change, "merge")]


@pytest.mark.parametrize(
    "pod",
    [told(manager="kueue"), told(node="n2"), told(uid="another"), told(nodeName="n1"), {}],
    ids=["of others", "by now another", "made anew", "bound", "gone"],
)
def test_what_is_not_ours_is_left(pod, nominee):
    writing = Writing()
    writing.client.pod = pod
    writing.writer.take_back(nominee)
    assert writing.client.written == []


@pytest.mark.parametrize(("error", "rests"), [(LATE, 0.0), (errors.Unreachable("cut"), 5.0)], ids=str)
def test_what_could_not_be_taken_back_is_tried_again(error, rests):
    writing = Writing(error)
    writing.client.pod = told()
    stale(writing)
    writing.round(writes=1)
    writing.world.clock.advance(rests)
    writing.round(writes=0)  # nothing is held for it since now
    writing.world.clock.advance(2.0)
    writing.round(writes=1)
