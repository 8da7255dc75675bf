"""The Node object of this node: its capacities, the label `accelerator`, and whether NVIDIA's device plugin serves the
node.

Other writers change this object too. A kubelet that registers again sets unknown capacities to 0. NVIDIA's device
plugin sets its own capacity, and people set labels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import gpunodes, names
from cardwise.core.values import quantity
from cardwise.core.values.decoded import annotations_of, labels_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.objects import nodes
from cardwise.kube.watch.reflector import Reflector
from deviceplugin.publish import cards as objects
from deviceplugin.publish.writes import WriteLimiter

_log = structlog.get_logger(__name__)

# An annotation with the last value of the label `accelerator` that we wrote. If the label differs from it, another
# program has set the label. The annotation survives a restart of this process.
LAST_LABEL_ANNOTATION = f"{names.GROUP}/{names.ACCELERATOR}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The parts of the Node object that the device plugin uses.

    uid: the UID; it changes if the node is deleted and registered again.
    capacity: amounts of Cardwise's resources, classes included.
    share_allocatable: number of allocatable share slots; None if unknown.
    nvidia_gpus: number of GPUs that NVIDIA's device plugin offers.
    label: the label `accelerator`; None if the node lacks it.
    last_written_label: the value of the label that we last wrote; None before our first write.
    """

    uid: str = ""
    capacity: Mapping[str, str] = field(default_factory=dict)
    share_allocatable: str | None = None
    nvidia_gpus: int = 0
    label: str | None = None
    last_written_label: str | None = None


def _project(content: bytes) -> tuple[str, NodeFacts]:
    node = nodes.decode(content)
    metadata, capacity = node.metadata, node.status.capacity
    own_capacity = {
        name: _expand_suffix(amount)
        for name, amount in capacity.items()
        if name in objects.CAPACITY_RESOURCES or names.class_of(name)
    }
    return metadata.name, NodeFacts(
        uid=metadata.uid,
        capacity=own_capacity,
        share_allocatable=(node.status.allocatable or {}).get(names.SHARE),
        nvidia_gpus=gpunodes.count_nvidia_gpus(capacity),
        label=metadata.labels.get(names.ACCELERATOR),
        last_written_label=metadata.annotations.get(LAST_LABEL_ANNOTATION),
    )


def _expand_suffix(amount: str) -> str:
    """The amount without a suffix, as we write it: the API server returns 40000 as 40k."""
    number, _ = quantity.parse_amount(amount)
    return str(number.numerator) if number.denominator == 1 else amount


def label_change(desired: str, label: str | None, last_written_label: str | None) -> dict[str, Any]:
    """The metadata change that sets the label to `desired` ("": removes it); {} if no change is due. Pure.

    A label that differs from `last_written_label` was set by another program or a person. Such a label stays as it is,
    and the annotation with the last value that Cardwise wrote is removed. Otherwise, if the label got that value again
    from outside, Cardwise would take the label for its own.
    """
    is_foreign = label is not None and label != last_written_label
    new_label = label if is_foreign else desired or None
    new_last_written_label = None if is_foreign else new_label
    change: dict[str, Any] = {}
    if new_label != label:
        change["labels"] = {names.ACCELERATOR: new_label}
    if new_last_written_label != last_written_label:
        change["annotations"] = {LAST_LABEL_ANNOTATION: new_last_written_label}
    return change


class OwnNode:
    """The Node object of this node, kept up to date by a reflector.

    is_split: whether --gpus divides the node's cards between Cardwise and NVIDIA's device plugin, which may then
    serve the node too.
    """

    def __init__(
        self,
        client: KubeClient,
        name: str,
        *,
        events: EventRecorder,
        writes: WriteLimiter,
        on_change: Callable[[], None],
        is_split: bool,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._name = name
        self._events = events
        self._writes = writes
        self._on_change = on_change
        self._is_split = is_split
        self._clock = clock
        self._refused_label: str | None = None
        self._reflector: Reflector[NodeFacts] = Reflector(
            client,
            paths.nodes(),
            _project,
            self,
            query=paths.field_query("metadata.name", name),
            name="node",
            clock=clock,
        )

    def start(self) -> None:
        self._reflector.start()

    def stop(self) -> None:
        self._reflector.stop()

    @property
    def synced(self) -> bool:
        return self._reflector.synced.is_set()

    @property
    def facts(self) -> NodeFacts | None:
        """The last observed state; None if the Node object does not exist."""
        return self._reflector.store.get(self._name)

    def share_allocatable(self) -> str | None:
        """The node's allocatable share slots as the kubelet reports them; None if unknown."""
        facts = self.facts
        return facts.share_allocatable if facts is not None else None

    def nvidia_problem(self) -> str | None:
        """Why the node's cards may not be shared: NVIDIA's device plugin serves the node. None if it does not."""
        return self._nvidia_problem(self.facts)

    def update_capacities(self, facts: NodeFacts, desired: Mapping[str, str]) -> bool:
        """Write the capacities unless the node has exactly these. Returns whether no write was needed."""
        if facts.capacity == desired:
            return True
        # Null removes a class without cards: with a capacity of 0, the kubelet would fail pods that request 0 of it.
        change: dict[str, str | None] = {**dict.fromkeys(facts.capacity), **desired}
        path = paths.nodes(self._name, "status")
        # A new change is written at once; the same change is written again only after a pause.
        if self._writes.may_write(f"{path} {msgspec.json.encode(change)!r}"):
            # Allocatable too: the kubelet would copy it from capacity, but only at its next report.
            self._client.patch(path, {"status": {"capacity": change, "allocatable": change}}, "strategic")
            _log.info("wrote the node's capacities", **change)
        return False

    def update_accelerator_label(self, desired: str) -> None:
        """Set the label `accelerator` to `desired`; "" removes the label. A label that another program or a person has
        set stays.
        """
        facts = self.facts
        if (
            facts is None
            or not label_change(desired, facts.label, facts.last_written_label)
            or desired == self._refused_label
        ):
            return
        path = paths.nodes(self._name)
        if not self._writes.may_write(f"{path} {names.ACCELERATOR}={desired}"):
            return
        # Decide again by the current object, and write only if it is unchanged, so that no foreign label is
        # overwritten.
        node = self._client.get(path)
        change = label_change(
            desired, labels_of(node).get(names.ACCELERATOR), annotations_of(node).get(LAST_LABEL_ANNOTATION)
        )
        if not change:
            return
        try:
            self._client.patch(
                path, {"metadata": change | {"resourceVersion": node["metadata"]["resourceVersion"]}}, "merge"
            )
        except errors.Conflict:
            return
        except (errors.Forbidden, errors.Invalid, errors.BadRequest) as error:
            # Nothing depends on the label, so the write is not tried again.
            self._refused_label = desired
            _log.error(
                "the API server refused the node's label", label=names.ACCELERATOR, value=desired, error=str(error)
            )
            return
        _log.info("wrote the node's label", **{names.ACCELERATOR: desired or None})

    def activate_parked_pods(self) -> None:
        """Change an annotation of the Node object; then kube-scheduler retries parked pods."""
        change = {"metadata": {"annotations": {names.REQUEUE: str(self._clock.wall_ns())}}}
        self._client.patch(paths.nodes(self._name), change, "merge")

    def withdraw_slots(self) -> None:
        """Set the node's allocatable slots to 0, without waiting for the kubelet's next report."""
        change = {"status": {"allocatable": {names.SHARE: "0"}}}
        try:
            self._client.patch(paths.nodes(self._name, "status"), change, "strategic", timeout=2.0)
        except errors.KubeError as error:
            _log.info(
                "failed to withdraw the slots; the node shows them until the kubelet's next report", error=str(error)
            )

    def on_change(self, key: str, old: NodeFacts | None, new: NodeFacts) -> None:  # noqa: ARG002
        old_problem, new_problem = self._nvidia_problem(old), self._nvidia_problem(new)
        if new_problem and not old_problem:
            _log.error("stopped sharing the GPUs", reason=new_problem)
            self._events.record(ObjectRef.node(self._name), "NvidiaDevicePluginActive", new_problem, "Warning")
        elif old_problem and not new_problem:
            text = "NVIDIA's device plugin no longer serves this node: Cardwise shares its GPUs again"
            _log.info("sharing the GPUs again")
            self._events.record(ObjectRef.node(self._name), "NvidiaDevicePluginRemoved", text)
        self._on_change()

    def on_delete(self, key: str, old: NodeFacts) -> None:  # noqa: ARG002
        self._on_change()

    def on_synced(self) -> None:
        self._on_change()

    def _nvidia_problem(self, facts: NodeFacts | None) -> str | None:
        return None if facts is None or self._is_split else gpunodes.nvidia_plugin_problem(facts.nvidia_gpus)
