"""Rules 1 and 3 of docs/architecture.md on the ledger, and its count for quotas, for any order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardwise.core.api import assignment, policies, quotas, request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import NO_CHARGE, QuotaEntry
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import UNKNOWN_KIND
from cardwise.core.placement.ledger import Ledger
from tests.build import IN_USE, OUT_OF_USE, container, pod
from tests.examples import examples

NODES = ["n1", "n2", "n3"]
NAMESPACES = ["d", "e"]
TYPES = [("", frozenset(), 0), ("A", frozenset({"a"}), 0), ("B", frozenset({"a", "b"}), 3)]
ENTRIES = [
    QuotaEntry(),
    QuotaEntry(resource_class="a"),
    QuotaEntry(resource_class="b"),
    QuotaEntry(model="A"),
    QuotaEntry(model="B"),
]

sizes = st.integers(1, 120)
asked_containers = st.one_of(
    st.builds(lambda m: container(gpu_mem=m), sizes),
    st.builds(lambda m, n: container(gpu_mem=m * n, gpu_count=n), st.integers(1, 60), st.integers(2, 3)),
    st.builds(lambda n: container(gpu_count=n), st.integers(1, 3)),
    st.builds(lambda m, c: container(gpu_mem=m, gpu_core=c), sizes, st.integers(1, 33)),
)
asked_pods = st.builds(
    lambda containers: request.parse(pod(containers=containers)), st.lists(asked_containers, min_size=1, max_size=3)
)
card_lists = st.lists(
    st.tuples(st.sampled_from([40, 80, 100]), st.sampled_from([IN_USE, IN_USE, *OUT_OF_USE]), st.sampled_from(TYPES)),
    min_size=0,
    max_size=4,
)
policy_names = st.sampled_from(policies.CARD_POLICIES)


def make_cards(node, described):
    return [
        Card(index=i, uuid=f"{node}-{mem}-{i}", mem=mem, model=model, classes=classes, priority=priority, **state)
        for i, (mem, state, (model, classes, priority)) in enumerate(described)
    ]


def recounted(ledger, namespace, known):
    """What the namespace holds on each kind of card, from nothing but the kinds of the held cards and the holdings."""
    used = {}
    for h in ledger.holdings():
        for share in h.assignment.shares() if h.namespace == namespace else ():
            kind = known[h.node, share.uuid]
            used[kind] = used.get(kind, NO_CHARGE).add(quotas.Charge(1, share.mem, int(share.whole)))
    return used


def usage(ledger, namespace):
    of_kinds = ledger.usage_by_kind(namespace).items()
    return {kind if kind == UNKNOWN_KIND else ledger.kinds.get(kind): charge for kind, charge in of_kinds}


def picture(ledger):
    """All that can be seen of a ledger."""
    nodes = {
        node.name: (
            node.cards,
            list(node.free),
            list(node.free_core),
            list(node.clients),
            list(node.used),
            sorted(node.holdings),
        )
        for node in ledger.nodes()
    }
    return nodes, [usage(ledger, namespace) for namespace in NAMESPACES]


def complete_picture(ledger):
    """All that planners read."""
    nodes = {
        node.name: (
            node.generation,
            list(node.codes_fullest_first()),
            list(node.codes_of_empty_cards()),
            node.former_kinds.copy(),
        )
        for node in ledger.nodes()
    }
    allowed = {entry: ledger.kinds.allowed("", [entry]) for entry in ENTRIES}
    return picture(ledger), nodes, allowed, sorted(ledger.holdings(), key=lambda h: h.uid)


def rebuilt(ledger, known):
    """The same ledger from nothing but its cards and holdings, and what is known of held cards that are gone."""
    anew = Ledger()
    for h in ledger.holdings():
        anew.set_holding(h)
    for node in ledger.nodes():
        here = {card.uuid for card in node.cards}
        former_kinds = [
            Card(index=100 + i, uuid=uuid, mem=1, classes=kind[0], model=kind[1], priority=kind[2])
            for i, ((name, uuid), kind) in enumerate(known.items())
            if name == node.name and uuid not in here and kind != UNKNOWN_KIND
        ]
        anew.set_cards(node.name, [*node.cards, *former_kinds])
        anew.set_cards(node.name, node.cards)
    return anew


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.next_uid = 0
        self.known = {}  # by node and UUID, the kinds that held cards have or had when they were last there
        self.snapshots = []  # of the last steps, each with the picture of the ledger when it was taken

    @initialize(kind=st.sampled_from(TYPES))
    def there_is_a_card(self, kind):
        """Else most stories are of no cards and no pods."""
        self.ledger.set_cards("n1", make_cards("n1", [(100, IN_USE, kind)]))

    def know(self):
        """Called after each step, and cards change in steps of their own."""
        held = {(h.node, share.uuid) for h in self.ledger.holdings() for share in h.assignment.shares()}
        here = {
            (node.name, card.uuid): (card.classes, card.model, card.priority)
            for node in self.ledger.nodes()
            for card in node.cards
        }
        self.known = {card: here.get(card, self.known.get(card, UNKNOWN_KIND)) for card in held}
        return self.known

    @rule(node=st.sampled_from(NODES), cards=card_lists)
    def cards_change(self, node, cards):
        self.ledger.set_cards(node, make_cards(node, cards))

    @rule(node=st.sampled_from(NODES))
    def cards_are_away_for_a_moment(self, node):
        """A Node that was deleted and comes back leaves everything as it was."""
        before = picture(self.ledger)
        state = self.ledger.node(node)
        cards = state.cards if state is not None else []
        self.ledger.set_cards(node, [])
        self.ledger.set_cards(node, cards)
        assert picture(self.ledger) == before

    @rule(node=st.sampled_from(NODES))
    def cards_go(self, node):
        self.ledger.set_cards(node, [])

    @rule(pod_request=asked_pods, policy=policy_names, namespace=st.sampled_from(NAMESPACES))
    def pod_is_placed(self, pod_request, policy, namespace):
        placed = placement.place(self.ledger, NODES, pod_request, policy)
        if isinstance(placed, placement.Unplaceable):
            assert set(placed.refusals) == set(NODES)
            return
        before = picture(self.ledger)
        self.next_uid += 1
        uid = f"u{self.next_uid}"
        with self.ledger.what_if(added=[Holding(uid, namespace, uid, placed.node, placed.assignment)]):
            assert self.ledger.holding(uid) is not None
        assert picture(self.ledger) == before
        self.ledger.set_holding(Holding(uid, namespace, uid, placed.node, placed.assignment))
        node = self.ledger.node(placed.node)
        for share in placed.assignment.shares():
            i = node.position(share)
            assert node.cards[i].healthy
            assert not node.cards[i].cordoned
            assert node.free[i] >= 0
            assert node.used[i] <= node.cards[i].mem
            assert node.free_core[i] >= 0

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data())
    def pod_ends(self, data):
        uid = data.draw(st.sampled_from(sorted(h.uid for h in self.ledger.holdings())))
        before = picture(self.ledger)
        with self.ledger.what_if(released=[uid]):
            assert self.ledger.holding(uid) is None
        assert picture(self.ledger) == before
        self.ledger.release(uid)
        assert self.ledger.holding(uid) is None

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data(), node=st.sampled_from(NODES), namespace=st.sampled_from(NAMESPACES))
    def pod_is_held_elsewhere(self, data, node, namespace):
        uid = data.draw(st.sampled_from(sorted(h.uid for h in self.ledger.holdings())))
        before = picture(self.ledger)
        held = self.ledger.holding(uid)
        with self.ledger.what_if(added=[Holding(uid, namespace, uid, node, held.assignment)]):
            assert self.ledger.holding(uid).node == node
        assert picture(self.ledger) == before
        # Only to another namespace: the cards of another node would be over-full with it.
        self.ledger.set_holding(Holding(uid, namespace, uid, held.node, held.assignment))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), pod_request=asked_pods, policy=policy_names)
    def pod_is_placed_in_a_snapshot(self, data, pod_request, policy):
        """The policy decides there as it does here, by other means: a snapshot has no index."""
        snapshot, _ = self.snapshots.pop(data.draw(st.integers(0, len(self.snapshots) - 1)))
        live, of_snapshot = complete_picture(self.ledger), complete_picture(snapshot)
        again = snapshot.snapshot()
        placed = placement.place(snapshot, NODES, pod_request, policy)
        if of_snapshot == live:
            assert placed == placement.place(self.ledger, NODES, pod_request, policy)
        for h in snapshot.holdings():
            if data.draw(st.booleans(), label=f"{h.uid} ends"):
                snapshot.release(h.uid)
        if isinstance(placed, placement.Placement):
            snapshot.set_holding(Holding("new", NAMESPACES[0], "new", placed.node, placed.assignment))
        snapshot.set_cards("n1", [])
        assert complete_picture(self.ledger) == live
        assert complete_picture(again) == of_snapshot
        assert picture(rebuilt(self.ledger, self.know())) == picture(self.ledger)

    @invariant()
    def snapshots_are_as_they_were_taken(self):
        for snapshot, expected in self.snapshots:
            assert complete_picture(snapshot) == expected
        self.snapshots = [*self.snapshots[-2:], (self.ledger.snapshot(), complete_picture(self.ledger))]

    @rule()
    def everything_ends(self):
        for h in self.ledger.holdings():
            self.ledger.release(h.uid)
        for node in self.ledger.nodes():
            assert node.used == [0] * len(node.cards)
            assert node.free == [card.mem for card in node.cards]
        assert not any(self.ledger.usage_by_kind(namespace) for namespace in NAMESPACES)

    @invariant()
    def incremental_equals_rebuilt(self):
        assert picture(rebuilt(self.ledger, self.know())) == picture(self.ledger)

    @invariant()
    def usage_is_what_a_recount_gives(self):
        for namespace in NAMESPACES:
            recount = recounted(self.ledger, namespace, self.know())
            assert usage(self.ledger, namespace) == recount
            for entry in ENTRIES:
                covered = [
                    charge
                    for kind, charge in recount.items()
                    if entry.covers(*((frozenset(), "") if kind == UNKNOWN_KIND else kind[:2]))
                ]
                assert self.ledger.used_amounts(namespace, entry) == quotas.sum_charges(covered)

    @invariant()
    def kinds_are_those_of_the_cards(self):
        for node in self.ledger.nodes():
            expected = [(card.classes, card.model, card.priority) for card in node.cards]
            assert [self.ledger.kinds.get(kind) for kind in node.kinds] == expected

    @invariant()
    def kinds_live_as_long_as_their_cards(self):
        """Those that are there, and those that are gone and held. Here every kind is of a model of its own."""
        models = {card.model for node in self.ledger.nodes() for card in node.cards}
        models |= {kind[1] for kind in self.know().values() if kind != UNKNOWN_KIND}
        for model, _, _ in TYPES[1:]:
            others = self.ledger.kinds.allowed("", [QuotaEntry(model=model, shares=0)])
            assert (others is None) == (model not in models), "closing the cards of a model closes something"


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(40, soak=1000), stateful_step_count=30, deadline=None)


card_shares = st.builds(
    lambda i, mem, core, spare, whole: CardShare(i, f"GPU-{i}", mem, core, mem + spare, whole),
    st.integers(0, 15), st.integers(1, 200_000), st.integers(0, 100), st.sampled_from([0, 0, 1, 1000]), st.booleans(),
)  # fmt: skip
assignments = st.dictionaries(
    st.sampled_from(["0", "1", "7", "init-0", "init-12"]),
    st.lists(card_shares, min_size=1, max_size=8).map(tuple),
    min_size=1,
).map(Assignment)


@given(assignments)
def test_the_codec_round_trips(assigned):
    written = assignment.encode(assigned, assume_time_ns=1)
    assert assignment.decode(written) == assigned
    assert all(isinstance(text, str) for text in written.values())
    assert all(len(key.rpartition("/")[2]) <= 63 for key in written)
