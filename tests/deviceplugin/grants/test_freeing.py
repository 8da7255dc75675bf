"""How long cards are held: until the containers end, however pods do, and whatever restarts in between."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.api.assignment import CardShare
from deviceplugin.grants.access import Access
from deviceplugin.grants.cdi import find_stale_specs
from deviceplugin.grants.grants import AddedGrant, GrantStore
from deviceplugin.grants.release import reported_shares
from tests.deviceplugin.conftest import P100, PODS, PODS_HERE, RESOURCES, card_uuid, refusal, refused, told_of
from tests.deviceplugin.records import grant
from tests.fakes.apiserver import Fault


def test_two_containers_of_a_force_deleted_pod_hold_a_share_each(rig):
    pod = rig.bind("two", [(0, P100 // 2)], containers=("main", "other"))
    rig.run(pod)
    rig.force_delete(pod)
    rig.settle()
    held = rig.status(0).get("reported")
    assert [(share["container"], share["memoryMiB"]) for share in held] == [("0", P100 // 2), ("1", P100 // 2)]


def test_a_pod_whose_grants_differ_holds_the_cards_of_each():
    early = grant("u1", CardShare(0, "GPU-0", 100, 0, P100), granted_ns=1)
    late = grant("u1", CardShare(1, "GPU-1", 100, 0, P100), container="side", granted_ns=2)
    assert reported_shares([late, early]).keys() == reported_shares([early, late]).keys() == {"GPU-0", "GPU-1"}


def test_of_a_pod_whose_grants_differ_a_card_counts_with_the_larger_amount(tmp_path):
    """One was made by the pod's sandbox and its present assignment, after the state folder was lost."""
    before, now = CardShare(0, "GPU-0", 100, 0, P100), CardShare(0, "GPU-0", 300, 0, P100)
    other = CardShare(1, "GPU-1", 50, 0, P100)
    early = grant("u1", before, other, granted_ns=1)
    late = grant("u1", now, container="side", granted_ns=2)
    for grants in ([late, early], [early, late]):
        mib = {uuid: sum(share.mem for share in of) for uuid, of in reported_shares(grants).items()}
        assert mib == {"GPU-0": 300, "GPU-1": 50}
    store = GrantStore(tmp_path / "grants")
    for entry in (early, late):
        store.adopt_grant(entry)
    assert store.granted_mib_by_uuid() == {"GPU-0": 300, "GPU-1": 50}
    fits = grant("u2", CardShare(0, "GPU-0", P100 - 300, 0, P100))
    assert isinstance(store.add(fits, {"GPU-0": P100, "GPU-1": P100}), AddedGrant)


def test_a_graceful_end_frees_at_once_and_is_not_published(rig):
    first = rig.bind("first", [(0, P100)])
    slot = rig.run(first)
    rig.end(first)
    rig.run(rig.bind("second", [(0, P100)]))
    assert rig.held_on_disk(0) == P100
    assert not any((share.body.get("status") or {}).get("reported") for share in rig.api.sent("patch"))
    assert rig.env(slot)["ALIYUN_COM_GPU_MEM_IDX"] == "0", "the slot went to the second pod"


def changed_at(rig) -> str | None:
    return rig.node()["metadata"].get("annotations", {}).get(names.REQUEUE)


def test_a_force_deleted_pod_holds_its_card_until_its_containers_end(rig):
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    rig.force_delete(first)
    rig.settle()
    held = rig.status(0).get("reported")
    assert held == [
        {
            "podUID": first["metadata"]["uid"],
            "namespace": "default",
            "name": "first",
            "memoryMiB": P100,
            "corePercent": 0,
            "container": "0",
        }
    ]
    second = rig.bind("second", [(0, P100)])
    assert "first" in refusal(lambda: rig.run(second))[1]
    before = changed_at(rig)
    rig.runtime.kill(first["metadata"]["uid"])
    rig.settle()
    assert rig.status(0).get("reported") == []
    rig.kubelet.forget(first["metadata"]["uid"])
    rig.kubelet.pre_start(next(iter(rig.kubelet.holders)))
    rig.settle()
    assert changed_at(rig) != before


def test_a_pod_of_the_former_name_of_the_node_holds_its_card_until_its_containers_end(rig):
    """The machine has come back under another name, with the containers that it had."""
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    rig.api.edit(f"{PODS_HERE}/first", spec={"nodeName": "former"})
    rig.settle()
    assert [share["name"] for share in rig.status(0)["reported"]] == ["first"]
    second = rig.bind("second", [(0, P100)])
    assert "first" in refusal(lambda: rig.run(second))[1]
    rig.runtime.kill(first["metadata"]["uid"])
    rig.settle()
    assert rig.status(0)["reported"] == []
    rig.kubelet.pre_start(next(iter(rig.kubelet.holders)))
    assert rig.held_on_disk(0) == P100
    assert rig.api.get(f"{PODS_HERE}/first"), "its object is still there"


@pytest.fixture
def restored(rig) -> Callable[[dict], None]:
    """etcd is restored from a backup that has the pod as it was before it was bound. The kubelet ends its containers
    later, as those of a deleted pod.
    """

    def restore(pod: dict) -> None:
        without = dict.fromkeys(pod["metadata"]["annotations"])
        changes = {"metadata": {"annotations": without}, "spec": {"nodeName": None}, "status": {"phase": "Pending"}}
        rig.api.edit(f"{PODS_HERE}/{pod['metadata']['name']}", **changes)

    return restore


def test_a_pod_that_waits_again_holds_its_card_until_its_containers_end(rig, restored):
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    restored(first)
    rig.settle()
    assert [share["name"] for share in rig.status(0)["reported"]] == ["first"]
    second = rig.bind("second", [(0, P100)])
    assert "first" in refusal(lambda: rig.run(second))[1]
    rig.runtime.kill(first["metadata"]["uid"])
    rig.kubelet.pre_start(next(slot for slot, holders in rig.kubelet.holders.items() if holders[0][1] == "second"))
    rig.settle()
    assert rig.status(0)["reported"] == []
    assert [grant.pod_uid for grant in rig.agent.grants.list_grants()] == [second["metadata"]["uid"]]


@pytest.mark.parametrize("back", ["waits again", "deleted"])
def test_a_pod_that_is_bound_here_again_keeps_its_new_grant_while_the_watch_lags(rig, restored, back):
    """The end that an earlier pass has seen is over."""
    pod = rig.bind("a", [(0, P100)])
    slot = rig.run(pod)
    if back == "deleted":
        rig.force_delete(pod)
    else:
        restored(pod)
    rig.settle()
    assert [share["name"] for share in rig.status(0)["reported"]] == ["a"]
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.api.write_object(PODS, pod)  # bound here; the watch does not show it yet
    rig.kubelet.pre_start(slot)
    rig.agent._release.run_once()
    assert rig.held_on_disk(0) == P100
    rig.runtime.run(pod, "main")
    rig.settle()
    assert rig.held_on_disk(0) == P100
    assert rig.status(0)["reported"] == [], "its pod counts, and no report"


HALF = P100 // 2


def slot_of(rig, container: str) -> str:
    return next(slot for slot, holders in rig.kubelet.holders.items() if holders[0][3] == container)


@pytest.mark.parametrize("seen", ["waits again", "bound again"])
def test_a_pod_that_is_bound_here_again_with_another_card_holds_its_former_card_while_a_container_runs(
    rig, restored, seen
):
    """The kubelet has not seen the restore, so it ends nothing and restarts what exits."""
    pod = rig.bind("a", [(0, HALF)], containers=("main", "side"))
    rig.run(pod)
    rig.run(pod, "side")
    if seen == "waits again":
        restored(pod)
        rig.settle()
    rig.bind_again(pod, [(1, HALF)])
    rig.settle()
    rig.runtime.running[pod["metadata"]["uid"]].remove("side")
    _, problem = refusal(lambda: rig.kubelet.pre_start(slot_of(rig, "side")))
    assert "default/a was bound to this node again with other GPUs" in problem
    assert f"(main, side) may still use {card_uuid(0)}; this container starts when those have ended" in problem
    rig.settle()
    assert [share["container"] for share in rig.status(0)["reported"]] == ["0", "1"]
    assert rig.status(1)["reported"] == []
    second = rig.bind("second", [(0, P100)])
    assert "are still held by default/a" in refusal(lambda: rig.run(second))[1]
    rig.runtime.running[pod["metadata"]["uid"]].remove("main")
    rig.kubelet.pre_start(slot_of(rig, "side"))
    assert rig.edits(slot_of(rig, "side"))["deviceNodes"][0]["path"] == "/dev/nvidia1"
    rig.settle()
    assert (rig.held_on_disk(0), rig.held_on_disk(1)) == (0, 2 * HALF)
    assert rig.status(0)["reported"] == []
    rig.run(rig.bind("third", [(0, P100)]))


def test_a_pod_that_is_bound_here_again_with_other_amounts_of_its_cards_holds_the_larger_while_a_container_runs(
    rig, restored
):
    """Its containers have changed places: their cards are the same."""
    quarter, half = P100 // 4, P100 // 2
    pod = rig.bind_each("a", {"main": [(0, quarter)], "side": [(1, half)]})
    rig.run(pod)
    rig.run(pod, "side")
    restored(pod)
    rig.settle()
    rig.bind_again_each(pod, {"main": [(0, half)], "side": [(1, quarter)]})
    rig.settle()
    assert rig.status(0)["reported"] == [], "its assignment has more of it"
    assert [share["memoryMiB"] for share in rig.status(1)["reported"]] == [half]
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.settle()
    assert rig.status(1)["reported"] == []
    assert not rig.agent.grants.list_grants()


def test_a_pod_that_is_bound_here_again_with_another_card_is_held_until_its_former_containers_end(rig, restored):
    """The kubelet has seen the restore: the former containers have their grace period. It may never start the pod."""
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    restored(pod)
    rig.settle()
    before = len(told_of(rig, 0))
    rig.bind_again(pod, [(1, P100)])
    for _ in range(5):
        rig.pass_second()
    assert [share["name"] for share in rig.status(0)["reported"]] == ["a"]
    assert [] not in told_of(rig, 0)[before:], "it was held all the while"
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.settle()
    assert rig.status(0)["reported"] == []
    assert not rig.agent.grants.list_grants()
    rig.run(rig.bind("second", [(0, P100)]))


def test_a_pod_that_is_bound_here_again_with_another_card_gets_that_card_while_the_watch_lags(rig):
    pod = rig.bind("a", [(0, P100)])
    slot = rig.run(pod)
    rig.runtime.kill(pod["metadata"]["uid"])
    again = rig.bind_again(pod, [(1, P100)])  # the watch does not show it yet
    rig.kubelet.pre_start(slot)
    for _ in range(3):
        rig.agent._release.run_once()
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"
    assert (rig.held_on_disk(0), rig.held_on_disk(1)) == (0, P100)
    rig.runtime.run(again, "main")
    rig.settle()
    assert (rig.held_on_disk(1), rig.status(0)["reported"], rig.status(1)["reported"]) == (P100, [], [])


@pytest.mark.parametrize("by", ["grants", "sandbox"])
def test_containers_without_a_share_do_not_hold_a_former_binding(rig, by):
    """As those that an injector adds. A grant by the sandbox is in the name of any container."""
    pod = rig.bind_each("a", {"main": [(0, P100)], "proxy": []})
    slot = rig.run(pod)
    rig.runtime.run(pod, "proxy")
    if by == "sandbox":
        rig.force_delete(pod)
        rig.stop()
        shutil.rmtree(rig.folder / "state")
        rig.start()
        assert [grant.container for grant in rig.agent.grants.list_grants()] == ["proxy"]
    rig.bind_again_each(pod, {"main": [(1, P100)], "proxy": []})
    rig.settle()
    assert "was bound to this node again with other GPUs" in refusal(lambda: rig.kubelet.pre_start(slot))[1]
    rig.runtime.running[pod["metadata"]["uid"]].remove("main")
    rig.kubelet.pre_start(slot)
    assert (rig.held_on_disk(0), rig.held_on_disk(1)) == (0, P100)


def test_a_former_binding_is_not_released_while_the_runtime_or_the_api_server_does_not_answer(rig):
    pod = rig.bind("a", [(0, P100)])
    slot = rig.run(pod)
    rig.bind_again(pod, [(1, P100)])
    rig.settle()
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.runtime.silent = True
    assert "with other GPUs" in refusal(lambda: rig.kubelet.pre_start(slot))[1]
    rig.runtime.silent = False
    rig.api.down = True
    rig.kubelet.pre_start(slot)
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia0", "a restart gets what it was started with"
    for _ in range(3):
        rig.agent._release.run_once()
    assert rig.held_on_disk(0) == P100


@pytest.mark.parametrize("alive", ["container", "sandbox"])
def test_a_restart_never_says_that_a_share_in_use_is_free(rig, alive):
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    rig.force_delete(pod)
    if alive == "sandbox":
        rig.runtime.running.clear()
    rig.settle()
    rig.stop()
    rig.start()
    assert told_of(rig, 0) == [[], ["a"]]
    rig.stop()
    rig.api.remove(f"{RESOURCES}/{card_uuid(0).lower()}")
    rig.start()
    assert told_of(rig, 0) == [[], ["a"], ["a"]], "nor does its object when it is made anew"
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.settle()
    assert told_of(rig, 0)[3:] == [[]]


def test_what_is_held_stays_told_until_the_runtime_and_the_api_server_have_been_asked(rig):
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    rig.force_delete(pod)
    rig.settle()
    rig.stop()
    rig.access = Access.CDI  # the runtime is not asked for it
    rig.runtime.silent = True
    rig.start()
    rig.cards[0] |= {"healthy": False, "reason": "hot"}
    rig.write_cards()
    rig.settle()
    assert (rig.status(0)["reason"], told_of(rig, 0)) == ("hot", [[], ["a"], ["a"]])
    assert rig.problems()
    rig.runtime.silent = False
    rig.api.fault(Fault(status=500), "get", f"{PODS_HERE}/a", times=3)
    rig.runtime.kill(pod["metadata"]["uid"])
    for _ in range(3):
        rig.pass_second()
        assert [held["name"] for held in rig.status(0)["reported"]] == ["a"]
    rig.settle()
    assert rig.status(0)["reported"] == []
    assert rig.problems() == []


def test_a_pod_whose_containers_never_started_is_freed(rig):
    pod = rig.bind("a", [(0, P100)])
    slot = rig.kubelet.admit(pod, "main")
    rig.kubelet.pre_start(slot)
    rig.force_delete(pod)
    rig.kubelet.forget(pod["metadata"]["uid"])
    rig.settle()
    assert not rig.agent.grants.list_grants()
    assert rig.spec(slot) is None


def test_a_pod_that_starts_again_with_another_slot_leaves_no_spec_of_its_first(rig):
    """The kubelet has lost its checkpoint, or an API server that was restored has bound the pod here again."""
    pod = rig.bind("a", [(0, P100)])
    first = rig.run(pod)
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.kubelet.forget(pod["metadata"]["uid"])
    second = rig.run(pod, slot="s009")
    rig.pass_second()
    assert (rig.spec(first), rig.env(second)["ALIYUN_COM_GPU_MEM_IDX"]) == (None, "0")
    rig.end(pod)
    rig.settle()
    assert not rig.agent.grants.list_grants()
    assert not list((rig.folder / "cdi").iterdir())


def test_a_spec_that_could_not_be_removed_is_removed_by_the_next_pass(rig, monkeypatch):
    pod = rig.bind("a", [(0, P100)])
    slot = rig.run(pod)
    rig.end(pod)
    with monkeypatch.context() as patch:
        path = rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json"
        unlink = Path.unlink

        def refuse(self, **options):
            if self == path:
                raise OSError(30, "Read-only file system")
            unlink(self, **options)

        patch.setattr(Path, "unlink", refuse)
        rig.settle()
    assert not rig.agent.grants.list_grants()
    assert rig.spec(slot) is not None
    rig.pass_second()
    assert rig.spec(slot) is None


def test_a_spec_that_cannot_be_removed_stops_neither_the_start_nor_the_removal_of_others(idle_rig):
    specs = idle_rig.folder / "cdi"
    for slot in ("s001", "s003"):
        (specs / f"cardwise.dev-share-{slot}.json").mkdir(parents=True)  # unlink removes no folder
    (specs / "cardwise.dev-share-s002.json").write_text("{}")
    idle_rig.start()
    assert sorted(path.name for path in specs.iterdir()) == [
        f"cardwise.dev-share-{slot}.json" for slot in ("s001", "s003")
    ]
    assert idle_rig.run(idle_rig.bind("a", [(0, P100)]), slot="s004")
    assert idle_rig.spec("s004")


def test_a_finished_pod_is_freed(rig):
    pod = rig.bind("job", [(0, P100)])
    rig.run(pod)
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.api.write_object(PODS, pod | {"status": {"phase": "Succeeded"}})
    rig.settle()
    assert not rig.agent.grants.list_grants()


def test_nothing_is_freed_while_the_runtime_is_silent(rig):
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    rig.runtime.silent = True
    rig.force_delete(pod)
    rig.settle()
    assert any("ListPodSandbox" in problem for problem in rig.agent.problems())
    assert rig.agent.grants.list_grants()
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.runtime.silent = False
    rig.settle()
    assert not rig.agent.grants.list_grants()


def granted_slots(rig) -> set[str]:
    return {slot for grant in rig.agent.grants.list_grants() for slot in grant.slots}


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_no_card_is_overfull_and_all_is_freed(rig, restored, seed):
    """Starts, graceful and forced ends, late deaths, restarts of the agent, and restores of etcd, after which pods wait
    again and some are bound here again; test_served.py has it with threads.
    """
    dice = random.Random(seed)
    running: dict[str, dict] = {}
    lingering: list[str] = []
    waiting: dict[str, dict] = {}
    for step in range(60):
        actions = {"start": 12, "end": 5, "force": 4, "die": 6, "restart": 1, "time": 4, "restore": 4, "return": 4}
        action = dice.choices(list(actions), list(actions.values()))[0]
        if action == "start":
            pod = rig.bind(f"p{step}", [(dice.randrange(2), dice.choice([2000, 5000, 9000, P100]))])
            if message := refused(lambda pod=pod: rig.run(pod)):
                assert "still held by" in message
                rig.end(pod)
            else:
                running[pod["metadata"]["uid"]] = pod
        elif action in {"end", "force"} and running:
            uid = dice.choice(list(running))
            pod = running.pop(uid)
            if action == "end":
                rig.end(pod)
            else:
                rig.force_delete(pod)
                lingering.append(uid)
        elif action == "die" and lingering:
            uid = lingering.pop()
            rig.runtime.kill(uid)
            rig.kubelet.forget(uid)
        elif action == "restore" and running:
            uid = dice.choice(list(running))
            waiting[uid] = running.pop(uid)
            lingering.append(uid)
            restored(waiting[uid])
        elif action == "return" and waiting.keys() - lingering:
            uid = dice.choice([uid for uid in waiting if uid not in lingering])
            pod = waiting.pop(uid)
            rig.api.write_object(PODS, pod)
            if message := refused(lambda pod=pod: rig.run(pod)):
                assert "still held by" in message
                rig.end(pod)
            else:
                running[uid] = pod
        elif action == "restart":
            rig.stop()
            rig.start()
        elif action == "time":
            rig.pass_second()
            assert not find_stale_specs(rig.folder / "cdi", granted_slots(rig))
        assert max(rig.held_on_disk(0), rig.held_on_disk(1)) <= P100
        assert {*running, *lingering} <= {grant.pod_uid for grant in rig.agent.grants.list_grants()}
    for uid, pod in running.items():
        rig.force_delete(pod)
        rig.runtime.kill(uid)
        rig.kubelet.forget(uid)
    assert all(rig.api.get(f"{PODS_HERE}/{pod['metadata']['name']}") for pod in waiting.values())
    for uid in lingering:
        rig.runtime.kill(uid)
        rig.kubelet.forget(uid)
    rig.settle()
    assert not rig.agent.grants.list_grants()
    assert not list((rig.folder / "cdi").iterdir())
    assert rig.status(0).get("reported") == rig.status(1).get("reported") == []
    assert not list((rig.folder / "state" / "grants").iterdir())
