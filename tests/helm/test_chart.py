"""The chart, rendered by the real Helm: its names are those of cardwise/core/names.py, and bad values are refused."""

import re
import subprocess

import pytest

from cardwise.core import names, policies
from tests.helm.rendering import CHART, Render, one, template, text

KNOWN = {
    value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)
} | names.USER_ANNOTATIONS


def test_every_name_of_our_domain_is_in_names(render: Render) -> None:
    # Names of webhooks, policies and the CRD end in our domain; resources, annotations and labels begin with it.
    keys = set(re.findall(r"(?<![\w.-])(?:cardwise\.dev|aliyun\.com)/[\w.-]*|ALIYUN_COM_[A-Z_]+", text(render())))
    assert keys >= {names.GPU_MEM, names.DEFAULTS_LABEL, names.GPUSHARE_PREFIX, names.DEVICES_OF, names.SHARE}
    unknown = {key for key in keys if key not in KNOWN | {names.API_VERSION, f"{names.GROUP}/"}}
    assert not unknown


def test_the_policy_on_annotations_is_the_rule_of_names(render: Render) -> None:
    rule = text(one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")).replace("''", "'")
    listed = re.search(r"k\.startsWith\('cardwise\.dev/'\) && !\(k in \[([^]]*)]\)", rule)
    assert listed
    assert set(re.findall(r"'([^']*)'", listed[1])) == names.USER_ANNOTATIONS
    for prefix in (names.GPUSHARE_PREFIX, names.GPUSHARE_ALLOCATION):
        assert f"k.startsWith('{prefix}')" in rule


def test_the_chart_knows_the_placement_policies(render: Render) -> None:
    policy = text(one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")).replace("''", "'")
    assert str(sorted(policies.POLICIES)) in policy
    assert f"write {' or '.join(sorted(policies.POLICIES))}" in policy


def test_renamed_accounts_are_known_everywhere(render: Render) -> None:
    objects = render("extender.serviceAccount.name=other", "namespace.name=gpu")
    assert "system:serviceaccount:gpu:other" in text(one(objects, "ValidatingAdmissionPolicy", "bindings.cardwise.dev"))
    assert f"system:serviceaccount:{names.NAMESPACE}" not in text(objects)


def test_nobody_but_the_device_plugin_patches_annotations(render: Render) -> None:
    policy = text(one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev"))
    accounts = set(re.findall(rf"system:serviceaccount:{names.NAMESPACE}:([\w-]+)", policy))
    assert accounts == {"cardwise-deviceplugin"}
    assert f"k == '{names.ASSIGNED}'" in policy.replace("''", "'")
    other = text(
        one(render("policies.annotationWriters={me}"), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")
    )
    assert "in ['me']" in other.replace("''", "'")


def test_each_policy_is_bound_and_switched_together(render: Render) -> None:
    objects = render()
    policies = {each["metadata"]["name"] for each in objects if each["kind"] == "ValidatingAdmissionPolicy"}
    bound = {each["spec"]["policyName"] for each in objects if each["kind"] == "ValidatingAdmissionPolicyBinding"}
    assert policies == bound
    assert len(policies) == 6
    without = render("deviceplugin.restrictToNode=false")
    assert "deviceplugin.cardwise.dev" not in {each["metadata"]["name"] for each in without}
    assert not [
        each for each in render("policies.enabled=false") if each["kind"].startswith("ValidatingAdmissionPolicy")
    ]


@pytest.mark.parametrize(
    "value",
    [
        "webhook.url=http://127.0.0.1:1",
        "webhook.url=https://127.0.0.1:1/path",
        "webhook.timeoutSeconds=31",
        "webhook.nvidiaGpu=share",
        "webhook.exemptNamespaces={O'Neill}",
        "webhok.url=https://x",
        "policies.hostPaths={dev/nvidia}",
        "policies.infrastructure.serviceAccounts={dcgm}",
        "policies.annotationWriters={a'b}",
        "extender.serviceAccount.name=Bad_Name",
        "namespace.create=maybe",
    ],
)
def test_wrong_values_are_refused(helm: str, value: str) -> None:
    done = template(helm, value)
    assert done.returncode != 0
    assert "values don't meet the specifications" in done.stderr


def test_the_defaults_pass_lint(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
