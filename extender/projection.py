"""What the extender keeps of pods, cards, nodes, classes and quotas: compact records out of their JSON.

Apart from the state that is built of them, because the cost of a watch event and of the memory of 60,000 pods is
decided here: what is not ours is dropped before it is decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from sys import intern
from typing import Any

import msgspec
from msgspec import Struct

from cardwise.core import assignment, classes, names, quotas
from cardwise.core.assignment import Assignment
from cardwise.core.cards import Card
from cardwise.core.classes import DeviceClass
from cardwise.core.invalid import InvalidRequest
from cardwise.core.quotas import GPUQuota
from cardwise.kube import survey, wire

# A pod that speaks of cards has one of these in its JSON; "/" is never escaped there.
_SIGNS = (b"cardwise.dev/", b"ALIYUN_COM_GPU_MEM_", b"gpushare.allocation", b"aliyun.com/gpu-mem")

_SHARED = 4096  # different sets of labels, of which each is kept once for all cards that have it


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod that asks for cards or has some. `node` is "" until it is bound, `classes` are what it asks until then.

    `finished`: its phase is final. `ended`: the proof that no container of it runs or will run. `problem` says why a
    bound pod's annotations could not be read.
    """

    uid: str
    namespace: str
    name: str
    node: str = ""
    assignment: Assignment | None = None
    finished: bool = False
    ended: bool = False
    problem: str = ""
    classes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A container's share, of a pod whose object is gone, as the node reports it for one card."""

    uid: str
    namespace: str
    name: str
    mem: int
    core: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class CardRecord:
    """An ExtendedResource: the card, where it is, and what vanished pods still hold on it.

    `labels` are those that selectors see and that do not follow from the rest; their keys are in lower case.
    """

    node: str
    card: Card
    held: tuple[HeldRecord, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """A ResourceClass; `device_class` is None where it cannot be read, for `problem`."""

    device_class: DeviceClass | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class QuotaRecord:
    """A GPUQuota; `quota` is None where it cannot be read, for `problem`."""

    quota: GPUQuota | None
    problem: str = ""


class _Meta(Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Container(Struct):
    state: wire.ContainerState = msgspec.field(default_factory=wire.ContainerState)


class _Status(Struct, rename="camel"):
    phase: str = ""
    container_statuses: list[_Container] | None = None
    init_container_statuses: list[_Container] | None = None


class _Pod(Struct):
    metadata: _Meta
    spec: wire.PodSpecHead = msgspec.field(default_factory=wire.PodSpecHead)
    status: _Status = msgspec.field(default_factory=_Status)


class _Resources(Struct):
    limits: dict[str, msgspec.Raw] | None = None


class _Asking(Struct):
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _AskingSpec(Struct, rename="camel"):
    containers: list[_Asking] | None = None
    init_containers: list[_Asking] | None = None


class _AskingPod(Struct):
    spec: _AskingSpec


_decode_asking = msgspec.json.Decoder(_AskingPod).decode
_decode_pod = msgspec.json.Decoder(_Pod).decode
_decode_card = msgspec.json.Decoder(wire.ExtendedResource).decode
_decode_head = msgspec.json.Decoder(wire.ObjectHead).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def pod(raw: bytes) -> tuple[str, PodRecord] | None:
    """Key and record; None for a pod that is none of our business."""
    if not any(sign in raw for sign in _SIGNS):
        return None
    read = _decode_pod(raw)
    meta, node = read.metadata, read.spec.node_name
    if not node:
        finished = read.status.phase in names.FINISHED_PHASES
        asked = frozenset() if finished else _classes(raw)
        return meta.uid, PodRecord(meta.uid, meta.namespace, meta.name, finished=finished, classes=asked)
    if names.MIRROR in (meta.annotations or {}):
        return None  # a static pod is placed by nobody, so it has no assignment whatever it says
    held, problem = None, ""
    try:
        held = assignment.decode(meta.annotations or {})
    except assignment.InvalidAssignment as error:
        problem = str(error)
    if held is None and not problem:
        return None
    finished = read.status.phase in names.FINISHED_PHASES
    return meta.uid, PodRecord(
        meta.uid,
        intern(meta.namespace),
        meta.name,
        intern(node),
        held,
        finished,
        _ended(read, finished=finished),
        problem,
    )


def card(raw: bytes) -> tuple[str, CardRecord] | None:
    """Key and record of an ExtendedResource."""
    read = _decode_card(raw)
    spec, status = read.spec, read.status
    return read.metadata.name, CardRecord(
        intern(spec.node),
        survey.card_of(read),
        tuple(
            HeldRecord(
                held.pod_uid,
                held.namespace,
                held.name,
                held.memory_mib,
                held.core_percent,
                survey.is_whole(held, spec.memory_mib),
            )
            for held in status.held or ()
            if held.pod_uid and held.memory_mib >= 0 and held.core_percent >= 0
        ),
        _labels(read),
    )


def node(raw: bytes) -> tuple[str, bool] | None:
    """Only that it is there."""
    return intern(_decode_head(raw).metadata.name), True


def resource_class(raw: bytes) -> tuple[str, ClassRecord] | None:
    """Name and record."""
    obj = _decode_object(raw)
    name = obj["metadata"]["name"]
    try:
        return name, ClassRecord(classes.parse(obj))
    except InvalidRequest as error:
        return name, ClassRecord(None, str(error))


def quota(raw: bytes) -> tuple[str, QuotaRecord] | None:
    """Key, which is "namespace/name", and record."""
    obj = _decode_object(raw)
    metadata = obj["metadata"]
    key = f"{metadata['namespace']}/{metadata['name']}"
    try:
        return key, QuotaRecord(quotas.parse(obj))
    except InvalidRequest as error:
        return key, QuotaRecord(None, str(error))


def _labels(read: wire.ExtendedResource) -> Mapping[str, str]:
    own = {key: value for key, value in read.metadata.labels.items() if key != names.NODE_LABEL}
    seen = {key.lower(): value for whose in (own, read.spec.properties) for key, value in sorted(whose.items())}
    return _shared(tuple(sorted(seen.items())))


@lru_cache(maxsize=_SHARED)
def _shared(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(items)


def _classes(raw: bytes) -> frozenset[str]:
    """The classes that the pod's containers name."""
    spec = _decode_asking(raw).spec
    limits = (c.resources.limits or () for c in (*(spec.containers or ()), *(spec.init_containers or ())))
    return frozenset(found for amounts in limits for name in amounts if (found := names.class_of(name)))


def _ended(read: _Pod, *, finished: bool) -> bool:
    """Whether its containers are gone for good, by the kubelet's own word.

    A terminated container alone is none: it may be on its way to its next start. No statuses are none either: the
    kubelet may be starting the first container just now.
    """
    containers = [*(read.status.container_statuses or ()), *(read.status.init_container_statuses or ())]
    if finished:
        return all(container.state.running is None for container in containers)
    dying = read.metadata.deletion_timestamp is not None
    return dying and bool(containers) and all(container.state.terminated is not None for container in containers)
