"""Types and quotas in the placement engine, against a search that tries every choice of cards."""

from itertools import combinations

from hypothesis import event, given, reject, settings
from hypothesis import strategies as st

from cardwise.core.api import names, policies, quotas, request
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Scorer, Unplaceable
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.refusals import Refusal
from tests.build import IN_USE, OUT_OF_USE, container, pod
from tests.examples import examples

NODES = ["n1", "n2", "n3"]
CLASSES = ["a", "b", "none-has-it"]
MODELS = ["A", "B"]
OURS, THEIRS = "team", "others"

# Few numbers, few cards and little room, so that what just fits and what just does not is met again and again.
sizes = st.sampled_from([40, 80, 100])
types = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from([frozenset("ab"), frozenset("a"), frozenset("b"), frozenset()]),
    st.sampled_from([0, 0, 0, 3, -1]),
)
described = st.tuples(sizes, st.sampled_from([IN_USE] * 12 + [*OUT_OF_USE]), types)
worlds = st.lists(st.lists(described, min_size=1, max_size=5), min_size=1, max_size=3)
residents = st.tuples(st.integers(0, 8), st.sampled_from([20, 40]), st.sampled_from([OURS, THEIRS]))
limits = st.lists(
    st.builds(
        lambda selects, shares, memory, cards: QuotaEntry(**selects, shares=shares, memory=memory, cards=cards),
        st.sampled_from([{"resource_class": "a"}, {"resource_class": "b"}, {"model": "A"}, {"model": "B"}, {}]),
        st.sampled_from([None, 0, 1, 2, 3]),
        st.sampled_from([None, 20, 40, 80, 120]),
        st.sampled_from([None, 0, 1]),
    ),
    max_size=2,
)


def typed(part, resource_class):
    if not resource_class:
        return part
    limits = dict(part["resources"]["limits"])
    count = limits.pop(names.GPU_COUNT, "1")
    return part | {"resources": {"limits": limits | {f"cardwise.dev/{resource_class}": count}}}


mems = st.sampled_from([10, 20, 40, 60, 80])
shapes = st.one_of(
    st.builds(lambda mem: container(gpu_mem=mem), mems),
    st.builds(lambda mem, core: container(gpu_mem=mem, gpu_core=core), mems, st.sampled_from([40, 60, 61, 80, 81])),
    st.builds(lambda count: container(gpu_count=count), st.integers(1, 2)),
    st.builds(lambda mem, count: container(gpu_mem=mem * count, gpu_count=count), mems, st.integers(2, 3)),
)
containers = st.builds(typed, shapes, st.sampled_from(["", "", "", "", *CLASSES]))


def asking(parts):
    try:
        return request.parse(pod(containers=parts))
    except InvalidRequest:  # too many percent on the card that they share
        return reject()


def asked_by(limit):
    return st.lists(containers, min_size=1, max_size=limit).map(asking)


@st.composite
def scenes(draw):
    """A ledger with cards and holdings, and what quotas leave to our namespace."""
    ledger = Ledger(max_clients=draw(st.sampled_from([2, 3])), kept_back=draw(st.sampled_from([0, 0, 10, None])))
    for node, cards in zip(NODES, draw(worlds), strict=False):
        ledger.set_cards(
            node,
            [
                Card(
                    index=i,
                    uuid=f"{node}-{i}",
                    mem=mem,
                    headroom=5 * i,
                    model=model,
                    classes=classes,
                    priority=prio,
                    **state,
                )
                for i, (mem, state, (model, classes, prio)) in enumerate(cards)
            ],
        )
    there = [(state, i) for state in ledger.nodes() for i in range(len(state.cards))]
    for uid, (index, mem, namespace) in enumerate(draw(st.lists(residents, max_size=4))):
        state, i = there[index % len(there)]
        if state.free[i] >= mem and state.clients[i] < state.max_clients:
            share = CardShare(i, state.cards[i].uuid, mem, 20, state.cards[i].mem)
            ledger.set_holding(Holding(str(uid), namespace, "p", state.name, placement.Assignment({"0": (share,)})))
    if draw(st.booleans()):
        ledger.index()
    headroom = [quotas.headroom(entry, ledger.used_amounts(OURS, entry)) for entry in draw(limits)]
    return ledger, headroom


uses = st.tuples(st.integers(0, 5), st.sampled_from([20, 40]), st.booleans())
planned = st.lists(
    st.tuples(st.sampled_from([*NODES, "unknown"]), st.lists(uses, min_size=1, max_size=3)), min_size=1, max_size=4
)


def planned_holdings(plan):
    """Holdings on cards that exist, on cards that no node has reported, and on a node without cards."""
    return [
        Holding(
            f"planned-{uid}",
            OURS,
            "p",
            node,
            placement.Assignment(
                {
                    f"c{k}": (CardShare(i, f"{node}-{i}", mem, 0, 100, whole),)
                    for k, (i, mem, whole) in enumerate(of_pod)
                }
            ),
        )
        for uid, (node, of_pod) in enumerate(plan)
    ]


def charge_share_by_share(ledger, holdings, entry):
    return quotas.sum_charges(
        quotas.Charge(1, share.mem, int(share.whole))
        for holding in holdings
        for share in holding.assignment.shares()
        if ledger.kinds.is_covered(ledger.kind_of_share(holding.node, share), entry)
    )


@given(scenes(), planned)
@settings(deadline=None, max_examples=examples(200, soak=3000))
def test_quotas_that_pods_exceed_together_are_those_of_a_count_share_by_share(scene, plan):
    ledger, headroom = scene
    holdings = planned_holdings(plan)
    together = placement.entries_exceeded_together(
        ledger, [(holding.node, holding.assignment) for holding in holdings], headroom
    )
    assert together == [
        entry_headroom.entry
        for entry_headroom in headroom
        if not entry_headroom.has_room_for(charge_share_by_share(ledger, holdings, entry_headroom.entry))
    ]
    event(f"exceeded: {len(together)}")


@given(scenes(), planned, limits)
@settings(deadline=None, max_examples=examples(200, soak=3000))
def test_counted_pods_exceed_the_quotas_that_one_of_them_exceeds_beside_the_others(scene, plan, entries):
    ledger, _ = scene
    holdings = planned_holdings(plan)
    for holding in holdings:
        ledger.set_holding(holding)
    headroom = [quotas.headroom(entry, ledger.used_amounts(OURS, entry)) for entry in entries]

    def exceeds(holding, entry_headroom):
        charge = charge_share_by_share(ledger, [holding], entry_headroom.entry)
        return not entry_headroom.subtract(quotas.NO_CHARGE.subtract(charge)).has_room_for(charge)

    exceeded = placement.entries_exceeded_by_holdings(ledger, holdings, headroom)
    assert exceeded == [
        entry_headroom.entry
        for entry_headroom in headroom
        if any(exceeds(holding, entry_headroom) for holding in holdings)
    ]
    for holding in holdings:
        assert placement.entries_exceeded_by_holdings(ledger, [holding], headroom) == [
            entry_headroom.entry for entry_headroom in headroom if exceeds(holding, entry_headroom)
        ]
    event(f"exceeded: {len(exceeded)}")


@given(scenes(), st.lists(st.tuples(st.none() | asked_by(3), st.integers(1, 3)), max_size=3))
@settings(deadline=None, max_examples=examples(150, soak=2000))
def test_the_first_member_beyond_quotas_is_that_of_a_count_member_by_member(scene, gang):
    ledger, headroom = scene
    members = [
        Member(uid=f"u{kind}-{i}", name="", request=pod_request)
        for kind, (pod_request, count) in enumerate(gang)
        for i in range(count)
    ]
    remaining, expected = headroom, None
    for member in members:
        if member.request is None:
            continue
        charges = [
            fitting.min_charge_of_share(member.request, ledger.kinds, entry_headroom.entry)
            for entry_headroom in remaining
        ]
        if not all(
            entry_headroom.has_room_for(charge) for entry_headroom, charge in zip(remaining, charges, strict=True)
        ):
            expected = member
            break
        remaining = [entry_headroom.subtract(charge) for entry_headroom, charge in zip(remaining, charges, strict=True)]
    assert gangplan.first_beyond_quotas(ledger, members, headroom) is expected
    assert gangplan.exceed_quotas(ledger, members, headroom) is (expected is not None)
    event("exceeded" if expected is not None else "within quotas")


def may_have(node, i, card_request, resource_class):
    """Whether the card alone would do, but for quotas."""
    card = node.cards[i]
    if not card.healthy or card.cordoned or (resource_class and resource_class not in card.classes):
        return False
    if card_request.whole:
        return node.clients[i] == 0 and node.free[i] > 0
    return (
        node.clients[i] < node.max_clients
        and node.free[i] >= card_request.mem_per_card
        and node.free_core[i] >= card_request.core_per_card
    )


def fits_quotas(node, chosen, card_request, headroom):
    """Whether the cards together stay within every headroom."""
    for room in headroom:
        shares = memory = cards = 0
        for i in chosen:
            card = node.cards[i]
            if room.entry.covers(card.classes, card.model):
                shares += 1
                memory += card.usable_mib(node.kept_back) if card_request.whole else card_request.mem_per_card
                cards += card_request.whole
        for amount, limit in ((shares, room.shares), (memory, room.memory), (cards, room.cards)):
            if limit is not None and amount and amount > limit:
                return False
    return True


def place_naively(ledger, nodes, pod_request, policy, headroom):
    """The node and the cards for a request of one container, by trying every choice; None where there is none."""
    (card_request,) = pod_request.containers
    priorities = sorted({card.priority for node in ledger.nodes() for card in node.cards})
    best = None
    for name in sorted(nodes):
        node = ledger.node(name)

        def preference(i, node=node):
            rank = 0 if card_request.resource_class else priorities.index(node.cards[i].priority)
            return rank, -node.free[i] if policy == "spread" else node.free[i], i  # scored ones: as binpack

        positions = range(len(node.cards)) if node else ()
        usable = sorted(
            (i for i in positions if may_have(node, i, card_request, card_request.resource_class)), key=preference
        )
        chosen = next(
            (c for c in combinations(usable, card_request.cards) if fits_quotas(node, c, card_request, headroom)), None
        )
        if chosen is not None:
            ranks, frees, _ = (sum(column) for column in zip(*map(preference, chosen), strict=True))
            if best is None or (ranks, frees) < best[0]:
                best = (ranks, frees), name, sorted(node.cards[i].index for i in chosen)
    return best and best[1:]


def steered(ledger, nodes, pod_request, policy, headroom):
    """What the quotas did to the request, for the statistics."""
    without, with_them = (place_naively(ledger, nodes, pod_request, policy, room) for room in ([], headroom))
    return "do not matter" if without == with_them else "steer" if with_them else "refuse"


def node_by_node(ledger, nodes, pod_request, policy, headroom):
    """What `place` must answer, without the index."""
    scorer = Scorer(ledger.kinds, pod_request, policy, headroom)
    scores = {name: scorer.score(ledger.node(name)) for name in nodes}
    fitting = {name: score for name, score in scores.items() if not isinstance(score, Refusal)}
    if not fitting:
        return Unplaceable(refusals=scores)
    best = min(fitting, key=lambda name: (-fitting[name], name))
    return placement.place_on(ledger.kinds, ledger.node(best), pod_request, policy, headroom)


candidates = st.sampled_from([{*NODES}, {*NODES}, {*NODES}, {*NODES, "unknown"}, {"n1"}])
policy_names = st.sampled_from(policies.CARD_POLICIES)


@given(scenes(), asked_by(1), candidates, policy_names)
@settings(deadline=None, max_examples=examples(120, soak=2000))
def test_one_container_gets_what_trying_every_choice_would_give_it(scene, pod_request, nodes, policy):
    ledger, headroom = scene
    placed = placement.place(ledger, nodes, pod_request, policy, headroom)
    expected = place_naively(ledger, nodes, pod_request, policy, headroom)
    event("placed" if expected else "refused")
    event(f"quotas {steered(ledger, nodes, pod_request, policy, headroom)}")
    if expected is None:
        assert isinstance(placed, Unplaceable)
        assert set(placed.refusals) == nodes
    else:
        assert (placed.node, placed.assignment.indices()) == expected


@given(scenes(), asked_by(3), candidates, policy_names)
@settings(deadline=None, max_examples=examples(120, soak=2000))
def test_what_is_placed_is_of_its_class_and_within_every_quota(scene, pod_request, nodes, policy):
    ledger, headroom = scene
    placed = placement.place(ledger, sorted(nodes), pod_request, policy, headroom)
    assert placed == node_by_node(ledger, sorted(nodes), pod_request, policy, headroom)
    scores, refusals = Scorer(ledger.kinds, pod_request, policy, headroom).score_all(ledger, nodes)
    assert set(scores) | set(refusals) == nodes
    event(type(placed).__name__)
    if isinstance(placed, Unplaceable):
        assert placed.refusals == refusals
        return
    assert placed.score == max(scores.values())
    assert placement.entries_exceeded_together(ledger, [(placed.node, placed.assignment)], headroom) == []
    node = ledger.node(placed.node)
    for card_request in pod_request.containers:
        cards = [node.cards[node.position(share)] for share in placed.assignment.containers[card_request.key]]
        assert len({card.uuid for card in cards}) == card_request.cards
        assert all(card.healthy and not card.cordoned for card in cards)
        assert all(not card_request.resource_class or card_request.resource_class in card.classes for card in cards)
    before = {room.entry: ledger.used_amounts(OURS, room.entry) for room in headroom}
    ledger.set_holding(Holding("new", OURS, "new", placed.node, placed.assignment))
    assert min([*node.free, *node.free_core]) >= 0
    assert max(node.clients) <= node.max_clients
    for entry, used in before.items():
        now = ledger.used_amounts(OURS, entry)
        for limit, was, is_ in zip((entry.shares, entry.memory, entry.cards), used, now, strict=True):
            assert limit is None or is_ <= limit or is_ == was


def test_every_card_of_thousands_of_mixed_nodes_is_found_by_its_class():
    ledger = Ledger()
    for i in range(2500):
        name = f"n{i:04}"
        kind = {"classes": frozenset({f"c{i % 7}"}), "model": f"M{i % 7}"}
        ledger.set_cards(name, [Card(index=0, uuid=name, mem=100 + i % 5, **kind)])
    nodes = [node.name for node in ledger.nodes()]
    for policy, best in (("binpack", "n0005"), ("spread", "n0019")):
        pod_request = request.parse(pod(containers=[typed(container(gpu_mem=90), "c5")]))
        assert placement.place(ledger, nodes, pod_request, policy).node == best
