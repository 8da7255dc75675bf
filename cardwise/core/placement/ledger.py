"""The ledger: which pod holds which cards and devices. It is a cache of the pods' annotations and never a second source
of truth.

`nodestate` counts the free amounts of each node. The ledger is not thread-safe: the owner must lock it.

A share counts on the node that now reports the UUID of the share's card. A machine may come back under another name.
Then the shares on its cards count on the new node, although the pods still have the old node (docs/design/0031). If two
nodes report one UUID, its shares count on both. If the card of a share is not reported by any node, the share counts
only in the total of the pod's own node. Shares of gpushare's pods name an index and count on the pod's own node.

Holdings stay when cards change. If cards of a node are added, changed or removed, the node's lists are counted again
from its holdings. So the order of events does not matter. The amounts of each namespace by kind of card, for quotas,
are also independent of the order: a removed card keeps its kind while a pod holds a share of the card. The reason is
that the node or the ExtendedResource may be missing for a moment while the pods run. Devices other than GPUs are
counted by UUID, whether a node has them or not.

A snapshot is a separate ledger that shares unchanged nodes with this ledger. Each change of a node raises the ledger's
generation, and the node records the generation of its last change. `snapshot` records the current generation. A node of
this or an earlier generation may be shared, so each ledger changes only a copy of such a node. Example: at generation 7
a snapshot is taken. A pod is then placed on n1, which was last changed at 5: the ledger copies n1, and its n1 is of
generation 8. The next pod on n1 needs no copy, since 8 is after 7. n2 is one object in both.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

from immutables import Map

from cardwise.core.api import quotas
from cardwise.core.api.assignment import Assignment, CardShare, CardUse
from cardwise.core.api.cards import FULL_CORE, POSITION_BITS, POSITION_MASK, Card
from cardwise.core.api.quotas import NO_CHARGE, Charge
from cardwise.core.placement.cardindex import KIND_SHIFT, USED_TAINT, CardIndex, IndexEntry
from cardwise.core.placement.cardtenants import EXCLUSIVE_TAINT
from cardwise.core.placement.devices import Device, sort_devices
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import UNKNOWN_KIND, CardKind, CardKinds
from cardwise.core.placement.memoryindex import MemoryIndex
from cardwise.core.placement.nodesbyuuid import NodesByUuid
from cardwise.core.placement.nodestate import NodeState, card_of
from cardwise.core.values.quantity import MiB

# The kinds of cards that a node no longer has, by node and `card_of`.
FormerKinds = Mapping[tuple[str, str | int], CardKind]


class Ledger:
    """All nodes and all holdings.

    kept_back: MiB of each card that stay free, for the driver, CUDA contexts and the MPS server; None for the headroom
        that each card has.
    max_clients: the maximum number of shares on one card; MPS may allow fewer. None for MPS's own maximum, or
        `MAX_CLIENTS` if it is unknown.
    core: percent of a card's SMs that may be reserved in total.
    """

    def __init__(
        self, *, kept_back: MiB | None = MiB(0), max_clients: int | None = None, core: int = FULL_CORE
    ) -> None:
        self.kinds = CardKinds()
        self._index: CardIndex | None = CardIndex()  # None: a snapshot
        self._by_memory = MemoryIndex()
        self._touched: set[str] = set()  # nodes that have changed since the indexes were refreshed
        self._watched: list[set[str]] = []  # see `watch`
        self.kept_back = kept_back
        self.max_clients = max_clients
        self.core = core
        self.managed: set[str] = set()  # nodes with an MPS manager
        # By namespace, the number of pods that share cards within the namespace only.
        self.exclusive_pods: dict[str, int] = {}
        self._nodes: dict[str, NodeState] = {}
        self._holdings: Map[str, Holding] = Map()
        self._usage: dict[str, Mapping[int, Charge]] = {}  # by namespace and kind; mappings are replaced, never changed
        self._cards, self._devices = NodesByUuid(), NodesByUuid()
        self._generation = 0  # counts changes of nodes; each node records the count at its last change
        self.kind_changes = 0  # counts changes of results of `kind_of_share`
        self._shared_until = -1  # nodes of this and earlier generations may be shared with a snapshot

    def snapshot(self) -> "Ledger":
        """An independent copy of this ledger: later changes of one do not affect the other.

        Only references to nodes and holdings are copied. The copy has no indexes, so the placement engine checks its
        nodes one by one. Changes of the copy are not recorded in the sets that `watch` returned.
        """
        duplicate = Ledger(kept_back=self.kept_back, max_clients=self.max_clients, core=self.core)
        duplicate.kinds, duplicate._index, duplicate.managed = self.kinds.copy(), None, self.managed.copy()
        duplicate.exclusive_pods = self.exclusive_pods.copy()
        duplicate._nodes, duplicate._usage, duplicate._holdings = self._nodes.copy(), self._usage.copy(), self._holdings
        duplicate._cards, duplicate._devices = self._cards.copy(), self._devices.copy()
        duplicate.kind_changes = self.kind_changes
        duplicate._generation = duplicate._shared_until = self._shared_until = self._generation
        return duplicate

    @property
    def has_index(self) -> bool:
        """Whether `index` and `memory_index` may be called. False for a snapshot."""
        return self._index is not None

    @property
    def generation(self) -> int:
        """The count of changes of nodes; `NodeState.generation` is the count at the node's last change."""
        return self._generation

    def nodes_changed_since(self, generation: int) -> list[str]:
        """The nodes whose last change came after this generation; not those that were removed."""
        if generation == self._generation:
            return []
        return [name for name, state in self._nodes.items() if state.generation > generation]

    def empty_copy(self) -> "Ledger":
        """An empty ledger with the same settings."""
        return Ledger(kept_back=self.kept_back, max_clients=self.max_clients, core=self.core)

    def node(self, name: str) -> NodeState | None:
        """The state of the node; None if the node has no cards, devices and holdings."""
        return self._nodes.get(name)

    def nodes_by_name(self) -> Mapping[str, NodeState]:
        """All nodes by name, for callers that need thousands. Do not keep the mapping."""
        return self._nodes

    def nodes(self) -> Iterator[NodeState]:
        """All nodes in the order of their names."""
        return iter(sorted(self._nodes.values(), key=lambda node: node.name))

    def holding(self, uid: str) -> Holding | None:
        """The holding of the pod with this UID; None if the pod holds nothing."""
        return self._holdings.get(uid)

    def index(self) -> CardIndex:
        """The index of all open cards by free memory, brought up to date."""
        return self._refresh()

    def memory_index(self) -> MemoryIndex:
        """The index of nodes by memory, brought up to date."""
        self._refresh()
        return self._by_memory

    @property
    def unindexed_count(self) -> int:
        """The number of nodes that have changed since the indexes were brought up to date."""
        return len(self._touched)

    def index_some(self, nodes: int) -> bool:
        """Update the indexes for at most this number of changed nodes. Returns whether more nodes have changed."""
        self._refresh(nodes)
        return bool(self._touched)

    def watch(self) -> set[str]:
        """A set to which changed nodes are added; initially it has all nodes. The caller empties it after reading."""
        watched = set(self._nodes)
        self._watched.append(watched)
        return watched

    def holdings(self, node: str | None = None) -> list[Holding]:
        """All holdings, or the holdings on one node. The latter belong to the node's own pods, and to other nodes' pods
        that hold one of its cards or devices.
        """
        if node is None:
            return [holding for state in self._nodes.values() for holding in state.holdings.values()]
        state = self._nodes.get(node)
        return [self._holdings[uid] for uid in sorted({*state.holdings, *state.foreign_hold_counts})] if state else []

    def nodes_of(self, holding: Holding) -> set[str]:
        """The nodes on which the holding counts: the node of its pod, and other nodes that report one of its cards or
        devices.
        """
        return {holding.node} | self.nodes_with(holding.assignment)

    def nodes_with(self, assignment: Assignment) -> set[str]:
        """The nodes that report a card or device of the assignment."""
        nodes = set[str]()
        for use in assignment.card_uses():
            nodes.update(self._cards.nodes(use.uuid))
        for device in assignment.non_gpu_devices():
            nodes.update(self._devices.nodes(device.uuid))
        return nodes

    def counts_on(self, node: str, holding: Holding, uuid: str) -> bool:
        """Whether the holding's part of this card or device counts on the node."""
        nodes = self._cards.nodes(uuid) or self._devices.nodes(uuid)
        return node in nodes if nodes else node == holding.node

    def shared_uuids(self) -> dict[str, tuple[str, ...]]:
        """The nodes of each card or device that several nodes report, by UUID."""
        return {**self._cards.shared(), **self._devices.shared()}

    def namespaces(self) -> Iterable[str]:
        """The namespaces whose pods hold cards. Do not keep the view."""
        return self._usage

    def usage_by_kind(self, namespace: str) -> Mapping[int, Charge]:
        """The amounts that the namespace holds on cards of each kind (see `kind_of_share`). Do not keep the mapping."""
        return self._usage.get(namespace, {})

    def kind_of_share(self, node: str, share: CardShare | CardUse) -> int:
        """The kind that quotas use to count a share of a pod on this node. It is the last kind that this node reported
        for the share's card, even if the card was removed. Reports of other nodes do not count, because a compromised
        node could change the charges of other nodes' pods.

        `UNKNOWN_KIND`, which every entry of a quota counts, if the node has not reported the card while a pod held it.
        """
        state = self._nodes.get(node)
        return state.kind_of_share(share) if state is not None else UNKNOWN_KIND

    def used_amounts(self, namespace: str, entry: quotas.QuotaEntry) -> Charge:
        """The amounts that the namespace holds on the cards that a quota entry covers."""
        return self.kinds.covered_charge(self.usage_by_kind(namespace), entry)

    def __len__(self) -> int:
        return len(self._holdings)

    def set_cards(self, node: str, cards: Iterable[Card]) -> set[str]:
        """Set the cards of the node. A node without cards, devices and holdings is removed. Returns the other nodes
        whose counts have changed.
        """
        cards = list(cards)
        state = self._state(node)
        if state.cards == sorted(cards, key=lambda card: card.index):
            self._forget_if_empty(state)
            return set()
        self._mark_changed(node)
        uuids_before, uuids_now = {card.uuid for card in state.cards}, {card.uuid for card in cards}
        recounted = self._recounted(state, self._cards, uuids_before, uuids_now)
        for holding in recounted:
            self._count(holding, -1)
        state = self._own(node)
        (self.managed.add if any(card.mps for card in cards) else self.managed.discard)(node)
        self._cards.set_uuids(node, uuids_before, uuids_now)
        kinds_before = state.kinds_by_card()
        state.reset(
            self.kinds, cards, [use for holding in state.holdings.values() for use in holding.assignment.card_uses()]
        )
        self.kind_changes += state.kinds_by_card() != kinds_before
        for holding in recounted:
            self._count(holding, 1)
        self._forget_if_empty(state)
        return self._other_nodes(state, recounted)

    def set_other_devices(self, node: str, devices: Iterable[Device]) -> set[str]:
        """Set the devices of the node other than GPUs. A node without cards, devices and holdings
        is removed. Returns the other nodes whose counts have changed.
        """
        state = self._own(self._state(node).name)
        uuids_before = {device.uuid for device in state.devices}
        state.devices = sort_devices(devices)
        uuids_now = {device.uuid for device in state.devices}
        other_nodes: set[str] = set()
        if uuids_before != uuids_now:
            recounted = self._recounted(state, self._devices, uuids_before, uuids_now)
            for holding in recounted:
                self._count_devices(holding, -1)
            self._devices.set_uuids(node, uuids_before, uuids_now)
            for holding in recounted:
                self._count_devices(holding, 1)
            other_nodes = self._other_nodes(state, recounted)
        self._forget_if_empty(state)
        return other_nodes

    def set_holding(self, holding: Holding) -> None:
        """Set the pod's holding; it replaces an earlier one."""
        self._replace_holding(holding.uid, holding)

    def release(self, uid: str) -> None:
        """Remove the pod's holding, if it has one."""
        self._replace_holding(uid, None)

    @contextmanager
    def what_if(self, *, released: Iterable[str] = (), added: Iterable[Holding] = ()) -> Iterator[None]:
        """Context manager: inside, the pods `released` hold nothing, and the ledger has the holdings `added`, too.

        Restores the ledger at the end, also after an exception. Inside, nothing else may change what these pods hold.
        """
        undone: list[tuple[str, Holding | None, FormerKinds]] = []
        try:
            changes = [(uid, None) for uid in released] + [(holding.uid, holding) for holding in added]
            undone.extend((uid, self._holdings.get(uid), self._replace_holding(uid, after)) for uid, after in changes)
            yield
        finally:
            for uid, holding_before, former_kinds in reversed(undone):
                self._restore_holding(uid, holding_before, former_kinds)

    def violations(self) -> list[str]:
        """The violations of rule 1, for tests: overcommitted cards, and devices that two pods hold."""
        overfull = [
            (node.name, uuid, capacity)
            for node in self.nodes()
            for uuid, capacity in sorted(node.overcommitted().items())
        ]
        return [
            f"{name}: {uuid} is overcommitted: more than its {capacity} is assigned"
            for name, uuid, capacity in overfull
        ]

    def _replace_holding(self, uid: str, holding: Holding | None) -> FormerKinds:
        """Set the pod's holding; None: it holds nothing. Returns what `_restore_holding` needs."""
        holding_before = self._holdings.get(uid)
        if holding is not None and holding_before is not None and holding.counts_like(holding_before):
            # Only the phase or the name is new: nothing to count.
            self._own(holding.node).holdings[uid] = holding
            self._holdings = self._holdings.set(uid, holding)
            return {}
        former_kinds = self._remove_holding(holding_before) if holding_before is not None else {}
        if holding is not None:
            self._add_holding(holding, former_kinds)
        return former_kinds

    def _restore_holding(self, uid: str, holding_before: Holding | None, former_kinds: FormerKinds) -> None:
        current_holding = self._holdings.get(uid)
        newer_kinds = self._remove_holding(current_holding) if current_holding is not None else {}
        if holding_before is not None:
            self._add_holding(holding_before, {**former_kinds, **newer_kinds})

    def _refresh(self, nodes: int | None = None) -> CardIndex:
        """Update both indexes for at most this many nodes, or for all. Returns the index of cards."""
        if self._index is None:
            raise AssertionError("a snapshot has no index")
        changed = list(islice(self._touched, nodes))
        if changed:
            self._index.refresh((name, self._open_cards(name)) for name in changed)
            self._by_memory.refresh((name, self._nodes.get(name)) for name in changed)
            self._touched.difference_update(changed)
        return self._index

    def _mark_changed(self, name: str) -> None:
        if self._index is not None:
            self._touched.add(name)
        for watched in self._watched:
            watched.add(name)

    def _open_cards(self, name: str) -> list[IndexEntry]:
        state = self._nodes.get(name)
        if state is None:
            return []
        groups = [
            kind << KIND_SHIFT
            | (USED_TAINT if state.clients[i] else 0)
            | (EXCLUSIVE_TAINT if state.tenants.is_exclusive(i) else 0)
            | state.mps.taints[i]
            for i, kind in enumerate(state.kinds)
        ]
        return [
            (code >> POSITION_BITS, name, i := code & POSITION_MASK, groups[i]) for code in state.codes_fullest_first()
        ]

    def _state(self, name: str) -> NodeState:
        state = self._nodes.get(name)
        if state is None:
            state = NodeState(name, kept_back=self.kept_back, max_clients=self.max_clients, core=self.core)
            self._nodes[name] = state
        return state

    def _own(self, name: str) -> NodeState:
        """The node's state, to be changed: a copy if a snapshot may share the state. Call this before each change."""
        state = self._nodes[name]
        if state.generation <= self._shared_until:
            state = self._nodes[name] = state.copy()
        self._generation += 1
        state.generation = self._generation
        return state

    def _recounted(
        self, state: NodeState, nodes_by_uuid: NodesByUuid, before: Iterable[str], now: Iterable[str]
    ) -> list[Holding]:
        """The holdings whose counts may change when the node's UUIDs change from `before` to `now`."""
        uids = dict.fromkeys((*state.holdings, *state.foreign_hold_counts))
        for uuid in set(now).difference(before):
            uids |= dict.fromkeys(nodes_by_uuid.pods_whose_node_lacks(uuid))
            for name in nodes_by_uuid.nodes(uuid):  # another node also reports this UUID
                uids |= dict.fromkeys((*self._nodes[name].holdings, *self._nodes[name].foreign_hold_counts))
        return [self._holdings[uid] for uid in uids]

    def _other_nodes(self, state: NodeState, recounted: Iterable[Holding]) -> set[str]:
        """The other nodes on which holdings of other nodes' pods count.

        state: this node.
        recounted: the holdings.
        """
        foreign = (holding for holding in recounted if holding.node != state.name)
        return set().union(*map(self.nodes_of, foreign)) - {state.name}

    def _add_holding(self, holding: Holding, former_kinds: FormerKinds) -> None:
        """Add the holding.

        former_kinds: the kinds of the holding's removed cards, as recorded with the pod's former holding.
        """
        state = self._own(self._state(holding.node).name)
        self._holdings = self._holdings.set(holding.uid, holding)
        state.holdings[holding.uid] = holding
        self._mark_changed(holding.node)
        for use in holding.assignment.card_uses() if former_kinds else ():
            kind = former_kinds.get((holding.node, card_of(use)))
            if kind is not None:
                state.record_kind_of(self.kinds, use, kind)
                self.kind_changes += 1
        self._count(holding, 1)
        self._count_devices(holding, 1)
        self._count_exclusive(holding, 1)

    def _remove_holding(self, holding: Holding) -> FormerKinds:
        """Remove the holding. Returns the kinds of its removed cards, which the ledger no longer has."""
        state = self._own(holding.node)
        self._holdings = self._holdings.delete(holding.uid)
        state.holdings.pop(holding.uid, None)
        self._mark_changed(holding.node)
        self._count(holding, -1)
        self._count_devices(holding, -1)
        self._count_exclusive(holding, -1)
        former_kinds = self._forget_former_kinds(state, holding) if state.former_kinds else {}
        self._forget_if_empty(state)
        return former_kinds

    def _forget_former_kinds(self, state: NodeState, holding: Holding) -> FormerKinds:
        cards = {card_of(use) for use in holding.assignment.card_uses()} & state.former_kinds.keys()
        kinds = {(state.name, card): self.kinds.get(state.former_kinds[card]) for card in cards}
        for holding_there in state.holdings.values():
            if not cards:
                break  # each card has another holding; usually the first few holdings show this
            cards.difference_update(card_of(use) for use in holding_there.assignment.card_uses())
        for card in cards:
            state.forget(self.kinds, card)
            self.kind_changes += 1
        return kinds

    def _count(self, holding: Holding, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) the holding's cards on every node that reports them, and its charge once."""
        own = self._own(holding.node)
        usage = dict(self._usage.get(holding.namespace, {}))
        for use in holding.assignment.card_uses():
            homes = self._cards.nodes(use.uuid)
            if not homes or homes == own.own_name:
                kind = own.apply_card_use(use, sign, holding.mps_client)
            else:
                kind = self.kind_of_share(own.name, use)
                for name in homes:
                    self._own(name).apply_card_use(use, sign, holding.mps_client)
            if homes != own.own_name:
                self._count_elsewhere(self._cards, own, holding.uid, use.uuid, sign)
            if not holding.charged:
                continue
            charge = quotas.charge_of_use(use)
            usage_before = usage.get(kind, NO_CHARGE)
            usage[kind] = usage_before.add(charge) if sign > 0 else usage_before.subtract(charge)
            if usage[kind] == NO_CHARGE:
                del usage[kind]
        if usage:
            self._usage[holding.namespace] = usage
        else:
            self._usage.pop(holding.namespace, None)

    def _count_devices(self, holding: Holding, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) the holding's devices other than GPUs."""
        own = self._nodes[holding.node]
        for device in holding.assignment.non_gpu_devices():
            homes = self._devices.nodes(device.uuid)
            for name in homes or own.own_name:
                self._own(name).apply_device_hold(device.uuid, sign)
            if homes != own.own_name:
                self._count_elsewhere(self._devices, own, holding.uid, device.uuid, sign)

    def _count_exclusive(self, holding: Holding, sign: int) -> None:
        """Count (sign 1) or no longer count (sign -1) a pod that shares cards within its namespace only."""
        tenant = holding.mps_client.tenant
        if tenant.exclusive:
            pods = self.exclusive_pods.get(tenant.namespace, 0) + sign
            if pods:
                self.exclusive_pods[tenant.namespace] = pods
            else:
                del self.exclusive_pods[tenant.namespace]

    def _count_elsewhere(self, nodes_by_uuid: NodesByUuid, own: NodeState, uid: str, uuid: str, sign: int) -> None:
        """Count a card or device that the pod's node `own` does not report, or that other nodes report as well."""
        if not uuid:
            return
        homes = nodes_by_uuid.nodes(uuid)
        if own.name not in homes:
            nodes_by_uuid.count_holding_elsewhere(uuid, uid, sign)
        for name in homes:
            if name != own.name:
                self._own(name).apply_foreign_hold(uid, sign)
                self._mark_changed(name)

    def _forget_if_empty(self, state: NodeState) -> None:
        if not state.cards and not state.devices and not state.holdings:
            self._nodes.pop(state.name, None)
