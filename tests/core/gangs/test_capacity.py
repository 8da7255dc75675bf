"""How often the pace of a count is called, and that a count which its pace ends is continued."""

import pytest

from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.gangs import capacity
from cardwise.core.gangs.capacity import Capacities, MemberShape
from cardwise.core.values.quantity import MiB
from extender.cache.nodeload import NodeLoads
from extender.records.nodeinfo import NodeRecord
from tests.build import P100, ledger_with_free

NODES = [f"n{i:03}" for i in range(300)]


class Loads(NodeLoads):
    """counted: the nodes whose free load was read."""

    def __init__(self):
        super().__init__()
        self.counted = []
        for name in NODES:
            self.set_node(name, NodeRecord(Load(64_000, 1 << 40, 100)), 0.0)

    def free_load(self, node):
        self.counted.append(node)
        return super().free_load(node)


def shape_of(card_requests):
    """A pod with this number of card requests. Each is for two cards, so that no two are merged."""
    containers = [ContainerRequest(key=f"c{i}", name=f"c{i}", cards=2, mem=MiB(200)) for i in range(card_requests)]
    return MemberShape(PodRequest(containers=tuple(containers)), Load(1, 1, 1))


@pytest.mark.parametrize("card_requests", [1, 8, 200])
def test_few_nodes_are_counted_between_two_calls_of_the_pace(card_requests):
    loads, calls = Loads(), []
    Capacities(ledger_with_free(**{name: [P100, P100] for name in NODES}), loads).count_fitting_pods(
        shape_of(card_requests), lambda: calls.append(len(loads.counted))
    )
    parts = [later - earlier for earlier, later in zip(calls, [*calls[1:], len(NODES)], strict=True)]
    assert max(parts) == max(1, capacity._NODES_BETWEEN_PACES // card_requests)
    assert loads.counted == NODES, "each once"


def test_a_count_that_its_pace_ends_is_continued():
    loads = Loads()
    capacities, shape = Capacities(ledger_with_free(**{name: [P100, P100] for name in NODES}), loads), shape_of(1)

    def pace():
        if len(loads.counted) >= 100:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        capacities.count_fitting_pods(shape, pace)
    assert capacities.count_fitting_pods(shape) > 0
    assert loads.counted == NODES, "each once"


def test_changes_are_limited_also_while_nothing_is_counted(monkeypatch):
    """Gangs without cards count no nodes, and each of their plans moves to a newer snapshot."""
    monkeypatch.setattr(capacity, "_MAX_CHANGES", 700)
    ledger, loads = ledger_with_free(**{name: [P100, P100] for name in NODES}), Loads()
    capacities, shape = Capacities(ledger.snapshot(), loads.snapshot()), shape_of(1)
    before = capacities.count_fitting_pods(shape)
    for i in range(5):
        for name in NODES:
            loads.set_node(name, NodeRecord(Load(1 if i == 4 else 60_000 + i, 1 << 40, 100)), 0.0)
        capacities.move_to(ledger.snapshot(), loads.snapshot())
        assert len(capacities._changes) <= 700
        if i == 1:
            capacities.count_fitting_pods(shape)
    assert capacities.count_fitting_pods(shape) == len(NODES) < before
