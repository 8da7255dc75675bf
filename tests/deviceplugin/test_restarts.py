"""Restarts of the agent, and of containers while the API server is away."""

import copy
import os
import queue
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cardwise.core.api import names
from deviceplugin import __main__ as command
from deviceplugin.api import cri_v1_pb2 as cri
from deviceplugin.grants.access import Access
from deviceplugin.publish import metrics
from deviceplugin.sources.containers import RuntimeUnavailable
from tests.deviceplugin.conftest import P100, PODS, PODS_HERE, refusal, refused, told_of
from tests.deviceplugin.fakenode import PATIENCE

BEYOND_UTF8 = r'{"v":1,"containers":{"0":[[0,"GPU-\ud800",5,0,10]]}}'
BEYOND_INTEGERS = f'{{"v":1,"containers":{{"0":[[{2**70},"GPU-n1-0",5,0,10]]}}}}'


def test_a_restart_of_a_container_needs_no_api_server(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    rig.stop()
    rig.api.down = True
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.start()
    assert rig.spec(slot), "the slot's spec is made anew at the start"
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.kubelet.pre_start(slot)
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"
    code, message = refusal(lambda: rig.run(rig.bind("b", [(0, 100)])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the API server does not answer" in message


def test_without_the_api_server_the_kubelets_two_records_must_name_the_pod_of_the_grant(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    rig.stop()
    rig.api.down = True
    rig.start()
    uid = pod["metadata"]["uid"]
    rig.kubelet.holders[slot] = [("default", "b", uid, "main")]
    rig.kubelet.write_checkpoint()
    code, message = refusal(lambda: rig.kubelet.pre_start(slot))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the assignment of pod default/b is not known here" in message


def test_a_container_that_restarts_in_another_slot_without_the_api_server_has_its_card_there(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    rig.stop()
    rig.api.down = True
    rig.start()
    other = next(device for device in rig.kubelet.devices if device != slot)
    rig.kubelet.holders = {other: rig.kubelet.holders[slot]}
    rig.kubelet.write_checkpoint()
    rig.kubelet.pre_start(other)
    assert rig.edits(other)["deviceNodes"][0]["path"] == "/dev/nvidia1"
    assert rig.agent.grants.slot_owner(other).pod_uid == pod["metadata"]["uid"]


def test_a_running_container_without_a_grant_is_adopted(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    uid = pod["metadata"]["uid"]
    rig.stop()
    (rig.folder / "state" / "grants" / uid / "main.json").write_text("{")
    rig.start()
    assert any(uid in problem for problem in rig.agent.grants.unreadable)
    assert rig.held_on_disk(1) == 8138
    assert rig.agent.grants.slot_owner(slot).pod_uid == uid


@pytest.mark.parametrize(
    "damage",
    [
        lambda bad: bad["metadata"]["annotations"].update({names.ASSIGNMENT: BEYOND_UTF8}),
        lambda bad: bad["metadata"]["annotations"].update({names.ASSIGNMENT: BEYOND_INTEGERS}),
        lambda bad: bad["metadata"].update({"annotations": {names.GPUSHARE_ALLOCATION: '{"0":{"0":1e999}}'}}),
        lambda bad: bad["metadata"].update({"uid": "../b"}),
        lambda bad: bad["metadata"].update({"uid": "b" * 252}),
    ],
    ids=["half of a surrogate pair", "a huge index", "infinite MiB", "a UID that is a path", "a UID of 252 characters"],
)
def test_a_container_that_cannot_be_adopted_holds_up_no_other(rig, damage):
    """All starts of the node were refused until it ended. (A runtime keeps what a manifest on the node says.)"""
    good = rig.bind("good", [(1, 8138)])
    rig.run(good)
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    bad = copy.deepcopy(good)
    bad["metadata"] |= {"uid": "bad", "name": "bad"}
    damage(bad)
    rig.runtime.run(bad, "main")
    rig.start()
    rig.run(rig.bind("new", [(1, 8138)]))
    assert {grant.name for grant in rig.agent.grants.list_grants()} == {"good", "new"}
    assert metrics.UNKNOWN_HOLDERS._value.get() == 1
    assert rig.problems() == []


def test_a_container_whose_pod_was_bound_here_again_with_another_card_is_adopted_with_both(rig):
    """Its sandbox shows the card that it was started with, unless it was restarted since the pod was bound again."""
    pod = rig.bind("a", [(0, P100)])
    slot = rig.run(pod)
    rig.bind_again(pod, [(1, P100)])
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    rig.start()
    for index in (0, 1):
        message = refused(lambda index=index: rig.run(rig.bind(f"b{index}", [(index, P100)])))
        assert "are still held by default/a" in message
    assert [share["name"] for share in rig.status(0)["reported"]] == ["a"]
    rig.runtime.running.clear()
    rig.kubelet.pre_start(slot)
    assert (rig.held_on_disk(0), rig.held_on_disk(1)) == (0, P100)


def test_a_container_whose_pod_was_bound_here_again_with_less_of_its_card_is_adopted_with_all_it_had(rig):
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    rig.bind_again(pod, [(0, P100 // 4)])
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    rig.start()
    assert rig.held_on_disk(0) == P100
    assert sum(share["memoryMiB"] for share in rig.status(0)["reported"]) == P100
    assert "are still held by default/a" in refused(lambda: rig.run(rig.bind("b", [(0, P100 // 2)])))


@pytest.mark.parametrize("order", [1, -1], ids=["former sandbox first", "former sandbox last"])
def test_a_former_sandbox_hides_no_card_of_the_present_one(rig, monkeypatch, order):
    former = rig.bind("a", [(0, P100)])
    pod = rig.bind_again(former, [(1, P100)])
    rig.run(pod)
    rig.force_delete(pod)
    rig.kubelet.forget(pod["metadata"]["uid"])
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    list_sandboxes = rig.runtime.ListPodSandbox

    def list_both(request, context):
        (present,) = list_sandboxes(request, context).items
        ended = copy.deepcopy(present)
        ended.id, ended.state = "former", cri.SANDBOX_NOTREADY
        ended.annotations.update(former["metadata"]["annotations"])
        return cri.ListPodSandboxResponse(items=[ended, present][::order])

    with monkeypatch.context() as patch:
        patch.setattr(rig.runtime, "ListPodSandbox", list_both)
        rig.start()
    assert [share.index for grant in rig.agent.grants.list_grants() for share in grant.pod_shares] == [1]
    assert "are still held by default/a" in refusal(lambda: rig.run(rig.bind("b", [(1, P100)])))[1]


def test_a_pod_that_is_bound_here_again_starts_with_another_card_only_after_adoption(rig, monkeypatch):
    """A pod with a grant starts without, since it takes no other card; this one does."""
    moved, running = rig.bind("moved", [(0, P100)]), rig.bind("running", [(1, P100)])
    slot = rig.run(moved)
    rig.run(running)
    rig.stop()
    shutil.rmtree(rig.folder / "state" / "grants" / running["metadata"]["uid"])
    rig.runtime.kill(moved["metadata"]["uid"])
    rig.force_delete(running)
    rig.bind_again(moved, [(1, P100)])
    with monkeypatch.context() as without_threads:
        without_threads.setattr(rig, "settle", lambda: None)
        rig.start()
    rig.see()
    assert "are still held by default/running" in refusal(lambda: rig.kubelet.pre_start(slot))[1]


def test_a_pod_whose_name_no_object_can_have_is_freed_and_holds_up_no_report(rig):
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    rig.force_delete(pod)
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    odd = copy.deepcopy(pod)
    odd["metadata"] |= {"uid": "odd", "namespace": "no/name", "annotations": pod["metadata"]["annotations"]}
    rig.runtime.run(odd, "main")
    rig.start()
    assert sorted(held["podUID"] for held in rig.status(0)["reported"]) == sorted([pod["metadata"]["uid"], "odd"])
    rig.runtime.kill("odd")
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.settle()
    assert rig.agent.grants.list_grants() == []


def test_a_grant_that_cannot_be_written_again_costs_no_other_its_file(rig):
    uids = [rig.bind(name, [(1, 1000)])["metadata"]["uid"] for name in "abc"]
    for name in "abc":
        rig.run(rig.api.get(f"{PODS_HERE}/{name}"))
    folders = [rig.folder / "state" / "grants" / uid for uid in uids]
    for folder in folders:
        shutil.rmtree(folder)
    folders[0].write_text("")
    rig.pass_second()
    assert all((folder / "main.json").exists() for folder in folders[1:])
    assert any("grants cannot be written" in problem for problem in rig.problems())


def _restarted_without_state(rig, monkeypatch) -> tuple[dict, dict]:
    """The state folder was lost, and a start comes before the first pass over the grants. Returns the force-deleted pod
    whose container still runs with the whole card, and the pod to which the card was given since.
    """
    first = rig.bind("a", [(0, P100)])
    rig.run(first)
    rig.force_delete(first)
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    second = rig.bind("b", [(0, P100)])
    with monkeypatch.context() as without_threads:
        without_threads.setattr(rig, "settle", lambda: None)
        rig.start()
    return first, second


def test_a_start_before_the_first_pass_does_not_take_the_card_of_a_running_container(rig, monkeypatch):
    """It was granted, and the card given twice, since the running container was adopted only after that."""
    first, second = _restarted_without_state(rig, monkeypatch)
    assert "are still held by default/a" in refusal(lambda: rig.run(second))[1]
    rig.settle()
    assert rig.held_on_disk(0) == P100
    rig.runtime.kill(first["metadata"]["uid"])
    rig.settle()
    rig.run(second)


def test_while_the_runtime_does_not_answer_no_pod_starts_that_has_no_grant_yet(rig, monkeypatch):
    kept = rig.bind("kept", [(1, 1000)], containers=["main", "other"])
    rig.run(kept)
    rig.stop()
    rig.runtime.silent = True
    rig.access = Access.CDI
    with monkeypatch.context() as without_threads:
        without_threads.setattr(rig, "settle", lambda: None)
        rig.start()
    rig.run(kept, "other")
    _, problem = refusal(lambda: rig.run(rig.bind("new", [(1, 1000)])))
    assert "default/new: the device plugin has just started, and does not know yet" in problem
    rig.runtime.silent = False
    rig.run(rig.bind("later", [(1, 1000)]))


class Hang:
    """The runtime lists no sandbox for `seconds`, then the call fails."""

    def __init__(self, rig, seconds: float) -> None:
        self.calls = 0
        self._rig, self._seconds = rig, seconds
        rig.agent._containers.sandboxes = self

    def __call__(self):
        self.calls += 1
        self._rig.clock.sleep(self._seconds)
        raise RuntimeUnavailable("ListPodSandbox at cri.sock: DEADLINE_EXCEEDED")


@pytest.fixture
def slots(rig, monkeypatch) -> list[str]:
    """Of eight containers that are to start right after the plugin has."""
    rig.stop()
    rig.access = Access.CDI
    with monkeypatch.context() as without_threads:
        without_threads.setattr(rig, "settle", lambda: None)
        rig.start()
    slots = [rig.kubelet.admit(rig.bind(f"p{number}", [(1, 100)]), "main") for number in range(8)]
    rig.see()
    return slots


def test_starts_share_one_attempt_to_compare_while_the_runtime_hangs(rig, slots):
    """Each made an attempt after all others: the eighth had waited 40 s, and the kubelet waits 30."""
    hang = Hang(rig, 5.0)
    with ThreadPoolExecutor(len(slots)) as threads:
        starts = [threads.submit(refused, lambda slot=slot: rig.kubelet.pre_start(slot)) for slot in slots]
        rig.clock.until_waiting(len(slots))
        rig.clock.advance(5.0)
        problems = [start.result(PATIENCE) for start in starts]
    assert hang.calls == 1
    assert all("ListPodSandbox at cri.sock: DEADLINE_EXCEEDED" in problem for problem in problems)


def test_a_start_does_not_wait_for_an_attempt_longer_than_the_kubelet_for_the_start(rig, slots):
    Hang(rig, 100.0)
    problems: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(len(slots)) as threads:
        for slot in slots:
            threads.submit(lambda slot=slot: problems.put(refused(lambda: rig.kubelet.pre_start(slot))))
        rig.clock.until_waiting(len(slots))
        rig.clock.advance(29.0)
        for _ in slots[1:]:
            assert "or the disk, has not answered in time" in problems.get(timeout=PATIENCE)
        rig.clock.advance(71.0)
    assert "DEADLINE_EXCEEDED" in problems.get(timeout=PATIENCE)


def test_running_containers_are_compared_with_the_grants_once_the_runtime_answers(rig):
    pod = rig.bind("a", [(1, 8138)])
    rig.run(pod)
    rig.stop()
    (rig.folder / "state" / "grants" / pod["metadata"]["uid"] / "main.json").unlink()
    rig.runtime.silent = True
    rig.access = Access.CDI  # nobody is asked for it
    rig.start()
    assert not rig.agent.grants.list_grants()
    rig.runtime.silent = False
    rig.settle()
    assert rig.held_on_disk(1) == 8138


@pytest.mark.parametrize("end", ["forgotten", "deleted", "finished"])
def test_what_an_ended_pod_still_holds_is_found_again_when_the_state_was_lost(rig, end):
    pod = rig.bind("a", [(1, P100)])
    rig.run(pod)
    if end == "finished":
        rig.api.write_object(PODS, pod | {"status": {"phase": "Failed"}})
    else:
        rig.force_delete(pod)
    if end == "forgotten":
        rig.kubelet.forget(pod["metadata"]["uid"])
    rig.settle()
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    before = len(told_of(rig, 1))
    rig.start()
    assert all(held == ["a"] for held in told_of(rig, 1)[before:]), "nor is it ever told that the card is free"
    assert [(held["name"], held["memoryMiB"]) for held in rig.status(1)["reported"]] == [("a", P100)]
    assert "still held by default/a" in refusal(lambda: rig.run(rig.bind("b", [(1, 1)])))[1]
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.settle()
    assert rig.status(1)["reported"] == []
    rig.run(rig.bind("c", [(1, P100)]))


def test_a_container_does_not_start_by_a_grant_that_its_sandbox_told(rig):
    """That tells what the pod holds, not what the container gets: it started without a card."""
    pod = rig.bind("a", [(1, P100)])
    slot = rig.run(pod)
    rig.force_delete(pod)
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    rig.start()
    rig.api.down = True
    assert "the API server does not answer" in refusal(lambda: rig.kubelet.pre_start(slot))[1]
    assert (rig.spec(slot), rig.held_on_disk(1)) == (None, P100)


def test_of_an_ended_pod_of_which_only_the_sandbox_is_left_nothing_is_held_when_the_state_was_lost(rig):
    pod = rig.bind("a", [(1, P100)])
    rig.run(pod)
    rig.force_delete(pod)
    rig.runtime.running.clear()
    rig.stop()
    shutil.rmtree(rig.folder / "state")
    rig.start()
    assert rig.agent.grants.list_grants() == []
    other = rig.bind("b", [(1, P100)])
    rig.run(other)
    rig.end(other)
    rig.settle()
    assert rig.held_on_disk(1) == 0, "it keeps no other from being freed"


def test_a_folder_that_was_removed_is_told_from_one_that_is_there_and_one_that_never_was(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    descriptor = os.open(there, os.O_RDONLY)  # as a mount does, it keeps what was there
    try:
        mounted = Path(f"/proc/self/fd/{descriptor}")
        assert not command._is_removed(mounted)
        there.rmdir()
        assert command._is_removed(mounted)
        there.mkdir()
        assert command._is_removed(mounted), "it is another one"
        assert not command._is_removed(there)
        assert not command._is_removed(tmp_path / "never")
    finally:
        os.close(descriptor)
