"""The desired node capacities, and the desired ExtendedResource of each card and device of this node. Pure.

`inventory` writes these objects to the API server.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cardwise.core.api import classes, isolation, mps, names
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard, Health
from cardwise.kube.objects.extendedresources import ContainerShare, ExtendedResource, IsolationStatus
from deviceplugin.grants.access import Access
from deviceplugin.sources.pods import NodePod

CAPACITY_RESOURCES = (names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, names.WHOLE_GPU, names.FILTER_CALL_RESOURCE)
_UNLIMITED_PODS = 1_000_000  # a capacity without effect: more pods than a node can have

_MISSING_CARD = Health(
    healthy=False,
    reason="the GPU is no longer on the node, or --gpus leaves it out; it stays listed while pods hold a share",
)
_MISSING_DEVICE = Health(
    healthy=False,
    reason="the device is no longer on the node, or --devices leaves it out; it stays listed while a pod holds it",
)


def card_capacities(card_sizes: Collection[int], pods: Iterable[NodePod], core: int = FULL_CORE) -> dict[str, str]:
    """The node's capacities for cards, unhealthy ones included.

    card_sizes: MiB of each card.
    core: percent of each card's SMs that may be allocated.

    A capacity always covers the requests of the node's living pods. Otherwise a restarted kubelet, which admits its
    pods again, would fail the pods that no longer fit. So the capacity includes a removed card until the card's pods
    have ended.
    """
    totals = {
        names.GPU_MEM: sum(card_sizes),
        names.GPU_COUNT: len(card_sizes),
        names.GPU_CORE: core * len(card_sizes),
        names.WHOLE_GPU: len(card_sizes),
    }
    living_pods = [pod for pod in pods if not pod.finished]
    return {
        name: str(max(total, sum(pod.requests.get(name, 0) for pod in living_pods))) for name, total in totals.items()
    }


def class_capacities(
    classes_by_card: Iterable[tuple[MiB, Iterable[ResourceClass]]] | None,
    pods: Iterable[NodePod],
    current: Mapping[str, str],
) -> dict[str, str]:
    """The node's capacities for ResourceClasses: the maximum amounts that containers can request at once.

    classes_by_card: MiB and classes of each card and device; None while unknown; then `current` is kept.
    current: the node's present capacities.

    As in `card_capacities`, a capacity is never below the requests of living pods. A class without cards and requests
    is left out, and its capacity is removed.
    """
    offered: Counter[str] = Counter()
    requested: Counter[str] = Counter()
    for pod in pods:
        if not pod.finished:
            requested.update({name: amount for name, amount in pod.requests.items() if names.class_of(name)})
    if classes_by_card is None:
        offered.update({name: int(amount) for name, amount in current.items() if names.class_of(name)})
    else:
        for memory, card_classes in classes_by_card:
            # A device is allocated whole.
            offered.update(
                {
                    names.CLASS_PREFIX + resource_class.name: 1
                    if resource_class.other
                    else classes.max_shares(memory, resource_class)
                    for resource_class in card_classes
                }
            )
    requested = +requested
    return {name: str(max(offered[name], requested[name])) for name in sorted(offered.keys() | requested.keys())}


def marker_capacity(specs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The node's capacity for the marker resource of pods without a card; {} if the node has only GPUs.

    kube-scheduler ignores the marker when it places a pod. But when a node's capacity grows, kube-scheduler activates a
    parked pod only if that node has all requested resources. This check includes the marker.
    """
    return (
        {names.FILTER_CALL_RESOURCE: str(_UNLIMITED_PODS)}
        if any(spec["kind"] != classes.GPU_KIND for spec in specs)
        else {}
    )


def selector_labels(spec: Mapping[str, Any], resource: ExtendedResource | None) -> dict[str, str]:
    """The labels that the selectors of classes match.

    These are the labels from the `spec` of a card or device, and labels that people have set on the ExtendedResource.
    """
    return classes.card_labels(
        node=spec["node"],
        index=spec["index"],
        uuid=spec["uuid"],
        model=spec["model"],
        memory=MiB(spec.get("memoryMiB", 0)),
        properties=spec["properties"],
        own={} if resource is None else resource.metadata.labels,
        kind=spec["kind"],
    )


def accelerator_label(cards: Iterable[GpuCard]) -> str | None:
    """The value of the node's label `accelerator`: the model of the node's cards; None if there are several models."""
    models = {card.model for card in cards}
    return classes.accelerator_of_model(models.pop()) if len(models) == 1 else None


def card_spec(node: str, card: GpuCard) -> Json:
    """The spec of the ExtendedResource of a card."""
    properties = dict(card.properties)
    if card.pci_bus_id:
        properties["pciBusID"] = card.pci_bus_id
    return {
        "kind": classes.GPU_KIND,
        "node": node,
        "index": card.index,
        "uuid": card.uuid,
        "model": card.model,
        "memoryMiB": int(card.memory),
        "headroomMiB": min(card.memory, card.reserved + mps.server_memory(card.model)),
        "properties": properties,
    }


def device_spec(node: str, device: OtherDevice) -> Json:
    """The spec of the ExtendedResource of a device other than a GPU."""
    return {
        "kind": device.kind,
        "node": node,
        "index": device.index,
        "uuid": device.uuid,
        "model": device.model,
        "properties": dict(device.properties),
    }


def extended_resource(node: str, node_uid: str, spec: Json) -> Json:
    """The ExtendedResource of a card or device with this `spec`, without status.

    The owner is the Node, so Kubernetes deletes the object with the Node.
    """
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ExtendedResource",
        "metadata": {
            "name": names.extended_resource_name(spec["uuid"]),
            "labels": {names.NODE_LABEL: node},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}],
        },
        "spec": spec,
    }


def is_owned(resource: ExtendedResource, node: str, node_uid: str) -> bool:
    """Whether this Node owns the ExtendedResource. A Node that was deleted and registered again has another UID."""
    node_owner = "v1", "Node", node, node_uid
    owners = resource.metadata.owner_references
    return any((owner.api_version, owner.kind, owner.name, owner.uid) == node_owner for owner in owners)


def isolation_status(spec: Json, resource: ExtendedResource | None, access: str) -> IsolationStatus | None:
    """The tiers of isolation of a card; None for a device other than a GPU.

    resource: its ExtendedResource, which has the state of MPS; None if it does not exist yet.
    access: how containers get cards on this node, a value of `Access`.
    """
    if spec["kind"] != classes.GPU_KIND:
        return None
    mps_status = resource.status.mps if resource is not None else None
    tiers = isolation.compute_tiers(
        mps_status.state if mps_status is not None else "",
        mps_status.reason if mps_status is not None else "",
        driver=spec["properties"].get("driver", ""),
        has_cdi=access == Access.CDI,
    )
    return IsolationStatus(
        str(tiers.memory),
        wording.sanitize_message(tiers.memory_reason),
        str(tiers.compute),
        wording.sanitize_message(tiers.compute_reason),
    )


def build_status(
    health: Health, access: str, reported: Sequence[ContainerShare], tiers: IsolationStatus | None
) -> Json:
    """The fields of an ExtendedResource's status that the device plugin owns. Other components own the other fields."""
    return {
        **({} if tiers is None else {"isolation": msgspec.to_builtins(tiers)}),
        "health": "Healthy" if health.healthy else "Unhealthy",
        "reason": wording.sanitize_message(health.reason),
        "gpuAccess": access,
        "reported": [share.to_json() for share in reported],
    }


def build_statuses(
    health_by_uuid: Mapping[str, Health],
    missing_resources: Iterable[ExtendedResource],
    access: str,
    reported_shares: Callable[[str], Sequence[ContainerShare] | None],
    isolation_of: Callable[[str], IsolationStatus | None],
) -> dict[str, Json]:
    """Build the statuses of cards and devices, by UUID.

    health_by_uuid: the health of the present cards and devices.
    missing_resources: the kept ExtendedResources whose card or device is not on this node.
    reported_shares: returns the reported shares by UUID; if they are unknown (None), the status is left out.
    isolation_of: returns the tiers by UUID; None for devices other than GPUs.
    """
    all_health = {
        **health_by_uuid,
        **{
            resource.spec.uuid: _MISSING_CARD if resource.spec.kind == classes.GPU_KIND else _MISSING_DEVICE
            for resource in missing_resources
        },
    }
    shares = {uuid: reported_shares(uuid) for uuid in all_health}
    return {
        uuid: build_status(all_health[uuid], access, reported, isolation_of(uuid))
        for uuid, reported in shares.items()
        if reported is not None
    }


def observed_status(resource: ExtendedResource) -> Json:
    """The fields that the device plugin owns in an existing ExtendedResource's status, as `build_status` returns
    them.
    """
    observed = resource.status
    return build_status(
        Health(observed.health == "Healthy", observed.reason),
        observed.gpu_access,
        observed.reported or (),
        observed.isolation,
    )


def observed_spec(resource: ExtendedResource) -> Json:
    """The spec of an existing ExtendedResource, as `card_spec` or `device_spec` returns it."""
    spec = resource.spec
    return {
        "kind": spec.kind,
        "node": spec.node,
        "index": spec.index,
        "uuid": spec.uuid,
        "model": spec.model,
        **({"memoryMiB": spec.memory_mib, "headroomMiB": spec.headroom_mib} if spec.kind == classes.GPU_KIND else {}),
        "properties": dict(spec.properties),
    }
