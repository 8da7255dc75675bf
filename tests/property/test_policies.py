"""The engine after any sequence of events: what it keeps is what would be computed anew, and no card is over-full."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.nodefeatures import NodeFeatures
from cardwise.core.placement.scored.rows import ShapeScores
from cardwise.core.placement.scored.workload import learn_workload
from cardwise.core.values.quantity import MiB, Percent
from cardwise.core.values.refusals import Refusal
from tests.build import IN_USE, OUT_OF_USE

NODES = [f"n{i}" for i in range(6)]
MODELS = ["A", "B"]

nodes = st.sampled_from(NODES)
scored = st.just("priced")
requests = st.one_of(
    st.builds(
        lambda mem, core, kind: card_request(1, mem, core, kind),
        st.sampled_from([100, 160, 320, 470, 810, 1000, 1700]),
        st.sampled_from([0, 0, 30]),
        st.sampled_from(["", "", "A"]),
    ),
    st.builds(lambda cards, kind: card_request(cards, 0, 0, kind), st.integers(1, 3), st.sampled_from(["", "B"])),
    st.builds(lambda cards: card_request(cards, 300 * cards, 0, ""), st.integers(2, 3)),
    st.just(PodRequest(containers=())),
)
loads = st.builds(Load, st.integers(0, 4000), st.integers(0, 4000), st.just(1))
loads_of = st.one_of(st.none(), st.builds(Load, st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 8)))
card_lists = st.lists(
    st.tuples(
        st.sampled_from([1000, 1000, 2000]),
        st.sampled_from(MODELS),
        st.sampled_from([IN_USE, IN_USE, IN_USE, *OUT_OF_USE]),
    ),
    max_size=4,
)


def card_request(cards, mem, core, resource_class):
    part = ContainerRequest(
        key="0", name="main", cards=cards, mem=MiB(mem), core=Percent(core), resource_class=resource_class
    )
    return PodRequest(containers=(part,))


class Loads(dict):
    def free_load(self, node):
        return self.get(node)


class Engines(RuleBasedStateMachine):
    """One engine through everything, `at_once` small, beside what is computed anew."""

    @initialize(
        cards=st.lists(card_lists, min_size=len(NODES), max_size=len(NODES)),
        pod_requests=st.lists(requests, min_size=1),
    )
    def begin(self, cards, pod_requests):
        self.ledger, self.loads = Ledger(), Loads()
        self.engine = Engine(self.ledger, self.loads, max_scored_nodes=4)
        self.held = {}
        self.count = 0
        for node, of_node in zip(NODES, cards, strict=True):
            self.set_cards(node, of_node)
            self.set_room(node, Load(16_000, 16_000, 8))
        for request in pod_requests:
            self.engine.count_arrival(request, Load(1000, 1000, 1))
        self.learn()

    @rule(policy=scored, request=requests, load=loads, among=st.one_of(st.none(), st.sets(nodes)))
    def place(self, policy, request, load, among):
        before = {name: self.loads.get(name) for name in NODES}
        placed = self.engine.place(request, load, policy, among)
        if placed is None:
            return
        room = before[placed.node]
        assert among is None or placed.node in among
        assert room is not None
        assert room.pods > 0
        assert not load.cpu or room.cpu >= load.cpu
        assert not load.memory or room.memory >= load.memory
        wanted = request.containers[0] if request.containers else None
        shares = placed.assignment.shares()
        assert len(shares) == (wanted.cards if wanted else 0) == len({share.uuid for share in shares})
        for share in shares:
            state = self.ledger.node(placed.node)
            at = state.position(share)
            assert state.cards[at].healthy
            assert not state.cards[at].cordoned
            assert share.mem == (state.free[at] if wanted.whole else wanted.mem_per_card)
            assert not wanted.whole or not state.clients[at]
            assert not wanted.resource_class or wanted.resource_class in state.cards[at].classes
        self.count += 1
        self.ledger.set_holding(Holding(str(self.count), "ns", "p", placed.node, placed.assignment))
        self.held[str(self.count)] = placed.node, load
        self.charge(placed.node, load, -1)

    @precondition(lambda self: self.held)
    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice):
        uid = choice.choice(sorted(self.held))
        node, load = self.held.pop(uid)
        self.ledger.release(uid)
        self.charge(node, load, 1)

    @rule(node=nodes, cards=card_lists)
    def set_cards(self, node, cards):
        self.ledger.set_cards(
            node,
            [
                Card(index=i, uuid=f"{node}-{i}", mem=MiB(mem), model=model, classes=frozenset({model}), **state)
                for i, (mem, model, state) in enumerate(cards)
            ],
        )

    @rule(node=nodes, mem=st.sampled_from([100, 470, 810]))
    def fill(self, node, mem):
        """Somebody else comes, whom the engine has not placed."""
        self.engine.place(card_request(1, 470, 0, ""), Load(100, 100, 1), "priced")
        self.bring_all_up_to_date()
        placed = placement.place_on(self.ledger.kinds, self.ledger.node(node), card_request(1, mem, 0, ""), "spread")
        if not isinstance(placed, Refusal):
            self.count += 1
            self.ledger.set_holding(Holding(str(self.count), "ns", "p", node, placed.assignment))
            self.held[str(self.count)] = node, Load(0, 0, 1)
            self.charge(node, Load(0, 0, 1), -1)
        self.bring_all_up_to_date()

    @rule(node=nodes, room=loads_of)
    def set_room(self, node, room):
        if room is None:
            self.loads.pop(node, None)
        else:
            self.loads[node] = room
        self.engine.mark_changed(node)

    @rule()
    def learn(self):
        self.engine.use_workload(learn_workload(self.engine.learning_input()))

    @rule()
    def bring_all_up_to_date(self):
        self.engine._refresh()
        for row in self.engine._rows.values():
            row.refresh(row.stale_slots())

    @rule()
    def look_at_all_nodes(self):
        """Else it is done after hundreds of changes: at what is scarce, and whether pods leave."""
        self.engine._refresh()
        self.engine._scanned_at_position = -len(NODES) - 1000
        self.engine._start_scan()

    @rule(limit=st.integers(0, 8))
    def warm(self, limit):
        self.engine.run_background_step(limit)

    @invariant()
    def what_is_kept_is_what_would_be_computed(self):
        if not hasattr(self, "engine"):
            return
        self.engine._refresh()
        table = self.engine._table
        for (policy, shape), row in self.engine._rows.items():
            stale = row.stale_slots()
            anew = ShapeScores(table, NodeFeatures(table, self.engine._views[policy].scoring), shape)
            anew.refresh(anew.stale_slots())
            fresh = np.setdiff1d(np.arange(len(table.lines)), stale)
            assert np.all(row.points[stale] == -np.inf)
            assert np.array_equal(row.points[fresh], anew.points[fresh])
            fits = fresh[anew.points[fresh] > -np.inf]
            assert np.array_equal(row.card[fits], anew.card[fits])
            assert row.max_stale() >= len(stale)

    @invariant()
    def no_card_holds_more_than_it_has(self):
        if not hasattr(self, "engine"):
            return
        for state in self.ledger.nodes():
            for i, card in enumerate(state.cards):
                if state.used[i] > card.mem:  # only where a card has shrunk under its shares, which takes no more
                    assert state.free[i] < 0

    def charge(self, node, load, sign):
        room = self.loads.get(node)
        if room is not None:
            self.loads[node] = Load(room.cpu + sign * load.cpu, room.memory + sign * load.memory, room.pods + sign)
            self.engine.mark_changed(node)


Engines.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestEngines = Engines.TestCase
