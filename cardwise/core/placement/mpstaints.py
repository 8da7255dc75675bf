"""MPS taints keep a pod off unsuitable cards. The pods of such a card use MPS differently, or as another user, or the
card's memory tier is less than the pod demands.

A card has *taints*, and a request does not *tolerate* certain taints. A card with such a taint is closed to the
request. The taints of a card are computed when the card or its holders change, so placement only compares two integers.
Two further taints close nothing; a share *avoids* cards with them. A card lacks MPS if its node lacks an MPS manager,
or if MPS is unavailable on the card. Such a card is open to all pods whose demand it meets (`isolation.is_met`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import MIXED_USERS, NO_USER, CardMps, MpsClient
from cardwise.core.values.refusals import Refusal

# Taints: each closes the card to some pods.
DOWN: Final = 1  # closed to all pods: MPS is neither ready nor off
OFF: Final = 2  # closed to pods without MPS: a pod with MPS holds the card
WANTS: Final = 4  # closed to pods with MPS: a pod without MPS holds the card
SEVERAL: Final = 8  # closed to pods with MPS and several cards in one container: each card has its own daemon
UNLIMITED: Final = 16  # closed to pods that demand `mps`: the card has no MPS, and the driver limits no memory
# Closed to pods that demand `mps` for several cards of one container, which the driver does not limit: the card has no
# MPS.
NO_MPS: Final = 32
NO_KERNEL_LIMIT: Final = 64  # closed to pods that demand `kernel`: the driver limits no memory
# Closed to pods that demand `kernel` for several cards of one container, which the driver does not limit: each card has
# this taint.
ALWAYS: Final = 128
# Avoided by pods without MPS: no pod holds the card, and a pod without MPS would close it to pods with MPS.
CLOSABLE: Final = 256
# Avoided by pods with MPS: of the node's cards that no pod holds, only this one is left for pods without MPS.
LAST_EMPTY: Final = 512
# Closed to pods of several users: the daemon serves one user at a time.
ONE_USER: Final = 1024
# Closed also to those that have whole cards only: the daemon serves all cards of the node, so these pods use it, too.
ONE_USER_OF_NODE: Final = 2048
BITS: Final = 12  # the number of taints

DEMANDS: Final = UNLIMITED | NO_MPS | NO_KERNEL_LIMIT | ALWAYS  # taints of a memory tier that is less than a demand
_USERS: Final = ONE_USER | ONE_USER_OF_NODE
FOR_GOOD: Final = SEVERAL | DEMANDS | _USERS  # taints that remain when pods end and daemons become ready

# Special values for the user of a card. Other values are UIDs, and the special values of `mpsprofile`.
ANY: Final = -4  # the card is open to all users
FREE: Final = -5  # the card is open to any one user: no pod holds it yet


def untolerated_by(
    isolation: Isolation, *, user: int, several_cards: bool, whole: bool = False, whole_only: bool = False
) -> int:
    """The taints that a request with this demand does not tolerate.

    user: the user as which the pod uses MPS, see `mpsprofile`.
    several_cards: whether one container requests several cards.
    whole: whether it requests whole cards, which meet each demand.
    whole_only: whether its pod requests whole cards only. Then it runs without MPS where each card has its own daemon.
    """
    untolerated = DOWN | WANTS if isolation.uses_mps else DOWN | OFF
    if several_cards and isolation.uses_mps and not whole_only:
        untolerated |= SEVERAL
    if user == MIXED_USERS:
        untolerated |= ONE_USER_OF_NODE if whole_only else ONE_USER
    if whole or whole_only:
        return untolerated
    return untolerated | (_DEMANDS_OF_SEVERAL if several_cards else _DEMANDS_OF_ONE).get(isolation, 0)


def avoided_by(isolation: Isolation, *, several_cards: bool) -> int:
    """The taints of cards that a share with this demand takes only as a last choice. They keep pods without MPS
    together.

    several_cards: whether one container requests shares of several cards.
    """
    if not isolation.uses_mps:
        return CLOSABLE
    return 0 if several_cards else LAST_EMPTY


_DEMANDS_OF_ONE: Final = {Isolation.MPS: UNLIMITED, Isolation.KERNEL: NO_KERNEL_LIMIT}
_DEMANDS_OF_SEVERAL: Final = {Isolation.MPS: NO_MPS, Isolation.KERNEL: ALWAYS}


class CardTaints:
    """The MPS taints of a node's cards, by position.

    taints, users: the taints and the user of each card.
    tainted: all taints that at least one card has.
    single: whether at least one card is not open to all users.
    statuses: the MPS of each card, as the manager reports it; None for a card without MPS.
    daemons: the daemon of each card, named by the position of the daemon's first card.
    clients: by daemon, the number of shares of each MPS client.
    """

    __slots__ = ("clients", "daemons", "managed", "single", "statuses", "tainted", "taints", "tiers", "users")

    def __init__(self, cards: Sequence[Card]) -> None:
        self.statuses: Sequence[CardMps | None] = [card.mps for card in cards]
        statuses = self.statuses
        self.managed = any(status is not None for status in statuses)
        shared = next((i for i, status in enumerate(statuses) if status is not None and status.serves_several), 0)
        # By the first card of the daemon. On a node without a manager, clients are not counted.
        self.daemons = [
            shared if status is not None and status.serves_several else i for i, status in enumerate(statuses)
        ]
        self.clients: dict[int, dict[MpsClient, int]] = {}  # by daemon, the number of shares of each client
        self.tiers = [_tier_taints(card) for card in cards]  # these taints change only with the cards
        self.taints = self.tiers.copy()
        self.users = [ANY] * len(statuses)
        self.tainted = 0
        for taints in self.taints:
            self.tainted |= taints
        self.single = False
        if self.managed:
            self._update_taints(range(len(statuses)))

    def copy(self) -> "CardTaints":
        """A copy with its own counts."""
        if not self.managed:
            return self  # a node without a manager counts no clients
        duplicate = CardTaints.__new__(CardTaints)
        duplicate.statuses, duplicate.daemons, duplicate.managed = self.statuses, self.daemons, True
        duplicate.tiers = self.tiers
        duplicate.clients = {daemon: dict(mps_clients) for daemon, mps_clients in self.clients.items()}
        duplicate.taints, duplicate.users = self.taints.copy(), self.users.copy()
        duplicate.tainted, duplicate.single = self.tainted, self.single
        return duplicate

    def add_client(self, i: int, client: MpsClient, change: int) -> None:
        """Add this number of the client's shares of the card; remove shares if the number is negative."""
        if not self.managed or self.statuses[i] is None:
            return
        daemon = self.daemons[i]
        mps_clients = self.clients.setdefault(daemon, {})
        shares_before = mps_clients.get(client, 0)
        shares = shares_before + change
        if shares:
            mps_clients[client] = shares
        else:
            del mps_clients[client]
        if not shares or not shares_before:
            self._update_taints([position for position, other in enumerate(self.daemons) if other == daemon])

    def max_clients(self, i: int) -> int:
        """The maximum number of MPS clients of the card; 0 if unknown."""
        status = self.statuses[i]
        return status.max_clients if status is not None else 0

    def may_be_closed_to(self, untolerated: int, user: int) -> bool:
        """Whether any card may be closed to a request that does not tolerate these taints and runs as `user`."""
        return bool(self.tainted & untolerated) or (self.single and user != NO_USER)

    def admits(self, i: int, untolerated: int, user: int) -> bool:
        """Whether the card is open to a request that does not tolerate these taints and runs as `user`."""
        if self.taints[i] & untolerated:
            return False
        return user == NO_USER or self.users[i] in (ANY, FREE, user)

    def is_closed_for_good(self, i: int, untolerated: int) -> bool:
        """Whether the card stays closed to a request that does not tolerate these taints, even if all pods on the card
        end.
        """
        return bool(self.taints[i] & untolerated & (DOWN | FOR_GOOD))

    def blocking_shares(self, i: int, untolerated: int, user: int) -> Mapping[tuple[int, MpsClient], int]:
        """The shares that must end before the card is open to the request, by daemon and MPS client."""
        status = self.statuses[i]
        if status is None:
            return {}
        daemon = self.daemons[i]
        is_single_user = user != NO_USER and not status.multi_user
        return {
            (daemon, client): shares
            for client, shares in self.clients.get(daemon, {}).items()
            if (client.off and untolerated & WANTS)
            or (client.wants and (untolerated & OFF or (is_single_user and client.user != user)))
        }

    def refusal(self, positions: Iterable[int], untolerated: int, user: int) -> Refusal:
        """Why too few of these cards are open to the request: of all reasons the one that may end soonest."""
        reasons = {
            _refusal_by_taints(self.taints[i] & untolerated) for i in positions if not self.admits(i, untolerated, user)
        }
        return min(reasons, key=_SOONEST.index)

    def _update_taints(self, changed: Iterable[int]) -> None:
        for i in changed:
            status = self.statuses[i]
            if status is None:
                continue
            clients = self.clients.get(self.daemons[i], {})
            taints = self.tiers[i] | (0 if status.ready else DOWN) | (0 if status.serves_several else SEVERAL)
            if any(client.off for client in clients):
                taints |= WANTS
            if any(client.wants for client in clients):
                taints |= OFF
            if not clients:
                taints |= CLOSABLE
            if not status.multi_user:
                taints |= ONE_USER | ONE_USER_OF_NODE if status.serves_several else ONE_USER
            self.taints[i] = taints
            self.users[i] = ANY if status.multi_user else _owner({client.user for client in clients if client.wants})
        self._mark_last_empty_card()
        self.tainted = 0
        for taints in self.taints:
            self.tainted |= taints
        self.single = any(owner != ANY for owner in self.users)

    def _mark_last_empty_card(self) -> None:
        """Of cards with a daemon of their own, which close alone."""
        self.taints = [taints & ~LAST_EMPTY for taints in self.taints]
        empty = [
            i for i, taints in enumerate(self.taints) if taints & (CLOSABLE | SEVERAL | DOWN) == CLOSABLE | SEVERAL
        ]
        if len(empty) == 1:
            self.taints[empty[0]] |= LAST_EMPTY


_SOONEST: Final = (
    Refusal.MPS_USER,
    Refusal.MPS_MIXED,
    Refusal.MPS_DOWN,
    Refusal.MPS_SEVERAL,
    Refusal.MPS_MISSING,
    Refusal.KERNEL_MISSING,
)


def _refusal_by_taints(taints: int) -> Refusal:
    """Why a card with these taints is closed: of all reasons the one that lasts longest. Without taints, the card has
    another user.
    """
    if taints & (NO_KERNEL_LIMIT | ALWAYS):
        return Refusal.KERNEL_MISSING
    if taints & (UNLIMITED | NO_MPS):
        return Refusal.MPS_MISSING
    if taints & SEVERAL:
        return Refusal.MPS_SEVERAL
    if taints & _USERS:
        return Refusal.MPS_USER
    if taints & DOWN:
        return Refusal.MPS_DOWN
    return Refusal.MPS_MIXED if taints else Refusal.MPS_USER


def _tier_taints(card: Card) -> int:
    """The taints of a card for the memory tiers that it does not have."""
    taints = ALWAYS
    if not card.has_kernel_limit:
        taints |= NO_KERNEL_LIMIT
    if card.mps is None:
        taints |= NO_MPS if card.has_kernel_limit else NO_MPS | UNLIMITED
    return taints


def _owner(users: set[int]) -> int:
    if not users:
        return FREE
    return next(iter(users)) if len(users) == 1 else MIXED_USERS
