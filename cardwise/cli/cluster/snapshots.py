"""The live cluster as something to simulate: what is there, who is on it, and who waits."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from cardwise.cli.cluster import published
from cardwise.core.api import classes, names, request
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.api.request import Load
from cardwise.core.placement.ledger import Holding
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, survey
from cardwise.kube.client import KubeClient
from cardwise.kube.pods import loads
from cardwise.simulation.workload import UNLIMITED_LOAD, PodShape, SimulatedNode, SimulatedPod, SimulatedWorkload


@dataclass(slots=True)
class Snapshot:
    """`nodes` have what is left beside cards; `empty` have what they had without the pods that use cards.

    `pods`: those that use cards or wait for them. `learned`: what the extender has saved of the pods that come, if it
    has. `notes`: what is less exact, and why.
    """

    nodes: list[SimulatedNode] = field(default_factory=list)
    empty: list[SimulatedNode] = field(default_factory=list)
    pods: list[SimulatedPod] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    waiting: int = 0
    classes: dict[str, ResourceClass] = field(default_factory=dict)
    learned: str = ""
    notes: list[str] = field(default_factory=list)

    def workload(self) -> SimulatedWorkload:
        """A workload to simulate: the same pods come to the same nodes, which are empty."""
        return SimulatedWorkload("cluster", tuple(self.empty), tuple(self.pods))

    def models(self) -> list[str]:
        """The models of its cards, each once."""
        return list(dict.fromkeys(card.model for node in self.nodes for card in node.cards))


def take(client: KubeClient, installed: str = names.NAMESPACE) -> Snapshot:
    """Reads it. `installed`: the namespace of Cardwise. Raises `KubeError`."""
    seen = survey.take(client, addresses=False, own=client.namespace)
    found = Snapshot(holdings=seen.ledger.holdings(), classes=seen.classes, notes=list(seen.problems))
    if seen.partial:
        found.notes.append(seen.partial)
    try:
        nodes = list(client.objects(paths.nodes()))
        pods = [pod for pod in client.objects(paths.pods()) if not _over(pod)]
    except errors.Forbidden as error:
        found.notes.append(unlimited(error))
        found.pods += [SimulatedPod(f"{where}/{name}", PodShape(asked, Load())) for where, name, asked in seen.waiting]
        found.waiting = len(found.pods)
        now = empty = {node.name: UNLIMITED_LOAD for node in seen.ledger.nodes()}
    else:
        now, empty = left(nodes, pods), left(nodes, [pod for pod in pods if not _take(found, pod)])
    found.learned = published.take(client, installed).workload
    for node in seen.ledger.nodes():
        if node.cards or node.devices:
            cards, devices = tuple(node.cards), tuple(node.devices)
            found.nodes.append(SimulatedNode(node.name, cards, now.get(node.name, _NOTHING), devices))
            found.empty.append(SimulatedNode(node.name, cards, empty.get(node.name, _NOTHING), devices))
    return found


def classified(found: Snapshot) -> Callable[[Card, str], Card]:
    """Puts a card that is not there yet into the classes that it will be in on the node of this name."""
    classifier = Classifier(found.classes.values())

    def named(card: Card, node: str) -> Card:
        seen = classes.labels(
            node=node, index=card.index, uuid=card.uuid, model=card.model, memory=card.mem, properties={}, own={}
        )
        of = classifier.classes_of(seen)
        return dataclasses.replace(card, classes=of, priority=classifier.priority_of(of))

    return named


_NOTHING = Load(0, 0, 0)


def _allocatable(node: Json) -> Load:
    """What it has for pods; nothing where it is cordoned."""
    if (node.get("spec") or {}).get("unschedulable"):
        return _NOTHING
    allocatable = (node.get("status") or {}).get("allocatable")
    return loads.of_node(msgspec.convert(allocatable, loads.ResourceList)) if allocatable else UNLIMITED_LOAD


def left(nodes: Iterable[Json], pods: Iterable[Json]) -> dict[str, Load]:
    """What each node has left beside cards with these pods on it."""
    have = {node["metadata"]["name"]: _allocatable(node) for node in nodes}
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName") or ""
        if node in have and not _over(pod):
            have[node] = have[node].plus(load_of(pod), -1)
    return have


def read_left(client: KubeClient) -> tuple[dict[str, Load], str]:
    """`left` of the cluster; nothing of any node where they may not be read, and why."""
    try:
        return left(client.objects(paths.nodes()), client.objects(paths.pods())), ""
    except errors.Forbidden as error:
        return {}, unlimited(error)


def load_of(pod: Json) -> Load:
    """What the pod takes beside cards."""
    return loads.of_pod(msgspec.convert(pod.get("spec") or {}, loads.PodSpec))


def _over(pod: Json) -> bool:
    return (pod.get("status") or {}).get("phase") in names.FINISHED_PHASES


def _take(found: Snapshot, pod: Json) -> bool:
    """Enters the pod if it uses cards or waits for some; whether it does."""
    metadata = pod["metadata"]
    try:
        asked = request.parse(pod)
    except InvalidRequest:  # of what runs, or can never be placed; the survey has told it
        asked = None
    if asked is None:
        return False
    shape = PodShape(asked, load_of(pod))
    found.pods.append(SimulatedPod(f"{metadata['namespace']}/{metadata['name']}", shape))
    found.waiting += not (pod.get("spec") or {}).get("nodeName")
    return True


def unlimited(error: errors.Forbidden) -> str:
    """What is less exact where nodes or pods may not be read."""
    return f"cpu and memory of nodes are taken as unlimited: {error.message}"
