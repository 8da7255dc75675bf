"""After any run the simulator and its ledger agree; and a run depends on its seed only."""

import os
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.policies import CARD_POLICIES
from cardwise.core.api.request import Load
from cardwise.simulation import runs, traces
from cardwise.simulation.churn import simulate_churn
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.fill import simulate_fill
from cardwise.simulation.runs import SimulationRun
from cardwise.simulation.workload import SimulatedPod, shuffled_nodes
from tests.examples import examples
from tests.simulation import smalltraces

POLICY = st.sampled_from(CARD_POLICIES)
SHAPES = st.builds(
    smalltraces.shape,
    mem=st.sampled_from([0, 100, 330, 500, 700, 1000]),
    cards=st.sampled_from([0, 1, 1, 1, 2]),
    cpu=st.sampled_from([0, 500, 3000]),
)
NODES = st.lists(
    st.tuples(st.lists(st.sampled_from([500, 1000, 1000]), max_size=4), st.sampled_from([4000, 64_000])),
    min_size=1,
    max_size=4,
)


def check_agreement(
    cluster: SimulatedCluster, free_loads: dict[str, Load], placed: dict[str, tuple[str, SimulatedPod]]
) -> None:
    """Compare the cluster with the placed pods, by UID, and with the nodes' free loads before they were placed."""
    assert cluster.ledger.violations() == []
    assert {holding.uid: holding.node for holding in cluster.ledger.holdings()} == {
        uid: node for uid, (node, _) in placed.items()
    }
    used = 0
    for node in cluster.ledger.nodes():
        for i, card in enumerate(node.cards):
            shares = [
                share.mem
                for holding in cluster.ledger.holdings(node.name)
                for share in holding.assignment.shares()
                if share.index == card.index
            ]
            assert sum(shares) == node.used[i] <= card.mem
            used += node.used[i]
    assert used == cluster.allocated
    for name, empty in free_loads.items():
        loads = [pod.shape.load for node, pod in placed.values() if node == name]
        free = Load(
            empty.cpu - sum(load.cpu for load in loads),
            empty.memory - sum(load.memory for load in loads),
            empty.pods - sum(load.pods for load in loads),
        )
        assert cluster.free_load(name) == free
        assert min(free) >= 0


@settings(max_examples=examples(30, soak=1000))
@given(NODES, POLICY, st.lists(st.tuples(SHAPES, st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_ledger_matches_placed_pods_after_any_run(nodes, policy, pods, random):
    simulated_nodes = [smalltraces.node(f"n{i}", *cards, cpu=cpu) for i, (cards, cpu) in enumerate(nodes)]
    cluster = SimulatedCluster(simulated_nodes, policy)
    free_loads = {node.name: node.free_load for node in simulated_nodes}
    placed: dict[str, tuple[str, SimulatedPod]] = {}
    for i, (shape, leaves) in enumerate(pods):
        pod = SimulatedPod(f"pod-{i}", shape)
        cluster.observe_arrival(shape)
        node = cluster.place_pod(f"{i}", pod)
        if node is not None:
            placed[f"{i}"] = (node, pod)
        if leaves and placed:
            uid = random.choice(sorted(placed))
            assert cluster.remove_pod(uid) == placed.pop(uid)[0]
        check_agreement(cluster, free_loads, placed)
    for uid in list(placed):
        cluster.remove_pod(uid)
    check_agreement(cluster, free_loads, {})


@settings(max_examples=examples(20, soak=1000))
@given(NODES, POLICY, st.lists(SHAPES, max_size=12), SHAPES.filter(lambda shape: shape.request is not None))
def test_counting_what_fits_changes_nothing(nodes, policy, shapes, extra_shape):
    simulated_nodes = [smalltraces.node(f"n{i}", *cards, cpu=cpu) for i, (cards, cpu) in enumerate(nodes)]
    cluster = SimulatedCluster(simulated_nodes, policy)
    placed = {}
    for i, shape in enumerate(shapes):
        node = cluster.place_pod(f"{i}", SimulatedPod(f"pod-{i}", shape))
        if node is not None:
            placed[f"{i}"] = (node, SimulatedPod(f"pod-{i}", shape))
    first = cluster.count_fitting([extra_shape])
    check_agreement(cluster, {node.name: node.free_load for node in simulated_nodes}, placed)
    assert cluster.count_fitting([extra_shape]) == first


@settings(max_examples=examples(12, soak=200))
@given(POLICY, st.integers(0, 1000), st.sampled_from([0.3, 1.0, 1.7]))
def test_allocation_never_exceeds_requests_or_cards(tmp_path, policy, seed, demand):
    tiny = traces.read_trace(smalltraces.write_trace(tmp_path), "tiny")
    for point in simulate_fill(tiny, policy, seed, demand=demand).points:
        assert point.allocated <= min(100.0, point.arrived + 0.51)
        assert -0.001 <= point.fragmented <= 100.001


@pytest.fixture(name="tiny")
def _tiny(tmp_path):
    return traces.read_trace(smalltraces.write_trace(tmp_path), "tiny")


def test_results_do_not_depend_on_the_number_of_processes(tiny):
    plan = [SimulationRun(0, policy, seed) for policy in ("binpack", "spread") for seed in (42, 43)]
    job = partial(simulate_fill, extra_shapes=(smalltraces.shape(250),))
    pods: list[int] = []
    done: list[SimulationRun] = []
    several = runs.run_all(
        job, [tiny], plan, processes=2, on_progress=pods.append, on_run_done=lambda run, _: done.append(run)
    )
    assert several == runs.run_all(job, [tiny], plan)
    assert sorted(done, key=plan.index) == plan
    assert len({filled.points for filled in several}) == 4, "seeds and policies make a difference"


def test_results_do_not_depend_on_string_hashes(tmp_path):
    smalltraces.write_trace(tmp_path)
    code = (
        "import sys; from pathlib import Path; from cardwise.simulation import traces; "
        "from cardwise.simulation.fill import simulate_fill; w = traces.read_trace(Path(sys.argv[1]), 'tiny'); "
        "print([simulate_fill(w, p, 1, demand=2.0).points for p in ('binpack', 'bestfit', 'priced')])"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]


def test_progress_counts_every_pod(tiny):
    steps: list[int] = []
    filled = simulate_fill(tiny, "binpack", 1, on_progress=steps.append)
    assert sum(steps) == sum(row.arrived for row in filled.refused)


def test_error_in_a_worker_process_is_reported(tiny):
    no_workload = 9
    with pytest.raises(IndexError):
        runs.run_all(
            simulate_fill,
            [tiny],
            [SimulationRun(no_workload, "binpack", 1), SimulationRun(no_workload, "binpack", 2)],
            processes=2,
        )


def test_renamed_nodes_keep_their_names_as_a_set(tiny):
    names = [node.name for node in shuffled_nodes(tiny, 1)]
    assert [name.partition("-")[2] for name in names] == [node.name for node in tiny.nodes]
    assert sorted(names) != names


@pytest.mark.parametrize("policy", CARD_POLICIES)
def test_churn_load_varies_around_the_requested_load(tiny, policy):
    churned = simulate_churn(tiny, policy, 42, load=0.3, lifetimes=4.0)
    assert 10 < churned.allocated < 60
    assert churned.refused_percent < 50
    assert all(0 <= moment.allocated <= 100 for moment in churned.samples)
    assert churned == simulate_churn(tiny, policy, 42, load=0.3, lifetimes=4.0)
