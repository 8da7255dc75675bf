"""The object of this node: its capacities, the label `accelerator`, and whether NVIDIA's device plugin serves it too.

Others write this object as well: a kubelet that registers anew zeroes capacities it does not know, NVIDIA's plugin has
a capacity there, and people set labels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values import quantity
from cardwise.core.values.decoded import annotations_of, labels_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.watch.reflector import Reflector
from cardwise.kube.wire import Node
from deviceplugin.publish import cards as tell
from deviceplugin.publish.writes import Writes

_log = structlog.get_logger(__name__)

# Annotation: the value of the label `accelerator` that we wrote. It tells our label from one that somebody else has
# set, also after a restart; where the two differ, the label is theirs.
NOTED = f"{names.GROUP}/{names.ACCELERATOR}"

_decode = msgspec.json.Decoder(Node).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What counts of the Node object. `capacity`: amounts of our resources, those of classes too.

    `uid` is that of the object: a node that was deleted and registers again has another. `nvidia_gpus`: what NVIDIA's
    device plugin offers there. `label` and `noted` are None where there is none.
    """

    uid: str = ""
    capacity: Mapping[str, str] = field(default_factory=dict)
    share_allocatable: str = ""
    nvidia_gpus: int = 0
    label: str | None = None
    noted: str | None = None


def _project(content: bytes) -> tuple[str, NodeFacts]:
    node = _decode(content)
    metadata, capacity = node.metadata, node.status.capacity
    ours = {name: _plain(value) for name, value in capacity.items() if name in tell.CAPACITIES or names.class_of(name)}
    return metadata.name, NodeFacts(
        uid=metadata.uid,
        capacity=ours,
        share_allocatable=node.status.allocatable.get(names.SHARE, ""),
        nvidia_gpus=quantity.count(capacity.get(names.NVIDIA_GPU, 0), least=0),
        label=metadata.labels.get(names.ACCELERATOR),
        noted=metadata.annotations.get(NOTED),
    )


def _plain(amount: str) -> str:
    """The API server prints 40000 as 40k; we compare with what we have written."""
    value, _ = quantity.parse(amount)
    return str(value.numerator) if value.denominator == 1 else amount


def relabel(wanted: str, label: str | None, noted: str | None) -> dict[str, Any]:
    """The change of labels and annotations after which the node says `wanted` ("": nothing), {} where none is due.

    A label that is not what we noted was set by somebody else: it stays, and the note goes, since their next value
    may happen to be the one that we once wrote. Pure.
    """
    theirs = label is not None and label != noted
    after = label if theirs else wanted or None
    note = None if theirs else after
    change: dict[str, Any] = {}
    if after != label:
        change["labels"] = {names.ACCELERATOR: after}
    if note != noted:
        change["annotations"] = {NOTED: note}
    return change


class OwnNode:
    """The Node object of this machine, kept by a reflector. `split`: the node's cards are divided between NVIDIA's
    device plugin and us by hand, so that its being there is no trouble.
    """

    def __init__(
        self,
        client: KubeClient,
        name: str,
        *,
        events: EventRecorder,
        writes: Writes,
        on_change: Callable[[], None],
        split: bool,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._name = name
        self._events = events
        self._writes = writes
        self._wake = on_change
        self._split = split
        self._clock = clock
        self._refused_label: str | None = None
        self._reflector: Reflector[NodeFacts] = Reflector(
            client,
            paths.nodes(),
            _project,
            self,
            query=paths.with_field("metadata.name", name),
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
        """As last seen; None where there is no such node (yet)."""
        return self._reflector.store.get(self._name)

    def share_allocatable(self) -> str:
        """The node's allocatable share slots as the kubelet reports them, "" if unknown."""
        facts = self.facts
        return facts.share_allocatable if facts is not None else ""

    def nvidia_problem(self) -> str:
        """Why no card here may be shared while NVIDIA's device plugin may give it to others, "" when it does not."""
        return self._problem(self.facts)

    def tell_capacities(self, facts: NodeFacts, wanted: Mapping[str, str]) -> bool:
        """Whether the node has these capacities and none of other classes; if not, they are written."""
        if facts.capacity == wanted:
            return True
        # Null takes a class away that has no card here any more: an amount of 0 would fail pods that ask for none.
        change: dict[str, str | None] = {**dict.fromkeys(facts.capacity), **wanted}
        path = paths.nodes(self._name, "status")
        # What is new is written at once, the same again only after a while.
        if self._writes.may(f"{path} {msgspec.json.encode(change)!r}"):
            # Allocatable too: the kubelet would copy it from capacity, but only at its next round.
            self._client.patch(path, {"status": {"capacity": change, "allocatable": change}}, "strategic")
            _log.info("node capacities written", **change)
        return False

    def tell_accelerator(self, wanted: str) -> None:
        """Sees to it that the label says `wanted`, "" for none; one that somebody else has set stays."""
        facts = self.facts
        if facts is None or not relabel(wanted, facts.label, facts.noted) or wanted == self._refused_label:
            return
        path = paths.nodes(self._name)
        if not self._writes.may(f"{path} {names.ACCELERATOR}={wanted}"):
            return
        # Decided anew on what is there now, and written only if it still is: nobody's label is overwritten.
        node = self._client.get(path)
        change = relabel(wanted, labels_of(node).get(names.ACCELERATOR), annotations_of(node).get(NOTED))
        if not change:
            return
        try:
            self._client.patch(
                path, {"metadata": change | {"resourceVersion": node["metadata"]["resourceVersion"]}}, "merge"
            )
        except errors.Conflict:
            return
        except (errors.Forbidden, errors.Invalid, errors.BadRequest) as error:
            # Nothing depends on it, so it is not asked for again and again.
            self._refused_label = wanted
            _log.error("the node's label was refused", label=names.ACCELERATOR, value=wanted, error=str(error))
            return
        _log.info("node label written", **{names.ACCELERATOR: wanted or None})

    def touch(self) -> None:
        """Makes kube-scheduler try parked pods again."""
        change = {"metadata": {"annotations": {names.NODE_CHANGED: str(self._clock.wall_ns())}}}
        self._client.patch(paths.nodes(self._name), change, "merge")

    def withdraw_slots(self) -> None:
        """The node offers no slots while we are away. The kubelet would say so too, but only at its next round."""
        change = {"status": {"allocatable": {names.SHARE: "0"}}}
        try:
            self._client.patch(paths.nodes(self._name, "status"), change, "strategic", timeout=2.0)
        except errors.KubeError as error:
            _log.info("the node still shows our slots until the kubelet's next report", error=str(error))

    def on_change(self, key: str, old: NodeFacts | None, new: NodeFacts) -> None:  # noqa: ARG002
        before, now = self._problem(old), self._problem(new)
        if now and not before:
            _log.error("the cards are not shared", why=now)
            self._events.record(ObjectRef.node(self._name), "NvidiaServesNode", now, "Warning")
        elif before and not now:
            text = "NVIDIA's device plugin does not serve this node any more: Cardwise shares its cards again"
            _log.info("the cards are shared again")
            self._events.record(ObjectRef.node(self._name), "NvidiaLeftNode", text)
        self._wake()

    def on_delete(self, key: str, old: NodeFacts) -> None:  # noqa: ARG002
        self._wake()

    def on_synced(self) -> None:
        self._wake()

    def _problem(self, facts: NodeFacts | None) -> str:
        if facts is None or not facts.nvidia_gpus or self._split:
            return ""
        return (
            f"NVIDIA's device plugin serves this node ({names.NVIDIA_GPU}: {facts.nvidia_gpus}): stop it there, or "
            "give --cards the cards that Cardwise may share"
        )
