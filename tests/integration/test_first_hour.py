"""What a person is told who does something for the first time, on the real API server."""

import json
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names
from tests import build
from tests.integration.commands import cardwise
from tests.integration.sharing import Space, deployment, workload
from tests.integration.test_admission import Api

pytestmark = [pytest.mark.cluster("sim"), pytest.mark.timeout(180)]

Json = dict[str, Any]

DEVICES = Path(__file__).parents[2] / "examples" / "devices"


def told(space: Space, obj: Json) -> str:
    """The warnings of `kubectl create`, which must go through."""
    done = Api(space.cluster).run("create", "--dry-run=server", "-n", space.name, "-f", "-", stdin=obj)
    assert done.returncode == 0, done.stderr
    return done.stderr


def naming(resource: str) -> Json:
    pod = build.pod("named")
    pod["metadata"].pop("namespace")
    pod["spec"]["containers"][0]["resources"] = {"limits": {resource: "1"}}
    return pod


def mine(obj: Json, **spec: Any) -> Json:
    obj["metadata"].pop("namespace", None)
    obj["spec"] |= spec
    return obj


@pytest.fixture
def known(space: Space) -> Space:
    """With two cards that the webhook knows."""
    space.nodes()
    space.wait(lambda: "did you mean" in told(space, naming("aliyun.com/gpu-memory")), "the webhook knows the nodes")
    space.wait(lambda: "more than the largest" in told(space, wide(space)), "the webhook knows the cards")
    return space


def wide(space: Space) -> Json:
    made: Json = deployment("wide", 1, gpu_mem=90000)
    made["metadata"]["namespace"] = space.name
    return made


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
        said = told(known, {"apiVersion": version, "kind": kind, "metadata": {"name": "w"}, "spec": spec})
        assert f"{at}.spec.containers[0].resources.limits[{names.GPU_MEM}]: 90000 MiB is more than" in said
        assert f"ask for at most {build.P100}" in said
        assert "its pods will be refused" in said


TEMPLATE = {"spec": build.pod(gpu_mem=90000)["spec"]}
RESOURCES = {"limits": {names.GPU_MEM: "90000"}}


@pytest.mark.parametrize(
    ("of", "spec", "where"),
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
def test_kinds_of_others_are_told_too(known: Space, of: tuple[str, str, str], spec: Json, where: str) -> None:
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
    obj = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": "r"}, "spec": spec}
    api.ok("create", "-f", "-", stdin=crd)
    try:

        def said() -> str:
            return api.run("create", "--dry-run=server", "-n", known.name, "-f", "-", stdin=obj).stderr

        known.wait(lambda: f"{where}.limits[{names.GPU_MEM}]: 90000 MiB is more than" in said(), "it is warned about")
    finally:
        api.ok("delete", "crd", crd_name)


def test_nobody_is_refused_while_the_webhook_is_away(known: Space) -> None:
    webhook = known.cluster.process("webhook")
    webhook.stop()
    try:
        assert told(known, naming(names.NVIDIA_GPU)) == ""
        assert told(known, wide(known)) == ""
    finally:
        webhook.restart()
        known.cluster.parts.wait_ready("webhook")


def explained(space: Space, *what: str) -> str:
    done = cardwise(space.cluster, "explain", *what, "-n", space.name)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_explain_knows_workloads_and_who_refuses_their_pods(known: Space) -> None:
    known.apply(deployment("wide", 1, gpu_mem=90000))
    known.wait(lambda: "is more than the largest card" in explained(known, "deploy/wide"), "the refusal is told")
    assert f"deployment {known.name}/wide has no pod." in explained(known, "wide")
    known.apply(deployment("web", 2, gpu_mem=4000))
    known.wait(lambda: "has 2 pods: 2 running" in explained(known, "deploy/web"), "they run")


def test_a_gang_of_which_nobody_says_how_many_pods_it_has_is_explained(known: Space) -> None:
    """No warning when it is created: the webhook may not read PodGroups."""
    known.create(workload("alone", gpu_mem=100, annotations={names.GROUP_NAME: "g"}))
    said = explained(known, "alone")
    assert "Nobody says how many, so it waits for ever: make a PodGroup g" in said
    assert names.GROUP_NUM in said


def test_the_examples_of_devices_are_applied_as_one_folder(space: Space) -> None:
    """Classes, then a quota and pods that name them."""
    try:
        space.kubectl("apply", "-f", str(DEVICES))
        assert {pod["metadata"]["name"] for pod in space.pods()} == {"fpga", "share-and-rdma"}
        quota = json.loads(space.kubectl("get", "resourcequota", "devices", "-o", "json"))
        assert quota["spec"]["hard"] == {f"requests.{names.CLASS_PREFIX}rdma": "4"}
    finally:
        space.cluster.ask("delete", "resourceclass", "fpga", "rdma", "rdma-fast", "--ignore-not-found")
