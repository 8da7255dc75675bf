"""The codec of an assignment: the cards and amounts of each container, and its devices, as pod annotations.

The annotations are the source of truth of every assignment (docs/architecture.md, State). Bind writes them, and all
readers use this module. Bind also writes gpushare's five annotations (gpushare-scheduler-extender `pkg/utils/pod.go`).
They are read only for pods of a former installation of gpushare.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import intern
from types import MappingProxyType
from typing import Any, NamedTuple

from cardwise.core.api import names
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MAX_MIB, MiB, Percent
from cardwise.core.values.wording import quote_text

_VERSION = 1
_GPUSHARE_KEY = "pod"  # gpushare's annotations describe the pod, not its containers
_MAX_NUMBER = 2**31 - 1  # the maximum of a card's index and of a percentage
_MIB_PER_GIB = 1024  # MiB. gpushare's default unit is GiB. A card has at least 1024 MiB, so a smaller size is in GiB.


class InvalidAssignment(ValueError):
    """Annotations without a readable assignment."""


@dataclass(frozen=True, slots=True)
class CardShare:
    """A share of one card: MiB, percent of its SMs, and the card's total MiB. `uuid` is "" for gpushare's pods.

    whole: the pod requested the whole card. `mem` does not show this, because the MiB of a whole card depend on the
        headroom at the time of allocation.
    """

    index: int
    uuid: str
    mem: MiB
    core: Percent
    total: MiB
    whole: bool = False

    def resolve_uuid(self, uuids: Mapping[int, str]) -> str | None:
        """The UUID of the share's card; None if the node reports no card with this index.

        uuids: the UUIDs of the node's cards, by index.
        """
        return self.uuid or uuids.get(self.index)


@dataclass(frozen=True, slots=True)
class AssignedDevice:
    """A device other than a GPU, which is always allocated as a whole, and its ResourceClass."""

    resource_class: str
    uuid: str


@dataclass(frozen=True, slots=True)
class CardUse:
    """The total of a pod's shares of one card.

    index, uuid: those of the card, as in `CardShare`.
    mem: MiB.
    core: percent of the card's SMs.
    shares: the number of shares.
    whole: the number of these shares that are the whole card: 0 or 1, unless the annotations are wrong.
    """

    index: int
    uuid: str
    mem: MiB
    core: Percent
    shares: int = 1
    whole: int = 0

    def add(self, share: CardShare) -> "CardUse":
        """The total with one more share of the card."""
        return CardUse(
            self.index,
            self.uuid,
            MiB(self.mem + share.mem),
            Percent(self.core + share.core),
            self.shares + 1,
            self.whole + share.whole,
        )


class CardDemand(NamedTuple):
    """A container's demand on one of its cards.

    card: the card's UUID; its index if the UUID is "".
    resource_class: "" for any card.
    several_cards: whether the container has several cards.
    whole: whether the container has the whole card.
    """

    card: str | int
    resource_class: str
    several_cards: bool
    whole: bool


# One shared object for all pods without devices, to save memory: a cluster has tens of thousands of assignments.
_NO_DEVICES: Mapping[str, tuple[AssignedDevice, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Assignment:
    """The cards and other devices of a pod, by container key."""

    containers: Mapping[str, tuple[CardShare, ...]]
    devices: Mapping[str, tuple[AssignedDevice, ...]] = field(default_factory=lambda: _NO_DEVICES)
    _card_uses: tuple[CardUse, ...] = field(default=(), init=False, repr=False, compare=False)
    # The result of `card_demands`, and the container requests for which it was computed.
    _card_demands: tuple[Sequence[ContainerRequest], Collection[CardDemand]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def is_gpushare(self) -> bool:
        """Whether gpushare wrote the annotations."""
        return _GPUSHARE_KEY in self.containers

    def shares(self) -> list[CardShare]:
        """All shares, container by container."""
        return [share for shares in self.containers.values() for share in shares]

    def card_uses(self) -> tuple[CardUse, ...]:
        """The shares summed by card.

        A pod may have a share in each of hundreds of containers, but has few cards. Sums of many pods are computed from
        the card uses, which are computed once.
        """
        if self._card_uses:
            return self._card_uses
        shares = self.shares()
        uses: dict[str | int, CardUse] = {}
        for share in shares:
            card = share.uuid or share.index
            use = uses.get(card)
            uses[card] = (
                use.add(share)
                if use is not None
                else CardUse(share.index, share.uuid, share.mem, share.core, 1, int(share.whole))
            )
        card_uses = tuple(uses.values())
        if len(shares) > 1:  # tens of thousands of pods have one share; storing a copy of it would only take memory
            object.__setattr__(self, "_card_uses", card_uses)
        return card_uses

    def card_demands(self, container_requests: Sequence[ContainerRequest]) -> Collection[CardDemand]:
        """The different demands of the pod's containers on their cards. Computed once for the same container requests.

        A gang has up to 500 pods with 48 containers each, and all of them are checked in one hold of the lock.

        container_requests: `PodRequest.containers`; do not change them.
        """
        if self._card_demands is not None and self._card_demands[0] is container_requests:
            return self._card_demands[1]
        class_by_key = {container.key: container.resource_class for container in container_requests}
        demands = {
            CardDemand(share.uuid or share.index, class_by_key.get(key, ""), len(shares) > 1, share.whole)
            for key, shares in self.containers.items()
            for share in shares
        }
        if len(self.containers) > 1 or len(demands) > 1:  # as for `card_uses`, to save memory
            object.__setattr__(self, "_card_demands", (container_requests, demands))
        return demands

    def non_gpu_devices(self) -> list[AssignedDevice]:
        """All devices other than GPUs, container by container."""
        return [share for shares in self.devices.values() for share in shares]

    def uuids(self) -> set[str]:
        """The UUIDs of the pod's cards and devices; empty for gpushare's pods."""
        cards = {share.uuid for share in self.shares() if share.uuid}
        return cards.union(share.uuid for share in self.non_gpu_devices())

    def excess_over(self, other: "Assignment") -> "Assignment | None":
        """The part of this assignment that exceeds `other`, by card and device; None if nothing does.

        A pod with two assignments on a node (etcd was restored from a backup) holds the first one and the excess of the
        second. The containers of only one assignment run, and the extender does not know which one.

        Example: 4096 MiB on card A and 8192 on B exceed 8192 on A and 4096 on B by 4096 MiB on B.

        For each card, the excess has the number of shares by which this assignment exceeds `other`. It has at least one
        share if MiB or percent exceed. The first of these shares has all additional MiB and percent.
        """
        other_uses = {use.uuid: use for use in other.card_uses()}
        excess = {
            use.uuid: _Excess.compute(use, other_uses[use.uuid])
            for use in self.card_uses()
            if use.uuid and use.uuid in other_uses
        }
        containers: dict[str, tuple[CardShare, ...]] = {}
        for key, shares in self.containers.items():
            for share in shares:
                excess_share = share
                if share.uuid in excess:
                    mem, core, count = excess[share.uuid]
                    if not count:
                        continue
                    excess_share = replace(share, mem=mem, core=core, whole=False)
                    excess[share.uuid] = _Excess(MiB(0), Percent(0), count - 1)
                containers[key] = (*containers.get(key, ()), excess_share)
        known = {share.uuid for share in other.non_gpu_devices()}
        devices = {
            key: tuple(share for share in shares_of_key if share.uuid not in known)
            for key, shares_of_key in self.devices.items()
        }
        remaining = Assignment(
            containers, {key: shares_of_key for key, shares_of_key in devices.items() if shares_of_key}
        )
        return remaining if remaining.containers or remaining.devices else None

    @property
    def mem(self) -> MiB:
        """MiB held on all cards."""
        return MiB(sum(share.mem for share in self.shares()))

    def indices(self) -> list[int]:
        """The cards' indices, each once, in ascending order."""
        return sorted({share.index for share in self.shares()})


class _Excess(NamedTuple):
    """The amounts by which one assignment exceeds another one on one card: MiB, percent of the SMs, and shares."""

    mem: MiB
    core: Percent
    shares: int

    @classmethod
    def compute(cls, use: CardUse, other: CardUse) -> "_Excess":
        mem, core = MiB(max(0, use.mem - other.mem)), Percent(max(0, use.core - other.core))
        return cls(mem, core, max(int(mem > 0 or core > 0), use.shares - other.shares))


def fraction(limit: MiB, total: MiB) -> str:
    """Limit / total, rounded down to 4 decimal places: a framework must not take more than its share."""
    ten_thousandths = limit * 10_000 // total
    return f"{ten_thousandths // 10_000}.{ten_thousandths % 10_000:04d}"


def per_card_limit(shares: tuple[CardShare, ...]) -> tuple[MiB, str]:
    """The container's memory limit in MiB and as a fraction of a card. Both apply to each of the container's cards, so
    both are computed from the smallest share.
    """
    tightest = min(shares, key=lambda share: share.mem * 10_000 // share.total)
    return MiB(min(share.mem for share in shares)), fraction(tightest.mem, tightest.total)


def encode(assignment: Assignment, *, assume_time_ns: int, env_access: bool = False) -> dict[str, str]:
    """The annotations of a Binding.

    `assume_time_ns`: UnixNano, as in gpushare's annotation.
    `env_access`: the node gives cards by NVIDIA_VISIBLE_DEVICES, whose value comes from these annotations.
    With CDI the variable must name no card. The kubelet forgets the devices of a pod that was deleted by force, and may
    start its container without the CDI device. NVIDIA's runtime would then give the container the whole card.
    """
    annotations = {names.ASSIGNMENT: json.dumps(encode_document(assignment), separators=(",", ":"))}
    shares = assignment.shares()
    if shares:
        annotations |= {
            names.IDX: ",".join(map(str, assignment.indices())),
            names.POD_MEM: str(assignment.mem),
            names.DEV_MEM: str(shares[0].total),
            names.ASSIGNED: "false",
            names.ASSUME_TIME: str(assume_time_ns),
        }
    if len(assignment.indices()) > 1:
        annotations[names.GPUSHARE_ALLOCATION] = _encode_framework(assignment)
    for key, shares_of in assignment.containers.items():
        limit, card_fraction = per_card_limit(shares_of)
        visible = ",".join(share.uuid for share in shares_of) if env_access else names.NO_CARDS
        annotations[names.DEVICES_OF + key] = visible
        annotations[names.LIMIT_MIB_OF + key] = str(limit)
        annotations[names.FRACTION_OF + key] = card_fraction
        annotations[names.LIMIT_BYTES_OF + key] = str(limit * 1024 * 1024)
    return annotations


def encode_document(assignment: Assignment) -> Json:
    """The assignment as decoded JSON: the value of the annotation, and the parameters of a ResourceClaim."""
    document: Json = {
        "v": _VERSION,
        "containers": {
            key: [_encode_share(share) for share in shares_of] for key, shares_of in assignment.containers.items()
        },
    }
    if assignment.devices:
        document["devices"] = {
            key: [[share.resource_class, share.uuid] for share in shares_of]
            for key, shares_of in assignment.devices.items()
        }
    return document


def _encode_share(share: CardShare) -> list[int | str]:
    """A share as a list of five elements. A whole card has a sixth one, 1."""
    fields: list[int | str] = [share.index, share.uuid, share.mem, share.core, share.total]
    return [*fields, 1] if share.whole else fields


def _encode_framework(assignment: Assignment) -> str:
    """Encode an assignment of several cards in the format of Alibaba's framework version of gpushare. gpushare's
    `inspect` command reads it.
    """
    by_container: dict[int, dict[str, int]] = {}
    for position, shares in enumerate(assignment.containers.values()):
        by_container[position] = {str(share.index): share.mem for share in shares}
    return json.dumps(by_container, separators=(",", ":"))


def decode(annotations: Mapping[str, str], *, loads: Callable[[str], Any] = json.loads) -> Assignment | None:
    """The assignment in a pod's annotations; None if they contain none. Raises InvalidAssignment.

    loads: the JSON decoder; callers with thousands of pods pass a faster one. Like `json.loads` it must raise
        ValueError, and RecursionError for text that is nested too deeply.
    """
    text = annotations.get(names.ASSIGNMENT)
    if text is not None:
        try:
            document = loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidAssignment(f"{names.ASSIGNMENT} is unreadable: {quote_text(text)}") from error
        return decode_document(document, names.ASSIGNMENT, text)
    if names.GPUSHARE_ALLOCATION in annotations:
        assignment = _decode_framework(annotations)
    elif names.IDX in annotations:
        assignment = _decode_gpushare(annotations)
    else:
        return None
    _check_limits(assignment)
    return assignment


def _check_limits(assignment: Assignment) -> None:
    if any(share.mem > MAX_MIB or share.total > MAX_MIB for share in assignment.shares()):
        raise InvalidAssignment("a share has more MiB than any GPU")
    if any(share.index > _MAX_NUMBER or share.core > _MAX_NUMBER for share in assignment.shares()):
        raise InvalidAssignment("a share has an index or percent beyond those of any GPU")


def decode_document(document: Any, source: str, text: str = "") -> Assignment:
    """The assignment that `encode_document` has written. Raises InvalidAssignment.

    document: decoded JSON of any form.
    source: where the document was found, for the message.
    text: the document as found, which the message quotes.
    """
    try:
        if document["v"] != _VERSION:
            raise InvalidAssignment(f"{source} has version {quote_text(document['v'])}, this program reads {_VERSION}")
        containers = {
            _get_text(key): tuple(_decode_share(*share) for share in shares)
            for key, shares in document["containers"].items()
        }
        devices = _decode_devices(document["devices"]) if "devices" in document else _NO_DEVICES
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidAssignment):
            raise
        raise InvalidAssignment(f"{source} is unreadable" + (f": {quote_text(text)}" if text else "")) from error
    if not (containers or devices) or not all(containers.values()) or not all(devices.values()):
        raise InvalidAssignment(f"{source} names no GPU")
    assignment = Assignment(containers, devices)
    _check_limits(assignment)
    return assignment


def _get_text(text: str) -> str:
    """Return the shared copy of this text in memory. Raises ValueError for half of a surrogate pair: JSON can contain
    it as an escape, but UTF-8 cannot encode it, so no file or message could contain the text.
    """
    if not text.isascii():
        text.encode()
    return intern(text)


def _decode_share(index: int, uuid: str, mem: int, core: int, total: int, *whole_flag: int) -> CardShare:
    integers = type(index) is type(mem) is type(core) is type(total) is int
    if not integers or index < 0 or core < 0 or mem <= 0 or total <= 0:
        raise InvalidAssignment(f"a share of {(index, mem, core, total)} is impossible")
    if whole_flag and whole_flag not in ((0,), (1,)):
        raise InvalidAssignment(f"a share that ends in {whole_flag} is unknown")
    is_whole = whole_flag == (1,)
    return CardShare(
        index, _get_text(uuid), quantity.shared_mib(mem), Percent(core), quantity.shared_mib(total), is_whole
    )


def _decode_devices(encoded: Mapping[str, list[list[str]]]) -> dict[str, tuple[AssignedDevice, ...]]:
    return {_get_text(key): tuple(_decode_device(*share) for share in shares) for key, shares in encoded.items()}


def _decode_device(resource_class: str, uuid: str) -> AssignedDevice:
    if not (resource_class and uuid):
        raise InvalidAssignment("a device without a class or a UUID is impossible")
    return AssignedDevice(_get_text(resource_class), _get_text(uuid))


def _decode_gpushare(annotations: Mapping[str, str]) -> Assignment:
    try:
        index, mem = int(annotations[names.IDX]), int(annotations[names.POD_MEM])
        total, unit = int(annotations.get(names.DEV_MEM, mem)), _gpushare_unit(annotations)
    except (KeyError, ValueError) as error:
        raise InvalidAssignment(f"{names.IDX} and {names.POD_MEM} are not numbers") from error
    if index < 0 or mem <= 0:
        raise InvalidAssignment(f"{names.IDX}={index}, {names.POD_MEM}={mem}: no GPU was found by gpushare")
    share = CardShare(index, "", MiB(mem * unit), Percent(0), MiB(max(total, mem) * unit))
    return Assignment({_GPUSHARE_KEY: (share,)})


def _gpushare_unit(annotations: Mapping[str, str]) -> int:
    """The number of MiB in one unit of gpushare's amounts: 1 or 1024, derived from the size of the pod's card. Raises
    ValueError.
    """
    return _MIB_PER_GIB if 0 < int(annotations.get(names.DEV_MEM, 0)) < _MIB_PER_GIB else 1


def _decode_framework(annotations: Mapping[str, str]) -> Assignment:
    """Decode the annotation of Alibaba's framework version of gpushare: {"<container>": {"<card>": MiB}}."""
    by_card: dict[int, int] = {}
    try:
        unit = _gpushare_unit(annotations)
        for cards in json.loads(annotations[names.GPUSHARE_ALLOCATION]).values():
            for index, mem in cards.items():
                by_card[int(index)] = by_card.get(int(index), 0) + int(mem) * unit
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidAssignment(f"{names.GPUSHARE_ALLOCATION} is unreadable") from error
    shares = tuple(
        CardShare(index, "", MiB(mem), Percent(0), MiB(mem)) for index, mem in sorted(by_card.items()) if mem > 0
    )
    if not shares:
        raise InvalidAssignment(f"{names.GPUSHARE_ALLOCATION} names no GPU")
    return Assignment({_GPUSHARE_KEY: shares})
