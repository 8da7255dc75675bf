"""What nodes report: their cards and devices, what vanished pods still hold on them, and the classes that they are in.

Apart from the state, which decides what of it counts: this only remembers, and knows nothing of live pods. Not
thread-safe: its owner locks.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from cardwise.core.assignment import Assignment, CardShare, DeviceShare
from cardwise.core.cards import Card
from cardwise.core.classes import DeviceClass
from cardwise.core.devices import Device
from cardwise.core.ledger import Holding
from cardwise.core.mpsplaces import UNKNOWN
from cardwise.core.quantity import MiB, Percent
from extender.membership import NO_MEMBER, Member, Membership
from extender.objects import CardRecord


class Inventory:
    """By the names of the ExtendedResources. Cards and devices count while their node exists."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._cards: dict[str, CardRecord] = {}
        self._cards_of: dict[str, set[str]] = {}  # node -> names in _cards
        self._held: dict[str, set[str]] = {}  # pod UID -> names in _cards that report it
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

    def set_card(self, name: str, card: CardRecord) -> tuple[Collection[str], Collection[str]]:
        """The card is so now. Returns the pods that it reports, and those that it does not report any more."""
        before = self._cards.get(name)
        if before is not None and before.node != card.node:
            self._forget(name)
        self._cards[name] = card
        self._cards_of.setdefault(card.node, set()).add(name)
        if before is None or (before.card, before.node, before.labels) != (card.card, card.node, card.labels):
            self._changed.add(card.node)
        reported = {held.uid for held in card.held}
        silent = {held.uid for held in before.held} - reported if before is not None else set()
        for uid in reported:
            self._held.setdefault(uid, set()).add(name)
        for uid in silent:
            self._unreport(uid, name)
        return reported, silent

    def remove_card(self, name: str) -> Collection[str]:
        """The card is no more. Returns the pods that it had reported."""
        card = self._cards.get(name)
        if card is None:
            return ()
        self._forget(name)
        gone = {held.uid for held in card.held}
        for uid in gone:
            self._unreport(uid, name)
        return gone

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

    def held(self) -> Collection[str]:
        """UIDs of all pods that a card reports."""
        return self._held.keys()

    def reported(self, uid: str) -> Holding | None:
        """What the cards report of a pod, each container's share by itself."""
        shares: list[CardShare] = []
        devices: list[DeviceShare] = []
        namespace = name = node = ""
        for card_name in sorted(self._held.get(uid, ())):
            record = self._cards[card_name]
            if node and record.node != node:
                continue  # no pod is on two nodes; whatever this is, the other report stands
            for held in record.held:
                if held.uid == uid:
                    namespace, name, node = held.namespace, held.name, record.node
                    card = record.card
                    if isinstance(card, Device):
                        devices.append(DeviceShare("", card.uuid))
                    else:
                        share = CardShare(
                            card.index, card.uuid, MiB(held.mem), Percent(held.core), card.mem, held.whole
                        )
                        shares.append(share)
        if not shares and not devices:
            return None
        reported = Assignment({"pod": tuple(shares)} if shares else {}, {"pod": tuple(devices)} if devices else {})
        return Holding(uid, namespace, name, node, reported, "held", UNKNOWN)

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

    def _unreport(self, uid: str, name: str) -> None:
        names = self._held.get(uid)
        if names is not None:
            names.discard(name)
            if not names:
                del self._held[uid]


def _by_which(one: DeviceClass) -> object:
    """What of a class says which cards are in it, and how they rank."""
    return one.selector, one.priority, one.other, one.untouched
