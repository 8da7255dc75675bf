"""Reads the live cluster as a workload to simulate: nodes, the pods on them, and pending pods."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cardwise.cli.cluster import published
from cardwise.core.api import classes, names, request
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.api.request import Load
from cardwise.core.placement.holding import Holding
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import clusterstate, errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.pods import spec_of
from cardwise.kube.pods import loads
from cardwise.simulation.workload import UNLIMITED_LOAD, PodShape, SimulatedNode, SimulatedPod, SimulatedWorkload


@dataclass(slots=True)
class LiveWorkload:
    """The cluster as a workload.

    nodes: the nodes with their present free cpu and memory.
    empty_nodes: the nodes with the cpu and memory that would be free if no pod used cards.
    pods: the pods that use cards or wait for them.
    holdings: the cards and devices that pods hold.
    pending_count: the number of pending pods.
    learned_workload: the workload that the extender has saved; "" if the extender has saved no workload.
    notes: inexact parts of the workload, with the reasons.
    """

    nodes: list[SimulatedNode] = field(default_factory=list)
    empty_nodes: list[SimulatedNode] = field(default_factory=list)
    pods: list[SimulatedPod] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    pending_count: int = 0
    classes: dict[str, ResourceClass] = field(default_factory=dict)
    learned_workload: str = ""
    notes: list[str] = field(default_factory=list)

    def workload(self) -> SimulatedWorkload:
        """A workload to simulate: the same pods arrive at the same nodes, which are empty at first."""
        return SimulatedWorkload("cluster", tuple(self.empty_nodes), tuple(self.pods))

    def models(self) -> list[str]:
        """The models of the cluster's cards, each once."""
        return list(dict.fromkeys(card.model for node in self.nodes for card in node.cards))


def read_cluster_for_simulation(client: KubeClient, cardwise_namespace: str = names.NAMESPACE) -> LiveWorkload:
    """Read the cluster. Raises `KubeError`."""
    cluster_state = clusterstate.read_cluster_state(client, addresses=False, own_namespace=client.namespace)
    live_workload = LiveWorkload(
        holdings=cluster_state.ledger.holdings(), classes=cluster_state.classes, notes=list(cluster_state.problems)
    )
    if cluster_state.partial:
        live_workload.notes.append(cluster_state.partial)
    try:
        nodes = list(client.list_objects(paths.nodes()))
        pods = [pod for pod in client.list_objects(paths.pods()) if not _is_finished(pod)]
    except errors.Forbidden as error:
        live_workload.notes.append(describe_unlimited_loads(error))
        live_workload.pods += [
            SimulatedPod(f"{namespace}/{name}", PodShape(pod_request, Load()))
            for namespace, name, pod_request in cluster_state.waiting
        ]
        live_workload.pending_count = len(live_workload.pods)
        current_loads = empty_loads = {node.name: UNLIMITED_LOAD for node in cluster_state.ledger.nodes()}
    else:
        current_loads, empty_loads = (
            free_loads(nodes, pods),
            free_loads(nodes, [pod for pod in pods if not _add_pod(live_workload, pod)]),
        )
    live_workload.learned_workload = published.read_published(client, cardwise_namespace).workload
    for node in cluster_state.ledger.nodes():
        if node.cards or node.devices:
            cards, devices = tuple(node.cards), tuple(node.devices)
            live_workload.nodes.append(SimulatedNode(node.name, cards, current_loads.get(node.name, _NO_LOAD), devices))
            live_workload.empty_nodes.append(
                SimulatedNode(node.name, cards, empty_loads.get(node.name, _NO_LOAD), devices)
            )
    return live_workload


def card_classifier(live_workload: LiveWorkload) -> Callable[[Card, str], Card]:
    """A function that sets the classes of a card that does not exist yet, by the name of its future node."""
    classifier = Classifier(live_workload.classes.values())

    def classify_card(card: Card, node: str) -> Card:
        labels = classes.card_labels(
            node=node, index=card.index, uuid=card.uuid, model=card.model, memory=card.mem, properties={}, own={}
        )
        class_names = classifier.classes_of(labels)
        return dataclasses.replace(card, classes=class_names, priority=classifier.priority_of(class_names))

    return classify_card


_NO_LOAD = Load(0, 0, 0)


def _allocatable_load(node: Json) -> Load:
    """The cpu, memory and pods that the node offers; nothing if it is cordoned."""
    if (node.get("spec") or {}).get("unschedulable"):
        return _NO_LOAD
    allocatable = (node.get("status") or {}).get("allocatable")
    return loads.load_of_node(allocatable) if allocatable else UNLIMITED_LOAD


def free_loads(nodes: Iterable[Json], pods: Iterable[Json]) -> dict[str, Load]:
    """The free cpu, memory and pods of each node, by name, with these pods on it."""
    load_by_node = {node["metadata"]["name"]: _allocatable_load(node) for node in nodes}
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName") or ""
        if node in load_by_node and not _is_finished(pod):
            load_by_node[node] = load_by_node[node].add(load_of(pod), -1)
    return load_by_node


def read_free_loads(client: KubeClient) -> tuple[dict[str, Load], str | None]:
    """Read the free cpu, memory and pods of all nodes; {} with the reason if nodes or pods may not be read."""
    try:
        return free_loads(client.list_objects(paths.nodes()), client.list_objects(paths.pods())), None
    except errors.Forbidden as error:
        return {}, describe_unlimited_loads(error)


def load_of(pod: Json) -> Load:
    """The cpu and memory that the pod requests."""
    return loads.load_of_pod(spec_of(pod.get("spec") or {}))


def _is_finished(pod: Json) -> bool:
    return (pod.get("status") or {}).get("phase") in names.FINISHED_PHASES


def _add_pod(live_workload: LiveWorkload, pod: Json) -> bool:
    """Add the pod to the workload if it uses cards or waits for them. Returns whether it was added."""
    metadata = pod["metadata"]
    try:
        pod_request = request.parse(pod)
    except InvalidRequest:  # `ClusterState.problems` has a warning about this pod
        pod_request = None
    if pod_request is None:
        return False
    shape = PodShape(pod_request, load_of(pod))
    live_workload.pods.append(SimulatedPod(f"{metadata['namespace']}/{metadata['name']}", shape))
    live_workload.pending_count += not (pod.get("spec") or {}).get("nodeName")
    return True


def describe_unlimited_loads(error: errors.Forbidden) -> str:
    """A note that the free cpu and memory of nodes are unknown, since reading nodes or pods is forbidden."""
    return f"assuming unlimited cpu and memory of nodes: {error.message}"
