"""Pods with scheduler.mode=claims: what the webhook writes, what it refuses, and copies of pods."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given

from cardwise.core.api import names, request
from cardwise.core.values.decoded import Json
from tests import build
from tests.build import container, resource_class
from tests.webhook.anypods import CLASSES, PODS
from tests.webhook.reviews import Known, on_defaults, on_mutate, on_validate, patched, resource_classes
from tests.webhook.sharing import ALWAYS, SETTINGS, admitted, agent, sidecar
from tests.webhook.sharing import refused as refusal_of
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import WebhookSettings

CLAIMS = replace(SETTINGS, claims=True)
NAME = re.compile(r"cardwise-[0-9a-f]{16}")
GATE = {"name": names.ALLOCATION_GATE}
GROUP = {names.GROUP_NAME: "slurp", names.GROUP_NUM: "3"}
KNOWN = Known(
    known_classes=resource_classes(
        resource_class("k80"),
        resource_class("half", share={"memoryMiB": 4000, "corePercent": 30}),
        resource_class("rdma", selector={"matchLabels": {"kind": "rdma"}}),
    ),
)


def stored(pod: Json, settings: WebhookSettings = CLAIMS) -> tuple[Json, tuple[str, ...]]:
    return admitted(pod, KNOWN, settings)


def claim_of(pod: Json) -> str:
    (entry,) = [entry for entry in pod["spec"]["resourceClaims"] if entry["name"] == "cardwise"]
    assert NAME.fullmatch(entry["resourceClaimName"])
    return str(entry["resourceClaimName"])


def entries(pod: Json) -> dict[str, list[Json]]:
    """The claims of each container that names any."""
    return {
        spec["name"]: spec["resources"]["claims"]
        for spec in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        if "claims" in spec.get("resources", {})
    }


def own(name: str) -> list[Json]:
    return [{"name": "cardwise", "request": name}]


def amounts(pod: Json) -> list[Json]:
    return [spec["resources"].get("limits", {}) for spec in pod["spec"]["containers"]]


def copy_of(pod: Json, *, placed: bool = False) -> Json:
    """The pod as `kubectl get -o yaml` shows it; `placed`: after the extender has opened its gate."""
    copy = pod | {"status": {"phase": "Pending"}}
    if placed:
        spec = {field: content for field, content in pod["spec"].items() if field != "schedulingGates"}
        annotations = pod["metadata"]["annotations"] | {names.ASSIGNMENT: "{}", names.IDX: "0"}
        copy |= {"spec": spec | {"nodeName": "n1"}, "metadata": pod["metadata"] | {"annotations": annotations}}
    return copy


# What is written.


def limits(**resources: Any) -> Json:
    return {"containers": [container(**resources)]}


# A pod, and the limits that its container is stored with: no resource of Cardwise's device plugin, no marker.
WRITTEN: dict[str, tuple[Json, Json]] = {
    "a share": ({"gpu_mem": "8138"}, {names.GPU_MEM: "8138"}),
    "a share with a percent of the SMs": (
        {"gpu_mem": "8Gi", "gpu_core": 20},
        {names.GPU_MEM: "8192", names.GPU_CORE: "20"},
    ),
    "whole GPUs": ({"gpu_count": 2}, {names.WHOLE_GPU: "2"}),
    "a split share": ({"gpu_mem": 8000, "gpu_count": 2}, {names.GPU_MEM: "8000"}),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_amounts_stay_and_the_container_names_its_request_of_the_claim(case: str) -> None:
    requested, expected = WRITTEN[case]
    pod, _ = stored(build.pod(**requested))
    assert amounts(pod) == [expected]
    assert entries(pod) == {"main": own("main")}
    claim_of(pod)
    assert pod["spec"]["schedulingGates"] == [GATE]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({"k80": "1"}, {f"{names.CLASS_PREFIX}k80": "1", names.WHOLE_GPU: "1"}),
        ({"half": "2"}, {f"{names.CLASS_PREFIX}half": "2", names.GPU_MEM: "8000", names.GPU_CORE: "60"}),
        ({"rdma": "1"}, {f"{names.CLASS_PREFIX}rdma": "1"}),
    ],
)
def test_classes_and_other_devices(requested: Json, expected: Json) -> None:
    asking = build.pod(containers=[{"name": "main", "resources": {"limits": requested}}])
    assert on_mutate(asking, "pods", KNOWN, CLAIMS).warnings == ()
    pod, _ = stored(asking)
    assert (amounts(pod), entries(pod)) == ([expected], {"main": own("main")})


def test_each_container_has_a_request_of_its_own() -> None:
    """Containers without a share have none; ordinary claims of the pod stay."""
    gpu = container("train", gpu_mem=4000)
    gpu["resources"]["claims"] = [{"name": "net"}]
    pod = build.pod(containers=[gpu, container("eval", gpu_mem=2000), {"name": "log"}])
    pod["spec"]["initContainers"] = [sidecar(container("cache", gpu_mem=1000)), {"name": "fetch"}]
    pod["spec"]["resourceClaims"] = [{"name": "net", "resourceClaimTemplateName": "nic"}]
    after, _ = stored(pod)
    assert entries(after) == {
        "cache": own("cache"),
        "train": [{"name": "net"}, *own("train")],
        "eval": own("eval"),
    }
    assert after["spec"]["resourceClaims"][0] == {"name": "net", "resourceClaimTemplateName": "nic"}
    assert len(after["spec"]["resourceClaims"]) == 2


def test_share_agent_has_a_request_without_amounts() -> None:
    pod, _ = stored(build.pod(gpu_mem=4000, annotations=ALWAYS))
    assert agent(pod)["resources"] == {"claims": own("cardwise-agent")}
    assert set(entries(pod)) == {"cardwise-agent", "main"}


def test_gang_waits_behind_the_same_gate() -> None:
    pod, _ = stored(build.pod(gpu_mem=4000, annotations=GROUP))
    assert pod["spec"]["schedulingGates"] == [GATE]
    assert pod["metadata"]["labels"] == {names.GANG: "slurp"}


def test_member_of_a_gang_without_a_request_has_a_gate_and_no_claim() -> None:
    """Nothing calls the extender for it, so it needs no marker."""
    pod, _ = stored(build.pod(containers=[{"name": "ps"}], annotations=GROUP))
    assert pod["spec"]["schedulingGates"] == [GATE]
    assert "resourceClaims" not in pod["spec"]
    assert "resources" not in pod["spec"]["containers"][0]


def test_pod_without_a_request_is_left_alone() -> None:
    pod = build.pod(containers=[{"name": "main"}])
    assert on_mutate(pod, "pods", KNOWN, CLAIMS).patch == []


def test_default_share_of_a_namespace() -> None:
    known = replace(KNOWN, namespaces={"default": Defaults(gpu_mem="1Gi")})
    decision = on_defaults(build.pod(containers=[{"name": "main"}]), "pods", known, CLAIMS)
    pod = patched(build.pod(containers=[{"name": "main"}]), decision)
    assert (amounts(pod), entries(pod)) == ([{names.GPU_MEM: "1024"}], {"main": own("main")})
    claim_of(pod)


def test_pod_of_a_daemonset_is_planned_like_others() -> None:
    """Its controller names the node by affinity."""
    pod = build.pod(gpu_mem=4000)
    field = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [field]}]}}
    pod["spec"]["affinity"] = {"nodeAffinity": node}
    after, _ = stored(pod)
    claim_of(after)
    assert after["spec"]["affinity"] == {"nodeAffinity": node}


def test_any_scheduler_obeys_claims() -> None:
    pod = build.pod(gpu_mem=4000)
    pod["spec"]["schedulerName"] = "my-scheduler"
    _, warnings = stored(pod)
    assert warnings == ()


def test_mirror_of_a_static_pod_is_not_changed() -> None:
    pod = build.pod(gpu_mem=4000, annotations={names.MIRROR: "x"})
    assert on_mutate(pod, "pods", KNOWN, CLAIMS, username="system:node:n1").patch == []


@given(PODS)
def test_request_is_the_same_as_with_an_extender(pod: Json) -> None:
    known = Known(known_classes=CLASSES)
    settings = WebhookSettings(nvidia_gpu="take")
    with_extender = on_mutate(pod, "pods", known, settings)
    with_claims = on_mutate(pod, "pods", known, replace(settings, claims=True))
    assert (with_claims.allowed, with_claims.message) == (with_extender.allowed, with_extender.message)
    assume(with_claims.allowed)
    after = patched(pod, with_claims)
    assert request.parse_mutated(after) == request.parse_mutated(patched(pod, with_extender))
    again = on_mutate(after, "pods", known, replace(settings, claims=True))
    assert (again.allowed, again.patch) == (True, [])
    for spec in (*after["spec"]["containers"], *after["spec"].get("initContainers", ())):
        markers = {names.SHARE, names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE}
        assert not markers & (spec.get("resources", {}).get("limits") or {}).keys()


# The name.


def test_names_are_random_and_stay_at_a_second_call() -> None:
    first, _ = stored(build.pod(gpu_mem=4000))  # `stored` checks the second call
    second, _ = stored(build.pod(gpu_mem=4000))
    assert claim_of(first) != claim_of(second)


def test_container_that_another_webhook_adds_gets_a_request_and_the_name_stays() -> None:
    first, _ = stored(build.pod(gpu_mem=4000))
    containers = [container("mesh", gpu_mem=1000), *first["spec"]["containers"]]
    second, _ = stored(first | {"spec": first["spec"] | {"containers": containers}})
    assert claim_of(second) == claim_of(first)
    assert entries(second) == {"mesh": own("mesh"), "main": own("main")}


@pytest.mark.parametrize("placed", [False, True])
def test_copy_of_a_pod_gets_a_claim_of_its_own(placed: bool) -> None:
    first, _ = stored(build.pod(gpu_mem=4000))
    copy, _ = stored(copy_of(first, placed=placed))
    assert claim_of(copy) != claim_of(first)
    assert copy["spec"]["schedulingGates"] == [GATE]
    assert amounts(copy) == amounts(first)
    assert "status" not in copy


# Copies from the other mode.


def test_copy_of_a_pod_of_an_extender_is_rewritten() -> None:
    """Also a member of a gang, whose gate is another one there."""
    former, _ = stored(build.pod(gpu_mem=4000, annotations=GROUP | ALWAYS), SETTINGS)
    pod, _ = stored(former)
    assert amounts(pod) == [{names.GPU_MEM: "4000"}]
    assert pod["spec"]["schedulingGates"] == [GATE]
    assert set(entries(pod)) == {"cardwise-agent", "main"}


def test_copy_of_a_pod_with_a_claim_is_rewritten_for_an_extender() -> None:
    former, _ = stored(build.pod(gpu_mem=4000))
    pod, warnings = stored(former, SETTINGS)
    assert pod == stored(build.pod(gpu_mem=4000), SETTINGS)[0]
    assert warnings == (
        "spec.containers[0].resources.claims[cardwise]: removed; only Cardwise may write this",
        "spec.resourceClaims[cardwise]: removed, because shares are not allocated by claim",
        "spec.schedulingGates[cardwise.dev/allocation]: removed, because shares are not allocated by claim",
    )


# What users may not write.

RESERVED = (
    "spec.resourceClaims[0].name: cardwise is the name of the entry that Cardwise writes; give your claim another name "
    "in the pod"
)
GATED = (
    "spec.schedulingGates[cardwise.dev/allocation]: the pod requests no GPU, so Cardwise would never remove the gate; "
    "leave it out, or request a share with limits aliyun.com/gpu-mem"
)

THEIRS = "cardwise-0123456789abcdef"
FOREIGN = (
    f"'{THEIRS}' is a claim of Cardwise, which serves only the pod that Cardwise gave it to; leave the entry out, and "
    "request a share with limits aliyun.com/gpu-mem"
)


def with_entry(pod: Json, name: str, **source: str) -> Json:
    pod["spec"]["resourceClaims"] = [{"name": name, **source}]
    return pod


def without_request() -> Json:
    return build.pod(containers=[{"name": "main"}])


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (
            with_entry(build.pod(gpu_mem=4000), "mine", resourceClaimName=THEIRS),
            f"spec.resourceClaims[0].resourceClaimName: {FOREIGN}",
        ),
        (
            with_entry(without_request(), "mine", resourceClaimName=THEIRS),
            f"spec.resourceClaims[0].resourceClaimName: {FOREIGN}",
        ),
        (
            with_entry(without_request(), "cardwise", resourceClaimName=THEIRS),
            f"spec.resourceClaims[0].resourceClaimName: {FOREIGN}",
        ),
        (
            with_entry(build.pod(gpu_mem=4000), "cardwise", resourceClaimTemplateName="nic"),
            RESERVED,
        ),
        (
            with_entry(build.pod(gpu_mem=4000), "cardwise", resourceClaimName="team"),
            RESERVED,
        ),
        (
            {**without_request(), "spec": {"containers": [{"name": "main"}], "schedulingGates": [GATE]}},
            GATED,
        ),
    ],
)
def test_use_of_claims_and_gate_by_users_is_refused(pod: Json, message: str) -> None:
    assert refusal_of(pod, KNOWN, CLAIMS) == message


def test_claims_of_users_with_other_names_stay() -> None:
    entry = {"name": "mine", "resourceClaimName": "cardwise-team"}
    pod, warnings = stored(with_entry(build.pod(gpu_mem=4000), "mine", resourceClaimName="cardwise-team"))
    assert (pod["spec"]["resourceClaims"][0], warnings) == (entry, ())


def test_entry_of_a_container_without_a_share_is_removed() -> None:
    """It would have got the devices of the container that it names."""
    thief = {"name": "side", "resources": {"claims": [{"name": "cardwise", "request": "main"}]}}
    pod, warnings = stored(build.pod(containers=[container(gpu_mem=4000), thief]))
    assert entries(pod) == {"main": own("main")}
    assert warnings == ("spec.containers[1].resources.claims[cardwise]: removed; only Cardwise may write this",)


def test_pod_that_names_its_node_is_refused() -> None:
    pod = build.pod(gpu_mem=4000)
    pod["spec"]["nodeName"] = "n1"
    after = patched(pod, on_mutate(pod, "pods", KNOWN, CLAIMS))
    decision = on_validate(after, "pods", KNOWN, CLAIMS)
    assert decision.message.startswith("spec.nodeName: the scheduler must place a pod that requests a GPU share")


@pytest.mark.parametrize(
    ("containers", "fault"),
    [
        ([container("main", gpu_count=33)], "spec.containers: the containers use 33 GPUs and devices in total"),
        ([container(f"c{i}", gpu_mem=100) for i in range(33)], "spec.containers: 33 containers use a GPU"),
    ],
)
def test_request_that_no_claim_can_hold_is_refused(containers: list[Json], fault: str) -> None:
    pod = build.pod(containers=containers)
    after = patched(pod, on_mutate(pod, "pods", KNOWN, CLAIMS))
    message = on_validate(after, "pods", KNOWN, CLAIMS).message
    assert message.startswith(fault)
    assert message.endswith("use several pods")


# What other webhooks change afterwards.


def drop(pod: Json, field: str) -> Json:
    return pod | {"spec": {key: content for key, content in pod["spec"].items() if key != field}}


@pytest.mark.parametrize(
    ("field", "removed_field"),
    [("resourceClaims", "spec.resourceClaims"), ("schedulingGates", "spec.schedulingGates[cardwise.dev/allocation]")],
)
def test_claim_or_gate_that_another_webhook_removed(field: str, removed_field: str) -> None:
    pod, _ = stored(build.pod(gpu_mem=4000))
    message = on_validate(drop(pod, field), "pods", KNOWN, CLAIMS).message
    assert message.startswith(f"{removed_field}: ")
    assert "a mutating webhook that runs after Cardwise's" in message


def test_entry_that_another_webhook_changed() -> None:
    """Without `request` the container would get the devices of all containers."""
    pod, _ = stored(build.pod(containers=[container("a", gpu_mem=4000), container("b", gpu_mem=4000)]))
    pod["spec"]["containers"][0]["resources"]["claims"] = [{"name": "cardwise"}]
    message = on_validate(pod, "pods", KNOWN, CLAIMS).message
    assert message.startswith("spec.containers[0].resources.claims[0].request: ")


def test_any_program_may_bind_a_pod_with_a_claim() -> None:
    """The claim names the node, and another node refuses the pod."""
    pod, _ = stored(build.pod(gpu_mem=4000))
    known = replace(KNOWN, pods={"default/p": pod})
    binding = build.binding("p")
    decision = on_validate(binding, "pods", known, CLAIMS, sub="binding", name="p")
    assert decision.allowed
