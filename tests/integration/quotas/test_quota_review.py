"""GPUQuotas by class while the class comes, goes or is missing, on a real control plane."""

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.cluster import Cluster
from tests.cluster.cards import TestCard
from tests.integration.commands import typed
from tests.integration.conftest import spaces
from tests.integration.quotas.test_types import K80, K80_CLASS
from tests.integration.sharing import Space, binding, node_and_card, wait_for_classes, workload

pytestmark = [pytest.mark.cluster("sim")]
T4_CLASS = "nvidia.tesla.t4"


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(2, [TestCard(model="Tesla K80", memory_mib=K80)])
        wait_for_classes(space, K80_CLASS)
        yield space


def placed(space: Space) -> list[str]:
    return [pod["metadata"]["name"] for pod in space.pods() if node_and_card(pod)[0]]


def resource_class(space: Space, name: str) -> Json:
    """The class; nothing where there is none."""
    try:
        return space.cluster.api.get(paths.resourceclasses(name))
    except errors.NotFound:
        return {}


def refused(space: Space, name: str) -> None:
    """The pod is created, and the scheduler has asked for it."""
    space.create(workload(name, gpu_mem=1000))
    space.wait(lambda: "GPUQuota" in space.reasons(name), f"{name} waits for the quota")


def test_a_quota_holds_from_the_first_moment_of_a_new_model_in_every_spelling(space):
    """A node pool comes up from nothing: the class of its model comes a second after its cards."""
    space.put_quota({"class": T4_CLASS, "shares": 0}, {"class": K80_CLASS, "shares": 0})
    halt = threading.Event()

    def create() -> None:
        """One after the other: kube-scheduler has tried each before the next comes."""
        for number in itertools.count():
            if halt.is_set():
                return
            space.create(workload(f"p{number}", gpu_mem=1000))
            space.refused(f"p{number}")

    client = threading.Thread(target=create)
    client.start()
    try:
        for model in ("Tesla T4", "NVIDIA Tesla T4"):
            space.nodes(1, [TestCard(model=model, memory_mib=15109)])
        space.wait(
            lambda: resource_class(space, T4_CLASS).get("status", {}).get("devices") == 2, "the class has both cards"
        )
        # Cards of a new spelling count at once; the keeper writes it into the selector a moment later.
        space.wait(lambda: "matchExpressions" in resource_class(space, T4_CLASS)["spec"]["selector"], "both spellings")
    finally:
        halt.set()
        client.join()
    refused(space, "last")
    got_in = placed(space)
    assert got_in == []
    (expression,) = resource_class(space, T4_CLASS)["spec"]["selector"]["matchExpressions"]
    assert expression["values"] == ["NVIDIA Tesla T4", "Tesla T4"]


@pytest.fixture
def other(space: Space) -> Iterator[Space]:
    """Another team's namespace."""
    with Space(space.cluster, f"{space.name}-other") as other_space:
        yield other_space


def test_a_user_of_one_namespace_gets_on_with_the_commands(space, other, tmp_path):
    """With `edit` there and the ClusterRole of cards: what others hold is counted, and their pods are not named."""
    other.create_and_locate(workload("theirs", gpu_mem=3000))
    space.put_quota({"shares": 1})
    space.create_and_locate(workload("mine", gpu_mem=1000))
    refused(space, "waits")
    jane = user_of(space, tmp_path)

    def used() -> int:
        document = json.loads(cardwise(jane, "classes", "-o", "json"))["classes"]
        return next((line["usedMiB"] for line in document if line["name"] == K80_CLASS), 0)

    space.wait(lambda: used() == 4000, "the class counts both pods")
    assert "1/1" in cardwise(jane, "quota")
    assert "GPUQuota team does not allow this on all GPUs: 1 of 1 shares used, 1 requested." in cardwise(
        jane, "explain", "pod", "waits"
    )
    space.wait(  # cards' statuses are some seconds old, and pods of the test before were on cards
        lambda: "other namespaces/pods (3000 MiB)" in cardwise(jane, "explain", "pod", "waits"), "others are counted"
    )
    assert "beside other namespaces/pods" in cardwise(jane, "explain", "pod", "mine")
    space.kubectl_json("delete", "clusterrolebinding", space.name)
    space.wait(lambda: "beside" not in cardwise(jane, "explain", "pod", "mine"), "cards may not be read any more")
    assert "container main: 1000 of 11441 MiB" in cardwise(jane, "explain", "pod", "mine")


def user_of(space: Space, folder: Path) -> Path:
    """The kubeconfig of somebody who may edit in the namespace, and look at cards, classes and quotas."""
    kubeconfig = space.editor("jane", folder)
    space.kubectl_json("create", stdin=binding(space.name, "cardwise-view", account=f"{space.name}:jane"))
    may = lambda: [typed({}, verb, "--kubeconfig", str(kubeconfig)).returncode for verb in ("classes", "quota")]  # noqa: E731
    space.wait(lambda: may() == [0, 0], "the API server knows her rights")
    return kubeconfig


def cardwise(kubeconfig: Path, *args: str) -> str:
    """What the command prints."""
    done = typed({}, *args, "--kubeconfig", str(kubeconfig))
    assert done.returncode == 0, done.stderr
    return done.stdout
