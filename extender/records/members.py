"""Reads the member of a gang out of a pod's JSON.

These few pods are read whole: what the scheduler decides by must be compared between the members of a gang.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from cardwise.core.api import names, request
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity

_encode = msgspec.json.Encoder(order="deterministic").encode
# What differs between pods of one workload by their number alone.
_OF_ONE_POD = (
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
_SPEC = (
    "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "overhead", "priority", "schedulerName",
    "runtimeClassName", "resources", "hostNetwork",
)  # fmt: skip
_CONTAINER = ("resources", "ports", "restartPolicy")

Json = Mapping[str, Any]


def gang_of(pod: Json) -> str:
    """The name of the pod's gang, or ""."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return str(labels.get(names.GANG) or "")


def grouped(pod: Json) -> bool:
    """Whether the pod names a PodGroup of Kubernetes. kube-scheduler filters all members before it binds any, tells
    nobody when it gives that up, and tries a member whose bind was refused again at once.
    """
    return bool((pod.get("spec") or {}).get("schedulingGroup"))


def member(pod: Json, load: Load) -> Member:
    """The member that the pod is."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    node, problem = spec.get("nodeName") or "", ""
    said, asked = None, None
    try:
        said = gangs.joined(pod)
        asked = request.parse_mutated(pod) if not node else None
    except (InvalidRequest, InvalidQuantity) as error:
        problem = str(error)
    return Member(
        uid=metadata["uid"],
        name=metadata["name"],
        created=metadata.get("creationTimestamp") or "",
        there=not metadata.get("deletionTimestamp") and status.get("phase") != "Failed",
        gated=gangs.gated(pod),
        node=node,
        minimum=said.minimum if said is not None else None,
        foreign=said is not None and said.foreign,
        priority=spec.get("priority") or 0,
        queue_priority=queued(metadata.get("annotations") or {}),
        shape=shape(pod) if not node else "",
        request=asked,
        load=load,
        problem=problem if not node else "",
    )


def rank(pod: Json) -> Rank:
    """The pod's place in the order of gangs, as a gang of one."""
    metadata = pod.get("metadata") or {}
    alone = Member(
        uid=metadata.get("uid") or "",
        name=metadata.get("name") or "",
        created=metadata.get("creationTimestamp") or "",
        priority=(pod.get("spec") or {}).get("priority") or 0,
        queue_priority=queued(metadata.get("annotations") or {}),
    )
    return gangs.rank_of([alone], None, "")


def shape(pod: Json) -> str:
    """Equal for pods that kube-scheduler cannot tell apart, as far as it decides where they may go."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key not in _OF_ONE_POD}
    seen = {
        "labels": labels,
        "spec": {key: spec[key] for key in _SPEC if key in spec},
        "containers": [
            {key: one[key] for key in _CONTAINER if key in one}
            for one in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
        ],
        "claims": [one.get("persistentVolumeClaim") for one in spec.get("volumes") or ()],
    }
    return blake2b(_encode(seen), digest_size=12).hexdigest()


def queued(annotations: Mapping[str, str]) -> int | None:
    """The place in the order that a person gave. It may be changed at any time: what cannot be read changes nothing."""
    try:
        return gangs.queue_priority(annotations)
    except InvalidRequest:
        return None
