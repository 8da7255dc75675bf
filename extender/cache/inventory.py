"""The inventory: the cards and devices that nodes report, with their ResourceClasses and the shares of deleted pods.

This module only records the reports; `reservations` decides which shares use capacity. Not thread-safe: the caller
holds the lock of `State`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.mpsprofile import reported_only_client
from cardwise.core.api.names import extended_resource_name
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE, ContainerShare
from extender.cache.membership import NO_CLASSES, CardClasses, ClassMembership
from extender.records.cards import CardRecord

# Limits of what one node may report: far above what nodes have, so that a hostile node cannot stop the extender.
MAX_REPORTED_SHARES = 4096  # shares of all its cards

# Cards whose classes are computed again in one hold of the lock: 4 ms, most of it for the changed nodes.
_CARDS_PER_HOLD: Final = 128


class ShareReport(NamedTuple):
    """A node's report about a pod: its containers still use cards of the node, although the pod object is gone."""

    uid: str
    node: str


class CardUpdate(NamedTuple):
    """The changes of a card's report.

    reported: the shares to count again: new and changed ones, and all shares of a card that was replaced or has
        left its node.
    withdrawn: the shares that the node no longer reports.
    problem: the ignored part of the report, with the reason; None if the whole report is used.
    """

    reported: Collection[ShareReport]
    withdrawn: Collection[ShareReport]
    problem: str | None


class Inventory:
    """Cards, devices and classes, by the names of their objects. Cards and devices are offered while their node
    exists.
    """

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._cards: dict[str, CardRecord] = {}
        self._cards_of: dict[str, list[str]] = {}  # node -> names in _cards
        self._node_reports, self._recorded_terminating = _ShareReports(), _ShareReports()
        self._changed: set[str] = set()  # nodes that changed since `take_changes`
        self._classes: dict[str, ResourceClass] = {}
        self._membership = ClassMembership(())
        self._members: dict[str, CardClasses] = {}  # by card, the classes that were last computed
        self._reclassify = False
        self._unclassified: list[str] = []  # the nodes for whose cards classes are to be computed again

    def set_node(self, name: str) -> None:
        """Offer the node's cards and devices from now on."""
        self.nodes.add(name)
        self._changed.add(name)

    def remove_node(self, name: str) -> None:
        """Stop offering the node's cards and devices."""
        self.nodes.discard(name)
        self._changed.add(name)

    def set_card(self, name: str, card: CardRecord) -> CardUpdate:
        """Update the card from its record. Returns what has changed."""
        card_before = self._cards.get(name)
        former: Collection[ShareReport] = ()
        if card_before is not None and card_before.node != card.node:
            # The former node no longer reports this card, but the containers there may still run.
            former, card_before = self.remove_card(name), None
        names = self._cards_of.get(card.node, [])
        if card_before is None and len(names) >= MAX_CARDS_PER_NODE:
            return CardUpdate(
                former, (), f"the node has more than {MAX_CARDS_PER_NODE} GPUs and devices; the rest is ignored"
            )
        problem: str | None = None
        capacity = MAX_REPORTED_SHARES - sum(
            len(self._cards[other].reported_shares) for other in names if other != name
        )
        if len(card.reported_shares) > capacity:
            card = card._replace(reported_shares=card.reported_shares[:capacity])
            problem = f"the node's GPUs report more than {MAX_REPORTED_SHARES} shares; the rest is ignored"
        self._cards[name] = card
        if card_before is None:
            self._cards_of.setdefault(card.node, names).append(name)
        if card_before is None or (card_before.card, card_before.labels) != (card.card, card.labels):
            self._changed.add(card.node)
        same = card_before is not None and card_before.card == card.card
        share_changes = self._node_reports.replace_report(
            name, card.node, card_before.reported_shares if card_before is not None else (), card.reported_shares
        )
        terminating_before = card_before.status.terminating if card_before is not None else ()
        self._recorded_terminating.replace_report(name, card.node, terminating_before, card.status.terminating)
        # If the card was replaced, or has another size, all its shares are counted again.
        updated = (
            share_changes.changed if same else {ShareReport(share.uid, card.node) for share in card.reported_shares}
        )
        return CardUpdate({*former, *updated}, share_changes.withdrawn, problem)

    def remove_card(self, name: str) -> Collection[ShareReport]:
        """Remove the card. Returns the shares that it had reported."""
        card = self._cards.get(name)
        if card is None:
            return ()
        self._forget_card(name)
        self._recorded_terminating.replace_report(name, card.node, card.status.terminating, ())
        return self._node_reports.replace_report(name, card.node, card.reported_shares, ()).withdrawn

    def has_card(self, name: str) -> bool:
        """Whether the watch has shown the card."""
        return name in self._cards

    def has_env_access(self, node: str, assignment: Assignment) -> bool:
        """Whether the node gives containers these cards by environment variables only, without CDI."""
        records = (self._cards.get(extended_resource_name(share.uuid)) for share in assignment.shares())
        return any(record is not None and record.node == node and record.env_access for record in records)

    def set_class(self, resource_class: ResourceClass) -> bool:
        """Update the class. Returns whether classes of cards may have changed; then `take_changes` returns these
        cards.
        """
        class_before = self._classes.get(resource_class.name)
        self._classes[resource_class.name] = resource_class
        if _selection_key(class_before) == _selection_key(resource_class):
            return False
        self._reclassify = True
        return True

    def remove_class(self, name: str) -> bool:
        """Remove the class. Returns whether the classes of cards may have changed."""
        if _selection_key(self._classes.pop(name, None)) is None:
            return False
        self._reclassify = True
        return True

    def take_changes(self) -> Iterator[tuple[str, list[Card], list[Device]]]:
        """The nodes whose cards or devices have changed since the last call, each with all its cards and devices.

        The classes of cards are computed here and not in `set_class`, because at startup hundreds of classes arrive
        together. One computation is enough for all of them. One call computes the classes of `_CARDS_PER_HOLD` cards:
        a class may contain 40,000 cards, and the caller holds the lock. See `has_unclassified_cards`.
        """
        if self._reclassify:
            self._reclassify = False
            self._membership = ClassMembership(self._classes.values(), known_classes=set(self._members.values()))
            self._unclassified = list(self._cards_of)
        card_count = 0
        while self._unclassified and card_count < _CARDS_PER_HOLD:
            node = self._unclassified.pop()
            names = self._cards_of.get(node, ())
            card_count += len(names)
            classes_of, known_members = self._membership.classes_of, self._members
            if any(classes_of(self._cards[name]) is not known_members.get(name) for name in names):
                self._changed.add(node)
        for node in self._changed:
            names = self._cards_of.get(node, ()) if node in self.nodes else ()
            cards: list[Card] = []
            devices: list[Device] = []
            for name in names:
                card_or_device = self._card_with_classes(name)
                if isinstance(card_or_device, Device):
                    devices.append(card_or_device)
                else:
                    cards.append(card_or_device)
            yield node, cards, devices
        self._changed.clear()

    @property
    def has_unclassified_cards(self) -> bool:
        """Whether classes have changed, and further calls of `take_changes` compute the classes of more cards."""
        return self._reclassify or bool(self._unclassified)

    def reported_nodes_by_uid(self) -> Mapping[str, Mapping[str, object]]:
        """For each pod UID that cards report: the nodes of these cards."""
        return self._node_reports.by_uid

    def is_reported(self, uid: str, node: str) -> bool:
        """Whether the report of any card of the node contains the pod."""
        return bool(self._node_reports.shares_of(uid, node))

    def reported_holding(self, uid: str, node: str) -> Holding | None:
        """All shares of the pod that the node's cards report, as one holding; None if they report none."""
        return self._sum_shares(uid, node, self._node_reports)

    def recorded_terminating_holding(self, uid: str, node: str) -> Holding | None:
        """The shares of a deleted pod, from the statuses of the node's cards, where a former leader recorded them; None
        if there are none.
        """
        return self._sum_shares(uid, node, self._recorded_terminating)

    def _sum_shares(self, uid: str, node: str, reports: "_ShareReports") -> Holding | None:
        """All shares of the pod in the reports of the node's cards, as one holding."""
        shares: dict[str, list[CardShare]] = {}
        devices: dict[str, list[AssignedDevice]] = {}
        namespace = name = ""
        for card_name, entries in sorted(reports.shares_of(uid, node).items()):
            card = self._cards[card_name].card
            for entry in entries:
                namespace, name, key = entry.namespace, entry.name, entry.container or "pod"
                if isinstance(card, Device):
                    devices.setdefault(key, []).append(AssignedDevice("", card.uuid))
                else:
                    share = CardShare(card.index, card.uuid, MiB(entry.mem), Percent(entry.core), card.mem, entry.whole)
                    shares.setdefault(key, []).append(share)
        if not shares and not devices:
            return None
        assigned = Assignment(
            {key: tuple(share_parts) for key, share_parts in shares.items()},
            {key: tuple(share_parts) for key, share_parts in devices.items()},
        )
        return Holding(uid, namespace, name, node, assigned, REPORTED_PHASE, reported_only_client(namespace))

    def _card_with_classes(self, name: str) -> Card | Device:
        """The card or device with its classes."""
        record = self._cards[name]
        card = record.card
        member = self._members[name] = self._membership.classes_of(record)
        if member is NO_CLASSES:
            return card
        if isinstance(card, Device):
            return replace(card, classes=member.classes)
        return Card(
            index=card.index,
            uuid=card.uuid,
            mem=card.mem,
            model=card.model,
            healthy=card.healthy,
            cordoned=card.cordoned,
            classes=member.classes,
            priority=member.priority,
            mps=card.mps,
            has_kernel_limit=card.has_kernel_limit,
        )

    def _forget_card(self, name: str) -> None:
        self._members.pop(name, None)
        node = self._cards.pop(name).node
        names = self._cards_of[node]
        names.remove(name)
        if not names:
            del self._cards_of[node]
        self._changed.add(node)


class _ShareChanges(NamedTuple):
    """The differences between two reports of a card.

    changed: the shares that are new or changed.
    withdrawn: the shares that are no longer reported.
    """

    changed: Collection[ShareReport]
    withdrawn: Collection[ShareReport]


class _ShareReports:
    """The reported shares, by pod. Replacing a report takes time in proportion to the report, not to the table."""

    def __init__(self) -> None:
        self.by_uid: dict[str, dict[str, dict[str, Sequence[ContainerShare]]]] = {}  # by pod UID, node and card name

    def shares_of(self, uid: str, node: str) -> Mapping[str, Sequence[ContainerShare]]:
        """The reported shares of a pod on a node, by the names of the cards."""
        return self.by_uid.get(uid, {}).get(node, {})

    def replace_report(
        self, name: str, node: str, shares_before: Iterable[ContainerShare], shares_now: Iterable[ContainerShare]
    ) -> _ShareChanges:
        """Replace the shares that the card reports."""
        former, current = _group_by_uid(shares_before), _group_by_uid(shares_now)
        changed = {uid: entries for uid, entries in current.items() if former.get(uid) != entries}
        for uid, entries in changed.items():
            self.by_uid.setdefault(uid, {}).setdefault(node, {})[name] = entries
        withdrawn = former.keys() - current.keys()
        for uid in withdrawn:
            nodes = self.by_uid[uid]
            del nodes[node][name]
            if not nodes[node]:
                del nodes[node]
            if not nodes:
                del self.by_uid[uid]
        return _ShareChanges(
            changed={ShareReport(uid, node) for uid in changed},
            withdrawn={ShareReport(uid, node) for uid in withdrawn},
        )


def _group_by_uid(shares: Iterable[ContainerShare]) -> dict[str, list[ContainerShare]]:
    by_uid: dict[str, list[ContainerShare]] = {}
    for share in shares:
        by_uid.setdefault(share.uid, []).append(share)
    return by_uid


def _selection_key(resource_class: ResourceClass | None) -> object:
    """The parts of a class that decide which cards it contains, and how these cards rank.

    None if the class has no object, or if its object is unedited. Such an object changes nothing: the class contains
    the cards of its model in any case.
    """
    return (
        None
        if resource_class is None or resource_class.untouched
        else (resource_class.selector, resource_class.priority, resource_class.other)
    )
