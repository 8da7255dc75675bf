"""Pods and templates of unrealistic size are refused before they are processed."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.isolation import Isolation
from cardwise.core.values.decoded import Json
from cardwise.kube import wire
from cardwise.kube.pods.nodeconstraints import MAX_AFFINITY_CONDITIONS
from tests.build import container, pod, resource_class
from tests.webhook.reviews import Known, on_defaults, on_mutate, on_validate, refusal, resource_classes
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import AgentSettings, WebhookSettings
from webhook.server import sizes
from webhook.server.review import Decision, UndecodableReview

Decides = Callable[..., Decision]


def pod_with_resource_names(count: int) -> Json:
    """A pod that requests a share and names `count` resources."""
    limits = {f"no.class-{i}": "1" for i in range(count - 1)} | {names.GPU_MEM: "8"}
    return pod("big", containers=[container() | {"resources": {"limits": limits}}])


def of_containers(count: int) -> Json:
    return pod("big", containers=[container(f"c{i}", gpu_mem=8) for i in range(count)])


def of_annotations(count: int) -> Json:
    return pod("big", gpu_mem=8, annotations={f"a{i}": "" for i in range(count)})


def of_bytes(count: int) -> Json:
    manifest = pod("big", gpu_mem=8)
    manifest["spec"]["hostname"] = ""
    manifest["spec"]["hostname"] = "x" * (count - len(wire.trim_object(json.dumps(manifest).encode())))
    return manifest


def in_containers(field: str, count: int) -> Json:
    """A pod with the entries in two containers, half in each."""
    halves = [[{"name": f"N{i}", "mountPath": "/m"} for i in range(n)] for n in (count // 2, count - count // 2)]
    return pod("big", containers=[container(f"c{i}", gpu_mem=8) | {field: half} for i, half in enumerate(halves)])


def in_spec(field: str, count: int) -> Json:
    manifest = pod("big", gpu_mem=8)
    manifest["spec"][field] = [{"name": f"n{i}"} for i in range(count)]
    return manifest


def of_selectors(count: int) -> Json:
    manifest = pod("big", gpu_mem=8)
    manifest["spec"]["nodeSelector"] = {f"l{i}": "" for i in range(count)}
    return manifest


def of_affinity(field: str, count: int) -> Json:
    """A pod with the conditions in two terms of the field, half in each."""
    conditions = [{"key": f"l{i}", "operator": "Exists"} for i in range(count)]
    terms = [{"matchExpressions": conditions[::2]}, {"matchExpressions": conditions[1::2]}]
    preferred = [{"weight": 1, "preference": term} for term in terms]
    content = {"nodeSelectorTerms": terms} if field.startswith("required") else preferred
    manifest = pod("big", gpu_mem=8)
    manifest["spec"]["affinity"] = {"nodeAffinity": {field: content}}
    return manifest


def of_labels(count: int) -> Json:
    manifest = pod("big", gpu_mem=8)
    manifest["metadata"]["labels"] = {f"l{i}": "" for i in range(count)}
    return manifest


def of_finalizers(count: int) -> Json:
    manifest = pod("big", gpu_mem=8)
    manifest["metadata"]["finalizers"] = [f"example.com/f{i}" for i in range(count)]
    return manifest


def of_annotation_bytes(count: int) -> Json:
    return pod("big", gpu_mem=8, annotations={"a": "ä" * 1024, "b": "x" * (count - 2 * 1024 - 2)})


def refusal_message(decide: Decides, manifest: Json, resource: str = "pods") -> str:
    try:
        return decide(manifest, resource, Known(namespaces={"default": Defaults("1Gi")})).message
    except UndecodableReview as error:
        return str(error)


SHAPES = pytest.mark.parametrize(
    ("shape", "limit", "says"),
    [
        (
            pod_with_resource_names,
            sizes.MAX_RESOURCE_NAMES,
            "spec.containers: the containers name {} different resources",
        ),
        (of_containers, sizes.MAX_CONTAINERS, "spec.containers: {} containers are too many"),
        (of_annotations, sizes.MAX_ANNOTATIONS, "metadata.annotations: {} are too many"),
        (of_labels, sizes.MAX_METADATA_ENTRIES, "metadata.labels: {} are too many"),
        (of_finalizers, sizes.MAX_METADATA_ENTRIES, "metadata.finalizers: {} are too many"),
        (partial(in_containers, "env"), sizes.MAX_CONTAINER_ENTRIES, "spec.containers[1].env: more than"),
        (
            partial(in_containers, "volumeMounts"),
            sizes.MAX_CONTAINER_ENTRIES,
            "spec.containers[1].volumeMounts: more than",
        ),
        (partial(in_spec, "schedulingGates"), sizes.MAX_ENTRIES, "spec.schedulingGates: {} are too many"),
        (of_selectors, sizes.MAX_ENTRIES, "spec.nodeSelector: {} are too many"),
        (partial(in_spec, "tolerations"), sizes.MAX_ENTRIES, "spec.tolerations: {} are too many"),
        *(
            (
                partial(of_affinity, f"{kind}DuringSchedulingIgnoredDuringExecution"),
                MAX_AFFINITY_CONDITIONS,
                "spec.affinity.nodeAffinity: {} conditions are too many",
            )
            for kind in ("required", "preferred")
        ),
        (
            of_annotation_bytes,
            sizes.MAX_ANNOTATION_BYTES,
            "metadata.annotations: the annotations have 128 KiB, which is too much",
        ),
        (of_bytes, sizes.MAX_BYTES, "metadata: the object has 512 KiB, too much"),
    ],
)


@SHAPES
@pytest.mark.parametrize("decide", [on_mutate, on_defaults, on_validate])
def test_a_pod_has_limits(shape: Callable[[int], Json], limit: int, says: str, decide: Decides) -> None:
    message = refusal_message(decide, shape(limit + 1))
    assert message.startswith(says.format(limit + 1))
    assert str(limit >> 10 if shape in (of_bytes, of_annotation_bytes) else limit) in message.partition("; ")[2]
    assert "too m" not in refusal_message(decide, shape(limit))


ADDS_ALL = WebhookSettings(
    runtime_class="nvidia",
    isolation=Isolation.MPS,
    share_agent=AgentSettings(choice="always", image="agent"),
    scheduler="gpu-scheduler",
    gang_schedulers=frozenset({"gpu-scheduler", "default-scheduler"}),
    tolerated=tuple({"key": f"taint-{i}", "operator": "Exists"} for i in range(16)),
)


def in_all_containers(field: str, count: int) -> Json:
    """As `in_containers`, in as many containers as a pod may have."""
    manifest = of_containers(sizes.MAX_CONTAINERS)
    for i in range(count):
        entries = manifest["spec"]["containers"][i % sizes.MAX_CONTAINERS].setdefault(field, [])
        entries.append({"name": f"N{i}", "mountPath": f"/m{i}"})
    return manifest


LARGEST: list[tuple[Callable[[int], Json], int]] = [
    *((shape, limit) for shape, limit, _ in (mark for mark in SHAPES.args[1])),
    (partial(in_all_containers, "env"), sizes.MAX_CONTAINER_ENTRIES),
    (partial(in_all_containers, "volumeMounts"), sizes.MAX_CONTAINER_ENTRIES),
    (partial(in_spec, "volumes"), sizes.MAX_ENTRIES),
]


@pytest.mark.parametrize(("shape", "limit"), LARGEST)
@pytest.mark.parametrize("is_member", [False, True])
def test_what_the_webhook_adds_does_not_count(shape: Callable[[int], Json], limit: int, is_member: bool) -> None:
    """The API server calls the webhook again with the pod that it has rewritten, and then to validate it."""
    manifest = shape(limit - 200 * is_member if shape is of_bytes else limit)
    if is_member:
        group = {names.GROUP_NAME: "g", names.GROUP_NUM: "1"}
        manifest["metadata"]["annotations"] = group | manifest["metadata"].get("annotations", {})
        for key in [key for key in manifest["metadata"]["annotations"] if key.startswith("a")][-len(group) :]:
            del manifest["metadata"]["annotations"][key]
    known = Known(
        namespaces={"default": Defaults(frameworks="on", policy="spread", isolation="mps")},
        scopes=frozenset({"all"}),
        known_classes=resource_classes(resource_class("no")),
    )
    message = refusal(manifest, known, ADDS_ALL)
    assert "too m" not in message


def test_a_rewritten_pod_has_limits_too() -> None:
    for shape, limit in LARGEST:
        manifest = shape(4 * limit)
        for spec in manifest["spec"]["containers"]:
            spec["resources"]["limits"][names.SHARE] = "1"
        assert "too m" in refusal_message(on_mutate, manifest), shape


def test_what_the_extender_has_added_does_not_keep_a_pod_from_updates() -> None:
    written = {f"{names.GROUP}/devices.{i}": "x" * 300 for i in range(600)}
    manifest = pod("big", gpu_mem=8, annotations=written)
    assert "too m" not in on_mutate(manifest, "pods", Known(), operation="UPDATE", old=manifest).message
    manifest = of_annotations(sizes.MAX_ANNOTATIONS + 100)
    assert "too many" in on_mutate(manifest, "pods", Known(), operation="UPDATE", old=manifest).message


@pytest.mark.parametrize("decide", [on_mutate, on_defaults, on_validate])
def test_a_pod_has_a_limited_number_of_card_requests(decide: Decides) -> None:
    def of_whole_cards(count: int) -> Json:
        return pod("big", containers=[container(f"c{i}", whole_gpu=1) for i in range(count)])

    message = refusal_message(decide, of_whole_cards(request.MAX_CARD_REQUESTS + 1))
    field = f"spec.containers[{request.MAX_CARD_REQUESTS}].resources.limits"
    assert message.startswith(f"{field}: the pod has more than {request.MAX_CARD_REQUESTS} separate GPU requests; ")
    assert "separate" not in refusal_message(decide, of_whole_cards(request.MAX_CARD_REQUESTS))


@SHAPES
def test_a_template_has_the_same(shape: Callable[[int], Json], limit: int, says: str) -> None:
    template = {"metadata": (shaped := shape(limit + 1))["metadata"], "spec": shaped["spec"]}
    message = refusal_message(on_mutate, {"metadata": {}, "spec": {"template": template}}, "deployments")
    prefix = "" if shape is of_bytes else "spec.template."
    assert message.startswith(prefix + says.format(limit + 1))


def test_an_update_of_a_pod_has_the_same() -> None:
    larger = of_containers(sizes.MAX_CONTAINERS + 1)
    assert "too many" in on_mutate(larger, "pods", Known(), operation="UPDATE", old=of_containers(1)).message


def test_existing_large_lists_may_change() -> None:
    manifest = in_containers("env", sizes.MAX_CONTAINER_ENTRIES + 2)
    template = {"metadata": {}, "spec": {"template": {"spec": manifest["spec"]}}}
    for resource, written in (("pods", manifest), ("deployments", template)):
        for decide in (on_mutate, on_validate):
            assert decide(written, resource, Known(), operation="UPDATE", old=written).allowed


@pytest.mark.parametrize(
    ("resource", "decide", "field", "entries"),
    [
        ("resourcequotas", on_mutate, "hard", lambda n: {f"n{i}": "1" for i in range(n)}),
        ("limitranges", on_mutate, "limits", lambda n: [{"max": {"cpu": "1"}}] * n),
        ("resourceclasses", on_mutate, "selector", lambda n: {f"n{i}": "1" for i in range(n)}),
        ("resourceclasses", on_validate, "selector", lambda n: {f"n{i}": "1" for i in range(n)}),
        ("gpuquotas", on_validate, "hard", lambda n: [{"memoryMiB": 1}] * n),
        ("namespaces", on_validate, "finalizers", lambda n: [str(i) for i in range(n)]),
    ],
)
def test_other_objects_have_limits(resource: str, decide: Decides, field: str, entries: Callable[[int], Any]) -> None:
    over = sizes.MAX_SPEC_ENTRIES + 1
    message = refusal_message(decide, {"metadata": {"name": "n"}, "spec": {field: entries(over)}}, resource)
    assert message == f"spec.{field}: {over} entries are too many; write at most {sizes.MAX_SPEC_ENTRIES}"
    large = {"metadata": {"name": "n", "annotations": {"a": "x" * sizes.MAX_BYTES}}}
    assert refusal_message(decide, large, resource).startswith("metadata: the object has 512 KiB")
