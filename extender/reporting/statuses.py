"""Computes the desired statuses of ExtendedResources, ResourceClasses and GPUQuotas from the ledger.

Pure. The totals are computed node by node. So the state is locked only for a few nodes at a time, and after a bind only
the totals of the pod's node are computed again. `statuswriter` writes the statuses that differ. It also finds the
cards whose counts in the ledger are inconsistent.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from cardwise.core.api import names, quotas
from cardwise.core.api.quotas import Charge, QuotaEntry
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.kube.objects.extendedresources import Allocated, ContainerShare, ExtenderStatus
from cardwise.kube.objects.gpuquotas import QuotaRecord
from cardwise.kube.objects.resourceclasses import ClassRecord
from extender.cache.reservations import PHASE_NAMES, Phase

_MAX_CLASSES = 1024  # maximum number of classes in a card's status, by the schema
_DELETED_POD_PHASES = (PHASE_NAMES[Phase.TERMINATING], REPORTED_PHASE)  # the phases of shares whose pods are deleted
_MAX_SUMMARY_CHARACTERS = 32_768  # maximum number of characters of a summary, by the schema
CLASS_NOT_FOUND = "ResourceClassNotFound"  # the reason of a condition, and of the event

_MAX_NAMED_CLASSES = 10  # maximum number of existing classes that a message names


class CardSums(NamedTuple):
    """Sums over some cards: numbers of cards, and memory in MiB."""

    cards: int = 0
    healthy: int = 0
    memory: int = 0
    used: int = 0
    free: int = 0

    def add(self, other: "CardSums") -> "CardSums":
        return CardSums(*map(operator.add, self, other))

    def subtract(self, other: "CardSums") -> "CardSums":
        return CardSums(*map(operator.sub, self, other))


class Disagreement(StrEnum):
    """How the ledger and the cluster disagree on a card."""

    STATUS = "status"  # its ExtendedResource has other allocated MiB than the ledger
    TOTAL = "total"  # the running total, which placement uses, is not the sum of the shares
    OVERCOMMITTED = "overcommitted"  # the shares exceed the card
    MISSING = "missing"  # a share is on a card that its node does not have


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """The totals of one node's cards and devices.

    cards: the status of each card, by the name of its ExtendedResource.
    sums: the sums of cards, by the set of their classes.
    wrong: the cards on which the ledger is inconsistent.
    """

    cards: Mapping[str, ExtenderStatus] = field(default_factory=dict)
    sums: Mapping[frozenset[str], CardSums] = field(default_factory=dict)
    wrong: Collection[tuple[str, Disagreement]] = ()


def compute_node_totals(ledger: Ledger, node: str) -> NodeTotals:
    """Compute the totals of the node's cards and devices from the ledger.

    Includes a card that only holdings name, without capacity and classes.
    """
    state = ledger.node(node)
    if state is None:
        return NodeTotals()
    allocations = _allocations_by_uuid(ledger, node, {card.index: card.uuid for card in state.cards})
    cards: dict[str, ExtenderStatus] = {}
    sums: dict[frozenset[str], CardSums] = {}
    wrong: list[tuple[str, Disagreement]] = []
    for i, card in enumerate(state.cards):
        free = state.free_mib(i)
        allocated = allocations.pop(card.uuid, _Allocation())
        name = names.extended_resource_name(card.uuid)
        cards[name] = allocated.make_status(free, _sorted_classes(card.classes))
        if allocated.memory != state.used[i]:
            wrong.append((name, Disagreement.TOTAL))
        if allocated.memory > card.mem:
            wrong.append((name, Disagreement.OVERCOMMITTED))
        sums_of_card = CardSums(1, int(card.healthy), card.mem, allocated.memory, free)
        sums_before = sums.get(card.classes)
        sums[card.classes] = sums_of_card if sums_before is None else sums_before.add(sums_of_card)
    for device in state.devices:
        allocated = allocations.pop(device.uuid, _Allocation())
        cards[names.extended_resource_name(device.uuid)] = allocated.make_status(0, _sorted_classes(device.classes))
        sums[device.classes] = sums.get(device.classes, CardSums()).add(CardSums(1, int(device.healthy)))
    for uuid, allocated in allocations.items():
        name = names.extended_resource_name(uuid)
        cards[name] = allocated.make_status(0, ())
        wrong.append((name, Disagreement.MISSING))
    return NodeTotals(cards, sums, wrong)


@dataclass(slots=True)
class _Allocation:
    """The running totals of one card or device."""

    memory: int = 0
    core: int = 0
    shares: int = 0
    whole: bool = False
    pods: int = 0
    terminating: tuple[ContainerShare, ...] = ()

    def make_status(self, free: int, classes: tuple[str, ...]) -> ExtenderStatus:
        allocated = Allocated(self.memory, self.core, self.shares, self.whole, self.pods)
        return ExtenderStatus(allocated, free, classes, self.terminating)


NOTHING_ALLOCATED = _Allocation().make_status(0, ())


def _allocations_by_uuid(ledger: Ledger, node: str, uuid_of: Mapping[int, str]) -> dict[str, _Allocation]:
    """The allocation of each card or device, by its UUID."""
    allocations: dict[str, _Allocation] = defaultdict(_Allocation)
    for holding in ledger.holdings(node):
        counted_devices = set()
        own_uuid_of = uuid_of if holding.node == node else {}
        for share in holding.assignment.shares():
            uuid = share.resolve_uuid(own_uuid_of)
            if not uuid or not ledger.counts_on(node, holding, uuid):
                continue  # a card that no node reports, of a pod of gpushare; or a card that has moved to another node
            allocation = allocations[uuid]
            allocation.memory += share.mem
            allocation.core += share.core
            allocation.shares += 1
            allocation.whole |= share.whole
            allocation.pods += uuid not in counted_devices
            counted_devices.add(uuid)
        for device in holding.assignment.non_gpu_devices():
            if not ledger.counts_on(node, holding, device.uuid):
                continue
            allocation = allocations[device.uuid]
            allocation.shares += 1
            allocation.whole = True
            allocation.pods += 1
        if holding.phase_name in _DELETED_POD_PHASES and holding.charged:
            for uuid, record in _terminating_shares(holding, own_uuid_of):
                if ledger.counts_on(node, holding, uuid):
                    allocations[uuid].terminating += (record,)
    return allocations


def _terminating_shares(holding: Holding, uuid_of: Mapping[int, str]) -> Iterator[tuple[str, ContainerShare]]:
    """The shares of a deleted pod: one for each container, with the UUID of its card or device."""
    pod = holding.uid, holding.namespace, holding.name
    for key, shares in holding.assignment.containers.items():
        for share in shares:
            if uuid := share.resolve_uuid(uuid_of):
                yield uuid, ContainerShare(*pod, share.mem, share.core, share.whole, key)
    for key, devices in holding.assignment.devices.items():
        for device in devices:
            yield device.uuid, ContainerShare(*pod, 0, 0, True, key)


@lru_cache(maxsize=4096)
def _sorted_classes(classes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(classes))[:_MAX_CLASSES]


class ClassSums:
    """The sums of each class over all nodes."""

    def __init__(self) -> None:
        self._of_node: dict[str, Mapping[frozenset[str], CardSums]] = {}
        self._cards: dict[str, CardSums] = {}  # by class
        self._nodes: dict[str, int] = {}

    def set_node(self, node: str, sums: Mapping[frozenset[str], CardSums]) -> set[str]:
        """Replace the sums of the node. Returns the classes whose sums have changed."""
        sums_before = self._of_node.get(node, {})
        if sums == sums_before:
            return set()
        if sums:
            self._of_node[node] = sums
        else:
            del self._of_node[node]
        for name in set().union(*sums_before):
            self._nodes[name] -= 1
        for name in set().union(*sums):
            self._nodes[name] = self._nodes.get(name, 0) + 1
        changed = sums_before.keys() | sums.keys()
        for classes in changed:
            change = sums.get(classes, CardSums()).subtract(sums_before.get(classes, CardSums()))
            for name in classes:
                self._cards[name] = self._cards.get(name, CardSums()).add(change)
        affected: set[str] = set().union(*changed)
        for name in affected:
            if not self._cards[name].cards:
                del self._cards[name], self._nodes[name]
        return affected

    def nodes(self) -> set[str]:
        """The nodes whose sums are included and that have cards."""
        return set(self._of_node)

    def sums_of(self, name: str) -> tuple[CardSums, int]:
        """The sums of the class, and the number of its nodes."""
        return self._cards.get(name, CardSums()), self._nodes.get(name, 0)


def card_status(status: ExtenderStatus) -> Json:
    """The extender's part of an ExtendedResource's status as JSON."""
    written: Json = msgspec.to_builtins(status)
    return written | {"terminating": [share.to_json() for share in status.terminating] or None}


def class_status(record: ClassRecord, cards: CardSums, nodes: int) -> Json:
    """The status of a ResourceClass as JSON, without times. A class of other devices than GPUs has no memory."""
    status: Json = {
        "devices": cards.cards,
        "healthyDevices": cards.healthy,
        "nodes": nodes,
        "conditions": [_valid_condition(record.problem, record.generation)],
    }
    if record.resource_class is None or not record.resource_class.other:
        status |= {"memoryMiB": cards.memory, "usedMiB": cards.used, "freeMiB": cards.free}
    return status | {"problem": wording.sanitize_message(record.problem)} if record.problem else status


def quota_status(
    record: QuotaRecord, used: Iterable[Charge], classes: Mapping[str, ClassRecord], automatic: Collection[str]
) -> Json:
    """The status of a GPUQuota as JSON, without times.

    used: the used amounts of each entry, in the order of spec.hard.
    classes: all ResourceClasses, by name.
    automatic: the automatic classes of present models. Such a class exists even if its object is missing or unreadable.
    """
    if record.quota is None:
        unknown_condition = _make_condition(
            "Exceeded", "Unknown", "Unreadable", "usage is not counted", record.generation
        )
        return {"conditions": [unknown_condition, _valid_condition(record.problem, record.generation)]}
    charges = list(zip(record.quota.entries, used, strict=True))
    excess_by_entry = [(entry, _exceeded_amounts(entry, charge)) for entry, charge in charges]
    exceeded_entries = [
        f"{quotas.entry_title(entry)}: {', '.join(amounts)}" for entry, amounts in excess_by_entry if amounts
    ]
    if exceeded_entries:
        text = f"{'; '.join(exceeded_entries)}; running pods keep their GPUs, new pods wait"
        exceeded = _make_condition("Exceeded", "True", "LimitExceeded", text, record.generation)
    else:
        exceeded = _make_condition("Exceeded", "False", "WithinLimits", "usage is within all limits", record.generation)
    return {
        "used": [_entry_status(entry, charge) for entry, charge in charges],
        "summary": wording.sanitize_message(
            "; ".join(_usage_summary(entry, charge, classes, automatic) for entry, charge in charges),
            _MAX_SUMMARY_CHARACTERS,
        ),
        "conditions": [exceeded, _classes_condition(record, classes, automatic)],
    }


def _exceeded_amounts(entry: QuotaEntry, used: Charge) -> list[str]:
    """Texts for people about the amounts that exceed the limits of the entry."""
    return [
        f"{limit.used} {limit.unit} used, {limit.hard} allowed"
        for limit in quotas.entry_limits(entry, used)
        if limit.used > limit.hard
    ]


def new_missing_class_text(status: Json, current: Json) -> str | None:
    """The text about a missing class, if the desired status of a quota has this text and the current status does
    not.
    """
    if _valid_reason(current) == CLASS_NOT_FOUND:
        return None
    return next(
        (condition["message"] for condition in status["conditions"] if condition["reason"] == CLASS_NOT_FOUND), None
    )


def _valid_reason(status: Json) -> str | None:
    return next(
        (condition.get("reason") for condition in status.get("conditions") or () if condition.get("type") == "Valid"),
        None,
    )


def is_same_status(new_status: Json, current: Json) -> bool:
    """Whether the two statuses are equal; times are ignored."""
    conditions = [
        {key: content for key, content in condition.items() if key != "lastTransitionTime"}
        for condition in current.get("conditions") or ()
    ]
    return new_status == (current | {"conditions": conditions} if "conditions" in current else current)


def make_status_patch(new_status: Json, current: Json, now: str) -> Json:
    """The merge patch from the current status to the new status, with times. An unchanged condition keeps its time."""
    since = {
        (condition.get("type"), condition.get("status")): condition.get("lastTransitionTime")
        for condition in current.get("conditions") or ()
    }
    conditions = [
        condition | {"lastTransitionTime": since.get((condition["type"], condition["status"])) or now}
        for condition in new_status["conditions"]
    ]
    return dict.fromkeys(current) | new_status | {"conditions": conditions}


def _valid_condition(problem: str | None, generation: int) -> Json:
    if problem is not None:
        return _make_condition("Valid", "False", "Unreadable", problem, generation)
    return _make_condition("Valid", "True", "Readable", "the spec is valid", generation)


def _classes_condition(record: QuotaRecord, classes: Mapping[str, ClassRecord], automatic: Collection[str]) -> Json:
    """The condition Valid of a quota: False if the class of an entry does not exist or cannot be read."""
    entries = record.quota.entries if record.quota is not None else ()
    for i, entry in enumerate(entries):
        name, field_name = entry.resource_class, f"spec.hard[{i}].class"
        if not name or name in automatic:
            continue
        if name not in classes:
            known_names = ", ".join(sorted(classes)[:_MAX_NAMED_CLASSES]) + (
                ", ..." if len(classes) > _MAX_NAMED_CLASSES else ""
            )
            text = f"{field_name}: ResourceClass {name} does not exist, so the entry limits nothing"
            text = f"{text}; existing classes: {known_names}" if known_names else text
            return _make_condition("Valid", "False", CLASS_NOT_FOUND, text, record.generation)
        if classes[name].problem:
            text = f"{field_name}: ResourceClass {name} is invalid and selects no GPU: {classes[name].problem}"
            return _make_condition("Valid", "False", "UnreadableClass", text, record.generation)
    return _valid_condition(None, record.generation)


def _make_condition(kind: str, status: str, reason: str, message: str, generation: int) -> Json:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": wording.sanitize_message(message),
        "observedGeneration": generation,
    }


def _usage_summary(
    entry: QuotaEntry, used: Charge, classes: Mapping[str, ClassRecord], automatic: Collection[str]
) -> str:
    name = entry.resource_class
    if name and name not in automatic and (name not in classes or classes[name].problem):
        # No amounts, because they would suggest that the entry limits pods.
        return f"{name}: {'unreadable class' if name in classes else 'no such class'}"
    amounts = ", ".join(f"{limit.used}/{limit.hard} {limit.unit}" for limit in quotas.entry_limits(entry, used))
    return f"{quotas.entry_title(entry)}: {amounts}"


def _entry_status(entry: QuotaEntry, used: Charge) -> dict[str, Any]:
    return quotas.entry_selection(entry) | quotas.to_fields(used) | {"hard": quotas.to_fields(entry)}
