"""Which nodes a pod may be on."""

import pytest

from cardwise.kube.pods import eligible


def node(name="n1", taints=(), **labels):
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": list(taints)}}


def pod(**spec):
    return {"spec": spec}


def affinity(*conditions, fields=()):
    terms = [{"matchExpressions": list(conditions), "matchFields": list(fields)}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return pod(affinity={"nodeAffinity": required})


def condition(key, operator, *values):
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("one", "may"),
    [
        (pod(), True),
        (pod(nodeSelector={"zone": "a"}), True),
        (pod(nodeSelector={"zone": "b"}), False),
        (affinity(condition("zone", "In", "a", "b")), True),
        (affinity(condition("zone", "NotIn", "a")), False),
        (affinity(condition("rack", "NotIn", "a")), True),
        (affinity(condition("rack", "Exists")), False),
        (affinity(condition("rack", "DoesNotExist")), True),
        (affinity(condition("cards", "Gt", "3")), True),
        (affinity(condition("cards", "Lt", "4")), False),
        (affinity(condition("zone", "Gt", "3")), False),
        (affinity(condition("zone", "In", "a"), condition("cards", "In", "5")), False),
        (affinity(fields=[condition("metadata.name", "In", "n1")]), True),
        (affinity(fields=[condition("metadata.name", "In", "n2")]), False),
        (affinity(), False),
    ],
)
def test_by_labels(one, may):
    assert eligible.admits(node(zone="a", cards="4"), one) is may


@pytest.mark.parametrize(
    ("taint", "toleration", "may"),
    [
        ({"key": "gpu", "effect": "NoSchedule"}, None, False),
        ({"key": "gpu", "effect": "NoExecute"}, None, False),
        ({"key": "gpu", "effect": "PreferNoSchedule"}, None, True),
        ({"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "effect": "NoSchedule"}, {"operator": "Exists"}, True),
        ({"key": "gpu", "value": "a", "effect": "NoSchedule"}, {"key": "gpu", "value": "a"}, True),
        ({"key": "gpu", "value": "a", "effect": "NoSchedule"}, {"key": "gpu", "value": "b"}, False),
        ({"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_by_taints(taint, toleration, may):
    tolerations = [toleration] if toleration else []
    assert eligible.admits(node(taints=[taint]), pod(tolerations=tolerations)) is may


def test_the_names_of_all_that_do():
    there = [node("n1", zone="a"), node("n2", zone="b"), node("n3", zone="a")]
    assert eligible.nodes(pod(nodeSelector={"zone": "a"}), there) == {"n1", "n3"}


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (pod(), ""),
        (pod(volumes=[{"name": "x", "emptyDir": {}}]), ""),
        (pod(volumes=[{"name": "x", "persistentVolumeClaim": {}}]), "volumes"),
        (pod(containers=[{"ports": [{"hostPort": 80}]}]), "ports of the node"),
        (pod(initContainers=[{"ports": [{"hostPort": 80}]}]), "ports of the node"),
        (pod(hostNetwork=True), "ports of the node"),
        (pod(resourceClaims=[{"name": "nic", "resourceClaimTemplateName": "nic"}]), "claims of devices"),
        (pod(topologySpreadConstraints=[{"whenUnsatisfiable": "DoNotSchedule"}]), "spreading over nodes"),
        (pod(topologySpreadConstraints=[{"whenUnsatisfiable": "ScheduleAnyway"}]), ""),
        (
            pod(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}),
            "affinity to other pods",
        ),
        (pod(affinity={"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}), ""),
    ],
)
def test_what_else_decides(one, why):
    assert eligible.bound_otherwise(one) == why
