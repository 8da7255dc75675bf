"""The protocol of FGD's artefact, on small clusters whose outcome is known."""

import pytest

from cardwise.core.api.policies import CARD_POLICIES
from cardwise.simulation import traces
from cardwise.simulation.fill import arrival_order, expected_arrivals, simulate_fill
from tests.simulation import smalltraces


@pytest.fixture(name="tiny")
def _tiny(tmp_path):
    return traces.read_trace(smalltraces.write_trace(tmp_path), "tiny")


def total_demand(workload, pods):
    return sum(workload.demand(pod.shape) for pod in pods)


def test_arrival_order_depends_on_the_seed_only(tiny):
    assert arrival_order(tiny, 3) == arrival_order(tiny, 3)
    assert arrival_order(tiny, 3) != arrival_order(tiny, 4)


def test_pods_repeat_until_the_demand_is_reached(tiny):
    arriving = arrival_order(tiny, 42, demand=2.0)
    assert sorted(pod.name for pod in arriving[: len(tiny.pods)]) == sorted(pod.name for pod in tiny.pods)
    assert 2.0 * tiny.capacity - 4000 < total_demand(tiny, arriving) <= 2.0 * tiny.capacity
    assert abs(len(arriving) - expected_arrivals(tiny, 2.0)) < 20


def test_pods_are_left_out_if_the_demand_is_too_high(tiny):
    arriving = arrival_order(tiny, 42, demand=0.5)
    assert total_demand(tiny, arriving) <= 0.5 * tiny.capacity
    assert len({pod.name for pod in arriving}) == len(arriving) < len(tiny.pods)


def test_each_pod_arrives_once_without_a_demand_goal(tiny):
    assert sorted(pod.name for pod in arrival_order(tiny, 1, demand=None)) == [pod.name for pod in tiny.pods]


def test_pods_without_cards_fill_nothing():
    world = smalltraces.workload([smalltraces.node("a", 1000)], [smalltraces.shape(cards=0)] * 3)
    filled = simulate_fill(world, "binpack", 1)
    assert [(p.arrived, p.allocated) for p in filled.points] == [(0, 0.0)]
    assert [(row.size, row.arrived, row.refused) for row in filled.refused] == [("no GPU", 3, 0)]


@pytest.mark.parametrize("policy", CARD_POLICIES)
def test_what_fits_exactly_is_placed_under_every_policy(policy):
    world = smalltraces.workload([smalltraces.node("a", 1000, 1000)], [smalltraces.shape(500)] * 4)
    filled = simulate_fill(world, policy, 1, demand=None)
    assert filled.first_refusal is None
    assert [(p.arrived, p.allocated) for p in filled.points] == [(25, 25.0), (50, 50.0), (75, 75.0), (100, 100.0)]


def test_refused_pods_are_counted_by_size_and_do_not_return():
    shapes = [smalltraces.shape(600)] * 3 + [smalltraces.shape(cards=2)]
    world = smalltraces.workload([smalltraces.node("a", 1000, 1000)], shapes)
    filled = simulate_fill(world, "spread", 1, demand=None)
    assert {(row.size, row.arrived, row.refused) for row in filled.refused} in (
        {("below 1", 3, 1), ("to 2", 1, 1)},
        {("below 1", 3, 3), ("to 2", 1, 0)},
    )


def test_node_without_cpu_takes_no_more_pods():
    world = smalltraces.workload([smalltraces.node("a", 1000, cpu=1500)], [smalltraces.shape(100)] * 5)
    assert [(row.arrived, row.refused) for row in simulate_fill(world, "binpack", 1, demand=None).refused] == [(5, 4)]


def test_all_idle_memory_is_fragmented_for_larger_pods():
    world = smalltraces.workload([smalltraces.node("a", 1000, 1000)], [smalltraces.shape(600)] * 2)
    filled = simulate_fill(world, "spread", 1, demand=None)
    assert [p.fragmented for p in filled.points] == pytest.approx([100 * 400 / 1400, 100.0])


def test_counts_fitting_pods_at_the_end_and_with_added_nodes():
    world = smalltraces.workload([smalltraces.node("a", 1000, 1000)], [smalltraces.shape(600)])
    filled = simulate_fill(
        world,
        "binpack",
        1,
        demand=None,
        extra_shapes=[smalltraces.shape(400), smalltraces.shape(cards=1)],
        added_nodes=[smalltraces.node("b", 1000)],
    )
    assert filled.fits == ((3, 5), (1, 2))


def test_point_between_two_is_the_earlier_one():
    world = smalltraces.workload([smalltraces.node("a", 1000, 1000)], [smalltraces.shape(cards=1)] * 2)
    filled = simulate_fill(world, "binpack", 1, demand=None)
    at = [filled.point_at(percent) for percent in (49, 50, 99, 100)]
    assert [point and point.allocated for point in at] == [None, 50.0, 50.0, 100.0]


def test_unreached_bound_changes_nothing(tiny):
    assert simulate_fill(tiny, "priced", 1, max_scored_nodes=256) == simulate_fill(tiny, "priced", 1)


def test_bounded_decisions_refuse_no_pod_that_fits():
    nodes = [smalltraces.node(f"n{i}", 1000) for i in range(200)]  # a sample of 128 of them is scored
    world = smalltraces.workload(nodes, [smalltraces.shape(1000)] * 200)
    for policy in ("bestfit", "priced"):
        assert simulate_fill(world, policy, 1, demand=None, max_scored_nodes=4).first_refusal is None
