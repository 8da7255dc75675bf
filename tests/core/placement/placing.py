"""Builders of ledgers with cards of several types, and of placements."""

from cardwise.core.api import quotas, request
from cardwise.core.api.cards import Card
from cardwise.core.placement import placement
from cardwise.core.placement.ledger import Ledger
from tests.build import container, pod


def place(ledger, policy="binpack", **amounts):
    return placement.place(ledger, [n.name for n in ledger.nodes()], request.parse(pod(**amounts)), policy)


K80, V100 = ({"mem": 11441, "model": "Tesla K80", "classes": frozenset({"k80"})},
             {"mem": 16160, "model": "Tesla V100", "classes": frozenset({"v100", "fast"}), "priority": 5})  # fmt: skip


def typed_ledger(**nodes):
    """A ledger of nodes with cards such as K80."""
    ledger = Ledger()
    for node, kinds in nodes.items():
        ledger.set_cards(node, [Card(index=i, uuid=f"GPU-{node}-{i}", **kind) for i, kind in enumerate(kinds)])
    return ledger


def of_class(resource_class, **amounts):
    container_manifest = container(resource_class, **amounts)
    container_manifest["resources"]["limits"][f"cardwise.dev/{resource_class}"] = str(amounts.get("gpu_count", 1))
    return container_manifest


def quota(ledger, *entries):
    return [quotas.headroom(entry, ledger.used_amounts("default", entry)) for entry in entries]


def location_of(placed):
    return placed.node, placed.assignment.indices()
