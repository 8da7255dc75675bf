"""The gang reservation: cards that are reserved for a gang that has waited long. Later pods cannot use these cards.

Theory of operation. A big gang needs many cards at the same time, but a stream of small pods takes each card as soon as
it is free. So once a gang has been refused for long (`Gang.is_reservation_due`), `search_cards` chooses cards for its
members, first the cards with the least memory in use. The amounts that the members need of these cards are *reserved*:
all pods that come after the gang find these amounts in use.

Example: two members of 40 GiB each wait for two cards of 64 GiB. 50 GiB of the first card are in use, and 60 GiB of the
second. On each card 40 GiB are reserved, so no later pod gets memory there. When a pod of 40 GiB on the first card
ends, 54 GiB are free: 40 for the gang, and 14 for other pods. As soon as both members fit, the gang is planned and the
reservation ends.

What is reserved:

- On these cards: the MiB, percent of SMs, clients, whole cards and devices that the gang requests. The remainder of the
    cards stays free for others, and so do cpu and memory of nodes.
- Nothing on nodes where only cpu or memory is short, because the cards have enough free capacity.
- No card for a gang that would remain pending even if all pods with GPUs ended. No amount beyond the remaining quotas
    of the gang's namespace.

For which gang: for one gang at a time. The highest priority comes first. With equal priorities, namespaces take turns:
the first gang of each namespace, then the second gang of each. A namespace whose time is over comes last. For how long:
the gangs of one namespace together have a reservation for `GangPatience.reserve_limit` seconds, and then none for the
same time. So users gain nothing from deleting a gang and creating it again.

The search is repeated every `_SEARCH_INTERVAL_SECONDS` seconds, and the reservation moves to cards that have less
memory in use by then. If no memory of a card is freed for `_STUCK_SECONDS`, the card comes after all other cards. This
time doubles with each such card. So the gang finally waits long enough for cards whose pods run for minutes.

A search runs on a snapshot, without the lock. Its result is used only if the leader epoch is still the same. Each step
of the controller runs at most one search, and then plans gangs. After a long search, the gangs of the namespace are not
searched for ten times as long (`SearchPauses`). So a gang that never fits delays no other gang.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain
from operator import itemgetter
from typing import Final, NamedTuple

import structlog

from cardwise.clock import Clock
from cardwise.core.api import quotas
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.mpsprofile import COMMON_CLIENT
from cardwise.core.api.quotas import Charge
from cardwise.core.api.sharing import Tenant
from cardwise.core.gangs.gangplan import Pace, Planned
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from extender.cache.cache import Cache
from extender.cache.clusterview import ClusterView, PodPlace
from extender.cache.pacing import PlanningStopped
from extender.cache.statelock import StateLock
from extender.gangs.cardsearch import GangWithOffers, search_cards
from extender.gangs.offers import OfferTable
from extender.queue.searchpauses import SearchPauses
from extender.records.podref import PodRef

_log = structlog.get_logger(__name__)

_SEARCH_INTERVAL_SECONDS: Final = 30.0  # seconds between two searches for the same gang
_STUCK_SECONDS: Final = 60.0  # seconds in which nothing is freed on a card, after which other cards come first
_MAX_DOUBLINGS: Final = 6  # maximum number of times that `_STUCK_SECONDS` doubles
_MAX_GANGS: Final = 32  # maximum number of gangs of a namespace, per priority, for which cards are searched
_MAX_DUE: Final = 1024  # maximum number of gangs that are read in one hold of the lock
_MAX_NAMESPACES: Final = 1024  # maximum number of namespaces for which the end of their last reservation is remembered
_NEVER: Final = float("-inf")

PHASE_NAME: Final = "gang reservation"  # `Holding.phase_name` of the reserved holdings


class GangReservation:
    """Reserves cards for at most one gang: the first in order of the gangs that have waited too long and could fit.

    Except for `update`, the caller holds the lock.
    """

    def __init__(self, lock: StateLock, cache: Cache, clock: Clock) -> None:
        self._lock = lock
        self._cache = cache
        self._cards = cache.gang_cards
        self._clock = clock
        self._gang: Gang | None = None
        self._since = 0.0
        self._now = 0.0  # the time of the last update
        self._offers = OfferTable()  # of each shape, all nodes that were ever offered
        self._selections: dict[str, _Selection] = {}  # by gang
        self._stalls: dict[str, _Stalls] = {}  # by gang
        self._paused_until: dict[str, float] = {}  # by namespace, until when it gets no reservation
        self._search_pauses = SearchPauses(clock)  # of namespaces, after long searches
        self._used: dict[str, _UsedSeconds] = {}  # by namespace
        self._ended_at: dict[str, float] = {}  # by namespace, when its time was last over; the latest at the end

    def add_offer(self, key: str, shape: str, nodes: frozenset[str]) -> None:
        """Record that kube-scheduler offers these nodes for members of the shape.

        Callers should pass the same object for equal offers: an offer may have thousands of nodes, and is stored for
        each shape.
        """
        before = self._offers.get(key).get(shape, nodes)
        self._offers.set(key, shape, before if before is nodes or nodes <= before else before | nodes)

    def remove_gang(self, key: str) -> None:
        """Forget the gang: it is gone, or runs."""
        self._offers.remove(key)
        self._selections.pop(key, None)
        self._stalls.pop(key, None)
        if self._gang is not None and self._gang.key == key:
            self._end_reservation()
            self._set_cards(None)

    def reset(self) -> None:
        """Forget all results of searches, because the leader changes."""
        self._selections.clear()
        self._stalls.clear()
        self._end_reservation()
        self._set_cards(None)

    def update_reservation(self, find_due: Callable[[], Sequence[Gang]], policy: str, pace: Pace) -> None:
        """Search cards for at most one gang, then choose the gang and its cards. Called without the lock.

        find_due: returns the gangs of `select_due` that still wait; called under the lock.
        policy: the placement policy of pods that name none.
        """
        self._update_charges(pace)
        with self._lock:
            self._cache.sync_cards()
            due, now = find_due(), self._clock.now()
            self._end_used_up(now)
            gang = self._next_to_search(due, now)
            if gang is None:
                self._reserve(due)
                return
        began = self._clock.cpu()
        try:
            self._search(gang, find_due, policy, pace)
        except PlanningStopped:
            raise
        except Exception:  # noqa: BLE001 - an unexpected gang must not stop the searches and plans of other gangs
            _log.exception("failed to search GPUs to reserve for a gang; trying again", gang=gang.key)
            with self._lock:
                if _is_among(gang, find_due()):
                    now = self._clock.now()
                    before = self._selections.get(gang.key, _Selection(now, gang.changes, _Charges({}), None))
                    self._selections[gang.key] = before._replace(at=now)
        self._update_charges(pace)
        with self._lock:
            self._search_pauses.charge_search(gang.namespace, self._clock.cpu() - began)
            self._end_used_up(self._clock.now())
            self._reserve(find_due())

    def _update_charges(self, pace: Pace) -> None:
        """Sum the charges of all selections again, without the lock, if kinds of cards have changed."""
        with self._lock:
            self._cache.sync_cards()
            outdated = self._outdated_charges(self._selections.values())
            if not outdated:
                return
            ledger = self._cache.snapshot().ledger
        for charges in outdated:
            pace()
            charges.sum_by_kind(ledger, charges.holdings)

    def _outdated_charges(self, selections: Iterable["_Selection"]) -> list["_Charges"]:
        ledger = self._cache.ledger
        return [selection.charges for selection in selections if not selection.charges.is_current(ledger)]

    def _search(self, gang: Gang, find_due: Callable[[], Sequence[Gang]], policy: str, pace: Pace) -> None:
        """Search cards for the gang, without the lock. Does nothing if the gang is not due any more."""
        with self._lock:
            self._cache.sync_cards()
            snapshot = self._cache.snapshot()
            ledger = snapshot.ledger.snapshot()  # the search changes the snapshot
            before = self._selections.get(gang.key)
            reserved = before.charges.holdings if before is not None and self._gang is gang else {}
        missing = _missing_by_card(ledger, reserved.values())
        with self._lock:
            if not _is_among(gang, find_due()):
                return
            stalls, changes = self._stalls.setdefault(gang.key, _Stalls()), gang.changes
            if reserved:
                stalls.record_shortage(missing, self._clock.now())
            gang_now = GangWithOffers(
                gang.namespace,
                gang.members_to_plan(),
                uids=frozenset(gang.members),
                offers=dict(self._offers.get(gang.key)),
                given_up=dict(stalls.moves),
            )
        cards_found = search_cards(snapshot, gang_now, policy, pace)
        holdings = dict[str, Holding]()
        if isinstance(cards_found.outcome, Planned):
            holdings = _holdings_to_reserve_by_member(snapshot, gang.namespace, gang_now.members, cards_found.outcome)
        missing, charges = _missing_by_card(ledger, holdings.values()), _Charges(holdings)
        charges.sum_by_kind(ledger, holdings)
        with self._lock:
            self._cache.sync_cards()
            if _is_among(gang, find_due()) and self._cache.leader_changes == snapshot.leader_changes:
                selection = _Selection(self._clock.now(), changes, charges, cards_found.problem)
                self._set_selection(gang, selection, missing)

    def _next_to_search(self, due: Sequence[Gang], now: float) -> Gang | None:
        """The gang for which cards are to be searched next; None if the gang for the reservation is known.

        The search is repeated every `_SEARCH_INTERVAL_SECONDS` seconds for the first gang that could have the
        reservation, and for all gangs before that gang, since one of these might fit by then. The gangs without a
        search come first, then the gang with the oldest search. So each gang gets a search, even if searches for other
        gangs take all the time.
        """
        gangs_to_search: list[tuple[float, Gang]] = []
        for gang in self._gangs_in_order(due):
            selection = self._selections.get(gang.key)
            searched_at = selection.at if selection is not None else _NEVER
            if now - searched_at >= _SEARCH_INTERVAL_SECONDS and not self._search_pauses.is_paused(gang.namespace):
                gangs_to_search.append((searched_at, gang))
            if selection is not None and self._valid_holdings(gang, selection.charges):
                break
        return min(gangs_to_search, key=lambda entry: entry[0])[1] if gangs_to_search else None

    def _set_selection(self, gang: Gang, selection: "_Selection", missing: Mapping[str, int]) -> None:
        self._selections[gang.key] = selection
        if selection.problem:
            gang.reason = selection.problem
        else:
            self._stalls.setdefault(gang.key, _Stalls()).record_shortage(missing, selection.at)

    def _end_used_up(self, now: float) -> None:
        """End the reservation if its namespace has used up its time."""
        self._now = now
        self._paused_until = {namespace: until for namespace, until in self._paused_until.items() if until > now}
        self._used = {namespace: used for namespace, used in self._used.items() if used.until > now}
        if self._gang is not None and now - self._since >= self._gang.patience.reserve_limit:
            namespace, pause_end = self._gang.namespace, now + self._gang.patience.reserve_limit
            self._end_reservation()
            self._used.pop(namespace, None)
            self._paused_until[namespace] = pause_end
            self._ended_at.pop(namespace, None)
            self._ended_at[namespace] = now
            if len(self._ended_at) > _MAX_NAMESPACES:
                del self._ended_at[next(iter(self._ended_at))]

    def _reserve(self, due: Sequence[Gang]) -> None:
        """Reserve the selected cards for the first gang. Changes nothing for now if charges were not summed again."""
        selections = [self._selections[gang.key] for gang in due if gang.key in self._selections]
        if self._outdated_charges(selections) and (self._gang is None or _is_among(self._gang, due)):
            return
        now = self._now
        first, holdings = self._choose_gang(due)
        if first is None:
            self._end_reservation()
        elif self._gang is not first:
            self._end_reservation()
            before = self._used.get(first.namespace)
            self._gang, self._since = first, now - (before.seconds if before is not None else 0.0)
            self._stalls.setdefault(first.key, _Stalls()).begin_wait(now)
        self._set_cards(first, holdings)

    def _set_cards(self, gang: Gang | None, holdings: Sequence[Holding] = ()) -> None:
        if self._cards.reserve(gang, holdings):
            self._cache.capacity.mark_released()

    def impossible_reason(self, gang: Gang) -> str | None:
        """Why the gang could not run even if all pods with GPUs ended; None if it could run then.

        Ignores the result of a search from before the gang's last change.
        """
        selection = self._selections.get(gang.key)
        return selection.problem if selection is not None and selection.changes == gang.changes else None

    def _end_reservation(self) -> None:
        if self._gang is not None:
            # The used time counts for the namespace's next gang, until the namespace had no reservation for as long as
            # the limit.
            self._used[self._gang.namespace] = _UsedSeconds(
                self._now - self._since, self._now + self._gang.patience.reserve_limit
            )
        self._gang = None

    def _choose_gang(self, due: Sequence[Gang]) -> tuple[Gang | None, Sequence[Holding]]:
        """The first gang for which cards are to be reserved, and the holdings to reserve."""
        for gang in self._gangs_in_order(due):
            selection = self._selections.get(gang.key)
            reserved = self._valid_holdings(gang, selection.charges) if selection is not None else []
            if reserved:
                return gang, reserved
        return None, []

    def _gangs_in_order(self, due: Sequence[Gang]) -> Iterator[Gang]:
        """The gangs in order, without gangs of paused namespaces: by priority, then in turns by namespace.

        Within a namespace the gangs have their usual order. In each turn the namespace whose last reservation ended
        earliest comes first, then the namespace with the oldest gang.
        """
        shares: dict[tuple[int, str], list[Gang]] = {}  # by priority and namespace
        for gang in due:
            if gang.namespace not in self._paused_until:
                shares.setdefault((gang.rank()[0], gang.namespace), []).append(gang)
        # One namespace may have thousands of gangs, so they are not all sorted.
        keys = [
            ((priority, place, self._ended_at.get(namespace, _NEVER), gang.rank()[2], gang.key), gang)
            for (priority, namespace), gangs in shares.items()
            for place, gang in enumerate(nsmallest(_MAX_GANGS, gangs, key=Gang.rank))
        ]
        return (gang for _, gang in sorted(keys, key=lambda entry: entry[0]))

    def _valid_holdings(self, gang: Gang, charges: "_Charges") -> list[Holding]:
        """The holdings of members that still wait; none if they exceed the remaining quotas of the namespace, or if the
        charges must be summed again first.
        """
        uids = [member.uid for member in gang.members_to_plan() if member.uid in charges.holdings]
        ledger, headroom = self._cache.ledger, self._cache.headroom(gang.namespace) if uids else []
        if headroom and not charges.is_current(ledger):
            return []
        if headroom and placement.entries_exceeded_by(ledger.kinds, charges.sum_by_kind(ledger, uids), headroom):
            return []
        return [charges.holdings[uid] for uid in uids]


def select_due(gangs: Iterable[tuple[Rank, Gang]]) -> list[Gang]:
    """The gangs that may come first in `GangReservation.update`, of all gangs that have waited too long. Reads no gang,
    so the caller needs no lock: there may be 20,000 gangs.

    Of each namespace and priority the first `_MAX_GANGS`; of these the first `_MAX_DUE`, in turns by namespace.
    """
    shares: dict[tuple[int, str], list[tuple[Rank, Gang]]] = {}  # by priority and namespace
    for rank, gang in gangs:
        shares.setdefault((rank[0], gang.namespace), []).append((rank, gang))
    keys = [
        (priority, place, rank[2], rank[3], gang)
        for (priority, _), ranked_gangs in shares.items()
        for place, (rank, gang) in enumerate(nsmallest(_MAX_GANGS, ranked_gangs, key=itemgetter(0)))
    ]
    return [key[-1] for key in nsmallest(_MAX_DUE, keys, key=itemgetter(0, 1, 2, 3))]


def _is_among(gang: Gang, gangs: Iterable[Gang]) -> bool:
    """Whether exactly this gang is among `gangs`, and not only a later gang with the same name."""
    return any(other is gang for other in gangs)


def _holdings_to_reserve_by_member(
    snapshot: ClusterView, namespace: str, members: Sequence[Member], planned: Planned
) -> dict[str, Holding]:
    """The holdings of the plan, by member, without nodes where only cpu or memory is short."""
    places_by_node: dict[str, list[PodPlace]] = {}
    for member in members:
        node, assignment = planned.nodes[member.uid], planned.assignments.get(member.uid)
        place = PodPlace(PodRef(member.uid, namespace, member.name), member.request, member.load, node, assignment)
        places_by_node.setdefault(node, []).append(place)
    worth: dict[str, Holding] = {}
    for node, places in places_by_node.items():
        has_load = snapshot.loads.is_open(node) and snapshot.has_free_load_for(places)
        if has_load or not snapshot.has_cards_for(places):
            worth |= {
                # Without a namespace, so that no quota counts the holding before the member is bound.
                place.pod.uid: Holding(
                    f"{place.pod.uid}@{node}",
                    "",
                    place.pod.name,
                    node,
                    place.assignment,
                    PHASE_NAME,
                    place.request.mps_client if place.request is not None else COMMON_CLIENT,
                )
                for place in places
                if place.assignment is not None
            }
    return worth


def _missing_by_card(ledger: Ledger, holdings: Iterable[Holding]) -> dict[str, int]:
    """The amount that must be freed on each card before the holdings fit, by UUID: MiB + clients + percent of SMs, and
    shares that keep the holdings' tenant from the card.

    The sum decreases with each pod that ends.
    """
    short: dict[str, int] = {}
    holdings_by_node: dict[str, list[Holding]] = {}
    for holding in holdings:
        holdings_by_node.setdefault(holding.node, []).append(holding)
    for node, holdings_there in holdings_by_node.items():
        state = ledger.node(node)
        if state is None:
            continue
        requested: dict[int, list[CardShare]] = {}
        tenants: dict[int, set[Tenant]] = {}
        for holding in holdings_there:
            for share in holding.assignment.shares():
                position = state.position(share)
                if position is not None:
                    requested.setdefault(position, []).append(share)
                    tenants.setdefault(position, set()).add(holding.mps_client.tenant)
        for i, card_shares in requested.items():
            mem, core = sum(share.mem for share in card_shares), sum(share.core for share in card_shares)
            after = (
                state.free[i] - mem,
                state.max_card_clients[i] - state.clients[i] - len(card_shares),
                state.free_core[i] - core if core else 0,
            )
            blocking_shares = dict(
                chain.from_iterable(state.tenants.blocking_shares(i, tenant) for tenant in tenants[i])
            )
            short[state.cards[i].uuid] = sum(max(0, -margin) for margin in after) + sum(blocking_shares.values())
    return short


class _UsedSeconds(NamedTuple):
    """For how many seconds cards were reserved for a namespace, and when these seconds are forgotten."""

    seconds: float
    until: float


class _Selection(NamedTuple):
    """The result of a search for a gang.

    at: when the search ended.
    changes: the value of `Gang.changes` when the search began.
    charges: the holdings to reserve, and their charges to quotas.
    problem: why the gang could not run even if all pods with GPUs ended; None if it could.
    """

    at: float
    changes: int
    charges: "_Charges"
    problem: str | None


class _Charges:
    """The holdings to reserve for a gang, and their charges to quotas.

    Each step of the controller compares the charges with the quotas, under the lock. To sum the charges of 500 members
    with 8 cards each takes 5 ms, so the sums are stored.

    holdings: by member.
    """

    def __init__(self, holdings: Mapping[str, Holding]) -> None:
        self.holdings = holdings
        self._by_member: dict[str, dict[int, Charge]] = {}  # by kind of cards
        self._kind_changes: int | None = None  # the value of `Ledger.kind_changes` at that time
        self._uids: list[str] = []  # the members in `_total`
        self._total: dict[int, Charge] = {}

    def is_current(self, ledger: Ledger) -> bool:
        """Whether `sum_by_kind` need not read all holdings again."""
        return self._kind_changes == ledger.kind_changes

    def sum_by_kind(self, ledger: Ledger, uids: Iterable[str]) -> Mapping[int, Charge]:
        """The charges of the holdings of these members, by kind of cards. Do not keep the mapping."""
        uids = list(uids)
        if not self.is_current(ledger):
            self._by_member = {
                uid: placement.charges_by_kind(ledger, [(holding.node, holding.assignment)])
                for uid, holding in self.holdings.items()
            }
            self._kind_changes, self._uids, self._total = ledger.kind_changes, [], {}
        if uids != self._uids:
            charges: dict[int, list[Charge]] = {}
            for uid in uids:
                for kind, charge in self._by_member[uid].items():
                    charges.setdefault(kind, []).append(charge)
            self._uids = uids
            self._total = {kind: quotas.sum_charges(of_kind) for kind, of_kind in charges.items()}
        return self._total


class _Stalls:
    """The reserved cards on which nothing has been freed for long."""

    def __init__(self) -> None:
        self.moves: dict[str, int] = {}  # by card, how often the card was given up
        self._seen: dict[str, tuple[int, float]] = {}  # by card, the missing amount, and the time of its last decrease
        self._times = 0  # how many times cards were given up

    def begin_wait(self, now: float) -> None:
        """Start the wait for all cards, and again when cards are reserved for the gang after another gang."""
        self._seen = {card: (short, now) for card, (short, _) in self._seen.items()}

    def record_shortage(self, short: Mapping[str, int], now: float) -> None:
        """Record the missing amounts. Give up cards whose memory was not freed for long.

        short: the amount that must be freed on each reserved card before the gang fits there, by UUID.
        """
        limit = _STUCK_SECONDS * 2**self._times
        waiting: dict[str, tuple[int, float]] = {}
        stuck = False
        for card, amount in short.items():
            before, since = self._seen.get(card, (amount, now))
            if amount < before:
                since = now
            if amount and now - since >= limit:
                self.moves[card] = self.moves.get(card, 0) + 1
                stuck = True
            elif amount:
                waiting[card] = amount, since
        self._seen = waiting
        if stuck:
            self._times = min(self._times + 1, _MAX_DOUBLINGS)
