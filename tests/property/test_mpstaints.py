"""Who shares a card with MPS and who does not, and that no pod is below the tier that it demands, against the rules
said once more and asked of every card.
"""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import IMAGE_USER, MIXED_USERS, CardMps, reported_only_client
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.placement import placement
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import MAX_CLIENTS
from cardwise.core.placement.placement import Placement, Scorer, Unplaceable
from cardwise.core.values.refusals import Refusal
from tests.examples import examples

NODES = ["n1", "n2", "n3"]
MEM = 100  # MiB of the smallest card

mps_states = st.none() | st.builds(
    CardMps,
    ready=st.sampled_from([True, True, True, False]),
    serves_several=st.just(False),
    multi_user=st.booleans(),
    max_clients=st.sampled_from([0, 2, 60]),
)


@st.composite
def of_node(draw):
    """For the three cards of a node, the MPS, by one daemon each or by one for all, and whether the driver limits
    memory.
    """
    has_kernel_limit = draw(st.integers(0, 3)) == 0
    if draw(st.integers(0, 3)) == 0:
        states = [None] * 3
    elif draw(st.booleans()):
        states = [draw(mps_states) for _ in range(3)]
    else:
        states = [CardMps(draw(st.booleans()) or draw(st.booleans()), True, draw(st.booleans()), 0)] * 3
    return [(state, has_kernel_limit) for state in states]


requests = st.builds(
    lambda mode, user, cards, mem, whole: PodRequest(
        containers=(ContainerRequest(key="0", name="c", cards=cards, mem=0 if whole else mem * cards),),
        isolation=mode,
        user=user,
    ),
    st.sampled_from(list(Isolation)),
    st.sampled_from([IMAGE_USER, 0, 1000, 1000, MIXED_USERS]),
    st.sampled_from([1, 1, 1, 2]),
    st.integers(5, 60),
    st.sampled_from([False, False, False, True]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), requests),
        st.tuples(st.just("place"), requests),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("forget"), st.integers(0, 30)),
        st.tuples(st.just("tell"), st.tuples(st.sampled_from(NODES), of_node())),
    ),
    max_size=25,
)


def cards_of(node, states):
    return [
        Card(index=i, uuid=f"{node}-{i}", mem=MEM + 25 * i, mps=mps, has_kernel_limit=has_kernel_limit)
        for i, (mps, has_kernel_limit) in enumerate(states)
    ]


def neighbours(ledger, node, i):
    """The MPS clients whose processes would go through the daemon of this card."""
    daemon = {i}
    if node.cards[i].mps.serves_several:
        daemon = {at for at, card in enumerate(node.cards) if card.mps is not None and card.mps.serves_several}
    return [
        held.mps_client
        for held in ledger.holdings(node.name)
        if any(node.position(share) in daemon for share in held.assignment.shares())
    ]


def closed(ledger, node, i, pod_request):
    """The rule that keeps the request from the card, whatever is free there; "" where there is none."""
    state, (container,) = node.cards[i].mps, pod_request.containers
    is_limited_by_driver = node.cards[i].has_kernel_limit and container.cards == 1
    if not container.whole and not is_limited_by_driver:
        if pod_request.isolation is Isolation.KERNEL:
            return "no limit by the driver"
        if pod_request.isolation is Isolation.MPS and state is None:
            return "no manager"
    if state is None:
        return ""
    if pod_request.isolation.uses_mps and container.cards > 1 and not container.whole and not state.serves_several:
        return "several"
    if not state.ready:
        return "not ready"
    beside = neighbours(ledger, node, i)
    if pod_request.isolation is Isolation.NONE:
        return "mixed" if any(mps_client.wants for mps_client in beside) else ""
    if any(mps_client.off for mps_client in beside):
        return "mixed"
    if container.whole and not state.serves_several:
        return ""  # it runs without MPS
    users = {mps_client.user for mps_client in beside if mps_client.wants} | {pod_request.user}
    return "" if state.multi_user or (len(users) == 1 and MIXED_USERS not in users) else "user"


def max_clients(card):
    return card.mps.max_clients or MAX_CLIENTS if card.mps is not None else MAX_CLIENTS


def takes(node, i, pod_request):
    (container,) = pod_request.containers
    if container.whole:
        return node.clients[i] == 0 and node.free[i] > 0
    return node.free[i] >= container.mem_per_card and node.clients[i] < max_clients(node.cards[i])


def follow(ledger, step, uids, policy):
    """One step; a request that comes is placed only where the rules allow it, and wherever they do."""
    kind, given_ = step
    if kind == "tell":
        node, states = given_
        ledger.set_cards(node, cards_of(node, states))
    elif kind == "end":
        ledger.release(f"u{given_}")
    elif kind == "forget":
        before = ledger.holding(f"u{given_}")
        if before is not None:  # only its node still tells of it
            ledger.set_holding(
                Holding(before.uid, "", "", before.node, before.assignment, REPORTED_PHASE, reported_only_client(""))
            )
    else:
        (container,) = given_.containers
        open_ = {
            name: [i for i in range(3) if not closed(ledger, node, i, given_) and takes(node, i, given_)]
            for name in NODES
            if (node := ledger.node(name)) is not None
        }
        fitting = {name for name, positions in open_.items() if len(positions) >= container.cards}
        placed = placement.place(ledger, set(NODES), given_, policy)
        scores, refusals = Scorer(ledger.kinds, given_, policy).score_all(ledger, NODES)
        assert set(scores) == fitting
        if isinstance(placed, Unplaceable):
            assert not fitting
            assert placed.refusals == refusals
            judge(ledger, given_, refusals)
            return
        assert isinstance(placed, Placement)
        assert placed.score == max(scores.values())
        node = ledger.node(placed.node)
        assert {node.position(share) for share in placed.assignment.shares()} <= set(open_[placed.node])
        keeps_apart(ledger, node, given_, placed, open_)
        event(f"{given_.isolation} placed beside {len(neighbours(ledger, node, 0)) if node.cards[0].mps else 'any'}")
        ledger.set_holding(
            Holding(f"u{next(uids)}", "default", "p", placed.node, placed.assignment, mps_client=given_.mps_client)
        )


def is_closable(ledger, node, i):
    """Whether a pod without MPS would close the card to pods with MPS."""
    return node.cards[i].mps is not None and not neighbours(ledger, node, i)


def keeps_apart(ledger, node, pod_request, placed, open_):
    """A share without MPS closes a card only if no other is open to it. A share with MPS takes the last empty card of a
    node only if no other card of it with MPS is open.
    """
    (container,), (i, *_) = pod_request.containers, map(node.position, placed.assignment.shares())
    if container.whole or container.cards > 1 or not is_closable(ledger, node, i):
        return
    if not pod_request.isolation.uses_mps:
        for name, positions in open_.items():
            assert all(is_closable(ledger, ledger.node(name), other) for other in positions)
        return
    empty = [
        other
        for other, card in enumerate(node.cards)
        if is_closable(ledger, node, other) and card.mps.ready and not card.mps.serves_several
    ]
    if empty == [i]:
        assert not any(node.cards[other].mps is not None for other in open_[node.name] if other != i)


WHY = {
    Refusal.KERNEL_MISSING: {"no limit by the driver"},
    Refusal.MPS_MISSING: {"no manager"},
    Refusal.MPS_SEVERAL: {"several"},
    Refusal.MPS_DOWN: {"not ready"},
    Refusal.MPS_MIXED: {"mixed"},
    Refusal.MPS_USER: {"user"},
}


def judge(ledger, pod_request, refusals):
    for name, refusal in refusals.items():
        event(refusal.name)
        node = ledger.node(name)
        rules = {closed(ledger, node, i, pod_request) for i in range(3)} if node is not None else set()
        if refusal in WHY:
            assert rules & WHY[refusal], "a card is closed by this rule"
        elif rules and all(rules) and len(rules) == 1 and rules <= {"no limit by the driver", "no manager", "several"}:
            raise AssertionError(f"{refusal} hides what can never change: {rules}")


@given(st.lists(of_node(), min_size=3, max_size=3), steps, st.sampled_from(["binpack", "spread"]))
@settings(deadline=None, max_examples=examples(100, soak=2000))
def test_incompatible_mps_pods_never_share_a_card_and_every_refusal_has_a_reason(worlds, todo, policy):
    ledger = Ledger()
    for name, states in zip(NODES, worlds, strict=True):
        ledger.set_cards(name, cards_of(name, states))
    uids = iter(range(1000))
    for step in todo:
        follow(ledger, step, uids, policy)


@given(st.lists(of_node(), min_size=3, max_size=3), steps, st.randoms())
@settings(deadline=None, max_examples=examples(60, soak=1000))
def test_what_is_counted_step_by_step_is_what_a_restart_finds(worlds, todo, random):
    ledger = Ledger()
    for name, states in zip(NODES, worlds, strict=True):
        ledger.set_cards(name, cards_of(name, states))
    uids = iter(range(1000))
    for step in todo:
        follow(ledger, step, uids, "binpack")
    anew = Ledger()
    todo = [("cards", node.name) for node in ledger.nodes()] + [("hold", held) for held in ledger.holdings()]
    random.shuffle(todo)
    for kind, target in todo:
        if kind == "cards":
            anew.set_cards(target, ledger.node(target).cards)
        else:
            anew.set_holding(target)
    for node in ledger.nodes():
        again = anew.node(node.name)
        for of in (node, again):
            duplicate = of.copy()
            assert (duplicate.mps.taints, duplicate.mps.users, duplicate.max_card_clients) == (
                of.mps.taints,
                of.mps.users,
                of.max_card_clients,
            )
        assert (again.mps.taints, again.mps.users, again.mps.tainted, again.mps.single) == (
            node.mps.taints,
            node.mps.users,
            node.mps.tainted,
            node.mps.single,
        )
    assert anew.managed == ledger.managed
