"""The pure decisions: whose a slot is, when to register again, what a spec says, which access, which capacities."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest
import yaml

from cardwise.core import assignment as codec
from cardwise.core import classes, names
from cardwise.core.classes import DeviceClass
from cardwise.core.quantity import MiB
from cardwise.gpus.protocol import DevicePath, GpuCard, Health
from cardwise.kube.wire import ExtendedResource
from deviceplugin import cards, cdi, environment, slots
from deviceplugin.access import Access, Delivery, decide
from deviceplugin.containers import RuntimeFacts
from deviceplugin.grants import Grant, Share
from deviceplugin.kubelet import Holders, KnownContainer, KubeletSilent, NamedContainer, Shared, parse_checkpoint
from deviceplugin.node import NOTED, relabel
from deviceplugin.pods import PodView, view
from deviceplugin.prestart import Refused, check_cards, grant_of, identify
from deviceplugin.registration import Sight, why_again
from deviceplugin.release import held_shares
from tests import build

A, B = NamedContainer("default", "a", "main"), NamedContainer("default", "b", "main")
UA, UB = KnownContainer("uid-a", "main"), KnownContainer("uid-b", "main")
KUBELET = (1, 2, 3)


def grant(uid: str = "u1", *shares: Share, **changes: object) -> Grant:
    fields = {
        "pod_uid": uid,
        "namespace": "default",
        "name": "a",
        "container": "main",
        "key": "0",
        "slots": ("s001",),
        "shares": shares or (Share(1, "GPU-1", 8138, 0, 16276),),
        "pod_shares": shares or (Share(1, "GPU-1", 8138, 0, 16276),),
    }
    return Grant(**fields | changes)


class TestIdentify:
    def test_one_container_in_both(self):
        holders = Holders({"s1": [A], "s2": [B]}, {"s1": [UA], "s2": [UB]})
        assert identify(["s2"], holders, lambda _: None) == (B, "uid-b")

    @pytest.mark.parametrize(
        ("named", "known", "says"),
        [
            ({}, {"s1": [UA]}, "does not list a container"),
            ({"s1": [A]}, {}, "disagree"),
            ({"s1": [A]}, {"s1": [KnownContainer("uid-a", "other")]}, "disagree"),
            ({"s1": [A, B]}, {"s1": [UA, UB]}, "default/a (container main) and default/b"),
            ({"s1": [A]}, {"s1": [UA, UB]}, "disagree"),
        ],
        ids=["unlisted", "not in the checkpoint", "other container", "two pods", "two unknown uids"],
    )
    def test_refused(self, named, known, says):
        with pytest.raises(Refused, match=r"share slot s1|kubelet") as caught:
            identify(["s1"], Holders(named, known), lambda _: None)
        assert says in str(caught.value)

    def test_a_stale_entry_of_another_pod_does_not_matter(self):
        holders = Holders({"s1": [A]}, {"s1": [UB, UA]})
        assert identify(["s1"], holders, {"uid-b": "default/b", "uid-a": "default/a"}.get) == (A, "uid-a")

    def test_slots_of_two_containers_are_refused(self):
        holders = Holders({"s1": [A], "s2": [B]}, {"s1": [UA], "s2": [UB]})
        with pytest.raises(Refused):
            identify(["s1", "s2"], holders, lambda _: None)


def test_the_checkpoint_is_read_by_resource():
    entries = [
        {"PodUID": "u", "ContainerName": "c", "ResourceName": names.SHARE, "DeviceIDs": {"-1": ["s1"], "0": ["s2"]}},
        {"PodUID": "u", "ContainerName": "c", "ResourceName": "other.com/x", "DeviceIDs": {"-1": ["s1"]}},
        {"PodUID": "v", "ContainerName": "c", "ResourceName": names.SHARE, "DeviceIDs": None},
    ]
    known = parse_checkpoint(json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 7}).encode())
    assert known == {"s1": [KnownContainer("u", "c")], "s2": [KnownContainer("u", "c")]}
    assert parse_checkpoint(b'{"Data":{"PodDeviceEntries":null}}') == {}
    with pytest.raises(KubeletSilent):
        parse_checkpoint(b'{"Data":')


def test_a_shared_answer_began_after_every_question():
    counter, lock = iter(range(10**6)), threading.Lock()
    began: list[float] = []

    def call() -> float:
        with lock:
            next(counter)
        at = time.monotonic()
        began.append(at)
        time.sleep(0.002)
        return at

    shared = Shared(call)

    def ask(_: int) -> bool:
        asked = time.monotonic()
        return shared.get() >= asked

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(ask, range(600)))
    assert len(began) < 300


def test_a_shared_failure_reaches_everyone_and_is_not_kept():
    answers = iter([KubeletSilent("no"), 1])

    def call() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = Shared(call)
    with pytest.raises(KubeletSilent):
        shared.get()
    assert shared.get() == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kubelet": None}, ""),
        ({"registered_with": None}, "not registered"),
        ({"kubelet": (1, 2, 4)}, "another one"),
        ({"own_socket": False}, "removed"),
        ({"without_stream": 1.0}, ""),
        ({"without_stream": 3.0}, "stream"),
        ({"showing_zero": 29.0}, ""),
        ({"showing_zero": 30.0}, "showing no cardwise.dev/share"),
    ],
)
def test_when_to_register_again(changes, why):
    fine = {"kubelet": KUBELET, "registered_with": KUBELET, "own_socket": True}
    sight = Sight(**{"without_stream": None, "showing_zero": None} | fine | changes)
    assert why in why_again(sight)
    assert bool(why_again(sight)) == bool(why)


@pytest.mark.parametrize(
    ("facts", "access"),
    [
        (RuntimeFacts("containerd", "v2.1.4", None, ()), Access.CDI),
        (RuntimeFacts("containerd", "2.0.0-rc.1", None, ()), Access.CDI),
        (RuntimeFacts("containerd", "v2.1.4", False, ()), Access.ENV),
        (RuntimeFacts("containerd", "1.7.20", None, ()), Access.ENV),
        (RuntimeFacts("containerd", "1.7.20", True, ()), Access.CDI),
        (RuntimeFacts("containerd", "1.6.20~ds1", None, ()), Access.ENV),
        (RuntimeFacts("cri-o", "1.33.0", None, ()), Access.CDI),
        (RuntimeFacts("docker", "28", None, ()), Access.ENV),
    ],
)
def test_card_access_is_the_runtimes_alone(facts, access):
    assert decide(facts)[0] is access


def test_slots_are_few_and_short():
    assert slots.slot_ids(2) == ("s001", "s002")
    assert slots.slot_ids(1000)[-1] == "s1000"
    assert len(slots.listing(slots.slot_ids(100_000)).SerializeToString()) < 3 * 1024 * 1024
    with pytest.raises(slots.TooManySlots, match="write at most"):
        slots.slot_ids(200_000)
    with pytest.raises(ValueError, match="at least 1"):
        slots.slot_ids(0)


class TestNvidiaSpecs:
    SPEC: ClassVar = {
        "cdiVersion": "0.7.0",
        "kind": "nvidia.com/gpu",
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": "/dev/nvidiactl"}],
            "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook"}],
            "mounts": [{"hostPath": "/lib/libcuda.so", "containerPath": "/lib/libcuda.so"}],
        },
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}},
            {
                "name": "GPU-1",
                "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}, {"path": "/dev/nvidiactl"}]},
            },
            {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidia1"}]}},
        ],
    }

    def card(self, index: int) -> GpuCard:
        return GpuCard(index=index, uuid=f"GPU-{index}", model="m", memory=MiB(1), devices=())

    def test_a_card_by_uuid_or_index_with_the_common_edits(self, tmp_path):
        (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(self.SPEC))
        (tmp_path / "other.json").write_text('{"kind": "vendor.com/nic", "cdiVersion": "0.6.0", "devices": []}')
        (tmp_path / "broken.yaml").write_text("{")
        specs = cdi.NvidiaSpecs([tmp_path / "none", tmp_path])
        edits, version = specs.edits(self.card(1))
        assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia1"]
        assert version == "0.7.0"
        edits, _ = specs.edits(self.card(0))
        assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia0"]
        assert edits["hooks"] == self.SPEC["containerEdits"]["hooks"]
        assert edits["mounts"] == self.SPEC["containerEdits"]["mounts"]
        with pytest.raises(cdi.NoDevice, match="nvidia-ctk cdi generate"):
            specs.edits(self.card(7))

    def test_our_environment_replaces_theirs(self, tmp_path):
        (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(self.SPEC))
        edits, version = cdi.NvidiaSpecs([tmp_path]).edits(self.card(1))
        made = cdi.spec("s001", grant(), edits | {"env": ["NVIDIA_VISIBLE_DEVICES=all", "KEPT=1"]}, version)
        env = made["devices"][0]["containerEdits"]["env"]
        assert "KEPT=1" in env
        assert [entry for entry in env if entry.startswith("NVIDIA_VISIBLE")] == ["NVIDIA_VISIBLE_DEVICES=void"]
        assert made["cdiVersion"] == "0.7.0"
        assert cdi.spec("s001", grant(), {}, "0.3.0")["cdiVersion"] == "0.6.0"

    def test_a_changed_spec_is_read_again(self, tmp_path):
        path = tmp_path / "nvidia.yaml"
        specs = cdi.NvidiaSpecs([path])
        with pytest.raises(cdi.NoDevice):
            specs.edits(self.card(1))
        path.write_text(yaml.safe_dump(self.SPEC))
        assert specs.edits(self.card(1))

    def test_a_card_without_edits_cannot_be_given_until_they_appear(self, tmp_path):
        delivery = Delivery(tmp_path, cdi.NvidiaSpecs([tmp_path]))
        both = [self.card(1), self.card(7)]
        assert list(delivery.undeliverable(both)) == ["GPU-1", "GPU-7"]
        (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(self.SPEC))
        assert list(delivery.undeliverable(both)) == ["GPU-7"]
        assert "nvidia-ctk cdi generate" in delivery.undeliverable(both)["GPU-7"]


def test_a_simulated_card_must_be_a_device_node(tmp_path):
    (tmp_path / "file").write_text("")
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path / "file", "mknod")):
        card = GpuCard(
            index=0, uuid="GPU-0", model="m", memory=MiB(1), devices=(DevicePath(str(path), "/dev/nvidia0"),)
        )
        with pytest.raises(cdi.NoDevice, match=says):
            cdi.plain_edits(card)


def test_the_fraction_is_of_the_tightest_card():
    two = (Share(0, "GPU-0", 4000, 0, 16000), Share(1, "GPU-1", 4000, 0, 80000))
    env = environment.of(grant("u", *two))
    assert env["CARDWISE_MEM_FRACTION"] == "0.0500"
    assert env["CARDWISE_MEM_LIMIT_MIB"] == "4000"
    assert env["ALIYUN_COM_GPU_MEM_IDX"] == "0,1"
    assert env["ALIYUN_COM_GPU_MEM_CONTAINER"] == "8000"


def test_specs_of_no_living_slot_are_found(tmp_path):
    for slot in ("s001", "s002"):
        cdi.write(tmp_path, slot, {"a": 1})
    (tmp_path / ".cardwise.dev-share-s003.json.1.ab").write_text("")
    (tmp_path / "nvidia.yaml").write_text("")
    assert {path.name for path in cdi.stale(tmp_path, {"s001"})} == {
        "cardwise.dev-share-s002.json",
        ".cardwise.dev-share-s003.json.1.ab",
    }


def pod_view(**changes: object) -> PodView:
    pod = view(build.pod("a", uid="u1", gpu_mem=8138, share=1))
    fields = {name: getattr(pod, name) for name in PodView.__slots__}
    return PodView(**fields | changes)


def test_capacities_never_go_below_what_is_asked():
    sizes = [(16276, "GPU-0"), (16276, "GPU-1")]
    assert cards.capacities(sizes, []) == {
        names.GPU_MEM: "32552",
        names.GPU_COUNT: "2",
        names.GPU_CORE: "200",
        names.WHOLE_GPU: "2",
    }
    living = [pod_view(uid=f"u{i}", requests={names.GPU_MEM: 8138, names.GPU_CORE: 50}) for i in range(3)]
    assert cards.capacities(sizes[:1], living)[names.GPU_MEM] == str(3 * 8138)
    assert cards.capacities(sizes[:1], living)[names.GPU_CORE] == "150"
    ended = [pod_view(uid="u9", phase="Succeeded", requests={names.GPU_MEM: 99999})]
    assert cards.capacities(sizes[:1], ended)[names.GPU_MEM] == "16276"


def device_class(name: str, **spec: object) -> DeviceClass:
    selector = {"matchLabels": {"model": "m"}}
    return classes.parse({"metadata": {"name": name}, "spec": {"selector": selector, **spec}})


def test_capacities_of_classes_are_of_cards_and_of_what_is_asked():
    a, b = device_class("a"), device_class("b", share={"memoryMiB": 100})
    members = [(MiB(1050), [a, b]), (MiB(1000), [a]), (MiB(1000), [])]
    asks = {"cardwise.dev/b": 5, "cardwise.dev/c": 2, "cardwise.dev/d": 0, names.GPU_MEM: 100, names.WHOLE_GPU: 1}
    living = pod_view(requests=asks)
    ended = pod_view(uid="u2", phase="Failed", requests={"cardwise.dev/e": 1})
    wanted = {"cardwise.dev/a": "256", "cardwise.dev/b": "138", "cardwise.dev/c": "2"}
    assert cards.class_capacities(members, [living, ended], {"cardwise.dev/old": "48"}) == wanted
    assert cards.class_capacities([], [], {"cardwise.dev/old": "48"}) == {}


def test_capacities_of_classes_stay_while_nobody_knows_the_classes():
    now = {"cardwise.dev/a": "48", "cardwise.dev/b": "0", names.GPU_MEM: "100"}
    living = pod_view(requests={"cardwise.dev/b": 3, "cardwise.dev/c": 1})
    wanted = {"cardwise.dev/a": "48", "cardwise.dev/b": "3", "cardwise.dev/c": "1"}
    assert cards.class_capacities(None, [living], now) == wanted


def test_a_pod_of_ours_is_read_with_the_classes_that_it_asks_for():
    asks = {"cardwise.dev/nvidia.tesla.k80": "2", names.GPU_MEM: "100", names.SHARE: "1", "cpu": "1"}
    one = {"name": "main", "resources": {"requests": asks}}
    pod = view(build.pod("a", uid="u", containers=[one, one | {"name": "other"}]))
    assert pod.requests == {"cardwise.dev/nvidia.tesla.k80": 4, names.GPU_MEM: 200}


@pytest.mark.parametrize(
    ("models", "accelerator"),
    [
        (["Tesla K80", "Tesla K80"], "nvidia-tesla-k80"),
        (["NVIDIA H200"], "nvidia-h200"),
        (["Tesla K80", "Tesla P100"], ""),
        ([], ""),
    ],
)
def test_the_accelerator_is_the_only_model(models, accelerator):
    here = [GpuCard(index=i, uuid=f"GPU-{i}", model=model, memory=MiB(1), devices=()) for i, model in enumerate(models)]
    assert cards.accelerator(here) == accelerator


@pytest.mark.parametrize(
    ("wanted", "label", "noted", "after"),
    [
        ("k80", None, None, ("k80", "k80")),
        ("k80", "k80", "k80", ("k80", "k80")),
        ("p100", "k80", "k80", ("p100", "p100")),
        ("", "k80", "k80", (None, None)),
        ("k80", None, "k80", ("k80", "k80")),
        ("", None, "k80", (None, None)),
        ("", None, None, (None, None)),
        ("k80", "theirs", None, ("theirs", None)),
        ("k80", "theirs", "k80", ("theirs", None)),
        ("", "theirs", "k80", ("theirs", None)),
        ("k80", "k80", None, ("k80", None)),
        ("", "k80", None, ("k80", None)),
        ("k80", "", None, ("", None)),
    ],
)
def test_only_a_label_that_we_wrote_is_ours(wanted, label, noted, after):
    change = relabel(wanted, label, noted)
    result = (
        change.get("labels", {names.ACCELERATOR: label})[names.ACCELERATOR],
        change.get("annotations", {NOTED: noted})[NOTED],
    )
    assert result == after
    assert relabel(wanted, *after) == {}, "then it is done"
    assert bool(change) == (after != (label, noted))


def test_a_sidecar_has_its_key_and_counts():
    sidecar = build.container("proxy", gpu_mem=100, share=1) | {"restartPolicy": "Always"}
    setup = build.container("setup")
    pod = view(build.pod("a", uid="u", init=[setup, sidecar], containers=[build.container("main", gpu_mem=200)]))
    assert pod.keys == {"proxy": "init-1", "main": "0"}
    assert pod.requests[names.GPU_MEM] == 300


def test_a_pod_of_gpushare_is_refused_in_its_name():
    pod = pod_view(annotations={names.IDX: "1", names.POD_MEM: "8138"})
    with pytest.raises(Refused, match="was not placed by the Cardwise extender"):
        grant_of(pod, "main", ["s001"])


def test_the_grant_is_what_the_annotations_order():
    shares = build.shares(8138, 1)
    pod = pod_view(annotations=codec.encode(codec.Assignment({"0": shares}), assume_time_ns=1))
    made = grant_of(pod, "main", ["s001"])
    assert made.shares == (Share.of(shares[0]),)
    assert (made.pod_mem, made.indices, made.slots) == (8138, [1], ("s001",))


def test_the_grant_knows_whose_each_share_of_the_pod_is():
    containers = {"0": build.shares(100, 1), "1": build.shares(50, 1)}
    pod = pod_view(annotations=codec.encode(codec.Assignment(containers), assume_time_ns=1))
    made = grant_of(pod, "main", ["s001"])
    assert [(key, share.mem) for key, share in zip(made.pod_keys, made.pod_shares, strict=True)] == [
        ("0", 100),
        ("1", 50),
    ]


def test_a_card_smaller_than_its_shares_is_refused():
    (card,) = build.cards(1000)
    two = (Share(0, card.uuid, 500, 0, 1000), Share(0, card.uuid, 501, 0, 2000))
    here = {card.uuid: GpuCard(index=0, uuid=card.uuid, model="m", memory=MiB(1000), devices=())}
    assert check_cards(two[:1], here) == [here[card.uuid]]
    with pytest.raises(Refused, match="has 1000 MiB, not the 1001 MiB"):
        check_cards(two, here)


def test_held_shares_are_told_container_by_container():
    pod = (Share(0, "GPU-0", 100, 10, 1000), Share(1, "GPU-1", 100, 10, 1000), Share(0, "GPU-0", 50, 5, 1000))
    of = {"pod_shares": pod, "pod_keys": ("0", "0", "1")}
    # The third container never was granted: its pod holds the share all the same.
    held = held_shares([grant("u1", *pod[:2], **of), grant("u0", pod[2])])
    told = {card: [(h.pod_uid, h.memory_mib, h.core_percent, h.container) for h in of] for card, of in held.items()}
    assert told == {
        "GPU-0": [("u0", 50, 5, ""), ("u1", 100, 10, "0"), ("u1", 50, 5, "1")],
        "GPU-1": [("u1", 100, 10, "0")],
    }


def test_a_held_share_is_read_as_it_was_written():
    whole = Share(0, "GPU-0", 1000, 100, 1000, whole=True)
    held = held_shares([grant("u1", whole, pod_keys=("init-0",)), grant("u2")])
    assert [one.whole for of_card in held.values() for one in of_card] == [True, False]
    for of_card in held.values():
        told = cards.status(Health(healthy=True), "cdi", of_card)
        spec = {"node": "n", "index": 0, "uuid": "GPU-0"}
        read = msgspec.convert({"metadata": {}, "spec": spec, "status": told}, ExtendedResource)
        assert cards.status_of(read) == told, "else it is written again and again"


def test_status_of_a_card_that_is_gone():
    told = cards.statuses([], ["GPU-9"], {}, "cdi", {})
    assert told["GPU-9"]["health"] == "Unhealthy"
    assert cards.status(Health(healthy=True), "env", ())["health"] == "Healthy"


def test_a_reason_is_as_short_as_the_crd_wants_it():
    assert len(cards.status(Health(healthy=False, reason="x" * 5000), "cdi", ())["reason"]) == 1024
