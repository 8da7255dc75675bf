"""The work for an object is linear in its size: tenants choose the size, and other reviews wait meanwhile."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cardwise.core.api import lookalikes, names
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests import build
from tests.build import resource_class
from tests.webhook.reviews import Known, body, patched, resource_classes
from tests.webhook.reviews import review as request
from tests.working import work
from webhook.cluster.offers import NodeOffer, NodeOffers
from webhook.pods import resources
from webhook.pods.context import WebhookSettings
from webhook.server import decisions, review
from webhook.templates import templates

SETTINGS = WebhookSettings(nvidia_gpu="take")
CLASSES = resource_classes(resource_class("k80"), resource_class("half", share={"memoryMiB": 64}))
SMALL = 10  # doubled three times, it is still within all size limits


def known() -> Known:
    offers = NodeOffers()
    labels = {"zone": "a"}
    offers.on_change("n1", None, NodeOffer(frozenset({names.SHARE, names.GPU_MEM}), labels))
    return Known(known_classes=CLASSES, offered=offers)


def of_spec(field: str, make: Callable[[int], Any]) -> Callable[[int], Json]:
    def pod(size: int) -> Json:
        built = build.pod(gpu_mem="1Gi")
        built["spec"][field] = make(size)
        return built

    return pod


def of_container(field: str, make: Callable[[int], Any]) -> Callable[[int], Json]:
    return of_spec("containers", lambda size: [{"name": "c", **_limits(names.GPU_MEM), field: make(size)}])


def of_metadata(field: str, make: Callable[[int], Any]) -> Callable[[int], Json]:
    def pod(size: int) -> Json:
        built = build.pod(gpu_mem="1Gi")
        built["metadata"][field] = make(size)
        return built

    return pod


def _limits(name: str) -> Json:
    return {"resources": {"limits": {name: "1Gi"}}}


def _required(*conditions: Json) -> Json:
    terms = [{"matchExpressions": list(conditions)}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def split_shares(size: int) -> Json:
    """Rewritten containers, and as many entries in the annotation of their counts: each could be looked for in all."""
    containers = []
    for i in range(size):
        share = {"resources": {"limits": {names.GPU_MEM: "1", names.SHARE: "1"}}}
        env = resources.own_env_entries(ContainerRequest(key=str(i), name=f"c{i}", cards=1, mem=MiB(1)), mps=False)
        containers.append({"name": f"c{i}", "env": env} | share)
    built = build.pod(annotations={names.GPU_COUNTS: ",".join(f"x{i}=2" for i in range(8 * size))})
    built["spec"]["containers"] = containers
    return built


PODS: dict[str, Callable[[int], Json]] = {
    "annotations": of_metadata("annotations", lambda size: {f"a{i}": "x" for i in range(size)}),
    "annotations of ours": of_metadata(
        "annotations", lambda size: {f"cardwise.dev/a{i}": "x" for i in range(8 + size)}
    ),
    "split counts": of_metadata(
        "annotations", lambda size: {names.GPU_COUNTS: ",".join(f"c{i}=2" for i in range(size))}
    ),
    "split counts of many containers": split_shares,
    "labels": of_metadata("labels", lambda size: {f"a{i}": "x" for i in range(size)}),
    "owners": of_metadata("ownerReferences", lambda size: [{"name": f"a{i}"} for i in range(size)]),
    "containers": of_spec(
        "containers", lambda size: [{"name": f"c{i}", **_limits(names.GPU_MEM)} for i in range(size)]
    ),
    "sidecars": of_spec(
        "initContainers",
        lambda size: [{"name": f"c{i}", "restartPolicy": "Always", **_limits(names.GPU_MEM)} for i in range(size)],
    ),
    "variables": of_container("env", lambda size: [{"name": f"E{i}", "value": "x"} for i in range(size)]),
    "variables of MPS": of_container(
        "env", lambda size: [{"name": f"CUDA_MPS_{i}", "value": "x"} for i in range(size)]
    ),
    "one variable": of_container("env", lambda size: [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}] * size),
    "visible devices": of_container(
        "env", lambda size: [{"name": "CUDA_VISIBLE_DEVICES", "value": ",".join(map(str, range(size)))}]
    ),
    "mounts": of_container("volumeMounts", lambda size: [{"name": f"v{i}", "mountPath": f"/{i}"} for i in range(size)]),
    "volumes": of_spec("volumes", lambda size: [{"name": f"v{i}", "emptyDir": {}} for i in range(size)]),
    "gates": of_spec("schedulingGates", lambda size: [{"name": f"g/{i}"} for i in range(size)]),
    "tolerations": of_spec("tolerations", lambda size: [{"key": f"t{i}", "operator": "Exists"} for i in range(size)]),
    "node selector": of_spec("nodeSelector", lambda size: {f"n{i}": "x" for i in range(size)}),
    "node affinity": of_spec(
        "affinity", lambda size: _required(*({"key": f"k{i}", "operator": "Exists"} for i in range(size)))
    ),
    "values": of_spec(
        "affinity",
        lambda size: _required({"key": "zone", "operator": "In", "values": [str(i) for i in range(size)]}),
    ),
}


def _fields(size: int) -> list[Json]:
    """managedFields of this many managers, each with its own limit."""

    def fields_of_container(i: int) -> Json:
        container = {"f:resources": {"f:limits": {f"f:x{i}": {}}}}
        template = {"f:spec": {"f:containers": {'k:{"name":"c"}': container}}}
        return {"operation": "Apply", "manager": f"m{i}", "fieldsV1": {"f:spec": {"f:template": template}}}

    return [fields_of_container(i) for i in range(size)]


def deployment(size: int) -> Json:
    spec = {"containers": [{"name": f"c{i}", **_limits("k80")} for i in range(size)]}
    return {
        "metadata": {"name": "d", "managedFields": _fields(size)},
        "spec": {"template": {"metadata": {}, "spec": spec}},
    }


def of_one_name(size: int) -> Json:
    """A Deployment with this many containers of one name, and a record as long, before Kubernetes refuses it."""
    containers = [{"name": "c", **_limits("k80")} for _ in range(size)]
    record = {"c": [f"{names.CLASS_PREFIX}k{i}" for i in range(8 * size)]}
    return {
        "metadata": {"name": "d", "annotations": {names.REWRITTEN: json.dumps(record)}},
        "spec": {"template": {"metadata": {}, "spec": {"containers": containers}}},
    }


def job(size: int) -> Json:
    """An object of a custom kind with a pod template."""
    template = {"spec": {"containers": [{"name": "c", **_limits("k80")}]}}
    return {"spec": {"replicaSpecs": {f"r{i}": {"template": template, "x": {"y": [[]]}} for i in range(size)}}}


def quota(size: int) -> Json:
    return build.resource_quota({f"requests.cardwise.dev/c{i}": "1" for i in range(size)})


def limit_range(size: int) -> Json:
    limits = [{"type": "Container", "default": {names.GPU_MEM: "1Gi", f"a{i}": "1"}} for i in range(size)]
    return build.limit_range(*limits)


def gpu_quota(size: int) -> Json:
    return build.gpu_quota(*({"class": f"c{i}", "gpus": 1} for i in range(size)))


def of_class(size: int) -> Json:
    conditions = [{"key": f"k{i}", "operator": "In", "values": ["a", "7"]} for i in range(size)]
    return build.resource_class(selector={"matchExpressions": conditions})


OTHERS = {
    "deployments": deployment,
    "pytorchjobs": job,
    "resourcequotas": quota,
    "limitranges": limit_range,
    "gpuquotas": gpu_quota,
    "resourceclasses": of_class,
}


def count_review_steps(resource: str, manifest: Json, operation: str = "CREATE") -> int:
    """The steps of all paths together; /validate gets the object that /mutate returns."""
    view = known()
    old = manifest if operation == "UPDATE" else None
    with work() as done:
        for decide in (decisions.decide_mutate, decisions.decide_validate, decisions.decide_advise):
            decoded = review.decode(body(manifest, resource, operation=operation, old=old))
            decision = decide(decoded, view, SETTINGS)
            if decision.patch:
                manifest = patched(manifest, decision)
    return done.steps


def is_linear(steps: Callable[[int], int]) -> bool:
    """Whether doubling the additional size doubles the additional cost; a quadratic cost would be four times as
    much.
    """
    steps(SMALL)  # work that is done once per process
    first, second, third = (steps(SMALL * times) for times in (2, 4, 8))
    return third - second <= 2.6 * max(second - first, 1000)


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
@pytest.mark.parametrize("field", PODS)
def test_pods(field: str, operation: str) -> None:
    assert is_linear(lambda size: count_review_steps("pods", PODS[field](size), operation))


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
@pytest.mark.parametrize("resource", OTHERS)
def test_other_objects(resource: str, operation: str) -> None:
    assert is_linear(lambda size: count_review_steps(resource, OTHERS[resource](size), operation))


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
def test_containers_of_one_name(operation: str) -> None:
    assert is_linear(lambda size: count_review_steps("deployments", of_one_name(size), operation))


NEAR = {f"vendor{i}.co/gpu-acceleratr-{i}": "0" for i in range(8)}
MANY = {
    "limitranges": {"spec": {"limits": [{"max": NEAR, "default": NEAR} for _ in range(100)]}},
    "resourcequotas": {"spec": {"hard": {f"requests.{name}{i}": "0" for name in NEAR for i in range(100)}}},
    "pytorchjobs": {
        "spec": {
            f"r{i}": {"spec": {"containers": [{"name": "c", "resources": {"limits": dict.fromkeys(NEAR, "1")}}]}}
            for i in range(100)
        }
    },
    "pods": {"spec": {"containers": [{"name": "c", "resources": {"limits": dict.fromkeys(NEAR, "1")}}] * 100}},
}


@pytest.mark.parametrize("resource", MANY)
def test_few_names_of_an_object_are_compared_with_all_that_nodes_offer(
    resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand limits of a LimitRange used to occupy a thread for 38 s while all others waited."""
    compared = list[str]()

    def suggest(name: str, others: object) -> str:
        compared.append(name)
        return ""

    monkeypatch.setattr(lookalikes, "suggest_resource", suggest)
    decisions.decide_advise(review.decode(body(MANY[resource], resource)), known(), SETTINGS)
    assert len(compared) <= 8


def replicas(count: int, containers: int) -> Json:
    """An object with as many templates, of as many containers each."""
    spec = {"containers": [{"name": f"c{i}", **_limits(names.GPU_MEM)} for i in range(containers)]}
    return {"spec": {f"r{i}": {"template": {"metadata": {}, "spec": spec}} for i in range(count)}}


@pytest.mark.parametrize(
    ("count", "containers", "judged"), [(1, 128, 1), (32, 128, 1), (32, 60, 2), (100, 16, 8), (100, 1, 16), (3, 1, 3)]
)
def test_check_of_all_templates_is_limited_to_one_pod(
    count: int, containers: int, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 templates of 128 containers took 0.7 s, and the API server waits one second for advice."""
    sizes = list[int]()

    def judge(template: Json, *_: object) -> tuple[str, ...]:
        sizes.append(len(template["spec"]["containers"]))
        return ()

    monkeypatch.setattr(decisions, "_warn_template", judge)
    data = msgspec.json.encode(request(replicas(count, containers), "pytorchjobs"))
    decisions.decide_advise(review.decode(data), known(), SETTINGS)
    assert sizes == [containers] * judged


def test_only_paths_of_templates_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an object of 900 levels, all paths together are 450 times as long as the longest."""
    spelled = list[str]()
    format_path = templates._format_path
    monkeypatch.setattr(templates, "_format_path", lambda path: spelled.append(format_path(path)) or spelled[-1])
    deep: Json = replicas(1, 1)["spec"]["r0"]
    for i in range(100):
        deep = {f"level{i}": [{"x": {}}, deep]}
    ((path, _),) = templates.find_templates({"spec": deep}, "pytorchjobs")
    assert spelled == [path]
    assert path.startswith("spec.level99[1].level98[1].")
    assert path.endswith(".level0[1].template")


def test_cost_of_a_node_offer_is_independent_of_others() -> None:
    offers = NodeOffers()
    offer = NodeOffer(frozenset({names.SHARE, names.GPU_MEM}))
    offers.on_change("n1", None, offer)

    def steps() -> int:
        with work() as done:
            offers.on_change("n1", offer, offer)
        return done.steps

    before = steps()
    offers.on_change("n2", None, NodeOffer(frozenset(f"x{i}/gpu" for i in range(1000))))
    assert steps() <= before + 10
    offers.on_delete("n2", NodeOffer(frozenset(f"x{i}/gpu" for i in range(1000))))
    assert offers.resources() == offer.resources


def test_floats_are_parsed_in_bounded_time() -> None:
    """msgspec took 9 µs for 2.2250738585072011e-308, so that 7 MB of such numbers blocked all threads for three
    seconds.
    """
    assert review._decode_object.__self__.float_hook is float
    read = review.decode(body({"spec": {"x": 0.5}}, "x").replace(b"0.5", b"2.2250738585072011e-308"))
    assert read.object["spec"]["x"] == 2.2250738585072011e-308


def test_unread_fields_are_not_decoded() -> None:
    """One MiB of them as dicts kept all threads of the process from running for a quarter of a second."""
    lists = msgspec.Raw(b"[" + b"[[]]," * 96_000 + b"1]")
    pod = build.pod(gpu_mem=8) | {"status": {}}
    metadata = pod["metadata"] | {"x": lists, "managedFields": [{"fieldsV1": {"a": lists}}]}
    fat = pod | {"x": lists, "metadata": metadata}
    data = msgspec.json.encode(request(fat, operation="UPDATE", old=fat))
    assert review.decode(data) == review.decode(body(pod, operation="UPDATE", old=pod))


def test_managed_fields_are_decoded_only_if_compared() -> None:
    for operation, read in (("CREATE", False), ("UPDATE", True)):
        decoded = review.decode(body(deployment(2), "deployments", operation=operation, old=deployment(1)))
        assert ("managedFields" in decoded.object["metadata"]) == read
