"""Which card may serve which shape, and how many pods fit, against placing one pod after the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from cardwise.core.placement.scored.cardarrays import CardArrays, RequestArrays
from cardwise.core.placement.scored.nodetable import NodeTable
from cardwise.core.placement.scored.shapes import RequestShape, make_request_size
from tests.examples import examples

CARD, NOW = 20, 50  # MiB of a card, and percent of its SMs that may be reserved now
LOAD = Load(0, 0, 1)


def asking(mem, core=0, cards=1):
    return PodRequest(containers=(ContainerRequest(key="0", name="c", cards=cards, mem=mem, core=core),))


ASKED = st.one_of(st.builds(asking, st.integers(1, 9), st.sampled_from([0, 0, 10, 30])), st.just(asking(0)))
# The held amounts of each card; perhaps more SMs than may be reserved now.
HELD = st.lists(st.tuples(st.integers(0, CARD), st.sampled_from([0, 20, NOW, 80, 100])), min_size=1, max_size=4)


def times(ledger, node, pod_request):
    for count in range(CARD + 1):
        placed = placement.place_on(ledger.kinds, ledger.node(node), pod_request, "binpack")
        if not isinstance(placed, Placement):
            return count
        ledger.set_holding(Holding(f"{node}-{count}", "default", "new", node, placed.assignment))
    raise AssertionError("more than the card has")


def filled(held):
    ledger = Ledger(core=NOW)
    for i, (mem, core) in enumerate(held):
        node = f"n{i}"
        ledger.set_cards(node, [Card(index=0, uuid=node, mem=CARD)])
        if mem:
            share = CardShare(0, node, mem, core, CARD)
            ledger.set_holding(Holding(node, "default", "old", node, Assignment({"0": (share,)})))
    return ledger


@settings(max_examples=examples(150, soak=5000))
@given(requests=st.lists(ASKED, min_size=1, max_size=4, unique=True), held=HELD)
def test_a_card_serves_a_shape_if_a_pod_can_be_placed_there(requests, held):
    nodes = NodeTable()
    for state in filled(held).nodes():
        nodes.set_node(state.name, state, Load(0, 0, 99))
    shapes = [
        RequestShape(make_request_size(pod_request, fitting.card_requests(pod_request), LOAD))
        for pod_request in requests
    ]
    lines, table = nodes.lines, RequestArrays(shapes)
    at = list(nodes.slots.values())
    cards = CardArrays(lines.free[at, 0], lines.core[at, 0], lines.empty[at, 0], lines.kind[at, 0])
    wanted = [[times(filled(held), name, pod_request) for pod_request in requests] for name in nodes.slots]
    assert table.count_fitting_pods(cards).tolist() == wanted
    assert table.can_serve(cards).tolist() == [[count > 0 for count in row] for row in wanted]
