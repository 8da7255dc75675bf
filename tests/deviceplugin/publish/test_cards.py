"""What is said of a node's cards: capacities, the label `accelerator`, and the status of each."""

import msgspec
import pytest

from cardwise.core.api import classes, names
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import GpuCard, Health
from cardwise.kube.objects.extendedresources import ExtendedResource, IsolationStatus
from deviceplugin.grants.release import reported_shares
from deviceplugin.publish import cards
from deviceplugin.publish.node import LAST_LABEL_ANNOTATION, label_change
from tests import build
from tests.deviceplugin.records import grant, parse_pod, pod_view

TIERS = IsolationStatus("mps", "limits by the driver need driver 615 or later", "mps", "")


def test_capacities_never_go_below_what_is_asked():
    sizes = [16276, 16276]
    assert cards.card_capacities(sizes, []) == {
        names.GPU_MEM: "32552",
        names.GPU_COUNT: "2",
        names.GPU_CORE: "200",
        names.WHOLE_GPU: "2",
    }
    living = [pod_view(uid=f"u{i}", requests={names.GPU_MEM: 8138, names.GPU_CORE: 50}) for i in range(3)]
    assert cards.card_capacities(sizes[:1], living)[names.GPU_MEM] == str(3 * 8138)
    assert cards.card_capacities(sizes[:1], living)[names.GPU_CORE] == "150"
    assert cards.card_capacities(sizes, [], 250)[names.GPU_CORE] == "500"
    ended = [pod_view(uid="u9", phase="Succeeded", requests={names.GPU_MEM: 99999})]
    assert cards.card_capacities(sizes[:1], ended)[names.GPU_MEM] == "16276"


def resource_class(name: str, **spec: object) -> ResourceClass:
    return classes.parse(build.resource_class(name, model="m", **spec))


def test_capacities_of_classes_are_of_cards_and_of_what_is_asked():
    a, b = resource_class("a"), resource_class("b", share={"memoryMiB": 100})
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
    container = {"name": "main", "resources": {"requests": asks}}
    pod = parse_pod(build.pod("a", uid="u", containers=[container, container | {"name": "other"}]))
    assert pod.requests == {"cardwise.dev/nvidia.tesla.k80": 4, names.GPU_MEM: 200}


@pytest.mark.parametrize(
    ("models", "accelerator"),
    [
        (["Tesla K80", "Tesla K80"], "nvidia-tesla-k80"),
        (["NVIDIA H200"], "nvidia-h200"),
        (["Tesla K80", "Tesla P100"], None),
        ([], None),
    ],
)
def test_the_accelerator_is_the_only_model(models, accelerator):
    here = [GpuCard(index=i, uuid=f"GPU-{i}", model=model, memory=MiB(1), devices=()) for i, model in enumerate(models)]
    assert cards.accelerator_label(here) == accelerator


@pytest.mark.parametrize(
    ("wanted", "label", "last_written_label", "after"),
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
def test_only_a_label_that_we_wrote_is_ours(wanted, label, last_written_label, after):
    change = label_change(wanted, label, last_written_label)
    labels = (
        change.get("labels", {names.ACCELERATOR: label})[names.ACCELERATOR],
        change.get("annotations", {LAST_LABEL_ANNOTATION: last_written_label})[LAST_LABEL_ANNOTATION],
    )
    assert labels == after
    assert label_change(wanted, *after) == {}, "then it is done"
    assert bool(change) == (after != (label, last_written_label))


def test_held_shares_are_told_container_by_container():
    pod = (
        CardShare(0, "GPU-0", 100, 10, 1000),
        CardShare(1, "GPU-1", 100, 10, 1000),
        CardShare(0, "GPU-0", 50, 5, 1000),
    )
    of = {"pod_shares": pod, "pod_keys": ("0", "0", "1")}
    # The third container never was granted: its pod holds the share all the same.
    held = reported_shares([grant("u1", *pod[:2], **of), grant("u0", pod[2])])
    status = {card: [(h.uid, h.mem, h.core, h.container) for h in of] for card, of in held.items()}
    assert status == {
        "GPU-0": [("u0", 50, 5, "0"), ("u1", 100, 10, "0"), ("u1", 50, 5, "1")],
        "GPU-1": [("u1", 100, 10, "0")],
    }


def test_a_held_share_is_read_as_it_was_written():
    whole = CardShare(0, "GPU-0", 1000, 100, 1000, whole=True)
    held = reported_shares([grant("u1", whole, pod_keys=("init-0",)), grant("u2")])
    assert [container.whole for of_card in held.values() for container in of_card] == [True, False]
    for of_card in held.values():
        status = cards.build_status(Health(healthy=True), "cdi", of_card, TIERS)
        spec = {"node": "n", "index": 0, "uuid": "GPU-0"}
        read = msgspec.convert({"metadata": {}, "spec": spec, "status": status}, ExtendedResource)
        assert cards.observed_status(read) == status, "else it is written again and again"


def test_status_of_a_card_that_is_gone():
    spec = {"node": "n", "index": 9, "uuid": "GPU-9"}
    gone = msgspec.convert({"metadata": {}, "spec": spec}, ExtendedResource)
    status = cards.build_statuses({}, [gone], "cdi", lambda _: (), lambda _: TIERS)
    assert status["GPU-9"]["health"] == "Unhealthy"
    assert cards.build_status(Health(healthy=True), "env", (), TIERS)["health"] == "Healthy"


def test_a_reason_is_as_short_as_the_crd_wants_it():
    assert len(cards.build_status(Health(healthy=False, reason="x" * 5000), "cdi", (), TIERS)["reason"]) == 1024
