"""The agent with all its threads on sockets that listen, as in production."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from cardwise.core.api import names
from tests.deviceplugin.conftest import P100, PODS_HERE, card_uuid, refused
from tests.deviceplugin.served import LOOPS, ServedRig


@pytest.fixture
def rig(folder) -> Iterator[ServedRig]:
    rig = ServedRig(folder).start()
    yield rig
    rig.close()


def test_each_change_is_told_and_nobody_has_to_ask(rig):
    rig.until(lambda: rig.agent.problems() == [])
    rig.cards[1] |= {"healthy": False, "reason": "hot"}
    rig.write_cards()
    rig.until(lambda: rig.status(1).get("reason") == "hot")
    rig.edit_node(status={"capacity": {names.GPU_MEM: "0"}})
    rig.until(lambda: rig.capacity(names.GPU_MEM) == str(2 * P100))
    pod = rig.bind("a", [(0, 100)])
    slot = rig.run(pod)
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia0"
    rig.until(lambda: rig.api.get(f"{PODS_HERE}/a")["metadata"]["annotations"][names.ASSIGNED] == "true")
    rig.force_delete(pod)
    rig.until(lambda: [held["name"] for held in rig.status(0)["reported"]] == ["a"])
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.until(lambda: rig.status(0)["reported"] == [])
    assert rig.agent.grants.list_grants() == []
    assert rig.spec(slot) is None


def test_it_ends_with_all_its_threads_and_comes_again(rig):
    slot = rig.run(rig.bind("a", [(1, 8138)]))
    assert {thread.name for thread in threading.enumerate()} >= LOOPS
    rig.stop()
    assert not LOOPS & {thread.name for thread in threading.enumerate()}
    assert rig.node()["status"]["allocatable"][names.SHARE] == "0"
    rig.start()
    rig.kubelet.pre_start(slot)
    assert rig.agent.grants.slot_owner(slot).name == "a"


def test_a_restart_of_the_kubelet_changes_nothing(rig):
    slot = rig.run(rig.bind("a", [(1, 8138)]))
    before = rig.spec(slot)
    rig.kubelet.restart()
    rig.until_registered(2)
    rig.kubelet.pre_start(slot)
    assert rig.spec(slot) == before


def test_equal_pods_started_together_are_never_swapped(rig):
    pods = [rig.bind(f"p{i}", [(i % 2, 500)]) for i in range(24)]
    with ThreadPoolExecutor(24) as threads:
        slots = list(threads.map(rig.run, pods))
    for i, slot in enumerate(slots):
        assert rig.edits(slot)["deviceNodes"][0]["path"] == f"/dev/nvidia{i % 2}"
        assert rig.env(slot)["ALIYUN_COM_GPU_MEM_IDX"] == str(i % 2)


@pytest.mark.parametrize("seed", range(2))
def test_in_any_order_no_card_is_overfull_and_all_is_freed(rig, seed):
    """As in test_freeing.py: several starts at once, the agent's threads and a restart of the kubelet beside them."""
    dice = random.Random(seed)
    running: list[dict] = []
    for step in range(12):
        sizes = [dice.choice([2000, 5000, 9000, P100]) for _ in range(4)]
        pods = [rig.bind(f"p{step}-{i}", [(i % 2, size)]) for i, size in enumerate(sizes)]
        with ThreadPoolExecutor(4) as threads:
            messages = rig.results([threads.submit(refused, partial(rig.run, pod)) for pod in pods])
        for pod, message in zip(pods, messages, strict=True):
            if message:
                assert "still held by" in message
                rig.end(pod)
            else:
                running.append(pod)
        assert max(rig.held_on_disk(0), rig.held_on_disk(1)) <= P100
        assert {pod["metadata"]["uid"] for pod in running} <= {
            grant.pod_uid for grant in rig.agent.grants.list_grants()
        }
        dice.shuffle(running)
        for pod in running[: dice.randrange(1 + len(running))]:
            running.remove(pod)
            rig.force_delete(pod)
            rig.runtime.kill(pod["metadata"]["uid"])
            rig.kubelet.forget(pod["metadata"]["uid"])
        if step == 6:
            rig.kubelet.restart()
            rig.until_registered(2)
    for pod in running:
        rig.end(pod)
    rig.until(lambda: not rig.agent.grants.list_grants())
    rig.until(lambda: [rig.status(index)["reported"] for index in (0, 1)] == [[], []])
    assert not list((rig.folder / "state" / "grants").iterdir())
    assert [rig.card(index)["spec"]["uuid"] for index in (0, 1)] == [card_uuid(0), card_uuid(1)]
