"""Devices that are not GPUs on the real API server, scheduler and kubelet: from a limit to the node that opens.

A real node with two cards and two RDMA devices of its own (tests/cluster/devices.py).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster
from tests.integration.sharing import IDLE, Space, assigned, device_numbers, node_and_card, probe, workload

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node]

NODE = "n1"
RDMA = names.CLASS_PREFIX + "rdma"
OWN = {0: ("uverbs0", "umad0"), 1: ("uverbs1", "umad2")}  # nodes of each device; rdma_cm is common
# What its device plugin says to a container, after what it sees and can open (sharing.PROBE).
TELL = """
tell has $(ls /dev/infiniband 2>/dev/null)
tell names $CARDWISE_RDMA_DEVICES at $PCIDEVICE_CARDWISE_DEV_RDMA
tell cards $NVIDIA_VISIBLE_DEVICES $CARDWISE_MEM_LIMIT_MIB
"""


@pytest.fixture(autouse=True, scope="module")
def _class(cluster: Cluster) -> Iterator[None]:
    spec = {"selector": {"matchLabels": {"kind": "rdma"}}}
    cluster.apply(
        [{"apiVersion": names.API_VERSION, "kind": "ResourceClass", "metadata": {"name": "rdma"}, "spec": spec}]
    )
    cluster.wait(lambda: offered(cluster) == "2", "n1 offers two RDMA devices")
    yield
    cluster.kubectl_object("delete", "resourceclass", "rdma")


def offered(cluster: Cluster) -> str | None:
    status = cluster.api.get(paths.nodes(NODE))["status"]
    amounts = {status[kind].get(RDMA) for kind in ("capacity", "allocatable")}
    return amounts.pop() if len(amounts) == 1 else None


def resources(cluster: Cluster) -> list[Json]:
    """The ExtendedResources of the node's RDMA devices, by index."""
    resources = cluster.api.get(paths.extendedresources(), {"labelSelector": f"{names.NODE_LABEL}={NODE}"})["items"]
    return sorted(
        (resource for resource in resources if resource["spec"]["kind"] == "rdma"),
        key=lambda resource: resource["spec"]["index"],
    )


def numbers(cluster: Cluster) -> dict[str, str]:
    """ "major:minor" of every card, by index, and of every RDMA node, by name."""
    numbers = device_numbers(cluster, NODE)
    for path in sorted((cluster.node(NODE).folder / "dev" / "infiniband").iterdir()):
        number = Path(path).stat().st_rdev
        numbers[path.name] = f"{os.major(number)}:{os.minor(number)}"
    return numbers


def asking(name: str, limits: Json, **settings: object) -> Json:
    pod = workload(name, node=NODE, **settings)  # type: ignore[arg-type]
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    return pod


def devices_and_environment(space: Space, name: str, limits: Json) -> tuple[set[str], dict[str, str]]:
    """What a container with these limits can open, by its own word, and what it was told."""
    command = probe(numbers(space.cluster)) + TELL
    space.create(asking(name, limits, command=command, spec={"restartPolicy": "Never"}))
    space.wait(lambda: space.phase(name) == "Succeeded", f"{name} has run")
    lines = [line.partition(" ") for line in space.termination_message(name)]
    opens = {rest for word, _, rest in lines if word == "opens"}
    refused = {rest.partition(" ")[0] for word, _, rest in lines if word == "refused"}
    assert opens | refused == numbers(space.cluster).keys()
    return opens, {word: rest for word, _, rest in lines if word in ("has", "names", "cards")}


def devices_of(pod: Json) -> list[str]:
    return [share.uuid for share in assigned(pod).non_gpu_devices()]


def test_the_node_tells_of_its_devices(space):
    first, second = resources(space.cluster)
    assert [device["spec"]["properties"]["name"] for device in (first, second)] == ["mlx5_0", "mlx5_1"]
    space.wait(
        lambda: {device["status"]["health"] for device in resources(space.cluster)} == {"Healthy"}, "they are healthy"
    )
    assert "memoryMiB" not in first["spec"]
    table = space.cluster.kubectl("get", "extendedresources")
    assert "KIND" in table.splitlines()[0].split()
    assert {"rdma", "nvidia-gpu"} <= set(table.split())


def test_a_card_and_a_device_open_and_nothing_else(space):
    opens, environment = devices_and_environment(space, "both", {"rdma": 1, names.GPU_MEM: 1000})
    pod = space.get("both")
    (uuid,) = devices_of(pod)
    index = next(resource["spec"]["index"] for resource in resources(space.cluster) if resource["spec"]["uuid"] == uuid)
    _, card = node_and_card(pod)
    assert opens == {card, *OWN[index], "rdma_cm"}
    assert environment == {
        "has": " ".join(sorted(("rdma_cm", *OWN[index]))),
        "names": f"mlx5_{index} at 0000:3b:00.{index}",
        "cards": "void 1000",
    }


def test_a_device_alone_opens_no_card(space):
    opens, environment = devices_and_environment(space, "alone", {RDMA: 2})
    assert opens == {*OWN[0], *OWN[1], "rdma_cm"}
    assert environment["names"] == "mlx5_0,mlx5_1 at 0000:3b:00.0,0000:3b:00.1"
    assert environment["cards"] == "void"


def test_a_card_alone_opens_no_device(space):
    opens, environment = devices_and_environment(space, "card", {names.GPU_MEM: 1000})
    assert opens == {node_and_card(space.get("card"))[1]}
    assert environment["has"] == ""


def test_a_force_deleted_pod_holds_its_device_while_it_runs(space):
    """Nobody ends its container while the kubelet hangs."""
    space.create(asking("old", {RDMA: 2}, command=IDLE))
    space.running("old")
    kubelet = space.cluster.process(f"kubelet-{NODE}")
    kubelet.pause()
    try:
        space.kubectl_json("delete", "pod", "old", "--force", "--grace-period=0")
        space.wait(
            lambda: all(resource["status"].get("reported") for resource in resources(space.cluster)),
            "both are told as held",
        )
        space.create(asking("new", {RDMA: 1}, command=IDLE))
    finally:
        kubelet.resume()
    space.running("new")
    space.wait(
        lambda: not any(resource["status"].get("reported") for resource in resources(space.cluster)), "nothing is held"
    )


def test_a_card_without_memory_and_a_device_with_it_are_refused(cluster):
    def taken(spec: Json) -> bool:
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": "ExtendedResource",
            "metadata": {"name": "x"},
            "spec": spec,
        }
        return cluster.verbs.run("create", "--dry-run=server", stdin=manifest).returncode == 0

    spec = {"node": "n1", "index": 0, "uuid": "x"}
    assert not taken(spec)
    assert not taken(spec | {"kind": "rdma", "memoryMiB": 1})
    assert taken(spec | {"kind": "rdma"})
    assert taken(spec | {"memoryMiB": 1})
