"""Records of a Node with its allocatable resources, and of a pod on a node with the resources that the pod uses."""

from collections.abc import Mapping
from sys import intern
from typing import NamedTuple

from msgspec import Struct

from cardwise.core.api import names
from cardwise.core.api.request import Load
from cardwise.kube.objects import nodes
from cardwise.kube.pods import loads
from cardwise.kube.pods.nodeconstraints import HARD_TAINT_EFFECTS, NodeLabelsAndTaints, Taint
from extender.records.podref import PodRef


class PlacedPod(Struct, frozen=True, gc=False):
    """A pod on a node: the cpu and memory that it uses, and the fields that preemption needs.

    uid: the pod's UID; "" for a pod that is only planned on the node.
    terminating: whether the pod is being deleted.
    fixed: whether the pod cannot be evicted.
    grouped: whether the pod names a PodGroup of Kubernetes.
    group: "namespace/name" of that PodGroup, if the pod is in no gang of Cardwise. Such a pod may have no node yet.
    """

    node: str = ""
    load: Load = Load(0, 0, 0)
    uid: str = ""
    namespace: str = ""
    name: str = ""
    priority: int = 0
    labels: Mapping[str, str] = {}
    terminating: bool = False
    fixed: bool = False
    grouped: bool = False
    group: str | None = None

    @property
    def ref(self) -> PodRef:
        return PodRef(self.uid, self.namespace, self.name)

    @property
    def holds_cards(self) -> bool:
        """Whether the pod holds cards or devices, according to its annotations."""
        return False


class NodeRecord(NamedTuple):
    """A Node: its allocatable resources, whether it accepts further pods, and its labels and taints.

    offers_shares: False if the Node reports no slots for shares, for example after the shutdown of its device plugin.
    """

    allocatable: Load | None = None
    schedulable: bool = True
    offers_shares: bool = True
    node_labels: NodeLabelsAndTaints = NodeLabelsAndTaints()


def decode_node(raw: bytes) -> tuple[str, NodeRecord] | None:
    """Decode a Node; returns its name and its record."""
    node = nodes.decode(raw)
    allocatable = node.status.allocatable
    labels = {intern(key): intern(label_value) for key, label_value in node.metadata.labels.items()}
    taints = tuple(
        Taint(taint.key, taint.label_value, taint.effect)
        for taint in node.spec.taints or ()
        if taint.effect in HARD_TAINT_EFFECTS
    )
    load = loads.load_of_node(allocatable) if allocatable is not None else None
    offers = allocatable is None or allocatable.get(names.SHARE) != "0"
    record = NodeRecord(load, not node.spec.unschedulable, offers, NodeLabelsAndTaints(labels, taints))
    return intern(node.metadata.name), record
