"""Node selectors, node affinity and tolerations, by kube-scheduler's rules."""

import pytest

from cardwise.kube.pods import nodeconstraints
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints, NodePreferences, Taint

ZONE = {"zone": "a", "size": "8"}


def required(*terms: dict) -> dict:
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return {"affinity": {"nodeAffinity": hard}}


def match_expression(key: str, operator: str, *operands: str) -> dict:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(operands)}]}


ZONE_A = {"key": "zone", "operator": "In", "values": ["a"]}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"nodeSelector": {"zone": "a", "none": ""}}, False),
        (required(match_expression("zone", "In", "b", "a")), True),
        (required(match_expression("zone", "In", "b")), False),
        (required(match_expression("zone", "In", "b"), match_expression("zone", "Exists")), True),
        (required({"matchExpressions": [ZONE_A, {"key": "size", "operator": "In", "values": ["9"]}]}), False),
        (required({"matchExpressions": [ZONE_A, {"key": "size", "operator": "In", "values": ["8"]}]}), True),
        (required(match_expression("zone", "NotIn", "a")), False),
        (required(match_expression("none", "NotIn", "a")), True),
        (required(match_expression("none", "Exists")), False),
        (required(match_expression("none", "DoesNotExist")), True),
        (required(match_expression("size", "Gt", "7")), True),
        (required(match_expression("size", "Gt", "8")), False),
        (required(match_expression("size", "Lt", "9")), True),
        (required(match_expression("size", "Lt", "8")), False),
        (required(match_expression("size", "Lt", str(2**63 - 1))), True),
        (required(match_expression("size", "Lt", str(2**63))), False),
        (required(match_expression("size", "Lt", "9" * 5000)), False),
        (required(match_expression("zone", "Gt", "7")), False),
        (required(match_expression("none", "Lt", "7")), False),
        (required(match_expression("zone", "Near", "a")), False),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}), True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}), False),
        (required({}), False),
        (required(), False),
        ({"nodeSelector": {"zone": "a"}} | required(match_expression("size", "In", "9")), False),
    ],
)
def test_labels(spec, allowed):
    assert nodeconstraints.constraints_of(spec).admits("n1", NodeLabelsAndTaints(ZONE)) == allowed


def test_the_number_of_a_condition_is_parsed_once_for_all_nodes(monkeypatch):
    """16 numbers of 4,000 digits, parsed for each of 3,000 nodes, took seconds."""
    lengths, parse_number = [], nodeconstraints._parse_number
    monkeypatch.setattr(nodeconstraints, "_parse_number", lambda text: lengths.append(len(text)) or parse_number(text))
    constraints = nodeconstraints.constraints_of(required(match_expression("size", "Gt", "9" * 4000)))
    assert not any(constraints.admits(f"n{i}", NodeLabelsAndTaints(ZONE)) for i in range(100))
    assert lengths.count(4000) == 1


@pytest.mark.parametrize("number", ["9", "+9", "09", "9" * 18])
def test_numbers_are_read_as_gos_parseint_reads_them(number):
    above_eight = nodeconstraints.constraints_of(required(match_expression("size", "Gt", "8")))
    assert above_eight.admits("n1", NodeLabelsAndTaints({"size": number}))


@pytest.mark.parametrize("text", ["1_000", " 9", "9 ", "9\n", "\u0669", "\uff19", "+-9", "+", "0x9", "9.0", "9e3", ""])
def test_texts_that_gos_parseint_refuses_are_no_numbers(text):
    """int() reads some of them; kube-scheduler then rejects the node that Cardwise had chosen."""
    assert not nodeconstraints.constraints_of(required(match_expression("size", "Gt", "8"))).admits(
        "n1", NodeLabelsAndTaints({"size": text})
    )
    assert not nodeconstraints.constraints_of(required(match_expression("size", "Lt", text))).admits(
        "n1", NodeLabelsAndTaints({"size": "1"})
    )


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (None, False),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "value": "yes", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "gpu", "operator": "Later", "value": "yes"}, False),
    ],
)
def test_taints(toleration, tolerated):
    constraints = nodeconstraints.constraints_of({"tolerations": [toleration] if toleration else []})
    assert constraints.admits("n1", NodeLabelsAndTaints({}, (Taint("gpu", "yes", "NoSchedule"),))) == tolerated


@pytest.mark.parametrize(("effect", "away"), [("NoSchedule", True), ("NoExecute", True), ("PreferNoSchedule", False)])
def test_only_some_effects_keep_pods_away(effect, away):
    ground = NodeLabelsAndTaints.from_node(
        {"metadata": {"name": "n1"}, "spec": {"taints": [{"key": "gpu", "effect": effect}]}}
    )
    assert nodeconstraints.constraints_of({}).admits("n1", ground) is not away


def test_the_weights_of_preferred_terms_are_added():
    terms = [(10, {"matchExpressions": [ZONE_A]}), (3, match_expression("size", "Gt", "4")), (5, {})]
    preferred = [{"weight": weight, "preference": term} for weight, term in terms]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    preferences = NodePreferences.parse({"affinity": affinity})
    assert preferences.weight_of("n1", NodeLabelsAndTaints(ZONE)) == 13
    assert preferences.weight_of("n1", NodeLabelsAndTaints({"zone": "a", "size": "2"})) == 10
    assert preferences.weight_of("n1", NodeLabelsAndTaints()) == 0, "a term without conditions matches no node"
    assert NodePreferences.parse({}).weight_of("n1", NodeLabelsAndTaints(ZONE)) == 0
