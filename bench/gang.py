"""Measures the gang planner alone: one big gang in a big cluster, in this process."""

import random
import time
from collections.abc import Callable

from bench import timing
from bench.synthetic import P100, gpu_uuid, node_name
from bench.timing import Row
from cardwise.core.api import request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangplan import PlanConstraints, Planned
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.quantity import MiB, Percent
from tests.build import container, pod

CARDS = 8
GIB = 1 << 30


class Nodes:
    """The nodes' free CPU, memory and pod slots: nodes of 64 CPUs and 256 GiB, partly used."""

    def __init__(self, nodes: int) -> None:
        self._free_loads = {node_name(i): Load(48_000 - i % 7 * 1000, 200 * GIB, 100) for i in range(nodes)}

    def free_load(self, node: str) -> Load | None:
        """The node's free load; None if the node does not exist."""
        return self._free_loads.get(node)

    def open_nodes(self) -> list[str]:
        """The names of all nodes."""
        return list(self._free_loads)


def filled_ledger(nodes: int, pods: int) -> Ledger:
    """A ledger with `nodes` nodes, and `pods` pods on the first half of them."""
    ledger, rng = Ledger(), random.Random(5)
    for n in range(nodes):
        cards = [Card(index=i, uuid=gpu_uuid(n, i), mem=MiB(P100), model="Tesla P100") for i in range(CARDS)]
        ledger.set_cards(node_name(n), cards)
    placed = 0
    while placed < pods:
        n, card, mem = rng.randrange(nodes // 2), rng.randrange(CARDS), rng.choice((512, 1024, 2048, 4069))
        state = ledger.node(node_name(n))
        if state is None or state.free[card] < mem:
            continue
        share = CardShare(card, gpu_uuid(n, card), MiB(mem), Percent(0), MiB(P100))
        ledger.set_holding(Holding(f"u{placed}", "other", f"p{placed}", node_name(n), Assignment({"0": (share,)})))
        placed += 1
    return ledger


def _members(count: int, resources_of: Callable[[int], dict[str, int]]) -> list[Member]:
    members = []
    for i in range(count):
        resources = resources_of(i)
        cpu = resources.pop("cpu", 1000)
        parsed = request.parse(pod(containers=[container("main", **resources)])) if resources else None
        load = Load(cpu, 4 * GIB, 1)
        shape = str(sorted(resources.items()))
        members.append(Member(uid=f"m{i}", name=f"m{i}", shape=shape, request=parsed, load=load))
    return members


# By label: the requested resources of the gang's i-th member.
GANGS: dict[str, Callable[[int], dict[str, int]]] = {
    "equal shares of 8138 MiB": lambda _: {"gpu_mem": 8138},
    "one whole card each": lambda _: {"gpu_count": 1},
    "eight whole cards each": lambda _: {"gpu_count": 8},
    "20 sizes": lambda i: {"gpu_mem": 1000 + 700 * (i % 20)},
    "4 parameter servers, 2 sizes, whole cards": lambda i: (
        {"cpu": 8000} if i < 4 else ({"gpu_mem": 4069}, {"gpu_mem": 8138}, {"gpu_count": 1})[i % 3].copy()
    ),
}


def run(nodes: int, pods: int, members: int, runs: int) -> list[Row]:
    """Plan each gang of `members` members `runs` times, with `pods` pods on `nodes` nodes."""
    rows = []
    for label, resources_of in GANGS.items():
        ledger, free_loads, gang = filled_ledger(nodes, pods), Nodes(nodes), _members(members, resources_of)
        offers = dict.fromkeys({member.shape for member in gang}, frozenset(free_loads.open_nodes()))
        seconds = []
        for _ in range(runs):
            ledger.index()
            constraints = PlanConstraints(policy="binpack", offers=offers)
            start = time.thread_time()  # CPU time: other processes do not count
            outcome = gangplan.plan(ledger, free_loads, gang, constraints)
            seconds.append(time.thread_time() - start)
            if not isinstance(outcome, Planned):
                raise TypeError(outcome)
        rows.append(timing.latency(f"plan {members} members: {label}; {nodes} nodes x {CARDS}, {pods} pods", seconds))
    return rows
