"""What the extender refuses before it serves, and before it leads."""

import click
import pytest

from cardwise.core.api import claims
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from extender import __main__ as program
from extender.claims import protection
from tests.fakes.apiserver import ApiServer, Fault
from tests.property.claimsworld import protect_claims

NAME = "claims.cardwise.dev"
POLICY, BINDING = paths.validatingadmissionpolicies(NAME), paths.validatingadmissionpolicybindings(NAME)


@pytest.fixture
def client(api: ApiServer):
    protect_claims(api)
    return api.client()


def check(client, *, no_lease: bool = False) -> None:
    program._check_claim_policies(client, no_lease=no_lease)


def test_claims_are_served_with_all_policies(client) -> None:
    check(client)


@pytest.mark.parametrize("path", [POLICY, BINDING])
@pytest.mark.parametrize("is_forbidden", [True, False])
def test_claims_are_not_served_if_a_policy_or_its_binding_is_missing_or_may_not_be_read(
    api, client, path, is_forbidden
) -> None:
    if is_forbidden:
        api.fault(Fault(status=403), "get", path, 9)
    else:
        api.remove(path)
    text = "may not be read by the extender" if is_forbidden else "is missing"
    with pytest.raises(click.ClickException, match=rf"claims\.cardwise\.dev {text}.*policies\.enabled=true.*doctor"):
        check(client)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        (POLICY, {"failurePolicy": "Ignore"}),
        (POLICY, {"matchConstraints": {"namespaceSelector": {"matchLabels": {"a": "b"}}}}),
        (BINDING, {"policyName": NAME, "validationActions": ["Warn", "Audit"]}),
        (BINDING, {"policyName": "other", "validationActions": ["Deny"]}),
        (BINDING, {"policyName": NAME, "validationActions": ["Deny"], "matchResources": {"objectSelector": {"a": 1}}}),
    ],
    ids=["ignores failures", "narrowed", "only warns", "of another policy", "narrowed binding"],
)
def test_claims_are_not_served_if_a_policy_does_not_refuse(api, client, path, spec: Json) -> None:
    api.write_object(path.rsplit("/", 1)[0], {"metadata": {"name": NAME}, "spec": spec})
    with pytest.raises(click.ClickException, match=r"claims\.cardwise\.dev (has|does not)"):
        check(client)


def test_api_server_that_does_not_answer_is_asked_again_before_the_extender_leads(api, client) -> None:
    """The extender starts while the API server restarts, as in the other modes."""
    api.down = True
    check(client)
    with pytest.raises(click.ClickException, match="cannot be read"):
        check(client, no_lease=True)


def test_all_problems_are_named_at_once(api, client) -> None:
    for name in claims.POLICIES:
        api.remove(paths.validatingadmissionpolicies(name))
    problem = protection.find_problem(client)
    assert problem is not None
    assert all(name in problem for name in claims.POLICIES)
