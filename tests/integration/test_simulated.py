"""What the simulator says is what the cluster does: the same pods, one after the other, to the same nodes and cards.

Ties included: many nodes and cards are alike.
"""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from cardwise.cli import snapshots
from cardwise.core import names, request
from cardwise.core.assignment import CardShare
from cardwise.core.scored.asks import Ask
from cardwise.core.scored.workload import Workload
from cardwise.kube import errors, paths
from cardwise.simulation.cluster import Cluster as Simulated
from cardwise.simulation.workload import Pod, Shape
from tests.cluster import Cluster, simnodes
from tests.cluster.cards import TestCard, card_uuid
from tests.cluster.processes import wait_for
from tests.integration.sharing import Json, Space, assigned, inspect, workload

PATIENCE = 120.0
_ALL = 1_000_000  # lines of a log
V100, T4, A10, P100 = (
    TestCard(model=model, memory_mib=mem)
    for model, mem in (("Tesla-V100", 32510), ("Tesla-T4", 15109), ("A10", 22731), ("Tesla-P100", 16276))
)
# Far more than they take: a cluster is started within the limit as well, where this test is the first.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = [
    *((f"mixed-{i:02d}", [V100] * 8) for i in range(9)),
    *((f"mixed-{i:02d}", [T4] * 4) for i in range(9, 14)),
    *((f"mixed-{i:02d}", [P100] * 2) for i in range(14, 18)),
    *((f"mixed-{i:02d}", [A10]) for i in range(18, 20)),
]
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


@pytest.fixture(name="space", scope="module")
def _space(sim_cluster: Cluster) -> Iterator[Space]:
    """Twenty nodes of four kinds, and nothing on them."""
    made = Space(sim_cluster, "simulated")
    simnodes.create(sim_cluster.api, NODES)
    sim_cluster.process("simnodes").restart()  # it plays the kubelets of the nodes that it finds
    yield made
    for name, cards in NODES:
        sim_cluster.api.delete(paths.nodes(name))
        for index in range(len(cards)):
            try:
                sim_cluster.api.delete(paths.extendedresources(names.extended_resource_name(card_uuid(name, index))))
            except errors.NotFound:  # it has gone with its node
                continue
    made.wait(lambda: not any(node.startswith("mixed-") for node, _ in inspect(sim_cluster)), "they are gone", PATIENCE)
    sim_cluster.process("simnodes").restart()


@pytest.fixture(autouse=True)
def _empty(space: Space) -> Iterator[None]:
    """Before, every card is there and free; afterwards no pod is left."""
    space.wait(lambda: free(space), "all cards are free", PATIENCE)
    yield
    cleared(space)


def free(space: Space) -> bool:
    """Whether every card is there, and free."""
    seen = inspect(space.cluster)
    there = 4 * 2 + sum(len(cards) for _, cards in NODES)
    return len(seen) == there and not any(used for _, used, _ in seen.values())


def cleared(space: Space) -> None:
    """No pod is left, nor what one held."""
    space.cluster.api.delete(paths.pods(space.name), {"gracePeriodSeconds": 1}, timeout=PATIENCE)
    space.wait(lambda: not space.pods(), "the pods are gone", PATIENCE)
    space.wait(lambda: free(space), "all cards are free again", PATIENCE)


def arrivals(many: int, policy: str) -> Iterator[Json]:
    """Pods in an order that is the same every time."""
    chance = Random(7)
    asked = chance.choices([asks for _, asks in KINDS], [often for often, _ in KINDS], k=many)
    for i, asks in enumerate(asked):
        yield workload(f"{policy}-{i:03d}", annotations={names.POLICY: policy}, **asks)


def compared(space: Space, simulated: Simulated, pods: Iterator[Json]) -> tuple[dict[str, Where], dict[str, Where]]:
    """Where the simulator puts each, and where the cluster does. One without room there is not waited for here."""
    said: dict[str, Where] = {}
    done: dict[str, Where] = {}
    for pod in pods:
        made = space.cluster.api.create(paths.pods(space.name), pod)  # as the webhook made it
        name, uid = made["metadata"]["name"], made["metadata"]["uid"]
        if simulated.place(uid, Pod(name, Shape(request.parse(made), snapshots.load_of(made)))) is None:
            space.cluster.api.delete(paths.pods(space.name, name), {"gracePeriodSeconds": 0})
            continue
        holding = simulated.ledger.holding(uid)
        said[name] = holding.node, holding.assignment.shares()
        found: list[Json] = []

        def bound(name: str = name, found: list[Json] = found) -> bool:
            found[:] = [space.get(name)]
            return bool(found[0]["spec"].get("nodeName"))

        assert wait_for(bound, PATIENCE), f"{name} has no node; simulated: {said[name]}\n{space.story()}"
        done[name] = found[0]["spec"]["nodeName"], assigned(found[0]).shares()
    return said, done


def test_binpack_places_two_hundred_pods_as_it_is_simulated(space: Space):
    simulated = Simulated(snapshots.take(space.cluster.api).nodes, "binpack")
    said, done = compared(space, simulated, arrivals(200, "binpack"))
    assert done == said
    assert len(said) == 200
    assert len({node for node, _ in done.values()}) > 10


@pytest.fixture(name="learned")
def _learned(space: Space) -> str:
    """An extender that has learned a workload, which nothing that comes in these tests changes by much."""
    cluster = space.cluster
    workload_seen = Workload()
    for often, asks in KINDS:
        cards = asks.get("gpu_count", asks.get("whole_gpu", 1))
        mem = asks.get("gpu_mem", 0) // cards
        workload_seen.saw(Ask(cards, mem, asks.get("gpu_core", 0), "", 0, 0), 10 * often)
    at = paths.configmaps(names.NAMESPACE, names.WORKLOAD)
    extender, told = cluster.process("extender"), "learned the workload"
    extender.stop()
    before = cluster.log_tail("extender", _ALL).count(told)
    saved = {"data": {names.WORKLOAD_ASKS: workload_seen.dump()}}
    try:
        cluster.api.patch(at, saved)
    except errors.NotFound:
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names.WORKLOAD}, **saved}
        cluster.api.create(paths.configmaps(names.NAMESPACE), made)
    extender.restart()
    cluster.parts.wait_ready("extender", PATIENCE)
    # The first pod that asks for such a policy has it loaded; it is placed by `binpack` if that takes longer.
    space.put(workload("first", annotations={names.POLICY: "fgd"}, **KINDS[0][1]))
    space.wait(lambda: cluster.log_tail("extender", _ALL).count(told) > before, "the extender has learned", PATIENCE)
    cleared(space)
    return str(cluster.api.get(at)["data"][names.WORKLOAD_ASKS])


def test_scored_policies_place_pods_as_is_simulated(space: Space, learned: str):
    # `priced` first: after some hundred changes it looks anew at what is scarce, in the extender at another moment.
    for policy in ("priced", "fgd"):
        simulated = Simulated(snapshots.take(space.cluster.api).nodes, policy)
        simulated.recall(learned)
        said, done = compared(space, simulated, arrivals(50, policy))
        assert done == said
        assert len(said) == 50
        cleared(space)
