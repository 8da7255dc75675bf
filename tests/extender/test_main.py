"""What the extender refuses before it serves."""

import click
import pytest

from cardwise.core.api import claims
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from extender import __main__ as program
from tests.fakes.apiserver import ApiServer


def install(client: KubeClient, *, without: str = "", without_binding: str = "") -> None:
    for name in claims.POLICIES:
        if name != without:
            client.create(paths.validatingadmissionpolicies(), {"metadata": {"name": name}})
        if name not in (without, without_binding):
            client.create(paths.validatingadmissionpolicybindings(), {"metadata": {"name": name}})


def test_claims_are_not_served_without_the_policies_that_protect_them(client: KubeClient) -> None:
    install(client, without="claims.cardwise.dev")
    with pytest.raises(click.ClickException, match=r"ValidatingAdmissionPolicies claims\.cardwise\.dev, or their bind"):
        program._check_claim_policies(client)


def test_policy_without_a_binding_protects_nothing(client: KubeClient) -> None:
    install(client, without_binding="fencing.cardwise.dev")
    with pytest.raises(click.ClickException, match=r"fencing\.cardwise\.dev"):
        program._check_claim_policies(client)


def test_claims_are_served_with_all_policies(client: KubeClient) -> None:
    install(client)
    program._check_claim_policies(client)


def test_api_server_that_does_not_answer_is_no_missing_policy(api: ApiServer, client: KubeClient) -> None:
    """The extender starts while the API server restarts, as in the other modes."""
    api.down = True
    program._check_claim_policies(client)
