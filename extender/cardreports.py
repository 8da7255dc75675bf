"""Passes the ExtendedResources of a watch to a handler, and limits for each node how many changes are passed on.

Each new share in a card's report costs work under the lock that scheduling needs. A node that an attacker controls can
write hundreds of new shares many times a second. Without a limit the watch would fall behind, and the extender would
receive the reports of all nodes late.

Theory of operation. Each node has credit for `_MAX_CREDIT_SHARES` shares, and regains `_SHARES_PER_SECOND`. While the
node has credit, its changes are handed over at once, in the reflector's thread. Without credit, the newest object of
each of its cards waits. `hand_over_waiting`, called several times a second, hands over one card of each node in turn as
the node regains credit. At most one object waits for each card. A cordon is handed over at once in any case: only
people write cordons, so there are few. Other changes of a node without credit may be late. This affects only the node's
own cards, so scheduling continues.

Example: a node writes 20 reports a second, each with 512 new shares. A report costs 1,025: 1, and 1 for each share that
is new or gone. So 4 of the reports are handed over at once, and then one in 5 seconds. The reports of other nodes are
not delayed.
Reports of a correct node never wait: such a node has at most some hundred shares, and few of them change in a second.
"""

import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

import structlog

from cardwise.clock import Clock
from cardwise.kube.watch.reflector import Handler
from extender.records.cards import CardRecord

_log = structlog.get_logger(__name__)

# Shares. The burst is as large as a node's report may be (`inventory.MAX_REPORTED_SHARES`). A share takes about 30 us,
# so 200 shares a second take less than a hundredth of a core.
_MAX_CREDIT_SHARES: Final = 4096.0
_SHARES_PER_SECOND: Final = 200.0


@dataclass(slots=True)
class _Credit:
    """The credit of a node, in shares, at time `updated_at`. Below 0 after a report that cost more than the credit."""

    shares: float
    updated_at: float


class CardReports:
    """Limits the reports of each node. The reflector of ExtendedResources has this object as its handler.

    handler: receives the reports.
    """

    def __init__(self, handler: Handler[CardRecord], clock: Clock) -> None:
        self._handler = handler
        self._clock = clock
        # Held while the handler works, so that the objects of a card are handed over in their order.
        self._lock = threading.Lock()
        self._synced = False
        self._credits: dict[str, _Credit] = {}  # the credits of nodes without full credit
        self._shares: Counter[str] = Counter()  # the number of shares on all cards of a node, as handed over
        # By card, the object that was handed over last; a newer object may wait.
        self._handed: dict[str, CardRecord] = {}
        # For cards that were never handed over successfully: by card, the object on which the handler failed. The
        # handler may have processed a part of it.
        self._half_taken: dict[str, CardRecord] = {}
        # By node and card, the newest object that waits; None if the card was deleted.
        self._waiting: dict[str, dict[str, CardRecord | None]] = {}
        self._node_of: dict[str, str] = {}  # by card with a waiting object: its node

    def on_change(self, key: str, old: CardRecord | None, new: CardRecord) -> None:  # noqa: ARG002 - see `_handed`
        with self._lock:
            self._receive_report(key, new.node, new)

    def on_delete(self, key: str, old: CardRecord) -> None:
        with self._lock:
            self._receive_report(key, old.node, None)

    def on_synced(self) -> None:
        self._synced = True
        self._handler.on_synced()

    def hand_over_waiting(self) -> None:
        """Hand over the waiting objects of nodes that have credit now, one card of each node in turn.

        Passes on exceptions of the handler.
        """
        has_more = True
        while has_more:
            has_more = False
            for node in list(self._waiting):
                with self._lock:
                    if node in self._waiting and self._update_credit(node) > 0:
                        has_more = True
                        self._hand_over_next(node)
        with self._lock:
            for node in list(self._credits):
                self._update_credit(node)  # removes nodes with full credit from the table

    def _receive_report(self, key: str, node: str, new: CardRecord | None) -> None:
        """Hand over the object, or let it wait if its node has no credit.

        node: the node of the object; if the card was deleted, the node of its last object.
        """
        if key in self._node_of:
            if node == self._node_of[key]:
                self._waiting[node][key] = new
                self._hand_over_cordon(key, new)
                return
            self._dequeue_report(key)  # the card has moved to another node
        if not self._synced or (node not in self._waiting and self._update_credit(node) > 0):
            self._hand_over(key, new)
            return
        if node not in self._waiting:
            _log.warning("a node reports too often; reading only the newest report of each card", node=node)
        self._queue_report(node, key, new)
        self._hand_over_cordon(key, new)

    def _hand_over_cordon(self, key: str, newest: CardRecord | None) -> None:
        """If the waiting object cordons the card, hand over the cordon now, without the object's other changes."""
        handed = self._handed.get(key)
        if handed is None or newest is None or handed.card.cordoned or not newest.card.cordoned:
            return
        self._hand_over(key, handed._replace(card=replace(handed.card, cordoned=True)))

    def _hand_over_next(self, node: str) -> None:
        key, newest = next(iter(self._waiting[node].items()))
        self._dequeue_report(key)
        try:
            self._hand_over(key, newest)
        except Exception:
            # Hand the object over again later, after the node's other cards, as the reflector does after a failure.
            self._queue_report(node, key, newest)
            raise

    def _queue_report(self, node: str, key: str, newest: CardRecord | None) -> None:
        self._waiting.setdefault(node, {})[key] = newest
        self._node_of[key] = node

    def _dequeue_report(self, key: str) -> None:
        node = self._node_of.pop(key)
        del self._waiting[node][key]
        if not self._waiting[node]:
            del self._waiting[node]

    def _hand_over(self, key: str, new: CardRecord | None) -> None:
        """Hand over the object; None if the card was deleted.

        Passes on exceptions of the handler. After an exception, the earlier object stays the last object that was
        handed over.
        """
        handed = self._handed.get(key)
        if handed is None and new is None:
            half_taken = self._half_taken.get(key)
            if half_taken is not None:
                self._handler.on_delete(key, half_taken)
                del self._half_taken[key]
            return  # the handler knows nothing to delete if the card was created and deleted while its objects waited
        self._charge_node(
            new.node if new is not None else handed.node if handed is not None else "", self._change_cost(handed, new)
        )
        if new is not None:
            if handed is None:
                self._half_taken[key] = new
            self._handler.on_change(key, handed, new)
            self._half_taken.pop(key, None)
            self._handed[key] = new
            self._count_shares(new, 1)
        elif handed is not None:
            self._handler.on_delete(key, handed)
            del self._handed[key]
        if handed is not None:
            self._count_shares(handed, -1)

    def _change_cost(self, record_before: CardRecord | None, new: CardRecord | None) -> float:
        """The cost of a change, in shares: 1, and 1 for each share that is new or gone.

        If the card itself has changed, all shares of its node add to the cost.
        """
        if record_before is None or new is None:
            return 1 + sum(len(record.reported_shares) for record in (record_before, new) if record is not None)
        cost = (
            1
            if record_before.reported_shares == new.reported_shares
            else 1 + len(set(record_before.reported_shares) ^ set(new.reported_shares))
        )
        is_same_card = (record_before.node, record_before.card, record_before.labels) == (
            new.node,
            new.card,
            new.labels,
        )
        return cost if is_same_card else cost + self._shares[new.node]

    def _count_shares(self, record: CardRecord, sign: int) -> None:
        self._shares[record.node] += sign * len(record.reported_shares)
        if not self._shares[record.node]:
            del self._shares[record.node]

    def _update_credit(self, node: str) -> float:
        credit = self._credits.get(node)
        if credit is None:
            return _MAX_CREDIT_SHARES
        now = self._clock.now()
        credit.shares = min(_MAX_CREDIT_SHARES, credit.shares + (now - credit.updated_at) * _SHARES_PER_SECOND)
        credit.updated_at = now
        if credit.shares >= _MAX_CREDIT_SHARES:
            del self._credits[node]
        return credit.shares

    def _charge_node(self, node: str, shares: float) -> None:
        now = self._update_credit(node)
        self._credits[node] = _Credit(now - shares, self._clock.now())
