"""A pod that fits some empty node is never refused for its size."""

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cardwise.core.api import names, request
from cardwise.core.api.cards import Card
from cardwise.core.placement import placement
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from tests import build
from tests.build import resource_class
from tests.examples import examples
from tests.webhook.reviews import Known, mutate_object, on_mutate, resource_classes
from tests.webhook.rewriting import check_pod
from webhook.cluster.cards import CardSizes

CLASSES = resource_classes(*(resource_class(name) for name in "ab"))
cards = st.tuples(st.sampled_from([60, 100]), st.sampled_from([frozenset(), frozenset("a"), frozenset("ab")]))
nodes = st.lists(st.lists(cards, min_size=1, max_size=3), min_size=1, max_size=2)
containers = st.tuples(
    st.sampled_from([(1, 0), (2, 0), (1, 20), (1, 40), (1, 60), (2, 40), (2, 80), (2, 120), (3, 120)]),
    st.sampled_from(["", "", "", "a", "b"]),
)


def container(at: int, cards: int, mem: int, resource_class: str) -> dict[str, Any]:
    asking = build.container(
        f"c{at}", **({"gpu_mem": mem} if mem else {}), **({} if resource_class else {"gpu_count": cards})
    )
    if resource_class:
        asking["resources"]["limits"][names.CLASS_PREFIX + resource_class] = str(cards)
    return asking


def largest_sizes(nodes: list[list[tuple[int, frozenset[str]]]], resource_class: str) -> CardSizes:
    of_it = [[mem for mem, classes in of_node if not resource_class or resource_class in classes] for of_node in nodes]
    at_most = max(map(len, of_it))
    ranked = [sorted(of_node, reverse=True) + [0] * (at_most - len(of_node)) for of_node in of_it]
    sizes = tuple(MiB(max(of_node[i] for of_node in ranked)) for i in range(at_most))
    return CardSizes(sizes[0] if sizes else MiB(0), at_most, by_count=sizes)


@given(nodes, st.lists(containers, min_size=1, max_size=3))
@settings(max_examples=examples(80, soak=2000))
def test_pod_that_fits_an_empty_node_is_never_refused(
    described: list[list[tuple[int, frozenset[str]]]], parts: list[tuple[tuple[int, int], str]]
) -> None:
    ledger = Ledger()
    for name, of_node in enumerate(described):
        cards = [Card(index=i, uuid=f"{name}-{i}", mem=MiB(mem), classes=of) for i, (mem, of) in enumerate(of_node)]
        ledger.set_cards(str(name), cards)
    known = Known(
        known_classes=CLASSES,
        known_cards=largest_sizes(described, ""),
        cards_of={name: largest_sizes(described, name) for name in "ab"},
    )
    pod = build.pod(containers=[container(i, count, mem, name) for i, ((count, mem), name) in enumerate(parts)])
    assert on_mutate(pod, "pods", known).allowed
    asking = mutate_object(pod, "pods", known)
    pod_request = request.parse(asking)
    assert pod_request is not None
    fits = isinstance(placement.place(ledger, [n.name for n in ledger.nodes()], pod_request, "binpack"), Placement)
    try:
        check_pod(asking, known)
        allowed = True
    except InvalidRequest:
        allowed = False
    event(f"fits {fits}, allowed {allowed}")
    assert allowed or not fits
