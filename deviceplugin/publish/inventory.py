"""Reconciles this node's capacities and ExtendedResources in the API server, and activates parked pods.

Compares the desired objects (`cards`) with the objects in the API server, and patches the difference. This continues
all the time, because a kubelet that registers again sets unknown capacities to 0, and people edit objects.
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
from cardwise.core.values.shellcommand import command
from cardwise.devices.protocol import Devices, OtherDevice
from cardwise.gpus.protocol import GpuCard, Gpus, Health
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ContainerShare, ExtendedResource, IsolationStatus
from cardwise.kube.watch.reflector import Reflector, WakeHandler
from cardwise.runtime.loops import Loop
from deviceplugin.grants.access import Access
from deviceplugin.publish import cards as objects
from deviceplugin.publish import metrics
from deviceplugin.publish.cordons import Cordons
from deviceplugin.publish.node import OwnNode
from deviceplugin.publish.stalemps import StaleMpsStatus
from deviceplugin.publish.writes import WriteLimiter
from deviceplugin.sources.classes import Classes
from deviceplugin.sources.pods import Pods

_log = structlog.get_logger(__name__)

_INTERVAL_SECONDS = 1.0
_RETRY_SECONDS = 0.1
# Seconds between a change and the activation of parked pods: the extender must observe the change before kube-scheduler
# calls it again.
_ACTIVATE_DELAY_SECONDS = 0.3


def _node_resources_projection(node: str) -> Callable[[bytes], tuple[str, ExtendedResource] | None]:
    """Return a function for the watch that reads the ExtendedResources of this node and drops all others.

    The watch selects objects by label, but an object of another node can have the same label.
    """

    def project(content: bytes) -> tuple[str, ExtendedResource] | None:
        resource = extendedresources.decode(content)
        return (resource.metadata.name, resource) if resource.spec.node == node else None

    return project


class NodePublisher:
    """Publishes the node in one thread that writes, and two threads that watch the cards and the other devices.

    access: returns how containers get cards; None until it is known.
    reported_shares: returns the shares of terminating pods, by UUID of the card or device.
    granted_mib: returns the MiB of granted shares, by UUID.
    is_split: see OwnNode.
    stale_mps: corrects the MPS status of cards whose manager has ended.
    core_percent: percent of each card's SMs that may be allocated.
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
        reported_shares: Callable[[], Mapping[str, list[ContainerShare]] | None],
        granted_mib: Callable[[], Mapping[str, int]],
        cordons: Cordons,
        events: EventRecorder,
        is_split: bool,
        stale_mps: StaleMpsStatus,
        core_percent: int = FULL_CORE,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._node = node
        self._gpus = gpus
        self._devices = devices
        self._pods = pods
        self._access = access
        self._health = health
        self._reported_shares = reported_shares
        self._granted_mib = granted_mib
        self._cordons = cordons
        self._stale_mps = stale_mps
        self._events = events
        self._core_percent = core_percent
        self._clock = clock
        self._loop = Loop(
            "inventory",
            self._reconcile,
            failed="failed to publish the GPUs",
            failures=metrics.THREAD_FAILURES,
            expected=(errors.KubeError,),
            every=_INTERVAL_SECONDS,
            clock=clock,
        )
        self._writes = WriteLimiter(self._reconcile_soon, clock)
        self._activate_at: float | None = None
        self._last_states: Any = None
        self._published = threading.Event()
        self.node = OwnNode(
            client, node, events=events, writes=self._writes, on_change=self._loop.wake, is_split=is_split, clock=clock
        )
        self._classes = Classes(client, self._loop.wake, clock)
        self._resources: Reflector[ExtendedResource] = Reflector(
            client,
            paths.extendedresources(),
            _node_resources_projection(node),
            WakeHandler(self._loop.wake),
            query=paths.label_query(names.NODE_LABEL, node),
            name="extendedresources",
            clock=clock,
        )
        self._watches = [self._create_watch_loop("cards", gpus), self._create_watch_loop("devices", devices)]

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

    def reconcile_now(self) -> None:
        """Reconcile at once: the cards, devices or grants have changed."""
        self._loop.wake()

    @property
    def is_published(self) -> bool:
        """Whether everything has been published once."""
        return self._published.is_set()

    def isolation_by_uuid(self) -> dict[str, IsolationStatus]:
        """What limits the shares on each card, as published."""
        return {
            resource.spec.uuid: resource.status.isolation
            for resource in self._resources.store.snapshot().values()
            if resource.status.isolation is not None
        }

    def _create_watch_loop(self, name: str, source: Gpus | Devices) -> Loop:
        def wait_for_change() -> None:
            if source.wait_change(_INTERVAL_SECONDS):
                self._loop.wake()

        return Loop(
            name,
            wait_for_change,
            failed="failed to watch the hardware of this node",
            failures=metrics.THREAD_FAILURES,
            every=0.0,
            clock=self._clock,
        )

    def _reconcile(self) -> None:
        if not (self.node.synced and self._resources.synced.is_set() and self._pods.synced):
            return
        self._cordons.save_cordons(self._resources.store.snapshot().values())
        cards, devices = self._gpus.cards(), self._devices.devices()
        specs = [objects.card_spec(self._node, card) for card in cards]
        specs += [objects.device_spec(self._node, device) for device in devices]
        resources_in_use, unused_resources = self._list_missing_resources({spec["uuid"] for spec in specs})
        specs += map(objects.observed_spec, resources_in_use)
        is_current = self._update_capacities(specs)
        access = self._access()
        if access is not None:
            statuses = objects.build_statuses(
                self._health(cards, devices),
                resources_in_use,
                str(access),
                self._reported_shares_lookup(),
                self._isolation_by_uuid(specs, access).get,
            )
            is_current &= self._update_resources(specs, statuses)
        for resource in unused_resources:
            self._delete_resource(resource)
        self._activate_if_due()
        if is_current and access is not None and self._reported_shares() is not None:
            self._published.set()
        self.node.update_accelerator_label(
            objects.accelerator_label(cards) or ""
        )  # last: no component of Cardwise depends on the label

    def _reported_shares_lookup(self) -> Callable[[str], Sequence[ContainerShare] | None]:
        """A function that returns the reported shares of the card or device with a UUID; None if they are unknown.

        Until this process knows the reported shares, the function returns the published ones, which an earlier process
        wrote.
        """
        reported = self._reported_shares()
        if reported is not None:
            return lambda uuid: reported.get(uuid, ())
        return {
            resource.spec.uuid: resource.status.reported for resource in self._resources.store.snapshot().values()
        }.get

    def _isolation_by_uuid(self, specs: list[Json], access: Access) -> dict[str, IsolationStatus | None]:
        resources = self._resources.store.snapshot()
        return {
            spec["uuid"]: objects.isolation_status(
                spec, resources.get(names.extended_resource_name(spec["uuid"])), str(access)
            )
            for spec in specs
        }

    def _list_missing_resources(self, present_uuids: set[str]) -> tuple[list[ExtendedResource], list[ExtendedResource]]:
        """Two lists of ExtendedResources whose card or device is no longer on this node: in use by pods, and unused."""
        missing = [
            resource
            for resource in self._resources.store.snapshot().values()
            if resource.spec.uuid not in present_uuids
        ]
        used_uuids = set(self._granted_mib())
        return [resource for resource in missing if resource.spec.uuid in used_uuids], [
            resource for resource in missing if resource.spec.uuid not in used_uuids
        ]

    def _update_capacities(self, specs: list[Json]) -> bool:
        facts = self.node.facts
        if facts is None:
            _log.warning("the Node object does not exist yet", node=self._node)
            return False
        sizes = [spec["memoryMiB"] for spec in specs if spec["kind"] == classes.GPU_KIND]
        pods = self._pods.list_pods()
        desired = objects.card_capacities(sizes, pods, self._core_percent) | objects.marker_capacity(specs)
        desired |= objects.class_capacities(self._classes_of_cards(specs), pods, facts.capacity)
        return self.node.update_capacities(facts, desired)

    def _classes_of_cards(self, specs: list[Json]) -> list[tuple[MiB, list[ResourceClass]]] | None:
        """For each card and device, its memory in MiB and its classes; None while the classes are unknown."""
        classifier = self._classes.classifier()
        if classifier is None:
            return None
        resources = self._resources.store.snapshot()
        # Use the card's own properties: those in its object may be wrong. Only the labels are taken from the object.
        specs_and_labels = [
            (spec, objects.selector_labels(spec, resources.get(names.extended_resource_name(spec["uuid"]))))
            for spec in specs
        ]
        return [(MiB(spec.get("memoryMiB", 0)), classifier.select_classes(labels)) for spec, labels in specs_and_labels]

    def _update_resources(self, specs: list[Json], statuses: Mapping[str, Json]) -> bool:
        facts = self.node.facts
        if facts is None:
            return False  # an object without an owner would stay forever if the node never comes back
        resources = self._resources.store.snapshot()
        is_current = True
        for spec in specs:
            try:
                is_current &= self._update_resource(
                    spec, facts.uid, resources.get(names.extended_resource_name(spec["uuid"]))
                )
            except errors.KubeError as error:
                # A refused object must not prevent the publication of other objects.
                if errors.would_fail_other_writes(error):
                    raise
                _log.error("the API server refused an ExtendedResource", uuid=spec["uuid"], error=str(error))
                is_current = False
        for uuid, status in statuses.items():
            is_current &= self._update_status(names.extended_resource_name(uuid), resources, status)
        # kube-scheduler cannot observe these changes, but they can make a parked pod fit.
        states = {uuid: (status["health"], status["reported"]) for uuid, status in statuses.items()}
        if states != self._last_states:
            if self._last_states is not None:
                self._activate_at = self._clock.now() + _ACTIVATE_DELAY_SECONDS
            self._last_states = states
        return is_current

    def _update_resource(self, spec: Json, node_uid: str, resource: ExtendedResource | None) -> bool:
        if (
            resource is not None
            and objects.observed_spec(resource) == spec
            and objects.is_owned(resource, self._node, node_uid)
        ):
            return True
        desired = objects.extended_resource(self._node, node_uid, spec)
        path = paths.extendedresources(desired["metadata"]["name"])
        if not self._writes.may_write(path):
            return False
        if resource is None:
            try:
                self._client.create(
                    paths.extendedresources(), desired | {"spec": spec | self._cordons.spec_fields(spec["uuid"])}
                )
            except errors.AlreadyExists:
                # The object lacks our label: the card came from another node, or the label was removed.
                other_node = self._find_other_owner(path)
                if other_node is not None and self._is_node_ready(other_node):
                    # Without the policy, two live nodes with the same UUID would overwrite each other's object.
                    self._report_card_of_other_node(desired["metadata"]["name"], other_node)
                    return False
                try:
                    self._client.patch(path, {"metadata": desired["metadata"], "spec": spec}, "merge")
                except errors.Forbidden:
                    if other_node is not None:
                        self._report_card_of_other_node(desired["metadata"]["name"], other_node)
                    raise
        else:
            # A merge patch keeps map keys that it does not name.
            properties = dict.fromkeys(resource.spec.properties) | spec["properties"]
            self._client.patch(
                path, {"metadata": desired["metadata"], "spec": spec | {"properties": properties}}, "merge"
            )
        return False

    def _find_other_owner(self, path: str) -> str | None:
        """The other node that owns the ExtendedResource at this path; None if this node or no node owns it."""
        try:
            node = self._client.get(path).get("spec", {}).get("node")
        except errors.NotFound:
            return None
        return str(node) if node and node != self._node else None

    def _is_node_ready(self, node: str) -> bool:
        try:
            conditions = self._client.get(paths.nodes(node)).get("status", {}).get("conditions") or ()
        except errors.NotFound:
            return False
        return any((condition.get("type"), condition.get("status")) == ("Ready", "True") for condition in conditions)

    def _report_card_of_other_node(self, name: str, node: str) -> None:
        """Report that another node owns the object of a card, so that this node may not write it.

        Either the other node has a card with the same UUID, or it is this machine under its former node name.
        """
        remedy = command("if the GPU is not there, kubectl delete extendedresource {name}", name=name)
        text = f"ExtendedResource {name} belongs to a GPU of node {node}, so this node cannot publish its own; {remedy}"
        self._events.record(ObjectRef.node(self._node), names.GPU_ON_ANOTHER_NODE, text, "Warning")

    def _update_status(self, name: str, resources: Mapping[str, ExtendedResource], status: Json) -> bool:
        resource = resources.get(name)
        correction = self._stale_mps.correct_status(resource) if resource is not None else {}
        if resource is not None and objects.observed_status(resource) == status and not correction:
            return True
        status = status | correction
        path = paths.extendedresources(name, "status")
        # A new status is written at once; the same status is written again only after a pause.
        if self._writes.may_write(f"{path} {msgspec.json.encode(status)!r}"):
            try:
                self._client.patch(path, {"status": status}, "merge")
            except errors.NotFound:
                self._reconcile_soon()
                return False
            except errors.KubeError as error:
                if errors.would_fail_other_writes(error):
                    raise
                _log.error(
                    "the API server refused a status; check that the installed CRD is of this release",
                    resource=name,
                    error=str(error),
                )
                return False
            facts = {"health": status["health"], "reason": status["reason"], "reported": len(status["reported"])}
            _log.info("wrote the status of an ExtendedResource", resource=name, **facts)
        return False

    def _delete_resource(self, resource: ExtendedResource) -> None:
        """Delete the ExtendedResource of a card or device that was removed from the node."""
        uid = resource.metadata.uid
        path = paths.extendedresources(resource.metadata.name)
        if not self._writes.may_write(f"DELETE {path} {uid}"):
            return
        try:
            self._client.delete(path, {"preconditions": {"uid": uid}} if uid else None)
        except (errors.NotFound, errors.Conflict):
            return
        except errors.KubeError as error:
            if errors.would_fail_other_writes(error):
                raise
            _log.error(
                "the API server refused to delete an ExtendedResource",
                resource=resource.metadata.name,
                error=str(error),
            )
            return
        _log.info("deleted the ExtendedResource of a GPU that left the node", resource=resource.metadata.name)

    def _activate_if_due(self) -> None:
        if self._activate_at is None:
            return
        if self._clock.now() < self._activate_at:
            self._reconcile_soon()
            return
        self.node.activate_parked_pods()
        self._activate_at = None  # reset only after the write, so that a failed write is repeated

    def _reconcile_soon(self) -> None:
        self._loop.run_within(_RETRY_SECONDS)
