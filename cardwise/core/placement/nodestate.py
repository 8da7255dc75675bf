"""The state of one node: the free amounts of its cards, and how many pods hold each device.

The amounts of all cards are in flat lists, because placement must take only microseconds. The ledger updates these
lists when holdings change.
"""

from array import array
from collections.abc import Iterable, Sequence

from cardwise.core.api.assignment import Assignment, CardShare, CardUse
from cardwise.core.api.cards import FULL_CORE, POSITION_MASK, Card, card_code
from cardwise.core.api.mpsprofile import MpsClient
from cardwise.core.placement import devices
from cardwise.core.placement.cardtenants import CardTenants
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import UNKNOWN_KIND, CardKind, CardKinds
from cardwise.core.placement.mpstaints import CardTaints
from cardwise.core.values.quantity import MiB

MAX_CLIENTS = 48  # MPS clients per card; the maximum before driver 590, used if no MPS manager reports another
_CARD_CODE_TYPE = "q"  # the type code of `card_code`s in arrays


class NodeState:
    """The cards of one node and the free amounts of each; index i of every list is the same card."""

    __slots__ = (
        "_empty_codes",
        "cards",
        "clients",
        "codes",
        "core",
        "device_holds",
        "devices",
        "foreign_hold_counts",
        "former_kinds",
        "free",
        "free_core",
        "generation",
        "holdings",
        "kept_back",
        "kind_set",
        "kinds",
        "largest",
        "max_card_clients",
        "max_clients",
        "mps",
        "name",
        "open_card_count",
        "own_name",
        "tenants",
        "usable",
        "used",
    )

    def __init__(self, name: str, *, kept_back: MiB | None, max_clients: int | None, core: int = FULL_CORE) -> None:
        self.name = name
        self.own_name = (name,)  # equal to `NodesByUuid.nodes(uuid)` if only this node reports the UUID
        self.kept_back = kept_back
        self.core = core  # percent of the SMs of each card that may be reserved
        self.max_clients = max_clients
        self.cards: list[Card] = []
        self.kinds: list[int] = []  # the kind of each card, see `CardKinds`
        self.kind_set: frozenset[int] = frozenset()  # the kinds of all its cards
        # By `card_of`: the kinds of cards that the node no longer has, and that pods still hold.
        self.former_kinds: dict[str | int, int] = {}
        self.largest = 0  # MiB that shares can use on the largest card
        self.open_card_count = 0  # cards that take new shares, see `Card.accepts_shares`
        self.usable: list[int] = []  # MiB that shares can use on each card; replaced, never changed
        self.free: list[int] = []  # MiB; negative if the card now reports less memory than its shares have
        self.free_core: list[int] = []  # percent of the SMs
        self.clients: list[int] = []  # shares
        self.max_card_clients: list[int] = []  # the maximum number of shares
        self.mps = CardTaints(())
        self.tenants = CardTenants(0)
        self.used: list[int] = []  # MiB
        self.generation = 0  # the ledger's generation when this state was last changed
        self.holdings: dict[str, Holding] = {}  # the holdings of the node's own pods, by UID
        # by UID of other nodes' pods: how many cards and devices here the pod holds
        self.foreign_hold_counts: dict[str, int] = {}
        self.devices: list[Device] = []  # devices other than GPUs
        self.device_holds: dict[
            str, int
        ] = {}  # by UUID, how many pods hold the device; devices without a pod are left out
        # Packed arrays: filter reads them for thousands of nodes, and each list of integers would miss the CPU cache.
        self.codes: array[int] | None = None  # see `codes_fullest_first`; None if it must be sorted again
        self._empty_codes: array[int] | None = None

    def is_open(self, i: int, shares: int = 1) -> bool:
        """Whether the card can take this number of further shares, whatever their size."""
        return self.cards[i].accepts_shares and self.clients[i] + shares <= self.max_card_clients[i]

    def free_mib(self, i: int) -> int:
        """The MiB of the card that further containers could get; 0 if the card takes no new share."""
        return max(0, self.free[i]) if self.is_open(i) else 0

    def is_empty(self, i: int) -> bool:
        """Whether a request for a whole card can get this card."""
        return self.cards[i].accepts_shares and self.clients[i] == 0

    def codes_fullest_first(self) -> Sequence[int]:
        """Open cards as `card_code`s, the fullest first."""
        codes = self.codes
        if codes is None:
            free = self.free
            codes = array(_CARD_CODE_TYPE, sorted(card_code(free[i], i) for i in range(len(free)) if self.is_open(i)))
            self.codes = codes
        return codes

    def codes_of_empty_cards(self) -> Sequence[int]:
        """The `card_code`s of the cards that a request for a whole card can get, the smallest card first."""
        codes = self._empty_codes
        if codes is None:
            clients = self.clients
            least_code = card_code(1)
            ascending = self.codes_fullest_first()
            codes = array(
                _CARD_CODE_TYPE,
                [code for code in ascending if code >= least_code and not clients[code & POSITION_MASK]],
            )
            self._empty_codes = codes
        return codes

    def position(self, share: CardShare | CardUse) -> int | None:
        """The position of the share's card in the lists; None if the node no longer has the card."""
        for i, card in enumerate(self.cards):
            if card.uuid == share.uuid or (not share.uuid and card.index == share.index):
                return i
        return None

    def kind_of_share(self, share: CardShare | CardUse) -> int:
        """The kind of the share's card, even if the node no longer has the card."""
        i = self.position(share)
        return self.kinds[i] if i is not None else self.former_kinds.get(card_of(share), UNKNOWN_KIND)

    def kinds_by_card(self) -> dict[tuple[str | int, ...], int]:
        """The kinds of all cards that `kind_of_share` knows: present cards by index and UUID, and former cards by
        `card_of`.
        """
        present: dict[tuple[str | int, ...], int] = {
            (card.index, card.uuid): kind for card, kind in zip(self.cards, self.kinds, strict=True)
        }
        return present | {(card,): kind for card, kind in self.former_kinds.items()}

    def apply_card_use(self, use: CardUse, sign: int, client: MpsClient | None = None) -> int:
        """Add (sign 1) or remove (sign -1) a pod's shares of one card.

        client: the client whose shares these are; None while a request is being placed.

        Returns the kind of its card.
        """
        i = self.position(use)
        if i is not None:
            self.free[i] -= sign * use.mem
            self.used[i] += sign * use.mem
            self.free_core[i] -= sign * use.core
            self.clients[i] += sign * use.shares
            if client is not None:
                self.mps.add_client(i, client, sign * use.shares)
                self.tenants.add_shares(i, client.tenant, sign * use.shares)
        self.codes = self._empty_codes = None
        return self.kinds[i] if i is not None else self.former_kinds.get(card_of(use), UNKNOWN_KIND)

    def apply_assignment(self, assignment: Assignment, client: MpsClient, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) all shares of a pod on this node."""
        for use in assignment.card_uses():
            self.apply_card_use(use, sign, client)
        for device in assignment.non_gpu_devices():
            self.apply_device_hold(device.uuid, sign)

    def apply_device_hold(self, uuid: str, sign: int) -> None:
        """Count (sign 1) or no longer count (sign -1) a pod that holds the device."""
        hold_count = self.device_holds.get(uuid, 0) + sign
        if hold_count:
            self.device_holds[uuid] = hold_count
        else:
            del self.device_holds[uuid]

    def apply_foreign_hold(self, uid: str, sign: int) -> None:
        """Count (sign 1) or no longer count (sign -1) a card or device here that a pod of another node holds."""
        hold_count = self.foreign_hold_counts.get(uid, 0) + sign
        if hold_count:
            self.foreign_hold_counts[uid] = hold_count
        else:
            del self.foreign_hold_counts[uid]

    def is_free(self, device: Device) -> bool:
        """Whether a pod could get this device of the node now."""
        return devices.is_free(device, self.device_holds)

    def overcommitted(self) -> dict[str, int]:
        """By UUID, the MiB of each overcommitted card, and 1 for each overcommitted device."""
        cards = {card.uuid: int(card.mem) for i, card in enumerate(self.cards) if self.used[i] > card.mem}
        return cards | {uuid: 1 for uuid, hold_count in self.device_holds.items() if hold_count > 1}

    def copy(self) -> "NodeState":
        """A copy with its own counts."""
        duplicate = NodeState(self.name, kept_back=self.kept_back, max_clients=self.max_clients, core=self.core)
        duplicate.cards, duplicate.largest, duplicate.open_card_count = self.cards, self.largest, self.open_card_count
        duplicate.kinds, duplicate.kind_set, duplicate.former_kinds = (
            self.kinds,
            self.kind_set,
            self.former_kinds.copy(),
        )
        duplicate.usable = self.usable
        duplicate.free, duplicate.used = self.free.copy(), self.used.copy()
        duplicate.free_core, duplicate.clients = self.free_core.copy(), self.clients.copy()
        duplicate.max_card_clients, duplicate.mps = self.max_card_clients, self.mps.copy()
        duplicate.tenants = self.tenants.copy()
        duplicate.generation = self.generation
        duplicate.holdings, duplicate.foreign_hold_counts = self.holdings.copy(), self.foreign_hold_counts.copy()
        duplicate.devices, duplicate.device_holds = self.devices, self.device_holds.copy()
        duplicate.codes, duplicate._empty_codes = self.codes, self._empty_codes
        return duplicate

    def copy_with(self, holdings: Iterable[Holding]) -> "NodeState":
        """A copy of the node with these holdings added."""
        duplicate = self.copy()
        for holding in holdings:
            duplicate.apply_assignment(holding.assignment, holding.mps_client, 1)
        return duplicate

    def copy_without_pods(self) -> "NodeState":
        """A copy of the node without any shares."""
        duplicate = self.copy()
        duplicate.clear_shares()
        return duplicate

    def reset(self, kinds: CardKinds, cards: Sequence[Card], held_uses: Iterable[CardUse]) -> None:
        """Set the node's cards, without shares. The caller then counts the shares again.

        held_uses: the shares that pods hold here. If the node no longer has their card, the card's kind is kept.
        """
        kinds_before = [*self.kinds, *self.former_kinds.values()]
        former = [(use, self.kind_of_share(use)) for use in held_uses]
        self.cards = sorted(cards, key=lambda card: card.index)
        self.kinds = [kinds.add_card(card, self.kept_back) for card in self.cards]
        self.kind_set = frozenset(self.kinds)
        self.former_kinds = {}
        for use, kind in former:
            if kind != UNKNOWN_KIND:
                self.record_kind_of(kinds, use, kinds.get(kind))
        for kind in kinds_before:  # last, so that a kind that remains in use does not end
            kinds.remove_card(kind)
        self.usable = [card.usable_mib(self.kept_back) for card in self.cards]
        self.largest = max(self.usable, default=0)
        self.open_card_count = sum(card.accepts_shares for card in cards)
        self.clear_shares()

    def clear_shares(self) -> None:
        """Set all counts to those of cards without shares."""
        self.free = self.usable.copy()
        self.used = [0] * len(self.cards)
        self.free_core = [self.core] * len(self.cards)
        self.clients = [0] * len(self.cards)
        self.mps = CardTaints(self.cards)
        self.tenants = CardTenants(len(self.cards))
        self.max_card_clients = [self._limit_clients(self.mps.max_clients(i)) for i in range(len(self.cards))]
        self.codes = self._empty_codes = None

    def _limit_clients(self, reported: int) -> int:
        """The maximum number of clients of a card, limited by the setting.

        reported: the number that the MPS manager reports; 0 if it reports none.
        """
        if self.max_clients is None:
            return reported or MAX_CLIENTS
        return min(reported, self.max_clients) if reported else self.max_clients

    def record_kind_of(self, kinds: CardKinds, use: CardUse, kind: CardKind) -> None:
        """Record the kind of these shares' card, if the card was removed and its kind is unknown."""
        card = card_of(use)
        if card not in self.former_kinds and self.position(use) is None:
            self.former_kinds[card] = kinds.add_card(kind)

    def forget(self, kinds: CardKinds, card: str | int) -> None:
        """Forget a removed card whose last share has ended."""
        kinds.remove_card(self.former_kinds.pop(card))


def card_of(share: CardShare | CardUse) -> str | int:
    """The identifier of the share's card on its node: the UUID, or in gpushare's assignments the index."""
    return share.uuid or share.index
