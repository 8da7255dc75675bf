"""The figures of Alibaba's articles and the shapes of requests, on the real scheduler; and what a container sees.

Placement is asked on simulated nodes, of which every test has some for itself, so that no test waits for another's
pods to end. What happens inside a container is asked on real nodes.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cardwise.core import names
from tests.build import P100, container
from tests.cluster import Cluster, CommandFailed
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, deployment, device_numbers, probe, probed, where, workload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

FOUR = "sim-4"
REPLICAS = ("sim-5", "sim-6")
MIXED = "sim-7"
SMALL = "sim-8"
OTHERS = [f"sim-{i}" for i in range(9, 20)]
CARDS = {
    "default": [P100, P100],
    "nodes": {FOUR: [P100] * 4, MIXED: [8138, P100], SMALL: [8138, 8138]},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    def of(sizes: list[int]) -> list[dict[str, object]]:
        return [{"model": "Tesla-P100", "memoryMiB": size} for size in sizes]

    cards = {"default": of(CARDS["default"]), "nodes": {node: of(sizes) for node, sizes in CARDS["nodes"].items()}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(cards, file)
        file.flush()
        yield from started(SpecOf(sim_nodes=len(OTHERS) + 8, cards=Path(file.name)))


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Space]:
    made = Space(cluster, "articles")
    yield made
    made.clear()


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    """Names of nodes that nobody else uses, one at each `next`."""
    return iter(OTHERS)


@pytest.fixture
def node(own: Iterator[str]) -> str:
    return next(own)


def among(*nodes: str) -> dict[str, object]:
    """Node affinity, for pods that may go to several nodes."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}]}
    required = {"nodeSelectorTerms": [term]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def fill(space: Space, node: str, *used: int) -> None:
    """Take this much of each card. Spread takes the emptiest card, so card after card while each is less than full."""
    for card, mem in enumerate(used):
        pod = workload(f"fill-{node}-{card}", gpu_mem=mem, node=node, annotations={names.POLICY: "spread"})
        assert space.put(pod) == (node, str(card))


def test_a_node_shows_the_sum_of_its_cards_and_their_number(space):
    for node in ("sim-1", "sim-2", "sim-3"):
        status = json.loads(space.kubectl("get", "node", node, "-o", "json"))["status"]
        for kind in ("capacity", "allocatable"):
            assert (status[kind][names.GPU_MEM], status[kind][names.GPU_COUNT]) == ("32552", "2")


def test_a_pod_goes_where_one_card_fits_not_where_the_sum_does(space):
    fill(space, "sim-1", 12207, P100)
    fill(space, "sim-2", 12207, 12207)
    fill(space, "sim-3", 8138, P100)
    assert space.put(workload("wants-8138", gpu_mem=8138, spec=among("sim-1", "sim-2", "sim-3"))) == ("sim-3", "0")


def test_a_pod_takes_the_smallest_card_that_fits(space):
    fill(space, FOUR, 4069, 8138, 12207)
    assert space.put(workload("wants-8138", gpu_mem=8138, node=FOUR)) == (FOUR, "1")


def test_three_replicas_land_on_one_card(space):
    space.cluster.kubectl(
        "-n", space.name, "apply", "-f", "-",
        stdin=yaml.safe_dump(deployment("binpack-1", 3, gpu_mem=1024, spec=among(*REPLICAS))),
    )  # fmt: skip
    space.kubectl("rollout", "status", "deployment/binpack-1", "--timeout=30s")
    places = {where(pod) for pod in space.pods()}
    assert len(space.pods()) == 3
    assert len(places) == 1


def test_a_pod_above_the_largest_card_is_refused_with_the_remedy(space):
    with pytest.raises(CommandFailed, match=r"16277 MiB is more than the largest card has \(16276\); ask for at most"):
        space.kubectl("create", "-f", "-", stdin=yaml.safe_dump(workload("too-large", gpu_mem=P100 + 1)))
    assert space.pods() == []


def test_a_pod_above_every_card_of_its_node_waits_and_is_told_why(space):
    space.create(workload("large", gpu_mem=10_000, node=SMALL))
    reason = "The GPU memory asked for is more than any card of the node has"
    space.wait(lambda: reason in space.reasons("large"), "the reason in the pod's events")
    assert where(space.get("large")) == ("", "")


def test_a_full_card_keeps_a_pod_waiting_until_there_is_room(space, node):
    fill(space, node, P100 - 800, P100 - 800)
    space.create(workload("late", gpu_mem=1024, node=node))
    space.wait(lambda: "Insufficient GPU Memory in one device" in space.reasons("late"), "the reason")
    space.kubectl("delete", "pod", f"fill-{node}-1", "--grace-period=1")
    assert space.placed("late", 60) == (node, "1")


def test_a_whole_card_is_an_empty_one_and_stays_alone(space, node):
    fill(space, node, 1024)
    assert space.put(workload("whole", gpu_count=1, node=node)) == (node, "1")
    share = assigned(space.get("whole")).shares()[0]
    assert (share.mem, share.total) == (P100, P100)
    space.create(workload("second", gpu_count=1, node=node))
    space.wait(lambda: "Insufficient empty GPU cards" in space.reasons("second"), "the reason")
    space.kubectl("delete", "pod", "second", "--wait")
    # Room for one more share there is beside the first pod only.
    assert space.put(workload("share", gpu_mem=1, node=node)) == (node, "0")


def test_a_share_is_split_over_two_cards(space, node):
    assert space.put(workload("split", gpu_mem="8Gi", gpu_count=2, node=node)) == (node, "0,1")
    pod = space.get("split")
    assert [(share.index, share.mem) for share in assigned(pod).shares()] == [(0, 4096), (1, 4096)]
    assert pod["metadata"]["annotations"][names.POD_MEM] == "8192"


def test_containers_of_one_pod_share_one_card(space, node):
    fill(space, node, 8138)
    pair = [container("one", gpu_mem=5000), container("two", gpu_mem=5000)]
    # Each would fit beside the filler, both do not.
    assert space.put(workload("both", pair, node=node)) == (node, "1")
    found = assigned(space.get("both"))
    assert {key: [(s.index, s.mem) for s in shares] for key, shares in found.containers.items()} == {
        "0": [(1, 5000)],
        "1": [(1, 5000)],
    }


def test_a_sidecar_counts_like_a_container(space, node):
    fill(space, node, 8138)
    sidecar = container("sidecar", gpu_mem=5000) | {"restartPolicy": "Always"}
    assert space.put(workload("with-sidecar", gpu_mem=5000, init=[sidecar], node=node)) == (node, "1")
    assert space.get("with-sidecar")["metadata"]["annotations"][names.POD_MEM] == "10000"
    assert set(assigned(space.get("with-sidecar")).containers) == {"0", "init-0"}


def test_cards_of_different_size_in_one_node(space):
    status = space.cluster.api.get(f"/api/v1/nodes/{MIXED}")["status"]["capacity"]
    assert (status[names.GPU_MEM], status[names.GPU_COUNT]) == (str(8138 + P100), "2")
    assert space.put(workload("large", gpu_mem=10_000, node=MIXED)) == (MIXED, "1")
    # 6276 are free there and 8138 here: the tighter one is taken.
    assert space.put(workload("fits-both", gpu_mem=6000, node=MIXED)) == (MIXED, "1")
    assert space.put(workload("small", gpu_mem=8138, node=MIXED)) == (MIXED, "0")
    assert space.get("small")["metadata"]["annotations"][names.DEV_MEM] == "8138"


def test_the_policy_of_a_pod(space, node):
    spread = {names.POLICY: "spread"}
    assert space.put(workload("packed-1", gpu_mem=1024, node=node)) == (node, "0")
    assert space.put(workload("packed-2", gpu_mem=1024, node=node)) == (node, "0")
    assert space.put(workload("spread-1", gpu_mem=1024, node=node, annotations=spread)) == (node, "1")
    assert space.put(workload("spread-2", gpu_mem=4096, node=node, annotations=spread)) == (node, "1")
    assert space.put(workload("spread-3", gpu_mem=1024, node=node, annotations=spread)) == (node, "0")


@pytest.mark.node
class TestInside:
    @pytest.fixture
    def space(self, node_cluster: Cluster) -> Iterator[Space]:
        made = Space(node_cluster, "articles")
        yield made
        made.clear()

    SHOWN = "env | grep -E 'ALIYUN|NVIDIA|CUDA|CARDWISE|XLA|CUPY' | sort"

    def environment(self, space: Space, name: str) -> dict[str, str]:
        return dict(line.split("=", 1) for line in space.inside(name, self.SHOWN).splitlines())

    def expected(self, **others: str) -> dict[str, str]:
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
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5000",
            "CUPY_GPU_MEMORY_LIMIT": str(8138 * 1024 * 1024),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8138M",  # of no effect where the node has no MPS
        } | others

    def test_real_nodes_show_their_cards_too(self, space):
        for node in ("n1", "n2"):
            status = json.loads(space.kubectl("get", "node", node, "-o", "json"))["status"]
            for kind in ("capacity", "allocatable"):
                assert (status[kind][names.GPU_MEM], status[kind][names.GPU_COUNT]) == ("32552", "2")

    def test_the_environment_and_the_device_of_its_card_and_no_other(self, space):
        space.create(workload("seen", gpu_mem=8138, node="n1"))
        space.running("seen")
        assert where(space.get("seen")) == ("n1", "0")
        assert self.environment(space, "seen") == self.expected()
        numbers = device_numbers(space.cluster, "n1")
        space.inside("seen", probe(numbers))
        assert space.inside("seen", "cat /dev/termination-log").splitlines() == probed(numbers, "0")
        space.wait(lambda: space.get("seen")["metadata"]["annotations"][names.ASSIGNED] == "true", "marked as assigned")

    def test_what_a_user_sets_wins_only_where_it_is_the_users(self, space):
        stolen = {"CARDWISE_MEM_LIMIT_MIB": "99999", "CARDWISE_MEM_FRACTION": "1", "NVIDIA_VISIBLE_DEVICES": "all"}
        space.cluster.api.create(
            f"/api/v1/namespaces/{space.name}/configmaps", {"metadata": {"name": "stolen"}, "data": stolen}
        )
        mine = container(gpu_mem=8138) | {"env": [{"name": "XLA_CLIENT_MEM_FRACTION", "value": "0.1"}]}
        hidden = container(gpu_mem=8138) | {"envFrom": [{"configMapRef": {"name": "stolen"}}]}
        for name, each in (("mine", mine), ("hidden", hidden)):
            space.create(workload(name, [each], node="n1"))
        space.running("mine", "hidden")
        without = self.expected()
        del without["XLA_PYTHON_CLIENT_MEM_FRACTION"]
        assert self.environment(space, "mine") == without | {"XLA_CLIENT_MEM_FRACTION": "0.1"}
        assert self.environment(space, "hidden") == without
        space.kubectl("delete", "configmap", "stolen")

    def test_a_split_share_sees_both_cards_and_its_part_of_each(self, space):
        space.create(workload("split", gpu_mem=8192, gpu_count=2, node="n2"))
        space.running("split")
        seen = self.environment(space, "split")
        assert (seen["ALIYUN_COM_GPU_MEM_IDX"], seen["CARDWISE_MEM_LIMIT_MIB"]) == ("0,1", "4096")
        assert seen["CARDWISE_MEM_FRACTION"] == "0.2516"
        assert space.inside("split", "for n in /dev/nvidia*; do (exec 3<$n) && echo $n; done").split() == [
            "/dev/nvidia0",
            "/dev/nvidia1",
        ]

    def test_containers_see_their_own_shares(self, space):
        pair = [container("one", gpu_mem=4069), container("two", gpu_mem=8138), container("none")]
        sidecar = container("side", gpu_mem=1024) | {"restartPolicy": "Always"}
        space.create(workload("several", pair, init=[sidecar], node="n2"))
        space.running("several")
        for name, limit in (("one", "4069"), ("two", "8138"), ("side", "1024")):
            shown = space.inside("several", "echo $CARDWISE_MEM_LIMIT_MIB $ALIYUN_COM_GPU_MEM_POD; ls /dev", main=name)
            assert shown.splitlines()[0] == f"{limit} 13231"
            assert [line for line in shown.splitlines() if "nvidia" in line] == ["nvidia0"]
        assert "nvidia" not in space.inside("several", "ls /dev; env", main="none")

    def test_a_copy_of_a_running_pod_is_created_and_works(self, space):
        space.create(workload("original", gpu_mem=9000, node="n1"))
        space.running("original")
        copy = yaml.safe_load(space.kubectl("get", "pod", "original", "-o", "yaml"))
        copy["metadata"]["name"] = "copy"
        space.kubectl("create", "-f", "-", stdin=yaml.safe_dump(copy))
        space.running("copy")
        # Placed anew, not where the annotations that came with it say.
        assert (where(space.get("original")), where(space.get("copy"))) == (("n1", "0"), ("n1", "1"))
        seen = self.environment(space, "copy")
        assert (seen["ALIYUN_COM_GPU_MEM_IDX"], seen["CARDWISE_MEM_LIMIT_MIB"]) == ("1", "9000")
        assert space.inside("copy", "ls /dev/nvidia*; exec 3</dev/nvidia1").split() == ["/dev/nvidia1"]
