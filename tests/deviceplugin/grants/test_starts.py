"""Starts of containers: which cards they get, and who is refused with what reason."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from structlog.testing import capture_logs

from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from deviceplugin.grants import waitslots
from deviceplugin.grants.mpswait import MpsNotReady
from tests.deviceplugin.conftest import P100, PODS, PODS_HERE, card_uuid, refusal, refused
from tests.theory import theory_of


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
        "CARDWISE_ISOLATION": "advisory",
    }


def test_the_pod_is_marked_as_assigned_afterwards(rig):
    rig.run(rig.bind("a", [(1, 8138)]))
    rig.settle()
    assert rig.api.get(f"{PODS_HERE}/a")["metadata"]["annotations"][names.ASSIGNED] == "true"


def test_another_pod_under_the_name_is_not_marked(rig):
    pod = rig.bind("a", [(1, 8138)])
    rig.run(pod)
    rig.force_delete(pod)
    rig.bind("a", [(0, 100)])
    with capture_logs() as logs:
        rig.settle()
    assert rig.api.get(f"{PODS_HERE}/a")["metadata"]["annotations"][names.ASSIGNED] == "false"
    assert not any("not marked" in line["event"] for line in logs), "nobody need hear of it"


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


def test_no_container_of_a_pod_starts_while_a_card_of_another_is_not_here(rig):
    pod = rig.bind("a", [(0, 1000)], containers=("one", "two"))
    here, gone = (CardShare(index, card_uuid(index), 1000, 0, P100) for index in (0, 7))
    annotations = codec.encode(Assignment({"0": (here,), "1": (gone,)}), assume_time_ns=1)
    pod = rig.api.edit(f"{PODS_HERE}/a", metadata={"annotations": annotations})
    code, message = refusal(lambda: rig.run(pod, "one"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"card 7 ({card_uuid(7)}) is not on this node" in message
    assert rig.held_on_disk(0) == 0


def test_who_may_not_even_wait_for_the_card_is_told_who_holds_it(idle_rig, monkeypatch):
    monkeypatch.setattr(waitslots, "WAIT_SLOTS", 0)
    rig = idle_rig.start()
    rig.run(rig.bind("first", [(0, P100)]))
    message = refusal(lambda: rig.run(rig.bind("second", [(0, 1)])))[1]
    assert f"card 0 ({card_uuid(0)}): {P100} of {P100} MiB are still held by default/first" in message


def test_who_has_waited_in_vain_leaves_the_place_to_the_next(idle_rig, monkeypatch):
    monkeypatch.setattr(waitslots, "WAIT_SLOTS", 1)
    rig = idle_rig.start()
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    refusal(lambda: rig.run(rig.bind("second", [(0, 1)])))
    slot = rig.kubelet.admit(rig.bind("third", [(0, 1)]), "main")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(rig.kubelet.pre_start, slot)
        rig.clock.until_waiting()
        rig.end(first)
        rig.see()
        rig.clock.step()
        waiting.result(60)
    assert rig.held_on_disk(0) == 1


def test_who_is_deleted_while_it_waits_for_the_card_is_not_given_it(idle_rig):
    rig = idle_rig.start()
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    slot = rig.kubelet.admit(rig.bind("second", [(0, 1)]), "main")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(refused, lambda: rig.kubelet.pre_start(slot))
        rig.clock.until_waiting()
        rig.kubelet.plugin.active = False
        rig.end(first)
        rig.clock.step()
        assert "has abandoned" in waiting.result()
    assert rig.spec(slot) is None


def test_who_is_deleted_while_room_is_made_is_not_given_it(rig, monkeypatch):
    """The container runtime may take seconds to say what has ended."""
    first = rig.bind("first", [(0, P100)])
    rig.run(first)
    rig.end(first)
    granting = rig.agent._prestart._granting
    free = granting._release

    def slowly(uids):
        free(uids)
        rig.kubelet.plugin.active = False

    monkeypatch.setattr(granting, "_release", slowly)
    assert "has abandoned" in refusal(lambda: rig.run(rig.bind("second", [(0, 1)])))[1]
    assert rig.agent.grants.list_grants() == []


@pytest.mark.parametrize("again", [False, True], ids=["a first start", "a restart"])
def test_who_is_deleted_before_the_card_is_delivered_gives_it_back(rig, monkeypatch, again):
    pod = rig.bind("a", [(0, 1000)], containers=("one", "two"))
    slot = rig.run(pod, "one") if again else None
    before = rig.agent.grants.list_grants()
    wait = rig.agent._prestart._granting._mps

    def confirm(*_):
        assert rig.held_on_disk(0) == 2000
        rig.kubelet.plugin.active = False

    monkeypatch.setattr(wait, "confirm_ready", confirm)
    delivery = rig.agent._prestart._granting._delivery
    monkeypatch.setattr(delivery, "deliver_grant", lambda *_: pytest.fail("nobody waits for it"))
    assert "has abandoned" in refusal(lambda: rig.run(pod, "one", slot=slot))[1]
    assert rig.agent.grants.list_grants() == before
    assert rig.held_on_disk(0) == (2000 if again else 0)


@pytest.mark.parametrize("error", [MpsNotReady("no daemon"), OSError("disk full")], ids=["MPS", "disk"])
def test_a_start_that_fails_after_its_grant_was_added_keeps_it_for_the_next_try(rig, monkeypatch, error):
    def fail(*_):
        raise error

    pod, granting = rig.bind("a", [(0, P100)]), rig.agent._prestart._granting
    rig.see()
    slot = rig.kubelet.admit(pod, "main")
    rig.runtime.make_sandbox(pod)
    with monkeypatch.context() as patch:
        if isinstance(error, MpsNotReady):
            patch.setattr(granting._mps, "confirm_ready", fail)
        else:
            patch.setattr(granting._delivery, "deliver_grant", fail)
        assert str(error) in refusal(lambda: rig.kubelet.pre_start(slot))[1]
    assert rig.held_on_disk(0) == P100
    assert "still held by default/a" in refusal(lambda: rig.run(rig.bind("b", [(0, 1)])))[1]
    rig.kubelet.pre_start(slot)
    assert rig.spec(slot) is not None
    rig.end(pod)
    rig.settle()
    assert rig.held_on_disk(0) == 0


def test_a_card_that_others_hold_is_refused_by_name(rig):
    rig.run(rig.bind("first", [(0, 10000)]))
    code, message = refusal(lambda: rig.run(rig.bind("second", [(0, 10000)])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "10000 of 16276 MiB are still held by default/first" in message
    assert rig.held_on_disk(0) == 10000


def test_the_example_of_the_docstring(rig):
    theory, held, requested = theory_of("deviceplugin.grants.granting"), (8138, 4096), 4096
    assert f"a card of {P100} MiB has grants of {held[0]} and {held[1]} MiB" in theory
    pods = [rig.bind(name, [(0, size)]) for name, size in zip(("first", "second"), held, strict=True)]
    for pod in pods:
        rig.run(pod)
    on_card = rig.held_on_disk(0)
    assert f"A container with {requested} MiB does not fit: {on_card} + {requested} exceed {P100}" in theory
    third = rig.bind("third", [(0, requested)])
    started = rig.clock.now()
    message = refusal(lambda: rig.run(third))[1]
    assert f"{on_card} of {P100} MiB are still held by default/first" in message
    assert f"waiting up to {rig.clock.now() - started:.0f} s for shares of pods that have just ended" in theory
    assert f"If the pod with {held[1]} MiB has ended, its grant is dropped and the container starts" in theory
    rig.end(pods[1])
    rig.run(third)
    assert [grant.name for grant in rig.agent.grants.list_grants()] == ["first", "third"]


def test_a_pod_is_refused_whole_not_at_its_second_container(rig):
    rig.run(rig.bind("first", [(0, 10000)]))
    pod = rig.bind("second", [(0, 5000)], containers=("one", "two"))
    assert refusal(lambda: rig.run(pod, "one"))[0] is grpc.StatusCode.FAILED_PRECONDITION


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
            "no GPU or device for container 'main'",
        ),
    ],
    ids=["unplaced", "unreadable", "foreign card", "other container"],
)
def test_a_bad_assignment_is_refused_with_a_reason(rig, break_it, says):
    pod = rig.bind("a", [(0, 100)])
    break_it(pod)
    pod = rig.api.write_object(PODS, pod)
    code, message = refusal(lambda: rig.run(pod))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert says in message
    assert not rig.agent.grants.list_grants()


def test_one_slot_at_two_pods_is_refused(rig):
    slot = rig.run(rig.bind("a", [(0, 100)]))
    code, message = refusal(lambda: rig.run(rig.bind("b", [(1, 100)]), slot=slot))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "default/a (container main) and default/b (container main)" in message
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia0"


def test_a_pod_replaced_under_its_name_does_not_get_the_new_ones_card(rig):
    old = rig.bind("a", [(0, 100)])
    slot = rig.kubelet.admit(old, "main")
    rig.force_delete(old)
    rig.bind("a", [(1, 100)])
    assert "does not exist any more" in refusal(lambda: rig.kubelet.pre_start(slot))[1]


def test_a_static_pod_is_told_that_it_cannot_get_a_share(rig):
    """The kubelet knows it by the UID of its manifest, the API server only its mirror: it "did not exist any more"."""
    uid = "0123456789abcdef0123456789abcdef"
    mirror = rig.bind("static-n1", [(0, 100)])
    rig.api.edit(f"{PODS_HERE}/static-n1", metadata={"annotations": {names.MIRROR: uid}})
    mirror["metadata"]["uid"] = uid
    code, message = refusal(lambda: rig.run(mirror))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "default/static-n1 is a static pod, and a static pod cannot get a share" in message
    assert "create it as an ordinary pod" in message


def test_an_entry_of_another_pod_that_the_kubelet_has_not_cleaned_up_yet_does_not_matter(rig):
    slot = rig.kubelet.admit(rig.bind("other", [(0, 100)]), "main")
    rig.see()
    pod = rig.bind("a", [(1, 8138)])  # the kubelet knows of it before the agent does
    rig.kubelet.admit(pod, "main", slot)
    del rig.kubelet.holders[slot][0]  # PodResources no longer names the other, the checkpoint still does
    rig.kubelet.pre_start(slot)
    assert rig.agent.grants.slot_owner(slot).pod_uid == pod["metadata"]["uid"]
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"


def test_a_slots_new_pod_does_not_get_the_card_of_the_one_before(rig):
    """The kubelet's checkpoint is behind: it still has the pod that had the slot before."""
    before = rig.bind("a", [(0, 100)])
    slot = rig.run(before)
    after = rig.bind("b", [(1, 100)])["metadata"]
    rig.see()
    rig.kubelet.holders[slot] = [("default", "b", after["uid"], "main")]  # as PodResources says; not written yet
    code, message = refusal(lambda: rig.kubelet.pre_start(slot))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"default/b (uid {before['metadata']['uid']}) does not exist any more" in message
