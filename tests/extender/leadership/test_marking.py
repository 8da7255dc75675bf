"""Which extender's pod a Service selects."""

import contextlib
import math
from functools import partial

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from extender.leadership.marking import LeaderMark
from tests.fakes.apiserver import ApiServer, Fault, Request
from tests.fakes.clock import FakeClock

POD = paths.pods("system", "extender-1")


class Scene:
    """One extender's pod, which still has the label of a process that was killed; `epoch` may be changed."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        labels = {"app": "x", names.LEADER: "true"}
        self.api.write_object(
            paths.pods(), {"metadata": {"name": "extender-1", "namespace": "system", "labels": labels}}
        )
        self.epoch: int | None = None
        self.mark = LeaderMark(self.api.client(), "system", "extender-1", lambda: self.epoch, self.clock)

    @property
    def marked(self) -> bool:
        labels = self.api.get(POD)["metadata"]["labels"]
        assert labels["app"] == "x"
        return labels.get(names.LEADER) == "true"


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_label_follows_the_lease_and_is_written_once(scene: Scene) -> None:
    scene.mark.step()
    assert not scene.marked, "a label of before a crash goes"
    scene.epoch = 1
    scene.mark.step()
    scene.mark.step()
    assert scene.marked
    scene.epoch = None
    scene.mark.step()
    assert not scene.marked
    assert len(scene.api.sent("patch")) == 3


def test_what_could_not_be_written_is_written_later(scene: Scene) -> None:
    scene.epoch = 1
    scene.api.down = True
    with pytest.raises(errors.KubeError):
        scene.mark.step()
    scene.api.down = False
    scene.mark.step()
    assert scene.marked
    assert len(scene.api.sent("patch")) == 1


def test_a_stopped_extender_loses_its_label(scene: Scene) -> None:
    scene.epoch = 1
    scene.api.edit(POD, metadata={"labels": {names.LEADER: None}})
    scene.mark.start()
    scene.clock.step()
    scene.clock.until_waiting()
    assert scene.marked
    scene.mark.stop()
    assert not scene.marked


def other(scene: Scene, name: str, **labels: str) -> str:
    scene.api.write_object(paths.pods(), {"metadata": {"name": name, "namespace": "system", "labels": labels}})
    return paths.pods("system", name)


def test_a_new_leader_removes_the_label_of_one_that_stands_still(scene: Scene) -> None:
    """A frozen leader keeps its label, and half of kube-scheduler's calls would wait there for their time-out."""
    frozen = other(scene, "extender-2", **{names.LEADER: "true", "app": "x"})
    standby = other(scene, "extender-3", app="x")
    scene.mark.step()
    assert scene.api.get(frozen)["metadata"]["labels"][names.LEADER] == "true", "a standby touches no label but its own"
    scene.epoch = 1
    scene.mark.step()
    assert scene.marked
    assert [scene.api.get(pod)["metadata"]["labels"] for pod in (frozen, standby)] == [{"app": "x"}] * 2


def test_a_leader_that_stood_still_and_leads_again_has_its_label_again(scene: Scene) -> None:
    scene.epoch = 1
    scene.mark.step()
    scene.api.edit(POD, metadata={"labels": {names.LEADER: None}})  # by one that led meanwhile
    scene.epoch = 3
    scene.mark.step()
    assert scene.marked


def test_labels_that_could_not_be_removed_are_removed_later(scene: Scene) -> None:
    frozen = other(scene, "extender-2", **{names.LEADER: "true"})
    scene.epoch = 1
    scene.api.fault(Fault(status=500), "patch", frozen)
    with pytest.raises(errors.KubeError):
        scene.mark.step()
    assert scene.marked
    scene.mark.step()
    assert names.LEADER not in scene.api.get(frozen)["metadata"].get("labels", {})


class MarkedPair:
    """Two extenders' pods, each with its LeaderMark; `epochs` may be changed."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.epochs: dict[str, int | None] = {"a": None, "b": None}
        self.marks: dict[str, LeaderMark] = {}
        for name in self.epochs:
            labels = {"app": "x"}
            self.api.write_object(paths.pods(), {"metadata": {"name": name, "namespace": "system", "labels": labels}})
            epoch = partial(self.epochs.__getitem__, name)
            self.marks[name] = LeaderMark(self.api.client(user_agent=name), "system", name, epoch, self.clock)

    @property
    def marked(self) -> list[str]:
        labels = {pod: self.api.get(paths.pods("system", pod))["metadata"]["labels"] for pod in self.epochs}
        return [pod for pod in labels if names.LEADER in labels[pod]]

    def b_leads(self) -> None:
        self.epochs.update(a=None, b=2)
        self.marks["b"].step()
        assert "b" in self.marked

    def step(self, seconds: float) -> None:
        """Both look every 0.2 s. A step that met a conflict is tried again, as the loop does."""
        for _ in range(round(seconds / 0.2)):
            for mark in self.marks.values():
                with contextlib.suppress(errors.KubeError):
                    mark.step()
            self.clock.advance(0.2)


@pytest.fixture
def pair() -> MarkedPair:
    return MarkedPair()


@pytest.mark.parametrize("call", range(1, 5))
def test_a_leader_that_writes_late_takes_no_label_from_its_successor(pair: MarkedPair, call: int) -> None:
    """`call`: the call of the former leader before which it stands still for longer than its Lease; the
    last is of the comparison every five seconds.
    """
    pair.epochs["b"] = 0
    pair.marks["b"].step()
    pair.epochs.update(a=1, b=None)
    calls = iter(range(1, 100))

    def lead_elsewhere(request: Request) -> None:
        if request.headers["User-Agent"] == "a" and next(calls) == call:
            pair.b_leads()

    pair.api.before_request(lead_elsewhere, times=100)
    with contextlib.suppress(errors.Conflict):
        pair.marks["a"].step()
    pair.step(6.0)
    assert pair.marked == ["b"]


def test_a_late_write_never_removes_a_label_that_came_after_the_list(pair: MarkedPair) -> None:
    pair.api.edit(paths.pods("system", "b"), metadata={"labels": {names.LEADER: "true"}})
    pair.epochs["a"] = 1

    def lead_elsewhere(request: Request) -> None:
        if request.verb == "patch" and request.path.endswith("/b") and request.headers["User-Agent"] == "a":
            pair.api.edit(paths.pods("system", "b"), metadata={"labels": {names.LEADER: None}})
            pair.b_leads()

    pair.api.before_request(lead_elsewhere, times=100)
    with pytest.raises(errors.Conflict):
        pair.marks["a"].step()
    assert "b" in pair.marked


def test_a_removed_label_is_restored_within_seconds_with_one_call_in_five_seconds(pair: MarkedPair) -> None:
    pair.epochs["a"] = 1
    pair.step(1.0)
    pair.api.edit(paths.pods("system", "a"), metadata={"labels": {names.LEADER: None}})
    pair.step(6.0)
    assert pair.marked == ["a"]
    before = len(pair.api.requests)
    pair.step(60.0)
    assert len(pair.api.requests) - before <= 13


@pytest.mark.parametrize("status", [403, 422, 500])
def test_a_label_that_cannot_be_removed_does_not_keep_those_of_other_pods(scene: Scene, status: int) -> None:
    """A policy of another vendor protects one former leader's pod. The labels were removed in the same order always."""
    protected, *others = (other(scene, f"extender-0{i}", **{names.LEADER: "true"}) for i in range(3))
    scene.api.fault(Fault(status=status), "patch", protected, times=math.inf)
    scene.epoch = 1
    with pytest.raises(errors.KubeError):
        scene.mark.step()
    assert scene.marked
    labels = [scene.api.get(pod)["metadata"]["labels"].get(names.LEADER) for pod in others]
    assert labels == [None, None]


def test_our_own_label_that_cannot_be_written_does_not_keep_those_of_others(scene: Scene) -> None:
    still = other(scene, "extender-0", **{names.LEADER: "true"})
    scene.api.fault(Fault(status=403), "patch", POD, times=math.inf)
    scene.epoch = 1
    with pytest.raises(errors.Forbidden):
        scene.mark.step()
    assert names.LEADER not in scene.api.get(still)["metadata"]["labels"]
