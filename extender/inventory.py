"""What nodes report: their cards and devices, what vanished pods still hold on them, and the classes that they are in.

Apart from the state, which decides what of it counts: this only remembers, and knows nothing of live pods. Not
thread-safe: its owner locks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from cardwise.core.assignment import Assignment, CardShare, DeviceShare
from cardwise.core.cards import Card
from cardwise.core.classes import DeviceClass
from cardwise.core.devices import Device
from cardwise.core.ledger import Holding
from cardwise.core.mpsplaces import UNKNOWN
from cardwise.core.quantity import MiB, Percent
from extender.membership import NO_MEMBER, Member, Membership
from extender.objects import CardRecord, HeldRecord


class Report(NamedTuple):
    """A node says that a pod still holds something of its cards, though the pod's object is gone."""

    uid: str
    node: str


class Inventory:
    """By the names of the ExtendedResources. Cards and devices count while their node exists."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._cards: dict[str, CardRecord] = {}
        self._cards_of: dict[str, set[str]] = {}  # node -> names in _cards
        self._held: dict[str, dict[str, set[str]]] = {}  # pod UID -> node -> names in _cards that report it
        self._changed: set[str] = set()  # nodes, since `changes`
        self._classes: dict[str, DeviceClass] = {}
        self._membership = Membership(())
        self._members: dict[str, Member] = {}  # of the names in _cards, as last told
        self._reclassify = False

    def set_node(self, name: str) -> None:
        self.nodes.add(name)
        self._changed.add(name)

    def remove_node(self, name: str) -> None:
        self.nodes.discard(name)
        self._changed.add(name)

    def set_card(self, name: str, card: CardRecord) -> tuple[Collection[Report], Collection[Report]]:
        """The card is so now. Returns what it reports, and what is not reported any more."""
        before = self._cards.get(name)
        gone: Collection[Report] = ()
        if before is not None and before.node != card.node:
            gone = self.remove_card(name)
        self._cards[name] = card
        self._cards_of.setdefault(card.node, set()).add(name)
        if before is None or (before.card, before.node, before.labels) != (card.card, card.node, card.labels):
            self._changed.add(card.node)
        reported = {Report(held.uid, card.node) for held in card.held}
        silent = {Report(held.uid, before.node) for held in before.held} - reported if before is not None else set()
        for uid, node in reported:
            self._held.setdefault(uid, {}).setdefault(node, set()).add(name)
        for report in silent.difference(gone):
            self._unreport(report, name)
        return reported, silent

    def remove_card(self, name: str) -> Collection[Report]:
        """The card is no more. Returns what it had reported."""
        card = self._cards.get(name)
        if card is None:
            return ()
        self._forget(name)
        gone = {Report(held.uid, card.node) for held in card.held}
        for report in gone:
            self._unreport(report, name)
        return gone

    def knows(self, name: str) -> bool:
        """Whether the card has been told."""
        return name in self._cards

    def set_class(self, one: DeviceClass) -> bool:
        """The class is so now; whether that may change what class a card is in. What it does is in `changes`."""
        before = self._classes.get(one.name)
        self._classes[one.name] = one
        if before is not None and _by_which(before) == _by_which(one):
            return False
        self._reclassify = True
        return True

    def remove_class(self, name: str) -> bool:
        """The class is no more; whether it was there."""
        if self._classes.pop(name, None) is None:
            return False
        self._reclassify = True
        return True

    def changes(self) -> Iterator[tuple[str, list[Card], list[Device]]]:
        """The nodes whose cards or devices are others than at the last call, with all of them.

        Classes come by the hundred at the start: which cards they select is found out once for all of them, here.
        """
        if self._reclassify:
            self._reclassify = False
            self._membership = Membership(self._classes.values(), known=set(self._members.values()))
            of, told = self._membership.of, self._members
            self._changed.update(
                record.node for name, record in self._cards.items() if of(record) is not told.get(name)
            )
        for node in self._changed:
            names = self._cards_of.get(node, ()) if node in self.nodes else ()
            cards: list[Card] = []
            devices: list[Device] = []
            for name in names:
                one = self._typed(name)
                if isinstance(one, Device):
                    devices.append(one)
                else:
                    cards.append(one)
            yield node, cards, devices
        self._changed.clear()

    def held(self) -> Mapping[str, Collection[str]]:
        """By UID of all pods that a card reports, the nodes of these cards."""
        return self._held

    def reports(self, uid: str, node: str) -> bool:
        """Whether a card of the node reports the pod."""
        return node in self._held.get(uid, ())

    def reported(self, uid: str, node: str) -> Holding | None:
        """What the node's cards report of a pod."""
        return self._summed(uid, node, lambda record: record.held)

    def terminating(self, uid: str, node: str) -> Holding | None:
        """What the extender before us has noted at the node's cards of a pod whose object is gone."""
        return self._summed(uid, node, lambda record: record.status.terminating)

    def _summed(self, uid: str, node: str, said: Callable[[CardRecord], Iterable[HeldRecord]]) -> Holding | None:
        """One holding of what is said of the pod at all cards of the node."""
        shares: dict[str, tuple[CardShare, ...]] = {}
        devices: dict[str, tuple[DeviceShare, ...]] = {}
        namespace = name = ""
        for record in (self._cards[card] for card in sorted(self._cards_of.get(node, ()))):
            for held in said(record):
                if held.uid != uid:
                    continue
                namespace, name, card, key = held.namespace, held.name, record.card, held.container or "pod"
                if isinstance(card, Device):
                    devices[key] = (*devices.get(key, ()), DeviceShare("", card.uuid))
                else:
                    share = CardShare(card.index, card.uuid, MiB(held.mem), Percent(held.core), card.mem, held.whole)
                    shares[key] = (*shares.get(key, ()), share)
        if not shares and not devices:
            return None
        return Holding(uid, namespace, name, node, Assignment(shares, devices), "held", UNKNOWN)

    def _typed(self, name: str) -> Card | Device:
        """The card or device with its classes."""
        record = self._cards[name]
        card = record.card
        member = self._members[name] = self._membership.of(record)
        if member is NO_MEMBER:
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
        )

    def _forget(self, name: str) -> None:
        self._members.pop(name, None)
        node = self._cards.pop(name).node
        names = self._cards_of[node]
        names.discard(name)
        if not names:
            del self._cards_of[node]
        self._changed.add(node)

    def _unreport(self, report: Report, name: str) -> None:
        nodes = self._held[report.uid]
        nodes[report.node].discard(name)
        if not nodes[report.node]:
            del nodes[report.node]
        if not nodes:
            del self._held[report.uid]


def _by_which(one: DeviceClass) -> object:
    """What of a class says which cards are in it, and how they rank."""
    return one.selector, one.priority, one.other, one.untouched
