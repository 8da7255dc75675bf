"""The upper bound of pods that fit: never below the number of a plan, and independent of the order of changes."""

from contextlib import suppress
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import request
from cardwise.core.api.request import Load
from cardwise.core.gangs import capacity, gangplan
from cardwise.core.gangs.capacity import (
    Capacities,
    MemberShape,
    ShapeCapacity,
    count_at_least_as_demanding,
    group_by_shape,
)
from cardwise.core.gangs.gangplan import PlanConstraints, Planned
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from extender.cache.nodeload import NodeLoads
from extender.records.nodeinfo import NodeRecord, PlacedPod
from tests.build import cards, container, pod
from tests.examples import examples

CARD = 100  # MiB
ASKS = [
    [{"gpu_count": 1}],
    [{"gpu_count": 2}],
    [{"gpu_mem": 50}],
    [{"gpu_mem": 33}],
    [{"gpu_mem": 80, "gpu_count": 2}],
    [{"gpu_mem": 20}, {"gpu_mem": 20}],
    [{"gpu_mem": 20}, {"gpu_count": 1}],
    [{"gpu_mem": 30, "gpu_core": 60}],
]
asks = st.sampled_from(range(len(ASKS)))
nodes = st.integers(0, 4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("cards"), nodes, st.integers(0, 3)),
        st.tuples(st.just("room"), nodes, st.integers(0, 6)),
        st.tuples(st.just("hold"), nodes, asks),
        st.tuples(st.just("release"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("ask"), asks, st.integers(1, 3)),
    ),
    max_size=30,
)


def request_of(shape_name):
    return request.parse(
        pod(containers=[container(name=f"c{i}", **amounts) for i, amounts in enumerate(ASKS[shape_name])])
    )


class World:
    def __init__(self):
        self.ledger, self.loads = Ledger(), NodeLoads()
        self.held = 0

    def do(self, change, number, other):
        if change == "cards":
            self.ledger.set_cards(f"n{number}", cards(*[CARD] * other, node=f"n{number}"))
        elif change == "room":
            self.loads.set_node(f"n{number}", NodeRecord(Load(other, 10, 10)), 0.0)
        elif change == "hold":
            placed = placement.place_on(self.ledger.kinds, self.ledger.node(f"n{number}"), request_of(other), "binpack")
            if isinstance(placed, Placement):
                uid = f"u{self.held}"
                self.held += 1
                self.ledger.set_holding(Holding(uid, "d", uid, placed.node, placed.assignment))
                self.loads.set_pod(uid, PlacedPod(placed.node, Load(1, 1, 1)))
        elif change == "gone":
            self.loads.remove_node(f"n{number}")
        elif change == "release":
            self.ledger.release(f"u{number}")
            self.loads.remove_pod(f"u{number}")


class _Stopped(Exception):
    pass


def most_fitting(capacities, shape):
    return capacities.count_fitting_pods(shape), dict(capacities.shape_capacity(shape).counts)


def count_some(capacities, shape, times):
    """Count until the pace has been called so often."""
    remaining = [None] * times

    def pace():
        if not remaining:
            raise _Stopped
        remaining.pop()

    with suppress(_Stopped), patch.object(capacity, "_NODES_BETWEEN_PACES", 1):
        capacities.count_fitting_pods(shape, pace)


@settings(max_examples=examples(60, soak=3000), deadline=None)
@given(steps=steps, shape_name=asks, cpu=st.integers(0, 2))
def test_what_changed_is_all_that_is_looked_at_and_the_answer_is_as_if_everything_were(steps, shape_name, cpu):
    world = World()
    kept = Capacities(world.ledger, world.loads)
    for step in steps:
        if step[0] == "ask":
            count_some(kept, MemberShape(request_of(step[1]), Load(cpu, 1, 1)), step[2])
        world.do(*step)
    shape = MemberShape(request_of(shape_name), Load(cpu, 1, 1))
    assert most_fitting(kept, shape) == most_fitting(Capacities(world.ledger, world.loads), shape)


some_steps = st.lists(
    st.one_of(
        st.tuples(st.just("cards"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("room"), st.integers(0, 1), st.integers(0, 6)),
        st.tuples(st.just("gone"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 1), asks),
        st.tuples(st.just("release"), st.integers(0, 9), st.just(0)),
    ),
    max_size=3,
)


@settings(max_examples=examples(200, soak=3000), deadline=None)
@given(
    rounds=st.lists(st.tuples(some_steps, some_steps, st.sampled_from([0, 1, 9])), min_size=1, max_size=4),
    shape_name=asks,
    cpu=st.integers(0, 2),
)
def test_counts_that_move_from_snapshot_to_snapshot_are_as_if_everything_were_counted(rounds, shape_name, cpu):
    """A planner counts in its snapshot, and changes it; meanwhile the cluster changes."""
    world, shape = World(), MemberShape(request_of(shape_name), Load(cpu, 1, 1))
    for node in range(2):
        world.do("cards", node, 2)
        world.do("room", node, 6)
    kept = Capacities(world.ledger.snapshot(), world.loads.snapshot())
    for of_snapshot, of_world, counted in rounds:
        snapshot = World()
        snapshot.ledger, snapshot.loads, snapshot.held = world.ledger.snapshot(), world.loads.snapshot(), world.held
        kept.move_to(snapshot.ledger, snapshot.loads)
        count_some(kept, shape, counted)
        for step in of_snapshot:
            snapshot.do(*step)
        count_some(kept, shape, counted)
        for step in of_world:
            world.do(*step)
    last = world.ledger.snapshot(), world.loads.snapshot()
    kept.move_to(*last)
    assert most_fitting(kept, shape) == most_fitting(Capacities(*last), shape)


@settings(max_examples=examples(60, soak=3000), deadline=None)
@given(steps=steps, shape_name=asks, cpu=st.integers(0, 2), count=st.integers(1, 8))
def test_no_plan_finds_places_for_more(steps, shape_name, cpu, count):
    world = World()
    for step in steps:
        world.do(*step)
    shape = MemberShape(request_of(shape_name), Load(cpu, 1, 1))
    total, there = most_fitting(Capacities(world.ledger, world.loads), shape)
    members = [
        Member(uid=f"m{i}", name=f"m{i}", shape="s", request=shape.request, load=shape.load) for i in range(count)
    ]
    constraints = PlanConstraints(policy="binpack")
    planned = gangplan.plan(world.ledger, world.loads, members, constraints)
    if not isinstance(planned, Planned):
        return
    assert count <= total
    assert set(planned.nodes.values()) <= there.keys()
    replanned = gangplan.plan(
        world.ledger, world.loads, members, PlanConstraints(policy="binpack", vacant=lambda *_: ShapeCapacity(there))
    )
    assert replanned == planned  # a planner with these capacities makes the same plan


@settings(max_examples=examples(60, soak=3000), deadline=None)
@given(steps=steps, wanted=st.lists(st.tuples(asks, st.integers(0, 2)), min_size=1, max_size=8))
def test_no_plan_finds_places_for_more_members_than_fit_of_a_smaller_one(steps, wanted):
    world = World()
    for step in steps:
        world.do(*step)
    members = [
        Member(
            uid=f"m{i}", name=f"m{i}", shape=f"{shape_name} {cpu}", request=request_of(shape_name), load=Load(cpu, 1, 1)
        )
        for i, (shape_name, cpu) in enumerate(wanted)
    ]
    planned = gangplan.plan(world.ledger, world.loads, members, PlanConstraints(policy="binpack"))
    if isinstance(planned, Planned):
        capacities = Capacities(world.ledger, world.loads)
        for shape, count in count_at_least_as_demanding(group_by_shape(members)).items():
            assert count <= most_fitting(capacities, shape)[0]


@settings(max_examples=examples(60, soak=3000), deadline=None)
@given(
    changes=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=30),
    ahead=st.lists(st.sampled_from("abcdefg"), max_size=4),
)
def test_the_order_of_room_is_as_if_all_nodes_were_sorted(changes, ahead):
    plain, kept = {}, ShapeCapacity()
    for node, room in changes:
        assert kept.set_count(node, room) == room - plain.get(node, 0)
        plain[node] = room
        in_order = sorted((node for node in plain if plain[node]), key=lambda node: (-plain[node], node))
        assert (list(kept), list(reversed(kept))) == (in_order, in_order[::-1])
    with_minimum = kept.with_at_least_one_pod_on(ahead)
    assert kept.counts == {node: room for node, room in plain.items() if room}
    assert with_minimum.counts == dict.fromkeys(ahead, 1) | kept.counts
    assert list(with_minimum) == list(ShapeCapacity(with_minimum.counts))
