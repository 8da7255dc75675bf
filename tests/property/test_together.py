"""Several claims of one pod on one node, against a search that tries every choice of cards for all of them."""

from itertools import combinations, product

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cardwise.core.api import quotas
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import CardMps, mps_client
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.mpstaints import untolerated_by
from cardwise.core.placement.placement import Placement, Scorer
from cardwise.core.values.refusals import Refusal
from tests.build import IN_USE, OUT_OF_USE
from tests.examples import examples

USER = 1000
OURS = "team"


def mostly(usual, *others):
    return st.sampled_from([usual] * 5 * len(others) + list(others))


described = st.builds(
    lambda mem, state, classes, prio, mps: {"mem": mem, "classes": classes, "priority": prio, "mps": mps, **state},
    st.sampled_from([60, 100]),
    mostly(IN_USE, *OUT_OF_USE),
    st.sampled_from([frozenset(), frozenset("a"), frozenset("ab")]),
    mostly(0, 3),
    mostly(None, CardMps(ready=True, multi_user=False), CardMps(ready=True, max_clients=2)),
)
residents = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([10, 40, 60]), st.sampled_from([0, 50]),
        st.sampled_from(
            [mps_client(Isolation.NONE, USER), *(mps_client(Isolation.ADVISORY, user) for user in (USER, USER + 1))]
        ),
        st.sampled_from([OURS, "others"]),
    ),
    max_size=2,
)  # fmt: skip
# Cards and MiB in sum; 0 is whole cards.
shapes = st.sampled_from([(1, 60), (2, 80), (1, 0), (1, 20), (1, 40), (2, 40), (2, 120), (3, 120), (1, 60), (2, 80)])
modes = mostly(Isolation.ADVISORY, Isolation.NONE, Isolation.MPS)
wanted = st.lists(st.tuples(shapes, mostly(0, 60), mostly("", "a")), min_size=2, max_size=3)
limits = st.lists(
    st.builds(
        lambda selects, shares, memory, cards: QuotaEntry(**selects, shares=shares, memory=memory, cards=cards),
        st.sampled_from([{"resource_class": "a"}, {"resource_class": "b"}, {}]),
        st.sampled_from([None, None, 1, 2, 3]),
        st.sampled_from([None, None, 40, 100, 160]),
        st.sampled_from([None, None, 0, 1]),
    ),
    max_size=2,
)


def asking(parts, mode):
    containers = []
    for i, ((cards, mem), core, resource_class) in enumerate(parts):
        percent = core if mem and cards == 1 else 0
        containers.append(
            ContainerRequest(
                key=str(i), name=f"c{i}", cards=cards, mem=mem, core=percent, resource_class=resource_class
            )
        )
    return PodRequest(containers=tuple(containers), isolation=mode, user=USER)


@st.composite
def scenes(draw):
    """A ledger of one node, and what quotas leave to our namespace there."""
    ledger = Ledger(max_clients=draw(mostly(None, 2)), kept_back=draw(mostly(0, 5, None)))
    cards = draw(st.lists(described, min_size=2, max_size=3))
    ledger.set_cards("n1", [Card(index=i, uuid=f"GPU-{i}", headroom=3 * i, **fields) for i, fields in enumerate(cards)])
    node = ledger.node("n1")
    for uid, (i, mem, core, client, namespace) in enumerate(draw(residents)):
        if i < len(cards) and node.free[i] >= mem:
            share = CardShare(i, f"GPU-{i}", mem, core, cards[i]["mem"])
            ledger.set_holding(Holding(str(uid), namespace, "p", "n1", Assignment({"0": (share,)}), mps_client=client))
    return ledger, quotas_left(ledger, draw(st.just([]) | limits))


def quotas_left(ledger, entries):
    return [quotas.headroom(entry, ledger.used_amounts(OURS, entry)) for entry in entries]


def groups(request):
    """Containers that go together: those with one card of a class share it, any other is by itself."""
    single = {c.resource_class for c in request.containers if c.mem and c.cards == 1}
    together = [
        [c for c in request.containers if c.mem and c.cards == 1 and c.resource_class == name] for name in single
    ]
    return [*([c] for c in request.containers if not c.mem or c.cards > 1), *together]


def holds(node, request, chosen, headroom):
    """Whether the node takes these cards for these groups, by adding everything up."""
    charges = {room.entry: (0, 0, 0) for room in headroom}
    mem, core, clients, whole = ([0] * len(node.cards) for _ in range(4))
    for group, cards in chosen:
        untolerated = untolerated_by(request.isolation, user=request.mps_client.user, several_cards=group[0].cards > 1)
        for i, c in product(cards, group):
            if not node.cards[i].accepts_shares or not node.mps.admits(i, untolerated, request.mps_client.user):
                return False
            if c.resource_class and c.resource_class not in node.cards[i].classes:
                return False
            clients[i] += 1
            whole[i] += c.whole
            mem[i] += c.mem_per_card
            core[i] += c.core_per_card
            held = node.usable[i] if c.whole else c.mem_per_card
            for entry, (shares, memory, count) in charges.items():
                if entry.covers(node.cards[i].classes, node.cards[i].model):
                    charges[entry] = shares + 1, memory + held, count + c.whole
    for i in range(len(node.cards)):
        if whole[i] and (clients[i] > 1 or node.clients[i]):
            return False
        if clients[i] and not whole[i]:
            if (
                mem[i] > node.free[i]
                or core[i] > node.free_core[i]
                or clients[i] + node.clients[i] > node.max_card_clients[i]
            ):
                return False
        elif clients[i] and node.free[i] <= 0:
            return False
    return all(room.has_room_for(quotas.Charge(*charges[room.entry])) for room in headroom)


def fits(node, request, of_pod, headroom=()):
    positions = range(len(node.cards))
    choices = [combinations(positions, group[0].cards) for group in of_pod]
    return any(holds(node, request, list(zip(of_pod, chosen, strict=True)), headroom) for chosen in product(*choices))


def without_residents(node):
    ledger = Ledger(max_clients=node.max_clients, kept_back=node.kept_back)
    ledger.set_cards(node.name, node.cards)
    return ledger.node(node.name)


@given(scenes(), wanted, modes, st.sampled_from(["binpack", "spread"]))
@settings(deadline=None, max_examples=examples(300, soak=5000))
def test_what_fits_together_is_found_and_what_does_not_has_its_reason(scene, parts, mode, policy):
    ledger, headroom = scene
    request = asking(parts, mode)
    node = ledger.node("n1")
    of_pod = groups(request)
    placed = placement.place_on(ledger.kinds, node, request, policy, headroom)
    is_placed = isinstance(placed, Placement)
    event("found" if is_placed else placed.name)
    assert is_placed == fits(node, request, of_pod, headroom)
    assert isinstance(Scorer(ledger.kinds, request, policy, headroom).score(node), int) == is_placed
    if not is_placed:
        alone = [fits(node, request, [group]) for group in of_pod]
        anyway, emptied = fits(node, request, of_pod), fits(without_residents(node), request, of_pod)
        assert (placed is Refusal.QUOTA) == anyway
        if not anyway:
            assert (placed in (Refusal.TOGETHER, Refusal.NEVER_TOGETHER)) == all(alone)
            assert placed is not Refusal.TOGETHER or emptied
            assert placed is not Refusal.NEVER_TOGETHER or not emptied
    else:
        cards = placed.assignment.containers
        chosen = [(group, {node.position(share) for share in cards[group[0].key]}) for group in of_pod]
        assert all(len(at) == group[0].cards for group, at in chosen)
        assert all([s.uuid for s in cards[c.key]] == [s.uuid for s in cards[g[0].key]] for g in of_pod for c in g)
        assert holds(node, request, chosen, headroom)
