"""Requests for a type of card: the rewritten pod, and refusals."""

from typing import Any

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests import build
from tests.build import resource_class
from tests.webhook.classpods import K80, P100, pod
from tests.webhook.reviews import (
    Known,
    mutate_object,
    on_advise,
    on_defaults,
    on_mutate,
    on_validate,
    refusal,
    resource_classes,
)
from webhook.cluster.cards import CardSizes
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import WebhookSettings

K80_KEY, P100_KEY, HALF_KEY = (names.CLASS_PREFIX + name for name in (K80, P100, "k80-half"))
CLASSES = resource_classes(
    resource_class(K80),
    resource_class(P100, model="Tesla P100"),
    resource_class("k80-half", share={"memoryMiB": "5Gi", "corePercent": 40}),
    resource_class("rare", model="Tesla Rare"),
)
KNOWN = Known(
    known_classes=CLASSES,
    known_cards=CardSizes(MiB(16276), 3),
    cards_of={K80: CardSizes(MiB(11441), 2), P100: CardSizes(MiB(16276), 1), "k80-half": CardSizes(MiB(11441), 2)},
)
TAKE = WebhookSettings(nvidia_gpu="take")


def after_mutation(pod: Json, settings: WebhookSettings | None = None) -> Json:
    return mutate_object(pod, "pods", KNOWN, settings)


def limits_after(*limits: Json, settings: WebhookSettings | None = None, **kwargs: Any) -> list[Json]:
    return [
        c["resources"].get("limits", {}) for c in after_mutation(pod(*limits, **kwargs), settings)["spec"]["containers"]
    ]


def refusal_of(pod: Json, settings: WebhookSettings | None = None) -> str:
    return refusal(pod, KNOWN, settings)


def warnings(pod: Json, settings: WebhookSettings | None = None) -> tuple[str, ...]:
    decision = on_validate(after_mutation(pod), "pods", KNOWN, settings)
    assert decision.allowed, decision.message
    return decision.warnings


@pytest.mark.parametrize(
    ("limits", "is_now"),
    [
        pytest.param({K80: "1"}, {K80_KEY: "1", names.WHOLE_GPU: "1"}, id="bare: a whole GPU"),
        pytest.param({K80_KEY: "2"}, {K80_KEY: "2", names.WHOLE_GPU: "2"}, id="our spelling"),
        pytest.param({K80: "2", names.GPU_COUNT: "2"}, {K80_KEY: "2", names.WHOLE_GPU: "2"}, id="with the count"),
        pytest.param({K80: "1", names.GPU_MEM: "4Gi"}, {K80_KEY: "1", names.GPU_MEM: "4096"}, id="a share"),
        pytest.param({K80: "2", names.GPU_MEM: "8192"}, {K80_KEY: "2", names.GPU_MEM: "8192"}, id="a split share"),
        pytest.param(
            {HALF_KEY: "2"}, {HALF_KEY: "2", names.GPU_MEM: "10240", names.GPU_CORE: "80"}, id="shares of the class"
        ),
        pytest.param(
            {"k80-half": "1", names.GPU_CORE: "10"},
            {HALF_KEY: "1", names.GPU_MEM: "5120", names.GPU_CORE: "10"},
            id="own cores",
        ),
        pytest.param({"k80-half": "1", names.GPU_MEM: "64"}, {HALF_KEY: "1", names.GPU_MEM: "64"}, id="own memory"),
        pytest.param({"k80-half": "1", names.GPU_COUNT: "1"}, {HALF_KEY: "1", names.WHOLE_GPU: "1"}, id="own count"),
        pytest.param({K80: "1", K80_KEY: "1"}, {K80_KEY: "1", names.WHOLE_GPU: "1"}, id="both spellings"),
    ],
)
def test_a_class_by_any_spelling(limits: Json, is_now: Json) -> None:
    once = after_mutation(pod(limits))
    resources = once["spec"]["containers"][0]["resources"]
    assert resources["limits"] == is_now | {names.SHARE: "1"}
    assert resources["requests"].items() <= resources["limits"].items()
    assert K80 not in resources["requests"]
    assert after_mutation(once) == once
    assert request.parse_mutated(once) is not None


def test_split_share_of_a_class_differs_from_shares_of_one_card() -> None:
    def container_request(limits: Json) -> ContainerRequest:
        parsed = request.parse_mutated(after_mutation(pod(limits)))
        assert parsed is not None
        return parsed.containers[0]

    split, shares = container_request({K80: "2", names.GPU_MEM: "8192"}), container_request({"k80-half": "2"})
    assert (split.cards, split.mem, split.resource_class) == (2, 8192, K80)
    assert (shares.cards, shares.mem, shares.resource_class) == (1, 10240, "k80-half")


def test_copied_pod_keeps_its_shares_after_the_class_changed() -> None:
    once = after_mutation(pod({"k80-half": "2"}))
    larger = Known(known_classes=resource_classes(resource_class("k80-half", share={"memoryMiB": "8Gi"})))
    assert mutate_object(once, "pods", larger) == once


def test_a_stale_count_of_a_copied_pod_does_not_split_the_shares() -> None:
    once = after_mutation(pod({"k80-half": "1"}, annotations={names.GPU_COUNTS: "main=2"}))
    pod_request = request.parse_mutated(once)
    assert pod_request is not None
    assert pod_request.containers[0].cards == 1


def test_class_annotation_is_for_containers_without_a_class() -> None:
    class_annotation = {names.CLASS: K80}
    share, own, none = limits_after({names.GPU_MEM: "64"}, {P100: "1"}, {"cpu": "1"}, annotations=class_annotation)
    assert share == {names.GPU_MEM: "64", K80_KEY: "1", names.SHARE: "1"}
    assert own == {names.WHOLE_GPU: "1", P100_KEY: "1", names.SHARE: "1"}
    assert none == {"cpu": "1"}
    split = limits_after({names.GPU_MEM: "64", names.GPU_COUNT: "2"}, annotations=class_annotation)
    assert split == [{names.GPU_MEM: "64", K80_KEY: "2", names.SHARE: "1"}]


def test_first_container_gets_one_unit_without_a_request() -> None:
    half = {names.CLASS: "k80-half"}
    assert limits_after({}, {}, annotations=half)[0] == {
        HALF_KEY: "1", names.GPU_MEM: "5120", names.GPU_CORE: "40", names.SHARE: "1",
    }  # fmt: skip
    once = after_mutation(pod({"cpu": "1"}, annotations={names.CLASS: K80}))
    assert once["metadata"]["annotations"][names.CLASS] == K80
    assert once["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": "1", K80_KEY: "1", names.WHOLE_GPU: "1", names.SHARE: "1",
    }  # fmt: skip
    assert after_mutation(once) == once


@pytest.mark.parametrize("resource", [names.NVIDIA_GPU, "nvidia.com/mig-1g.5gb", "nvidia.com/" + "x" * 5000])
def test_class_annotation_beside_devices_of_nvidias_plugin_alone_is_refused_with_the_remedy(resource: str) -> None:
    """Such a pod gets no GPU of the class, and /validate would blame another webhook for the annotation."""
    plain = pod({resource: "1"}, {"cpu": "1"}, annotations={names.CLASS: K80})
    decision = on_mutate(plain, "pods", KNOWN)
    shown = resource if len(resource) < 100 else wording.quote_text(resource)
    assert decision.message == (
        f"metadata.annotations[{names.CLASS}]: no container requests a GPU of Cardwise, and {shown} belongs to "
        f"NVIDIA's device plugin; write {names.GPU_COUNT} in its place for whole GPUs of {K80}, or "
        "remove the annotation"
    )
    job = {"spec": {"template": {key: plain[key] for key in ("metadata", "spec")}}}
    assert on_advise(job, "jobs", KNOWN).warnings == (
        f"spec.template.{decision.message}; its pods will be refused",
    )  # fmt: skip


def test_class_annotation_beside_devices_of_nvidias_plugin_is_for_requests_of_cardwise() -> None:
    limits = ({names.NVIDIA_GPU: "1"}, {names.GPU_MEM: "64"})
    assert limits_after(*limits, annotations={names.CLASS: K80})[1][K80_KEY] == "1"
    whole_card = limits_after({names.NVIDIA_GPU: "1"}, annotations={names.CLASS: K80}, settings=TAKE)
    assert whole_card == [{names.WHOLE_GPU: "1", K80_KEY: "1", names.SHARE: "1"}]
    without_nvidia = limits_after({names.NVIDIA_GPU: "0"}, annotations={names.CLASS: K80})
    assert without_nvidia[0][K80_KEY] == "1"


def test_class_annotation_takes_precedence_over_namespace_defaults() -> None:
    known = Known(known_classes=CLASSES, namespaces={"default": Defaults("1Gi", "spread")})
    plain = pod({}, annotations={names.CLASS: K80})
    decision = on_defaults(plain, "pods", known)
    assert decision.allowed
    assert not any(names.GPU_MEM.replace("/", "~1") in str(step) for step in decision.patch)
    assert any(names.WHOLE_GPU in str(step) for step in decision.patch)


@pytest.mark.parametrize(
    ("limits", "is_now"),
    [
        ({names.NVIDIA_GPU: "2"}, {names.WHOLE_GPU: "2", names.SHARE: "1"}),
        ({names.NVIDIA_GPU: "1", K80: "1"}, {names.WHOLE_GPU: "1", K80_KEY: "1", names.SHARE: "1"}),
        ({names.NVIDIA_GPU: "0"}, {names.NVIDIA_GPU: "0"}),
    ],
)
def test_nvidia_gpu_means_whole_cards_with_the_setting(limits: Json, is_now: Json) -> None:
    assert limits_after(limits, settings=TAKE) == [is_now]


def test_nvidia_gpu_is_left_alone_by_default() -> None:
    plain = pod({names.NVIDIA_GPU: "2"})
    assert after_mutation(plain) == plain


@pytest.mark.parametrize(
    "name", ["cpu", "memory", "hugepages-2Mi", "gpu", "foo", "requests.cpu", "Not.A.Class", "../x"]
)
def test_unknown_bare_names_are_left_to_kubernetes(name: str) -> None:
    plain = pod({name: "1"})
    assert after_mutation(plain) == plain


@pytest.mark.parametrize(
    ("refused_pod", "says"),
    [
        pytest.param(
            pod({K80: "1", P100: "1"}),
            f"spec.containers[0].resources.limits[{P100_KEY}]: {K80_KEY} is also requested; "
            "request one class in each container",
            id="two classes",
        ),
        pytest.param(
            pod({K80: "1", K80_KEY: "2"}),
            f"spec.containers[0].resources.limits[{K80_KEY}]: 2 differs from {K80}, which has the same meaning and "
            f"the value 1; write only {K80}",
            id="two amounts",
        ),
        pytest.param(pod({K80: "0"}), f"limits[{K80_KEY}]: 0 is out of range", id="none of it"),
        pytest.param(pod({K80: "2", names.GPU_COUNT: "1"}), f"differs from {K80_KEY}", id="another count"),
        pytest.param(
            pod({"nvidia.tesla.k81": "1"}),
            "spec.containers[0].resources.limits[cardwise.dev/nvidia.tesla.k81]: there is no ResourceClass "
            f"nvidia.tesla.k81; write {K80}, {P100}, ",
            id="no such class",
        ),
        pytest.param(pod({"nvidia.tesla.k81": "1"}), "(kubectl get resourceclass)", id="how to find them"),
        pytest.param(
            pod({}, annotations={names.CLASS: "k81"}),
            f"metadata.annotations[{names.CLASS}]: there is no ResourceClass k81; write ",
            id="no such class by annotation",
        ),
        pytest.param(
            pod({}, annotations={names.CLASS: "A b"}),
            f"metadata.annotations[{names.CLASS}]: 'A b' is not a name of a class",
            id="no name by annotation",
        ),
        pytest.param(
            pod({"k80-half": "3"}),
            f"limits[{HALF_KEY}]: 3 of k80-half are 120 percent of one GPU's SMs; request at most 2",
            id="more cores than a GPU",
        ),
        pytest.param(
            pod({K80: "1", names.GPU_MEM: "11442"}),
            f"limits[{names.GPU_MEM}]: 11442 MiB is more than the largest GPU of class {K80} has (11441); "
            "request at most 11441Mi, or split it",
            id="larger than GPUs of the class",
        ),
        pytest.param(
            pod({"k80-half": "3", names.GPU_CORE: "1"}),
            f"limits[{HALF_KEY}]: 15360 MiB (15 GiB) is more than the largest GPU of class k80-half has (11441); "
            "request at most 2, because one of the class is 5120 MiB",
            id="more shares than a GPU",
        ),
        pytest.param(
            pod({"cardwise.dev/gpu-mem": "1"}),
            "limits[cardwise.dev/gpu-mem]: there is no ResourceClass gpu-mem; did you mean aliyun.com/gpu-mem?",
            id="another domain",
        ),
        pytest.param(
            pod({K80: "3"}), f"limits[{K80_KEY}]: 3 GPUs of class {K80} are more than any node has (2)", id="too many"
        ),
        pytest.param(
            pod({K80: "2"}, {names.GPU_COUNT: "2"}), "4 GPUs are more than any node has (3)", id="too many together"
        ),
    ],
)
def test_impossible_requests_are_refused_with_their_field(refused_pod: Json, says: str) -> None:
    assert says in refusal_of(refused_pod)


def test_a_bare_name_in_an_ordinary_init_container_is_refused() -> None:
    with_init = build.pod(init=[{"name": "i", "resources": {"limits": {K80: "1"}}}])
    assert refusal_of(with_init).startswith(
        f"spec.initContainers[0].resources.limits[{K80_KEY}]: an ordinary init container"
    )


def test_each_type_of_a_pod_is_compared_with_its_own_cards() -> None:
    assert refusal_of(pod({K80: "1", names.GPU_MEM: "9000"}, {P100: "1", names.GPU_MEM: "9000"})) == ""
    assert "more than the largest GPU of class" in refusal_of(
        pod({K80: "1", names.GPU_MEM: "9000"}, {K80: "1", names.GPU_MEM: "9000"})
    )


def test_refusal_names_the_ten_most_similar_classes() -> None:
    twenty_classes = Known(
        known_classes=resource_classes(*(resource_class(f"class-{i:02}") for i in range(30)), resource_class(K80))
    )
    asking = mutate_object(pod({"nvidia.tesla.k8": "1"}), "pods", twenty_classes)
    message = on_validate(asking, "pods", twenty_classes).message
    assert f"write {K80}, " in message
    assert message.count("class-") == 9
    assert "or one of 21 more" in message


def test_pod_of_a_class_without_cards_waits_with_a_warning() -> None:
    key = f"{names.CLASS_PREFIX}rare"
    problem = "no GPU of the class is in the cluster now; the pod waits until a node brings one"
    assert warnings(pod({"rare": "1"})) == (f"spec.containers[0].resources.limits[{key}]: {problem}",)


def test_too_large_pods_wait_with_the_setting() -> None:
    messages = warnings(pod({K80: "1", names.GPU_MEM: "11442"}), WebhookSettings(oversize="wait"))
    assert len(messages) == 1
    assert messages[0].endswith("; the pod waits until a node with such a GPU joins")
