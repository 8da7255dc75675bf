"""Checks that the chart's admission policies are enforced.

A policy refuses pods only if it has a binding with the action Deny. If the policy or the binding was narrowed, the
policy refuses fewer pods. The expressions of the policies are not compared with those of the chart.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from cardwise.cli.doctor import repairs
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import admissionpolicies, names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.shellcommand import command

_SUFFIX: Final = f".{names.GROUP}"  # the end of the names of the chart's policies
# With policies.enabled the chart always has these; `runtimeclasses` depends on policies.runtimeClasses.
ALWAYS_INSTALLED: Final = tuple(
    f"{name}{_SUFFIX}"
    for name in (
        "annotations",
        "bindings",
        "claims",
        "claimstatus",
        "deviceplugin",
        "environment",
        "extendedresources",
        "extender",
        "fencing",
        "gangs",
        "gpumemunit",
        "hostpaths",
        "namespaces",
        "nodename",
        "podgroups",
        "status",
        "webhook",
    )
)
_MAX_LISTED: Final = 5


def list_own_policies(facts: Facts) -> list[Json]:
    """The installed policies of the chart."""
    return [policy for policy in facts.policies if policy["metadata"]["name"].endswith(_SUFFIX)]


def check_policies(facts: Facts) -> Iterator[Finding]:
    """Check that the admission policies exist and are enforced. They apply also while the webhook is down."""
    if "policies" in facts.unread_kinds:
        return
    own_policies = {policy["metadata"]["name"]: policy for policy in list_own_policies(facts)}
    if not own_policies:
        text = "no ValidatingAdmissionPolicy of Cardwise: users can write placement annotations themselves"
        yield Finding("policies", Severity.WARNING, text, "set policies.enabled of the chart to true")
        return
    findings = [
        *_report_missing(facts, sorted({*ALWAYS_INSTALLED} - own_policies.keys())),
        *_report_changed(
            facts, sorted(name for name, policy in own_policies.items() if not admissionpolicies.is_complete(policy))
        ),
        *_report_unenforced(facts, sorted(own_policies.keys() - _enforced_policies(facts))),
    ]
    yield from findings
    if not findings and "policy_bindings" not in facts.unread_kinds:
        text = f"ValidatingAdmissionPolicies apply also while the webhook is down: {len(own_policies)}"
        yield Finding("policies", Severity.OK, text)


def _report_missing(facts: Facts, policy_names: Sequence[str]) -> Iterator[Finding]:
    if policy_names:
        text = f"{_name_policies(policy_names)} missing: users can do what the chart forbids"
        yield Finding(
            "policies", Severity.WARNING, text, f"let the chart recreate them: {repairs.upgrade_command(facts)}"
        )


def _report_changed(facts: Facts, policy_names: Sequence[str]) -> Iterator[Finding]:
    if policy_names:
        text = (
            f"{_name_policies(policy_names)} changed: failurePolicy is not Fail, or matchConstraints leaves objects out"
        )
        delete = command("kubectl delete validatingadmissionpolicy --ignore-not-found {names}", names=policy_names)
        yield Finding("policies", Severity.WARNING, text, _recreate(facts, delete))


def _report_unenforced(facts: Facts, policy_names: Sequence[str]) -> Iterator[Finding]:
    if policy_names and "policy_bindings" not in facts.unread_kinds:
        text = (
            f"{_name_policies(policy_names)} not enforced: there is no ValidatingAdmissionPolicyBinding with "
            "validationActions [Deny] and without matchResources"
        )
        delete = command(
            "kubectl delete validatingadmissionpolicybinding --ignore-not-found {names}", names=policy_names
        )
        yield Finding("policies", Severity.WARNING, text, _recreate(facts, delete))


def _name_policies(policy_names: Sequence[str]) -> str:
    """Name policies, with the verb of the sentence."""
    listed_names = wording.enumerate_first(policy_names, _MAX_LISTED)
    if len(policy_names) == 1:
        return f"ValidatingAdmissionPolicy {listed_names} is"
    return f"{len(policy_names)} ValidatingAdmissionPolicies ({listed_names}) are"


def _recreate(facts: Facts, delete: str) -> str:
    """The remedy for changed objects: Helm keeps fields that were added to an existing object."""
    return f"delete what is left of them ({delete}), and let the chart recreate them: {repairs.upgrade_command(facts)}"


def _enforced_policies(facts: Facts) -> set[str | None]:
    return set(map(admissionpolicies.enforced_policy, facts.policy_bindings))
