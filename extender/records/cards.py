"""The fields of an ExtendedResource that the extender keeps.

A record has the fields from which the state decides, and the object's status, which `statuswriter` compares with the
desired status. Both come from the same watch: so each object is decoded once, and both are always of the same version.
"""

from collections.abc import Mapping
from sys import intern
from typing import NamedTuple

from cardwise.core.api import names
from cardwise.core.api.cards import Card
from cardwise.core.placement.devices import Device
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ContainerShare, ExtendedResource, ExtenderStatus
from extender.records import shared

_IGNORED_ENTRIES_TEXT = (
    f"status.reported has ignored entries: an invalid podUID, a number out of range, or more than "
    f"{extendedresources.MAX_REPORTED_PER_CARD} entries"
)
_ENV_ACCESS = "env"  # a value of status.gpuAccess


class CardRecord(NamedTuple):
    """An ExtendedResource: the card or device, its node, and the shares of deleted pods that the node still reports.

    labels: labels for selectors, without the labels that are computed from other fields. Keys in lower case.
    status: the status that the extender wrote. Only `status.terminating` is read, and only when the card is seen for
      the first time.
    problem: the ignored part of the report, with the reason; None if nothing is ignored.
    env_access: whether the node gives cards by environment variables only, without CDI.
    """

    node: str
    card: Card | Device
    reported_shares: tuple[ContainerShare, ...] = ()
    labels: Mapping[str, str] = {}
    status: ExtenderStatus = ExtenderStatus()
    problem: str | None = None
    env_access: bool = False


def decode_card(raw: bytes) -> tuple[str, CardRecord] | None:
    """Decode an ExtendedResource; returns its key and its record."""
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
            shared.reuse_equal_texts(status.classes),
            tuple(extendedresources.terminating_shares(resource)),
        ),
        None if len(reported) == len(status.reported or ()) else _IGNORED_ENTRIES_TEXT,
        status.gpu_access == _ENV_ACCESS,
    )


def _selector_labels(resource: ExtendedResource) -> Mapping[str, str]:
    own_labels = {key: label_value for key, label_value in resource.metadata.labels.items() if key != names.NODE_LABEL}
    all_labels = {
        key.lower(): label_value
        for texts in (own_labels, resource.spec.properties)
        for key, label_value in sorted(texts.items())
    }
    return shared.reuse_equal_labels(all_labels)
