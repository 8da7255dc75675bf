"""Records of Cardwise's objects: cards, classes and quotas, decoded from JSON.

A record has two parts: the fields for decisions, for the state; and the object's status, which `statuswriter` compares
with the wanted status. Both parts come from the same watch, so each object is decoded once, and the parts never differ.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import NamedTuple

import msgspec
from msgspec import Struct

from cardwise.core.api import classes, names, quotas
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.quotas import GPUQuota
from cardwise.core.placement.devices import Device
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import wire
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import (
    ContainerShare,
    ExtendedResource,
    ExtendedResourceSpec,
    ExtendedResourceStatus,
)
from cardwise.kube.wire import prepare_types
from extender.records import shared

_PASSED_OVER = (
    f"status.reported has ignored entries: an invalid podUID, a number out of range, or more than "
    f"{extendedresources.MAX_REPORTED_PER_CARD} entries"
)
_ENV_ACCESS = "env"  # a value of status.gpuAccess


class ShareRecord(NamedTuple):
    """A container's share of one card or device, if the pod object is gone: as reported by the node, or as assigned.

    mem, core: the memory in MiB, and the percent of the SMs.
    whole: the share is the whole card.
    container: the key of the container.
    """

    uid: str
    namespace: str
    name: str
    mem: int
    core: int
    whole: bool = False
    container: str = ""

    def to_json(self) -> Json:
        """The share as JSON of the status."""
        pod = self.uid, self.namespace, self.name
        return ContainerShare(*pod, self.mem, self.core, self.container, self.whole).to_json()


class CardStatus(NamedTuple):
    """The extender's part of an ExtendedResource's status, in MiB and percent. -1: the status does not have the field.

    terminating: the shares of pods whose object is gone, for the next leader.
    """

    memory: int = -1
    core: int = -1
    shares: int = -1
    whole: bool = False
    pods: int = -1
    free: int = -1
    classes: tuple[str, ...] = ()
    terminating: tuple[ShareRecord, ...] = ()


class CardRecord(NamedTuple):
    """An ExtendedResource: the card or device, its node, and the shares of deleted pods that the node still reports.

    labels: further labels for selectors, in addition to those that are computed from other fields. Keys in lower case.
    status: as the extender wrote it. Only `status.terminating` is read, and only when the card is seen for the first
      time.
    problem: the ignored part of the report, with the reason.
    env_access: whether the node gives cards by environment variables only, without CDI.
    """

    node: str
    card: Card | Device
    reported_shares: tuple[ShareRecord, ...] = ()
    labels: Mapping[str, str] = {}
    status: CardStatus = CardStatus()
    problem: str = ""
    env_access: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRecord:
    """A ResourceClass.

    resource_class: None if it cannot be read; then `problem` says why.
    created: the creationTimestamp in UTC; comparing the texts compares the times.
    auto_models: the models for which Cardwise wrote the class; empty if a person has created or edited it.
    """

    resource_class: ResourceClass | None = None
    problem: str = ""
    uid: str = ""
    version: str = ""
    created: str = ""
    generation: int = 0
    auto_models: tuple[str, ...] = ()
    status: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRecord:
    """A GPUQuota; `quota` is None if it cannot be read, and `problem` says why."""

    namespace: str
    name: str
    uid: str = ""
    quota: GPUQuota | None = None
    problem: str = ""
    generation: int = 0
    status: Json = field(default_factory=dict)


class _Allocated(Struct, rename="camel"):
    memory_mib: int = msgspec.field(default=-1, name="memoryMiB")
    core_percent: int = -1
    shares: int = -1
    whole: bool | None = None
    pods: int = -1


class _Status(ExtendedResourceStatus, rename="camel"):
    """The status, with the fields that the extender writes."""

    allocated: _Allocated | None = None
    free_mib: int = msgspec.field(default=-1, name="freeMiB")
    classes: list[str] | None = None


class _Card(ExtendedResource):
    status: _Status = msgspec.field(default_factory=_Status)


_decode_card = msgspec.json.Decoder(_Card).decode
_decode_object = msgspec.json.Decoder(Json).decode
prepare_types(ContainerShare)


def decode_card(raw: bytes) -> tuple[str, CardRecord] | None:
    """Decode an ExtendedResource: its key and its record."""
    try:
        decoded, complete = _decode_card(raw), True
    except msgspec.ValidationError:
        decoded, complete = _decode_card(_drop_malformed_shares(raw)), False
    spec, status = decoded.spec, decoded.status
    reported = _share_records(extendedresources.plausible_shares(decoded), spec)
    return decoded.metadata.name, CardRecord(
        intern(spec.node),
        extendedresources.device_of(decoded)
        if extendedresources.is_other_device(decoded)
        else extendedresources.card_of(decoded),
        reported,
        _selector_labels(decoded),
        _card_status(status, spec),
        "" if complete and len(reported) == len(status.reported or ()) else _PASSED_OVER,
        status.gpu_access == _ENV_ACCESS,
    )


def decode_class(raw: bytes) -> tuple[str, ClassRecord] | None:
    """Decode a ResourceClass: its name and its record."""
    manifest = _decode_object(wire.trim_object(raw))
    metadata = manifest["metadata"]
    parsed, problem = None, ""
    try:
        parsed = classes.parse(manifest)
    except InvalidRequest as error:
        problem = str(error)
    return metadata["name"], ClassRecord(
        resource_class=parsed,
        problem=problem,
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        created=metadata.get("creationTimestamp", ""),
        generation=metadata.get("generation", 0),
        auto_models=classes.auto_models(manifest),
        status=manifest.get("status") or {},
    )


def decode_quota(raw: bytes) -> tuple[str, QuotaRecord] | None:
    """Decode a GPUQuota: its key "namespace/name" and its record."""
    manifest = _decode_object(wire.trim_object(raw))
    metadata = manifest["metadata"]
    parsed, problem = None, ""
    try:
        parsed = quotas.parse(manifest)
    except InvalidRequest as error:
        problem = str(error)
    return f"{metadata['namespace']}/{metadata['name']}", QuotaRecord(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        quota=parsed,
        problem=problem,
        generation=metadata.get("generation", 0),
        status=manifest.get("status") or {},
    )


def _share_records(shares: Iterable[ContainerShare], spec: ExtendedResourceSpec) -> tuple[ShareRecord, ...]:
    return tuple(
        ShareRecord(
            share.pod_uid,
            share.namespace,
            share.name,
            share.memory_mib,
            share.core_percent,
            extendedresources.is_whole_card(share, spec.memory_mib),
            share.container,
        )
        for share in shares
        if extendedresources.is_uid(share.pod_uid)
    )


def _drop_malformed_shares(raw: bytes) -> bytes:
    """The ExtendedResource without malformed shares. The schema forbids such shares, but a single one must not make
    the whole card unreadable.
    """
    manifest = _decode_object(wire.trim_object(raw))
    status = manifest.get("status") or {}
    for key in ("reported", "terminating"):
        status[key] = [entry for entry in status.get(key) or () if _is_share(entry)]
    return msgspec.json.encode(manifest)


def _is_share(entry: object) -> bool:
    try:
        msgspec.convert(entry, ContainerShare)
    except msgspec.ValidationError:
        return False
    return True


def _card_status(status: _Status, spec: ExtendedResourceSpec) -> CardStatus:
    allocated = status.allocated or _Allocated()
    return CardStatus(
        allocated.memory_mib,
        allocated.core_percent,
        allocated.shares,
        bool(allocated.whole),
        # A status without `whole` is incomplete, so it must be written again.
        allocated.pods if allocated.whole is not None else -1,
        status.free_mib,
        shared.share_texts(status.classes or ()),
        _share_records(status.terminating or (), spec),
    )


def _selector_labels(resource: ExtendedResource) -> Mapping[str, str]:
    own_labels = {key: label_value for key, label_value in resource.metadata.labels.items() if key != names.NODE_LABEL}
    all_labels = {
        key.lower(): label_value
        for texts in (own_labels, resource.spec.properties)
        for key, label_value in sorted(texts.items())
    }
    return shared.share_labels(all_labels)
