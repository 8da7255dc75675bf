"""The resources that nodes offer, by name, and the labels of nodes with cards, from a reflector."""

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cardwise.core.api import lookalikes, names
from cardwise.core.values.decoded import Json
from cardwise.kube.objects import nodes
from cardwise.kube.pods import eligible, nodeconstraints
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints

# Maximum number of nodes that are compared: of more nodes, one probably has the requested resource.
_MAX_NODES: Final = 64
# Maximum number of resources of one node. A node writes its resources itself, and misspelled names are compared with
# each of them. Real nodes have a dozen resources.
_MAX_RESOURCES: Final = 32
_MAX_LABELS: Final = 256
_MAX_CONDITIONS: Final = 16
_ANY_TAINT: Final = [{"operator": "Exists"}]  # taints are ignored: they come and go, such as those of autoscalers


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """The GPU resources of one node; also its labels if Cardwise manages its cards."""

    resources: frozenset[str] = frozenset()
    labels: Mapping[str, str] | None = None


def project(raw: bytes) -> tuple[str, NodeOffer]:
    """The name and offer of a Node. Resources with the amount 0 are left out, because their device plugins have
    withdrawn them.
    """
    node = nodes.decode(raw)
    gpu_resources = {
        name for name, amount in node.status.capacity.items() if lookalikes.is_like_gpu(name) and amount != "0"
    }
    resources = frozenset(sorted(gpu_resources)[:_MAX_RESOURCES])
    return node.metadata.name, NodeOffer(resources, node.metadata.labels if names.SHARE in gpu_resources else None)


class NodeOffers:
    """Handler of the reflector of nodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._labels: dict[str, Mapping[str, str]] = {}

    def resources(self) -> frozenset[str]:
        """The names of the resources that any node offers."""
        with self._lock:
            return frozenset(self._counts)

    def unmatched_entries(self, selector: Mapping[str, str]) -> tuple[str, ...]:
        """The entries of a node selector, as `key=value`, that match no node with cards: a single entry, or all
        together.

        Empty if a node matches, if no node has cards, or if there are too many nodes to compare while a review waits.
        """
        if len(selector) > _MAX_CONDITIONS:
            return ()
        with self._lock:
            nodes = list(self._labels.values())
        if not nodes or any(_matches(labels, selector.items()) for labels in nodes):
            return ()
        unmatched = [entry for entry in selector.items() if not any(_matches(labels, [entry]) for labels in nodes)]
        return tuple(f"{key}={label_value}" for key, label_value in (unmatched[:1] or selector.items()))

    def label_values(self) -> Mapping[str, Collection[str]]:
        """The values of each label of nodes with cards. Only a limited number of nodes and labels is read."""
        with self._lock:
            nodes = list(islice(self._labels.values(), _MAX_NODES))
        label_values: dict[str, set[str]] = {}
        for labels in nodes:
            for key, label_value in islice(labels.items(), _MAX_LABELS):
                label_values.setdefault(key, set()).add(label_value)
        return label_values

    def admitting_nodes(self, pod: Json) -> frozenset[str] | None:
        """The few nodes with cards that match the pod's node selector and required node affinity.

        None in three cases: many or all nodes match; no node has cards; the comparison would take too long for a
        review.
        """
        spec = pod.get("spec") or {}
        affinity = {"nodeAffinity": (spec.get("affinity") or {}).get("nodeAffinity")}
        constrained_spec = {"nodeSelector": spec.get("nodeSelector"), "affinity": affinity, "tolerations": _ANY_TAINT}
        if not 0 < eligible.count_conditions(constrained_spec) <= _MAX_CONDITIONS:
            return None
        with self._lock:
            nodes = dict(self._labels)
        constraints = nodeconstraints.constraints_of(constrained_spec)
        admitting_names = (
            name for name, labels in nodes.items() if constraints.admits(name, NodeLabelsAndTaints(labels))
        )
        first_names = frozenset(islice(admitting_names, _MAX_NODES + 1))
        return first_names if len(first_names) <= _MAX_NODES and len(first_names) < len(nodes) else None

    def on_change(self, key: str, old: NodeOffer | None, new: NodeOffer) -> None:
        with self._lock:
            self._counts.update(new.resources)
            for name in old.resources if old is not None else ():
                self._counts[name] -= 1
                if not self._counts[name]:
                    del self._counts[name]
            if new.labels is None:
                self._labels.pop(key, None)
            else:
                self._labels[key] = new.labels

    def on_delete(self, key: str, old: NodeOffer) -> None:
        self.on_change(key, old, NodeOffer())

    def on_synced(self) -> None:
        pass


def _matches(labels: Mapping[str, str], entries: Iterable[tuple[str, str]]) -> bool:
    return all(labels.get(key) == label_value for key, label_value in entries)
