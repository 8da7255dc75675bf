"""A pod that shares cards within its namespace only is never beside a pod of another namespace, and each other place is
open: against the rule said once more and asked of every card.
"""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cardwise.core.api.cards import Card
from cardwise.core.api.mpsprofile import CardMps
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.api.sharing import Tenant
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement, Scorer, Unplaceable
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.workload import learn_workload
from cardwise.core.values.refusals import Refusal
from tests.examples import examples

NODES = ["n1", "n2", "n3"]
CARDS = 3
MEM = 100  # MiB of the smallest card
LOAD = Load(1, 1, 1)

tenants = st.builds(Tenant, st.sampled_from("aabc"), st.booleans())
requests = st.builds(
    lambda tenant, cards, mem, whole: PodRequest(
        containers=(ContainerRequest(key="0", name="c", cards=cards, mem=0 if whole else mem * cards),), tenant=tenant
    ),
    tenants,
    st.sampled_from([1, 1, 1, 2]),
    st.integers(5, 60),
    st.sampled_from([False, False, False, True]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), requests),
        st.tuples(st.just("place"), requests),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("cards"), st.sampled_from(NODES)),
    ),
    max_size=25,
)


class Loads:
    """Nodes that have cpu and memory for all pods."""

    def free_load(self, node):
        return Load(1000, 1000, 1000) if node in NODES else None


def cards_of(node, *, mps):
    return [
        Card(
            index=i, uuid=f"{node}-{i}", mem=MEM + 25 * i, mps=CardMps(ready=True, serves_several=True) if mps else None
        )
        for i in range(CARDS)
    ]


def holders(ledger, node, i):
    return [
        held
        for held in ledger.holdings(node.name)
        if any(node.position(share) == i for share in held.assignment.shares())
    ]


def may_be_together(tenant, other):
    return tenant.namespace == other.namespace or (not tenant.exclusive and not other.exclusive)


def is_open(ledger, node, i, pod_request):
    return all(may_be_together(pod_request.tenant, held.mps_client.tenant) for held in holders(ledger, node, i))


def takes(node, i, pod_request):
    (container,) = pod_request.containers
    if container.whole:
        return node.clients[i] == 0
    return node.free[i] >= container.mem_per_card and not any(
        share.whole
        for held in node.holdings.values()
        for share in held.assignment.shares()
        if node.position(share) == i
    )


def check_rule(ledger):
    for node in ledger.nodes():
        for i in range(CARDS):
            on_card = [held.mps_client.tenant for held in holders(ledger, node, i)]
            assert all(may_be_together(tenant, other) for tenant in on_card for other in on_card), on_card


def place(ledger, engine, pod_request, policy):
    """The placement, which exists if and only if the rule leaves enough cards; all ways to search agree."""
    (container,) = pod_request.containers
    nodes = {name: ledger.node(name) for name in NODES}
    open_ = {
        name: [i for i in range(CARDS) if takes(node, i, pod_request) and is_open(ledger, node, i, pod_request)]
        for name, node in nodes.items()
    }
    fitting = {name for name, positions in open_.items() if len(positions) >= container.cards}
    scores, refusals = Scorer(ledger.kinds, pod_request, policy).score_all(ledger, NODES)
    assert set(scores) == fitting
    for name, refusal in refusals.items():
        closed = [i for i in range(CARDS) if not is_open(ledger, nodes[name], i, pod_request)]
        enough = sum(takes(nodes[name], i, pod_request) for i in range(CARDS)) >= container.cards
        if refusal in (Refusal.WITHIN_NAMESPACE, Refusal.OTHER_NAMESPACES):
            event(refusal.name)
            assert closed
            assert (refusal is Refusal.OTHER_NAMESPACES) == pod_request.tenant.exclusive
        else:
            assert not enough or container.whole, "the tenants of its cards are the only reason"
    by_index = placement.place(ledger, set(NODES), pod_request, policy)
    on_snapshot = placement.place(ledger.snapshot(), set(NODES), pod_request, policy)
    by_engine = engine.place(pod_request, LOAD, "priced")
    scored = engine.scores(pod_request, LOAD, "priced", NODES)
    assert scored is None or set(scored) == fitting
    assert (by_engine is not None) == bool(fitting)
    if not fitting:
        assert isinstance(by_index, Unplaceable)
        assert by_index.refusals == refusals
        return None
    for placed in (by_index, on_snapshot, by_engine):
        assert isinstance(placed, Placement)
        node = nodes[placed.node]
        assert {node.position(share) for share in placed.assignment.shares()} <= set(open_[placed.node])
    assert (by_index.node, by_index.score) == (on_snapshot.node, on_snapshot.score)
    return by_index


@pytest.mark.parametrize("mps", [False, True])
@given(steps, st.sampled_from(["binpack", "spread"]), st.randoms())
@settings(deadline=None, max_examples=examples(80, soak=1000))
def test_a_card_never_has_a_pod_beside_one_with_which_it_must_not_share(mps, todo, policy, random):
    ledger = Ledger()
    engine = Engine(ledger, Loads())
    for name in NODES:
        ledger.set_cards(name, cards_of(name, mps=mps))
    common = PodRequest(containers=(ContainerRequest(key="0", name="c", cards=1, mem=20),))
    engine.count_arrival(common, LOAD)
    engine.use_workload(learn_workload(engine.learning_input()))
    for uid, (kind, target) in enumerate(todo):
        if kind == "cards":
            ledger.set_cards(target, cards_of(target, mps=mps)[:2])  # a card goes, and comes again with its pods
            ledger.set_cards(target, cards_of(target, mps=mps))
        elif kind == "end":
            ledger.release(f"u{target}")
        elif (placed := place(ledger, engine, target, policy)) is not None:
            ledger.set_holding(
                Holding(f"u{uid}", "", "p", placed.node, placed.assignment, mps_client=target.mps_client)
            )
        check_rule(ledger)
    anew = Ledger()
    events = [("cards", node.name) for node in ledger.nodes()] + [("hold", held) for held in ledger.holdings()]
    random.shuffle(events)
    for kind, target in events:
        if kind == "cards":
            anew.set_cards(target, ledger.node(target).cards)
        else:
            anew.set_holding(target)
    assert anew.exclusive_pods == ledger.exclusive_pods
    for node in ledger.nodes():
        for of in (anew.node(node.name), node.copy()):
            assert (of.tenants.shares, of.tenants.exclusive) == (node.tenants.shares, node.tenants.exclusive)
    for held in ledger.holdings():
        ledger.release(held.uid)
    assert ledger.exclusive_pods == {}
    assert not any(node.tenants.exclusive for node in ledger.nodes())


def test_a_request_of_several_containers_is_one_tenant():
    shares = tuple(
        ContainerRequest(key=str(i), name=f"c{i}", cards=1, mem=20, resource_class=c) for i, c in enumerate(["", "k"])
    )
    ledger = Ledger()
    ledger.set_cards("n1", [replace(card, classes=frozenset({"k"})) for card in cards_of("n1", mps=False)[:1]])
    pod_request = PodRequest(containers=shares, tenant=Tenant("a", exclusive=True))
    assert isinstance(placement.place(ledger, {"n1"}, pod_request, "binpack"), Placement)
