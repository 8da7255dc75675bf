"""The planner of gangs against all plans: what it plans is right, and it leaves no trace."""

from contextlib import suppress
from itertools import product
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import request
from cardwise.core.api.quotas import QuotaEntry, headroom
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangplan import PlanConstraints, Planned
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from tests.build import cards, container, pod
from tests.examples import examples

CARD = 100  # MiB
shapes = st.sampled_from(["whole", "half", "third", "two", "none", "big-cpu", "both"])
ASKS = {
    "whole": [{"gpu_count": 1}],
    "half": [{"gpu_mem": 50}],
    "third": [{"gpu_mem": 33}],
    "two": [{"gpu_count": 2}],
    "none": [],
    "big-cpu": [{"gpu_mem": 10}],
    "both": [{"gpu_count": 1}, {"gpu_mem": 20}],
}
small_nodes = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3)


class Nodes:
    def __init__(self, lefts):
        self._lefts = {f"n{i}": Load(cpu, 10, pods) for i, (_, cpu, pods) in enumerate(lefts)}

    def free_load(self, node):
        return self._lefts.get(node)

    def open_nodes(self):
        return list(self._lefts)


def made_members(shapes_of):
    members = []
    for i, shape in enumerate(shapes_of):
        containers = [container(name=f"c{i}", **amounts) for i, amounts in enumerate(ASKS[shape])]
        pod_request = request.parse(pod(containers=containers)) if containers else None
        load = Load(2 if shape == "big-cpu" else 1, 1, 1)
        members.append(Member(uid=f"u{i}", name=f"m{i}", shape=shape, request=pod_request, load=load))
    return members


def made_ledger(nodes, busy=()):
    ledger = Ledger()
    for i, (has, _, _) in enumerate(nodes):
        ledger.set_cards(f"n{i}", cards(*[CARD] * has, node=f"n{i}"))
    for i, node in enumerate(busy):
        keep_busy(ledger, f"busy{i}", f"n{node % len(nodes)}", namespace="other")
    return ledger


def keep_busy(ledger, uid, node, namespace):
    pod_request = request.parse(pod(containers=[container(gpu_mem=40)]))
    placed = placement.place_on(ledger.kinds, ledger.node(node), pod_request, "binpack")
    if isinstance(placed, Placement):
        ledger.set_holding(Holding(uid, namespace, uid, placed.node, placed.assignment))


def some_plan(ledger, there, members, allowed):
    """Whether there is any choice of nodes that holds all of them, in any order of the cards' choice."""
    for nodes in product(there.open_nodes(), repeat=len(members)):
        if not all(allowed(m, n) for m, n in zip(members, nodes, strict=True)):
            continue
        loads = {name: there.free_load(name) for name in there.open_nodes()}
        world = ledger.snapshot()
        fits = True
        # The biggest first, as the engine would choose on one node.
        for m, n in sorted(
            zip(members, nodes, strict=True), key=lambda pair: gangplan._request_size_key(pair[0].request)
        ):
            free = loads[n]
            loads[n] = Load(free.cpu - m.load.cpu, free.memory - m.load.memory, free.pods - m.load.pods)
            if min(loads[n]) < 0:
                fits = False
                break
            if m.request is None:
                continue
            placed = placement.place_on(world.kinds, world.node(n), m.request, "binpack")
            if not isinstance(placed, Placement):
                fits = False
                break
            world.set_holding(Holding(m.uid, "d", m.name, n, placed.assignment))
        if fits:
            return True
    return False


def hold(ledger, planned):
    for uid, assignment in planned.assignments.items():
        ledger.set_holding(Holding(uid, "d", uid, planned.nodes[uid], assignment))


def picture(ledger):
    return [(node.name, list(node.free), list(node.clients)) for node in ledger.nodes()]


@settings(max_examples=examples(100, soak=2000), deadline=None)
@given(
    nodes=small_nodes,
    shapes_of=st.lists(shapes, min_size=1, max_size=4),
    busy=st.lists(st.integers(0, 2), max_size=2),
    avoided=st.sets(st.tuples(shapes, st.sampled_from(["n0", "n1", "n2"])), max_size=3),
    offered=st.dictionaries(shapes, st.frozensets(st.sampled_from(["n0", "n1", "n2"])), max_size=2),
)
def test_what_is_planned_is_right_and_leaves_no_trace(nodes, shapes_of, busy, avoided, offered):
    ledger, there, members = made_ledger(nodes, busy), Nodes(nodes), made_members(shapes_of)
    before = picture(ledger)
    constraints = PlanConstraints(policy="binpack", offers=offered, avoided=avoided)

    def allowed(m, n):
        return (m.shape, n) not in avoided and (m.shape not in offered or n in offered[m.shape])

    planned = gangplan.plan(ledger, there, members, constraints)
    assert picture(ledger) == before
    possible = some_plan(ledger, there, members, allowed) if not isinstance(planned, Planned) else True
    if not isinstance(planned, Planned):
        assert planned.member in members
        if len({m.shape for m in members}) == 1:
            assert not possible, "for equal members the search is complete"
        return
    assert planned.nodes.keys() == {m.uid for m in members}
    assert planned.assignments.keys() == {m.uid for m in members if m.request is not None}
    hold(ledger, planned)
    assert ledger.violations() == []
    used = {}
    for m in members:
        node = planned.nodes[m.uid]
        assert allowed(m, node)
        before_load = used.get(node, Load(0, 0, 0))
        used[node] = Load(*(a + b for a, b in zip(before_load, m.load, strict=True)))
    for node, load in used.items():
        free = there.free_load(node)
        assert all(a <= b for a, b in zip(load, free, strict=True))


@settings(max_examples=examples(70, soak=1000), deadline=None)
@given(
    nodes=small_nodes,
    shapes_of=st.lists(shapes, min_size=1, max_size=6),
    busy=st.lists(st.integers(0, 2), max_size=3),
    avoided=st.sets(st.tuples(shapes, st.sampled_from(["n0", "n1", "n2"])), max_size=3),
    policy=st.sampled_from(["binpack", "spread"]),
)
def test_the_index_of_all_cards_plans_as_the_scores_of_all_nodes_do(nodes, shapes_of, busy, avoided, policy):
    def planned():
        ledger = made_ledger(nodes, busy)
        constraints = PlanConstraints(policy=policy, avoided=avoided)
        return gangplan.plan(ledger, Nodes(nodes), made_members(shapes_of), constraints)

    by_index = planned()
    with patch.object(placement.Scorer, "indexed", new=False):
        assert planned() == by_index


@settings(max_examples=examples(50, soak=1000), deadline=None)
@given(shapes_of=st.lists(shapes, min_size=1, max_size=4), shares=st.integers(0, 4))
def test_a_plan_never_exceeds_a_quota(shapes_of, shares):
    nodes = [(2, 9, 9), (2, 9, 9)]
    ledger, members = made_ledger(nodes), made_members(shapes_of)
    entry = QuotaEntry(shares=shares)
    constraints = PlanConstraints(policy="binpack", headroom=[headroom(entry, ledger.used_amounts("d", entry))])
    planned = gangplan.plan(ledger, Nodes(nodes), members, constraints)
    shares_wanted = sum(container.cards for m in members if m.request for container in m.request.containers)
    if isinstance(planned, Planned):
        hold(ledger, planned)
        assert ledger.used_amounts("d", entry).shares == shares_wanted <= shares


class _Stopped(Exception):
    pass


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(
    nodes=small_nodes,
    shapes_of=st.lists(shapes, min_size=1, max_size=6),
    busy=st.lists(st.integers(0, 2), max_size=3),
    avoided=st.sets(st.tuples(shapes, st.sampled_from(["n0", "n1", "n2"])), max_size=3),
    steps=st.integers(0, 12),
)
def test_a_plan_that_its_pace_ends_leaves_no_trace_and_one_with_pauses_is_the_same(
    nodes, shapes_of, busy, avoided, steps
):
    ledger, there, members = made_ledger(nodes, busy), Nodes(nodes), made_members(shapes_of)
    before, remaining = picture(ledger), [None] * steps

    def pace():
        if not remaining:
            raise _Stopped
        remaining.pop()

    constraints, pauses = PlanConstraints(policy="binpack", avoided=avoided), []
    in_one = gangplan.plan(ledger, there, members, constraints)
    with suppress(_Stopped):
        assert gangplan.plan(ledger, there, members, constraints, pace) == in_one
    assert picture(ledger) == before
    with patch.object(gangplan, "_WORK_BETWEEN_PACES", 1):
        assert gangplan.plan(ledger, there, members, constraints, lambda: pauses.append(0)) == in_one
    assert pauses


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(
    nodes=small_nodes,
    shapes_of=st.lists(shapes, min_size=1, max_size=6),
    busy=st.lists(st.integers(0, 2), max_size=3),
    later=st.lists(st.integers(0, 2), max_size=3),
)
def test_a_plan_on_a_snapshot_is_that_of_the_cluster_then_whatever_comes_later(nodes, shapes_of, busy, later):
    ledger, there, members = made_ledger(nodes, busy), Nodes(nodes), made_members(shapes_of)
    constraints = PlanConstraints(policy="binpack")
    planned, snapshot = gangplan.plan(ledger, there, members, constraints), ledger.snapshot()
    for i, node in enumerate(later):
        keep_busy(ledger, f"later{i}", f"n{node % len(nodes)}", namespace="other")
    assert gangplan.plan(snapshot, there, members, constraints) == planned
