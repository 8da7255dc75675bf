"""The scenes of the demo: what each applies, and what must come out of it.

Each scene is one figure of Alibaba's articles or one promise of the README, asserted on what the API server shows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardwise.core.api import assignment, names
from cardwise.kube import survey
from tests.cluster import Cluster, CommandFailed
from tests.cluster.processes import PATIENCE, wait_for

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGE = "cardwise.local/busybox:1"
CARD = 16276  # MiB


class Failed(AssertionError):
    """A scene did not come out as it should."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A title for people, and what plays it and returns what was seen."""

    title: str
    play: Callable[[Cluster], str]


def nodes_show_their_cards(cluster: Cluster) -> str:
    for node in _nodes(cluster):
        shown = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
        _expect(shown.get(names.GPU_MEM) == str(2 * CARD), f"{node} shows {shown.get(names.GPU_MEM)} MiB")
        _expect(shown.get(names.GPU_COUNT) == "2", f"{node} shows {shown.get(names.GPU_COUNT)} cards")
    return f"{len(_nodes(cluster))} nodes show {names.GPU_MEM}: {2 * CARD} and {names.GPU_COUNT}: 2"


def three_replicas_share_a_card(cluster: Cluster) -> str:
    cluster.kubectl("apply", "-f", str(EXAMPLES / "binpack-1.yaml"))
    pods = _running(cluster, "app=binpack-1", 3)
    places = {_place(pod) for pod in pods}
    _expect(len(places) == 1, f"the replicas are on {len(places)} cards: {sorted(places)}")
    node, card = places.pop()
    return f"binpack-1: 3 replicas of 1024 MiB on card {card} of {node}{_seen_inside(cluster, pods[0])}"


def a_single_replica_joins(cluster: Cluster) -> str:
    cluster.kubectl("apply", "-f", str(EXAMPLES / "single.yaml"))
    (pod,) = _running(cluster, "app=single", 1)
    beside = {_place(other) for other in _running(cluster, "app=binpack-1", 3)}
    _expect({_place(pod)} == beside, "single took a new card though the used one had room")
    return f"single: 8138 MiB on the same card{_seen_inside(cluster, pod)}"


def the_node_where_one_card_fits(cluster: Cluster) -> str:
    first, second, third = _nodes(cluster)
    used = {first: (12207, CARD), second: (12207, 12207), third: (8138, CARD)}
    with _filled(cluster, used):
        node, card = _placed(cluster, _pod("wants-8138", 8138))
        _expect(node == third, f"the pod went to {node}, not to {third}")
        return f"free {first}: 4069+0, {second}: 4069+4069, {third}: 8138+0; 8138 MiB go to {node} card {card}"


def the_card_that_fits_best(cluster: Cluster) -> str:
    """On a node of four cards; it is tainted, so that only the pods of this scene go there."""
    with _filled(cluster, {FOUR_CARDS: (4069, 8138, 12207, 0)}):
        node, card = _placed(cluster, _pod("wants-the-second", 8138, node=FOUR_CARDS))
        _expect(card == 1, f"the pod got card {card} of {node}, not the second one")
        return "free 12207, 8138, 4069, 16276; 8138 MiB go to the second card"


def too_large_is_refused(cluster: Cluster) -> str:
    try:
        cluster.kubectl("apply", "-f", str(EXAMPLES / "too-large.yaml"))
    except CommandFailed as error:
        text = str(error)
        _expect("more than the largest card has (16276)" in text, f"refused without the reason: {text}")
        return text[text.index("spec.containers") :].splitlines()[0]
    raise Failed("a pod of 1Ti was admitted")


def a_whole_card_and_a_split_share(cluster: Cluster) -> str:
    try:
        for example in ("whole-card", "split-over-two-cards"):
            cluster.kubectl("apply", "-f", str(EXAMPLES / f"{example}.yaml"))
        whole, split = (_assigned(cluster, name) for name in ("whole-card", "split"))
        _expect(whole.mem == CARD and len(whole.indices()) == 1, f"whole-card holds {whole.mem} MiB")
        _expect([share.mem for share in split.shares()] == [4096, 4096], "split does not hold 4096 MiB on two cards")
        return "gpu-count: 1 holds 16276 MiB alone; gpu-mem: 8Gi with gpu-count: 2 holds 4096 MiB on each of two cards"
    finally:
        cluster.kubectl("delete", "pod", "whole-card", "split", "--ignore-not-found", "--grace-period=1")
        _expect(wait_for(lambda: not _holds(cluster, "whole-card", "split"), PATIENCE), "their cards are still held")


FOUR_CARDS = "sim-1"  # ClusterSpec of the demo: see __main__
SCENES = (
    Scene("Three nodes of two 16276 MiB cards", nodes_show_their_cards),
    Scene("Three replicas on one card", three_replicas_share_a_card),
    Scene("A single replica joins them", a_single_replica_joins),
    Scene("The node where one card fits, not the node where the sum fits", the_node_where_one_card_fits),
    Scene("The smallest card that fits", the_card_that_fits_best),
    Scene("More than one card has", too_large_is_refused),
    Scene("Whole cards, and a share of two", a_whole_card_and_a_split_share),
)


def _nodes(cluster: Cluster) -> list[str]:
    """The three nodes of the demo: real ones, or simulated ones without root."""
    return [node.name for node in cluster.nodes] or ["sim-2", "sim-3", "sim-4"]


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Failed(otherwise)


def _running(cluster: Cluster, selector: str, count: int) -> list[dict[str, Any]]:
    def pods() -> list[dict[str, Any]]:
        items = cluster.ask("get", "pods", "-l", selector)["items"]
        return [pod for pod in items if pod["status"].get("phase") == "Running"]

    _expect(wait_for(lambda: len(pods()) == count, PATIENCE), f"{selector}: not {count} pods running")
    return pods()


def _place(pod: dict[str, Any]) -> tuple[str, int]:
    return pod["spec"]["nodeName"], int(pod["metadata"]["annotations"][names.IDX])


def _seen_inside(cluster: Cluster, pod: dict[str, Any]) -> str:
    """What the container itself sees: its fraction, and the device of its card and no other. Real nodes only."""
    if not cluster.nodes:
        return ""
    look = "echo $CARDWISE_MEM_FRACTION; ls /dev/nvidia*"
    fraction, *devices = cluster.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", look).split()
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


def _placed(cluster: Cluster, pod: dict[str, Any]) -> tuple[str, int]:
    """Create the pod and wait for its place."""
    cluster.apply([pod])
    name = pod["metadata"]["name"]
    _assigned(cluster, name)
    return _place(cluster.ask("get", "pod", name))


def _assigned(cluster: Cluster, name: str) -> assignment.Assignment:
    def decoded() -> assignment.Assignment | None:
        return assignment.decode(cluster.ask("get", "pod", name)["metadata"].get("annotations", {}))

    _expect(wait_for(lambda: decoded() is not None, PATIENCE), f"{name} was not placed")
    found = decoded()
    if found is None:
        raise Failed(f"{name} lost its place")
    return found


@contextmanager
def _filled(cluster: Cluster, used: dict[str, tuple[int, ...]]) -> Iterator[None]:
    """Cards filled up to `used` MiB for the time of a scene; the articles' pods make room for it."""
    scaled = cluster.ask("get", "deployments")["items"]
    for deployment in scaled:
        cluster.ask("scale", "deployment", deployment["metadata"]["name"], "--replicas=0")
    _empty(cluster)
    try:
        for node, mems in used.items():
            _fill(cluster, node, mems)
        yield
    finally:
        cluster.kubectl("delete", "pods", "-l", "scene", "--wait=false", "--grace-period=1")
        _empty(cluster)
        for deployment in scaled:
            replicas = deployment["spec"]["replicas"]
            cluster.ask("scale", "deployment", deployment["metadata"]["name"], f"--replicas={replicas}")


def _fill(cluster: Cluster, node: str, mems: tuple[int, ...]) -> None:
    """Card by card: a plug takes what a filler leaves, so the next filler has only the next card to go to."""
    plugs = []
    for i, mem in enumerate(mems):
        for role, size in (("fill", mem), ("plug", CARD - mem)):
            if size:
                name = f"{role}-{node}-{i}"
                _, card = _placed(cluster, _pod(name, size, node=node, role=role))
                _expect(card == i, f"{name} is on card {card}")
                plugs += [name] if role == "plug" else []
    if plugs:
        cluster.kubectl("delete", "pod", *plugs, "--grace-period=1")
        left = f"{len(plugs)} plugs on {node} still hold their cards"
        _expect(wait_for(lambda: _held(cluster, node) == sum(mems), PATIENCE), left)


def _held(cluster: Cluster, node: str) -> int:
    state = survey.take(cluster.api).ledger.node(node)
    return sum(state.used) if state is not None else 0


def _holds(cluster: Cluster, *pods: str) -> bool:
    ledger = survey.take(cluster.api).ledger
    return any(holding.name in pods for node in ledger.nodes() for holding in ledger.holdings(node.name))


def _empty(cluster: Cluster) -> None:
    def nothing_held() -> bool:
        return len(survey.take(cluster.api).ledger) == 0

    _expect(wait_for(nothing_held, PATIENCE), "cards are still held after the pods were deleted")
