"""Pods that are applied again with the manifest that they were created with."""

from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import Unit
from tests.build import resource_class
from tests.webhook.reviews import Known, mutate_object, on_mutate, resource_classes
from webhook.pods.context import WebhookSettings

K80 = "nvidia.tesla.k80"
KNOWN = Known(known_classes=resource_classes(resource_class(K80), resource_class("half", share={"memoryMiB": "4Gi"})))
TAKE = WebhookSettings(nvidia_gpu="take")


def pod(limits: Json) -> Json:
    return {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}


def add_default_requests(manifest: Json) -> Json:
    """The pod with missing requests set to the limits, as the API server does."""
    spec = manifest["spec"]
    containers = []
    for container in spec["containers"]:
        limits = container["resources"]["limits"]
        requests = limits | container["resources"].get("requests", {})
        containers.append(container | {"resources": {"limits": limits, "requests": requests}})
    return manifest | {"spec": spec | {"containers": containers}}


def create_pod(limits: Json, settings: WebhookSettings = TAKE) -> Json:
    return add_default_requests(mutate_object(add_default_requests(pod(limits)), "pods", KNOWN, settings))


def merge_manifest(stored: Json, limits: Json) -> Json:
    """The stored pod merged with the manifest, as `kubectl apply` does."""
    (container,) = stored["spec"]["containers"]
    resources = container["resources"] | {"limits": container["resources"]["limits"] | limits}
    return add_default_requests(
        stored | {"spec": stored["spec"] | {"containers": [container | {"resources": resources}]}}
    )


def update_pod(new: Json, old: Json, **about: Any) -> Json:
    return mutate_object(new, "pods", about.pop("known", KNOWN), TAKE, operation="UPDATE", old=old, **about)


@pytest.mark.parametrize(
    "limits",
    [
        {K80: "1"},
        {K80: "2", "cpu": "1"},
        {"half": "2"},
        {f"cardwise.dev/{K80}": "1"},
        {K80: "1", names.GPU_MEM: "2Gi"},
        {K80: "2", names.GPU_MEM: "8Gi"},
        {names.GPU_MEM: "8Gi"},
        {names.GPU_MEM: "8e3"},
        {names.GPU_MEM: "8k"},
        {names.GPU_MEM: "8Gi", names.GPU_COUNT: "2"},
        {names.GPU_MEM: "8Gi", names.GPU_COUNT: "1"},
        {names.GPU_COUNT: "2"},
        {K80: "2", names.GPU_COUNT: "2"},
        {names.NVIDIA_GPU: "1"},
    ],
    ids=str,
)
def test_the_same_manifest_changes_nothing(limits: Json) -> None:
    stored = create_pod(limits)
    assert update_pod(merge_manifest(stored, limits), stored) == stored


def test_the_same_manifest_in_gib_changes_nothing() -> None:
    gib = WebhookSettings(unit=Unit.GIB)
    stored = create_pod({names.GPU_MEM: "2"}, gib)
    for text in ("2", "2Gi", "2048"):
        assert (
            mutate_object(
                merge_manifest(stored, {names.GPU_MEM: text}), "pods", KNOWN, gib, operation="UPDATE", old=stored
            )
            == stored
        )
    other = on_mutate(merge_manifest(stored, {names.GPU_MEM: "3"}), "pods", KNOWN, gib, operation="UPDATE", old=stored)
    assert "3 is not what the pod was created with (2048)" in other.message
    of_mib_days = create_pod({names.GPU_MEM: "8138"})
    same = merge_manifest(of_mib_days, {names.GPU_MEM: "8138"})
    assert mutate_object(same, "pods", KNOWN, gib, operation="UPDATE", old=of_mib_days) == of_mib_days


def test_reapply_works_without_the_class() -> None:
    stored = create_pod({"half": "1"})
    assert update_pod(merge_manifest(stored, {"half": "1"}), stored, known=Known()) == stored


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ({K80: "1"}, {K80: "2"}, f"[{K80}]: 2 is not what the pod was created with (1)"),
        ({names.GPU_MEM: "8Gi"}, {names.GPU_MEM: "9Gi"}, "[aliyun.com/gpu-mem]: 9Gi is not what"),
        ({names.GPU_COUNT: "1"}, {names.GPU_COUNT: "2"}, "[aliyun.com/gpu-count]: 2 is not what"),
        ({names.GPU_MEM: "8Gi"}, {names.GPU_COUNT: "2"}, "[aliyun.com/gpu-count]: 2 is not what"),
        ({names.GPU_MEM: "8Gi"}, {names.GPU_MEM: "x"}, "[aliyun.com/gpu-mem]: x is not what"),
    ],
)
def test_another_amount_is_refused_with_what_to_do(first: Json, then: Json, says: str) -> None:
    stored = create_pod(first)
    decision = on_mutate(merge_manifest(stored, then), "pods", KNOWN, TAKE, operation="UPDATE", old=stored)
    assert not decision.allowed
    assert decision.message.startswith(f"spec.containers[0].resources.limits{says}")
    assert decision.message.endswith("delete the pod and create it again")


@pytest.mark.parametrize(
    "then", [{"nvidia.tesla.p100": "1"}, {"cardwise.dev/half": "1"}, {"cpu": "2"}, {"big": "1"}], ids=str
)
def test_new_amounts_are_left_to_kubernetes(then: Json) -> None:
    stored = create_pod({K80: "1", "cpu": "1"})
    new = merge_manifest(stored, then)
    assert update_pod(new, stored) == new


def test_pod_without_a_share_is_not_changed() -> None:
    stored = add_default_requests(pod({names.GPU_MEM: "8Gi", names.GPU_COUNT: "1"}))
    new = merge_manifest(stored, {names.GPU_MEM: "8192", K80: "1"})
    assert update_pod(new, stored) == new


def test_an_exempt_namespace_is_left_alone() -> None:
    ours = create_pod({K80: "1"})
    assert update_pod(merge_manifest(ours, {K80: "1"}), ours, namespace="kube-system") == ours, "not exempt by itself"
    exempt = WebhookSettings(exempt_namespaces=frozenset({"kube-system"}))
    again = merge_manifest(ours, {K80: "1"})
    about = {"operation": "UPDATE", "old": ours, "namespace": "kube-system"}
    assert mutate_object(again, "pods", KNOWN, exempt, **about) == again


def test_annotations_of_a_placed_pod_are_not_touched() -> None:
    stored = create_pod({K80: "1"})
    stored["metadata"] |= {"annotations": {names.IDX: "0", names.ASSIGNMENT: "{}"}}
    stored["spec"] |= {"nodeName": "n1"}
    assert update_pod(merge_manifest(stored, {K80: "1"}), stored) == stored
