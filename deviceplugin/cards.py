"""What this node tells the cluster of its cards: node capacities and one ExtendedResource each. Pure.

Apart from `inventory`, which carries it out, so that the rules can be read and tested without an API server.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cardwise.core import names
from cardwise.gpus.protocol import HEALTHY, GpuCard, Health
from cardwise.kube.wire import ExtendedResource, HeldShare
from deviceplugin.pods import PodView

CAPACITIES = (names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, names.WHOLE_GPU)
Object = dict[str, Any]
_REASON_LENGTH = 1024  # characters, by the CRD

_GONE = Health(healthy=False, reason="the card is not on the node any more; it stays listed while pods hold a share")


def capacities(cards: Iterable[tuple[int, str]], pods: Iterable[PodView]) -> dict[str, str]:
    """Node capacities of cards given as (MiB, UUID), sick ones included.

    Never below what the node's living pods ask for: a kubelet that restarts admits its pods again and fails those that
    do not fit. So a card that was taken out of the machine leaves the sum only when its pods have ended.
    """
    memory = [mib for mib, _ in cards]
    sums = {
        names.GPU_MEM: sum(memory),
        names.GPU_COUNT: len(memory),
        names.GPU_CORE: 100 * len(memory),
        names.WHOLE_GPU: len(memory),
    }
    living = [pod for pod in pods if not pod.finished]
    return {name: str(max(total, sum(pod.requests.get(name, 0) for pod in living))) for name, total in sums.items()}


def resource(node: str, card: GpuCard) -> Object:
    """The ExtendedResource of a card, without status."""
    properties = dict(card.properties)
    if card.pci_bus_id:
        properties["pciBusID"] = card.pci_bus_id
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ExtendedResource",
        "metadata": {"name": names.extended_resource_name(card.uuid), "labels": {names.NODE_LABEL: node}},
        "spec": {
            "node": node,
            "index": card.index,
            "uuid": card.uuid,
            "model": card.model,
            "memoryMiB": int(card.memory),
            "properties": properties,
        },
    }


def status(health: Health, access: str, held: Sequence[HeldShare]) -> Object:
    """The status of a card's ExtendedResource."""
    return {
        "health": "Healthy" if health.healthy else "Unhealthy",
        "reason": health.reason[:_REASON_LENGTH],
        "cardAccess": access,
        "held": [
            {
                "podUID": share.pod_uid,
                "namespace": share.namespace,
                "name": share.name,
                "memoryMiB": share.memory_mib,
                "corePercent": share.core_percent,
            }
            for share in held
        ],
    }


def statuses(
    cards: Iterable[GpuCard],
    gone: Iterable[str],
    health: Mapping[str, Health],
    access: str,
    held: Mapping[str, Sequence[HeldShare]],
) -> dict[str, Object]:
    """Statuses by card UUID, of the cards here and of the `gone` ones that are kept."""
    here = {card.uuid: status(health.get(card.uuid, HEALTHY), access, held.get(card.uuid, ())) for card in cards}
    return here | {uuid: status(_GONE, access, held.get(uuid, ())) for uuid in gone}


def status_of(found: ExtendedResource) -> Object:
    """The status as observed, in the form of `status`."""
    seen = found.status
    return status(Health(seen.health == "Healthy", seen.reason), seen.card_access, seen.held or ())


def spec_of(found: ExtendedResource) -> Object:
    """The spec as observed, in the form of `resource`."""
    spec = found.spec
    return {
        "node": spec.node,
        "index": spec.index,
        "uuid": spec.uuid,
        "model": spec.model,
        "memoryMiB": spec.memory_mib,
        "properties": dict(spec.properties),
    }
