"""Bare names in the templates of workloads: rewriting, and removal of stale keys."""

import json
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.build import resource_class
from tests.webhook.reviews import Known, mutate_object, mutate_object_twice, on_advise, on_mutate, resource_classes
from webhook.pods.context import WebhookSettings

K80, P100 = "nvidia.tesla.k80", "nvidia.tesla.p100"
K80_KEY, P100_KEY = names.CLASS_PREFIX + K80, names.CLASS_PREFIX + P100
KNOWN = Known(known_classes=resource_classes(resource_class(K80), resource_class("big"), resource_class(P100)))
TAKE = WebhookSettings(nvidia_gpu="take")
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

AT = {
    "deployments": ("spec",),
    "replicasets": ("spec",),
    "statefulsets": ("spec",),
    "daemonsets": ("spec",),
    "jobs": ("spec",),
    "replicationcontrollers": ("spec",),
    "cronjobs": ("spec", "jobTemplate", "spec"),
    "podtemplates": (),
}


def workload(limits: Json, resource: str = "deployments", **annotations: Any) -> Json:
    """`applied`: what `kubectl apply` last applied as limits; `record`: the keys that the webhook wrote."""
    template = {"spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]}}
    inner: Json = {"template": template}
    for name in reversed(AT[resource]):
        inner = {name: inner}
    texts = {}
    if "applied" in annotations:
        texts[LAST_APPLIED] = json.dumps(workload(annotations["applied"], resource))
    if annotations.get("record"):
        texts[names.REWRITTEN] = json.dumps({"main": annotations["record"]})
    return inner | {"metadata": {"name": "w", "annotations": texts}}


def container(manifest: Json, resource: str = "deployments") -> Json:
    for name in AT[resource]:
        manifest = manifest[name]
    first: Json = manifest["template"]["spec"]["containers"][0]
    return first


def limits(manifest: Json, resource: str = "deployments") -> Json:
    amounts: Json = container(manifest, resource)["resources"]["limits"]
    return amounts


def record(manifest: Json) -> Json | None:
    text = manifest["metadata"]["annotations"].get(names.REWRITTEN)
    return None if text is None else json.loads(text)


def update(new: Json, old: Json, resource: str = "deployments", settings: WebhookSettings | None = None) -> Json:
    return mutate_object_twice(new, resource, KNOWN, settings, operation="UPDATE", old=old)


@pytest.mark.parametrize("resource", sorted(AT))
def test_every_template_takes_the_bare_name(resource: str) -> None:
    new = mutate_object(workload({K80: "1", "cpu": "1"}, resource), resource, KNOWN)
    assert limits(new, resource) == {K80_KEY: "1", "cpu": "1"}
    assert record(new) == {"main": [K80_KEY]}
    assert mutate_object(new, resource, KNOWN) == new
    assert "env" not in container(new, resource), "only names are rewritten"


def test_requests_and_init_containers_are_rewritten_too() -> None:
    manifest = workload({K80: "1"})
    container(manifest)["resources"]["requests"] = {K80: "1"}
    manifest["spec"]["template"]["spec"]["initContainers"] = [{"name": "side", "resources": {"limits": {"big": 2}}}]
    spec = mutate_object(manifest, "deployments", KNOWN)["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"] == {"limits": {K80_KEY: "1"}, "requests": {K80_KEY: "1"}}
    assert spec["initContainers"][0]["resources"] == {"limits": {"cardwise.dev/big": 2}}


@pytest.mark.parametrize("name", ["cpu", "foo", names.GPU_MEM, K80_KEY, names.NVIDIA_GPU, "hugepages-1Gi"])
def test_accepted_and_unknown_names_are_not_changed(name: str) -> None:
    manifest = workload({name: "1"})
    assert mutate_object(manifest, "deployments", KNOWN) == manifest


def test_exempt_namespaces_are_left_alone() -> None:
    manifest = workload({K80: "1"})
    settings = WebhookSettings(exempt_namespaces=frozenset({"kube-system"}))
    assert mutate_object(manifest, "deployments", KNOWN, settings, namespace="kube-system") == manifest


def test_missing_class_is_reported_once() -> None:
    manifest = workload({"nvidia.tesla.k81": "1"})
    decision = on_mutate(manifest, "deployments", KNOWN)
    assert (decision.allowed, decision.warnings) == (True, ())
    after = mutate_object(manifest, "deployments", KNOWN)
    (warning,) = on_advise(after, "deployments", KNOWN).warnings
    assert "limits[cardwise.dev/nvidia.tesla.k81]: there is no ResourceClass nvidia.tesla.k81; write " in warning
    assert warning.endswith("; its pods will be refused")


def test_two_spellings_with_different_amounts_are_refused() -> None:
    message = on_mutate(workload({K80_KEY: "1", K80: "2"}), "deployments", KNOWN).message
    assert message == (
        f"spec.template.spec.containers[0].resources.limits[{K80}]: 2 differs from {K80_KEY}, which has the same "
        f"meaning and the value 1; write only {K80}"
    )


def stored(limits: Json, applied: Json, keys: list[str], resource: str = "deployments") -> Json:
    return workload(limits, resource, applied=applied, record=keys)


@pytest.mark.parametrize("resource", ["deployments", "cronjobs"])
def test_another_class_or_amount_by_apply_leaves_no_stale_key(resource: str) -> None:
    old = stored({K80_KEY: "1"}, {K80: "1"}, [K80_KEY], resource)
    other = update(stored({K80_KEY: "1", P100: "1"}, {P100: "1"}, [K80_KEY], resource), old, resource)
    assert limits(other, resource) == {P100_KEY: "1"}
    assert record(other) == {"main": [P100_KEY]}
    changed = update(stored({K80_KEY: "1", K80: "2"}, {K80: "2"}, [K80_KEY], resource), old, resource)
    assert limits(changed, resource) == {K80_KEY: "2"}


def test_another_class_without_apply_leaves_no_stale_key() -> None:
    old = workload({K80_KEY: "1"}, record=[K80_KEY])
    new = update(workload({K80_KEY: "1", P100: "1"}, record=[K80_KEY]), old)
    assert limits(new) == {P100_KEY: "1"}


def test_manifest_without_a_class_drops_the_rewritten_key() -> None:
    old = stored({K80_KEY: "1"}, {K80: "1"}, [K80_KEY])
    new = update(stored({K80_KEY: "1", names.GPU_MEM: "9"}, {names.GPU_MEM: "9"}, [K80_KEY]), old)
    assert limits(new) == {names.GPU_MEM: "9"}
    assert record(new) is None
    assert LAST_APPLIED in new["metadata"]["annotations"]


def test_manifest_with_the_stored_key_keeps_it() -> None:
    old = stored({K80_KEY: "1"}, {K80: "1"}, [K80_KEY])
    assert limits(update(stored({K80_KEY: "1"}, {K80_KEY: "1"}, [K80_KEY]), old)) == {K80_KEY: "1"}


def server_side(manifest: Json, *limits: Json, resource: str = "deployments", operation: str = "Apply") -> Json:
    """managedFields as the API server writes them for the applied manifest."""
    managed = []
    for amounts in limits:
        inner: Json = {
            "f:template": {
                "f:spec": {
                    "f:containers": {
                        'k:{"name":"main"}': {
                            ".": {},
                            "f:name": {},
                            "f:resources": {"f:limits": {f"f:{name}": {} for name in amounts}},
                        },
                        'k:{"name":"other"}': {"f:resources": {"f:limits": {f"f:{K80}": {}}}},
                    }
                }
            }
        }
        for name in reversed(AT[resource]):
            inner = {f"f:{name}": inner}
        managed.append({"manager": "flux", "operation": operation, "fieldsType": "FieldsV1", "fieldsV1": inner})
    return manifest | {"metadata": manifest["metadata"] | {"managedFields": managed}}


@pytest.mark.parametrize("resource", ["deployments", "cronjobs", "podtemplates"])
def test_server_side_apply_without_the_class_leaves_no_stale_key(resource: str) -> None:
    old = server_side(workload({K80_KEY: "1"}, resource, record=[K80_KEY]), {K80: "1"}, resource=resource)
    leftover = workload({K80_KEY: "1", names.GPU_MEM: "9"}, resource, record=[K80_KEY])
    new = update(server_side(leftover, {names.GPU_MEM: "9"}, resource=resource), old, resource)
    assert limits(new, resource) == {names.GPU_MEM: "9"}
    assert record(new) is None


def test_server_side_apply_of_another_class_by_its_long_name_leaves_no_stale_key() -> None:
    old = server_side(workload({K80_KEY: "1"}, record=[K80_KEY]), {K80: "1"})
    two_classes = workload({K80_KEY: "1", P100_KEY: "1"}, record=[K80_KEY])
    assert limits(update(server_side(two_classes, {P100_KEY: "1"}), old)) == {P100_KEY: "1"}
    assert limits(update(server_side(workload({K80_KEY: "2"}, record=[K80_KEY]), {K80_KEY: "2"}), old)) == {
        K80_KEY: "2"
    }


def test_key_of_another_applier_stays() -> None:
    old = server_side(workload({K80_KEY: "1"}, record=[K80_KEY]), {K80: "1"}, {K80: "1"})
    new = server_side(workload({K80_KEY: "1"}, record=[K80_KEY]), {"cpu": "1"}, {K80: "1"})
    assert limits(update(new, old)) == {K80_KEY: "1"}


def test_fields_of_other_operations_do_not_count() -> None:
    old = server_side(workload({K80_KEY: "1"}, record=[K80_KEY]), {K80: "1"}, operation="Update")
    new = server_side(workload({K80_KEY: "1"}, record=[K80_KEY]), {"cpu": "1"}, operation="Update")
    assert limits(update(new, old)) == {K80_KEY: "1"}


def test_the_template_of_a_job_stays_as_it_is_by_server_side_apply_too() -> None:
    old = server_side(workload({K80_KEY: "1"}, "jobs", record=[K80_KEY]), {K80: "1"}, resource="jobs")
    new = server_side(workload({K80_KEY: "1"}, "jobs", record=[K80_KEY]), {"cpu": "1"}, resource="jobs")
    assert limits(update(new, old, "jobs"), "jobs") == {K80_KEY: "1"}


def test_nvidia_gpu_that_becomes_gpu_count_leaves_no_stale_key() -> None:
    old = stored({names.WHOLE_GPU: "1"}, {names.NVIDIA_GPU: "1"}, [names.WHOLE_GPU])
    new = stored({names.WHOLE_GPU: "1", names.GPU_COUNT: "2"}, {names.GPU_COUNT: "2"}, [names.WHOLE_GPU])
    assert limits(update(new, old, settings=TAKE)) == {names.GPU_COUNT: "2"}


def test_keys_of_the_user_are_never_dropped() -> None:
    old = stored({K80_KEY: "1"}, {K80_KEY: "1"}, [])
    assert limits(update(stored({K80_KEY: "1"}, {"cpu": "1"}, []), old)) == {K80_KEY: "1"}


@pytest.mark.parametrize("resource", sorted(AT))
def test_other_updates_change_nothing(resource: str) -> None:
    """Updates by a controller or `kubectl scale`, of a workload that was created with a bare name or patched since."""
    for applied in ({K80: "1"}, {"cpu": "1"}):
        old = stored({K80_KEY: "1"}, applied, [K80_KEY], resource)
        new = json.loads(json.dumps(old))
        new["metadata"]["labels"] = {"touched": "yes"}
        assert on_mutate(new, resource, KNOWN, TAKE, operation="UPDATE", old=old).patch == []


def test_patched_bare_name_stays() -> None:
    old = stored({"cpu": "1"}, {"cpu": "1"}, [])
    new = update(stored({"cpu": "1", K80: "1"}, {"cpu": "1"}, []), old)
    assert limits(new) == {"cpu": "1", K80_KEY: "1"}
    assert limits(update(new, new)) == {"cpu": "1", K80_KEY: "1"}


def test_the_template_of_a_job_stays_as_it_is() -> None:
    """Otherwise Kubernetes would refuse the update, although it only omits a name that is not stored."""
    old = stored({K80_KEY: "1"}, {K80: "1"}, [K80_KEY], "jobs")
    new = stored({K80_KEY: "1"}, {"cpu": "1"}, [K80_KEY], "jobs")
    assert on_mutate(new, "jobs", KNOWN, operation="UPDATE", old=old).patch == []  # fmt: skip
    again = update(stored({K80_KEY: "1", K80: "1"}, {K80: "1"}, [K80_KEY], "jobs"), old, "jobs")
    assert limits(again, "jobs") == {K80_KEY: "1"}


def test_nvidia_gpu_is_rewritten_only_if_new() -> None:
    manifest = workload({names.NVIDIA_GPU: "1"})
    assert mutate_object(manifest, "deployments", KNOWN) == manifest
    rewritten = mutate_object(manifest, "deployments", KNOWN, TAKE)
    assert limits(rewritten) == {names.WHOLE_GPU: "1"}
    assert record(rewritten) == {"main": [names.WHOLE_GPU]}
    assert update(manifest, manifest, settings=TAKE) == manifest, "an update must not roll out"
    applied = workload({names.WHOLE_GPU: "1", names.NVIDIA_GPU: "2"}, record=[names.WHOLE_GPU])
    assert limits(update(applied, rewritten, settings=TAKE)) == {names.WHOLE_GPU: "2"}


def test_controlled_replica_set_is_not_changed() -> None:
    manifest = workload({names.NVIDIA_GPU: "1"}, "replicasets")
    manifest["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "d", "controller": True}]
    assert mutate_object(manifest, "replicasets", KNOWN, TAKE) == manifest


@pytest.mark.parametrize("text", ["", "x", "7", "{}", '{"main": 7}', '{"main": [7]}'])
def test_a_record_that_cannot_be_read_is_none(text: str) -> None:
    manifest = workload({K80_KEY: "1", P100: "1"})
    manifest["metadata"]["annotations"] = {names.REWRITTEN: text}
    new = update(manifest, workload({K80_KEY: "1"}))
    assert limits(new) == {K80_KEY: "1", P100_KEY: "1"}
    assert record(new) == {"main": [P100_KEY]}


@pytest.mark.parametrize(
    "text",
    [
        "x", "7", "{}", '{"spec": 7}', '{"spec": {"template": {"spec": {"containers": 7}}}}',
        '{"spec": {"template": {"spec": {"containers": [7, {"name": 7}, {"name": "main", "resources": []}]}}}}',
    ],
)  # fmt: skip
def test_any_manifest_can_be_read(text: str) -> None:
    manifest = workload({K80_KEY: "1"}, record=[K80_KEY])
    manifest["metadata"]["annotations"][LAST_APPLIED] = text
    assert set(limits(update(manifest, workload({K80_KEY: "1"})))) <= {K80_KEY}
