"""Whether ValidatingAdmissionPolicies and their bindings refuse what the chart wants refused.

The expressions of the policies are not compared with those of the chart.
"""

from typing import Final

from cardwise.core.values.decoded import Json

_NARROWING_FIELDS: Final = ("namespaceSelector", "objectSelector", "excludeResourceRules")


def is_complete(policy: Json) -> bool:
    """Whether the policy fails closed, and leaves no objects out."""
    spec = policy.get("spec") or {}
    return spec.get("failurePolicy", "Fail") == "Fail" and not _is_narrowed(spec.get("matchConstraints") or {})


def enforced_policy(binding: Json) -> str | None:
    """The name of the policy that the binding enforces for all its objects; None if it does not."""
    spec = binding.get("spec") or {}
    match = spec.get("matchResources") or {}
    is_enforcing = "Deny" in (spec.get("validationActions") or ()) and not match.get("resourceRules")
    return spec.get("policyName") if is_enforcing and not _is_narrowed(match) else None


def _is_narrowed(match: Json) -> bool:
    """Whether selectors or rules leave objects out. The API server writes empty selectors."""
    return any(match.get(field) for field in _NARROWING_FIELDS)
