"""Snapshots of the nodes' loads stay as they were taken, in any order of changes on both sides."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import Load
from extender.cache.nodeload import NodeLoads
from extender.records.nodeinfo import NodeRecord, PlacedPod
from extender.records.podinfo import PodRecord
from tests.examples import examples

NODES, PODS, PRIORITIES = ["n1", "n2"], ["a", "b", "c"], [0, 5]

placed_pods = st.one_of(
    st.builds(lambda node, cpu: PlacedPod(node, Load(cpu, 0, 1)), st.sampled_from(NODES), st.integers(0, 2)),
    st.builds(
        lambda node, priority, terminating: PodRecord(
            node, uid="u", priority=priority, assignment=Assignment({}), terminating=terminating
        ),
        st.sampled_from(NODES),
        st.sampled_from(PRIORITIES),
        st.booleans(),
    ),
)
records = st.builds(
    lambda cpu, slots: NodeRecord(Load(cpu, 9, 9), offers_shares=slots), st.integers(3, 5), st.booleans()
)
changes = st.one_of(
    st.tuples(st.just("set_node"), st.sampled_from(NODES), records, st.just(0.0)),
    st.tuples(st.just("remove_node"), st.sampled_from(NODES)),
    st.tuples(st.just("set_pod"), st.sampled_from(PODS), placed_pods),
    st.tuples(st.just("plan_pod"), st.sampled_from(PODS), placed_pods),
    st.tuples(st.just("unplan_pods"), st.lists(st.sampled_from(PODS))),
    st.tuples(st.just("mark_unbound"), st.sampled_from(PODS)),
    st.tuples(st.just("remove_pod"), st.sampled_from(PODS)),
    st.tuples(st.just("reopen_steady_nodes"), st.just(9.0)),
)


def picture(loads):
    """All that planners read."""
    return (
        {
            node: (
                loads.free_load(node),
                loads.is_open(node),
                loads.is_unavailable(node),
                loads.offers_shares(node),
                list(loads.pods_on(node)),
            )
            for node in NODES
        },
        set(loads.open_nodes()),
        [(loads.has_victims(limit), loads.nodes_with_victims(set(NODES), limit)) for limit in (1, 6)],
        loads.nodes_with_terminating_pods(set(NODES)),
        [(loads.get(key), loads.load_of(key)) for key in PODS],
    )


@settings(max_examples=examples(100, soak=5000), deadline=None)
@given(st.lists(st.tuples(st.booleans(), changes), max_size=20))
def test_a_snapshot_and_its_origin_do_not_see_each_others_changes(steps):
    loads, without_snapshots = NodeLoads(), NodeLoads()
    snapshots = []
    for of_snapshot, (method, *arguments) in steps:
        target = loads
        if of_snapshot and snapshots:
            target, _ = snapshots.pop(0)
        else:
            getattr(without_snapshots, method)(*arguments)
        getattr(target, method)(*arguments)
        assert picture(loads) == picture(without_snapshots)
        for snapshot, expected in snapshots:
            assert picture(snapshot) == expected
        snapshots = [*snapshots[-2:], (loads.snapshot(), picture(loads))]
        assert picture(snapshots[-1][0]) == snapshots[-1][1]
