"""Writes this node's inventory to the API server: the node's capacities, ExtendedResources, and the wake-up.

Compares what should be (`cards`) with what the API server has, and patches the difference, for as long as it runs: a
kubelet that registers anew zeroes capacities it does not know, and people edit objects.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import classes, names
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from cardwise.devices.protocol import Devices, OtherDevice
from cardwise.gpus.protocol import GpuCard, Gpus, Health
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.watch.reflector import Reflector, Woken
from cardwise.kube.wire import ExtendedResource, HeldShare
from cardwise.runtime.loops import Loop
from deviceplugin.grants.access import Access
from deviceplugin.publish import cards as tell
from deviceplugin.publish import metrics
from deviceplugin.publish.cordons import Cordons
from deviceplugin.publish.node import OwnNode
from deviceplugin.publish.stalemps import StaleMpsStatus
from deviceplugin.publish.writes import Writes
from deviceplugin.sources.classes import Classes
from deviceplugin.sources.pods import Pods

_log = structlog.get_logger(__name__)

_EVERY_SECONDS = 1.0
_SOON_SECONDS = 0.1
_WAKE_DELAY = 0.3  # the extender must have read the news before the scheduler asks it again

_decode_resource = msgspec.json.Decoder(ExtendedResource).decode


def _project_resource(content: bytes) -> tuple[str, ExtendedResource] | None:
    found = _decode_resource(content)
    return found.metadata.name, found


class NodePublisher:
    """One thread that writes, and two that watch the cards and the other devices.

    `access` is None until it is known; `split` as OwnNode. `mps` puts right what is said of this node's MPS; `core`:
    percent of a card's SMs that are given in sum.
    """

    def __init__(
        self,
        client: KubeClient,
        node: str,
        *,
        gpus: Gpus,
        devices: Devices,
        pods: Pods,
        access: Callable[[], Access | None],
        health: Callable[[list[GpuCard], list[OtherDevice]], Mapping[str, Health]],
        held: Callable[[], Mapping[str, list[HeldShare]] | None],
        granted: Callable[[], Mapping[str, int]],
        cordons: Cordons,
        events: EventRecorder,
        split: bool,
        mps: StaleMpsStatus,
        core: int = FULL_CORE,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._node = node
        self._gpus = gpus
        self._devices = devices
        self._pods = pods
        self._access = access
        self._health = health
        self._held = held
        self._granted = granted
        self._cordons = cordons
        self._mps = mps
        self._events = events
        self._core = core
        self._clock = clock
        self._loop = Loop(
            "inventory",
            self._reconcile,
            failed="the cluster was not told of the cards",
            failures=metrics.FAILURES,
            expected=(errors.KubeError,),
            every=_EVERY_SECONDS,
            clock=clock,
        )
        self._writes = Writes(self._look_soon, clock)
        self._touch_at: float | None = None
        self._last_news: Any = None
        self._settled = threading.Event()
        self.node = OwnNode(
            client, node, events=events, writes=self._writes, on_change=self._loop.wake, split=split, clock=clock
        )
        self._classes = Classes(client, self._loop.wake, clock)
        self._resources: Reflector[ExtendedResource] = Reflector(
            client,
            paths.extendedresources(),
            _project_resource,
            Woken(self._loop.wake),
            query=paths.with_label(names.NODE_LABEL, node),
            name="extendedresources",
            clock=clock,
        )
        self._watches = [self._watch("cards", gpus), self._watch("devices", devices)]

    def start(self) -> None:
        self.node.start()
        self._classes.start()
        self._resources.start()
        for loop in (self._loop, *self._watches):
            loop.start()

    def stop(self) -> None:
        for loop in (self._loop, *self._watches):
            loop.stop()
        self.node.stop()
        self._classes.stop()
        self._resources.stop()

    def wake(self) -> None:
        """Look now: something of ours has changed."""
        self._loop.wake()

    @property
    def settled(self) -> bool:
        """Whether the API server has had all of it once."""
        return self._settled.is_set()

    def _watch(self, what: str, source: Gpus | Devices) -> Loop:
        def turn() -> None:
            if source.wait_change(_EVERY_SECONDS):
                self._loop.wake()

        return Loop(
            what,
            turn,
            failed="what this node has is not watched",
            failures=metrics.FAILURES,
            every=0.0,
            clock=self._clock,
        )

    def _reconcile(self) -> None:
        if not (self.node.synced and self._resources.synced.is_set() and self._pods.synced):
            return
        self._cordons.note(self._resources.store.snapshot().values())
        cards, devices = self._gpus.cards(), self._devices.devices()
        specs = [tell.spec_of_card(self._node, card) for card in cards]
        specs += [tell.spec_of_device(self._node, device) for device in devices]
        kept, left = self._departed({spec["uuid"] for spec in specs})
        specs += map(tell.spec_of, kept)
        done = self._tell_capacities(specs)
        access = self._access()
        if access is not None:
            health = self._health(cards, devices)
            done &= self._tell_resources(specs, tell.statuses(health, kept, str(access), self._held_of()))
        for resource in left:
            self._forget(resource)
        self._touch_if_due()
        if done and access is not None and self._held() is not None:
            self._settled.set()
        self.node.tell_accelerator(tell.accelerator(cards))  # last, because nothing of ours depends on it

    def _held_of(self) -> Callable[[str], Sequence[HeldShare] | None]:
        """What is held of a card or device, None where that is not known. Before we have looked ourselves, it is what a
        former process has found.
        """
        held = self._held()
        if held is not None:
            return lambda uuid: held.get(uuid, ())
        return {one.spec.uuid: one.status.held for one in self._resources.store.snapshot().values()}.get

    def _departed(self, here: set[str]) -> tuple[list[ExtendedResource], list[ExtendedResource]]:
        """What the cluster knows and the machine has no more: what something still holds, and the rest."""
        gone = [found for found in self._resources.store.snapshot().values() if found.spec.uuid not in here]
        used = set(self._granted())
        return [one for one in gone if one.spec.uuid in used], [one for one in gone if one.spec.uuid not in used]

    def _tell_capacities(self, specs: list[Json]) -> bool:
        facts = self.node.facts
        if facts is None:
            _log.warning("no such node yet", node=self._node)
            return False
        sizes = [spec["memoryMiB"] for spec in specs if spec["kind"] == classes.KIND]
        pods = self._pods.all()
        wanted = tell.capacities(sizes, pods, self._core) | tell.marker_capacity(specs)
        wanted |= tell.class_capacities(self._members(specs), pods, facts.capacity)
        return self.node.tell_capacities(facts, wanted)

    def _members(self, specs: list[Json]) -> list[tuple[MiB, list[ResourceClass]]] | None:
        """MiB and classes of each card and device; None while nobody knows which classes there are."""
        classifier = self._classes.classifier()
        if classifier is None:
            return None
        known = self._resources.store.snapshot()
        # The card's own word counts, not what its object said before we put it right; only labels are other people's.
        seen = [(spec, tell.labels(spec, known.get(names.extended_resource_name(spec["uuid"])))) for spec in specs]
        return [(MiB(spec.get("memoryMiB", 0)), classifier.selecting(labels)) for spec, labels in seen]

    def _tell_resources(self, specs: list[Json], statuses: Mapping[str, Json]) -> bool:
        facts = self.node.facts
        if facts is None:
            return False  # what has no owner would stay for ever, if the node never comes back
        known = self._resources.store.snapshot()
        done = True
        for spec in specs:
            try:
                done &= self._tell_resource(spec, facts.uid, known.get(names.extended_resource_name(spec["uuid"])))
            except (errors.Invalid, errors.BadRequest, errors.Forbidden) as error:
                # One that the API server does not take must not silence the others.
                _log.error("an ExtendedResource was refused", uuid=spec["uuid"], error=str(error))
                done = False
        for uuid, status in statuses.items():
            done &= self._tell_status(names.extended_resource_name(uuid), known, status)
        # What the scheduler cannot see happening, and what can make a parked pod fit.
        news = {uuid: (status["health"], status["held"]) for uuid, status in statuses.items()}
        if news != self._last_news:
            if self._last_news is not None:
                self._touch_at = self._clock.now() + _WAKE_DELAY
            self._last_news = news
        return done

    def _tell_resource(self, spec: Json, node_uid: str, found: ExtendedResource | None) -> bool:
        if found is not None and tell.spec_of(found) == spec and tell.is_owned(found, self._node, node_uid):
            return True
        wanted = tell.resource(self._node, node_uid, spec)
        path = paths.extendedresources(wanted["metadata"]["name"])
        if not self._writes.may(path):
            return False
        if found is None:
            try:
                self._client.create(
                    paths.extendedresources(), wanted | {"spec": spec | self._cordons.mark(spec["uuid"])}
                )
            except errors.AlreadyExists:
                # Without our label: the card came from another node, or somebody took the label away.
                other = self._other_node(path)
                if other and self._is_ready(other):
                    # Where no policy forbids it, two live nodes with the same UUID would take it from each other.
                    self._tell_of_the_other_node(wanted["metadata"]["name"], other)
                    return False
                try:
                    self._client.patch(path, {"metadata": wanted["metadata"], "spec": spec}, "merge")
                except errors.Forbidden:
                    if other:
                        self._tell_of_the_other_node(wanted["metadata"]["name"], other)
                    raise
        else:
            # A merge patch keeps map keys that it does not name.
            old = dict.fromkeys(found.spec.properties) | spec["properties"]
            self._client.patch(path, {"metadata": wanted["metadata"], "spec": spec | {"properties": old}}, "merge")
        return False

    def _other_node(self, path: str) -> str:
        """The node of which an ExtendedResource says that it has the card, "" if that is this node or nobody says."""
        try:
            node = str(self._client.get(path).get("spec", {}).get("node") or "")
        except errors.NotFound:
            return ""
        return "" if node == self._node else node

    def _is_ready(self, node: str) -> bool:
        try:
            conditions = self._client.get(paths.nodes(node)).get("status", {}).get("conditions") or ()
        except errors.NotFound:
            return False
        return any((each.get("type"), each.get("status")) == ("Ready", "True") for each in conditions)

    def _tell_of_the_other_node(self, name: str, node: str) -> None:
        """A card's name is its UUID. Another node can have it first: one that reports the same UUID, this machine's
        former name, or one that was taken over. This node may not write it then.
        """
        remedy = f"if the card is not there, kubectl delete extendedresource {name}"
        text = f"ExtendedResource {name} is about a card of node {node}, so this node cannot offer its own; {remedy}"
        self._events.record(ObjectRef.node(self._node), names.CARD_OF_ANOTHER_NODE, text, "Warning")

    def _tell_status(self, name: str, known: Mapping[str, ExtendedResource], status: Json) -> bool:
        found = known.get(name)
        correction = self._mps.correction(found) if found is not None else {}
        if found is not None and tell.status_of(found) == status and not correction:
            return True
        status = status | correction
        path = paths.extendedresources(name, "status")
        # A status that says something new is written at once, the same one again only after a while.
        if self._writes.may(f"{path} {msgspec.json.encode(status)!r}"):
            try:
                self._client.patch(path, {"status": status}, "merge")
            except errors.NotFound:
                self._look_soon()
                return False
            except (errors.Invalid, errors.BadRequest, errors.Forbidden) as error:
                _log.error("a status was refused; is the CRD of this release?", resource=name, error=str(error))
                return False
            told = {"health": status["health"], "reason": status["reason"], "held": len(status["held"])}
            _log.info("status written", resource=name, **told)
        return False

    def _forget(self, resource: ExtendedResource) -> None:
        """A card or device that left the machine for good."""
        uid = resource.metadata.uid
        try:
            self._client.delete(
                paths.extendedresources(resource.metadata.name), {"preconditions": {"uid": uid}} if uid else None
            )
        except (errors.NotFound, errors.Conflict):
            return
        _log.info("left the node", resource=resource.metadata.name)

    def _touch_if_due(self) -> None:
        if self._touch_at is None:
            return
        if self._clock.now() < self._touch_at:
            self._look_soon()
            return
        self.node.touch()
        self._touch_at = None  # only now: one that failed is tried again

    def _look_soon(self) -> None:
        self._loop.soon(_SOON_SECONDS)
