"""The planner's own work: one big gang over a big cluster, in this process."""

import random
import time
from collections.abc import Callable

from bench import timing
from bench.timing import Row
from bench.world import P100, gpu_uuid, node_name
from cardwise.core.api import request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangplan import Planned, Terms
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement.ledger import Holding, Ledger
from tests.build import container, pod

CARDS = 8
GIB = 1 << 30


class Nodes:
    """64 CPUs and 256 GiB each, and something on all of them."""

    def __init__(self, nodes: int) -> None:
        self._left = {node_name(i): Load(48_000 - i % 7 * 1000, 200 * GIB, 100) for i in range(nodes)}

    def left(self, node: str) -> Load | None:
        return self._left.get(node)

    def names(self) -> list[str]:
        return list(self._left)


def ledger(nodes: int, pods: int) -> Ledger:
    """Half of the nodes have what the pods hold, the others are empty."""
    made, draw = Ledger(), random.Random(5)
    for n in range(nodes):
        cards = [Card(index=i, uuid=gpu_uuid(n, i), mem=P100, model="Tesla P100") for i in range(CARDS)]
        made.set_cards(node_name(n), cards)
    placed = 0
    while placed < pods:
        n, card, mem = draw.randrange(nodes // 2), draw.randrange(CARDS), draw.choice((512, 1024, 2048, 4069))
        state = made.node(node_name(n))
        if state is None or state.free[card] < mem:
            continue
        share = CardShare(card, gpu_uuid(n, card), mem, 0, P100)
        made.hold(Holding(f"u{placed}", "other", f"p{placed}", node_name(n), Assignment({"0": (share,)})))
        placed += 1
    return made


def _members(count: int, ask: Callable[[int], dict]) -> list[Member]:
    found = []
    for i in range(count):
        asked = ask(i)
        cpu = asked.pop("cpu", 1000)
        wanted = request.parse(pod(containers=[container(**asked)])) if asked else None
        load = Load(cpu, 4 * GIB, 1)
        found.append(Member(uid=f"m{i}", name=f"m{i}", shape=str(sorted(asked.items())), request=wanted, load=load))
    return found


GANGS: dict[str, Callable[[int], dict]] = {
    "equal shares of 8138 MiB": lambda _: {"gpu_mem": 8138},
    "one whole card each": lambda _: {"gpu_count": 1},
    "eight whole cards each": lambda _: {"gpu_count": 8},
    "20 sizes": lambda i: {"gpu_mem": 1000 + 700 * (i % 20)},
    "4 parameter servers, 2 sizes, whole cards": lambda i: (
        {"cpu": 8000} if i < 4 else ({"gpu_mem": 4069}, {"gpu_mem": 8138}, {"gpu_count": 1})[i % 3].copy()
    ),
}


def run(nodes: int, pods: int, members: int, runs: int) -> list[Row]:
    rows = []
    for what, ask in GANGS.items():
        made, nodes, wanted = ledger(nodes, pods), Nodes(nodes), _members(members, ask)
        offers = dict.fromkeys({member.shape for member in wanted}, frozenset(nodes.names()))
        seconds = []
        for _ in range(runs):
            made.index()
            terms = Terms(policy="binpack", offers=offers)
            began = time.thread_time()  # its own work, whatever else the machine does
            found = gangplan.plan(made, nodes, wanted, terms)
            seconds.append(time.thread_time() - began)
            if not isinstance(found, Planned):
                raise TypeError(found)
        rows.append(timing.latency(f"plan {members} members: {what}; {nodes} nodes x {CARDS}, {pods} pods", seconds))
    return rows
