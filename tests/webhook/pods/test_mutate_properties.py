"""Mutation is a fixed point and keeps the request, whatever the pod."""

from copy import deepcopy
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from cardwise.core.api import names, request
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from tests import build
from tests.webhook.anypods import (
    CLASSES,
    PODS,
)
from tests.webhook.reviews import Known, on_mutate, patched
from tests.webhook.rewriting import mutate, with_classes
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import AgentSettings, WebhookSettings
from webhook.pods.scheduling import toleration_of_taint

POLICIES = st.sampled_from(["", "spread"])


def with_one_in_front(pod: Json) -> Json:
    """A pod changed by another webhook, such as that of a service mesh; the API server then calls Cardwise's again."""
    spec = pod["spec"]
    return pod | {"spec": spec | {"containers": [{"name": "mesh"}, *spec["containers"]]}}


def requests_by_name(pod: Json) -> dict[str, ContainerRequest]:
    pod_request = request.parse_mutated(pod)
    return {c.name: replace(c, key="") for c in pod_request.containers} if pod_request else {}


def stored_names(pod: Json) -> Json:
    return with_classes(pod, Known(known_classes=CLASSES), nvidia_gpu="take")


def rewritten(pod: Json, policy: str = "") -> Json:
    return mutate(stored_names(pod), policy=policy).pod


@given(PODS, POLICIES)
def test_mutation_is_a_fixed_point_and_keeps_the_request(pod: Json, policy: str) -> None:
    before = deepcopy(pod)
    try:
        named = stored_names(pod)
        pod_request = request.parse(named)
    except InvalidRequest:
        assume(False)
    after = mutate(named, policy=policy, runtime_class="nvidia").pod
    assert pod == before, "the input was changed"
    assert stored_names(after) == after
    again = mutate(after, policy=policy, runtime_class="nvidia")
    assert (again.pod, again.warnings) == (after, ())
    seen = request.parse(after)
    assert (seen and (seen.containers, seen.devices)) == (pod_request and (pod_request.containers, pod_request.devices))
    assert requests_by_name(mutate(with_one_in_front(after), policy=policy).pod) == requests_by_name(after)


@given(PODS, POLICIES)
def test_mutation_is_a_fixed_point_for_stored_pods(pod: Json, policy: str) -> None:
    try:
        after = _stored(rewritten(pod, policy))
    except InvalidRequest:
        assume(False)
    assert rewritten(after, policy) == after


@given(PODS)
def test_slots_and_markers_follow_the_request(pod: Json) -> None:
    try:
        after = rewritten(pod)
    except InvalidRequest:
        assume(False)
    pod_request = request.parse(after)
    keys = [entry.key for entry in (*pod_request.devices, *pod_request.containers)] if pod_request else []
    marked = keys[:1] if pod_request and not pod_request.containers else []
    for container in request.containers(after):
        limits = container.spec["resources"]["limits"]
        assert limits.get(names.SHARE) == ("1" if container.key in keys else None)
        assert limits.get(names.FILTER_CALL_RESOURCE) == ("0" if container.key in marked else None)
        assert names.BIND_CALL_RESOURCE not in limits
        assert {names.class_of(name) for name in limits if names.class_of(name) in ("rdma", "fpga")} == {
            device.resource_class
            for device in (pod_request.devices if pod_request else ())
            if device.key == container.key
        }


SETTINGS = WebhookSettings(
    runtime_class="nvidia",
    scheduler="ours",
    tolerated=(toleration_of_taint("nvidia.com/gpu:NoSchedule"), toleration_of_taint("sku=gpu:NoSchedule")),
    gang_schedulers=frozenset({"default-scheduler", "ours"}),
    share_agent=AgentSettings(image="agent"),
)
TEAM = Defaults(gpu_mem="1Gi", policy="spread", frameworks="on", sm_percent="memory", isolation="mps")
KNOWN = Known(
    namespaces={"default": TEAM}, known_classes=CLASSES, scopes=frozenset({"card"}),
)  # fmt: skip
_MARKS = st.fixed_dictionaries(
    {},
    optional={
        names.IDX: st.just("0"), names.ASSIGNMENT: st.just("{}"), names.GROUP_NAME: st.just("g"),
        names.GROUP_NUM: st.just("2"), names.DEFAULTS_OPT_OUT: st.just("disabled"),
    },
)  # fmt: skip


_TOLERATIONS = st.lists(
    st.sampled_from([toleration_of_taint("nvidia.com/gpu:NoSchedule"), {"key": "sku", "operator": "Exists"}])
)


@given(PODS, _MARKS, st.sampled_from([{}, {names.GANG: "g"}, {names.GANG: "other"}]), _TOLERATIONS)
def test_second_call_changes_nothing(pod: Json, marks: Json, labels: Json, tolerations: list[Json]) -> None:
    """In a namespace with every default, also for copies of placed pods and of members of gangs."""
    annotations = pod["metadata"]["annotations"] | marks
    metadata = pod["metadata"] | {"annotations": annotations, "labels": labels}
    manifest = {"metadata": metadata, "spec": pod["spec"] | {"tolerations": tolerations}}
    decision = on_mutate(manifest, "pods", KNOWN, SETTINGS)
    assume(decision.allowed)
    after = patched(manifest, decision)
    again = on_mutate(after, "pods", KNOWN, SETTINGS)
    assert (again.allowed, again.patch) == (True, [])


@given(PODS, st.sampled_from(Unit), st.booleans())
def test_later_containers_are_rewritten_next_to_existing_ones(pod: Json, unit: Unit, front: bool) -> None:
    """The API server calls the webhook once more, by the early or the late configuration
    (docs/design/0030-order-of-webhooks.md).
    """
    settings = replace(SETTINGS, unit=unit)
    first = on_mutate(pod, "pods", KNOWN, settings)
    assume(first.allowed)
    once = patched(pod, first)
    before = requests_by_name(once)
    mesh = {"name": "mesh", "resources": {"limits": {names.GPU_MEM: "2"}}}
    listed = once["spec"]["containers"]
    added = once | {"spec": once["spec"] | {"containers": [mesh, *listed] if front else [*listed, mesh]}}
    second = on_mutate(added, "pods", KNOWN, settings)
    assume(second.allowed)  # not beside a class of devices that the pod names by annotation
    after = patched(added, second)
    containers = requests_by_name(after)
    assert containers.pop("mesh").mem == 2 * unit.mib
    assert containers == before
    assert on_mutate(after, "pods", KNOWN, settings).patch == []


def _stored(pod: Json) -> Json:
    """The pod as kube-apiserver stores it between two calls: canonical quantities, and missing requests set to the
    limits.
    """
    pod = deepcopy(pod)
    for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
        limits = container["resources"]["limits"]
        for name, text in limits.items():
            limits[name] = text.removesuffix("000") + "k" if text.isdigit() and text.endswith("000") else text
        container["resources"]["requests"] = dict(limits)
    return pod


def test_builders_agree_with_the_strategies() -> None:
    assert mutate(build.pod(gpu_mem=8138)).pod["spec"]["containers"][0]["resources"]["limits"][names.SHARE] == "1"
