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
from tests.build import resource_class
from tests.webhook.reviews import Known, on_mutate, patched, resource_classes
from tests.webhook.rewriting import mutate, with_classes
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import AgentSettings, WebhookSettings
from webhook.pods.scheduling import toleration_of_taint

_AMOUNTS = {
    names.GPU_MEM: st.sampled_from(["8138", "8Gi", "0.5Gi", "8000", "8k", "1e3", "6", "1024Mi", "0", "x"]),
    names.GPU_COUNT: st.sampled_from(["1", "2", "3"]),
    names.GPU_CORE: st.sampled_from(["20", "60"]),
    names.WHOLE_GPU: st.sampled_from(["1", "2"]),
    names.SHARE: st.sampled_from(["1", "5"]),
    names.PLACE_MARKER: st.sampled_from(["0", "1"]),
    "cpu": st.just("1"),
    "k80": st.sampled_from(["1", "2", "0"]),
    f"{names.CLASS_PREFIX}k80": st.sampled_from(["1", "2"]),
    "half": st.sampled_from(["1", "2"]),
    f"{names.CLASS_PREFIX}half": st.sampled_from(["1", "2"]),
    "rdma": st.sampled_from(["1", "2"]),
    f"{names.CLASS_PREFIX}rdma": st.sampled_from(["1", "2"]),
    f"{names.CLASS_PREFIX}fpga": st.just("1"),
    names.NVIDIA_GPU: st.sampled_from(["0", "1"]),
}
CLASSES = resource_classes(
    resource_class("k80"),
    resource_class("half", share={"memoryMiB": 4000, "corePercent": 30}),
    *(resource_class(kind, selector={"matchLabels": {"kind": kind}}) for kind in ("rdma", "fpga")),
)


def _strategy_of(*resources: str) -> st.SearchStrategy[Json]:
    """One of the resources, or several with the same meaning."""
    return st.builds(
        dict.fromkeys,
        st.lists(st.sampled_from(resources), min_size=1, max_size=2, unique=True), st.sampled_from(["1", "2"]),
    )  # fmt: skip


def _some(*resources: str) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional={name: _AMOUNTS[name] for name in resources})


def _all_of(*parts: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.tuples(*parts).map(
        lambda parts_found: {name: amount for part in parts_found for name, amount in part.items()}
    )


_NOTHING: st.SearchStrategy[Json] = st.just({})
_K80, _HALF = _strategy_of("k80", f"{names.CLASS_PREFIX}k80"), _strategy_of("half", f"{names.CLASS_PREFIX}half")
_MEMORY = st.fixed_dictionaries(
    {names.GPU_MEM: st.sampled_from(["8138", "8Gi", "0.5Gi", "8000", "8k", "1e3", "1024Mi"])}
)
_CARDS = st.one_of(
    _NOTHING,
    _all_of(_MEMORY, _some(names.GPU_COUNT, names.GPU_CORE)),
    _all_of(_MEMORY, st.fixed_dictionaries({"k80": st.just("1")})),
    _strategy_of(names.WHOLE_GPU, names.NVIDIA_GPU),
    _K80,
    _HALF,
    st.fixed_dictionaries({"half": st.just("1"), names.GPU_CORE: st.just("20")}),
)
_DEVICES = st.one_of(
    _NOTHING, _NOTHING, _strategy_of("rdma", f"{names.CLASS_PREFIX}rdma"), _some(f"{names.CLASS_PREFIX}fpga"),
)  # fmt: skip
# Realistic values, mixed with random ones, most of which are refused.
_MEANT = _all_of(_CARDS, _DEVICES, _some(names.SHARE, names.PLACE_MARKER, "cpu"))
_LIMITS = st.integers(0, 7).flatmap(lambda drawn: _MEANT if drawn else st.fixed_dictionaries({}, optional=_AMOUNTS))
_REFERENCES = ["cardwise.dev/devices.0", "cardwise.dev/mem-fraction.3", names.IDX, "mine"]
_ENV_NAMES = [
    "A", "NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", names.IDX, names.CONTAINER_MEM, names.ENV_XLA_FRACTION,
    names.ENV_GPU_MEMORY_LIMIT, names.ENV_XLA_FRACTION_NEW, names.ENV_FRACTION,
]  # fmt: skip
_ENV = st.lists(
    st.builds(
        lambda name, text, annotation: (
            {"name": name, "value": text}
            if text is not None
            else {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}
        ),
        st.sampled_from(_ENV_NAMES), st.sampled_from(["all", "", "7", None]), st.sampled_from(_REFERENCES),
    ),
    max_size=5,
)  # fmt: skip
_CONTAINERS = st.builds(
    lambda amounts, env, env_from, same: {
        "resources": {"limits": amounts} | ({"requests": dict(amounts)} if same else {}),
        "env": env,
        **({"envFrom": [{"configMapRef": {"name": "x"}}]} if env_from else {}),
    },
    _LIMITS, _ENV, st.booleans(), st.booleans(),
)  # fmt: skip


def name_containers(letter: str, containers: list[Json]) -> list[Json]:
    return [container | {"name": f"{letter}{i}"} for i, container in enumerate(containers)]


_SIDECARS = _CONTAINERS.map(lambda container: container | {"restartPolicy": "Always"})
_TEXTS = ["1", "2", "k80", "fpga,k80", "c0="]
_COUNTS = ["c0=2", "c0=3,c1=2,i0=2"]
_ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        names.IDX: st.sampled_from(_TEXTS),
        names.ASSIGNMENT: st.sampled_from(_TEXTS),
        "mine": st.sampled_from(_TEXTS),
        names.DEVICE_CLASSES: st.sampled_from([*_TEXTS, *_COUNTS]),
        names.GPU_COUNTS: st.sampled_from([*_COUNTS, *_COUNTS, *_COUNTS, "c0=", "2"]),
        names.CLASS: st.sampled_from(["k80", "k80", "half", "half", "rdma"]),
    },
)
PODS = st.builds(
    lambda containers, init, annotations, node: {
        "metadata": {"name": "p", "annotations": annotations, "resourceVersion": "1"},
        "spec": {"containers": name_containers("c", containers), "initContainers": name_containers("i", init)}
        | ({"nodeName": "n1"} if node else {}),
    },
    st.lists(_CONTAINERS, min_size=1, max_size=3), st.lists(_SIDECARS, max_size=2), _ANNOTATIONS, st.booleans(),
)  # fmt: skip
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
        assert limits.get(names.PLACE_MARKER) == ("0" if container.key in marked else None)
        assert names.BIND_MARKER not in limits
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
TEAM = Defaults(gpu_mem="1Gi", policy="spread", mps="required", frameworks="on", sm_percent="memory", min_mps="off")
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
