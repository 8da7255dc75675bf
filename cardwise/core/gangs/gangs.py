"""Gangs: which pods belong together, what their PodGroup sets, and which of two groups comes first.

The members of one gang and its phase are in `gangstate`, its plans in `gangplan`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cardwise.core.api import names
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.values import objectnames, quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text

MAX_MEMBERS: Final = 500  # members of a gang; each waits in a thread of its own until the last member has reached bind
_EARLIEST_CREATION_TIME: Final = ""  # sorts before every creation time
MAX_REQUEST_KINDS: Final = 16  # different requests of a gang's pods; each needs a search of all nodes
_GANG_KEYS = (names.GROUP_NAME, names.GROUP_NUM, names.COSCHEDULING)

Rank = tuple[int, int, str, str]  # of gangs and single pods: the smallest rank goes first


# Which pods belong together.


class ForeignPodGroup(StrEnum):
    """The API group of a PodGroup of another project."""

    COSCHEDULING = "scheduling.x-k8s.io"
    KUBERNETES = "scheduling.k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The gang that a pod names.

    minimum: the minimum number of members, from the pod; None if it is in a PodGroup.
    foreign_podgroup: the API group of the gang's PodGroup, if the PodGroup is another project's; else None.
    """

    name: str
    minimum: int | None = None
    foreign_podgroup: ForeignPodGroup | None = None


def membership(pod: Json) -> Membership | None:
    """The gang of a pod or a pod template; an annotation has precedence over a label. Raises InvalidRequest.

    A PodGroup of Kubernetes is a gang only for pods that request cards or devices; the caller checks that. A pod that
    names a PodGroup of Kubernetes and also another gang is refused. kube-scheduler would wait for all pods of the
    group, and the extender for all pods of the gang. So perhaps no pod would ever be bound.
    """
    metadata = pod.get("metadata") or {}
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    if group := (pod.get("spec") or {}).get("schedulingGroup"):
        gang_key = next((spelling for spelling in _GANG_KEYS if spelling in annotations or spelling in labels), None)
        if gang_key is not None:
            raise InvalidRequest(
                "spec.schedulingGroup",
                f"names a PodGroup of Kubernetes and {gang_key} a Cardwise gang: a pod can be in only one of them",
                "remove one of them from all pods of the group",
            )
        return Membership(name=str(group.get("podGroupName") or ""), foreign_podgroup=ForeignPodGroup.KUBERNETES)
    for source, keys in (("annotations", annotations), ("labels", labels)):
        if names.GROUP_NAME in keys:
            field_name = f"metadata.{source}[{names.GROUP_NAME}]"
            return Membership(name=_name(keys[names.GROUP_NAME], field_name), minimum=_minimum(annotations, labels))
    if names.COSCHEDULING in labels:
        field_name = f"metadata.labels[{names.COSCHEDULING}]"
        return Membership(
            name=_name(labels[names.COSCHEDULING], field_name), foreign_podgroup=ForeignPodGroup.COSCHEDULING
        )
    if names.GROUP_NUM in annotations or names.GROUP_NUM in labels:
        source = "annotations" if names.GROUP_NUM in annotations else "labels"
        raise InvalidRequest(
            f"metadata.{source}[{names.GROUP_NUM}]",
            "gives the number of pods of a gang, but no gang is named",
            f"add {names.GROUP_NAME} with the gang's name, the same on all its pods",
        )
    return None


def gang_of(pod: Json) -> Membership | None:
    """The gang of a pod that has passed the webhook, from its label. Raises InvalidRequest."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    name = labels.get(names.GANG)
    if not name:
        return None
    declared = membership(pod)
    if declared is None or declared.name != name:
        return Membership(name=name)
    return declared


def is_gated(pod: Json) -> bool:
    """Whether the pod has Cardwise's scheduling gate for gangs."""
    return names.GANG in _gates(pod)


def foreign_gate(pod: Json) -> str | None:
    """A scheduling gate of the pod that belongs to another project; None if there is none."""
    return next((gate for gate in _gates(pod) if gate not in (names.GANG, names.ALLOCATION_GATE)), None)


def _gates(pod: Json) -> list[str]:
    return [str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ()]


def queue_priority(annotations: Mapping[str, str]) -> int | None:
    """The priority in the gang queue, from the pod's annotation; None without it. Raises InvalidRequest."""
    text = annotations.get(names.QUEUE_PRIORITY)
    if text is None:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text.strip()):
        field_name, problem = (
            f"metadata.annotations[{names.QUEUE_PRIORITY}]",
            f"{quote_text(text)} is not a whole number",
        )
        raise InvalidRequest(field_name, problem, "write, for example, 10 (higher values go first)")
    return int(text)


def _name(text: object, field_name: str) -> str:
    if not isinstance(text, str) or not objectnames.is_label(text):
        raise InvalidRequest(
            field_name,
            f"{quote_text(text)} is not a valid gang name",
            "write lower-case letters, digits and -, at most 63 of them",
        )
    return text


def _minimum(annotations: Mapping[str, str], labels: Mapping[str, str]) -> int | None:
    source, keys = ("annotations", annotations) if names.GROUP_NUM in annotations else ("labels", labels)
    text = keys.get(names.GROUP_NUM)
    if text is None:
        return None
    try:
        return quantity.parse_count(text, maximum=MAX_MEMBERS)
    except quantity.InvalidQuantity as error:
        raise InvalidRequest(f"metadata.{source}[{names.GROUP_NUM}]", error.problem, error.remedy) from error


# The record of a gang.


class GangPhase(StrEnum):
    """The phase in `PodGroup.status.phase`."""

    PENDING = "Pending"  # fewer members than the minimum
    WAITING = "Waiting"  # complete, but it does not fit now, or backs off
    RESERVED = "Reserved"  # planned: cards are reserved for the members
    BINDING = "Binding"  # each member of the plan has reached bind, and the extender binds them
    RUNNING = "Running"
    PARTLY_BOUND = "PartlyBound"  # only some members are bound: the leader died, or could not bind the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A pod of a gang, as in the last event.

    created: the creation time; sorts as text.
    is_counted: whether the pod counts as a member: it has not failed, and it is not being deleted.
    gated: whether the pod has Cardwise's scheduling gate.
    foreign_gate: a scheduling gate of another project, which still keeps the pod from kube-scheduler; None for none.
    node: the pod's node; "" until it is bound.
    shape: a key that is equal for pods that kube-scheduler treats the same.
    problem: why the pod cannot be placed as written; "" if it can.
    """

    uid: str
    name: str
    created: str = ""
    is_counted: bool = True
    gated: bool = False
    foreign_gate: str | None = None
    node: str = ""
    minimum: int | None = None
    foreign_podgroup: ForeignPodGroup | None = None
    priority: int = 0
    queue_priority: int | None = None
    shape: str = ""
    request: PodRequest | None = None
    load: Load = Load()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroupSpec:
    """The content of a gang's PodGroup. A setting is None if the PodGroup does not have it.

    permit: seconds that a plan waits for the next member at bind.
    priority: the priority in the gang queue.
    running: whether the phase in the status is Running.
    partly_bound_since: since when, according to the status, the gang is bound in part (wall clock, seconds).
    basic: whether this is a PodGroup of Kubernetes whose pods may start one by one. Such a PodGroup is not a gang.
    """

    minimum: int | None = None
    permit: float | None = None
    priority: int | None = None
    running: bool = False
    partly_bound_since: float | None = None
    basic: bool = False


# Seconds. A PodGroup's timeoutSeconds replaces the first for its gang. Longer than kube-scheduler needs for the next
# member of the largest gang, also if other pods are before it in the queue.
PERMIT_SECONDS: Final = 30.0
# The default of the option. A gang that waits for a node to be created needs minutes; GPUs are idle meanwhile.
MAX_PERMIT_SECONDS: Final = 300.0
# The default of the option. Shorter: shares start later because of gangs. Longer: a large gang starts later.
RESERVE_AFTER_SECONDS: Final = 60.0
# Refusals of a gang, at most one a second: a gang that was tried often, and lost free cards to others each time, does
# not wait `RESERVE_AFTER_SECONDS`.
RESERVE_REFUSALS: Final = 20
# Ten times `RESERVE_AFTER_SECONDS`: a namespace can withhold cards from other namespaces for half of the time at most.
RESERVE_LIMIT_SECONDS: Final = 600.0
# The missing members of a gang that is bound in part bind within seconds if they fit. Eviction ends the work of the
# bound members, so a short outage of the API server or of kube-scheduler must not lead to it.
ROLLBACK_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPatience:
    """How long a gang waits, in seconds, and after how many refusals cards are reserved for it.

    permit: how long a plan waits for the next member at bind, if the gang's PodGroup sets no time.
    max_permit: the maximum that a PodGroup may set.
    rollback: how long a gang may be bound in part, until its bound members are evicted.
    reserve, refusals: after this number of seconds or refusals, cards are reserved for a waiting gang.
    reserve_limit: how long these cards stay reserved. For the same time afterwards, no cards are reserved for the gang.
    """

    permit: float = PERMIT_SECONDS
    max_permit: float = MAX_PERMIT_SECONDS
    rollback: float = ROLLBACK_SECONDS
    reserve: float = RESERVE_AFTER_SECONDS
    refusals: int = RESERVE_REFUSALS
    reserve_limit: float = RESERVE_LIMIT_SECONDS


def gang_rank(oldest: Member | None, highest: int, priority: int | None, key: str) -> Rank:
    """The rank of a gang, or of a single pod as a gang of one member. The smallest rank goes first.

    oldest: the oldest member; None without members.
    highest: the highest priority of the members.
    priority: the PodGroup's priority in the gang queue; the oldest member's annotation takes precedence.
    key: orders gangs that are otherwise equal.
    """
    if oldest is None:
        return 0, 0, _EARLIEST_CREATION_TIME, key
    queued = oldest.queue_priority if oldest.queue_priority is not None else priority or 0
    return -highest, -queued, oldest.created, key
