"""`cardwise nodes` and `cardwise defrag` on a real cluster: what is said happens."""

import functools
import json
from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE
from tests.integration.commands import cardwise
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, deployment, workload

pytestmark = [pytest.mark.cluster("sim")]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """Four nodes of two cards, of which all but the first are taken by whole pods."""
    for space in spaces(cluster, request):
        occupied = space.nodes(4)[1:]
        for node in occupied:
            space.create(workload(f"whole-{node}", node=node, gpu_count=2))
        space.running(*(f"whole-{node}" for node in occupied))
        yield space


def here(space: Space) -> str:
    return f"{space.name}-00"


def nodes_report(cluster: Cluster) -> dict:
    shown = cardwise(cluster, "nodes", "-o", "json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def place(space: Space, name: str, mem: int, **settings: object) -> None:
    """A Deployment of one pod of this size, which runs."""
    workload = deployment(name, 1, gpu_mem=mem, **settings)
    space.cluster.api.create(f"/apis/apps/v1/namespaces/{space.name}/deployments", workload)
    space.wait(lambda: len(pods_of(space, name)) == 1, f"{name} runs")


def pods_of(space: Space, name: str) -> list[dict]:
    """The pods of the Deployment that run and hold a card."""
    pods = [pod for pod in space.pods() if pod["metadata"].get("labels", {}).get("app") == name]
    return [
        pod for pod in pods if pod["status"].get("phase") == "Running" and names.IDX in pod["metadata"]["annotations"]
    ]


def card_of(space: Space, name: str) -> str:
    (pod,) = pods_of(space, name)
    assert pod["spec"]["nodeName"] == here(space)
    return pod["metadata"]["annotations"][names.IDX]


def test_a_card_gets_free_by_moving_the_one_pod_that_fits_elsewhere(space):
    cluster = space.cluster
    place(space, "big", 9000)
    space.create(workload("filler", gpu_mem=6000))
    space.running("filler")
    place(space, "small", 3000)
    big, small = card_of(space, "big"), card_of(space, "small")
    assert big != small
    space.delete("filler", grace=1)

    def fragmented() -> bool:
        node = next(line for line in nodes_report(cluster)["nodes"] if line["name"] == here(space))
        return (node["usedMiB"], node["freeGPUs"], node["largestFreeMiB"]) == (12_000, 0, P100 - 3000)

    space.wait(fragmented, "the filler's memory is free")
    table = cardwise(cluster, "nodes", here(space)).stdout.splitlines()
    assert table[1].split()[:5] == [here(space), "2/2", f"12000/{2 * P100}", "0", str(P100 - 3000)]
    assert table[-1].split()[:4] == ["CLUSTER", "8/8", f"{6 * P100 + 12_000}/{8 * P100}", "0"]

    args = ("--free-gpus", "1", "-n", space.name)
    # The cards say a moment after the pods that the filler's share is free.
    rehearse = functools.partial(cardwise, cluster, "defrag", *args, "-o", "json")
    space.wait(lambda: rehearse().returncode == 0, "a move is found")
    rehearsed = rehearse()
    (move,) = json.loads(rehearsed.stdout)["moves"]
    assert (move["from"]["gpus"][0]["index"], move["to"]["gpus"][0]["index"]) == (int(small), int(big))
    assert card_of(space, "small") == small  # nothing has happened yet

    done = cardwise(cluster, "defrag", *args, "--evict", "--timeout", f"{PATIENCE:.0f}s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: there is 1 free whole GPU" in done.stderr
    space.wait(lambda: len(pods_of(space, "small")) == 1, "the old pod is gone")
    assert (card_of(space, "small"), card_of(space, "big")) == (big, big)
    space.create(workload("next", gpu_count=1))
    space.running("next")
