"""That the chart's policies exist and are enforced: the API server applies a policy only by a binding."""

import pytest

from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.cli.doctor.policies import ALWAYS_INSTALLED, check_policies
from cardwise.core.values.decoded import Json
from tests.cli.doctor import planted
from tests.cli.doctor.planted import policy, policy_binding

POLICY = "environment.cardwise.dev"
NARROW_SELECTOR = {"matchLabels": {"no": "namespace"}}
UNENFORCED = f"ValidatingAdmissionPolicy {POLICY} is not enforced: there is no"
RECREATE = f"kubectl delete validatingadmissionpolicybinding --ignore-not-found {POLICY}), and let the chart recreate"


def check(facts: Facts) -> list[Finding]:
    return list(check_policies(facts))


def drop_policy(objects: list[Json], name: str = POLICY) -> list[Json]:
    return [manifest for manifest in objects if manifest["metadata"]["name"] != name]


def test_all_policies_are_enforced():
    (finding,) = check(planted.installation())
    assert finding.level is Severity.OK
    assert finding.text.endswith(f"while the webhook is down: {len(ALWAYS_INSTALLED)}")


def test_no_binding_is_left():
    facts = planted.installation()
    facts.policy_bindings = []
    (finding,) = check(facts)
    assert finding.level is Severity.WARNING
    assert f"{len(ALWAYS_INSTALLED)} ValidatingAdmissionPolicies (annotations.cardwise.dev, " in finding.text
    assert "are not enforced" in finding.text
    assert all(name in finding.remedy for name in ALWAYS_INSTALLED)


@pytest.mark.parametrize(
    "bindings",
    [
        [],
        [policy_binding(POLICY, validationActions=["Audit", "Warn"])],
        [policy_binding(POLICY, matchResources={"namespaceSelector": NARROW_SELECTOR})],
        [policy_binding(POLICY, matchResources={"objectSelector": NARROW_SELECTOR})],
        [policy_binding(POLICY, matchResources={"resourceRules": [{"resources": ["services"]}]})],
        [policy_binding(POLICY, matchResources={"excludeResourceRules": [{"resources": ["pods"]}]})],
        [policy_binding(POLICY, policyName="another.cardwise.dev")],
    ],
)
def test_a_policy_without_a_binding_that_denies_everywhere(bindings):
    facts = planted.installation()
    facts.policy_bindings = [*drop_policy(facts.policy_bindings), *bindings]
    (finding,) = check(facts)
    assert finding.level is Severity.WARNING
    assert UNENFORCED in finding.text
    assert RECREATE in finding.remedy


@pytest.mark.parametrize(
    "binding",
    [
        policy_binding(POLICY, validationActions=["Deny", "Audit"]),
        policy_binding(POLICY, matchResources={"matchPolicy": "Equivalent", "namespaceSelector": {}}),
        policy_binding(POLICY) | {"metadata": {"name": "an-admins"}},
    ],
)
def test_a_binding_that_denies_everywhere(binding):
    facts = planted.installation()
    facts.policy_bindings = [*drop_policy(facts.policy_bindings), binding]
    assert [finding.level for finding in check(facts)] == [Severity.OK]


def test_a_binding_beside_one_that_was_narrowed_is_enough():
    facts = planted.installation()
    facts.policy_bindings = [*facts.policy_bindings, policy_binding(POLICY, validationActions=["Audit"])]
    assert [finding.level for finding in check(facts)] == [Severity.OK]


def test_a_missing_policy_is_named():
    facts = planted.installation()
    facts.policies, facts.policy_bindings = drop_policy(facts.policies), drop_policy(facts.policy_bindings)
    (finding,) = check(facts)
    assert (finding.level, finding.text) == (
        Severity.WARNING,
        f"ValidatingAdmissionPolicy {POLICY} is missing: users can do what the chart forbids",
    )


@pytest.mark.parametrize(
    "changed",
    [
        policy(POLICY, objectSelector=NARROW_SELECTOR),
        policy(POLICY, excludeResourceRules=[{"resources": ["pods"]}]),
        {"metadata": {"name": POLICY}, "spec": {"failurePolicy": "Ignore"}},
    ],
)
def test_a_changed_policy_is_named(changed):
    facts = planted.installation()
    facts.policies = [*drop_policy(facts.policies), changed]
    (finding,) = check(facts)
    assert finding.level is Severity.WARNING
    assert f"{POLICY} is changed" in finding.text
    assert f"kubectl delete validatingadmissionpolicy --ignore-not-found {POLICY})" in finding.remedy


@pytest.mark.parametrize(
    ("unread_kind", "texts"),
    [("policies", []), ("policy_bindings", [f"{POLICY} is missing"])],
)
def test_a_user_without_the_rights_is_told_nothing_that_is_not_known(unread_kind: str, texts: list[str]):
    facts = planted.installation()
    facts.policies, facts.policy_bindings = drop_policy(facts.policies), []
    facts.unread_kinds[unread_kind] = ""
    findings = check(facts)
    assert len(findings) == len(texts)
    assert all(text in finding.text for finding, text in zip(findings, texts, strict=True))
