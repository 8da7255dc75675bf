"""What the cluster is told of a node's cards, and what becomes of what others say of them."""

import json
import math

import pytest
from prometheus_client import REGISTRY

from cardwise.core.api import isolation, names
from deviceplugin.grants.mpswait import HasManager
from deviceplugin.publish import node as own_node
from tests.deviceplugin.conftest import (
    NODE,
    NODES,
    P100,
    RESOURCES,
    card_uuid,
    refusal,
)
from tests.fakes.apiserver import Fault

OWNER = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "uid-n1"}


def test_the_cluster_learns_of_the_cards(rig):
    assert rig.status(1).get("health") == "Healthy"
    capacity = rig.node()["status"]["capacity"]
    assert capacity == {
        "cpu": "8",
        "aliyun.com/gpu-mem": "32552",
        "aliyun.com/gpu-count": "2",
        "aliyun.com/gpu-core.percentage": "200",
        "cardwise.dev/gpu": "2",
        "cardwise.dev/nvidia.tesla-p100": "256",
    }
    card = rig.card(1)
    assert card["metadata"]["labels"] == {"cardwise.dev/node": NODE}
    assert card["metadata"]["ownerReferences"] == [OWNER]
    assert card["spec"] | {"properties": {}} == {
        "kind": "nvidia-gpu",
        "node": NODE,
        "index": 1,
        "uuid": card_uuid(1),
        "model": "Tesla-P100",
        "memoryMiB": P100,
        "headroomMiB": 128,
        "properties": {},
    }
    advisory = {
        "memory": "advisory",
        "memoryReason": isolation.NO_MANAGER,
        "compute": "none",
        "computeReason": isolation.NO_MANAGER,
    }
    status = {"health": "Healthy", "reason": "", "gpuAccess": "cdi", "reported": [], "isolation": advisory}
    assert rig.status(1) == status
    rig.settle()
    assert rig.problems() == []


def test_the_isolation_of_a_card_follows_its_mps(rig):
    rig.start()
    card = rig.card(1)
    for state, memory, compute in (("Ready", "mps", "mps"), ("Off", "advisory", "none")):
        card["status"]["mps"] = {"mode": "card", "state": state, "reason": ""}
        rig.api.write_object(RESOURCES, rig.card(1) | {"status": rig.status(1) | {"mps": card["status"]["mps"]}})
        rig.settle()
        assert (rig.status(1)["isolation"]["memory"], rig.status(1)["isolation"]["compute"]) == (memory, compute)


def test_a_node_that_is_to_have_no_manager_forgets_what_one_has_said(idle_rig):
    idle_rig.mps = HasManager.NEVER
    idle_rig.start()
    assert idle_rig.status(1).get("health") == "Healthy"
    card = idle_rig.card(1)
    card["status"]["mps"] = {"mode": "card", "state": "Down", "reason": "the manager was uninstalled"}
    idle_rig.api.write_object(RESOURCES, card)
    idle_rig.settle()
    assert "mps" not in idle_rig.status(1)
    assert idle_rig.status(1)["health"] == "Healthy"


def test_a_manager_that_is_only_away_is_not_forgotten(rig):
    mps_status = {"mode": "card", "state": "Down", "reason": "it stops"}
    card = rig.card(1)
    card["status"]["mps"] = mps_status
    rig.api.write_object(RESOURCES, card)
    rig.cards[0] |= {"healthy": False, "reason": "x"}
    rig.write_cards()
    rig.settle()
    assert rig.status(0)["health"] == "Unhealthy"
    assert rig.status(1)["mps"] == mps_status


def test_cards_of_an_older_plugin_get_their_node_as_owner(idle_rig):
    """Also one that is not in the machine any more and is kept for what runs on it."""
    rig = idle_rig
    rig.start()
    rig.run(rig.bind("a", [(1, 100)]))
    rig.settle()
    assert rig.card(0)
    assert rig.card(1)
    rig.stop()
    for index in range(2):
        card = rig.card(index)
        del card["metadata"]["ownerReferences"]
        rig.api.write_object(RESOURCES, card)
    del rig.cards[1]
    rig.write_cards()
    rig.start()
    assert [rig.card(index)["metadata"].get("ownerReferences") for index in range(2)] == [[OWNER]] * 2
    before = len(rig.writes())
    rig.settle()
    assert [request.path for request in rig.writes()[before:] if RESOURCES in request.path] == [], "it is no difference"


def test_a_node_that_was_deleted_and_registers_again_owns_its_cards(rig):
    node = rig.node()
    rig.api.remove(f"{NODES}/{NODE}")
    for index in range(2):
        rig.api.remove(f"{RESOURCES}/{card_uuid(index).lower()}")  # Kubernetes' garbage collector
    rig.settle()
    assert rig.card(0) is rig.card(1) is None, "nobody would remove them"
    rig.api.write_object(NODES, node | {"metadata": {"name": NODE, "uid": "uid-later"}})
    later = [OWNER | {"uid": "uid-later"}]
    rig.settle()
    assert all((rig.card(i) or {"metadata": {}})["metadata"].get("ownerReferences") == later for i in (0, 1))
    rig.edit_node(metadata={"uid": "uid-last"})  # it came before the collector had looked
    last = [OWNER | {"uid": "uid-last"}]
    rig.settle()
    assert all(rig.card(index)["metadata"]["ownerReferences"] == last for index in range(2))


def test_a_card_whose_name_another_node_has_taken_is_told_by_an_event_with_the_remedy(idle_rig):
    name = card_uuid(0).lower()
    spec = {"uuid": card_uuid(0), "node": "n9"}
    idle_rig.api.write_object(RESOURCES, {"metadata": {"name": name, "labels": {names.NODE_LABEL: "n9"}}, "spec": spec})
    idle_rig.api.fault(Fault(status=403), "patch", f"{RESOURCES}/{name}", times=math.inf)
    idle_rig.start()
    idle_rig.settle()
    (event_text,) = set(idle_rig.events("GPUOnAnotherNode"))
    assert event_text.startswith(
        f"ExtendedResource {name} belongs to a GPU of node n9, so this node cannot publish its own"
    )
    assert f"kubectl delete extendedresource {name}" in event_text
    assert idle_rig.status(1)["health"] == "Healthy", "the other card is told"


def put_card_of_another_node(rig, uuid: str, **spec: object) -> None:
    """An object of node n9 that carries this node's label, as n9 can write it where no policy forbids it."""
    metadata = {"name": uuid.lower(), "labels": {names.NODE_LABEL: NODE}}
    rig.api.write_object(RESOURCES, {"metadata": metadata, "spec": {"uuid": uuid, "node": "n9", "index": 0, **spec}})


def test_objects_of_another_node_with_this_nodes_label_are_ignored(idle_rig):
    put_card_of_another_node(idle_rig, "GPU-n9-0")
    idle_rig.start()
    assert idle_rig.problems() == []
    assert idle_rig.api.sent("delete") == []
    assert [idle_rig.status(index).get("health") for index in range(2)] == ["Healthy"] * 2


def test_a_refused_deletion_does_not_end_the_round(rig):
    rig.api.fault(Fault(status=403), "delete", f"{RESOURCES}/{card_uuid(1).lower()}", times=math.inf)
    rig.cards.pop()
    rig.write_cards()
    for _ in range(10):
        rig.pass_second()
    assert rig.node()["metadata"]["labels"][names.ACCELERATOR], "written last in each round"
    before = rig.node()["metadata"]["annotations"][names.REQUEUE]
    pod = rig.bind("a", [(0, 100)])
    rig.run(pod)
    rig.force_delete(pod)
    for _ in range(3):
        rig.pass_second()
    assert rig.node()["metadata"]["annotations"][names.REQUEUE] != before, "waiting pods are woken"
    assert len(rig.api.sent("delete")) < 10, "it is not tried each second"


@pytest.mark.parametrize("cordoned", [True, False])
def test_no_cordon_of_another_nodes_object_is_believed(rig, cordoned):
    """The card's object does not exist for a moment, and n9 creates one with its name."""
    own = {"unschedulable": True, "cordon": {"reason": "ECC errors"}}
    path = f"{RESOURCES}/{card_uuid(0).lower()}"
    if not cordoned:
        rig.api.edit(path, spec=own)
        rig.settle()
    rig.api.write_object(
        NODES, {"metadata": {"name": "n9"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    )
    rig.api.remove(path)
    put_card_of_another_node(rig, card_uuid(0), **(own if cordoned else {}))
    rig.settle()
    assert rig.events("GPUOnAnotherNode")
    rig.api.remove(path)  # by an admin, as the event says
    rig.settle()
    spec = rig.card(0)["spec"]
    assert (spec["node"], spec.get("unschedulable", False)) == (NODE, not cordoned)
    assert spec.get("cordon", {}).get("reason") == (None if cordoned else "ECC errors")


@pytest.mark.parametrize("ready", ["True", "Unknown"])
def test_no_live_node_loses_its_card_to_another_that_reports_the_same_uuid(idle_rig, ready):
    """No policy forbids it here: two clones of a machine would take the object from each other for ever."""
    name = card_uuid(0).lower()
    spec = {"uuid": card_uuid(0), "node": "n9"}
    conditions = [{"type": "Ready", "status": ready}]
    idle_rig.api.write_object(
        NODES, {"metadata": {"name": "n9", "uid": "uid-n9"}, "status": {"conditions": conditions}}
    )
    idle_rig.api.write_object(RESOURCES, {"metadata": {"name": name, "labels": {names.NODE_LABEL: "n9"}}, "spec": spec})
    idle_rig.start()
    for _ in range(5):
        idle_rig.pass_second()
    live = ready == "True"
    assert idle_rig.card(0)["spec"]["node"] == ("n9" if live else NODE)
    assert len(idle_rig.api.sent("patch", f"{RESOURCES}/{name}")) == (0 if live else 1)
    assert bool(idle_rig.events("GPUOnAnotherNode")) == live
    assert idle_rig.status(1)["health"] == "Healthy", "the other card is told"


def test_a_sick_card_is_told_and_recovers(rig):
    rig.cards[1] |= {"healthy": False, "reason": "Xid 79: fallen off the bus"}
    rig.write_cards()
    rig.settle()
    assert rig.status(1).get("health") == "Unhealthy"
    assert rig.status(1)["reason"] == "Xid 79: fallen off the bus"
    assert rig.node()["status"]["capacity"]["aliyun.com/gpu-mem"] == "32552"
    assert names.REQUEUE in rig.node()["metadata"].get("annotations", {})
    pod = rig.bind("a", [(1, 100)])
    assert "is unhealthy: Xid 79" in refusal(lambda: rig.run(pod))[1]
    rig.cards[1]["healthy"] = True
    rig.write_cards()
    rig.settle()
    assert rig.status(1).get("health") == "Healthy"
    rig.kubelet.pre_start(next(iter(rig.kubelet.holders)))


def test_a_card_that_left_is_forgotten_when_nothing_holds_it(rig):
    pod = rig.bind("a", [(1, 8138)])
    rig.run(pod)
    rig.settle()
    assert rig.status(1).get("health") == "Healthy"
    del rig.cards[1]
    rig.write_cards()
    rig.settle()
    assert rig.status(1).get("health") == "Unhealthy"
    assert rig.node()["status"]["capacity"]["aliyun.com/gpu-mem"] == "32552"
    rig.end(pod)
    rig.settle()
    assert rig.card(1) is None
    assert rig.node()["status"]["capacity"]["aliyun.com/gpu-mem"] == str(P100)


def test_capacities_are_asserted_again(rig):
    node = rig.node()
    rig.api.write_object(NODES, node | {"status": {"capacity": {"aliyun.com/gpu-mem": "0"}}})
    rig.settle()
    assert rig.node()["status"]["capacity"]["aliyun.com/gpu-mem"] == "32552"


def test_a_failed_wake_up_is_tried_again(rig):
    failing = rig.api.fault(Fault(status=500), "patch", f"{NODES}/{NODE}")
    rig.cards[1]["healthy"] = False
    rig.write_cards()
    rig.settle()
    assert failing.remaining == 0
    assert names.REQUEUE in rig.node()["metadata"].get("annotations", {})


def test_an_unforeseen_error_does_not_end_the_watch_of_the_cards(rig):
    answers = iter([TypeError("not what the binding says"), True, False])

    def wait_change(_):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def failures():
        return REGISTRY.get_sample_value("cardwise_thread_failures_total", {"thread": "cards"}) or 0.0

    before = failures()
    rig.gpus.wait_change = wait_change
    watch, woken = rig.agent._inventory._watches[0], rig.agent._inventory._loop._wake
    assert watch.run_once() > 0
    assert failures() == before + 1
    assert not woken.is_set()
    assert watch.run_once() is None
    assert woken.is_set(), "a change is looked at at once"
    woken.clear()
    assert watch.run_once() is None
    assert not woken.is_set(), "no change wakes nobody"


def test_capacities_that_the_api_server_spells_otherwise_are_not_written_again(rig):
    capacity = rig.node()["status"]["capacity"]
    assert capacity["aliyun.com/gpu-core.percentage"] == "200"
    event_text = (
        b'{"metadata":{"name":"n"},"status":{"capacity":{"aliyun.com/gpu-mem":"40k","aliyun.com/gpu-count":"2"}}}'
    )
    _, facts = own_node._project(event_text)
    assert facts.capacity == {"aliyun.com/gpu-mem": "40000", "aliyun.com/gpu-count": "2"}


def test_a_node_whose_plugin_ends_offers_no_slots(rig):
    rig.agent.stop()
    assert rig.node()["status"]["allocatable"]["cardwise.dev/share"] == "0"


def cordon(rig, index, **cordon):
    """As `cardwise cordon` leaves the object."""
    card = rig.card(index)
    card["spec"] |= {"unschedulable": True, "cordon": cordon}
    rig.api.write_object(RESOURCES, card)


def test_a_cordoned_card_stays_cordoned_whatever_becomes_of_its_object(rig):
    """Also over a restart of the device plugin, which is when a node is made anew."""
    cordon_fields = {"reason": "it smokes", "user": "jane", "time": "2026-11-21T10:00:00Z"}
    cordon(rig, 1, **cordon_fields)
    # A write of ours to its spec keeps it.
    rig.api.write_object(RESOURCES, rig.card(1) | {"metadata": rig.card(1)["metadata"] | {"ownerReferences": []}})
    rig.settle()
    assert rig.card(1)["metadata"]["ownerReferences"] == [OWNER]
    assert (rig.card(1)["spec"]["unschedulable"], rig.card(1)["spec"]["cordon"]) == (True, cordon_fields)
    remembered = rig.folder / "state" / "cordons.json"
    assert card_uuid(1) in remembered.read_text()
    rig.stop()
    rig.api.remove(f"{RESOURCES}/{card_uuid(1).lower()}")
    rig.start()
    assert (rig.card(1)["spec"]["unschedulable"], rig.card(1)["spec"]["cordon"]) == (True, cordon_fields)
    assert "unschedulable" not in rig.card(0)["spec"]
    assert rig.capacity(names.GPU_MEM) == str(2 * 16276), "the sum of the node does not change"


@pytest.mark.parametrize("newer", [{"version": 9}, ["jane"], {"reason": ["it smokes"]}], ids=str)
def test_a_cordon_that_another_version_has_written_stays(rig, newer):
    """After a downgrade: what it says is not known, that the card is out of use is."""
    cordon(rig, 1, reason="it smokes")
    rig.settle()
    rig.stop()
    remembered = rig.folder / "state" / "cordons.json"
    remembered.write_text(json.dumps({card_uuid(1): newer}))
    rig.api.remove(f"{RESOURCES}/{card_uuid(1).lower()}")
    rig.start()
    assert rig.card(1)["spec"]["unschedulable"] is True
    assert "unschedulable" not in rig.card(0)["spec"]


def test_cordons_that_cannot_be_read_at_all_are_kept_aside(rig):
    rig.stop()
    remembered = rig.folder / "state" / "cordons.json"
    remembered.write_text('[{"version": 9}]')
    rig.start()
    cordon(rig, 1, reason="it smokes")
    rig.settle()
    assert card_uuid(1) in remembered.read_text()
    assert [path.read_text() for path in remembered.parent.glob("cordons.json.unreadable*")] == ['[{"version": 9}]']


def test_a_card_that_was_given_back_is_not_cordoned_anew(rig):
    cordon(rig, 1)
    remembered = rig.folder / "state" / "cordons.json"
    rig.settle()
    assert card_uuid(1) in remembered.read_text()
    card = rig.card(1)
    del card["spec"]["unschedulable"], card["spec"]["cordon"]
    rig.api.write_object(RESOURCES, card)
    rig.settle()
    assert card_uuid(1) not in remembered.read_text()
    rig.api.remove(f"{RESOURCES}/{card_uuid(1).lower()}")
    rig.settle()
    assert rig.card(1)
    assert "unschedulable" not in rig.card(1)["spec"]


def test_what_the_extender_says_of_a_card_is_left_alone(rig):
    theirs = {"allocated": {"memoryMiB": 100, "pods": 1}, "freeMiB": 16176, "classes": ["p100"]}
    with rig.api.changed:
        card = rig.card(0)
        rig.api.write_object(RESOURCES, card | {"status": card["status"] | theirs})
    rig.settle()
    assert rig.problems() == []
    before = len(rig.writes())
    rig.settle()
    assert [request.path for request in rig.writes()[before:] if RESOURCES in request.path] == [], "it is no difference"
    rig.cards[0] |= {"healthy": False, "reason": "hot", "properties": {"clock": 1480}}
    rig.write_cards()
    rig.settle()
    assert rig.status(0).get("reason") == "hot"
    assert rig.card(0)["spec"]["properties"] == {"clock": "1480"}
    assert rig.status(0).items() >= theirs.items()
    assert not any(theirs.keys() & request.body.get("status", {}).keys() for request in rig.api.sent("patch"))
