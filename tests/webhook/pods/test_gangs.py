"""Members of gangs: the rewritten pods, refused gangs and warnings."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cardwise.core.api import names, request
from cardwise.core.api.assignment import Assignment, encode
from cardwise.core.gangs import gangs as core
from cardwise.core.gangs.gangs import ForeignPodGroup, Membership
from cardwise.core.values.decoded import Json
from tests import build
from tests.build import resource_class
from tests.webhook.anypods import CLASSES, PODS
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
from webhook.cluster.namespaces import Defaults
from webhook.pods import resources
from webhook.pods.context import WebhookSettings
from webhook.server.review import Decision

GROUP = {names.GROUP_NAME: "slurp", names.GROUP_NUM: "3"}
GATE = {"name": names.GANG}
MARKERS = {names.FILTER_CALL_RESOURCE: "0", names.BIND_CALL_RESOURCE: "0"}
RDMA = resource_classes(resource_class("rdma", selector={"matchLabels": {"kind": "rdma"}}))
NUM = f"metadata.annotations[{names.GROUP_NUM}]"


def pod(annotations: Json | None = None, labels: Json | None = None, **resources: Any) -> Json:
    """A pod; by default a member that requests half a card."""
    member = build.pod(annotations=GROUP if annotations is None else annotations, **(resources or {"gpu_mem": 8138}))
    if labels:
        member["metadata"]["labels"] = labels
    return member


def server(**metadata: Any) -> Json:
    """A member that requests nothing."""
    return pod(containers=[{"name": "ps"}, {"name": "side"}], **metadata)


def after_mutation(manifest_of_pod: Json, known: Known | None = None, settings: WebhookSettings | None = None) -> Json:
    return mutate_object_twice(manifest_of_pod, "pods", known or Known(), settings)


def mutation_warnings(manifest_of_pod: Json) -> tuple[str, ...]:
    """By both webhooks."""
    first = on_mutate(manifest_of_pod, "pods", Known())
    assert first.allowed, first.message
    return first.warnings + validate_pod(after_mutation(manifest_of_pod)).warnings


def validate_pod(
    manifest_of_pod: Json, known: Known | None = None, settings: WebhookSettings | None = None
) -> Decision:
    return on_validate(manifest_of_pod, "pods", known or Known(), settings)


def limits(manifest: Json) -> list[Json]:
    return [container.get("resources", {}).get("limits", {}) for container in manifest["spec"]["containers"]]


# Members.


WITHOUT_NUMBER = (
    f"metadata.annotations[{names.GROUP_NAME}]: gang a waits until its number of pods is known; write "
    f"{names.GROUP_NUM}; fine if a PodGroup a has it in spec.minMember"
)


@pytest.mark.parametrize(
    ("annotations", "labels", "membership"),
    [
        pytest.param(GROUP, {}, Membership(name="slurp", minimum=3), id="annotations"),
        pytest.param({}, GROUP, Membership(name="slurp", minimum=3), id="labels"),
        pytest.param(
            {names.GROUP_NUM: "2"}, {names.GROUP_NAME: "a"}, Membership(name="a", minimum=2), id="one of each"
        ),
        pytest.param({names.GROUP_NAME: "a"}, {}, Membership(name="a"), id="a PodGroup says the number"),
        pytest.param(
            {},
            {names.COSCHEDULING: "a"},
            Membership(name="a", foreign_podgroup=ForeignPodGroup.COSCHEDULING),
            id="coscheduling",
        ),
    ],
)
def test_each_member_is_gated_and_labelled(annotations: Json, labels: Json, membership: Membership) -> None:
    member = after_mutation(pod(annotations, labels))
    assert member["spec"]["schedulingGates"] == [GATE]
    assert member["metadata"]["labels"] == labels | {names.GANG: membership.name}
    assert core.gang_of(member) == membership
    assert limits(member) == [{names.GPU_MEM: "8138", names.SHARE: "1"}]
    has_number = membership.minimum is not None or membership.foreign_podgroup is not None
    assert mutation_warnings(pod(annotations, labels)) == (() if has_number else (WITHOUT_NUMBER,))
    assert validate_pod(member).allowed


@pytest.mark.parametrize(("annotations", "labels"), [(GROUP, {}), ({}, GROUP), ({}, {names.COSCHEDULING: "a"})])
def test_a_pod_that_names_a_podgroup_of_kubernetes_too_is_refused(annotations: Json, labels: Json) -> None:
    member = pod(annotations, labels)
    member["spec"]["schedulingGroup"] = {"podGroupName": "slurp"}
    assert refusal(member).startswith("spec.schedulingGroup: names a PodGroup of Kubernetes and ")


def native(name: str = "slurp.v1", **amounts: Any) -> Json:
    """A pod that names a PodGroup of Kubernetes."""
    member = pod({}, **amounts)
    member["spec"]["schedulingGroup"] = {"podGroupName": name}
    return member


def test_a_podgroup_of_kubernetes_is_a_gang_of_pods_that_ask_for_something() -> None:
    rdma = [{"name": "a", "resources": {"limits": {"rdma": "1"}}}]
    for member_pod in (native(), native(containers=rdma)):
        member = after_mutation(member_pod, Known(known_classes=RDMA))
        assert member["spec"]["schedulingGates"] == [GATE]
        assert member["metadata"]["labels"] == {names.GANG: "slurp.v1"}
        assert core.gang_of(member) == Membership(name="slurp.v1", foreign_podgroup=ForeignPodGroup.KUBERNETES)
        assert validate_pod(member, Known(known_classes=RDMA)).allowed
    assert mutation_warnings(native()) == ()
    assert "schedulingGates" not in after_mutation(native(containers=[{"name": "ps"}]))["spec"], "it requests nothing"
    by_default = Known(namespaces={"default": Defaults("1Gi")})
    decision = on_defaults(native(containers=[{"name": "w"}]), "pods", by_default)
    assert f'"{names.GANG}"' in json.dumps(decision.patch), "now it asks"


def test_scheduling_group_is_ignored_without_podgroups() -> None:
    """The API server drops the field from the pod after the webhook has seen it."""
    known = Known(native=False)
    first = on_mutate(native(), "pods", known)
    assert first.warnings[0].startswith(
        "spec.schedulingGroup: the pod is not a member of a Cardwise gang, because this "
    )
    member = after_mutation(native("x" * 64), known)
    assert "schedulingGates" not in member["spec"]
    assert validate_pod(member, known).allowed
    del member["spec"]["schedulingGroup"]
    assert validate_pod(member, known).allowed


def test_podgroup_with_an_invalid_label_value_is_refused() -> None:
    message = refusal(native("x" * 64))
    assert message.startswith("spec.schedulingGroup.podGroupName: 'xxx")
    assert message.endswith("give the PodGroup a name of 63 characters at most")
    assert "schedulingGates" not in after_mutation(native("x" * 64, containers=[{"name": "ps"}]))["spec"]


def test_a_pod_of_a_podgroup_of_kubernetes_for_another_scheduler_is_in_no_gang() -> None:
    member = native("x" * 64)
    member["spec"]["schedulerName"] = "volcano"
    assert "schedulingGates" not in after_mutation(member)["spec"]


def test_other_gates_stay() -> None:
    gated = pod()
    gated["spec"]["schedulingGates"] = [{"name": "example.com/later"}]
    assert after_mutation(gated)["spec"]["schedulingGates"] == [{"name": "example.com/later"}, GATE]


def test_member_without_a_request_gets_markers() -> None:
    member = after_mutation(server())
    assert limits(member) == [MARKERS, {}]
    assert "env" not in member["spec"]["containers"][0], "nothing of a GPU is its"
    assert request.parse_mutated(member) is None
    assert validate_pod(member).message == ""


def test_member_with_only_devices_gets_slot_and_one_marker() -> None:
    known = Known(known_classes=RDMA)
    member = pod(containers=[{"name": "a"}, {"name": "b", "resources": {"limits": {"rdma": "1"}}}])
    plain, device = limits(after_mutation(member, known))
    assert plain == {}
    assert device == {"cardwise.dev/rdma": "1", names.SHARE: "1", names.FILTER_CALL_RESOURCE: "0"}


def test_a_copy_of_a_running_member_is_gated_again() -> None:
    for member_pod in (pod(), server()):
        member = after_mutation(member_pod)
        running = member | {"metadata": member["metadata"] | {"resourceVersion": "7"}}
        running["spec"] = {key: field for key, field in member["spec"].items() if key != "schedulingGates"}
        running["spec"]["nodeName"] = "n1"
        if member_pod != server():
            held = encode(Assignment({"0": build.shares(8138, 1)}), assume_time_ns=1)
            running["metadata"]["annotations"] = GROUP | held
        assert "spec.nodeName: removed, because the pod is a copy of a placed" in "".join(mutation_warnings(running))
        again = after_mutation(running)
        assert (again["spec"], again["metadata"]["labels"]) == (member["spec"], member["metadata"]["labels"])
        assert "resourceVersion" not in again["metadata"]


def test_node_name_of_a_member_is_refused() -> None:
    for member in (pod(), server()):
        member["spec"]["nodeName"] = "n1"
        assert refusal(member) == (
            "spec.nodeName: the scheduler must place a pod of a gang; use spec.nodeSelector or "
            "spec.affinity.nodeAffinity instead"
        )


def test_gate_label_and_markers_without_a_gang_are_removed() -> None:
    loner = server(annotations={}, labels={names.GANG: "slurp", "mine": "x"})
    loner["spec"]["schedulingGates"] = [GATE, {"name": "mine"}]
    loner["spec"]["containers"][0]["resources"] = {"limits": dict(MARKERS)}
    alone = after_mutation(loner)
    assert alone["metadata"]["labels"] == {"mine": "x"}
    assert alone["spec"]["schedulingGates"] == [{"name": "mine"}]
    assert limits(alone) == [{}, {}]
    warnings = "\n".join(mutation_warnings(loner))
    assert f"metadata.labels[{names.GANG}]: removed, because the pod is not a member of a gang" in warnings
    assert f"spec.schedulingGates[{names.GANG}]: removed, because the pod is not a member of a gang" in warnings
    assert names.FILTER_CALL_RESOURCE in warnings
    assert validate_pod(alone).allowed


def test_gang_label_is_the_name_in_the_pod() -> None:
    member = pod(labels={names.GANG: "other"})
    assert after_mutation(member)["metadata"]["labels"] == {names.GANG: "slurp"}
    assert mutation_warnings(member) == (
        f"metadata.labels[{names.GANG}]: replaced by slurp, the gang that the pod's annotation or label names",
    )


def test_pods_of_other_schedulers_are_in_no_gang() -> None:
    for member in (pod(), pod({}, {names.COSCHEDULING: "a"})):
        member["spec"]["schedulerName"] = "volcano"
        assert "schedulingGates" not in after_mutation(member)["spec"]
        assert names.GANG not in after_mutation(member)["metadata"].get("labels", {})
        ours = WebhookSettings(gang_schedulers=frozenset({"volcano"}))
        assert after_mutation(member, settings=ours)["spec"]["schedulingGates"] == [GATE]


def test_a_member_gets_no_default_share() -> None:
    known = Known(namespaces={"default": Defaults("1Gi", "spread")})
    for decide in (on_mutate, on_defaults):
        assert names.GPU_MEM not in str(decide(server(), "pods", known).patch)
    assert after_mutation(pod(), known)["metadata"]["annotations"][names.POLICY] == "spread"


def test_exempt_namespaces_have_no_gangs() -> None:
    settings = WebhookSettings(exempt_namespaces=frozenset({"default"}))
    assert mutate_object(pod(), "pods", Known(), settings) == pod()


@pytest.mark.parametrize("native", [False, True])
def test_pod_with_the_assigned_scheduler_joins_its_gang(native: bool) -> None:
    """Another scheduler with gangs of its own runs under the name of Kubernetes' default."""
    settings = WebhookSettings(scheduler="ours", gang_schedulers=frozenset({"ours"}))
    manifest_of_pod = build.pod(gpu_mem=100) if native else pod(gpu_mem=100)
    if native:
        manifest_of_pod["spec"]["schedulingGroup"] = {"podGroupName": "ring"}
    known = Known()
    mutated_pod = mutate_object(manifest_of_pod, "pods", known, settings)
    assert mutated_pod["spec"]["schedulerName"] == "ours"
    assert core.gang_of(mutated_pod) is not None
    assert on_validate(mutated_pod, "pods", known, settings).allowed


_KEYS = [names.GROUP_NAME, names.GROUP_NUM, names.COSCHEDULING, names.GANG]
_GROUPS = st.dictionaries(st.sampled_from(_KEYS), st.sampled_from(["2", "3", "a", "b"]))


@given(PODS, _GROUPS, _GROUPS, st.lists(st.sampled_from([GATE, {"name": "mine"}]), max_size=2, unique_by=str))
def test_pod_is_only_in_the_gang_that_it_names(
    manifest_of_pod: Json, annotations: Json, labels: Json, gates: list[Json]
) -> None:
    metadata = manifest_of_pod["metadata"] | {
        "annotations": manifest_of_pod["metadata"]["annotations"] | annotations,
        "labels": labels,
    }
    manifest_of_pod = {"metadata": metadata, "spec": manifest_of_pod["spec"] | {"schedulingGates": gates}}
    known = Known(known_classes=CLASSES)
    first = on_mutate(manifest_of_pod, "pods", known)
    assume(first.allowed)
    member = after_mutation(manifest_of_pod, known)
    membership = core.membership(manifest_of_pod)
    assert core.gang_of(member) == membership
    assert core.is_gated(member) == (membership is not None)
    marked = membership is not None and request.parse(member) is None
    assert resources.is_marked(request.containers(member)) == marked, (
        "filter and bind see it by what it requests, or by the markers"
    )
    assert {"name": "mine"} in member["spec"]["schedulingGates"] or {"name": "mine"} not in gates


# What is refused.


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        pytest.param({names.GROUP_NUM: "0"}, f"{NUM}: 0 is out of range; write a whole number from 1 to 500", id="0"),
        pytest.param({names.GROUP_NUM: "-1"}, f"{NUM}: -1 is out of range", id="negative"),
        pytest.param({names.GROUP_NUM: "501"}, f"{NUM}: 501 is out of range", id="too many"),
        pytest.param({names.GROUP_NUM: "2.5"}, f"{NUM}: 2.5 is out of range; write a whole number", id="fraction"),
        pytest.param({names.GROUP_NUM: "all"}, f"{NUM}: 'all' is not a quantity", id="no number"),
        pytest.param(
            {names.GROUP_NAME: "Slurp_1"},
            f"metadata.annotations[{names.GROUP_NAME}]: 'Slurp_1' is not a valid gang name; write lower-case letters",
            id="no DNS label",
        ),
        pytest.param({names.GROUP_NAME: "a" * 64}, "is not a valid gang name", id="too long"),
        pytest.param(
            {names.QUEUE_PRIORITY: "high"}, f"[{names.QUEUE_PRIORITY}]: 'high' is not a whole number", id="rank"
        ),
    ],
)
def test_impossible_gangs_are_refused(annotations: Json, says: str) -> None:
    for member in (pod(GROUP | annotations), server(annotations=GROUP | annotations)):
        assert says in refusal(member)


def test_a_number_without_a_name_is_refused() -> None:
    assert refusal(pod({names.GROUP_NUM: "3"})) == (
        f"{NUM}: gives the number of pods of a gang, but no gang is named; add {names.GROUP_NAME} with the gang's "
        "name, "
        "the same on all its pods"
    )


def test_conflicting_gang_size_is_refused() -> None:
    known = Known(numbers={"default/slurp": ("slurp-0", 4)})
    assert refusal(pod(), known) == (
        f"{NUM}: 3 differs from the number of pod slurp-0 of the same gang, 4; write 4, or another {names.GROUP_NAME}"
    )
    assert refusal(pod(), known, WebhookSettings(callers_known=False)) == (
        f"{NUM}: 3 differs from the number of another pod of the same gang; write that number, or another "
        f"{names.GROUP_NAME}"
    )
    by_label = pod({}, GROUP)
    assert refusal(by_label, known).startswith(f"metadata.labels[{names.GROUP_NUM}]: 3 differs")
    for other in (
        pod(GROUP | {names.GROUP_NUM: "4"}), pod({names.GROUP_NAME: "slurp"}), pod(GROUP | {names.GROUP_NAME: "b"}),
    ):  # fmt: skip
        assert refusal(other, known) == ""


def test_different_label_and_annotation_get_a_warning() -> None:
    member = pod(GROUP, {names.GROUP_NAME: "other", names.GROUP_NUM: "5", names.COSCHEDULING: "third"})
    assert core.gang_of(after_mutation(member)) == Membership(name="slurp", minimum=3)
    assert mutation_warnings(member) == (
        f"metadata.labels[{names.GROUP_NAME}]: other differs from the annotation, whose value is used: slurp",
        f"metadata.labels[{names.GROUP_NUM}]: 5 differs from the annotation, whose value is used: 3",
        f"metadata.labels[{names.COSCHEDULING}]: differs from {names.GROUP_NAME}, whose value is used: slurp",
    )
    assert mutation_warnings(pod(GROUP, GROUP | {names.COSCHEDULING: "slurp"})) == ()


def test_member_changed_by_another_webhook_is_refused() -> None:
    member = after_mutation(server())
    ungated = member | {"spec": member["spec"] | {"schedulingGates": []}}
    relabelled = member | {"metadata": member["metadata"] | {"labels": {names.GANG: "other"}}}
    joined = server(annotations={}, labels={names.GANG: "slurp"})
    for bent in (ungated, relabelled, joined):
        assert "a mutating webhook that runs after Cardwise's has changed it" in validate_pod(bent).message
    unmarked = member | {"spec": member["spec"] | {"containers": [{"name": "ps"}]}}
    assert "missing: a mutating webhook that runs after Cardwise's has changed it" in validate_pod(unmarked).message


# Workloads.


def workload(resource: str = "deployments", annotations: Json | None = None, **spec: Any) -> Json:
    template = {"metadata": {"annotations": GROUP if annotations is None else annotations}, "spec": {}}
    inner = {"template": template} | spec
    return {"metadata": {"name": "w"}, "spec": {"jobTemplate": {"spec": inner}} if resource == "cronjobs" else inner}


def review_workload(manifest: Json, resource: str = "deployments", old: Json | None = None, **about: Any) -> Decision:
    operation = "UPDATE" if old is not None else "CREATE"
    settings = WebhookSettings(exempt_namespaces=frozenset({"kube-system"}))
    return on_validate(manifest, resource, Known(), settings, operation=operation, old=old, **about)


ORDERED = (
    "spec.podManagementPolicy: OrderedReady creates a pod only after the previous one runs, and gang slurp starts only "
    "with 3 pods; write podManagementPolicy: Parallel"
)


@pytest.mark.parametrize("spec", [{}, {"podManagementPolicy": "OrderedReady"}])
def test_ordered_stateful_set_of_a_gang_is_refused(spec: Json) -> None:
    assert review_workload(workload(replicas=3, **spec), "statefulsets").message == ORDERED
    assert review_workload(workload(replicas=0, **spec), "statefulsets").message == ORDERED, "it will be scaled"


def test_parallel_stateful_set_of_a_gang_is_admitted() -> None:
    assert review_workload(workload(replicas=3, podManagementPolicy="Parallel"), "statefulsets") == Decision()
    alone = workload(annotations=GROUP | {names.GROUP_NUM: "1"}, replicas=3)
    assert review_workload(alone, "statefulsets") == Decision()
    # A single pod does not block the pods of other workloads, such as the workers of a parameter server.
    (warning,) = review_workload(workload(replicas=1), "statefulsets").warnings
    assert "this workload creates 1" in warning
    assert review_workload(workload(annotations={}, replicas=3), "statefulsets") == Decision()


def test_ordered_stateful_set_without_a_size_gets_a_warning() -> None:
    decision = review_workload(workload(annotations={names.GROUP_NAME: "slurp"}, replicas=3), "statefulsets")
    assert decision.allowed
    without_number, ordered = decision.warnings
    assert "podManagementPolicy: Parallel" in ordered
    assert without_number == f"spec.template.{WITHOUT_NUMBER}".replace("gang a ", "gang slurp ").replace(
        "PodGroup a ", "PodGroup slurp "
    )


def test_existing_errors_are_warnings_at_an_update() -> None:
    stored = workload(replicas=3)
    decision = review_workload(workload(replicas=4), "statefulsets", old=stored)
    assert (decision.allowed, decision.warnings) == (True, (ORDERED,))
    assert review_workload(workload(replicas=3), "statefulsets", old=workload(replicas=1)).message == ORDERED


@pytest.mark.parametrize(
    ("resource", "spec", "field", "pod_count"),
    [
        ("deployments", {"replicas": 2}, "spec.replicas", 2),
        ("deployments", {}, "spec.replicas", 1),
        ("replicasets", {"replicas": 2}, "spec.replicas", 2),
        ("replicationcontrollers", {"replicas": 2}, "spec.replicas", 2),
        ("statefulsets", {"replicas": 2, "podManagementPolicy": "Parallel"}, "spec.replicas", 2),
        ("jobs", {"parallelism": 2}, "spec.parallelism", 2),
        ("jobs", {"completions": 9}, "spec.parallelism", 1),
        ("jobs", {"completions": 2, "parallelism": 9}, "spec.parallelism", 2),
        ("cronjobs", {"parallelism": 2}, "spec.jobTemplate.spec.parallelism", 2),
    ],
)
def test_workload_with_too_few_pods_gets_a_warning(resource: str, spec: Json, field: str, pod_count: int) -> None:
    decision = review_workload(workload(resource, **spec), resource)
    advice = f"fine if other workloads create the remaining {3 - pod_count}"
    text = f"{field}: gang slurp needs 3 pods to start, and this workload creates {pod_count}; {advice}"
    assert (decision.allowed, decision.warnings) == (True, (text,))


@pytest.mark.parametrize(
    ("resource", "spec"),
    [
        ("deployments", {"replicas": 3}),
        ("deployments", {"replicas": 0}),
        ("jobs", {"parallelism": 3}),
        ("daemonsets", {}),
        ("podtemplates", {}),
    ],
)
def test_other_workloads_get_no_warning(resource: str, spec: Json) -> None:
    assert review_workload(workload(resource, **spec), resource) == Decision()


def test_invalid_gang_in_a_template_error_names_the_field() -> None:
    bad = GROUP | {names.GROUP_NUM: "0"}
    assert review_workload(workload(annotations=bad)).message.startswith(
        f"spec.template.metadata.annotations[{names.GROUP_NUM}]: 0 is out of range"
    )
    assert review_workload(workload("cronjobs", bad), "cronjobs").message.startswith(
        "spec.jobTemplate.spec.template.metadata."
    )
    twice = workload(replicas=3)
    twice["spec"]["template"]["metadata"]["labels"] = {names.GROUP_NUM: "4"}
    (warning,) = review_workload(twice).warnings
    assert warning.startswith(f"spec.template.metadata.labels[{names.GROUP_NUM}]: 4 differs from the annotation")


def test_controlled_and_foreign_workloads_get_no_warning() -> None:
    owned = workload("replicasets", replicas=1)
    owned["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "d", "controller": True}]
    assert review_workload(owned, "replicasets") == Decision()
    other = workload(replicas=1)
    other["spec"]["template"]["spec"]["schedulerName"] = "volcano"
    assert review_workload(other) == Decision()
    assert review_workload(workload(replicas=3), "statefulsets", namespace="kube-system") == Decision()
