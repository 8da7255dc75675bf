"""Warnings for pods and workloads that Kubernetes accepts and that would stay pending."""

from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB, Unit
from tests import build
from tests.build import gpu_quota, limit_range, resource_class, resource_quota
from tests.webhook.nodeoffers import offers, required, with_cards
from tests.webhook.reviews import Known, on_advise, on_mutate, on_validate, patched, resource_classes
from tests.working import work
from webhook.cluster import gpuquotas
from webhook.cluster.cards import CardSizes
from webhook.cluster.offers import NodeOffer, NodeOffers
from webhook.pods.context import WebhookSettings

CARDS = CardSizes(MiB(build.P100), 2)
CLASSES = resource_classes(resource_class("nvidia.tesla.k80"))
THERE = {"n1": with_cards(zone="a"), "n2": NodeOffer(frozenset({"nvidia.com/mig-1g.5gb"}))}
TOO_MUCH = (
    "20000 MiB is more than the largest GPU has (16276); request at most 16276Mi, or split it over GPUs with "
    "aliyun.com/gpu-count"
)
TOO_LITTLE = "8 means 8 MiB, less than most programs need to start on a GPU (256 MiB)"
LIMITS = "spec.containers[0].resources.limits"


def known(there: NodeOffers | None = None) -> Known:
    return Known(known_cards=CARDS, known_classes=CLASSES, offered=there or offers(**THERE))


def pod_with_limits(**limits: str) -> Json:
    resources = {"limits": {name.replace("__", "/").replace("_", "-"): amount for name, amount in limits.items()}}
    return build.pod(containers=[{"name": "main", "image": "x", "resources": resources}])


def advice_warnings(manifest: Json, resource: str = "pods", view: Known | None = None, **about: Any) -> tuple[str, ...]:
    settings = about.pop("settings", WebhookSettings(min_share=256))
    decision = on_advise(manifest, resource, view or known(), settings, **about)
    assert decision.allowed
    assert decision.patch == []
    return decision.warnings


def review_warnings(
    pod: Json, settings: WebhookSettings = WebhookSettings(), view: Known | None = None
) -> tuple[str, ...]:
    """The warnings for a pod that requests a card: of /mutate, then /validate."""
    view = view or known()
    after = patched(pod, on_mutate(pod, "pods", view, settings))
    decision = on_validate(after, "pods", view, settings)
    assert decision.allowed, decision.message
    return decision.warnings


def test_unoffered_resource_gets_a_suggestion() -> None:
    assert advice_warnings(pod_with_limits(**{"aliyun.com__gpu_memory": "8"})) == (
        f"{LIMITS}[aliyun.com/gpu-memory]: no node offers it; did you mean aliyun.com/gpu-mem?",
    )
    (warning,) = advice_warnings(pod_with_limits(**{"nvidia.com__gpumem": "8"}))
    assert warning.endswith("no node offers it; did you mean aliyun.com/gpu-mem?")
    (warning,) = advice_warnings(pod_with_limits(**{"nvidia.com__mig_1g.5g": "1"}))
    assert warning.endswith("did you mean nvidia.com/mig-1g.5gb?")
    (warning,) = advice_warnings(pod_with_limits(**{"amd.com__gpu": "1"}))
    assert warning.endswith("no node offers it; the pod waits until a node does; Cardwise shares NVIDIA GPUs only")


def test_offered_and_non_gpu_resources_get_no_warning() -> None:
    for name, amount in (("nvidia.com__mig_1g.5gb", "1"), ("nvidia.com__gpu", "0"), ("rdma__hca", "1"), ("cpu", "1")):
        assert advice_warnings(pod_with_limits(**{name: amount})) == ()
    blind = Known(known_cards=CARDS)
    assert advice_warnings(pod_with_limits(**{"nvidia.com__gpu": "1"}), view=blind) == (), "nodes are not known"


def test_wrong_name_next_to_a_right_one_gets_a_warning() -> None:
    (warning,) = review_warnings(pod_with_limits(**{"aliyun.com__gpu_mem": "8", "aliyun.com__gpu_core": "1"}))
    assert warning.startswith(f"{LIMITS}[aliyun.com/gpu-core]: ")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"schedulerName": "jupyterhub-user-scheduler"},
            (
                "spec.schedulerName: jupyterhub-user-scheduler does not call Cardwise, so the pod waits and never "
                "gets a GPU; remove the field, or write default-scheduler"
            ),
        ),
        (
            {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
            "spec.schedulingGates[kueue.x-k8s.io/admission]: the pod waits until this gate is removed, by Kueue",
        ),
        (
            {"nodeSelector": {"zone": "b"}},
            "spec.nodeSelector: no node with GPUs has zone=b now; the pod waits until one does",
        ),
        (
            required("b"),
            (
                "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution: no node with GPUs matches "
                "it now; the pod waits until one does"
            ),
        ),
    ],
)
def test_obstacles_to_placement_get_warnings(spec: Json, says: str) -> None:
    pod = build.pod(gpu_mem=8000)
    assert review_warnings(pod) == ()
    assert review_warnings(pod | {"spec": pod["spec"] | spec}) == (says,)


def test_unmatched_node_selectors_get_warnings() -> None:
    there = offers(n1=with_cards(zone="a"), n2=with_cards(zone="b"))
    view = known(there)
    view.cards_on = {("", "n1"): CardSizes(MiB(8000), 1), ("", "n2"): CardSizes(MiB(build.P100), 2)}
    view.cards_of = {"nvidia.tesla.k80": CardSizes(MiB(11441), 1)}
    view.cards_on["nvidia.tesla.k80", "n2"] = CardSizes(MiB(11441), 1)
    keeps = "spec.nodeSelector and spec.affinity allow only 1 node with GPUs"
    large, typed = build.pod(gpu_mem=9000), pod_with_limits(**{"cardwise.dev__nvidia.tesla.k80": "1"})
    on = {zone: {"nodeSelector": {"zone": zone}} for zone in "ab"}
    for pod, says in (
        (large, f"{LIMITS}[aliyun.com/gpu-mem]: 9000 MiB is more than the largest GPU has (8000): {keeps}"),
        (typed, f"{LIMITS}[cardwise.dev/nvidia.tesla.k80]: no GPU of the class is in the cluster now: {keeps}"),
    ):
        assert review_warnings(pod, view=view) == ()
        assert review_warnings(pod | {"spec": pod["spec"] | on["a"]}, view=view) == (says,)
        assert review_warnings(pod | {"spec": pod["spec"] | on["b"]}, view=view) == ()


def test_own_gate_and_scheduler_get_no_warning() -> None:
    gang = {names.GROUP_NAME: "g", names.GROUP_NUM: "2"}
    assert review_warnings(build.pod(gpu_mem=8000, annotations=gang)) == ()
    own = WebhookSettings(scheduler="ours", gang_schedulers=frozenset({"ours"}))
    assert review_warnings(build.pod(gpu_mem=8000), own) == ()
    (warning,) = review_warnings(
        build.pod(gpu_mem=8000) | {"spec": build.pod(gpu_mem=8000)["spec"] | {"schedulerName": "x"}}, own
    )
    assert warning.endswith("or write ours")


TEMPLATES: dict[str, Any] = {
    "deployments": lambda t: {"spec": {"template": t}},
    "cronjobs": lambda t: {"spec": {"jobTemplate": {"spec": {"template": t}}}},
    "podtemplates": lambda t: {"template": t},
    "jobs": lambda t: {"spec": {"tasks": [{"name": "worker", "replicas": 2, "template": t}]}},  # Volcano's
    "pytorchjobs": lambda t: {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": t}}}},
    "rayclusters": lambda t: {"spec": {"workerGroupSpecs": [{"template": t}]}},
    "jobsets": lambda t: {"spec": {"replicatedJobs": [{"template": {"spec": {"template": t}}}]}},
    "leaderworkersets": lambda t: {"spec": {"leaderWorkerTemplate": {"workerTemplate": t}}},
}
PATHS = {
    "deployments": "spec.template",
    "cronjobs": "spec.jobTemplate.spec.template",
    "podtemplates": "template",
    "jobs": "spec.tasks[0].template",
    "pytorchjobs": "spec.pytorchReplicaSpecs.Worker.template",
    "rayclusters": "spec.workerGroupSpecs[0].template",
    "jobsets": "spec.replicatedJobs[0].template.spec.template",
    "leaderworkersets": "spec.leaderWorkerTemplate.workerTemplate",
}


def workload(resource: str, **limits: str) -> Json:
    template = {"metadata": {}, "spec": pod_with_limits(**limits)["spec"]}
    manifest: Json = TEMPLATES[resource](template)
    return manifest | {"metadata": {"name": "w"}}


@pytest.mark.parametrize("resource", TEMPLATES)
def test_workload_gets_the_warnings_of_its_pods(resource: str) -> None:
    path = f"{PATHS[resource]}.{LIMITS}"
    assert advice_warnings(workload(resource, **{"aliyun.com__gpu_mem": "20000"}), resource) == (
        f"{path}[aliyun.com/gpu-mem]: {TOO_MUCH}; its pods will be refused",
    )
    assert advice_warnings(workload(resource, **{"aliyun.com__gpu_memory": "8Gi"}), resource) == (
        f"{path}[aliyun.com/gpu-memory]: no node offers it; did you mean aliyun.com/gpu-mem?",
    )
    assert advice_warnings(workload(resource, **{"aliyun.com__gpu_mem": "8"}), resource) == (
        f"{path}[aliyun.com/gpu-mem]: {TOO_LITTLE}; did you mean 8Gi?",
    )
    assert advice_warnings(workload(resource, **{"aliyun.com__gpu_mem": "8Gi"}), resource) == ()


def test_trainjob_resources_per_node_are_checked() -> None:
    """A TrainJob has no template; these resources go into that of its runtime."""

    def job(amount: object) -> Json:
        limits = {"limits": {"aliyun.com/gpu-mem": amount}, "requests": {"cpu": "2"}}
        trainer = {"numNodes": 2, "command": ["train"], "resourcesPerNode": limits}
        return {"metadata": {"name": "w"}, "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}}

    assert advice_warnings(job("20000"), "trainjobs") == (
        f"spec.trainer.resourcesPerNode.limits[aliyun.com/gpu-mem]: {TOO_MUCH}; its pods will be refused",
    )
    assert advice_warnings(job("8"), "trainjobs") == (
        f"spec.trainer.resourcesPerNode.limits[aliyun.com/gpu-mem]: {TOO_LITTLE}; did you mean 8Gi?",
    )
    assert advice_warnings(job("8Gi"), "trainjobs") == ()
    assert advice_warnings({"metadata": {}, "spec": {"trainer": {"resourcesPerNode": [5]}}}, "trainjobs") == ()


def test_kueue_workload_needs_plain_mib_numbers() -> None:
    for resource in ("deployments", "rayclusters"):
        queued = workload(resource, **{"aliyun.com__gpu_mem": "8Gi"})
        queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "cards"}
        (warning,) = advice_warnings(queued, resource)
        says = "Kueue ignores units and would count 8Gi as 8589934592; write 8192, which is the same in MiB"
        assert warning == f"{PATHS[resource]}.{LIMITS}[aliyun.com/gpu-mem]: {says}"
    for amount in ("8192", "8k"):
        queued = workload("jobsets", **{"aliyun.com__gpu_mem": amount})
        queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "cards"}
        assert advice_warnings(queued, "jobsets") == ()


def test_kueue_workload_needs_plain_gib_numbers_in_gib_namespaces() -> None:
    for amount, says in (
        ("8", None),
        ("8Gi", "Kueue ignores units and would count 8Gi as 8589934592; write 8, which is the same in GiB"),
        ("1500Mi", "Kueue ignores units and would count 1500Mi as 1572864000; write whole GiB"),
    ):
        queued = workload("jobsets", **{"aliyun.com__gpu_mem": amount})
        queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "cards"}
        warnings = advice_warnings(queued, "jobsets", settings=WebhookSettings(unit=Unit.GIB))
        assert warnings == ((f"{PATHS['jobsets']}.{LIMITS}[aliyun.com/gpu-mem]: {says}",) if says else ())


def test_warnings_are_not_repeated() -> None:
    owned = workload("deployments", **{"aliyun.com__gpu_mem": "20000"})
    owned["metadata"]["ownerReferences"] = [{"controller": True}]
    assert advice_warnings(owned, "replicasets") == ()
    many_groups = {
        "spec": {"groups": [workload("podtemplates", **{"aliyun.com__gpu_mem": str(i)}) for i in range(1, 40)]}
    }
    assert len(advice_warnings(many_groups | {"metadata": {}}, "rayclusters")) == 8


def test_objects_without_a_template_are_admitted() -> None:
    odd = {"spec": {"template": {"spec": {"containers": [{"name": 5, "resources": []}]}}}, "metadata": {}}
    assert advice_warnings(odd, "rayclusters") == ()
    assert advice_warnings({"spec": None, "metadata": {}}, "rayclusters") == ()
    exempt = WebhookSettings(exempt_namespaces=frozenset({"kube-system"}))
    assert (
        advice_warnings(pod_with_limits(**{"nvidia.com__gpumem": "1"}), namespace="kube-system", settings=exempt) == ()
    )


def test_warnings_about_names_are_limited() -> None:
    names_of = {f"aliyun.com__gpu_core.percenta{i:05}": "1" for i in range(3000)}
    assert len(advice_warnings(pod_with_limits(**names_of))) == 8


def pod_with_key(place: str, key: str, text: str = "x", **limits: str) -> Json:
    """A pod with one annotation or label, and these limits."""
    pod = pod_with_limits(**limits) if limits else build.pod(containers=[{"name": "main", "image": "x"}])
    return pod | {"metadata": {"name": "p", place: {key: text}}}


@pytest.mark.parametrize(
    ("place", "key", "text", "says"),
    [
        ("annotations", "scheduling.k8s.io/group-num", "4", "did you mean scheduling.k8s.io/group-pod-num?"),
        ("labels", "scheduling.k8s.io/groupname", "train", "did you mean scheduling.k8s.io/group-name?"),
        ("annotations", "Cardwise.dev/policy", "spread", "did you mean cardwise.dev/policy?"),
        ("annotations", "gpu-memory", "2000", "did you mean the limit aliyun.com/gpu-mem?"),
        ("annotations", "nvidia.com/use-gputype", "A100", "did you mean cardwise.dev/class?"),
    ],
)
def test_unread_annotation_or_label_gets_a_suggestion(place: str, key: str, text: str, says: str) -> None:
    warning = f"metadata.{place}[{key}]: Cardwise does not read it; {says}"
    assert advice_warnings(pod_with_key(place, key, text)) == (warning,)
    assert review_warnings(pod_with_key(place, key, text, **{"aliyun.com__gpu_mem": "8Gi"})) == (warning,)
    template = pod_with_key(place, key, text, **{"aliyun.com__gpu_mem": "8Gi"})
    manifest = {"metadata": {"name": "w"}, "spec": {"template": template}}
    assert advice_warnings(manifest, "deployments") == (f"spec.template.{warning}",)
    for_another = pod_with_key(place, key, text)
    for_another["spec"]["schedulerName"] = "kai-scheduler"
    assert advice_warnings(for_another) == (), "that scheduler may read it"


def test_annotation_written_as_a_label_gets_a_warning() -> None:
    pod = pod_with_key("labels", names.POLICY, "spread", **{"aliyun.com__gpu_mem": "8Gi"})
    assert review_warnings(pod) == (f"metadata.labels[{names.POLICY}]: Cardwise reads it as an annotation only",)


def test_warnings_about_annotations_are_limited() -> None:
    pod = pod_with_key("annotations", "gpu-memory")
    pod["metadata"]["annotations"] = {f"cardwise.io/polic{i:05}": "x" for i in range(3000)}
    pod["metadata"]["annotations"] |= {f"Cardwise.dev/polic{chr(97 + i)}": "x" for i in range(20)}
    assert len(advice_warnings(pod)) == 8


def namespace_warnings(labels: Json | None = None, **annotations: str) -> tuple[str, ...]:
    keys = {f"cardwise.dev/{key.replace('_', '-')}": text for key, text in annotations.items()}
    manifest = {"metadata": {"name": "team", "labels": labels or {}, "annotations": keys}}
    decision = on_validate(manifest, "namespaces", known())
    assert decision.allowed, decision.message
    return decision.warnings


def test_ineffective_namespace_defaults_get_warnings() -> None:
    on = {names.DEFAULTS_LABEL: "enabled"}
    no_effect = "has no effect without the label cardwise.dev/defaults=enabled"
    unread = "Cardwise does not read it; did you mean cardwise.dev/default-gpu-mem?"
    assert namespace_warnings(on, default_gpu_mem="2Gi") == namespace_warnings(on) == namespace_warnings() == ()
    assert namespace_warnings({names.DEFAULTS_LABEL: "true"}) == (
        "metadata.labels[cardwise.dev/defaults]: 'true' does not enable the defaults; write enabled",
    )
    assert namespace_warnings(default_gpu_mem="2Gi", isolation="mps") == (
        f"metadata.annotations[cardwise.dev/default-gpu-mem]: {no_effect}",
        f"metadata.annotations[cardwise.dev/isolation]: {no_effect}",
    )
    assert namespace_warnings(on, default_gpumem="2Gi") == (
        f"metadata.annotations[cardwise.dev/default-gpumem]: {unread}",
    )
    assert namespace_warnings({names.DEFAULTS_LABEL: "disabled"}, default_gpu_mem="2Gi") == (), (
        "switched off on purpose"
    )
    (warning,) = namespace_warnings({names.DEFAULTS_LABEL: "enabled", names.DEFAULT_GPU_MEM: "2Gi"})
    assert warning.endswith(f"did you mean the annotation {names.DEFAULT_GPU_MEM}?")


def test_unread_own_key_on_a_namespace_gets_a_warning() -> None:
    unread = "Cardwise does not read it on a namespace"
    assert namespace_warnings(foo="x") == (f"metadata.annotations[cardwise.dev/foo]: {unread}",)
    assert namespace_warnings(**{"class": "nvidia.tesla.k80"}) == (
        f"metadata.annotations[cardwise.dev/class]: {unread}",
    )
    assert namespace_warnings({"cardwise.dev/team": "a"}) == (f"metadata.labels[cardwise.dev/team]: {unread}",)
    assert namespace_warnings({"example.com/team": "a", names.GPU_MEM_UNIT: "GiB"}) == ()


def quota(*gpu_quotas: Json, **hard: str) -> tuple[str, ...]:
    view = known()
    view.standings = {"default": [gpuquotas.parse(manifest) for manifest in gpu_quotas]}
    keys = {name.replace("__", "/").replace("_", "-"): amount for name, amount in hard.items()}
    return advice_warnings(resource_quota(keys), "resourcequotas", view)


WHOLE = {"requests.cardwise.dev__gpu": "0"}
MEM = {"requests.aliyun.com__gpu_mem": "65536"}


def test_ineffective_quota_keys_get_warnings() -> None:
    (warning,) = quota(**{"requests.aliyun.com__gpumem": "65536"})
    hint = "did you mean requests.aliyun.com/gpu-mem?"
    assert warning == f"spec.hard[requests.aliyun.com/gpumem]: no node offers it, so it counts nothing; {hint}"
    (warning,) = quota(**{"requests.nvidia.com__tesla.k80": "1"})
    assert warning.endswith("did you mean requests.cardwise.dev/nvidia.tesla.k80?")
    (warning,) = quota(**{"requests.cardwise.dev__nvidia.tesla.k8": "1"})
    assert warning.endswith("it counts nothing; did you mean requests.cardwise.dev/nvidia.tesla.k80?")
    (warning,) = quota(**{"requests.cardwise.dev__gpu-mem": "65536"})
    assert warning.endswith("it counts nothing; did you mean requests.aliyun.com/gpu-mem?")
    (warning,) = quota(**{"requests.cardwise.dev__nvidia.b200": "1"})
    assert warning.endswith("there is no ResourceClass nvidia.b200 now; until there is one, it counts nothing")
    (warning,) = quota(**{"requests.amd.com__gpu": "1"})
    assert warning.endswith("no node offers it, so it counts nothing until one does")
    assert (
        quota(cpu="1", **{"requests.amd.com__gpu": "0", "requests.nvidia.com__mig-1g.5gb": "1"}, **MEM, **WHOLE) == ()
    )
    blind = Known(known_cards=CARDS)
    assert advice_warnings({"spec": {"hard": {"requests.nvidia.com/gpu": "1"}}}, "resourcequotas", blind) == ()


def test_quota_of_shares_only_gets_a_warning() -> None:
    (warning,) = quota(**MEM)
    assert warning == (
        "spec.hard[requests.aliyun.com/gpu-mem]: counts shares only, so pods that request aliyun.com/gpu-count or a "
        "class have no limit; add requests.cardwise.dev/gpu or a GPUQuota, or ignore this if another quota limits such "
        "pods"
    )
    assert quota(**MEM, **WHOLE) == quota(**WHOLE) == ()

    assert quota(gpu_quota({"memoryMiB": "64Gi"}), **MEM) == quota(gpu_quota({"gpus": 0}), **MEM) == ()
    assert quota(gpu_quota({"class": "nvidia.tesla.k80", "gpus": 0}), **MEM) == (warning,)
    assert quota(gpu_quota({"shares": 9}), **MEM) == (warning,)


def test_quota_of_whole_cards_only_gets_a_warning() -> None:
    alone = {"requests.cardwise.dev__gpu": "2"}
    (warning,) = quota(**alone)
    assert warning == (
        "spec.hard[requests.cardwise.dev/gpu]: counts whole GPUs only, so pods that request aliyun.com/gpu-mem have "
        "no limit; add requests.aliyun.com/gpu-mem or a GPUQuota, or ignore this if another quota limits such pods"
    )

    assert (
        quota(**alone, **MEM)
        == quota(gpu_quota({"shares": 9}), **alone)
        == quota(gpu_quota({"memoryMiB": 9}), **alone)
        == ()
    )
    assert quota(gpu_quota({"gpus": 2}), **alone) == (warning,)


def test_too_small_quota_suggests_gib() -> None:
    (warning,) = quota(**{"requests.aliyun.com__gpu_mem": "8"}, **WHOLE)
    assert warning == (
        "spec.hard[requests.aliyun.com/gpu-mem]: 8 means 8 MiB, less than most programs need to start on a GPU "
        "(256 MiB); did you mean 8Gi?"
    )
    for amount in ("0", "256", "8k"):
        assert quota(**{"requests.aliyun.com__gpu_mem": amount}, **WHOLE) == (), "none on purpose, or a useful share"


def test_too_small_limit_range_suggests_gib() -> None:
    def limit_range_warnings(**ranges: str) -> tuple[str, ...]:
        entry = {"type": "Container"} | {name: {names.GPU_MEM: amount} for name, amount in ranges.items()}
        return advice_warnings(limit_range(entry), "limitranges")

    (warning,) = limit_range_warnings(max="8", min="1")
    assert warning.startswith("spec.limits[0].max[aliyun.com/gpu-mem]: 8 means 8 MiB, ")
    assert warning.endswith("did you mean 8Gi?")
    assert limit_range_warnings(max="8192", min="1") == ()


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ({"zonee": "a"}, "; did you mean zone?"),
        ({"zone": "A"}, "; did you mean zone=a?"),
        ({"nvidia.com/gpu.prodct": "Tesla-T4"}, "; did you mean nvidia.com/gpu.product?"),
        ({"nvidia.com/gpu.product": "Tesla T4"}, "; did you mean nvidia.com/gpu.product=Tesla-T4?"),
        ({"modle": "t4"}, "; nodes have no label model: to choose a GPU by its model, request a ResourceClass"),
        ({"model": "t4"}, "; nodes have no label model: to choose a GPU by its model, request a ResourceClass"),
        ({"rack": "12"}, ""),
    ],
)
def test_nearly_matching_node_selector_gets_a_suggestion(selector: dict[str, str], hint: str) -> None:
    labels = {"zone": "a", "nvidia.com/gpu.product": "Tesla-T4"}
    pod = build.pod(gpu_mem=8000)
    pod["spec"]["nodeSelector"] = selector
    (warning,) = review_warnings(pod, view=known(offers(n1=with_cards(**labels))))
    (entry,) = selector.items()
    waits = f"no node with GPUs has {'='.join(entry)} now; the pod waits until one does"
    assert warning == f"spec.nodeSelector: {waits}{hint}"


def test_ineffective_limit_range_keys_get_warnings() -> None:
    limits = [
        {"type": "Container", "max": {"cpu": "1", "aliyun.com/gpumem": "8192"}, "default": {names.GPU_MEM: "1024"}}
    ]
    (warning,) = advice_warnings(limit_range(*limits), "limitranges")
    hint = "did you mean aliyun.com/gpu-mem?"
    assert warning == f"spec.limits[0].max[aliyun.com/gpumem]: no node offers it, so it counts nothing; {hint}"


@pytest.mark.parametrize(
    ("resource", "make_manifest"),
    [
        (
            "pods",
            lambda n: {"metadata": {"annotations": {f"cardwise.io/polic{i:05}": "x" for i in range(n)}}, "spec": {}},
        ),
        ("resourcequotas", lambda n: {"spec": {"hard": {f"requests.example.org/gpu{i:05}": "0" for i in range(n)}}}),
        ("limitranges", lambda n: {"spec": {"limits": [{"max": {f"example.org/gpu{i:05}": "0" for i in range(n)}}]}}),
    ],
)
def test_advice_cost_is_limited_for_many_keys(resource: str, make_manifest: Any) -> None:
    def steps(count: int) -> int:
        with work() as advising:
            advice_warnings(make_manifest(count), resource)
        return advising.steps

    assert steps(2000) < 4 * steps(100)
