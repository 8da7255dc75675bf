"""Requests for devices other than GPUs: the rewritten pod, refusals and warnings."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.assignment import AssignedDevice, Assignment, encode
from cardwise.core.api.request import DeviceRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests import build
from tests.build import binding, resource_class
from tests.webhook.classpods import pod
from tests.webhook.reviews import (
    Known,
    mutate_object,
    mutate_object_twice,
    on_defaults,
    on_mutate,
    on_validate,
    refusal,
    resource_classes,
)
from webhook.cluster.cards import CardSizes
from webhook.cluster.gpuquotas import parse as standing
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import WebhookSettings
from webhook.server import review

K80, RDMA, FPGA, HALF = "nvidia.tesla.k80", "rdma", "net.fpga", "half"
K80_KEY, RDMA_KEY, FPGA_KEY, HALF_KEY = (names.CLASS_PREFIX + name for name in (K80, RDMA, FPGA, HALF))
SLOT, MARKER = {names.SHARE: "1"}, {names.FILTER_CALL_RESOURCE: "0"}


CLASSES = resource_classes(
    resource_class(K80),
    resource_class(HALF, share={"memoryMiB": 5000}),
    resource_class(RDMA, kind="rdma"),
    resource_class(FPGA, kind="fpga"),
    resource_class("nic", kind="nic"),
)
KNOWN = Known(
    known_classes=CLASSES,
    known_cards=CardSizes(MiB(16276), 4),
    cards_of={
        K80: CardSizes(MiB(11441), 2),
        HALF: CardSizes(MiB(11441), 2),
        RDMA: CardSizes(max_cards=2),
        FPGA: CardSizes(max_cards=1),
    },
)


def after_mutation(pod: Json, known: Known = KNOWN, settings: WebhookSettings | None = None) -> Json:
    return mutate_object_twice(pod, "pods", known, settings)


def limits(manifest: Json) -> list[Json]:
    return [container["resources"].get("limits", {}) for container in manifest["spec"]["containers"]]


def class_annotation(manifest: Json) -> str | None:
    text: str | None = manifest["metadata"]["annotations"].get(names.DEVICE_CLASSES)
    return text


def validate_pod(pod: Json, known: Known = KNOWN, settings: WebhookSettings | None = None) -> review.Decision:
    return on_validate(pod, "pods", known, settings)


def refusal_of(pod: Json, known: Known = KNOWN) -> str:
    return refusal(pod, known)


def mutation_warnings(pod: Json) -> tuple[str, ...]:
    """The warnings of /mutate."""
    decision = on_mutate(pod, "pods", KNOWN)
    assert decision.allowed, decision.message
    return decision.warnings


@pytest.mark.parametrize(
    ("amounts", "is_now"),
    [
        pytest.param({RDMA: "1"}, {RDMA_KEY: "1"} | MARKER, id="bare"),
        pytest.param({RDMA_KEY: "2"}, {RDMA_KEY: "2"} | MARKER, id="our spelling"),
        pytest.param({RDMA: "1", RDMA_KEY: "1"}, {RDMA_KEY: "1"} | MARKER, id="both spellings"),
        pytest.param({RDMA: "1", FPGA: "1"}, {RDMA_KEY: "1", FPGA_KEY: "1"} | MARKER, id="two classes of devices"),
        pytest.param(
            {RDMA: "1", names.GPU_MEM: "8138"}, {RDMA_KEY: "1", names.GPU_MEM: "8138"}, id="beside a share of a GPU"
        ),
        pytest.param(
            {RDMA: "1", FPGA: "1", K80: "2"},
            {RDMA_KEY: "1", FPGA_KEY: "1", K80_KEY: "2", names.WHOLE_GPU: "2"},
            id="beside GPUs of a class",
        ),
        pytest.param(
            {RDMA: "1", HALF: "2"},
            {RDMA_KEY: "1", HALF_KEY: "2", names.GPU_MEM: "10000"},
            id="beside shares of a class",
        ),
    ],
)
def test_devices_by_any_spelling_and_beside_cards(amounts: Json, is_now: Json) -> None:
    once = after_mutation(pod(amounts))
    assert limits(once) == [is_now | SLOT]
    resources = once["spec"]["containers"][0]["resources"]
    assert resources["requests"].items() <= resources["limits"].items()
    assert class_annotation(once) == (f"{FPGA},{RDMA}" if FPGA in amounts else RDMA)
    assert validate_pod(once).message == ""
    parsed = request.parse_mutated(once)
    assert parsed is not None
    assert DeviceRequest("0", RDMA, int(amounts.get(RDMA, amounts.get(RDMA_KEY)))) in parsed.devices


def test_each_container_has_a_slot_and_the_first_with_a_device_the_marker() -> None:
    plain, first, second = limits(after_mutation(pod({"cpu": "1"}, {RDMA: "1"}, {FPGA: "1"})))
    assert plain == {"cpu": "1"}
    assert first == {RDMA_KEY: "1"} | SLOT | MARKER
    assert second == {FPGA_KEY: "1"} | SLOT


def test_a_pod_with_a_card_anywhere_needs_no_marker() -> None:
    assert limits(after_mutation(pod({RDMA: "1"}, {names.GPU_MEM: "64"}))) == [
        {RDMA_KEY: "1"} | SLOT,
        {names.GPU_MEM: "64"} | SLOT,
    ]


def test_a_native_sidecar_may_have_the_device_and_the_marker() -> None:
    sidecar = {"name": "s", "restartPolicy": "Always", "resources": {"limits": {RDMA: "1"}}}
    once = after_mutation(build.pod(init=[sidecar]))
    assert once["spec"]["initContainers"][0]["resources"]["limits"] == {RDMA_KEY: "1"} | SLOT | MARKER
    assert limits(once) == [{}]


def test_user_markers_are_removed_with_a_warning_and_own_ones_stay() -> None:
    with_markers = pod(
        {RDMA: "1", names.FILTER_CALL_RESOURCE: "7"},
        {names.FILTER_CALL_RESOURCE: "1", names.BIND_CALL_RESOURCE: "1", FPGA: "1"},
    )
    assert limits(after_mutation(with_markers)) == [{RDMA_KEY: "1"} | SLOT | MARKER, {FPGA_KEY: "1"} | SLOT]
    text = "\n".join(mutation_warnings(with_markers))
    for container, name in (
        (0, names.FILTER_CALL_RESOURCE),
        (1, names.FILTER_CALL_RESOURCE),
        (1, names.BIND_CALL_RESOURCE),
    ):
        assert f"spec.containers[{container}].resources.limits[{name}]: removed; only Cardwise may write this" in text
    assert mutation_warnings(after_mutation(with_markers)) == ()
    with_a_card = pod({names.GPU_MEM: "64", names.FILTER_CALL_RESOURCE: "1"})
    assert limits(after_mutation(with_a_card)) == [{names.GPU_MEM: "64"} | SLOT]


@pytest.mark.parametrize(
    ("limits", "own", "is_now", "warning"),
    [
        pytest.param({RDMA: "1"}, RDMA, RDMA, "", id="right"),
        pytest.param({RDMA: "1"}, f"{K80},{RDMA}", RDMA, f"replaced by {RDMA}", id="a class too many"),
        pytest.param({RDMA: "1"}, "", RDMA, f"replaced by {RDMA}", id="none"),
        pytest.param({K80: "1"}, K80, None, "removed", id="a GPU as a device"),
        pytest.param({}, RDMA, None, "removed", id="nothing is asked"),
    ],
)
def test_device_annotation_of_a_user_is_replaced(limits: Json, own: str, is_now: str | None, warning: str) -> None:
    annotated = pod(limits, annotations={names.DEVICE_CLASSES: own})
    assert class_annotation(after_mutation(annotated)) == is_now
    messages = [text for text in mutation_warnings(annotated) if names.DEVICE_CLASSES in text]
    message = f"metadata.annotations[{names.DEVICE_CLASSES}]: {warning}; only Cardwise may write this"
    assert messages == ([message] if warning else [])


def test_copy_of_a_running_pod_is_placed_again() -> None:
    once = after_mutation(pod({RDMA: "1"}))
    held = Assignment({}, {"0": (AssignedDevice(RDMA, "rdma-1"),)})
    running = once | {
        "metadata": once["metadata"]
        | {"annotations": once["metadata"]["annotations"] | encode(held, assume_time_ns=1), "resourceVersion": "7"},
        "spec": once["spec"] | {"nodeName": "n1"},
    }
    copied = after_mutation(running)
    assert copied["spec"] == once["spec"]
    assert copied["metadata"]["annotations"] == {names.DEVICE_CLASSES: RDMA}
    assert "resourceVersion" not in copied["metadata"]


def test_container_with_only_devices_sees_no_card() -> None:
    pods_devices = pod({RDMA: "1"}, {names.GPU_MEM: "64", FPGA: "1"})
    pods_devices["spec"]["containers"][0]["env"] = [
        {"name": "A", "value": "1"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"},
    ]
    once = after_mutation(pods_devices)
    devices, card = (container["env"] for container in once["spec"]["containers"])
    assert devices == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, {"name": "A", "value": "1"}]
    assert {"NVIDIA_VISIBLE_DEVICES", "CARDWISE_MEM_LIMIT_MIB"} <= {entry["name"] for entry in card}
    assert next(e for e in card if e["name"] == "NVIDIA_VISIBLE_DEVICES")["valueFrom"]
    assert (
        "spec.containers[0].env: CUDA_MPS_PIPE_DIRECTORY, NVIDIA_VISIBLE_DEVICES replaced"
        in mutation_warnings(pods_devices)[0]
    )
    assert mutation_warnings(once) == ()


def test_card_settings_do_not_apply_to_pods_without_cards() -> None:
    known = Known(known_classes=CLASSES, namespaces={"default": Defaults("1Gi", "spread")})
    settings = WebhookSettings(runtime_class="nvidia")
    for decide in (on_mutate, on_defaults):
        text = str(decide(pod({RDMA: "1"}), "pods", known, settings).patch)
        assert names.SHARE.replace("/", "~1") in text or names.SHARE in text
        assert "runtimeClassName" not in text
        assert "policy" not in text
        assert "gpu-mem" not in text, "a pod that requests a device is not a plain pod"
    assert after_mutation(pod({RDMA: "1", names.GPU_MEM: "9"}), known, settings)["spec"]["runtimeClassName"] == "nvidia"


# The annotation that names a class.


def test_first_container_gets_the_annotated_device_without_a_request() -> None:
    once = after_mutation(pod({"cpu": "1"}, {}, annotations={names.CLASS: RDMA}))
    assert limits(once) == [{"cpu": "1", RDMA_KEY: "1"} | SLOT | MARKER, {}]
    assert once["metadata"]["annotations"] == {names.CLASS: RDMA, names.DEVICE_CLASSES: RDMA}


@pytest.mark.parametrize("limits", [{names.GPU_MEM: "64"}, {K80: "1"}, {FPGA: "1"}, {names.NVIDIA_GPU: "1"}])
def test_device_class_annotation_excludes_other_classes(limits: Json) -> None:
    (name,) = limits
    key = names.CLASS_PREFIX + name if name in (K80, FPGA) else name
    assert refusal_of(pod(limits, annotations={names.CLASS: RDMA})) == (
        f"metadata.annotations[{names.CLASS}]: {RDMA} is a class of devices other than GPUs, and a container "
        f"requests {key}; write {RDMA}: 1 in the limits of the container that needs the device, and remove the "
        "annotation"
    )


def test_gpu_class_annotation_does_not_affect_devices() -> None:
    share, device = limits(
        after_mutation(pod({names.GPU_MEM: "64", RDMA: "1"}, {FPGA: "1"}, annotations={names.CLASS: K80}))
    )
    assert share == {names.GPU_MEM: "64", K80_KEY: "1", RDMA_KEY: "1"} | SLOT
    assert device == {FPGA_KEY: "1"} | SLOT


# What is refused.


@pytest.mark.parametrize(
    ("refused_pod", "says"),
    [
        pytest.param(
            pod({RDMA: "3"}),
            f"spec.containers[0].resources.limits[{RDMA_KEY}]: 3 devices of class {RDMA} are more than any node has "
            "(2); request at most 2",
            id="too many",
        ),
        pytest.param(
            pod({"cpu": "1"}, {RDMA: "2"}, {RDMA: "1"}),
            f"spec.containers[1].resources.limits[{RDMA_KEY}]: 3 devices of class {RDMA} together with the pod's other "
            "containers are more than any node has (2)",
            id="too many together",
        ),
        pytest.param(pod({RDMA: "0"}), f"limits[{RDMA_KEY}]: 0 is out of range", id="none of it"),
        pytest.param(
            pod({RDMA: "1", K80: "1", HALF: "1"}), "request one class in each container", id="two classes of GPUs"
        ),
        pytest.param(
            build.pod(init=[{"name": "i", "resources": {"limits": {RDMA: "1"}}}]),
            f"spec.initContainers[0].resources.limits[{RDMA_KEY}]: an ordinary init container cannot hold a device",
            id="an init container",
        ),
        pytest.param(
            pod({"roce.v2": "1"}), "there is no ResourceClass roce.v2; write ", id="a class that there is not"
        ),
    ],
)
def test_impossible_requests_are_refused_with_their_field(refused_pod: Json, says: str) -> None:
    assert says in refusal_of(refused_pod)


def test_missing_devices_wait_with_a_warning() -> None:
    key = f"spec.containers[0].resources.limits[{names.CLASS_PREFIX}nic]"
    assert validate_pod(after_mutation(pod({"nic": "1"}))).warnings == (
        f"{key}: no device of the class is in the cluster now; the pod waits until a node brings one",
    )
    waiting = after_mutation(pod({RDMA: "3", names.GPU_MEM: "99999"}))
    card, device = validate_pod(waiting, settings=WebhookSettings(oversize="wait")).warnings
    assert card.endswith("; the pod waits until a node with such a GPU joins")
    assert device.endswith("(2); the pod waits until a node with such a device joins")


def test_node_name_and_foreign_bindings_are_refused() -> None:
    once = after_mutation(pod({RDMA: "1"}))
    named = once | {"spec": once["spec"] | {"nodeName": "n1"}}
    assert validate_pod(named).message.startswith("spec.nodeName: ")
    known = Known(known_classes=CLASSES, pods={"default/p": once})
    assert not on_validate(binding(), "pods", known, sub="binding", name="p").allowed


@pytest.mark.parametrize("now", [None, f"{K80},{RDMA}", FPGA])
def test_device_annotation_of_another_webhook_is_refused(now: str | None) -> None:
    once = after_mutation(pod({RDMA: "1", K80: "1"}))
    kept = {key: text for key, text in once["metadata"]["annotations"].items() if key != names.DEVICE_CLASSES}
    changed = once | {
        "metadata": once["metadata"] | {"annotations": kept | ({names.DEVICE_CLASSES: now} if now else {})}
    }
    assert validate_pod(changed).message.startswith(f"metadata.annotations[{names.DEVICE_CLASSES}]: does not match")


# Classes and quotas.


def review_class(manifest: Json, *cards: Json, old: Json | None = None) -> review.Decision:
    operation = "UPDATE" if old else "CREATE"
    return on_validate(manifest, "resourceclasses", Known(card_labels=list(cards)), operation=operation, old=old)


RDMA_ONLY = {"matchLabels": {"kind": "rdma"}}


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (
            resource_class(selector=[RDMA_ONLY, {"matchLabels": {"kind": "nvidia-gpu"}}]),
            "spec.selector: selects GPUs and other devices",
        ),
        (
            resource_class(selector=[RDMA_ONLY, {"matchLabels": {"model": "Tesla K80"}}]),
            "spec.selector: selects GPUs and other devices",
        ),
        (
            resource_class(selector=RDMA_ONLY, share={"memoryMiB": 1}),
            "spec.share: is only for GPUs; a device is always given whole; leave it out",
        ),
    ],
)
def test_a_class_is_of_gpus_or_of_devices(manifest: Json, says: str) -> None:
    assert review_class(manifest).message.startswith(says)


def test_class_author_is_warned_about_no_match_and_changed_kind() -> None:
    assert review_class(resource_class(selector=RDMA_ONLY)).warnings == (
        "spec.selector: does not match any device now; pods that request big wait until one comes",
    )
    card = {"kind": "nvidia-gpu", "model": "Tesla K80"}
    (warning,) = review_class(
        resource_class(selector=RDMA_ONLY),
        {"kind": "rdma"},
        old=resource_class(selector={"matchLabels": {"model": "Tesla K80"}}),
    ).warnings
    assert warning.startswith(
        "spec.selector: the class selected GPUs and now selects other devices; pods that have requested big "
    )
    (back,) = review_class(
        resource_class(selector={"matchLabels": card}), card, old=resource_class(selector=RDMA_ONLY)
    ).warnings
    assert "selected other devices and now selects GPUs" in back
    assert (
        review_class(
            resource_class(selector=RDMA_ONLY), {"kind": "rdma"}, old=resource_class(selector=RDMA_ONLY)
        ).warnings
        == ()
    )
    assert (
        review_class(resource_class(selector=RDMA_ONLY), {"kind": "rdma"}, old=resource_class(selector={})).warnings
        == ()
    ), "it could not be read before"


def test_gpuquota_refuses_device_classes_with_the_remedy() -> None:
    quota = {"metadata": {"namespace": "a", "name": "q"}, "spec": {"hard": [{"class": RDMA, "shares": 1}]}}
    decision = on_validate(quota, "gpuquotas", KNOWN)
    assert decision.message == (
        f"spec.hard[0].class: {RDMA} is a class of devices other than GPUs, and a GPUQuota counts GPUs only; "
        f"write requests.{RDMA_KEY} in spec.hard of a ResourceQuota"
    )
    # A key that existed before the class counts nothing.
    known = Known(
        known_classes=CLASSES, cards_of={RDMA: CardSizes(max_cards=2)}, standings={"default": [standing(quota)]}
    )
    assert validate_pod(after_mutation(pod({RDMA: "2"}), known), known).allowed


def test_quotas_and_templates_take_bare_names_of_devices() -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {RDMA: "2", "pods": "1"}}}
    assert mutate_object(quota, "resourcequotas", KNOWN)["spec"]["hard"] == {f"requests.{RDMA_KEY}": "2", "pods": "1"}
    template = {"spec": {"containers": [{"name": "main", "resources": {"limits": {RDMA: "1", FPGA: "1", K80: "1"}}}]}}
    deployment = {"metadata": {"name": "d"}, "spec": {"template": template}}
    once = mutate_object(deployment, "deployments", KNOWN)
    container = once["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {RDMA_KEY: "1", FPGA_KEY: "1", K80_KEY: "1"}
    # Applying the same manifest adds the bare names again, next to the rewritten ones.
    container["resources"]["limits"] |= {RDMA: "1", FPGA: "1", K80: "1"}
    again = mutate_object(once, "deployments", KNOWN, operation="UPDATE", old=once)
    limits_now = again["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits_now == {RDMA_KEY: "1", FPGA_KEY: "1", K80_KEY: "1"}
