"""What the simulator says is what the cluster does: the same pods, one after the other, to the same nodes and cards.

Ties included: many nodes and cards are alike.
"""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from cardwise.cli.cluster import liveworkload
from cardwise.core.api import names, request
from cardwise.core.api.assignment import CardShare
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.placement.scored.workload import Workload
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.workload import PodShape, SimulatedPod
from tests.cluster import Cluster
from tests.cluster.cards import TestCard
from tests.integration.conftest import SOAK, spaces
from tests.integration.sharing import Space, assigned, inspect, workload

MANY, FEW = (200, 50) if SOAK else (60, 15)  # pods
_ALL = 1_000_000  # lines of a log
V100, T4, A10, P100 = (
    TestCard(model=model, memory_mib=mem)
    for model, mem in (("Tesla-V100", 32510), ("Tesla-T4", 15109), ("A10", 22731), ("Tesla-P100", 16276))
)
# Far more than they take: a cluster is started within the limit as well, where this test is the first.
pytestmark = [pytest.mark.cluster("sim")]

NODES = ((9, [V100] * 8), (5, [T4] * 4), (4, [P100] * 2), (2, [A10]))  # how many, and their cards
# How often, and what.
KINDS: Sequence[tuple[int, dict[str, int]]] = (
    (30, {"gpu_mem": 2000}),
    (30, {"gpu_mem": 5036}),
    (20, {"gpu_mem": 7500}),
    (15, {"gpu_mem": 8138}),
    (12, {"gpu_mem": 12_200}),
    (8, {"gpu_mem": 14_000, "gpu_core": 30}),
    (12, {"whole_gpu": 1}),
    (3, {"whole_gpu": 2}),
    (2, {"gpu_mem": 12_000, "gpu_count": 2}),
    (1, {"whole_gpu": 8}),
)

Where = tuple[str, tuple[CardShare, ...]]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """Twenty nodes of four kinds, and nothing on them."""
    for space in spaces(cluster, request):
        for count, cards in NODES:
            space.nodes(count, cards)
        yield space


def cleared(space: Space) -> None:
    """No pod is left, nor what one held."""
    space.clear()
    space.wait(lambda: not any(used for _, used, _ in inspect(space.cluster).values()), "all cards are free again")


def arrivals(count: int, policy: str) -> Iterator[Json]:
    """Pods in an order that is the same every time."""
    chance = Random(7)
    requests = chance.choices([asks for _, asks in KINDS], [often for often, _ in KINDS], k=count)
    for i, asks in enumerate(requests):
        yield workload(f"{policy}-{i:03d}", annotations={names.POLICY: policy}, **asks)


def compared(
    space: Space, simulated: SimulatedCluster, pods: Iterator[Json]
) -> tuple[dict[str, Where], dict[str, Where]]:
    """Where the simulator puts each, and where the cluster does. One without room there is not waited for here."""
    simulated_places: dict[str, Where] = {}
    done: dict[str, Where] = {}
    for pod in pods:
        stored = space.cluster.api.create(paths.pods(space.name), pod)  # as the webhook made it
        name, uid = stored["metadata"]["name"], stored["metadata"]["uid"]
        if (
            simulated.place_pod(uid, SimulatedPod(name, PodShape(request.parse(stored), liveworkload.load_of(stored))))
            is None
        ):
            space.cluster.api.delete(paths.pods(space.name, name), {"gracePeriodSeconds": 0})
            continue
        holding = simulated.ledger.holding(uid)
        simulated_places[name] = holding.node, holding.assignment.shares()
        findings: list[Json] = []

        def bound(name: str = name, findings: list[Json] = findings) -> bool:
            findings[:] = [space.get(name)]
            return bool(findings[0]["spec"].get("nodeName"))

        space.wait(bound, f"{name} has a node; simulated: {simulated_places[name]}")
        done[name] = findings[0]["spec"]["nodeName"], assigned(findings[0]).shares()
    return simulated_places, done


def test_binpack_places_pods_as_it_is_simulated(space: Space):
    simulated = SimulatedCluster(liveworkload.read_cluster_for_simulation(space.cluster.api).nodes, "binpack")
    simulated_places, done = compared(space, simulated, arrivals(MANY, "binpack"))
    assert done == simulated_places
    assert len(simulated_places) == MANY
    assert len({node for node, _ in done.values()}) > 5


@pytest.fixture(name="learned")
def _learned(space: Space) -> str:
    """An extender that has learned a workload, which nothing that comes in these tests changes by much."""
    cluster = space.cluster
    workload_seen = Workload()
    for often, asks in KINDS:
        cards = asks.get("gpu_count", asks.get("whole_gpu", 1))
        mem = asks.get("gpu_mem", 0) // cards
        workload_seen.count_arrival(RequestSize(cards, mem, asks.get("gpu_core", 0), "", 0, 0), 10 * often)
    at = paths.configmaps(names.NAMESPACE, names.WORKLOAD)
    extender, output = cluster.process("extender"), "updated the workload model"
    extender.stop()
    before = cluster.log_tail("extender", _ALL).count(output)
    saved = {"data": {names.WORKLOAD_REQUESTS: workload_seen.dump()}}
    try:
        cluster.api.patch(at, saved)
    except errors.NotFound:
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names.WORKLOAD}, **saved}
        cluster.api.create(paths.configmaps(names.NAMESPACE), manifest)
    extender.restart()
    cluster.parts.wait_ready("extender")
    # The first pod that asks for such a policy has it loaded; it is placed by `binpack` if that takes longer.
    space.create_and_locate(workload("first", annotations={names.POLICY: "priced"}, **KINDS[0][1]))
    space.wait(lambda: cluster.log_tail("extender", _ALL).count(output) > before, "the extender has learned")
    cleared(space)
    return str(cluster.api.get(at)["data"][names.WORKLOAD_REQUESTS])


def test_scored_policies_place_pods_as_is_simulated(space: Space, learned: str):
    simulated = SimulatedCluster(liveworkload.read_cluster_for_simulation(space.cluster.api).nodes, "priced")
    simulated.load_workload(learned)
    simulated_places, done = compared(space, simulated, arrivals(FEW, "priced"))
    assert done == simulated_places
    assert len(simulated_places) == FEW
