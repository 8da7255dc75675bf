"""MPS taints of cards: keep a pod off a card whose pods use MPS differently, or as another user.

A card has *taints*, and a request has taints that it does not *tolerate*; one in common closes the card to the request.
The taints of a card are computed when the card or its holders change, so placement only compares two integers. A card
of a node without an MPS manager is open to all pods, except those that require MPS.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cardwise.core.api.mps import Mode
from cardwise.core.api.mpsprofile import MIXED, NOBODY, CardMps, MpsClient
from cardwise.core.values.refusals import Refusal

# Taints: to which pods a card is closed.
DOWN: Final = 1  # to everybody: its MPS is neither ready nor off
OFF: Final = 2  # to pods without MPS: one that wants it holds the card
WANTS: Final = 4  # to pods that want MPS: one without it holds the card
REQUIRED: Final = 8  # to pods that require MPS: the node has no manager
SEVERAL: Final = 16  # to pods that want MPS and several cards in one container: each card has a daemon of its own
BITS: Final = 5  # all of them

FOR_GOOD: Final = REQUIRED | SEVERAL  # whichever pods go, and whatever becomes ready

# Users of a card, besides numbers of users and those of profiles.
ANY: Final = -4  # of a card: all users
FREE: Final = -5  # of a card: the user of the first pod


def untolerated_by(mode: Mode, *, several: bool) -> int:
    """The taints that a request of this MPS mode does not tolerate. `several`: several cards in one container."""
    return _UNTOLERATED[mode] | (SEVERAL if several and mode is not Mode.OFF else 0)


_UNTOLERATED: Final = {
    Mode.OFF: DOWN | OFF,
    Mode.PREFERRED: DOWN | WANTS,
    Mode.REQUIRED: DOWN | WANTS | REQUIRED,
}


class CardTaints:
    """The MPS taints of a node's cards, by position.

    `taints` and `users`: of each card. `tainted`: all taints that any card has. `single`: whether a card is not open to
    all users. `said`: what the manager says of each card. `daemons`: the daemon of each card, named by its first card.
    `on`: how many shares each MPS client has at a daemon.
    """

    __slots__ = ("daemons", "managed", "on", "said", "single", "tainted", "taints", "users")

    def __init__(self, said: Sequence[CardMps | None]) -> None:
        self.said = said
        self.managed = any(one is not None for one in said)
        shared = next((i for i, one in enumerate(said) if one is not None and one.several), 0)
        # By the daemon's first card. On a node without a manager clients are not counted.
        self.daemons = [shared if one is not None and one.several else i for i, one in enumerate(said)]
        self.on: dict[int, dict[MpsClient, int]] = {}  # by daemon, how many shares
        self.taints = [REQUIRED] * len(said)
        self.users = [ANY] * len(said)
        self.tainted = REQUIRED if said else 0
        self.single = False
        if self.managed:
            self._judge(range(len(said)))

    def copy(self) -> "CardTaints":
        """With counts of its own."""
        if not self.managed:
            return self  # it counts nothing
        twin = CardTaints.__new__(CardTaints)
        twin.said, twin.daemons, twin.managed = self.said, self.daemons, True
        twin.on = {daemon: dict(mps_clients) for daemon, mps_clients in self.on.items()}
        twin.taints, twin.users = self.taints.copy(), self.users.copy()
        twin.tainted, twin.single = self.tainted, self.single
        return twin

    def count(self, i: int, who: MpsClient, sign: int) -> None:
        """Add (sign 1) or take away (sign -1) a share of the card."""
        if not self.managed or self.said[i] is None:
            return
        daemon = self.daemons[i]
        mps_clients = self.on.setdefault(daemon, {})
        shares = mps_clients.get(who, 0) + sign
        if shares:
            mps_clients[who] = shares
        else:
            del mps_clients[who]
        if not shares or shares == sign:  # the first share of such a client came, or the last went
            self._judge([at for at, other in enumerate(self.daemons) if other == daemon])

    def max_clients(self, i: int) -> int:
        """The most clients of the card; 0 if its manager has not said."""
        said = self.said[i]
        return said.max_clients if said is not None else 0

    def may_close(self, untolerated: int, who: int) -> bool:
        """Whether any card may be closed to a request that does not tolerate these taints and runs as `who`."""
        return bool(self.tainted & untolerated) or (self.single and who != NOBODY)

    def admits(self, i: int, untolerated: int, who: int) -> bool:
        """Whether the card is open to such a request."""
        if self.taints[i] & untolerated:
            return False
        owner = self.users[i]
        return owner == ANY or who == NOBODY or (who != MIXED and owner in (FREE, who))

    def never(self, i: int, untolerated: int, who: int) -> bool:
        """Whether the card stays closed to such a request, whichever pods go."""
        return bool(self.taints[i] & untolerated & (DOWN | FOR_GOOD)) or (who == MIXED and self.users[i] != ANY)

    def in_the_way(self, i: int, untolerated: int, who: int) -> Mapping[tuple[int, MpsClient], int]:
        """The shares that must go before the card is open to such a request, by daemon and MPS client."""
        said = self.said[i]
        if said is None:
            return {}
        daemon = self.daemons[i]
        alone = who != NOBODY and not said.multi_user
        return {
            (daemon, one): shares
            for one, shares in self.on.get(daemon, {}).items()
            if (one.off and untolerated & WANTS) or (one.wants and (untolerated & OFF or (alone and one.user != who)))
        }

    def refusal(self, among: Iterable[int], untolerated: int, who: int) -> Refusal:
        """Why too few of these cards are open to such a request: the reason that may end soonest."""
        found = {_why(self.taints[i] & untolerated) for i in among if not self.admits(i, untolerated, who)}
        return min(found, key=_SOONEST.index)

    def _judge(self, changed: Iterable[int]) -> None:
        for i in changed:
            said = self.said[i]
            if said is None:
                continue
            on = self.on.get(self.daemons[i], {})
            taints = (0 if said.ready else DOWN) | (0 if said.several else SEVERAL)
            if any(one.off for one in on):
                taints |= WANTS
            if any(one.wants for one in on):
                taints |= OFF
            self.taints[i] = taints
            self.users[i] = ANY if said.multi_user else _owner({one.user for one in on if one.wants})
        self.tainted = 0
        for taints in self.taints:
            self.tainted |= taints
        self.single = any(owner != ANY for owner in self.users)


_SOONEST: Final = (
    Refusal.MPS_USER,
    Refusal.MPS_MIXED,
    Refusal.MPS_DOWN,
    Refusal.MPS_SEVERAL,
    Refusal.MPS_MISSING,
)


def _why(taints: int) -> Refusal:
    """Why a card is closed, by these taints or else by its user: the reason that lasts longest."""
    if taints & REQUIRED:
        return Refusal.MPS_MISSING
    if taints & SEVERAL:
        return Refusal.MPS_SEVERAL
    if taints & DOWN:
        return Refusal.MPS_DOWN
    return Refusal.MPS_MIXED if taints else Refusal.MPS_USER


def _owner(users: set[int]) -> int:
    if not users:
        return FREE
    return next(iter(users)) if len(users) == 1 else MIXED
