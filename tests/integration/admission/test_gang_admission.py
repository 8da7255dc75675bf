"""Gangs at admission on the real kube-apiserver: gates, labels and markers, refusals, and what nobody may change."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.cluster import Cluster, binaries, processes, versions
from tests.cluster.parts import CHART, GIVEN
from tests.cluster.processes import wait_for
from tests.integration.admission.api import EXTENDER, Api

pytestmark = [pytest.mark.cluster("sim")]


SPACE = "gang-admission"
GATE = {"name": names.GANG}
MARKERS = {names.FILTER_CALL_RESOURCE: "0", names.BIND_CALL_RESOURCE: "0"}
DRY = "--dry-run=server"


def pod(name: str, gang: str = "slurp", number: str = "3", **resources: Any) -> Json:
    """A member; without resources one that asks for nothing."""
    group = {names.GROUP_NAME: gang, names.GROUP_NUM: number}
    return build.pod(name, namespace=SPACE, annotations=group, **resources)


def workload(kind: str, version: str, **spec: Any) -> Json:
    labels = {"app": "w"}
    template = {"metadata": pod("x")["metadata"] | {"labels": labels}, "spec": pod("x")["spec"]}
    del template["metadata"]["name"], template["metadata"]["namespace"]
    whole = {"selector": {"matchLabels": labels}, "template": template} | spec
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "w", "namespace": SPACE}, "spec": whole}


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Api]:
    api = Api(cluster)
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    assert wait_for(lambda: api.run("get", "serviceaccount", "default", "-n", SPACE).returncode == 0)
    yield api
    api.ok("delete", "namespace", SPACE, "--wait=false")


@pytest.fixture
def member(api: Api) -> Iterator[Json]:
    """One that waits for two others; the policies act."""
    waiting = api.create(pod("slurp-0", gpu_mem=8138))
    label = ("label", "pod", "slurp-0", "-n", SPACE, "--overwrite", f"{names.GANG}=other", DRY)
    assert wait_for(lambda: api.run(*label).returncode != 0)
    yield waiting
    api.ok("delete", "pod", "slurp-0", "-n", SPACE, "--force", "--grace-period=0", "--ignore-not-found")


def warnings_of(api: Api, manifest: Json) -> str:
    """What kubectl warns of when the object is created."""
    done = api.run("create", DRY, "-f", "-", stdin=manifest)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_where_podgroups_of_kubernetes_are_not_served_a_pod_that_names_one_is_as_others(api: Api) -> None:
    """kube-apiserver drops the field, in 1.37 only after our webhook has seen it."""
    pod = build.pod("alone", namespace=SPACE, gpu_mem=8138)
    pod["spec"]["schedulingGroup"] = {"podGroupName": "slurp"}
    done = api.run("create", DRY, "--validate=ignore", "-o", "json", "-f", "-", stdin=pod)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {"schedulingGroup", "schedulingGates"}.isdisjoint(document["spec"])
    assert names.GANG not in document["metadata"].get("labels", {})
    assert ("does not serve PodGroups" in done.stderr) == versions.at_least(36), "what older ones know"


def test_a_parameter_server_may_mount_what_pods_without_a_card_may(api: Api) -> None:
    server = pod("server")
    server["spec"]["volumes"] = [{"name": "v", "hostPath": {"path": "/var/lib"}}]
    api.create(server, DRY)
    worker = pod("worker", gpu_mem=1)
    worker["spec"]["volumes"] = server["spec"]["volumes"]
    assert "hostPath" in api.refused("create", DRY, "-f", "-", stdin=worker)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (pod("a", number="0"), "0 is out of range; write a whole number from 1 to 500"),
        (pod("a", number="501", gpu_mem=1), "501 is out of range"),
        (pod("a", number="1.5"), "1.5 is out of range"),
        (pod("a", number="three"), "'three' is not a quantity"),
        (pod("a", gang="My_Gang"), "'My_Gang' is not a valid gang name"),
        (
            workload("StatefulSet", "apps/v1", replicas=3, serviceName="w"),
            "gang slurp starts only with 3 pods; write podManagementPolicy: Parallel",
        ),
    ],
    ids=["zero", "too many", "fraction", "no number", "name", "ordered"],
)
def test_groups_that_can_never_be_whole_are_refused(api: Api, bad: Json, says: str) -> None:
    assert says in api.refused("create", "-f", "-", stdin=bad)


def test_jobs_and_cron_jobs_are_told_too(api: Api) -> None:
    job = workload("Job", "batch/v1", parallelism=2)
    del job["spec"]["selector"], job["spec"]["template"]["metadata"]["labels"]
    job["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    assert "spec.parallelism: gang slurp needs 3 pods to start, and this workload creates 2" in warnings_of(api, job)
    cron = job | {"kind": "CronJob", "spec": {"schedule": "@daily", "jobTemplate": {"spec": job["spec"]}}}
    assert "spec.jobTemplate.spec.parallelism: gang slurp needs 3 pods" in warnings_of(api, cron)


def test_a_number_that_differs_from_that_of_living_members_is_refused(api: Api, member: Json) -> None:
    other = pod("slurp-1", number="4", gpu_mem=1)
    says = "4 differs from the number of another pod of the same gang; write that number"
    refused = functools.partial(api.run, "create", DRY, "-f", "-", stdin=other)
    assert wait_for(lambda: says in refused().stderr), refused().stderr
    api.create(pod("slurp-1", gpu_mem=1), DRY)
    elsewhere = pod("other", gang="other", number="4")
    api.create(elsewhere, DRY)


def test_which_gang_a_pod_is_in_is_settled_when_it_is_created(api: Api, member: Json) -> None:
    at = ("slurp-0", "-n", SPACE)
    settled = "the gang of a pod cannot be changed after creation; recreate the pod"
    for key in (names.GANG, names.COSCHEDULING, names.GROUP_NAME, names.GROUP_NUM):
        error = api.refused("label", "pod", *at, "--overwrite", f"{key}=other")
        assert f"metadata.labels[{key}]" in error
        assert settled in error
    assert settled in api.refused("label", "pod", *at, f"{names.GANG}-")
    for key in (names.GROUP_NAME, names.GROUP_NUM):
        assert settled in api.refused("annotate", "pod", *at, "--overwrite", f"{key}=4")
        # Two policies refuse it, and the API server tells of one of them.
        error = api.refused("annotate", "pod", *at, f"{key}-", f"--as={EXTENDER}", "--as-group=system:masters")
        assert settled in error or "the extender may not change" in error
    patch = json.dumps({"metadata": {"labels": {names.GANG: "other"}}})
    assert settled in api.refused("patch", "pod", *at, "--subresource=status", "--type=merge", "-p", patch)
    api.ok("label", "pod", *at, "mine=1")
    api.ok("annotate", "pod", *at, "mine=1")
    api.create(build.pod("plain", namespace=SPACE))
    assert settled in api.refused("label", "pod", "plain", "-n", SPACE, f"{names.GANG}=slurp")
    api.ok("label", "pod", "plain", "-n", SPACE, f"{names.COSCHEDULING}=theirs")
    api.ok("delete", "pod", "plain", "-n", SPACE, "--force", "--grace-period=0")


def test_the_place_in_the_queue_may_be_changed_to_a_whole_number(api: Api, member: Json) -> None:
    at = ("annotate", "pod", "slurp-0", "-n", SPACE, "--overwrite")
    for good in ("10", "-3", "+7"):
        api.ok(*at, f"{names.QUEUE_PRIORITY}={good}")
    for bad in ("high", "1.5", "", "12345678901"):
        error = api.refused(*at, f"{names.QUEUE_PRIORITY}={bad}")
        assert f"metadata.annotations[{names.QUEUE_PRIORITY}]: is not a whole number" in error
    high = pod("slurp-1", gpu_mem=1)
    high["metadata"]["annotations"][names.QUEUE_PRIORITY] = "high"
    assert "'high' is not a whole number" in api.refused("create", "-f", "-", stdin=high)


def test_device_nodes_are_refused_where_the_admin_says_so(api: Api) -> None:
    helm = str(binaries.helm(print) / "helm")
    chart = ["template", "cardwise", str(CHART), "-n", names.NAMESPACE, "--kube-version", versions.version(), *GIVEN]
    policy = [helm, *chart, "-s", "templates/policies/hostpaths.yaml"]
    rdma = build.pod("rdma", namespace=SPACE)
    rdma["spec"]["volumes"] = [{"name": "v", "hostPath": {"path": "/dev/infiniband/uverbs0"}}]
    create = functools.partial(api.run, "create", DRY, "-f", "-", stdin=rdma)
    assert create().returncode == 0
    api.cluster.apply(processes.run([*policy, "--set", "policies.deviceHostPaths={/dev/infiniband,/dev/vfio}"]))
    try:
        says = "gives access to devices without Cardwise; leave the volume out and request the device by its class"
        assert wait_for(lambda: says in create().stderr), create().stderr
    finally:
        api.cluster.apply(processes.run(policy))
    assert wait_for(lambda: create().returncode == 0)


def test_pods_in_no_gang_never_wait_for_the_webhook(api: Api, member: Json) -> None:
    deployment = workload("Deployment", "apps/v1", replicas=0)
    api.create(deployment)
    api.webhook.stop()
    try:
        api.create(build.pod("plain", namespace=SPACE), DRY)
        volcano = pod("theirs")
        volcano["spec"]["schedulerName"] = "volcano"
        api.create(volcano, DRY)
        for ours in (pod("worker", gpu_mem=1), pod("server")):
            assert "failed calling webhook" in api.refused("create", DRY, "-f", "-", stdin=ours)
        # What it made earlier can be changed and deleted, and the policies hold.
        api.ok("annotate", "pod", "slurp-0", "-n", SPACE, "mine=2", "--overwrite")
        api.ok("scale", "deployment", "w", "-n", SPACE, "--replicas=1", DRY)
        change = json.dumps({"spec": {"minReadySeconds": 1}})
        api.ok("patch", "deployment", "w", "-n", SPACE, "--type=merge", "-p", change)
        assert "cannot be changed after creation" in api.refused(
            "label", "pod", "slurp-0", "-n", SPACE, f"{names.GANG}-"
        )
    finally:
        api.webhook.restart()
        api.cluster.parts.wait_ready("webhook")
        again = functools.partial(api.run, "create", DRY, "-f", "-", stdin=pod("worker", gpu_mem=1))
        assert wait_for(lambda: again().returncode == 0)
        api.ok("delete", "deployment", "w", "-n", SPACE)


@pytest.mark.parametrize(
    "example", sorted((CHART.parents[1] / "examples" / "gangs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_examples_are_admitted(api: Api, example: Path) -> None:
    done = api.kubectl("apply", DRY, "-n", SPACE, "-f", str(example))
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line]
    fine = "fine if other workloads create the remaining", "fine if a PodGroup"
    assert all(any(text in line for text in fine) for line in warnings), done.stderr
