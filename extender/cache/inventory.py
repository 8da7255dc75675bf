"""What nodes report: their cards and devices, what vanished pods still hold on them, and the classes that they are in.

It only remembers, and knows nothing of live pods; `reservations` decides what counts. Not thread-safe: the state
locks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from cardwise.core.api.assignment import Assignment, CardShare, DeviceShare
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.mpsprofile import UNKNOWN
from cardwise.core.api.names import extended_resource_name
from cardwise.core.placement.devices import Device
from cardwise.core.placement.ledger import Holding
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube.survey import MOST_CARDS
from extender.cache.membership import NO_CLASSES, CardClasses, ClassMembership
from extender.records.objects import CardRecord, HeldRecord

# The most that is believed of one node: far above what nodes have, so that a hostile node cannot stop the extender.
MOST_REPORTED = 4096  # shares, of all its cards
REPORTED: Final = "held"  # the mark of what the node reports of a pod that is gone


class Report(NamedTuple):
    """A node reports that a pod still holds some of its cards, though the pod object is gone."""

    uid: str
    node: str


class Heard(NamedTuple):
    """What has changed in a card's report: shares to look at again, because they are new or different, or because the
    card has left the node that had reported them; shares that its node reports no more; and what in it is not believed.
    """

    reported: Collection[Report]
    silent: Collection[Report]
    problem: str


class Inventory:
    """By the names of the ExtendedResources. Cards and devices count while their node exists."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._cards: dict[str, CardRecord] = {}
        self._cards_of: dict[str, list[str]] = {}  # node -> names in _cards
        self._held, self._noted = _Said(), _Said()
        self._changed: set[str] = set()  # nodes, since `changes`
        self._classes: dict[str, ResourceClass] = {}
        self._membership = ClassMembership(())
        self._members: dict[str, CardClasses] = {}  # of the names in _cards, as last told
        self._reclassify = False

    def set_node(self, name: str) -> None:
        self.nodes.add(name)
        self._changed.add(name)

    def remove_node(self, name: str) -> None:
        self.nodes.discard(name)
        self._changed.add(name)

    def set_card(self, name: str, card: CardRecord) -> Heard:
        """The card is so now."""
        before = self._cards.get(name)
        former: Collection[Report] = ()
        if before is not None and before.node != card.node:
            # The former node says nothing of this card any more. That does not prove that the containers are gone.
            former, before = self.remove_card(name), None
        names = self._cards_of.get(card.node, [])
        if before is None and len(names) >= MOST_CARDS:
            return Heard(former, (), f"the node has more than {MOST_CARDS} cards and devices; the others do not count")
        room, problem = MOST_REPORTED - sum(len(self._cards[each].held) for each in names if each != name), ""
        if len(card.held) > room:
            card = card._replace(held=card.held[:room])
            problem = f"the node's cards report more than {MOST_REPORTED} shares; the others do not count"
        self._cards[name] = card
        if before is None:
            self._cards_of.setdefault(card.node, names).append(name)
        if before is None or (before.card, before.labels) != (card.card, card.labels):
            self._changed.add(card.node)
        same = before is not None and before.card == card.card
        reported, gone = self._held.put(name, card.node, before.held if before is not None else (), card.held)
        last = before.status.terminating if before is not None else ()
        self._noted.put(name, card.node, last, card.status.terminating)
        # Of a card that is another one now, or has another size, all shares are looked at again.
        again = reported if same else {Report(held.uid, card.node) for held in card.held}
        return Heard({*former, *again}, gone, problem)

    def remove_card(self, name: str) -> Collection[Report]:
        """The card is no more. Returns what it had reported."""
        card = self._cards.get(name)
        if card is None:
            return ()
        self._forget(name)
        self._noted.put(name, card.node, card.status.terminating, ())
        return self._held.put(name, card.node, card.held, ())[1]

    def knows(self, name: str) -> bool:
        """Whether the watch has shown the card."""
        return name in self._cards

    def has_env_access(self, node: str, assignment: Assignment) -> bool:
        """Whether the node gives these cards by environment only, without CDI."""
        records = (self._cards.get(extended_resource_name(share.uuid)) for share in assignment.shares())
        return any(record is not None and record.node == node and record.env_access for record in records)

    def set_class(self, one: ResourceClass) -> bool:
        """The class is so now. Returns whether cards may be in other classes now; `changes` says which."""
        before = self._classes.get(one.name)
        self._classes[one.name] = one
        if _by_which(before) == _by_which(one):
            return False
        self._reclassify = True
        return True

    def remove_class(self, name: str) -> bool:
        """The class is no more. Returns whether cards may be in other classes now."""
        if _by_which(self._classes.pop(name, None)) is None:
            return False
        self._reclassify = True
        return True

    def changes(self) -> Iterator[tuple[str, list[Card], list[Device]]]:
        """The nodes whose cards or devices have changed since the last call, each with all its cards and devices.

        Classes come by the hundred at the start: which cards they select is found out here, once for all of them.
        """
        if self._reclassify:
            self._reclassify = False
            self._membership = ClassMembership(self._classes.values(), known=set(self._members.values()))
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

    def held(self) -> Mapping[str, Mapping[str, object]]:
        """The pods that cards report, by UID, each with the nodes of these cards."""
        return self._held.by_uid

    def reports(self, uid: str, node: str) -> bool:
        """Whether a card of the node reports the pod."""
        return bool(self._held.of(uid, node))

    def reported(self, uid: str, node: str) -> Holding | None:
        """What the node's cards report of a pod."""
        return self._summed(uid, node, self._held)

    def terminating(self, uid: str, node: str) -> Holding | None:
        """What a former leader has noted in the status of the node's cards for a pod whose object is gone."""
        return self._summed(uid, node, self._noted)

    def _summed(self, uid: str, node: str, said: "_Said") -> Holding | None:
        """What all cards of the node say of the pod, as one holding."""
        shares: dict[str, list[CardShare]] = {}
        devices: dict[str, list[DeviceShare]] = {}
        namespace = name = ""
        for where, entries in sorted(said.of(uid, node).items()):
            card = self._cards[where].card
            for held in entries:
                namespace, name, key = held.namespace, held.name, held.container or "pod"
                if isinstance(card, Device):
                    devices.setdefault(key, []).append(DeviceShare("", card.uuid))
                else:
                    share = CardShare(card.index, card.uuid, MiB(held.mem), Percent(held.core), card.mem, held.whole)
                    shares.setdefault(key, []).append(share)
        if not shares and not devices:
            return None
        assigned = Assignment(
            {key: tuple(each) for key, each in shares.items()}, {key: tuple(each) for key, each in devices.items()}
        )
        return Holding(uid, namespace, name, node, assigned, REPORTED, UNKNOWN)

    def _typed(self, name: str) -> Card | Device:
        """The card or device with its classes."""
        record = self._cards[name]
        card = record.card
        member = self._members[name] = self._membership.of(record)
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
        )

    def _forget(self, name: str) -> None:
        self._members.pop(name, None)
        node = self._cards.pop(name).node
        names = self._cards_of[node]
        names.remove(name)
        if not names:
            del self._cards_of[node]
        self._changed.add(node)


class _Said:
    """What cards say of pods, by pod: a new report costs its own length, however long the other reports are."""

    def __init__(self) -> None:
        self.by_uid: dict[str, dict[str, dict[str, Sequence[HeldRecord]]]] = {}  # and by node and name of the card

    def of(self, uid: str, node: str) -> Mapping[str, Sequence[HeldRecord]]:
        """By the names of cards."""
        return self.by_uid.get(uid, {}).get(node, {})

    def put(
        self, name: str, node: str, before: Iterable[HeldRecord], now: Iterable[HeldRecord]
    ) -> tuple[Collection[Report], Collection[Report]]:
        """The card says this, in place of what it said before. Returns what is new or different, and what is gone."""
        last, said = _grouped(before), _grouped(now)
        changed = {uid: entries for uid, entries in said.items() if last.get(uid) != entries}
        for uid, entries in changed.items():
            self.by_uid.setdefault(uid, {}).setdefault(node, {})[name] = entries
        silent = last.keys() - said.keys()
        for uid in silent:
            nodes = self.by_uid[uid]
            del nodes[node][name]
            if not nodes[node]:
                del nodes[node]
            if not nodes:
                del self.by_uid[uid]
        return {Report(uid, node) for uid in changed}, {Report(uid, node) for uid in silent}


def _grouped(said: Iterable[HeldRecord]) -> dict[str, list[HeldRecord]]:
    found: dict[str, list[HeldRecord]] = {}
    for one in said:
        found.setdefault(one.uid, []).append(one)
    return found


def _by_which(one: ResourceClass | None) -> object:
    """The parts of a class that say which cards are in it, and how they rank. None where its object says nothing: there
    is no object, or Cardwise wrote it, and then the cards of its model are in it anyway.
    """
    return None if one is None or one.untouched else (one.selector, one.priority, one.other)
