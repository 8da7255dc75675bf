"""The offers of nodes in the webhook."""

import json
from typing import Any

from cardwise.core.api import names
from tests import build
from tests.webhook.nodeoffers import offers, required, with_cards
from webhook.cluster.offers import NodeOffer, NodeOffers, project


def node(name: str, labels: dict[str, str] | None = None, **capacity: str) -> bytes:
    status = {"capacity": {key.replace("__", "/").replace("_", "-"): text for key, text in capacity.items()}}
    return json.dumps(build.node(name, labels=labels, status=status)).encode()


def test_offered_gpu_resources_above_zero_are_kept() -> None:
    shared: Any = {"cpu": "8", "cardwise.dev__share": "512", "nvidia.com__gpu": "0", "nvidia.com__mig_1g.5gb": "7"}
    offer = project(node("n1", {"zone": "a"}, **shared))[1]
    assert offer == NodeOffer(frozenset({names.SHARE, "nvidia.com/mig-1g.5gb"}), {"zone": "a"})
    assert project(node("n2", {"zone": "a"}, cpu="8"))[1] == NodeOffer()


def test_a_name_is_offered_while_a_node_has_it() -> None:
    theirs = NodeOffer(frozenset({names.NVIDIA_GPU}))
    node_offers = offers(n1=theirs, n2=theirs, n3=NodeOffer())
    node_offers.on_change("n1", theirs, NodeOffer())
    assert node_offers.resources() == {names.NVIDIA_GPU}
    node_offers.on_delete("n2", theirs)
    assert node_offers.resources() == frozenset()


def test_selector_is_compared_with_nodes_with_cards() -> None:
    node_offers = offers(n1=with_cards(zone="a", model="k80"), n2=with_cards(zone="b"), n3=NodeOffer())
    assert node_offers.unmatched_entries({}) == node_offers.unmatched_entries({"zone": "a", "model": "k80"}) == ()
    assert node_offers.unmatched_entries({"zone": "c", "model": "k80"}) == ("zone=c",)
    assert node_offers.unmatched_entries({"zone": "b", "model": "k80"}) == ("zone=b", "model=k80")
    assert node_offers.unmatched_entries({f"key{i}": "x" for i in range(17)}) == (), (
        "more than is compared while somebody waits"
    )
    node_offers.on_delete("n1", with_cards())
    node_offers.on_delete("n2", with_cards())
    assert node_offers.unmatched_entries({"zone": "c"}) == (), "there may be no node at all yet"


def test_nodes_that_match_selector_and_affinity() -> None:
    node_offers = offers(n1=with_cards(zone="a", model="k80"), n2=with_cards(zone="b"), n3=NodeOffer())
    assert node_offers.admitting_nodes({"spec": required("a", "b")}) is None, "none is barred"
    assert node_offers.admitting_nodes({"spec": required("b", "c")}) == {"n2"}
    assert node_offers.admitting_nodes({"spec": required("b") | {"nodeSelector": {"model": "k80"}}}) == frozenset()
    assert node_offers.admitting_nodes({"spec": {}}) is None
    assert node_offers.admitting_nodes({"spec": required(*map(str, range(20)))}) is None, "somebody waits"


def test_resources_per_node_are_limited() -> None:
    node_offers = NodeOffers()
    invented = {f"invented.example/gpu-{number}": "1" for number in range(5000)} | {names.SHARE: "1"}
    labels = {f"invented-{number}": "x" for number in range(5000)}
    name, offer = project(node("n1", labels, **invented))
    node_offers.on_change(name, None, offer)
    assert len(node_offers.resources()) <= 32
    assert len(node_offers.label_values()) <= 256
    assert not node_offers.unmatched_entries({"invented-4999": "x"}), "a selector is compared with all labels"
