"""An agent that is told to end, as in a rolling update: whoever is on the way to the node still finds it."""

import threading

import pytest
from structlog.testing import capture_logs

from cardwise.core import names
from deviceplugin import leaving
from deviceplugin.kubelet import Kubelet
from tests.deviceplugin.conftest import PODS, eventually


def left(rig) -> threading.Thread:
    """The agent ends, in a thread of its own."""
    thread = threading.Thread(target=rig.agent.leave)
    thread.start()
    eventually(lambda: rig.node()["status"]["allocatable"].get(names.SHARE) == "0", what="the slots are withdrawn")
    return thread


def coming(rig, name: str, **settings) -> dict:
    """A pod that is bound here, and the agent knows of it."""
    pod = rig.bind(name, [(0, 100)], **settings)
    eventually(lambda: rig.agent.pods.known(pod["metadata"]["uid"]))
    return pod


@pytest.fixture
def rig(rig):
    rig.edit_node(status={"allocatable": {names.SHARE: "32"}})
    return rig


def test_a_pod_that_was_bound_before_is_admitted(rig):
    pod = coming(rig, "late", containers=("a", "b"))
    thread = left(rig)
    rig.kubelet.admit(pod, "a")
    thread.join(2 * leaving.LEAST)
    assert thread.is_alive(), "it waits for the other container"
    rig.kubelet.admit(pod, "b")
    thread.join(10)
    assert not thread.is_alive()


def test_a_report_of_the_kubelet_does_not_bring_pods_here(rig):
    pod = coming(rig, "late")
    thread = left(rig)
    rig.edit_node(status={"allocatable": {names.SHARE: "32"}})
    eventually(lambda: rig.node()["status"]["allocatable"][names.SHARE] == "0", what="withdrawn again")
    rig.kubelet.admit(pod, "main")
    thread.join(10)
    assert not thread.is_alive()


class Node:
    """What an agent that leaves sees, by a clock of its own: the kubelet reports slots at these times."""

    def __init__(self, *reports: float, patch: float = 0.0, watched: bool = True) -> None:
        self.now = 0.0
        self.withdrawn: list[float] = []
        self._reports = [0.0, *reports]
        self._patch = patch
        self._watched = watched

    def leave(self, coming=list) -> None:
        leaving.leave(self._withdraw, self._offered, coming, clock=lambda: self.now, sleep=self._sleep)

    def _withdraw(self) -> None:
        self.withdrawn.append(self.now)
        self._reports = [at for at in self._reports if at > self.now]
        self._sleep(self._patch)

    def _offered(self) -> bool:
        return not self._watched or any(at <= self.now for at in self._reports)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_when_the_kubelet_offers_slots_again_the_time_for_binds_under_way_begins_anew():
    back = leaving.LEAST - 0.25
    node = Node(back, leaving.LEAST + 1.0)
    node.leave()
    assert node.withdrawn[:2] == [0.0, back]
    assert node.now == back + leaving.LEAST, "and who brings no slots back before that is not waited for"


def test_a_node_that_nobody_sees_any_more_is_left_as_soon_and_not_later():
    node = Node(watched=False)
    node.leave()
    assert node.now == leaving.LEAST
    node = Node(watched=False)
    node.leave(lambda: ["default/never"])
    assert node.withdrawn == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_an_api_server_that_is_silent_keeps_nobody_beyond_the_grace_period():
    node = Node(patch=2.0, watched=False)
    node.leave(lambda: ["default/never"])
    assert node.now < 10


def test_nobody_is_waited_for_without_end(rig):
    coming(rig, "never")
    with capture_logs() as said:
        rig.agent.leave()
    assert [line["pods"] for line in said if "pods" in line] == [["default/never"]]


def test_only_those_who_may_still_ask_for_slots_are_waited_for(rig):
    admitted = rig.bind("admitted", [(0, 100)])
    rig.kubelet.admit(admitted, "main")
    phases = {"runs": "Running", "ended": "Failed", "comes": "Pending"}
    for name, phase in phases.items():
        rig.api.put(PODS, rig.bind(name, [(0, 100)]) | {"status": {"phase": phase}})
    known = phases | {"admitted": "Pending"}
    eventually(lambda: {pod.name: pod.phase for pod in rig.agent.pods.all()} == known)
    assert leaving.not_admitted(rig.agent.pods.all(), Kubelet(rig.kubelet.folder)) == ["default/comes"]


def test_without_a_word_of_the_kubelet_nobody_is_waited_for(rig):
    coming(rig, "late")
    (rig.kubelet.plugins / "kubelet_internal_checkpoint").unlink()
    assert leaving.not_admitted(rig.agent.pods.all(), Kubelet(rig.kubelet.folder)) == []
