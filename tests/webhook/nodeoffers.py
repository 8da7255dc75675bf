"""What nodes offer, as the webhook knows it."""

from typing import Any

from cardwise.core.api import names
from webhook.cluster.offers import NodeOffer, NodeOffers


def with_cards(**labels: str) -> NodeOffer:
    return NodeOffer(frozenset({names.SHARE, names.GPU_MEM}), labels)


def offers(**nodes: NodeOffer) -> NodeOffers:
    node_offers = NodeOffers()
    for name, offer in nodes.items():
        node_offers.on_change(name, None, offer)
    return node_offers


def required(*zones: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": list(zones)}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}
