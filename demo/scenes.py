"""The scenes of the demo: each creates pods, and checks where they are placed.

Each scene shows a figure of Alibaba's articles or a feature of the README, and checks it through the API server.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardwise.core.api import assignment, names
from cardwise.kube import clusterstate
from tests.cluster import Cluster, CommandFailed
from tests.cluster.processes import PATIENCE, wait_for

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGE = "cardwise.local/busybox:1"
CARD = 16276  # MiB of a card


class SceneFailed(AssertionError):
    """A scene's check failed."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A scene: its title, and the function that runs it and returns its observation in one line."""

    title: str
    play: Callable[[Cluster], str]


def check_node_resources(cluster: Cluster) -> str:
    for node in _nodes(cluster):
        allocatable = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
        _expect(allocatable.get(names.GPU_MEM) == str(2 * CARD), f"{node} shows {allocatable.get(names.GPU_MEM)} MiB")
        _expect(allocatable.get(names.GPU_COUNT) == "2", f"{node} shows {allocatable.get(names.GPU_COUNT)} cards")
    return f"{len(_nodes(cluster))} nodes show {names.GPU_MEM}: {2 * CARD} and {names.GPU_COUNT}: 2"


def share_a_card(cluster: Cluster) -> str:
    cluster.kubectl("apply", "-f", str(EXAMPLES / "binpack-1.yaml"))
    pods = _wait_for_running(cluster, "app=binpack-1", 3)
    places = {_place(pod) for pod in pods}
    _expect(len(places) == 1, f"the replicas are on {len(places)} cards: {sorted(places)}")
    node, card = places.pop()
    return f"binpack-1: 3 replicas of 1024 MiB on card {card} of {node}{_check_inside(cluster, pods[0])}"


def join_the_used_card(cluster: Cluster) -> str:
    cluster.kubectl("apply", "-f", str(EXAMPLES / "single.yaml"))
    (pod,) = _wait_for_running(cluster, "app=single", 1)
    occupied = {_place(other) for other in _wait_for_running(cluster, "app=binpack-1", 3)}
    _expect({_place(pod)} == occupied, "single took a new card though the used one had room")
    return f"single: 8138 MiB on the same card{_check_inside(cluster, pod)}"


def choose_node_where_a_card_fits(cluster: Cluster) -> str:
    first, second, third = _nodes(cluster)
    used = {first: (12207, CARD), second: (12207, 12207), third: (8138, CARD)}
    with _cards_filled(cluster, used):
        node, card = _create_and_place(cluster, _pod("wants-8138", 8138))
        _expect(node == third, f"the pod went to {node}, not to {third}")
        return f"free {first}: 4069+0, {second}: 4069+4069, {third}: 8138+0; 8138 MiB go to {node} card {card}"


def choose_smallest_card_that_fits(cluster: Cluster) -> str:
    """Place a pod on a node of four cards. The node's taint keeps other pods away."""
    with _cards_filled(cluster, {FOUR_CARDS: (4069, 8138, 12207, 0)}):
        node, card = _create_and_place(cluster, _pod("wants-the-second", 8138, node=FOUR_CARDS))
        _expect(card == 1, f"the pod got card {card} of {node}, not the second one")
        return "free 12207, 8138, 4069, 16276; 8138 MiB go to the second card"


def refuse_too_large_pod(cluster: Cluster) -> str:
    try:
        cluster.kubectl("apply", "-f", str(EXAMPLES / "too-large.yaml"))
    except CommandFailed as error:
        text = str(error)
        _expect("more than the largest GPU has (16276)" in text, f"refused without the reason: {text}")
        return text[text.index("spec.containers") :].splitlines()[0]
    raise SceneFailed("a pod of 1Ti was admitted")


def assign_whole_card_and_split_share(cluster: Cluster) -> str:
    try:
        for example in ("whole-card", "split-over-two-cards"):
            cluster.kubectl("apply", "-f", str(EXAMPLES / f"{example}.yaml"))
        whole, split = (_wait_for_assignment(cluster, name) for name in ("whole-card", "split"))
        _expect(whole.mem == CARD and len(whole.indices()) == 1, f"whole-card holds {whole.mem} MiB")
        _expect([share.mem for share in split.shares()] == [4096, 4096], "split does not hold 4096 MiB on two cards")
        return "gpu-count: 1 holds 16276 MiB alone; gpu-mem: 8Gi with gpu-count: 2 holds 4096 MiB on each of two cards"
    finally:
        cluster.kubectl("delete", "pod", "whole-card", "split", "--ignore-not-found", "--grace-period=1")
        _expect(
            wait_for(lambda: not _has_assigned(cluster, "whole-card", "split"), PATIENCE),
            "their cards are still assigned",
        )


FOUR_CARDS = "sim-1"  # the node of four cards; `__main__` creates it by the ClusterSpec
SCENES = (
    Scene("Three nodes of two 16276 MiB cards", check_node_resources),
    Scene("Three replicas on one card", share_a_card),
    Scene("A single replica joins them", join_the_used_card),
    Scene("The node where one card fits, not the node where the sum fits", choose_node_where_a_card_fits),
    Scene("The smallest card that fits", choose_smallest_card_that_fits),
    Scene("More than one card has", refuse_too_large_pod),
    Scene("Whole cards, and a share of two", assign_whole_card_and_split_share),
)


def _nodes(cluster: Cluster) -> list[str]:
    """The three nodes of the demo: real nodes, or without root simulated nodes."""
    return [node.name for node in cluster.nodes] or ["sim-2", "sim-3", "sim-4"]


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise SceneFailed(problem)


def _wait_for_running(cluster: Cluster, selector: str, count: int) -> list[dict[str, Any]]:
    def running_pods() -> list[dict[str, Any]]:
        pods = cluster.kubectl_object("get", "pods", "-l", selector)["items"]
        return [pod for pod in pods if pod["status"].get("phase") == "Running"]

    _expect(wait_for(lambda: len(running_pods()) == count, PATIENCE), f"{selector}: not {count} pods running")
    return running_pods()


def _place(pod: dict[str, Any]) -> tuple[str, int]:
    return pod["spec"]["nodeName"], int(pod["metadata"]["annotations"][names.IDX])


def _check_inside(cluster: Cluster, pod: dict[str, Any]) -> str:
    """Check in the container that it has only its card's device. Returns the check's output; "" on simulated nodes."""
    if not cluster.nodes:
        return ""
    script = "echo $CARDWISE_MEM_FRACTION; ls /dev/nvidia*"
    fraction, *devices = cluster.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", script).split()
    card = _place(pod)[1]
    _expect(devices == [f"/dev/nvidia{card}"], f"the container sees {devices}, its card is {card}")
    return f"; inside: CARDWISE_MEM_FRACTION={fraction}, {devices[0]}"


def _pod(name: str, mem: int, *, node: str = "", role: str = "guest") -> dict[str, Any]:
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "main", "image": IMAGE, "resources": {"limits": {names.GPU_MEM: mem}}}],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        spec["tolerations"] = [{"key": "demo", "operator": "Exists"}]
    labels = {"scene": role}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _create_and_place(cluster: Cluster, pod: dict[str, Any]) -> tuple[str, int]:
    """Create the pod, and wait until it is bound. Returns its node and the index of its card."""
    cluster.apply([pod])
    name = pod["metadata"]["name"]
    _wait_for_assignment(cluster, name)
    return _place(cluster.kubectl_object("get", "pod", name))


def _wait_for_assignment(cluster: Cluster, name: str) -> assignment.Assignment:
    def decoded() -> assignment.Assignment | None:
        return assignment.decode(cluster.kubectl_object("get", "pod", name)["metadata"].get("annotations", {}))

    _expect(wait_for(lambda: decoded() is not None, PATIENCE), f"{name} was not placed")
    assigned = decoded()
    if assigned is None:
        raise SceneFailed(f"{name} lost its assignment")
    return assigned


@contextmanager
def _cards_filled(cluster: Cluster, used: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Fill the cards of nodes up to `used` MiB within the block. Meanwhile earlier deployments are scaled down."""
    scaled = cluster.kubectl_object("get", "deployments")["items"]
    for deployment in scaled:
        cluster.kubectl_object("scale", "deployment", deployment["metadata"]["name"], "--replicas=0")
    _wait_until_empty(cluster)
    try:
        for node, mems in used.items():
            _fill(cluster, node, mems)
        yield
    finally:
        cluster.kubectl("delete", "pods", "-l", "scene", "--wait=false", "--grace-period=1")
        _wait_until_empty(cluster)
        for deployment in scaled:
            replicas = deployment["spec"]["replicas"]
            cluster.kubectl_object("scale", "deployment", deployment["metadata"]["name"], f"--replicas={replicas}")


def _fill(cluster: Cluster, node: str, mems: tuple[int, ...]) -> None:
    """Fill the node's cards one by one. A plug pod takes the rest of a card, so the next pod uses the next card."""
    plugs = []
    for i, mem in enumerate(mems):
        for role, size in (("fill", mem), ("plug", CARD - mem)):
            if size:
                name = f"{role}-{node}-{i}"
                _, card = _create_and_place(cluster, _pod(name, size, node=node, role=role))
                _expect(card == i, f"{name} is on card {card}")
                plugs += [name] if role == "plug" else []
    if plugs:
        cluster.kubectl("delete", "pod", *plugs, "--grace-period=1")
        problem = f"{len(plugs)} plugs on {node} still hold their cards"
        _expect(wait_for(lambda: _allocated_mib(cluster, node) == sum(mems), PATIENCE), problem)


def _allocated_mib(cluster: Cluster, node: str) -> int:
    state = clusterstate.read_cluster_state(cluster.api).ledger.node(node)
    return sum(state.used) if state is not None else 0


def _has_assigned(cluster: Cluster, *pods: str) -> bool:
    ledger = clusterstate.read_cluster_state(cluster.api).ledger
    return any(holding.name in pods for node in ledger.nodes() for holding in ledger.holdings(node.name))


def _wait_until_empty(cluster: Cluster) -> None:
    def is_empty() -> bool:
        return len(clusterstate.read_cluster_state(cluster.api).ledger) == 0

    _expect(wait_for(is_empty, PATIENCE), "cards are still assigned after the pods were deleted")
