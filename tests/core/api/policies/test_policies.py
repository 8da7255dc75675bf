"""The table of placement policies, and the texts that name a policy."""

import pytest

from cardwise.core.api import names, policies, request
from cardwise.core.placement.scored.engine import SCORINGS
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.objectnames import is_label_key
from tests.build import asking

ZONE = "topology.kubernetes.io/zone"


class Facts(policies.NodeFacts):
    def __init__(self, labels, peers):
        self._labels, self._peers = labels, peers

    def labels(self, node):
        return self._labels.get(node, {})

    def peer_counts_by_node(self):
        return self._peers


def test_every_scored_policy_has_a_scoring():
    assert {name for name, policy in policies.POLICIES.items() if policy.is_scored} == set(SCORINGS)


def test_the_extenders_policy_chooses_cards():
    assert policies.CARD_POLICIES == ("binpack", "priced", "spread")
    assert policies.DEFAULT_POLICY in policies.CARD_POLICIES
    assert policies.FALLBACK_POLICY in policies.CARD_POLICIES


def test_a_policy_with_a_label_is_its_row_with_this_label():
    policy = policies.find_policy(f"spread-by={ZONE}")
    assert policy.label == ZONE
    assert policy.rank_nodes is policies.POLICIES["spread-by"].rank_nodes


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("best", "'best' is not a placement policy", "write one of: binpack, priced, spread, spread-by=LABEL"),
        ("", "'' is not a placement policy", "write one of: binpack, priced, spread, spread-by=LABEL"),
        ("binpack=zone", "'binpack=zone' is not a placement policy", "write one of"),
        ("spread-by", "'spread-by' names no label", f"write the key of a node label, as in spread-by={ZONE}"),
        ("spread-by=", "'spread-by=' names no label", "write the key of a node label"),
        ("spread-by=a zone", "'a zone' is not the key of a label", "write the key of a node label"),
        ("spread-by=zone=a", "'zone=a' is not the key of a label", "write the key of a node label"),
    ],
)
def test_a_text_that_names_no_policy_is_refused_with_the_field_and_the_remedy(text, problem, remedy):
    assert not policies.is_valid(text)
    with pytest.raises(InvalidRequest) as error:
        policies.find_policy(text, "spec.policy")
    assert (error.value.field, error.value.problem) == ("spec.policy", problem)
    assert error.value.remedy.startswith(remedy)


def test_the_annotation_of_a_pod_is_checked():
    with pytest.raises(InvalidRequest, match=r"metadata.annotations\[cardwise.dev/policy\]: 'a b' is not the key"):
        request.parse(asking("p", gpu_mem=1, annotations={names.POLICY: "spread-by=a b"}))


@pytest.mark.parametrize(
    ("key", "valid"),
    [
        ("zone", True),
        ("Zone_1.x", True),
        ("topology.kubernetes.io/zone", True),
        ("z" * 63, True),
        ("z" * 64, False),
        (f"{'d' * 254}/zone", False),
        ("", False),
        ("/zone", False),
        ("example.com/", False),
        ("a/b/c", False),
        ("-zone", False),
        ("Example.com/zone", False),
    ],
)
def test_the_keys_of_labels_are_those_of_kubernetes(key, valid):
    assert is_label_key(key) is valid


def test_the_extenders_policy_chooses_cards_for_pods_that_name_none_or_one_that_ranks_nodes():
    assert policies.card_policy(None, "priced") == "priced"
    assert policies.card_policy("spread", "priced") == "spread"
    assert policies.card_policy(f"spread-by={ZONE}", "priced") == "priced"


def parse_peers(*, policy=f"spread-by={ZONE}", controller="rs-1", gang="", namespace="default"):
    pod = asking("p", gpu_mem=1, namespace=namespace, annotations={names.POLICY: policy} if policy else None)
    owners = [{"uid": "other", "kind": "Node"}, {"uid": controller, "controller": True}] if controller else []
    pod["metadata"] |= {"ownerReferences": owners, "labels": {names.GANG: gang} if gang else {}}
    pod_request = request.parse(pod)
    assert pod_request is not None
    return pod_request.peer_key


def test_peers_are_the_pods_of_one_controller_or_gang_in_one_namespace_with_one_policy():
    peers = parse_peers()
    assert peers
    assert peers == parse_peers()
    different = [
        parse_peers(controller="rs-2"),
        parse_peers(namespace="other"),
        parse_peers(policy="spread-by=rack"),
        parse_peers(gang="g"),
    ]
    assert len({peers, *different}) == 5
    assert parse_peers(gang="g", controller="rs-2") == parse_peers(gang="g")  # a gang may have several controllers


def test_pods_without_peers():
    assert [parse_peers(controller=""), parse_peers(policy="spread"), parse_peers(policy="")] == [None, None, None]


def test_spread_by_ranks_domains_by_their_peers_and_nodes_without_the_label_last():
    labels = {"a1": {ZONE: "a"}, "a2": {ZONE: "a"}, "b1": {ZONE: "b"}, "c1": {ZONE: ""}, "x": {"other": "a"}}
    policy = policies.find_policy(f"spread-by={ZONE}")
    assert policy.rank_nodes is not None
    rank = policy.rank_nodes(policy.label, Facts(labels, {"a1": 1, "a2": 2, "b1": 1, "x": 9, "gone": 5}))
    assert [rank(node) for node in ("a1", "a2", "b1", "c1")] == [3, 3, 1, 0]
    assert rank("x") == rank("unknown") > 1_000_000
