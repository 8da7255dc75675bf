"""What `cardwise inspect` prints: cards and who holds how much of them, as `kubectl inspect gpushare` shows it."""

from typing import Any

import click

from cardwise.cli import console
from cardwise.cli.render import cardtable, devicetable, printing
from cardwise.kube import errors, survey
from cardwise.kube.client import KubeClient


def show(client: KubeClient, node: str | None, output: str, *, details: bool) -> None:
    """Prints the cards of one node, or of all. Raises `KubeError`, click.ClickException where the node has no card."""
    try:
        seen = survey.take(client, own=client.namespace)
    except errors.Forbidden as error:
        from cardwise.cli.render import visibletable  # noqa: PLC0415 - who sees the cards does not wait for it

        visibletable.show(client, error, output, [node] if node else [])
        return
    shown = (cardtable.with_any if details or output != "table" else cardtable.with_cards)(seen.ledger)
    if node is not None and node not in {one.name for one in shown}:
        known = ", ".join(one.name for one in shown) or "none"
        raise click.ClickException(f"node {node!r} has no card that Cardwise shares; nodes that have: {known}")
    if output != "table":
        printing.dump(_as_json(seen, node), output)
        return
    draw = cardtable.details if details else cardtable.summary
    console.say(draw(seen.ledger, seen.addresses, node), nl=False)
    if details:
        from cardwise.cli.render import gangtable  # noqa: PLC0415 - the same

        console.say(gangtable.holds_table(gangtable.holds(client), node), nl=False)
    printing.warn(seen)


def _as_json(seen: survey.Survey, only: str | None) -> dict[str, Any]:
    nodes = []
    for node in seen.ledger.nodes():
        if only not in (None, node.name):
            continue
        holdings = seen.ledger.holdings(node.name)
        cards = [
            {
                "index": card.index,
                "uuid": card.uuid,
                "model": card.model,
                "healthy": card.healthy,
                "cordoned": card.cordoned,
                "totalMiB": card.mem,
                "usedMiB": node.used[i],
                "pods": [
                    {"namespace": h.namespace, "name": h.name, "uid": h.uid, "usedMiB": share.mem}
                    for h in holdings
                    for share in h.assignment.shares()
                    if node.position(share) == i
                ],
            }
            for i, card in enumerate(node.cards)
        ]
        address = seen.addresses.get(node.name, "unknown")
        devices = devicetable.objects(seen.ledger, node)
        nodes.append({"name": node.name, "address": address, "cards": cards, "devices": devices})
    return {"nodes": nodes}
