"""Nodes with partly free cards, and an engine that has learned a workload."""

from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.workload import learn_workload
from cardwise.core.values.quantity import MiB, Percent

CARD = 1000


class Loads(dict):
    def free_load(self, node):
        return self.get(node)


def share(mem, core=0, resource_class=""):
    container_request = ContainerRequest(
        key="0", name="main", cards=1, mem=MiB(mem), core=Percent(core), resource_class=resource_class
    )
    return PodRequest(containers=(container_request,))


def whole(cards=1, resource_class=""):
    return PodRequest(containers=(ContainerRequest(key="0", name="main", cards=cards, resource_class=resource_class),))


def load(cpu=1000, memory=1000):
    return Load(cpu, memory, 1)


def world(*, seen=((share(500), load()),), classes=frozenset(), **nodes):
    """Nodes with the given MiB free on each card, like n1=[1000, 300], and policies that have learned a workload."""
    ledger, loads = Ledger(), Loads()
    for name, frees in nodes.items():
        ledger.set_cards(
            name,
            [Card(index=i, uuid=f"{name}-{i}", mem=MiB(CARD), model="m", classes=classes) for i in range(len(frees))],
        )
        loads[name] = Load(100_000, 100_000, 100)
    engine = Engine(ledger, loads)
    for name, frees in nodes.items():
        for i, free in enumerate(frees):
            if free < CARD:
                fill(ledger, name, i, CARD - free)
    knows(engine, seen)
    return ledger, loads, engine


def fill(ledger, node, index, mem):
    """Let a pod hold this amount of the card."""
    only = Ledger()
    only.set_cards(node, [card for card in ledger.node(node).cards if card.index == index])
    placed = Engine(only, Loads({node: Load(0, 0, 1)})).place(share(mem), Load(0, 0, 1), "binpack")
    ledger.set_holding(Holding(f"{node}-{index}-{mem}", "others", "x", node, placed.assignment))


def knows(engine, seen):
    for request, of_load in seen:
        engine.count_arrival(request, of_load)
    engine.use_workload(learn_workload(engine.learning_input()))


def warm(engine):
    while engine.run_background_step(64):
        pass
