"""What each admission policy is asked about, what it does with a refusal, and which fields it leaves to which part.

That its CEL is right is tried on the real API server (`integration/test_rights`, `integration/test_tenant`).
"""

import re

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.helm.rendering import Render, one

PODS = {"CREATE core/pods", "UPDATE core/pods/ephemeralcontainers"}
BINDINGS = {"CREATE core/bindings", "CREATE core/pods/binding"}
UID = "7a3c1f0e-59d2-4c8e-9a77-0d1f8a2b6c31"
RESOURCES = ("cardwise.dev/extendedresources", "cardwise.dev/extendedresources/status")


def writes(*resources: str, operations: str = "CREATE UPDATE") -> set[str]:
    return {f"{operation} {resource}" for operation in operations.split() for resource in resources}


ASKED = {
    "annotations": {*writes("core/pods"), "UPDATE core/pods/status"},
    "bindings": BINDINGS,
    "deviceplugin": {
        *writes(*RESOURCES, operations="CREATE UPDATE DELETE"),
        *writes("core/nodes", "core/nodes/status", "core/pods", operations="UPDATE"),
    },
    "environment": PODS,
    "extender": {
        *writes("core/pods", "core/pods/status", "core/nodes", RESOURCES[1], operations="UPDATE"),
        *writes("cardwise.dev/resourceclasses", "cardwise.dev/podgroups", operations="CREATE UPDATE DELETE"),
        *writes("core/secrets", "core/configmaps", "coordination.k8s.io/leases", operations="CREATE"),
        "DELETE core/pods",
    },
    "gangs": writes("core/pods", "core/pods/status", operations="UPDATE"),
    "gpumemunit": writes("core/namespaces", "core/namespaces/status", "core/namespaces/finalize"),
    "hostpaths": PODS,
    "namespaces": {"CREATE core/namespaces"},
    "nodename": {"CREATE core/pods"},
    "podgroups": writes("cardwise.dev/podgroups", "cardwise.dev/podgroups/status"),
    "runtimeclasses": PODS,
    "status": {"UPDATE core/pods/status"},
    "terms": BINDINGS,
    "webhook": {
        *writes(
            "admissionregistration.k8s.io/mutatingwebhookconfigurations",
            "admissionregistration.k8s.io/validatingwebhookconfigurations",
            operations="UPDATE",
        ),
        "CREATE core/secrets",
    },
}


def asked(policy: Json) -> set[str]:
    """Operations and `group/resource` that the policy is for."""
    return {
        f"{operation} {group or 'core'}/{resource}"
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for operation in rule["operations"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_each_policy_is_asked_about_all_ways_to_write_what_it_is_about(render: Render) -> None:
    found = [each for each in render() if each["kind"] == "ValidatingAdmissionPolicy"]
    assert {each["metadata"]["name"]: asked(each) for each in found} == {
        f"{name}.{names.GROUP}": about for name, about in ASKED.items()
    }


def test_a_policy_refuses_also_where_it_fails_and_lets_go_on_only_where_there_is_no_lease(render: Render) -> None:
    for each in render():
        if each["kind"] == "ValidatingAdmissionPolicy":
            assert each["spec"]["failurePolicy"] == "Fail"
        if each["kind"] == "ValidatingAdmissionPolicyBinding":
            assert each["spec"]["validationActions"] == ["Deny"], each["metadata"]["name"]
            assert not each["spec"].keys() & {"matchResources"}, "everywhere"
    lease = one(render(), "ValidatingAdmissionPolicyBinding", f"terms.{names.GROUP}")["spec"]["paramRef"]
    assert lease == {"name": names.LEASE, "namespace": names.NAMESPACE, "parameterNotFoundAction": "Allow"}


@pytest.mark.parametrize("changes", [0, 9, 10, 123, 2**31 - 1])
def test_a_binding_is_judged_by_its_term_however_often_the_lease_has_changed_hands(
    render: Render, changes: int
) -> None:
    """In cluster tests the Lease may be too young to show it. The pattern is tried, by Python's `re` for RE2."""
    spec = one(render(), "ValidatingAdmissionPolicy", f"terms.{names.GROUP}")["spec"]
    (condition,) = [each["expression"] for each in spec["matchConditions"] if each["name"] == "in-a-term"]
    (pattern,) = re.findall(r"\.matches\('([^']*)'\)", condition)
    assert re.search(pattern, f"{names.NAMESPACE}/{names.LEASE}/{UID}/{changes}/extender-0")
    assert not re.search(pattern, f"{names.NAMESPACE}/other/{UID}/{changes}/extender-0"), "of another Lease"


ACCOUNT = f"system:serviceaccount:{names.NAMESPACE}:cardwise-"
MIRROR = (
    "!(has(object.metadata.annotations) && 'kubernetes.io/config.mirror' in object.metadata.annotations && "
    "request.userInfo.username.startsWith('system:node:'))"
)
BY_ACCOUNT = {
    "annotations": ["!(request.userInfo.username in [])", MIRROR],
    "bindings": [f"request.userInfo.username != '{ACCOUNT}extender'"],
    "deviceplugin": [f"request.userInfo.username in ['{ACCOUNT}deviceplugin', '{ACCOUNT}mps']"],
    "environment": [MIRROR],
    "extender": [f"request.userInfo.username == '{ACCOUNT}extender'"],
    "hostpaths": [MIRROR],
    "nodename": [MIRROR],
    "runtimeclasses": [MIRROR],
    "status": [
        f"!(request.userInfo.username in ['{ACCOUNT}extender', 'system:kube-scheduler'])",
        (
            "!request.userInfo.groups.exists(g, g in ['system:nodes', 'system:masters', "
            "'system:serviceaccounts:kube-system']) && !request.userInfo.username.startsWith('system:kube-')"
        ),
    ],
    "webhook": [f"request.userInfo.username == '{ACCOUNT}webhook'"],
}


def test_whom_a_policy_is_for_and_whom_it_passes_over_by_account(render: Render) -> None:
    found = {}
    for each in render():
        if each["kind"] == "ValidatingAdmissionPolicy":
            said = (" ".join(one["expression"].split()) for one in each["spec"].get("matchConditions", ()))
            found[each["metadata"]["name"]] = [one for one in said if "request.userInfo" in one]
    expected = {f"{name}.{names.GROUP}": said for name, said in BY_ACCOUNT.items()}
    assert {name: said for name, said in found.items() if said} == expected


@pytest.mark.parametrize(
    ("policy", "what", "may", "may_not"),
    [
        (
            "deviceplugin",
            "pods",
            [f"metadata.annotations[{names.ASSIGNED}]"],
            [f"metadata.annotations[{names.TERM}]", f"metadata.annotations[{names.ASSIGNMENT}]", "spec.nodeName"],
        ),
        (
            "deviceplugin",
            "nodes",
            [f"metadata.annotations[{names.NODE_CHANGED}]", f"metadata.labels[{names.ACCELERATOR}]"],
            ["metadata.annotations[x]", "metadata.labels[x]", "spec.unschedulable", "spec.taints"],
        ),
        (
            "deviceplugin",
            "nodes/status",
            [f"status.capacity[{names.GPU_MEM}]", f"status.allocatable[{names.SHARE}]"],
            ["status.capacity[cpu]", "status.allocatable[nvidia.com/gpu]", "status.conditions"],
        ),
        (
            "deviceplugin",
            "extendedresources",
            ["spec.memoryMiB", "spec.properties", "metadata.ownerReferences", "metadata.labels[x]"],
            ["spec.unschedulable", "spec.cordon", "metadata.annotations[x]", "metadata.finalizers"],
        ),
        (
            "deviceplugin",
            "extendedresources/status",
            ["status.health", "status.held", "status.mps"],
            ["status.allocated", "status.freeMiB", "status.classes", "status.terminating"],
        ),
        (
            "extender",
            "pods",
            ["spec.schedulingGates", f"metadata.labels[{names.LEADER}]"],
            [f"metadata.labels[{names.GANG}]", f"metadata.annotations[{names.ASSIGNMENT}]", "spec.containers"],
        ),
        (
            "extender",
            "pods/status",
            ["status.nominatedNodeName", f"metadata.annotations[{names.TERM}]"],
            ["status.phase", "status.containerStatuses", f"metadata.annotations[{names.ASSIGNMENT}]"],
        ),
        ("extender", "nodes", [f"metadata.annotations[{names.NODE_CHANGED}]"], ["metadata.labels[x]", "spec.taints"]),
        (
            "extender",
            "extendedresources/status",
            ["status.allocated", "status.freeMiB", "status.classes", "status.terminating"],
            ["status.held", "status.health", "status.mps"],
        ),
        ("webhook", "mutatingwebhookconfigurations", ["webhooks"], ["metadata.labels[x]"]),
        ("webhook", "validatingwebhookconfigurations", ["webhooks"], ["metadata.labels[x]"]),
    ],
)
def test_a_part_changes_the_fields_that_are_its_work_and_no_other(
    render: Render, policy: str, what: str, may: list[str], may_not: list[str]
) -> None:
    variables = one(render(), "ValidatingAdmissionPolicy", f"{policy}.{names.GROUP}")["spec"]["variables"]
    (strange,) = [each["expression"] for each in variables if each["name"] == "strange"]
    fields = dict(re.findall(r"'([a-z/]+)': r'(.*?)'", strange))[what]
    assert [field for field in may if not re.search(fields, field)] == []
    assert [field for field in may_not if re.search(fields, field)] == []
