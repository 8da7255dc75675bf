"""Start blocks of containers with a claim: when a start is blocked and allowed, and what the container then finds."""

import os
import random
import shutil

import pytest

from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from deviceplugin.grants.grants import GrantStore
from deviceplugin.grants.mpswait import MpsWait
from tests.deviceplugin.claimedpods import ClaimedPod
from tests.deviceplugin.conftest import Rig, card_uuid
from tests.deviceplugin.fakenode import SeenKubelet, SeenRuntime
from tests.deviceplugin.mps.managednode import World
from tests.theory import theory_of


@pytest.fixture
def rig(idle_rig: Rig) -> Rig:
    idle_rig.claims = True
    return idle_rig.start()


@pytest.fixture
def world(rig: Rig):
    world = World(rig)
    yield world
    world.close()


def set_health(rig: Rig, index: int, reason: str) -> None:
    rig.cards[index] |= {"healthy": not reason, "reason": reason}
    rig.write_cards()
    rig.gpus.wait_change(0)
    rig.agent._start_blocks.update()


def test_an_unhealthy_card_blocks_its_containers_alone(rig):
    here, there = ClaimedPod(rig, "a", {"first": [(0, 900)], "second": [(1, 900)]}), ClaimedPod(rig, "b")
    here.run("first", "second")
    there.run()
    open_spec = rig.spec(here.slot("first"))
    set_health(rig, 0, "Xid 79")
    assert "card 0 (GPU-n1-0) is unhealthy: Xid 79" in here.blocked("first")
    assert "card 0 (GPU-n1-0) is unhealthy: Xid 79" in there.blocked()
    assert here.blocked("second") == ""
    assert rig.agent._start_blocks.blocked == 2
    set_health(rig, 0, "")
    assert rig.spec(here.slot("first")) == open_spec
    assert rig.agent._start_blocks.blocked == 0


def test_a_blocking_spec_names_no_path_that_exists(rig):
    pod = ClaimedPod(rig)
    pod.run()
    set_health(rig, 0, "a/../../../dev/null ../..")
    (node,) = rig.edits(pod.slot())["deviceNodes"]
    assert not os.path.lexists(node["hostPath"])
    assert not os.path.lexists(os.path.normpath(node["hostPath"]))
    assert "major" not in node


def test_a_card_that_leaves_the_node_blocks_the_start(rig):
    pod = ClaimedPod(rig)
    pod.run()
    rig.cards.pop(0)
    rig.write_cards()
    rig.gpus.wait_change(0)
    rig.agent._start_blocks.update()
    assert "is not on this node (any more)" in pod.blocked()


def test_mps_that_dies_blocks_the_start_and_mps_that_answers_allows_it(rig, world):
    pod, without = ClaimedPod(rig, isolation="mps"), ClaimedPod(rig, "b", {"main": [(1, 900)]}, isolation="mps")
    pod.run()
    without.run()
    assert pod.env()[mps.LIMIT_ENV]
    world.cards[0].says(state=MpsState.DOWN)
    rig.agent._start_blocks.update()
    assert "MPS on GPU GPU-n1-0 is Down" in pod.blocked()
    assert without.blocked() == ""
    world.cards[0].says(state=MpsState.READY)
    rig.agent._start_blocks.update()
    assert pod.blocked() == ""
    world.end()
    rig.agent._start_blocks.update()
    assert "no MPS manager runs on this node" in pod.blocked()
    assert "no MPS manager runs on this node" in without.blocked()


def test_a_container_whose_daemon_changes_gets_the_new_one(rig, world):
    pod = ClaimedPod(rig, isolation="mps")
    pod.run()
    (mount,) = rig.edits(pod.slot())["mounts"]
    world.one_for_all()
    rig.agent._start_blocks.update()
    (other,) = rig.edits(pod.slot())["mounts"]
    assert (pod.blocked(), mount["hostPath"] == other["hostPath"]) == ("", False)
    (grant,) = rig.agent.grants.list_grants()
    assert other["hostPath"].startswith(grant.mps[0])


def test_many_containers_get_a_new_daemon_without_comparing_each_with_all_others(rig, world, monkeypatch):
    pods = [ClaimedPod(rig, f"p{i}", {"main": [(0, 100)]}, isolation="mps") for i in range(5)]
    for pod in pods:
        pod.run()
    world.one_for_all()
    monkeypatch.setattr(GrantStore, "_card_conflict", lambda *_: pytest.fail("compares a grant with all others"))
    rig.agent._start_blocks.update()
    assert len({grant.mps for grant in rig.agent.grants.list_grants()}) == 1
    assert [pod.blocked() for pod in pods] == [""] * 5


def test_a_grant_that_is_released_during_the_pass_stays_released(rig, world, monkeypatch):
    pod = ClaimedPod(rig, isolation="mps")
    pod.run()
    world.one_for_all()
    grants, check = rig.agent.grants, MpsWait.check_readiness

    def release_first(*arguments):
        grants.drop_grants_of_pod(pod.pod["metadata"]["uid"], grants.epoch())
        return check(*arguments)

    monkeypatch.setattr(MpsWait, "check_readiness", release_first)
    rig.agent._start_blocks.update()
    assert grants.list_grants() == []
    assert rig.agent._start_blocks.blocked == 0


def test_after_a_reboot_no_container_starts_before_its_card_was_looked_at(rig):
    pod = ClaimedPod(rig)
    pod.run()
    before = rig.spec(pod.slot())
    rig.stop()
    shutil.rmtree(rig.folder / "cdi")
    rig.cards[0] |= {"healthy": False, "reason": "Xid 79"}
    rig.write_cards()
    agent = rig.make(SeenKubelet(rig.kubelet, rig.clock), SeenRuntime(rig.runtime))
    agent._probe_access()
    assert rig.spec(pod.slot()) is None, "restored as those of slots"
    agent._start_blocks.update()
    assert "Xid 79" in pod.blocked()
    set_health(rig, 0, "")
    assert rig.spec(pod.slot()) == before


def test_a_spec_that_somebody_removes_is_written_again(rig):
    pod = ClaimedPod(rig)
    pod.run()
    before = rig.spec(pod.slot())
    shutil.rmtree(rig.folder / "cdi")
    rig.agent._start_blocks.update()
    assert rig.spec(pod.slot()) == before


def test_a_pass_without_a_change_writes_nothing(rig):
    pod = ClaimedPod(rig)
    pod.run()
    rig.agent._start_blocks.update()
    path = rig.folder / "cdi" / f"cardwise.dev-share-{pod.slot()}.json"
    before = path.stat()
    rig.agent._start_blocks.update()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_block_that_cannot_be_written_removes_the_spec(rig, monkeypatch):
    pod = ClaimedPod(rig)
    pod.run()
    rig.agent._start_blocks.update()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("deviceplugin.grants.cdi.write_spec", fail)
        set_health(rig, 0, "Xid 79")
        assert rig.spec(pod.slot()) is None
    rig.agent._start_blocks.update()
    assert "Xid 79" in pod.blocked()


def test_pods_by_slot_are_not_blocked(rig):
    slot = rig.run(rig.bind("a", [(0, 900)]))
    before = rig.spec(slot)
    set_health(rig, 0, "Xid 79")
    assert rig.spec(slot) == before
    assert rig.agent._start_blocks.blocked == 0


def test_the_example_is_as_the_theory_of_operation_says(rig, world):
    theory, share, less = theory_of("deviceplugin.grants.startblocks"), 4096, 2048
    assert f"container A has {share} MiB of card 0, container B {share} MiB of card 1" in theory
    pod = ClaimedPod(rig, shares={"a": [(0, share)], "b": [(1, share)]}, isolation="mps")
    pod.run("a", "b")
    steps = {
        "is Down, not Ready": {"state": MpsState.DOWN},
        f"allows {less} MiB": {"state": MpsState.READY, "ceilings": {card_uuid(0): MiB(less)}},
        "": {"ceilings": {card_uuid(0): MiB(share)}},
    }
    for reason, changes in steps.items():
        world.cards[0].says(**changes)
        rig.agent._start_blocks.update()
        assert (reason in pod.blocked("a"), bool(pod.blocked("a")), pod.blocked("b")) == (True, bool(reason), "")
        assert reason in theory


@pytest.mark.parametrize("seed", range(4))
def test_after_each_pass_every_spec_is_as_the_node_is_whatever_came_before(rig, world, seed):
    dice = random.Random(seed)
    pods = [ClaimedPod(rig, f"p{i}", {"a": [(0, 500)], "b": [(1, 500)]}, isolation="mps") for i in range(3)]
    for pod in pods:
        pod.run("a", "b")
    healthy, ready = [True, True], [True, True]

    def change_health(card: int) -> None:
        healthy[card] = not healthy[card]
        set_health(rig, card, "" if healthy[card] else "Xid 79")

    def change_mps(card: int) -> None:
        ready[card] = not ready[card]
        world.cards[card].says(state=MpsState.READY if ready[card] else MpsState.FAULT)

    def restart(_: int) -> None:
        rig.stop()
        rig.start()

    def wipe(_: int) -> None:
        shutil.rmtree(rig.folder / "cdi")

    def prepare(card: int) -> None:
        if all(healthy) and all(ready):
            pods[card].prepare()

    for _ in range(25):
        dice.choice([change_health, change_mps, restart, wipe, prepare])(dice.randrange(2))
        rig.agent._start_blocks.update()
        for pod in pods:
            for card, container in enumerate("ab"):
                assert bool(pod.blocked(container)) is not (healthy[card] and ready[card])
                if not pod.blocked(container):
                    assert pod.nodes(container) == [f"/dev/nvidia{card}"]
                    assert pod.env(container)[mps.LIMIT_ENV] == "0=500M"
        assert rig.agent._start_blocks.blocked == sum(3 for card in range(2) if not (healthy[card] and ready[card]))
