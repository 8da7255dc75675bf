"""Rules 1, 3 and 5 of docs/architecture.md where cards and devices move between nodes, and where two nodes report one.

A machine that comes back under another name has its cards with it, while the pods of its former name still hold them.
"""

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cardwise.core.api import quotas
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import NO_CHARGE
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import UNKNOWN_KIND
from cardwise.core.placement.ledger import Ledger
from tests.examples import examples

NODES = ["n1", "n2", "n3"]
NAMESPACES = ["d", "e"]
UUIDS = ["GPU-a", "GPU-b", "GPU-c"]
DEVICES = ["rdma-a", "rdma-b"]
MODELS = ["", "A", "B"]
SIZE = 100

uids = st.sampled_from([f"u{i}" for i in range(6)])
nodes = st.sampled_from(NODES)
shares = st.builds(
    lambda i, mem, core, legacy: CardShare(i, "" if legacy else UUIDS[i], mem, core, SIZE),
    st.integers(0, len(UUIDS) - 1),
    st.integers(1, 60),
    st.integers(0, 50),
    st.sampled_from([False, False, False, True]),
)
devices = st.lists(st.sampled_from(DEVICES), unique=True).map(tuple)
assignments = st.builds(
    lambda card_shares, others: Assignment(
        {"0": tuple(card_shares)}, {"0": tuple(AssignedDevice("nic", uuid) for uuid in others)} if others else {}
    ),
    st.lists(shares, min_size=1, max_size=3),
    devices,
)
holdings = st.builds(
    lambda uid, namespace, node, assignment, charged: Holding(uid, namespace, uid, node, assignment, charged=charged),
    uids,
    st.sampled_from(NAMESPACES),
    nodes,
    assignments,
    st.sampled_from([True, True, True, False]),
)
reported = st.dictionaries(st.sampled_from(UUIDS), st.sampled_from(MODELS))


def as_cards(models):
    return [
        Card(index=UUIDS.index(uuid), uuid=uuid, mem=SIZE, model=model, classes=frozenset({model} - {""}))
        for uuid, model in models.items()
    ]


def as_devices(uuids):
    return [Device(index=DEVICES.index(uuid), uuid=uuid, kind="rdma", model="") for uuid in uuids]


class MovedCards(RuleBasedStateMachine):
    """A ledger beside the plainest way to count: every share on every card of its UUID."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.held = {}
        self.cards = {node: {} for node in NODES}
        self.devices = dict.fromkeys(NODES, ())
        self.models = {}  # of held cards, by the pod's node and UUID: see `model`
        self.kinds = 0, self.kinds_of_shares()

    def kinds_of_shares(self):
        named = [CardShare(i, uuid, 1, 0, SIZE) for i, uuid in enumerate(UUIDS)]
        legacy = [CardShare(i, "", 1, 0, SIZE) for i in range(len(UUIDS))]
        return {
            (node, card_of(share)): self.ledger.kind_of_share(node, share) for node in NODES for share in named + legacy
        }

    @invariant()
    def a_kind_that_changes_is_counted(self):
        changes_before, kinds_before = self.kinds
        self.kinds = self.ledger.kind_changes, self.kinds_of_shares()
        if self.ledger.kind_changes == changes_before:
            assert self.kinds[1] == kinds_before

    def step_done(self):
        keys = {
            (holding.node, card_of(share)) for holding in self.held.values() for share in holding.assignment.shares()
        }
        self.models = {key: self.model(*key, self.models.get(key)) for key in keys}

    def model(self, node, card, before):
        """The model of a held card as the pod's own node has reported it; None if it has not."""
        uuid = UUIDS[card] if isinstance(card, int) else card
        return self.cards[node].get(uuid, before)

    @rule(node=nodes, by_uuid=reported)
    def cards_are_reported(self, node, by_uuid):
        self.ledger.set_cards(node, as_cards(by_uuid))
        self.cards[node] = by_uuid
        self.step_done()

    @rule(old=nodes, new=nodes, first=st.booleans())
    def all_cards_move(self, old, new, first):
        """The report of the new name comes before the end of the old one, or after it."""
        moved = {**self.cards[new], **self.cards[old]}
        if first:
            self.cards_are_reported(new, moved)
        self.cards_are_reported(old, {})
        self.cards_are_reported(new, moved)
        self.devices_are_reported(new, tuple({*self.devices[new], *self.devices[old]}))
        if old != new:
            self.devices_are_reported(old, ())

    @rule(node=nodes, uuids=devices)
    def devices_are_reported(self, node, uuids):
        self.ledger.set_other_devices(node, as_devices(uuids))
        self.devices[node] = uuids

    @rule(holding=holdings)
    def pod_holds(self, holding):
        before = self.picture()
        with self.ledger.what_if(added=[holding]):
            pass
        assert self.picture() == before
        self.ledger.set_holding(holding)
        self.held[holding.uid] = holding
        self.step_done()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pod_ends(self, data):
        uid = data.draw(st.sampled_from(sorted(self.held)))
        before = self.picture()
        with self.ledger.what_if(released=[uid]):
            assert self.ledger.holding(uid) is None
        assert self.picture() == before
        self.ledger.release(uid)
        del self.held[uid]
        self.step_done()

    def picture(self):
        """All that can be seen of the ledger."""
        kinds = self.ledger.kinds
        of_nodes = [
            (
                node.name,
                node.cards,
                node.used,
                node.free,
                node.clients,
                node.device_holds,
                node.foreign_hold_counts,
                node.holdings,
            )
            for node in self.ledger.nodes()
        ]
        former_kinds = [
            {card: kinds.get(kind) for card, kind in node.former_kinds.items()} for node in self.ledger.nodes()
        ]
        return deepcopy((of_nodes, former_kinds, [self.charges(namespace) for namespace in NAMESPACES]))

    def charges(self, namespace):
        """What the ledger charges the namespace, by the models of cards."""
        return {
            None if kind == UNKNOWN_KIND else self.ledger.kinds.get(kind).model: charge
            for kind, charge in self.ledger.usage_by_kind(namespace).items()
        }

    @invariant()
    def each_share_counts_on_each_card_of_its_uuid(self):
        for node in self.ledger.nodes():
            for i, card in enumerate(node.cards):
                on_it = [
                    share
                    for holding in self.held.values()
                    for share in holding.assignment.shares()
                    if card_of(share) == card.uuid or (card_of(share), holding.node) == (card.index, node.name)
                ]
                assert node.used[i] == sum(share.mem for share in on_it)
                assert node.free[i] == SIZE - node.used[i]
                assert node.free_core[i] == SIZE - sum(share.core for share in on_it)
                assert node.clients[i] == len(on_it)

    @invariant()
    def each_device_is_taken_where_it_is(self):
        for node in self.ledger.nodes():
            expected = {}
            for holding in self.held.values():
                for device in holding.assignment.non_gpu_devices():
                    on_nodes = [name for name in NODES if device.uuid in self.devices[name]] or [holding.node]
                    if node.name in on_nodes:
                        expected[device.uuid] = expected.get(device.uuid, 0) + 1
            assert node.device_holds == expected

    @invariant()
    def holders_are_listed_where_they_hold(self):
        for node in self.ledger.nodes():
            here = {*self.cards[node.name], *self.devices[node.name]}
            expected = {
                holding.uid
                for holding in self.held.values()
                if holding.node == node.name or here & holding.assignment.uuids()
            }
            assert {holding.uid for holding in self.ledger.holdings(node.name)} == expected
            for holding in self.held.values():
                assert (node.name in self.ledger.nodes_of(holding)) == (holding.uid in expected)

    @invariant()
    def each_share_is_charged_once_by_what_its_card_is_or_was(self):
        for namespace in NAMESPACES:
            expected = {}
            for holding in self.held.values():
                for share in holding.assignment.shares() if holding.charged and holding.namespace == namespace else ():
                    model = self.models[holding.node, card_of(share)]
                    expected[model] = expected.get(model, NO_CHARGE).add(quotas.Charge(1, share.mem, int(share.whole)))
            assert self.charges(namespace) == expected

    @invariant()
    def kinds_live_as_long_as_their_cards(self):
        living = {model for models in self.cards.values() for model in models.values()}
        living |= {model for model in self.models.values() if model is not None}
        assert {kind.model for kind in self.ledger.kinds._kinds.values()} == living

    @invariant()
    def the_index_follows(self):
        expected = {
            (node.free[i], node.name, i)
            for node in self.ledger.nodes()
            for i in range(len(node.cards))
            if node.is_open(i) and node.free[i] >= 0
        }
        assert {entry[:3] for entry in self.ledger.index().smallest(0, NODES)} == expected


def card_of(share):
    return share.uuid or share.index


TestMovedCards = MovedCards.TestCase
TestMovedCards.settings = settings(max_examples=examples(60, soak=2000), stateful_step_count=25, deadline=None)
