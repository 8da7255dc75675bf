"""Records of Cardwise's objects: cards, classes and quotas, decoded from JSON.

A record has two parts: the fields for decisions, for the state; and the object's status, which `statuswriter` compares
with the wanted status. Both parts come from the same watch, so each object is decoded once, and the parts never differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import NamedTuple

import msgspec

from cardwise.core.api import classes, names, quotas
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.quotas import GPUQuota
from cardwise.core.placement.devices import Device
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import wire
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ContainerShare, ExtendedResource, ExtenderStatus
from extender.records import shared

_PASSED_OVER = (
    f"status.reported has ignored entries: an invalid podUID, a number out of range, or more than "
    f"{extendedresources.MAX_REPORTED_PER_CARD} entries"
)
_ENV_ACCESS = "env"  # a value of status.gpuAccess


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
    reported_shares: tuple[ContainerShare, ...] = ()
    labels: Mapping[str, str] = {}
    status: ExtenderStatus = ExtenderStatus()
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


_decode_object = msgspec.json.Decoder(Json).decode


def decode_card(raw: bytes) -> tuple[str, CardRecord] | None:
    """Decode an ExtendedResource: its key and its record."""
    resource = extendedresources.decode(raw)
    status = resource.status
    reported = tuple(extendedresources.reported_shares(resource))
    return resource.metadata.name, CardRecord(
        intern(resource.spec.node),
        extendedresources.device_of(resource)
        if extendedresources.is_other_device(resource)
        else extendedresources.card_of(resource),
        reported,
        _selector_labels(resource),
        ExtenderStatus(
            status.allocated,
            status.free_mib,
            shared.share_texts(status.classes),
            tuple(extendedresources.terminating_shares(resource)),
        ),
        "" if len(reported) == len(status.reported or ()) else _PASSED_OVER,
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


def _selector_labels(resource: ExtendedResource) -> Mapping[str, str]:
    own_labels = {key: label_value for key, label_value in resource.metadata.labels.items() if key != names.NODE_LABEL}
    all_labels = {
        key.lower(): label_value
        for texts in (own_labels, resource.spec.properties)
        for key, label_value in sorted(texts.items())
    }
    return shared.share_labels(all_labels)
