"""Which waiting pods may be decided about before kube-scheduler asks, and all that this needs of them.

These few pods are read whole, once each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cardwise.core.api import request
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Rank
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity
from extender.records import aheadnodes, members, nodepreferences

DEFAULT_SCHEDULER: Final = "default-scheduler"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prospect:
    """A pod that waits and was not tried yet, as far as is known.

    `version`: of the object, as last seen. `rank`: as a gang of one. `wishes`: key of what it asks of its node.
    `insists`: it says that the extender is to choose, whatever holds for others.
    """

    uid: str
    namespace: str
    name: str
    version: str
    created: str
    scheduler: str
    request: PodRequest
    load: Load
    rank: Rank
    wishes: bytes
    insists: bool


def prospect(pod: Json, load: Load) -> Prospect | None:
    """The pod, which has no node; None where it is not ours, or not to be decided about ahead."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    version = metadata.get("resourceVersion")
    if (
        not version
        or metadata.get("deletionTimestamp")
        or spec.get("schedulingGates")
        or members.gang_of(pod)
        or members.grouped(pod)
        or not nodepreferences.one_best_node(pod, default=True)
        or _bound_to_others(spec)
    ):
        return None
    try:
        asked = request.parse_mutated(pod)
    except (InvalidRequest, InvalidQuantity):
        return None  # filter will say it
    if asked is None:
        return None
    return Prospect(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        version=version,
        created=metadata.get("creationTimestamp") or "",
        scheduler=spec.get("schedulerName") or DEFAULT_SCHEDULER,
        request=asked,
        load=load,
        rank=members.rank(pod),
        wishes=aheadnodes.key_of(spec),
        insists=nodepreferences.one_best_node(pod, default=False),
    )


def _bound_to_others(spec: Json) -> bool:
    """Whether the scheduler decides by which other pods are where, or by claims of devices or volumes."""
    affinity = spec.get("affinity") or {}
    hard = "requiredDuringSchedulingIgnoredDuringExecution"
    if any((affinity.get(kind) or {}).get(hard) for kind in ("podAffinity", "podAntiAffinity")):
        return True
    if spec.get("topologySpreadConstraints") or spec.get("resourceClaims") or spec.get("hostNetwork"):
        return True
    # Such a claim may wait for its first consumer. kube-scheduler itself names the node then while the volume is made,
    # which may take longer than anything is held ahead.
    if any("persistentVolumeClaim" in one or "ephemeral" in one for one in spec.get("volumes") or ()):
        return True
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    return any(port.get("hostPort") for each in containers for port in each.get("ports") or ())
