"""What a container sees of its share, on real nodes: its environment, its card and no other."""

import pytest

from cardwise.core.api import names
from tests.build import container
from tests.integration.sharing import Space, device_numbers, inspect, node_and_card, probe, probed, workload

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node]

SHOWN = "env | grep -E 'ALIYUN|NVIDIA|CUDA|CARDWISE|XLA|CUPY' | sort"


def environment(space: Space, name: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in space.inside(name, SHOWN).splitlines())


def expected(**others: str) -> dict[str, str]:
    """Of 8138 MiB on card 0 of two P100."""
    return {
        "ALIYUN_COM_GPU_MEM_IDX": "0",
        "ALIYUN_COM_GPU_MEM_POD": "8138",
        "ALIYUN_COM_GPU_MEM_DEV": "16276",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "8138",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CARDWISE_MEM_LIMIT_MIB": "8138",
        "CARDWISE_MEM_FRACTION": "0.5000",
        "CARDWISE_ISOLATION": "advisory",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5000",
        "CUPY_GPU_MEMORY_LIMIT": str(8138 * 1024 * 1024),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8138M",  # of no effect where the node has no MPS
    } | others


def test_real_nodes_show_their_cards_too(space):
    for node in ("n1", "n2"):
        status = space.kubectl_json("get", "node", node)["status"]
        for kind in ("capacity", "allocatable"):
            assert (status[kind][names.GPU_MEM], status[kind][names.GPU_COUNT]) == ("32552", "2")


def test_the_environment_and_the_device_of_its_card_and_no_other(space):
    space.create(workload("seen", gpu_mem=8138, node="n1"))
    space.running("seen")
    node, card = node_and_card(
        space.get("seen")
    )  # where another test's pod is just going, the fuller card is the better one
    assert node == "n1"
    assert environment(space, "seen") == expected(ALIYUN_COM_GPU_MEM_IDX=card)
    numbers = device_numbers(space.cluster, "n1")
    space.inside("seen", probe(numbers))
    assert space.inside("seen", "cat /dev/termination-log").splitlines() == probed(numbers, card)
    space.marked("seen")


def test_a_split_share_sees_both_cards_and_its_part_of_each(space):
    space.create(workload("split", gpu_mem=8192, gpu_count=2, node="n2"))
    space.running("split")
    seen = environment(space, "split")
    assert (seen["ALIYUN_COM_GPU_MEM_IDX"], seen["CARDWISE_MEM_LIMIT_MIB"]) == ("0,1", "4096")
    assert seen["CARDWISE_MEM_FRACTION"] == "0.2516"
    assert space.inside("split", "for n in /dev/nvidia*; do (exec 3<$n) && echo $n; done").split() == [
        "/dev/nvidia0",
        "/dev/nvidia1",
    ]


def test_containers_see_their_own_shares(space):
    used = lambda: [used for (node, _), (_, used, _) in inspect(space.cluster).items() if node == "n2"]  # noqa: E731
    space.wait(lambda: not any(used()), "the extender knows that the pods of before are gone")
    pair = [container("one", gpu_mem=4069), container("two", gpu_mem=8138), container("none")]
    sidecar = container("side", gpu_mem=1024) | {"restartPolicy": "Always"}
    space.create(workload("several", pair, init=[sidecar], node="n2"))
    space.running("several")
    for name, limit in (("one", "4069"), ("two", "8138"), ("side", "1024")):
        shown = space.inside("several", "echo $CARDWISE_MEM_LIMIT_MIB $ALIYUN_COM_GPU_MEM_POD; ls /dev", main=name)
        assert shown.splitlines()[0] == f"{limit} 13231"
        assert [line for line in shown.splitlines() if "nvidia" in line] == ["nvidia0"]
    assert "nvidia" not in space.inside("several", "ls /dev; env", main="none")


def test_a_copy_of_a_running_pod_is_created_and_works(space):
    space.create(workload("original", gpu_mem=9000, node="n1"))
    space.running("original")
    copy = space.get("original")
    copy["metadata"]["name"] = "copy"
    del copy["metadata"]["resourceVersion"]
    space.create(copy)
    space.running("copy")
    # Placed anew, not where the annotations that came with it say.
    (node, original_card), (also, card) = node_and_card(space.get("original")), node_and_card(space.get("copy"))
    assert (node, also, {original_card, card}) == ("n1", "n1", {"0", "1"})
    seen = environment(space, "copy")
    assert (seen["ALIYUN_COM_GPU_MEM_IDX"], seen["CARDWISE_MEM_LIMIT_MIB"]) == (card, "9000")
    assert space.inside("copy", f"ls /dev/nvidia*; exec 3</dev/nvidia{card}").split() == [f"/dev/nvidia{card}"]
