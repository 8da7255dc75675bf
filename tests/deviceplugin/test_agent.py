"""The whole agent against a kubelet, a runtime and an API server over real sockets: what a container gets, and when."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cardwise.core import names
from cardwise.kube import errors
from deviceplugin import metrics
from deviceplugin import node as own_node
from deviceplugin.access import Access
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from tests.deviceplugin.conftest import (
    NODE,
    NODES,
    P100,
    PODS,
    RESOURCES,
    Rig,
    card_uuid,
    eventually,
    refusal,
    refused,
)

OWNER = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "uid-n1"}


def test_the_cluster_learns_of_the_cards(rig):
    eventually(lambda: rig.status(1).get("health") == "Healthy")
    capacity = rig.api.get(NODES, NODE)["status"]["capacity"]
    assert capacity == {
        "cpu": "8",
        "aliyun.com/gpu-mem": "32552",
        "aliyun.com/gpu-count": "2",
        "aliyun.com/gpu-core.percentage": "200",
        "cardwise.dev/gpu": "2",
    }
    card = rig.card(1)
    assert card["metadata"]["labels"] == {"cardwise.dev/node": NODE}
    assert card["metadata"]["ownerReferences"] == [OWNER]
    assert card["spec"] | {"properties": {}} == {
        "node": NODE,
        "index": 1,
        "uuid": card_uuid(1),
        "model": "Tesla-P100",
        "memoryMiB": P100,
        "properties": {},
    }
    assert rig.status(1) == {"health": "Healthy", "reason": "", "cardAccess": "cdi", "held": []}
    eventually(lambda: rig.agent.problems() == [])


def test_cards_of_an_older_plugin_get_their_node_as_owner(idle_rig):
    """Also one that is not in the machine any more and is kept for what runs on it."""
    rig = idle_rig
    rig.start()
    rig.run(rig.bind("a", [(1, 100)]))
    eventually(lambda: rig.card(0) and rig.card(1))
    rig.stop()
    for index in range(2):
        card = rig.card(index)
        del card["metadata"]["ownerReferences"]
        rig.api.put(RESOURCES, card)
    del rig.cards[1]
    rig.write_cards()
    rig.start()
    eventually(lambda: [rig.card(index)["metadata"].get("ownerReferences") for index in range(2)] == [[OWNER]] * 2)
    eventually(lambda: rig.agent.problems() == [])
    before = len(rig.api.patches)
    time.sleep(1.5)
    assert [path for path, _ in rig.api.patches[before:] if "extendedresources" in path] == [], "it is no difference"


def test_a_node_that_was_deleted_and_registers_again_owns_its_cards(rig):
    eventually(lambda: rig.card(0) and rig.card(1))
    node = rig.node()
    rig.api.delete(NODES, NODE)
    for index in range(2):
        rig.api.delete(RESOURCES, card_uuid(index).lower())  # Kubernetes' garbage collector
    time.sleep(1.5)
    assert rig.card(0) is rig.card(1) is None, "nobody would remove them"
    rig.api.put(NODES, node | {"metadata": {"name": NODE, "uid": "uid-later"}})
    later = [OWNER | {"uid": "uid-later"}]
    eventually(
        lambda: all((rig.card(i) or {"metadata": {}})["metadata"].get("ownerReferences") == later for i in (0, 1))
    )
    rig.edit_node(metadata={"uid": "uid-last"})  # it came before the collector had looked
    last = [OWNER | {"uid": "uid-last"}]
    eventually(lambda: all(rig.card(index)["metadata"]["ownerReferences"] == last for index in range(2)))


def test_two_containers_of_a_force_deleted_pod_hold_a_share_each(rig):
    pod = rig.bind("two", [(0, P100 // 2)], containers=("main", "other"))
    rig.run(pod)
    rig.force_delete(pod)
    held = eventually(lambda: rig.status(0).get("held"))
    assert [(one["container"], one["memoryMiB"]) for one in held] == [("0", P100 // 2), ("1", P100 // 2)]


def test_a_container_gets_the_card_of_its_annotations(rig):
    slot = rig.run(rig.bind("a", [(1, 8138)]))
    assert [device.name for device in rig.kubelet.allocation.container_responses[0].cdi_devices] == [
        f"cardwise.dev/share={slot}"
    ]
    assert rig.spec(slot)["kind"] == "cardwise.dev/share"
    assert rig.spec(slot)["cdiVersion"] == "0.6.0"
    (node,) = rig.edits(slot)["deviceNodes"]
    assert node["path"] == "/dev/nvidia1"
    assert node["hostPath"] == rig.cards[1]["device"]
    assert rig.env(slot) == {
        "ALIYUN_COM_GPU_MEM_IDX": "1",
        "ALIYUN_COM_GPU_MEM_POD": "8138",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "8138",
        "ALIYUN_COM_GPU_MEM_DEV": "16276",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CARDWISE_MEM_LIMIT_MIB": "8138",
        "CARDWISE_MEM_FRACTION": "0.5000",
        "CUPY_GPU_MEMORY_LIMIT": str(8138 * 1024 * 1024),
    }


def test_the_pod_is_marked_as_assigned_afterwards(rig):
    rig.run(rig.bind("a", [(1, 8138)]))
    eventually(lambda: rig.api.get(PODS, "a", "default")["metadata"]["annotations"][names.ASSIGNED] == "true")


def test_several_cards_of_one_container_all_come(rig):
    slot = rig.run(rig.bind("a", [(0, 1000), (1, 1000)]))
    assert [node["path"] for node in rig.edits(slot)["deviceNodes"]] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert rig.env(slot)["ALIYUN_COM_GPU_MEM_IDX"] == "0,1"
    assert rig.env(slot)["ALIYUN_COM_GPU_MEM_POD"] == "2000"
    assert rig.env(slot)["CARDWISE_MEM_LIMIT_MIB"] == "1000"


def test_containers_of_one_pod_share_its_card(rig):
    pod = rig.bind("a", [(0, 1000)], containers=("one", "two"))
    slots = [rig.run(pod, "one"), rig.run(pod, "two")]
    assert [rig.edits(slot)["deviceNodes"][0]["path"] for slot in slots] == ["/dev/nvidia0"] * 2
    assert [rig.env(slot)["ALIYUN_COM_GPU_MEM_POD"] for slot in slots] == ["2000"] * 2
    assert rig.held_on_disk(0) == 2000


def test_equal_pods_started_together_are_never_swapped(rig):
    pods = [rig.bind(f"p{i}", [(i % 2, 500)]) for i in range(24)]
    with ThreadPoolExecutor(24) as threads:
        slots = list(threads.map(rig.run, pods))
    for i, slot in enumerate(slots):
        assert rig.edits(slot)["deviceNodes"][0]["path"] == f"/dev/nvidia{i % 2}"
        assert rig.env(slot)["ALIYUN_COM_GPU_MEM_IDX"] == str(i % 2)
    assert rig.kubelet.lists < 24 + 2, "simultaneous starts share a look at the kubelet"


def test_the_rate_limit_of_pod_resources_is_waited_out(rig):
    rig.kubelet.refuse_lists = 3
    assert rig.spec(rig.run(rig.bind("a", [(0, 1)])))


def test_a_card_that_others_hold_is_refused_by_name(rig):
    rig.run(rig.bind("first", [(0, 10000)]))
    code, why = refusal(lambda: rig.run(rig.bind("second", [(0, 10000)])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "10000 of 16276 MiB are still held by default/first" in why
    assert rig.held_on_disk(0) == 10000


def test_a_pod_is_refused_whole_not_at_its_second_container(rig):
    rig.run(rig.bind("first", [(0, 10000)]))
    pod = rig.bind("second", [(0, 5000)], containers=("one", "two"))
    assert refusal(lambda: rig.run(pod, "one"))[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_a_graceful_end_frees_at_once_and_is_not_published(rig):
    first = rig.bind("first", [(0, P100)])
    slot = rig.run(first)
    rig.end(first)
    rig.run(rig.bind("second", [(0, P100)]))
    assert rig.held_on_disk(0) == P100
    assert not any("held" in (change.get("status") or {}) and change["status"]["held"] for _, change in rig.api.patches)
    assert rig.env(slot)["ALIYUN_COM_GPU_MEM_IDX"] == "0", "the slot went to the second pod"


def changed_at(rig) -> str | None:
    return rig.api.get(NODES, NODE)["metadata"].get("annotations", {}).get(names.NODE_CHANGED)


def test_a_force_deleted_pod_holds_its_card_until_its_containers_end(rig):
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    rig.force_delete(first)
    held = eventually(lambda: rig.status(0).get("held"))
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
    eventually(lambda: rig.status(0).get("held") == [])
    rig.kubelet.forget(first["metadata"]["uid"])
    rig.kubelet.pre_start(next(iter(rig.kubelet.holders)))
    eventually(lambda: changed_at(rig) != before)


def test_a_pod_whose_containers_never_started_is_freed(rig):
    pod = rig.bind("a", [(0, P100)])
    slot = rig.kubelet.admit(pod, "main")
    rig.kubelet.pre_start(slot)
    rig.force_delete(pod)
    rig.kubelet.forget(pod["metadata"]["uid"])
    eventually(lambda: not rig.agent.grants.all())
    eventually(lambda: rig.spec(slot) is None)


def test_a_finished_pod_is_freed(rig):
    pod = rig.bind("job", [(0, P100)])
    rig.run(pod)
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.api.put(PODS, pod | {"status": {"phase": "Succeeded"}})
    eventually(lambda: not rig.agent.grants.all())


def test_nothing_is_freed_while_the_runtime_is_silent(rig):
    pod = rig.bind("a", [(0, P100)])
    rig.run(pod)
    rig.runtime.stop()
    rig.force_delete(pod)
    eventually(lambda: any("ListPodSandbox" in problem for problem in rig.agent.problems()))
    assert rig.agent.grants.all()
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.runtime.start()
    eventually(lambda: not rig.agent.grants.all())


def test_a_restart_of_a_container_needs_no_api_server(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    rig.stop()
    rig.api.stop_answering()
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.start()
    assert rig.spec(slot), "the slot's spec is made anew at the start"
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.kubelet.pre_start(slot)
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"
    code, why = refusal(lambda: rig.run(rig.bind("b", [(0, 100)])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the API server does not answer" in why


def test_the_kubelet_restarts(rig):
    slot = rig.run(rig.bind("a", [(1, 8138)]))
    rig.kubelet.restart()
    rig.kubelet.wait_registered(2)
    first, second = rig.kubelet.registered
    assert first.endpoint != second.endpoint
    rig.kubelet.pre_start(slot)
    assert [path.name for path in rig.kubelet.plugins.glob("cardwise-*.sock")] == [second.endpoint]


def test_a_lost_stream_is_registered_again(rig):
    rig.kubelet.disconnect()
    rig.kubelet.wait_registered(2, timeout=15)


def test_the_agent_leaves_no_socket_and_removes_those_of_a_killed_one(rig):
    stale = rig.kubelet.plugins / "cardwise-share-1-1-1.sock"
    stale.touch()
    rig.stop()
    assert [path.name for path in rig.kubelet.plugins.glob("cardwise-*.sock")] == [stale.name]
    rig.start()
    assert not stale.exists()


def test_a_sick_card_is_told_and_recovers(rig):
    eventually(lambda: rig.status(1).get("health") == "Healthy")
    rig.cards[1] |= {"healthy": False, "reason": "Xid 79: fallen off the bus"}
    rig.write_cards()
    eventually(lambda: rig.status(1).get("health") == "Unhealthy", timeout=2)
    assert rig.status(1)["reason"] == "Xid 79: fallen off the bus"
    assert rig.api.get(NODES, NODE)["status"]["capacity"]["aliyun.com/gpu-mem"] == "32552"
    eventually(lambda: names.NODE_CHANGED in rig.api.get(NODES, NODE)["metadata"].get("annotations", {}))
    pod = rig.bind("a", [(1, 100)])
    assert "is unhealthy: Xid 79" in refusal(lambda: rig.run(pod))[1]
    rig.cards[1]["healthy"] = True
    rig.write_cards()
    eventually(lambda: rig.status(1).get("health") == "Healthy", timeout=2)
    rig.kubelet.pre_start(next(iter(rig.kubelet.holders)))


def test_a_card_that_left_is_forgotten_when_nothing_holds_it(rig):
    pod = rig.bind("a", [(1, 8138)])
    rig.run(pod)
    eventually(lambda: rig.status(1).get("health") == "Healthy")
    del rig.cards[1]
    rig.write_cards()
    eventually(lambda: rig.status(1).get("health") == "Unhealthy")
    assert rig.api.get(NODES, NODE)["status"]["capacity"]["aliyun.com/gpu-mem"] == "32552"
    rig.end(pod)
    eventually(lambda: rig.card(1) is None)
    eventually(lambda: rig.api.get(NODES, NODE)["status"]["capacity"]["aliyun.com/gpu-mem"] == str(P100))


def test_capacities_are_asserted_again(rig):
    eventually(lambda: "aliyun.com/gpu-mem" in rig.api.get(NODES, NODE)["status"]["capacity"])
    node = rig.api.get(NODES, NODE)
    rig.api.put(NODES, node | {"status": {"capacity": {"aliyun.com/gpu-mem": "0"}}})
    eventually(lambda: rig.api.get(NODES, NODE)["status"]["capacity"]["aliyun.com/gpu-mem"] == "32552")


def test_a_running_container_without_a_grant_is_adopted(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    uid = pod["metadata"]["uid"]
    rig.stop()
    (rig.folder / "state" / "grants" / uid / "main.json").write_text("{")
    rig.start()
    assert any(uid in problem for problem in rig.agent.grants.unreadable)
    eventually(lambda: rig.held_on_disk(1) == 8138)
    assert rig.agent.grants.owner(slot).pod_uid == uid


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda pod: pod["metadata"]["annotations"].clear(), "was not placed by the Cardwise extender"),
        (
            lambda pod: pod["metadata"]["annotations"].update({names.ASSIGNMENT: '{"v":1,"containers":'}),
            "is unreadable",
        ),
        (
            lambda pod: pod["metadata"]["annotations"].update(
                {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[7,"GPU-none",1,0,1]]}}'}
            ),
            "card 7 (GPU-none) is not on this node",
        ),
        (
            lambda pod: pod["metadata"]["annotations"].update(
                {names.ASSIGNMENT: '{"v":1,"containers":{"5":[[0,"GPU-n1-0",1,0,1]]}}'}
            ),
            "no card for container 'main'",
        ),
    ],
    ids=["unplaced", "unreadable", "foreign card", "other container"],
)
def test_a_bad_assignment_is_refused_with_a_reason(rig, break_it, says):
    pod = rig.bind("a", [(0, 100)])
    break_it(pod)
    pod = rig.api.put(PODS, pod)
    eventually(lambda: rig.agent.pods.known(pod["metadata"]["uid"]) is not None)
    eventually(
        lambda: (
            dict(rig.agent.pods.known(pod["metadata"]["uid"]).annotations).items()
            <= pod["metadata"]["annotations"].items()
        )
    )
    code, why = refusal(lambda: rig.run(pod))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert says in why
    assert not rig.agent.grants.all()


def test_one_slot_at_two_pods_is_refused(rig):
    slot = rig.run(rig.bind("a", [(0, 100)]))
    code, why = refusal(lambda: rig.run(rig.bind("b", [(1, 100)]), slot=slot))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "default/a (container main) and default/b (container main)" in why
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia0"


def test_a_pod_replaced_under_its_name_does_not_get_the_new_ones_card(rig):
    old = rig.bind("a", [(0, 100)])
    slot = rig.kubelet.admit(old, "main")
    rig.force_delete(old)
    rig.bind("a", [(1, 100)])
    assert "does not exist any more" in refusal(lambda: rig.kubelet.pre_start(slot))[1]


def test_without_cdi_the_answer_is_empty_and_it_is_told(folder):
    rig = Rig(folder, cdi=False, version="1.7.20")
    try:
        rig.start()
        slot = rig.run(rig.bind("a", [(1, 8138)]))
        assert not rig.kubelet.allocation.container_responses[0].ListFields()
        assert rig.spec(slot) is None
        assert rig.held_on_disk(1) == 8138
        eventually(lambda: rig.status(1).get("cardAccess") == "env")
    finally:
        rig.close()


def test_open_access_asks_for_no_device(folder):
    rig = Rig(folder, access=Access.ENV)
    try:
        rig.cards[1]["device"] = str(folder / "later")
        rig.write_cards()
        rig.start()
        slot = rig.run(rig.bind("a", [(1, 8138)]))
        assert not rig.kubelet.allocation.container_responses[0].ListFields()
        assert rig.spec(slot) is None
        eventually(lambda: rig.status(1).get("health") == "Healthy")
        assert rig.status(1)["cardAccess"] == "env"
    finally:
        rig.close()


def test_one_card_without_a_device_opens_nothing_and_recovers(idle_rig):
    rig = idle_rig
    device, rig.cards[1]["device"] = rig.cards[1]["device"], str(rig.folder / "later")
    rig.write_cards()
    rig.start()
    eventually(lambda: rig.status(1).get("health") == "Unhealthy")
    assert "later: No such file" in rig.status(1)["reason"]
    eventually(lambda: rig.status(0).get("health") == "Healthy")
    assert rig.status(0)["cardAccess"] == rig.status(1)["cardAccess"] == "cdi"
    assert rig.spec(rig.run(rig.bind("a", [(0, 100)])))
    assert not any("later" in problem for problem in rig.agent.problems())
    pod = rig.bind("b", [(1, 100)])
    assert "later: No such file" in refusal(lambda: rig.run(pod))[1]
    assert rig.kubelet.allocation.container_responses[0].cdi_devices
    (rig.folder / "later").symlink_to(device)
    eventually(lambda: rig.status(1).get("health") == "Healthy", timeout=3)
    rig.kubelet.pre_start(max(rig.kubelet.holders))


def test_without_any_device_it_is_not_ready_and_nothing_is_open(idle_rig):
    rig = idle_rig
    devices = [card["device"] for card in rig.cards]
    for index, card in enumerate(rig.cards):
        card["device"] = str(rig.folder / f"later{index}")
    rig.write_cards()
    rig.start()
    eventually(lambda: [rig.status(index).get("health") for index in (0, 1)] == ["Unhealthy"] * 2)
    assert rig.status(0)["cardAccess"] == "cdi"
    assert any("later0: No such file" in problem for problem in rig.agent.problems())
    for index, device in enumerate(devices):
        (rig.folder / f"later{index}").symlink_to(device)
    eventually(lambda: rig.agent.problems() == [])


def test_a_failed_wake_up_is_tried_again(rig):
    eventually(lambda: rig.agent.problems() == [])
    patch, failed = rig.client.patch, []

    def once(path, change, *rest, **options):
        if names.NODE_CHANGED in (change.get("metadata") or {}).get("annotations", {}) and not failed:
            failed.append(path)
            raise errors.ServerError(500, "InternalError", "etcd leader changed")
        return patch(path, change, *rest, **options)

    rig.client.patch = once
    rig.cards[1]["healthy"] = False
    rig.write_cards()
    eventually(lambda: names.NODE_CHANGED in rig.api.get(NODES, NODE)["metadata"].get("annotations", {}))
    assert failed


def test_an_unforeseen_error_does_not_end_the_watch_of_the_cards(rig):
    eventually(lambda: rig.status(1).get("health") == "Healthy")
    gpus = rig.agent._gpus
    failed = threading.Event()

    def fails(_):
        del gpus.wait_change
        failed.set()
        raise TypeError("not what the binding says")

    before = metrics.FAILURES.labels("cards")._value.get()
    gpus.wait_change = fails
    assert failed.wait(5)
    eventually(lambda: metrics.FAILURES.labels("cards")._value.get() == before + 1)
    assert rig.agent._inventory._threads[1].is_alive()


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_no_card_is_overfull_and_all_is_freed(rig, seed):
    """Starts, graceful and forced ends, late deaths, restarts of the agent and the kubelet."""
    dice = random.Random(seed)
    rig.conflict_seconds = rig.agent._prestart._conflict_seconds = 0.0
    running: dict[str, dict] = {}
    lingering: list[str] = []
    for step in range(60):
        what = dice.choices(["start", "end", "force", "die", "restart", "kubelet"], [12, 5, 4, 4, 1, 1])[0]
        if what == "start":
            pod = rig.bind(f"p{step}", [(dice.randrange(2), dice.choice([2000, 5000, 9000, P100]))])
            if why := refused(lambda pod=pod: rig.run(pod)):
                assert "still held by" in why
                rig.end(pod)
            else:
                running[pod["metadata"]["uid"]] = pod
        elif what in {"end", "force"} and running:
            uid = dice.choice(sorted(running))
            pod = running.pop(uid)
            if what == "end":
                rig.end(pod)
            else:
                rig.force_delete(pod)
                lingering.append(uid)
        elif what == "die" and lingering:
            uid = lingering.pop()
            rig.runtime.kill(uid)
            rig.kubelet.forget(uid)
        elif what == "restart":
            rig.stop()
            rig.start()
        elif what == "kubelet":
            before = len(rig.kubelet.registered)
            rig.kubelet.restart()
            rig.kubelet.wait_registered(before + 1)
        assert max(rig.held_on_disk(0), rig.held_on_disk(1)) <= P100
        assert {*running, *lingering} <= {grant.pod_uid for grant in rig.agent.grants.all()}
    for uid, pod in running.items():
        rig.force_delete(pod)
        rig.runtime.kill(uid)
        rig.kubelet.forget(uid)
    for uid in lingering:
        rig.runtime.kill(uid)
        rig.kubelet.forget(uid)
    eventually(lambda: not rig.agent.grants.all())
    eventually(lambda: not list((rig.folder / "cdi").iterdir()))
    eventually(lambda: rig.status(0).get("held") == rig.status(1).get("held") == [])
    assert not list((rig.folder / "state" / "grants").iterdir())


@pytest.mark.parametrize("verb", ["Allocate", "PreStartContainer"])
@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x7f", b"\x0a\x06\x0a\x04none"], ids=["bytes", "cut", "slot"])
def test_a_malformed_request_gets_a_clean_status(rig, verb, body, caplog):
    call = rig.kubelet.channel.unary_unary(f"/v1beta1.DevicePlugin/{verb}")
    code, why = refusal(lambda: call(body, timeout=5))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert why
    assert "Traceback" not in caplog.text


def test_an_empty_prestart_is_refused(rig):
    call = lambda: rig.kubelet.plugin.PreStartContainer(wire.PreStartContainerRequest(), timeout=5)  # noqa: E731
    assert refusal(call)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_capacities_that_the_api_server_spells_otherwise_are_not_written_again(rig):
    eventually(lambda: rig.agent.problems() == [])
    capacity = rig.api.get(NODES, NODE)["status"]["capacity"]
    assert capacity["aliyun.com/gpu-core.percentage"] == "200"
    told = b'{"metadata":{"name":"n"},"status":{"capacity":{"aliyun.com/gpu-mem":"40k","aliyun.com/gpu-count":"2"}}}'
    _, facts = own_node._project(told)
    assert facts.capacity == {"aliyun.com/gpu-mem": "40000", "aliyun.com/gpu-count": "2"}


def test_a_node_whose_plugin_ends_offers_no_slots(rig):
    eventually(lambda: rig.agent.problems() == [])
    rig.agent.stop()
    assert rig.api.get(NODES, NODE)["status"]["allocatable"]["cardwise.dev/share"] == "0"
