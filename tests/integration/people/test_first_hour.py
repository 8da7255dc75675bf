"""What a person is told who does something for the first time, on the real API server."""

import json
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.cluster.cards import TestCard
from tests.integration.admission.api import Api
from tests.integration.commands import cardwise
from tests.integration.sharing import Space, deployment, workload

pytestmark = [pytest.mark.cluster("sim")]


DEVICES = Path(__file__).parents[3] / "examples" / "devices"


def warnings_of(space: Space, manifest: Json) -> str:
    """The warnings of `kubectl create`, which must go through. None of those of a webhook that has not answered in the
    second that it has.
    """
    done = Api(space.cluster).run("create", "--dry-run=server", "-n", space.name, "-f", "-", stdin=manifest)
    assert done.returncode == 0, done.stderr
    return done.stderr


def tells(space: Space, manifest: Json, *texts: str) -> None:
    """Some `kubectl create` of it is warned with all of these."""
    space.wait(lambda: all(text in warnings_of(space, manifest) for text in texts), f"a warning says {texts}")


def naming(resource: str) -> Json:
    pod = build.pod("named")
    pod["metadata"].pop("namespace")
    pod["spec"]["containers"][0]["resources"] = {"limits": {resource: "1"}}
    return pod


def mine(manifest: Json, **spec: Any) -> Json:
    manifest["metadata"].pop("namespace", None)
    manifest["spec"] |= spec
    return manifest


@pytest.fixture
def known(space: Space) -> Space:
    """With two cards that the webhook knows."""
    space.nodes()
    space.wait(
        lambda: "did you mean" in warnings_of(space, naming("aliyun.com/gpu-memory")), "the webhook knows the nodes"
    )
    space.wait(lambda: "more than the largest" in warnings_of(space, wide(space)), "the webhook knows the cards")
    return space


def wide(space: Space) -> Json:
    workload: Json = deployment("wide", 1, gpu_mem=90000)
    workload["metadata"]["namespace"] = space.name
    return workload


def test_names_that_nobody_offers_are_told_with_what_was_meant(known: Space) -> None:
    for written in ("aliyun.com/gpu-memory", "aliyun.com/gpumem", "nvidia.com/gpumem"):
        tells(known, naming(written), f"[{written}]: no node offers it; did you mean {names.GPU_MEM}?")
    tells(known, naming(names.NVIDIA_GPU), f"did you mean {names.GPU_COUNT}?")
    assert warnings_of(known, naming("example.org/fpga")) == ""


def test_what_would_wait_for_ever_is_told_when_it_is_created(known: Space) -> None:
    tells(known, mine(build.pod("p", gpu_mem=8)), "8 means 8 MiB")
    ours = {"gpu_mem": 4000}
    assert warnings_of(known, mine(build.pod("p", **ours))) == ""
    hub = mine(build.pod("p", **ours), schedulerName="jupyterhub-user-scheduler")
    tells(known, hub, "jupyterhub-user-scheduler does not call Cardwise")
    gate = {"name": "kueue.x-k8s.io/admission"}
    tells(known, mine(build.pod("p", **ours), schedulingGates=[gate]), "removed, by Kueue")
    nowhere = mine(build.pod("p", **ours), nodeSelector={"accelerator": "none-such"})
    tells(known, nowhere, "no node with GPUs has accelerator=none-such now")


def test_a_pod_that_keeps_to_nodes_without_what_it_asks_for_is_told(known: Space) -> None:
    (small,) = known.nodes(1, [TestCard(memory_mib=4096)])
    on_small = {"nodeSelector": {"kubernetes.io/hostname": small}}
    known.wait(
        lambda: "allow only 1 node with GPUs" in warnings_of(known, mine(build.pod("p", gpu_mem=8000), **on_small)),
        "the webhook knows the small card",
    )
    assert warnings_of(known, mine(build.pod("p", gpu_mem=4000), **on_small)) == ""
    condition = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["none-such"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [condition]}]}
    nowhere = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}
    tells(known, mine(build.pod("p", gpu_mem=4000), **nowhere), "no node with GPUs matches it now")


def test_workloads_whose_pods_can_never_run_are_told_the_largest_amount_that_fits(known: Space) -> None:
    for kind in ("Deployment", "StatefulSet", "Job", "CronJob", "ReplicaSet"):
        template = {"metadata": {"labels": {"a": "b"}}, "spec": build.pod(gpu_mem=90000)["spec"]}
        spec: Json = {"template": template}
        if kind in ("Job", "CronJob"):
            template["spec"]["restartPolicy"] = "Never"
        else:
            spec["selector"] = {"matchLabels": {"a": "b"}}
        at = "spec.template"
        if kind == "CronJob":
            spec, at = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": spec}}, "spec.jobTemplate.spec.template"
        version = "batch/v1" if kind in ("Job", "CronJob") else "apps/v1"
        tells(
            known,
            {"apiVersion": version, "kind": kind, "metadata": {"name": "w"}, "spec": spec},
            f"{at}.spec.containers[0].resources.limits[{names.GPU_MEM}]: 90000 MiB is more than",
            f"request at most {build.P100}",
            "its pods will be refused",
        )


TEMPLATE = {"spec": build.pod(gpu_mem=90000)["spec"]}
RESOURCES = {"limits": {names.GPU_MEM: "90000"}}


@pytest.mark.parametrize(
    ("of", "spec", "template_path"),
    [
        (
            ("ray.io", "v1", "RayJob"),
            {"rayClusterSpec": {"workerGroupSpecs": [{"template": TEMPLATE}]}},
            "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.containers[0].resources",
        ),
        (
            ("trainer.kubeflow.org", "v1alpha1", "TrainJob"),
            {"trainer": {"numNodes": 2, "resourcesPerNode": RESOURCES}},
            "spec.trainer.resourcesPerNode",
        ),
    ],
)
def test_kinds_of_others_are_told_too(known: Space, of: tuple[str, str, str], spec: Json, template_path: str) -> None:
    """Stand-ins, by the names of the kinds."""
    group, version, kind = of
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names_of = {"plural": f"{kind.lower()}s", "singular": kind.lower(), "kind": kind}
    crd_name = f"{kind.lower()}s.{group}"
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": crd_name, "annotations": {"api-approved.kubernetes.io": "unapproved"}},
        "spec": {"group": group, "scope": "Namespaced", "names": names_of, "versions": [served]},
    }  # fmt: skip
    api = Api(known.cluster)
    manifest = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": "r"}, "spec": spec}
    api.ok("create", "-f", "-", stdin=crd)
    try:

        def warnings_of_creation() -> str:
            return api.run("create", "--dry-run=server", "-n", known.name, "-f", "-", stdin=manifest).stderr

        known.wait(
            lambda: f"{template_path}.limits[{names.GPU_MEM}]: 90000 MiB is more than" in warnings_of_creation(),
            "it is warned about",
        )
    finally:
        api.ok("delete", "crd", crd_name)


def test_nobody_is_refused_while_the_webhook_is_away(known: Space) -> None:
    webhook = known.cluster.process("webhook")
    webhook.stop()
    try:
        assert warnings_of(known, naming(names.NVIDIA_GPU)) == ""
        assert warnings_of(known, wide(known)) == ""
    finally:
        webhook.restart()
        known.cluster.parts.wait_ready("webhook")


def test_a_variable_of_ones_own_may_name_the_share(known: Space) -> None:
    pod = mine(build.pod("p", gpu_mem=4000))
    pod["spec"]["containers"][0]["env"] = [{"name": "OPTIONS", "value": "--fraction=$(CARDWISE_MEM_FRACTION)"}]
    document = json.loads(
        Api(known.cluster).ok("create", "--dry-run=server", "-n", known.name, "-o", "json", "-f", "-", stdin=pod)
    )
    order = [entry["name"] for entry in document["spec"]["containers"][0]["env"]]
    assert order.index(names.ENV_FRACTION) < order.index("OPTIONS")


def explained(space: Space, *arguments: str) -> str:
    done = cardwise(space.cluster, "explain", *arguments, "-n", space.name)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_explain_knows_workloads_and_who_refuses_their_pods(known: Space) -> None:
    known.apply(deployment("wide", 1, gpu_mem=90000))
    known.wait(lambda: "is more than the largest GPU" in explained(known, "deploy/wide"), "the refusal is told")
    assert f"deployment {known.name}/wide has no pod." in explained(known, "wide")
    known.apply(deployment("web", 2, gpu_mem=4000))
    known.wait(lambda: "has 2 pods: 2 running" in explained(known, "deploy/web"), "they run")


def test_explain_gives_the_cheapest_advice_that_is_true(known: Space) -> None:
    for name in ("one", "two"):
        known.create_and_locate(workload(name, gpu_mem=10000))
    known.create(workload("more", gpu_mem=8000))
    known.refused("more", "Insufficient GPU Memory in one device")
    output = explained(known, "pod/more")
    cheapest, dearer = "it requested at most 6276 MiB: that fits now, on GPU", "these ended"
    assert output.index(cheapest) < output.index(dearer)
    assert known.create_and_locate(workload("advised", gpu_mem=6276)) is not None


def test_the_examples_of_devices_are_applied_as_one_folder(space: Space) -> None:
    """Classes, then a quota and pods that name them."""
    try:
        space.kubectl("apply", "-f", str(DEVICES))
        assert {pod["metadata"]["name"] for pod in space.pods()} == {"fpga", "share-and-rdma"}
        quota = json.loads(space.kubectl("get", "resourcequota", "devices", "-o", "json"))
        assert quota["spec"]["hard"] == {f"requests.{names.CLASS_PREFIX}rdma": "4"}
    finally:
        space.cluster.kubectl_object("delete", "resourceclass", "fpga", "rdma", "rdma-fast", "--ignore-not-found")


def test_doctor_calls_a_cluster_without_a_usable_card_a_problem(space: Space) -> None:
    def so() -> bool:
        output = cardwise(space.cluster, "doctor", "--no-probe")
        assert output.returncode == 1
        problem, remedy, *_ = output.stdout.splitlines()
        return "PROBLEM  cards" in problem and "nodes.selector" in remedy

    space.wait(so, "it is the first problem")  # but for an extender that is just late with its Lease
