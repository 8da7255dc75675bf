"""The share agent from admission to the end of the pod: webhook, extender, device plugin and MPS manager together, on
a real kubelet, with Cardwise's own image in the pods.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.mps import MpsState, Status
from cardwise.core.values.decoded import Json
from cardwise.gpus import mpsfiles
from cardwise.kube import paths
from tests.cluster import Cluster, partsimage
from tests.cluster import mps as manager
from tests.cluster.processes import PATIENCE
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, workload

pytestmark = [pytest.mark.cluster, pytest.mark.node]

NODE, MANAGER = "n1", "mps-n1"
IMAGE = f"{partsimage.NAME}:{partsimage.TAG}"
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}

# What the app sees of its share, as one line of JSON.
TELL = """
import json, os, pathlib, sys, sitecustomize
share = json.loads(pathlib.Path("/run/cardwise/share/share.json").read_text())
print(json.dumps({"share": share, "env": dict(os.environ), "hook": sitecustomize.__file__}))
"""


CARDS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One real node of four cards with an MPS manager and our image on it, which the webhook takes for the agent."""
    cards = tmp_path_factory.mktemp("cards") / "cards.yaml"
    cards.write_text(yaml.safe_dump({"default": [{"memoryMiB": 16276}] * CARDS}))
    for cluster in started(SpecOf(nodes=1, cards=cards, mps=True, agent=True)):
        ready(cluster)
        yield cluster


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Space]:
    """A namespace that enforces Pod Security's strictest profile."""
    space = Space(cluster, "agents")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(paths.namespaces("agents"), {"metadata": {"labels": labels}}, "merge")
    yield space
    space.kubectl("delete", "jobs", "--all", "--wait=false")
    space.clear()
    ready(cluster)


def resource(cluster: Cluster, index: int) -> Json:
    resources = cluster.api.get(paths.extendedresources())["items"]
    return next(resource for resource in resources if resource["spec"]["index"] == index)


def state(cluster: Cluster, index: int) -> str:
    """As the cluster is told."""
    return str((resource(cluster, index).get("status", {}).get("mps") or {}).get("state", ""))


def ready(cluster: Cluster) -> None:
    cluster.wait(
        lambda: all(state(cluster, index) == MpsState.READY for index in range(CARDS)), "MPS of all cards is ready"
    )


def home(cluster: Cluster, index: int) -> Path:
    uuid = resource(cluster, index)["spec"]["uuid"]
    return Path(mps.card_daemon_folder(str(manager.root(cluster.node(NODE).folder)), uuid))


def daemon(cluster: Cluster, index: int) -> Status:
    daemon_state = mpsfiles.read_state(home(cluster, index))
    assert daemon_state is not None
    return daemon_state


def app(script: str, mem: int = 4000, **limits: str) -> Json:
    """A container of our image, which has Python. `limits`: in place of `mem`."""
    return {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", script],
        "resources": {"limits": limits or {names.GPU_MEM: str(mem)}},
        "securityContext": RESTRICTED,
    }


STAY = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(3600)"


# What a container sees of its share, in a pod with the share agent or without.
SHOW = """
import glob, json, os
print(json.dumps({"env": dict(os.environ), "devices": glob.glob("/dev/nvidia*")}), flush=True)
"""


def stays(name: str, mem: int = 4000, **annotations: str) -> Json:
    return workload(name, [app(STAY, mem)], annotations=annotations)


def containers(pod: Json) -> list[Json]:
    status = pod["status"]
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def test_a_job_in_a_restricted_namespace_gets_its_share_and_completes(space: Space) -> None:
    annotations = {names.FRAMEWORKS: "on", names.ISOLATION: "mps", names.SM_PERCENT: "memory"}
    template = workload("job", [app(TELL, mem=8138)], annotations=annotations)
    spec = template["spec"] | {"restartPolicy": "Never"}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job", "namespace": space.name},
        "spec": {"backoffLimit": 0, "template": {"metadata": template["metadata"], "spec": spec}},
    }
    space.kubectl("apply", "-f", "-", stdin=json.dumps(job))
    space.wait(lambda: bool(space.pods()), "the pod was admitted")
    space.wait(lambda: space.pods()[0]["status"]["phase"] in ("Succeeded", "Failed"), "the pod ends by itself")
    (pod,) = space.pods()
    name = pod["metadata"]["name"]
    (line,) = space.kubectl("logs", name, "-c", "main").splitlines()
    document = json.loads(line)
    assert pod["status"]["phase"] == "Succeeded"
    assert {key: document["share"][key] for key in ("limitMiB", "fraction", "enforced")} == {
        "limitMiB": 8138,
        "fraction": 0.5,
        "enforced": "mps",
    }
    assert document["env"][mps.LIMIT_ENV] == "0=8138M"
    assert document["env"][mps.PERCENT_ENV] == "50", "of the memory, as the pod's annotation says"
    assert document["env"][mps.PIPE_ENV] == mps.CONTAINER_PIPE
    assert document["hook"].startswith("/run/cardwise/python/")
    agent = next(container for container in containers(pod) if container["name"] == shareagent.CONTAINER_NAME)
    assert (agent["restartCount"], agent["state"]["terminated"]["exitCode"]) == (0, 0)
    path = f"/apis/batch/v1/namespaces/{space.name}/jobs/job"
    space.wait(lambda: space.cluster.api.get(path)["status"].get("succeeded") == 1, "the Job is complete")


def test_a_rolling_restart_of_the_manager_leaves_running_pods_alone(space: Space) -> None:
    cluster = space.cluster
    for name in ("one", "two"):
        space.create(stays(name))
    space.running("one", "two")
    before = {name: containers(space.get(name)) for name in ("one", "two")}
    daemons = [daemon(cluster, index).daemon_pid for index in (0, 1)]
    process = cluster.process(MANAGER)
    process.stop(PATIENCE)
    held = {share.index for name in ("one", "two") for share in assigned(space.get(name)).shares()}
    assert held == {0}, "binpack"
    cluster.wait(lambda: state(cluster, 0) == MpsState.DOWN, "it said good-bye")
    process.restart()
    ready(cluster)
    assert daemon(cluster, 0).daemon_pid == daemons[0], "the same daemon serves those that run"
    space.create(stays("after"))
    space.running("after")
    for name, old in before.items():
        now = containers(space.get(name))
        assert [(status["containerID"], status["restartCount"]) for status in now] == [
            (status["containerID"], 0) for status in old
        ]
        assert all("running" in status["state"] for status in now)


def test_a_share_is_limited_beside_a_split_share_a_whole_card_and_a_pod_that_opts_out(space: Space) -> None:
    """Pods that write nothing but their resources, on one node; the last one opts out."""
    share = {names.GPU_MEM: "4000"}
    limits = {
        "plain": share,
        "split": {names.GPU_MEM: "8000", names.GPU_COUNT: "2"},
        "whole": {names.GPU_COUNT: "1"},
        "opted-out": share,
    }
    for name, amounts in limits.items():
        annotations = {names.ISOLATION: "none"} if name == "opted-out" else {}
        space.create(workload(name, [app(SHOW + STAY, **amounts)], annotations=annotations))
    space.running(*limits)
    seen = {name: json.loads(space.kubectl("logs", name, "-c", "main").splitlines()[0]) for name in limits}
    held = {name: {share.index for share in assigned(space.get(name)).shares()} for name in limits}
    for name, shown in seen.items():
        assert shown["env"][names.ENV_ISOLATION] == ("mps" if name == "plain" else "advisory"), name
        assert set(shown["devices"]) == {f"/dev/nvidia{index}" for index in held[name]}, name
        assert shown["env"].get(mps.PIPE_ENV) == (mps.CONTAINER_PIPE if name == "plain" else None), name
    assert seen["plain"]["env"][mps.LIMIT_ENV] == "0=4000M"
    assert held["opted-out"] < held["split"], "the others have a card each for themselves"
    assert len({*held["plain"], *held["split"], *held["whole"]}) == CARDS
    tiers = {index: resource(space.cluster, index)["status"]["isolation"]["memory"] for index in range(CARDS)}
    assert {index for index, tier in tiers.items() if tier == "mps"} == held["plain"]
