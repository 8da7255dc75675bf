"""What each admission policy is asked about, and what it does with a refusal.

That its CEL is right is tried on the real API server (`test_rights` and `test_tenant` of `integration/security`).
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Severity
from cardwise.cli.doctor.policies import ALWAYS_INSTALLED, check_policies
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.helm.rendering import CLAIMS, Render, get_object

REFERENCE = Path(__file__).parents[2] / "docs/reference/admission.md"
PODS = {"CREATE core/pods", "UPDATE core/pods/ephemeralcontainers"}
BINDINGS = {"CREATE core/bindings", "CREATE core/pods/binding"}
RESOURCES = ("cardwise.dev/extendedresources", "cardwise.dev/extendedresources/status")


def writes(*resources: str, operations: str = "CREATE UPDATE") -> set[str]:
    return {f"{operation} {resource}" for operation in operations.split() for resource in resources}


ASKED = {
    "annotations": {*writes("core/pods"), "UPDATE core/pods/status"},
    "bindings": BINDINGS,
    "claims": {
        *writes("resource.k8s.io/resourceclaims", operations="CREATE UPDATE DELETE"),
        *writes("resource.k8s.io/resourceclaimtemplates"),
    },
    "claimstatus": {"UPDATE resource.k8s.io/resourceclaims/status"},
    "deviceplugin": {
        *writes(*RESOURCES, operations="CREATE UPDATE DELETE"),
        *writes("core/nodes", "core/nodes/status", "core/pods", operations="UPDATE"),
    },
    "environment": PODS,
    "extender": {
        *writes("core/pods", "core/pods/status", "core/nodes", RESOURCES[1], operations="UPDATE"),
        *writes("cardwise.dev/resourceclasses", "cardwise.dev/podgroups", operations="CREATE UPDATE DELETE"),
        *writes("core/secrets", "core/configmaps", "coordination.k8s.io/leases", operations="CREATE"),
        *writes("resource.k8s.io/resourceclaims", operations="CREATE UPDATE DELETE"),
        "UPDATE resource.k8s.io/resourceclaims/status",
        "DELETE core/pods",
    },
    "extendedresources": writes(*RESOURCES),
    "gangs": writes("core/pods", "core/pods/status", operations="UPDATE"),
    "gpumemunit": writes("core/namespaces", "core/namespaces/status", "core/namespaces/finalize"),
    "hostpaths": PODS,
    "namespaces": {"CREATE core/namespaces"},
    "nodename": {"CREATE core/pods"},
    "podgroups": writes("cardwise.dev/podgroups", "cardwise.dev/podgroups/status"),
    "runtimeclasses": PODS,
    "status": {"UPDATE core/pods/status"},
    "fencing": BINDINGS,
    "webhook": {
        *writes(
            "admissionregistration.k8s.io/mutatingwebhookconfigurations",
            "admissionregistration.k8s.io/validatingwebhookconfigurations",
            operations="UPDATE",
        ),
        "CREATE core/secrets",
    },
}


def rules_of(policy: Json) -> set[str]:
    """Operations and `group/resource` that the policy is for."""
    return {
        f"{operation} {group or 'core'}/{resource}"
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for operation in rule["operations"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_each_policy_is_asked_about_all_ways_to_write_what_it_is_about(render: Render) -> None:
    policies = [manifest for manifest in render() if manifest["kind"] == "ValidatingAdmissionPolicy"]
    assert {policy["metadata"]["name"]: rules_of(policy) for policy in policies} == {
        f"{name}.{names.GROUP}": about for name, about in ASKED.items()
    }
    claims_policies = {
        "allocation": writes("core/pods"),
        "fencing": {
            *BINDINGS,
            *writes("resource.k8s.io/resourceclaims"),
            *writes("core/pods", "resource.k8s.io/resourceclaims/status", operations="UPDATE"),
        },
    }
    with_claims = [manifest for manifest in render(*CLAIMS) if manifest["kind"] == "ValidatingAdmissionPolicy"]
    assert {policy["metadata"]["name"]: rules_of(policy) for policy in with_claims} == {
        f"{name}.{names.GROUP}": about for name, about in (ASKED | claims_policies).items()
    }


def test_variables_that_set_limits_are_refused_in_all_kinds_of_containers(render: Render) -> None:
    policy = get_object(render(), "ValidatingAdmissionPolicy", f"environment.{names.GROUP}")["spec"]
    variables = {variable["name"]: variable["expression"] for variable in policy["variables"]}
    # Else a pod of many containers, or of large ones, could never have an ephemeral one.
    assert variables["containerLists"].startswith("(oldObject != null ? [] : [dyn(object.spec.containers), ")
    for prefix in names.ENV_LIMIT_PREFIXES:
        for kind in ("containers", "initContainers", "ephemeralContainers"):
            judged = variables["offenders"].partition(f"variables.{kind}.filter")[2].partition(f"spec.{kind}[")[0]
            assert f"e.name.startsWith('{prefix}')" in judged, kind
            for reached in (variables["hasOwnVariable"], variables[kind]):
                assert f"text.contains('{prefix[:10]}')" in reached, "or the loop is not reached"
        for validation in policy["validations"]:
            assert f"{prefix}*" in validation.get("messageExpression", validation["message"])


# A loop whose steps may leave out a part (&&, ||, ?:) costs the API server the square of their number.
LOOP = re.compile(r"([\w.?\[\]]+?)(\.orValue\([^()]*\))?\.(?:filter|exists|exists_one|all)\(")
# What a tenant may write thousands of, with almost no bytes.
UNBOUNDED = re.compile(
    r"(^variables[.](after|before)|^m[.]of|volumes|^variables[.]mounts|^mounts|bject[.]spec[.]schedulingGates|limits|annotations|"
    r"(?<!devices[.])(?<!devices[.][?])requests|"  # Kubernetes limits those of a claim to 32
    r"labels|^all)$"
)


def looped_over(policy: Json) -> set[str]:
    """The collections of users that an expression of the policy loops over with steps that may leave out a part."""
    conditions = policy["spec"].get("matchConditions", [])
    expressions = [variable["expression"] for variable in (*conditions, *policy["spec"].get("variables", []))]
    expressions += [validation["expression"] for validation in policy["spec"]["validations"]]
    collections = {match.group(1) for text in expressions for match in LOOP.finditer(text)}
    return {collection for collection in collections if UNBOUNDED.search(collection)}


def test_no_policy_pays_the_square_of_the_number_of_keys(render: Render) -> None:
    rendered = [*render(), *render(*CLAIMS)]
    policies = [manifest for manifest in rendered if manifest["kind"] == "ValidatingAdmissionPolicy"]
    loops = {policy["metadata"]["name"]: looped_over(policy) for policy in policies}
    assert {name: collections for name, collections in loops.items() if collections} == {}


@pytest.mark.parametrize("settings", [(), CLAIMS], ids=["an extender in kube-scheduler", "claims"])
def test_thousands_of_gates_are_counted_and_not_read(render: Render, settings: Sequence[str]) -> None:
    """The API server evaluates these expressions at each write of any pod, some of them eight times."""
    conditions = [
        condition["expression"]
        for manifest in render(*settings)
        if manifest["kind"] in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
        for webhook in manifest["webhooks"]
        for condition in webhook["matchConditions"]
    ]
    for manifest in render(*settings):
        if manifest["kind"] == "ValidatingAdmissionPolicy":
            spec = manifest["spec"]
            conditions += [entry["expression"] for entry in (*spec.get("matchConditions", []), *spec["validations"])]
            conditions += [variable["expression"] for variable in spec.get("variables", [])]
    readers = [text for text in conditions if ".schedulingGates.map(" in text]
    assert len(readers) > 8
    for text in readers:
        for before in text.split(".schedulingGates.map(")[:-1]:
            gate = "'cardwise[.]dev/(gang|allocation)'"
            assert re.search(rf"[.]schedulingGates[.]size[(][)] <= 1024 && {gate} in [\w()]+[.]spec$", before)


def test_the_reference_names_each_size_that_a_policy_limits_in_a_pod(render: Render) -> None:
    section = REFERENCE.read_text().partition("### Large pods without GPUs")[2].partition("###")[0]
    for name in ("environment", "hostpaths", "runtimeclasses"):
        policy = get_object(render(), "ValidatingAdmissionPolicy", f"{name}.{names.GROUP}")["spec"]
        messages = " ".join(validation["message"] for validation in policy["validations"])
        limits = set(re.findall(r"at most (\d+(?: KiB)?)", messages))
        assert limits, name
        documented = next((line for line in section.splitlines() if f"`{name}.cardwise.dev`" in line), "")
        for limit in limits:
            number, _, unit = limit.partition(" ")
            assert f"{int(number):,} {unit}".strip() in documented, (name, limit)


def test_annotations_that_an_update_leaves_alone_are_not_read(render: Render) -> None:
    policy = get_object(render(), "ValidatingAdmissionPolicy", f"annotations.{names.GROUP}")["spec"]
    condition = next(condition for condition in policy["matchConditions"] if condition["name"] == "has-ours-or-waits")[
        "expression"
    ]
    before, _, after = condition.partition("object.metadata.?annotations != oldObject.metadata.?annotations) &&")
    assert "annotations" not in before
    assert "o.metadata.annotations" in after


def test_the_folders_of_the_nodes_are_closed_wherever_they_are(render: Render) -> None:
    moved = ("nodes.stateDir=/data/state", "nodes.mpsRoot=/run/gpu/mps", "nodes.cdiDir=/var/run/gpu/cdi")
    policy = get_object(render(*moved), "ValidatingAdmissionPolicy", f"hostpaths.{names.GROUP}")
    variables = {variable["name"]: variable["expression"] for variable in policy["spec"]["variables"]}
    # /var/run is a link to /run on the nodes, and a pod may name either.
    closed = ("/data/state", "/run/gpu/mps", "/var/run/gpu/mps", "/run/gpu/cdi", "/var/run/gpu/cdi", "/dev/nvidia")
    assert [path for path in closed if variables["offenders"].count(f"'{path}'") != 1] == []
    parents = ("/", "/data", "/run", "/run/gpu", "/var", "/var/run", "/var/run/gpu", "/dev")
    assert [path for path in parents if variables["parentFolders"].count(f"'{path}'") != 1] == []


def test_a_policy_refuses_also_where_it_fails_and_lets_go_on_only_where_there_is_no_lease(render: Render) -> None:
    for manifest in render():
        if manifest["kind"] == "ValidatingAdmissionPolicy":
            assert manifest["spec"]["failurePolicy"] == "Fail"
        if manifest["kind"] == "ValidatingAdmissionPolicyBinding":
            assert manifest["spec"]["validationActions"] == ["Deny"], manifest["metadata"]["name"]
            assert not manifest["spec"].keys() & {"matchResources"}, "everywhere"
    lease = get_object(render(), "ValidatingAdmissionPolicyBinding", f"fencing.{names.GROUP}")["spec"]["paramRef"]
    assert lease == {"name": names.LEASE, "namespace": names.NAMESPACE, "parameterNotFoundAction": "Allow"}


def test_the_parts_may_write_each_field_of_a_card_that_there_is_and_no_other(render: Render) -> None:
    """A field that has another name in the schema stopped all writes of a node: its GPUs stayed unhealthy."""
    manifests = render()
    crd = get_object(manifests, "CustomResourceDefinition", f"extendedresources.{names.GROUP}")
    (version,) = crd["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]
    may = {name: written_fields(manifests, name, "status") for name in ("deviceplugin", "extender")}
    assert sorted([*may["deviceplugin"], *may["extender"]]) == sorted(fields["status"]["properties"])
    assert written_fields(manifests, "deviceplugin", "spec") < set(fields["spec"]["properties"])


def written_fields(manifests: list[Json], policy: str, part: str) -> set[str]:
    """The fields of the part of an ExtendedResource that the policy lets its parts write."""
    variables = get_object(manifests, "ValidatingAdmissionPolicy", f"{policy}.{names.GROUP}")["spec"]["variables"]
    (forbidden_changes,) = (variable["expression"] for variable in variables if variable["name"] == "forbiddenChanges")
    resource = "extendedresources/status" if part == "status" else "extendedresources"
    pattern = forbidden_changes.partition(f"'{resource}': r'^(")[2]
    return set(pattern.partition(part + r"\.(")[2].partition(")")[0].split("|"))


def test_doctor_expects_the_policies_that_the_chart_always_has(render: Render) -> None:
    def policy_names(*settings: str) -> list[str]:
        manifests = render(*settings)
        return sorted(
            manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ValidatingAdmissionPolicy"
        )

    assert policy_names("policies.runtimeClasses=null") == sorted(ALWAYS_INSTALLED)
    assert policy_names() == sorted([*ALWAYS_INSTALLED, "runtimeclasses.cardwise.dev"])
    with_claims = [*ALWAYS_INSTALLED, "allocation.cardwise.dev", "runtimeclasses.cardwise.dev"]
    assert policy_names(*CLAIMS) == sorted(with_claims)


def test_each_policy_is_enforced_as_doctor_checks_it(render: Render) -> None:
    manifests = render()
    facts = Facts(
        policies=[manifest for manifest in manifests if manifest["kind"] == "ValidatingAdmissionPolicy"],
        policy_bindings=[manifest for manifest in manifests if manifest["kind"] == "ValidatingAdmissionPolicyBinding"],
    )
    assert [finding.level for finding in check_policies(facts)] == [Severity.OK]
