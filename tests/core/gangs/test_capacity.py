"""The number of nodes that one call counts, whatever has changed since the last call."""

import pytest

from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.gangs.capacity import MAX_COUNTED_NODES, Capacities, MemberShape
from cardwise.core.values.quantity import MiB
from tests.build import P100
from tests.core.placement.test_placement_limits import ledger_with_free

NODES = 3 * MAX_COUNTED_NODES


class Nodes:
    """Nodes with free cpu and memory.

    counted: the nodes whose free load was read."""

    def __init__(self):
        self.counted = []
        self.changed = set()

    def free_load(self, node):
        self.counted.append(node)
        return Load(64_000, 1 << 40, 100)

    def watch(self):
        return self.changed


def shape_of(card_requests):
    """A pod with this number of card requests. Each is for two cards, so that no two are merged."""
    containers = [ContainerRequest(key=f"c{i}", name=f"c{i}", cards=2, mem=MiB(200)) for i in range(card_requests)]
    return MemberShape(PodRequest(containers=tuple(containers)), Load(1, 1, 1))


def count_all(capacities, nodes, shape):
    """The nodes that each call counts, until all are counted."""
    calls, known = [], False
    while not known:
        nodes.counted.clear()
        _, known = capacities.count_pods(shape)
        calls.append(list(nodes.counted))
    return calls


@pytest.mark.parametrize(
    ("card_requests", "most_nodes"),
    [(1, MAX_COUNTED_NODES), (8, MAX_COUNTED_NODES), (16, MAX_COUNTED_NODES // 2), (200, MAX_COUNTED_NODES // 5)],
)
def test_a_call_counts_few_nodes_also_where_thousands_have_changed(card_requests, most_nodes):
    names = [f"n{i:03}" for i in range(NODES)]
    nodes = Nodes()
    capacities = Capacities(ledger_with_free(**{name: [P100, P100] for name in names}), nodes)
    shape, other = shape_of(card_requests), shape_of(2)
    first = count_all(capacities, nodes, shape)
    for _ in range(5):
        nodes.changed.update(names)
        capacities.count_pods(other)
    for calls in (first, count_all(capacities, nodes, shape)):
        assert [len(counted) for counted in calls] == [most_nodes] * (NODES // most_nodes)
        assert sorted(node for counted in calls for node in counted) == names, "each once"
