"""The scenes of the demo: each creates pods, and checks where they are placed.

Each scene shows a figure of Alibaba's articles or a feature of the README, and checks it through the API server.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardwise.core.api import assignment, names
from cardwise.kube import clusterstate
from tests.cluster import Cluster, CommandFailed, processes
from tests.cluster.processes import PATIENCE, wait_for

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGE = "cardwise.local/busybox:1"
CARD = 16276  # MiB of a card


class SceneFailed(AssertionError):
    """A scene's check failed."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A scene: its title, what it does in one line, and the function that runs it and returns its observation."""

    title: str
    purpose: str
    play: Callable[[Cluster], str]


def check_node_resources(cluster: Cluster) -> str:
    for node in _nodes(cluster):
        allocatable = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
        _expect(allocatable.get(names.GPU_MEM) == str(2 * CARD), f"{node} shows {allocatable.get(names.GPU_MEM)} MiB")
        _expect(allocatable.get(names.GPU_COUNT) == "2", f"{node} shows {allocatable.get(names.GPU_COUNT)} GPUs")
    return f"each of {len(_nodes(cluster))} nodes shows {names.GPU_MEM}: {2 * CARD}, {names.GPU_COUNT}: 2"


def share_a_card(cluster: Cluster) -> str:
    cluster.kubectl("apply", "-f", str(EXAMPLES / "binpack-1.yaml"))
    pods = _wait_for_running(cluster, "app=binpack-1", 3)
    places = {_place(pod) for pod in pods}
    _expect(len(places) == 1, f"the replicas are on {len(places)} GPUs: {sorted(places)}")
    node, card = places.pop()
    return f"all three on GPU {card} of {node}{_check_inside(cluster, pods[0])}"


def join_the_used_card(cluster: Cluster) -> str:
    cluster.kubectl("apply", "-f", str(EXAMPLES / "single.yaml"))
    (pod,) = _wait_for_running(cluster, "app=single", 1)
    occupied = {_place(other) for other in _wait_for_running(cluster, "app=binpack-1", 3)}
    _expect({_place(pod)} == occupied, "single took a new GPU though the used one had room")
    return f"8138 MiB on the same GPU{_check_inside(cluster, pod)}"


def choose_node_where_a_card_fits(cluster: Cluster) -> str:
    first, second, third = _nodes(cluster)
    used = {first: (12207, CARD), second: (12207, 12207), third: (8138, CARD)}
    with _cards_filled(cluster, used):
        node, card = _create_and_place(cluster, _pod("wants-8138", 8138))
        _expect(node == third, f"the pod went to {node}, not to {third}")
        return f"free {first}: 4069+0, {second}: 4069+4069, {third}: 8138+0 MiB; chosen: GPU {card} of {node}"


def choose_smallest_card_that_fits(cluster: Cluster) -> str:
    """Place a pod on a node of four cards. The node's taint keeps other pods away."""
    with _cards_filled(cluster, {FOUR_CARDS: (4069, 8138, 12207, 0)}):
        node, card = _create_and_place(cluster, _pod("wants-the-second", 8138, node=FOUR_CARDS))
        _expect(card == 1, f"the pod got GPU {card} of {node}, not the second one")
        return "free 12207, 8138, 4069, 16276 MiB; chosen: the second GPU"


def refuse_too_large_pod(cluster: Cluster) -> str:
    try:
        cluster.kubectl("apply", "-f", str(EXAMPLES / "too-large.yaml"))
    except CommandFailed as error:
        text = str(error)
        _expect("more than the largest GPU has (16276)" in text, f"refused without the reason: {text}")
        return "refused: " + text[text.index("spec.containers") :].splitlines()[0]
    raise SceneFailed("a pod of 1Ti was admitted")


def assign_whole_card_and_split_share(cluster: Cluster) -> str:
    try:
        for example in ("whole-card", "split-over-two-cards"):
            cluster.kubectl("apply", "-f", str(EXAMPLES / f"{example}.yaml"))
        whole, split = (_wait_for_assignment(cluster, name) for name in ("whole-card", "split"))
        _expect(whole.mem == CARD and len(whole.indices()) == 1, f"whole-card holds {whole.mem} MiB")
        _expect([share.mem for share in split.shares()] == [4096, 4096], "split does not hold 4096 MiB on two GPUs")
        return "gpu-count: 1 holds 16276 MiB alone; gpu-mem: 8Gi with gpu-count: 2 holds 4096 MiB on each of two GPUs"
    finally:
        cluster.kubectl("delete", "pod", "whole-card", "split", "--ignore-not-found", "--grace-period=1")
        _expect(
            wait_for(lambda: not _has_assigned(cluster, "whole-card", "split"), PATIENCE),
            "their GPUs are still assigned",
        )


def choose_the_type(cluster: Cluster) -> str:
    with _pods_removed(cluster):
        pod = _pod("wants-a-v100", 4096, limits={V100: 1})
        pod["spec"]["tolerations"] = _TOLERATIONS
        node, card = _create_and_place(cluster, pod)
        _expect(node == FOUR_CARDS, f"the pod went to {node}, which has no V100")
        return f"4096 MiB of GPU {card} of {node}, the only node with V100s"


def wait_for_quota(cluster: Cluster) -> str:
    cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}}])
    metadata, spec = {"name": "team", "namespace": TEAM}, {"hard": [{"memoryMiB": 8192}]}
    cluster.apply([{"apiVersion": names.API_VERSION, "kind": "GPUQuota", "metadata": metadata, "spec": spec}])
    first, second = _pod("first", 6144), _pod("second", 4096)
    with _pods_removed(cluster, TEAM):
        for pod in (first, second):
            pod["metadata"]["namespace"] = TEAM
        _create_and_place(cluster, first)
        cluster.apply([second])
        reason = _wait_for_event(cluster, second, "WaitingForQuota")
        return f"the first runs, the second waits. Its event says: {reason}"


def start_together(cluster: Cluster) -> str:
    members = [_pod(f"rank-{i}", 8138) for i in range(3)]
    for member in members:
        member["metadata"]["annotations"] = {names.GROUP_NAME: "ranks", names.GROUP_NUM: "3"}
    with _pods_removed(cluster):
        cluster.apply(members[:2])
        _expect(all(_is_gated(cluster, member) for member in members[:2]), "two members of three do not wait")
        cluster.apply(members[2:])
        places = [_wait_for_place(cluster, member) for member in members]
        on = ", ".join(f"GPU {card} of {node}" for node, card in sorted(set(places)))
        return f"two members waited (SchedulingGated); with the third all got their share: {on}"


def explain_a_waiting_pod(cluster: Cluster) -> str:
    (single,) = _wait_for_running(cluster, "app=single", 1)
    node, _ = _place(single)
    pod = _pod("both", limits={names.GPU_COUNT: 2}, node=node)
    with _pods_removed(cluster):
        cluster.apply([pod])
        _wait_for_event(cluster, pod, "FailedScheduling")
        command = ["cardwise", "explain", "pod", "both"]
        output = processes.run(
            [str(Path(sys.executable).with_name(command[0])), *command[1:], f"--kubeconfig={cluster.kubeconfig}"]
        )
        _expect("default/single" in output, f"explain does not name the pods that hold the GPU: {output}")
        return f"$ {' '.join(command)}\n{output.rstrip()}"


FOUR_CARDS = "sim-1"  # the node of four V100s; `__main__` creates it by the ClusterSpec
V100 = "nvidia.tesla-v100"  # the class that Cardwise makes for their model
TEAM = "team-a"  # a namespace with a quota
_TOLERATIONS = [{"key": "demo", "operator": "Exists"}]
SCENES = (
    Scene(
        "Nodes show their GPUs",
        "The device plugin publishes the GPUs of each node and their memory.",
        check_node_resources,
    ),
    Scene(
        "Three replicas on one GPU",
        "Each requests 1024 MiB (aliyun.com/gpu-mem). They share one GPU.",
        share_a_card,
    ),
    Scene(
        "Another pod joins them",
        "It requests 8138 MiB. The used GPU still has as much; others stay empty.",
        join_the_used_card,
    ),
    Scene(
        "The node where one GPU fits",
        "8138 MiB must be free on one GPU; the sum over a node does not help.",
        choose_node_where_a_card_fits,
    ),
    Scene(
        "The smallest GPU that fits",
        "8138 MiB go where least is left over, on a node of four GPUs.",
        choose_smallest_card_that_fits,
    ),
    Scene(
        "More than a GPU has",
        "A request of 1Ti is refused when the pod is created.",
        refuse_too_large_pod,
    ),
    Scene(
        "Whole GPUs, and a share of two",
        "gpu-count alone is whole GPUs; with gpu-mem the memory is split.",
        assign_whole_card_and_split_share,
    ),
    Scene(
        "A type of GPU",
        f"A pod that names {V100} gets one, though other GPUs are free.",
        choose_the_type,
    ),
    Scene(
        "A quota",
        f"{TEAM} may hold 8192 MiB. Its pods request 6144, then 4096.",
        wait_for_quota,
    ),
    Scene(
        "A gang",
        "Three pods start together or not at all: first two come, then the third.",
        start_together,
    ),
    Scene(
        "Why does my pod wait?",
        "A pod requests both GPUs of a node where one is used.",
        explain_a_waiting_pod,
    ),
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


def _pod(
    name: str, mem: int = 0, *, limits: Mapping[str, int] | None = None, node: str = "", role: str = "guest"
) -> dict[str, Any]:
    """A pod of a scene. `mem`: MiB; `limits`: further limits; `node`: the only node that it may run on."""
    requested = ({names.GPU_MEM: mem} if mem else {}) | dict(limits or {})
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "main", "image": IMAGE, "resources": {"limits": requested}}],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        spec["tolerations"] = _TOLERATIONS
    metadata = {"name": name, "namespace": "default", "labels": {"scene": role}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _create_and_place(cluster: Cluster, pod: dict[str, Any]) -> tuple[str, int]:
    """Create the pod, and wait until it is bound. Returns its node and the index of its card."""
    cluster.apply([pod])
    return _wait_for_place(cluster, pod)


def _wait_for_place(cluster: Cluster, pod: dict[str, Any]) -> tuple[str, int]:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    _wait_for_assignment(cluster, name, namespace)
    return _place(cluster.kubectl_object("get", "pod", name, f"--namespace={namespace}"))


def _wait_for_assignment(cluster: Cluster, name: str, namespace: str = "default") -> assignment.Assignment:
    def decoded() -> assignment.Assignment | None:
        pod = cluster.kubectl_object("get", "pod", name, f"--namespace={namespace}")
        return assignment.decode(pod["metadata"].get("annotations", {}))

    _expect(wait_for(lambda: decoded() is not None, PATIENCE), f"{name} was not placed")
    assigned = decoded()
    if assigned is None:
        raise SceneFailed(f"{name} lost its assignment")
    return assigned


def _wait_for_event(cluster: Cluster, pod: dict[str, Any], reason: str) -> str:
    """Wait for an event of the pod. Returns its message."""
    metadata = pod["metadata"]

    def messages() -> list[str]:
        events = cluster.api.get(f"/api/v1/namespaces/{metadata['namespace']}/events")["items"]
        return [
            str(event.get("message"))
            for event in events
            if event["involvedObject"].get("name") == metadata["name"] and event.get("reason") == reason
        ]

    _expect(wait_for(lambda: bool(messages()), PATIENCE), f"{metadata['name']} got no event {reason}")
    return messages()[-1]


def _is_gated(cluster: Cluster, pod: dict[str, Any]) -> bool:
    return bool(cluster.kubectl_object("get", "pod", pod["metadata"]["name"])["spec"].get("schedulingGates"))


@contextmanager
def _pods_removed(cluster: Cluster, namespace: str = "default") -> Iterator[None]:
    """Remove the pods that the block has created in the namespace, and wait until their cards are free."""
    try:
        yield
    finally:
        of_scene = ("pods", "-l", "scene", f"--namespace={namespace}")
        created = cluster.kubectl("get", *of_scene, "--output=name").replace("pod/", "").split()
        cluster.kubectl("delete", *of_scene, "--wait=false", "--grace-period=1")
        _expect(wait_for(lambda: not _has_assigned(cluster, *created), PATIENCE), "their GPUs are still assigned")


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
