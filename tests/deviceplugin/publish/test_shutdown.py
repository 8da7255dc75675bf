"""An agent that is told to end, as in a rolling update: whoever is on the way to the node still finds it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import names
from deviceplugin.publish import shutdown
from deviceplugin.sources.kubelet import Kubelet
from tests.deviceplugin.conftest import PODS
from tests.fakes.clock import FakeClock


def coming(rig, name: str, **settings) -> dict:
    """A pod that is bound here, and the agent knows of it."""
    pod = rig.bind(name, [(0, 100)], **settings)
    rig.see()
    return pod


@contextmanager
def draining(rig) -> Iterator[Future[None]]:
    """The agent ends, in a thread of its own."""
    with ThreadPoolExecutor() as threads:
        leaves = threads.submit(rig.agent.await_admissions)
        rig.clock.until_waiting()
        assert rig.node()["status"]["allocatable"].get(names.SHARE) == "0", "the slots are withdrawn"
        rig.see()
        yield leaves


def passes(rig, seconds: float) -> None:
    """So long the agent looks after those who are on the way."""
    until = rig.clock.now() + seconds
    while rig.clock.now() < until:
        rig.clock.step()
    rig.clock.until_waiting()


@pytest.fixture
def rig(rig):
    rig.edit_node(status={"allocatable": {names.SHARE: "32"}})
    rig.settle()
    return rig


def test_a_pod_that_was_bound_before_is_admitted(rig):
    pod = coming(rig, "late", containers=("a", "b"))
    with draining(rig) as leaves:
        rig.kubelet.admit(pod, "a")
        passes(rig, 2 * shutdown.MIN_SECONDS)
        assert not leaves.done(), "it waits for the other container"
        rig.kubelet.admit(pod, "b")
        rig.clock.step()
        leaves.result()


def test_a_report_of_the_kubelet_does_not_bring_pods_here(rig):
    pod = coming(rig, "late")
    with draining(rig) as leaves:
        passes(rig, 0.5)
        rig.edit_node(status={"allocatable": {names.SHARE: "32"}})
        rig.see()
        passes(rig, 0.25)
        assert rig.node()["status"]["allocatable"][names.SHARE] == "0", "withdrawn again"
        rig.see()
        rig.kubelet.admit(pod, "main")
        passes(rig, shutdown.MIN_SECONDS - 0.25)
        assert not leaves.done()
        rig.clock.step()
        leaves.result()


class Node:
    """What an agent that leaves sees, by a clock of its own: the kubelet reports slots at these times."""

    def __init__(self, *reports: float, patch: float = 0.0, watched: bool = True) -> None:
        self.clock = FakeClock(now=0.0)
        self.withdrawn: list[float] = []
        self._reports = [0.0, *reports]
        self._patch = patch
        self._watched = watched

    @property
    def now(self) -> float:
        return self.clock.now()

    def drain(self, coming=list) -> None:
        shutdown.wait_drained(self._withdraw, self._offered, coming, self.clock)

    def _withdraw(self) -> None:
        self.withdrawn.append(self.now)
        self._reports = [at for at in self._reports if at > self.now]
        self.clock.advance(self._patch)

    def _offered(self) -> bool:
        return not self._watched or any(at <= self.now for at in self._reports)


def test_when_the_kubelet_offers_slots_again_the_time_for_binds_under_way_begins_anew():
    back = shutdown.MIN_SECONDS - 0.25
    node = Node(back, 2 * shutdown.MIN_SECONDS)
    node.drain()
    assert node.withdrawn[:3] == [0.0, 1.0, back]
    assert node.now == back + shutdown.MIN_SECONDS, "and who brings no slots back before that is not waited for"


def test_a_node_that_nobody_sees_any_more_is_left_as_soon_and_not_later():
    node = Node(watched=False)
    node.drain()
    assert node.now == shutdown.MIN_SECONDS
    node = Node(watched=False)
    node.drain(lambda: ["default/never"])
    assert node.withdrawn == [float(second) for second in range(10)]


def test_an_api_server_that_is_silent_keeps_nobody_beyond_the_grace_period():
    node = Node(patch=2.0, watched=False)
    node.drain(lambda: ["default/never"])
    assert node.now < 15


def test_nobody_is_waited_for_without_end(rig):
    coming(rig, "never")
    with capture_logs() as logs:
        rig.agent.await_admissions()
    assert [line["pods"] for line in logs if "pods" in line] == [["default/never"]]


def test_only_those_who_may_still_ask_for_slots_are_waited_for(rig):
    admitted = rig.bind("admitted", [(0, 100)])
    rig.kubelet.admit(admitted, "main")
    phases = {"runs": "Running", "ended": "Failed", "comes": "Pending"}
    for name, phase in phases.items():
        rig.api.write_object(PODS, rig.bind(name, [(0, 100)]) | {"status": {"phase": phase}})
    known = phases | {"admitted": "Pending"}
    rig.see()
    assert {pod.name: pod.phase for pod in rig.agent.pods.list_pods()} == known
    assert shutdown.list_unadmitted_pods(rig.agent.pods.list_pods(), Kubelet(rig.kubelet.folder)) == ["default/comes"]


def test_without_a_word_of_the_kubelet_nobody_is_waited_for(rig):
    coming(rig, "late")
    (rig.kubelet.plugins / "kubelet_internal_checkpoint").unlink()
    assert shutdown.list_unadmitted_pods(rig.agent.pods.list_pods(), Kubelet(rig.kubelet.folder)) == []
