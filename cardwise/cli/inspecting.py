"""The tables of `kubectl inspect gpushare`, drawn from a ledger.

Kept to gpushare's layout (gpushare-device-plugin `cmd/inspect/display.go`), because people and scripts read it;
unlike it, cards of different size in one node show their own size, and nodes come in the order of their names.
"""

from collections.abc import Mapping, Sequence

from cardwise.cli import tables
from cardwise.core.ledger import Ledger, NodeState


def summary(ledger: Ledger, addresses: Mapping[str, str], only: str | None = None) -> str:
    """One row per node: used/total MiB of each card and of the node."""
    nodes = _shown(ledger, only)
    most = max((card.index + 1 for node in nodes for card in node.cards), default=0)
    rows = [["NAME", "IPADDRESS", *(f"GPU{i}(Allocated/Total)" for i in range(most)), "GPU Memory(MiB)"]]
    for node in nodes:
        cells = ["0/0"] * most
        for used, card in zip(node.used, node.cards, strict=True):
            cells[card.index] = f"{used}/{card.mem}"
        rows.append([node.name, addresses.get(node.name, "unknown"), *cells, f"{_used(node)}/{_total(node)}"])
    table = tables.aligned(rows)
    line = "-" * max(len(row) for row in table.splitlines())
    return f"{table}{line}\nAllocated/Total GPU Memory In Cluster:\n{_cluster(nodes)}\n"


def details(ledger: Ledger, addresses: Mapping[str, str], only: str | None = None) -> str:
    """Per node one table of its pods and what each holds on each card, in MiB."""
    nodes = _shown(ledger, only)
    parts = []
    for node in nodes:
        heads = [f"GPU{card.index}(Allocated)" for card in node.cards]
        rows = [["NAME", "NAMESPACE", *heads]]
        for holding in sorted(ledger.holdings(node.name), key=lambda h: (h.namespace, h.name)):
            held = [0] * len(node.cards)
            for share in holding.assignment.shares():
                position = node.position(share)
                if position is not None:
                    held[position] += share.mem
            name = f"{holding.name} ({holding.mark})" if holding.mark else holding.name
            rows.append([name, holding.namespace, *map(str, held)])
        sums = [
            ["Allocated :", f"{_used(node)} ({_percent(_used(node), _total(node))})"],
            ["Total :", str(_total(node))],
        ]
        table = tables.aligned(rows) + tables.aligned(sums)
        line = "-" * max(len(row) for row in table.splitlines())
        head = tables.aligned(
            [["NAME:", node.name], ["IPADDRESS:", addresses.get(node.name, "unknown")], *_models(node)]
        )
        parts.append(f"\n{head}\n{table}{line}\n")
    return "".join(parts) + f"\n\nAllocated/Total GPU Memory In Cluster:  {_cluster(nodes)}\n"


def _shown(ledger: Ledger, only: str | None) -> list[NodeState]:
    return [node for node in ledger.nodes() if node.cards and only in (None, node.name)]


def _models(node: NodeState) -> list[list[str]]:
    """What cards the node has; gpushare did not know. One line where all are alike."""
    models = [card.model or "unknown" for card in node.cards]
    if len(set(models)) == 1:
        return [["MODEL:", models[0]]]
    return [[f"GPU{card.index}:", model] for card, model in zip(node.cards, models, strict=True)]


def _used(node: NodeState) -> int:
    return sum(node.used)


def _total(node: NodeState) -> int:
    return sum(card.mem for card in node.cards)


def _percent(part: int, whole: int) -> str:
    return f"{part * 100 // whole if whole else 0}%"


def _cluster(nodes: Sequence[NodeState]) -> str:
    used, total = sum(map(_used, nodes)), sum(map(_total, nodes))
    return f"{used}/{total} ({_percent(used, total)})"
