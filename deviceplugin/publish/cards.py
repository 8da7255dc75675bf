"""The objects that this node writes of its cards and devices: node capacities and an ExtendedResource each. Pure.

The rules without an API server; `inventory` carries them out.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from cardwise.core.api import classes, names
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard, Health
from cardwise.kube.wire import ExtendedResource, HeldShare, OwnerReference
from deviceplugin.sources.pods import NodePod

CAPACITIES = (names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, names.WHOLE_GPU, names.PLACE_MARKER)
_MANY = 1_000_000  # more pods than a node can have

_GONE = Health(
    healthy=False,
    reason="the card is not on the node any more, or --cards leaves it out; it stays listed while pods hold a share",
)
_GONE_DEVICE = Health(
    healthy=False,
    reason="the device is not on the node any more, or --devices leaves it out; it stays listed while a pod holds it",
)


def capacities(sizes: Collection[int], pods: Iterable[NodePod], core: int = FULL_CORE) -> dict[str, str]:
    """Node capacities of cards of these MiB, sick ones included. `core`: percent of the SMs of each.

    Never below what the node's living pods ask for: a kubelet that restarts admits its pods again and fails those that
    do not fit. So a card that was taken out of the machine leaves the sum only when its pods have ended.
    """
    sums = {
        names.GPU_MEM: sum(sizes),
        names.GPU_COUNT: len(sizes),
        names.GPU_CORE: core * len(sizes),
        names.WHOLE_GPU: len(sizes),
    }
    living = [pod for pod in pods if not pod.finished]
    return {name: str(max(total, sum(pod.requests.get(name, 0) for pod in living))) for name, total in sums.items()}


def class_capacities(
    members: Iterable[tuple[MiB, Iterable[ResourceClass]]] | None, pods: Iterable[NodePod], now: Mapping[str, str]
) -> dict[str, str]:
    """Node capacities of ResourceClasses: as many as containers on the cards and devices can ask for at once.

    `members` are the MiB and the classes of each card and device, None while nobody knows them; what the node says
    `now` stays then. As with `capacities`, never below what living pods ask for. A class without either is left out,
    and its capacity goes.
    """
    offered: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for pod in pods:
        if not pod.finished:
            asked.update({name: amount for name, amount in pod.requests.items() if names.class_of(name)})
    if members is None:
        offered.update({name: int(amount) for name, amount in now.items() if names.class_of(name)})
    else:
        for mem, of_card in members:
            # A device is given whole: one of it is one.
            offered.update(
                {names.CLASS_PREFIX + one.name: 1 if one.other else classes.most_shares(mem, one) for one in of_card}
            )
    asked = +asked
    return {name: str(max(offered[name], asked[name])) for name in sorted(offered.keys() | asked.keys())}


def marker_capacity(specs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What a node with devices offers of the marker that pods without a card carry.

    kube-scheduler places pods without regard to it. But when a node has more than before, it tries a parked pod again
    only if that node has all that the pod asks for, and there it does not ignore the marker.
    """
    return {names.PLACE_MARKER: str(_MANY)} if any(spec["kind"] != classes.KIND for spec in specs) else {}


def labels(spec: Mapping[str, Any], found: ExtendedResource | None) -> dict[str, str]:
    """What selectors see of a card or device: its `spec`, as of `spec_of_card` and `spec_of_device`, and what people
    have put on its object.
    """
    return classes.labels(
        node=spec["node"],
        index=spec["index"],
        uuid=spec["uuid"],
        model=spec["model"],
        memory=MiB(spec.get("memoryMiB", 0)),
        properties=spec["properties"],
        own={} if found is None else found.metadata.labels,
        kind=spec["kind"],
    )


def accelerator(cards: Iterable[GpuCard]) -> str:
    """The value of the node's label `accelerator`, "" unless all its cards are of one model."""
    models = {card.model for card in cards}
    return classes.accelerator_of_model(models.pop()) if len(models) == 1 else ""


def spec_of_card(node: str, card: GpuCard) -> Json:
    """The spec of the ExtendedResource of a card."""
    properties = dict(card.properties)
    if card.pci_bus_id:
        properties["pciBusID"] = card.pci_bus_id
    return {
        "kind": classes.KIND,
        "node": node,
        "index": card.index,
        "uuid": card.uuid,
        "model": card.model,
        "memoryMiB": int(card.memory),
        "properties": properties,
    }


def spec_of_device(node: str, device: OtherDevice) -> Json:
    """The spec of the ExtendedResource of a device that is no GPU."""
    return {
        "kind": device.kind,
        "node": node,
        "index": device.index,
        "uuid": device.uuid,
        "model": device.model,
        "properties": dict(device.properties),
    }


def resource(node: str, node_uid: str, spec: Json) -> Json:
    """The ExtendedResource of a card or device with this `spec`, without status.

    Its owner is the Node: Kubernetes removes it when the Node is deleted, since nobody is left there to do so.
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


def is_owned(found: ExtendedResource, node: str, node_uid: str) -> bool:
    """Whether it goes with this Node. A Node that was deleted and registered again is another one, by its UID."""
    owner = OwnerReference(api_version="v1", kind="Node", name=node, uid=node_uid)
    return owner in found.metadata.owner_references


def status(health: Health, access: str, held: Sequence[HeldShare]) -> Json:
    """What the device plugin says in the status of an ExtendedResource. The rest of it is others'."""
    return {
        "health": "Healthy" if health.healthy else "Unhealthy",
        "reason": wording.message(health.reason),
        "cardAccess": access,
        "held": [share.told() for share in held],
    }


def statuses(
    here: Mapping[str, Health],
    gone: Iterable[ExtendedResource],
    access: str,
    held: Callable[[str], Sequence[HeldShare] | None],
) -> dict[str, Json]:
    """Statuses by UUID, of the cards and devices `here` and of the `gone` ones that are kept; none of those of which
    nobody knows what is held.
    """
    states = {**here, **{one.spec.uuid: _GONE if one.spec.kind == classes.KIND else _GONE_DEVICE for one in gone}}
    shares = {uuid: held(uuid) for uuid in states}
    return {uuid: status(states[uuid], access, theirs) for uuid, theirs in shares.items() if theirs is not None}


def status_of(found: ExtendedResource) -> Json:
    """The status as observed, in the form of `status`, so without what the extender says there."""
    seen = found.status
    return status(Health(seen.health == "Healthy", seen.reason), seen.card_access, seen.held or ())


def spec_of(found: ExtendedResource) -> Json:
    """The spec as observed, in the form of `spec_of_card` or `spec_of_device`."""
    spec = found.spec
    return {
        "kind": spec.kind,
        "node": spec.node,
        "index": spec.index,
        "uuid": spec.uuid,
        "model": spec.model,
        **({"memoryMiB": spec.memory_mib} if spec.kind == classes.KIND else {}),
        "properties": dict(spec.properties),
    }
