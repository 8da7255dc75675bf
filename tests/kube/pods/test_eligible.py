"""The eligible nodes of a pod, and its other constraints."""

import pytest

from cardwise.kube.pods import eligible


def node(name="n1", taints=(), **labels):
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": list(taints)}}


def pod(**spec):
    return {"spec": spec}


def test_eligible_nodes_by_name():
    """Eligible nodes follow from `nodeconstraints`, whose tests show the rules."""
    taint = {"key": "gpu", "effect": "NoSchedule"}
    there = [node("n1", zone="a"), node("n2", zone="b"), node("n3", zone="a"), node("n4", [taint], zone="a")]
    assert eligible.eligible_nodes(pod(nodeSelector={"zone": "a"}), there) == {"n1", "n3"}
    assert [eligible.is_node_eligible(node, pod(nodeSelector={"zone": "a"})) for node in there] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (pod(), None),
        (pod(volumes=[{"name": "x", "emptyDir": {}}]), None),
        (pod(volumes=[{"name": "x", "persistentVolumeClaim": {}}]), "volumes"),
        (pod(containers=[{"ports": [{"hostPort": 80}]}]), "host ports"),
        (pod(initContainers=[{"ports": [{"hostPort": 80}]}]), "host ports"),
        (pod(hostNetwork=True), "host ports"),
        (pod(resourceClaims=[{"name": "nic", "resourceClaimTemplateName": "nic"}]), "resource claims"),
        (pod(topologySpreadConstraints=[{"whenUnsatisfiable": "DoNotSchedule"}]), "topology spread constraints"),
        (pod(topologySpreadConstraints=[{"whenUnsatisfiable": "ScheduleAnyway"}]), None),
        (
            pod(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}),
            "affinity to other pods",
        ),
        (pod(affinity={"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}), None),
    ],
)
def test_other_constraints_are_named(manifest, reason):
    assert eligible.other_constraint(manifest) == reason
