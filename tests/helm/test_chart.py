"""The chart, rendered by the real Helm: its names are those of cardwise/core/names.py, and bad values are refused."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cardwise.core import names, policies

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "cardwise"
Objects = list[dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> str:
    found = shutil.which("helm")
    built = sorted((Path.home() / ".cache" / "cardwise").glob("helm-*/helm"))
    if found is None and not built:
        pytest.skip("there is no helm in PATH; `python -m tests.cluster up` builds one")
    return found or str(built[-1])


@pytest.fixture(scope="session")
def render(helm: str) -> Callable[..., Objects]:
    def rendered(*sets: str) -> Objects:
        done = _template(helm, *sets)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


def _template(helm: str, *sets: str) -> subprocess.CompletedProcess[str]:
    flags = [flag for each in sets for flag in ("--set", each)]
    command = [helm, "template", "cardwise", str(CHART), "--include-crds", "--kube-version", "1.34.0", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)} found"
    return found[0]


def text(obj: object) -> str:
    return yaml.safe_dump(obj, width=10**6)


KNOWN = {
    value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)
} | names.USER_ANNOTATIONS


def test_every_name_of_our_domain_is_in_names(render: Callable[..., Objects]) -> None:
    # Names of webhooks, policies and the CRD end in our domain; resources, annotations and labels begin with it.
    keys = set(re.findall(r"(?<![\w.-])(?:cardwise\.dev|aliyun\.com)/[\w.-]*|ALIYUN_COM_[A-Z_]+", text(render())))
    assert keys >= {names.GPU_MEM, names.DEFAULTS_LABEL, names.GPUSHARE_PREFIX, names.DEVICES_OF, names.SHARE}
    unknown = {key for key in keys if key not in KNOWN | {names.API_VERSION, f"{names.GROUP}/"}}
    assert not unknown


def test_what_users_ask_for_brings_a_pod_to_the_webhook(render: Callable[..., Objects]) -> None:
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        hooks = {hook["name"]: hook for hook in one(render(), kind, names.WEBHOOK_CONFIGURATION)["webhooks"]}
        condition = text(hooks["pods.cardwise.dev"]["matchConditions"])
        for resource in names.REQUESTED:
            assert resource in condition or resource.startswith(f"{names.GROUP}/")
        assert f"k.startsWith('{names.GROUP}/')" in condition.replace("''", "'")


def test_the_policy_on_annotations_is_the_rule_of_names(render: Callable[..., Objects]) -> None:
    rule = text(one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")).replace("''", "'")
    listed = re.search(r"k\.startsWith\('cardwise\.dev/'\) && !\(k in \[([^]]*)]\)", rule)
    assert listed
    assert set(re.findall(r"'([^']*)'", listed[1])) == names.USER_ANNOTATIONS
    for prefix in (names.GPUSHARE_PREFIX, names.GPUSHARE_ALLOCATION):
        assert f"k.startsWith('{prefix}')" in rule


def test_the_chart_knows_the_placement_policies(render: Callable[..., Objects]) -> None:
    policy = text(one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")).replace("''", "'")
    assert str(sorted(policies.POLICIES)) in policy
    assert f"write {' or '.join(sorted(policies.POLICIES))}" in policy


def test_hooks_are_as_the_rules_want_them(render: Callable[..., Objects]) -> None:
    ignored = {"bindings.cardwise.dev", "namespaces.cardwise.dev"}
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for hook in one(render(), kind, names.WEBHOOK_CONFIGURATION)["webhooks"]:
            assert hook["failurePolicy"] == ("Ignore" if hook["name"] in ignored else "Fail")
            assert hook["timeoutSeconds"] == (1 if hook["name"] == "bindings.cardwise.dev" else 5)
            assert hook["sideEffects"] == "None"
            assert hook["matchConditions"], "a webhook for every object would break rule 6"
            assert "objectSelector" not in hook, "labels are the user's"
            assert "caBundle" not in hook["clientConfig"], "the webhook writes it itself"


def test_the_webhook_may_run_outside_the_cluster(render: Callable[..., Objects]) -> None:
    objects = render("webhook.url=https://127.0.0.1:8443")
    hooks = one(objects, "MutatingWebhookConfiguration", names.WEBHOOK_CONFIGURATION)["webhooks"]
    assert {hook["clientConfig"]["url"] for hook in hooks} == {
        "https://127.0.0.1:8443/mutate",
        "https://127.0.0.1:8443/mutate/defaults",
    }


@pytest.mark.parametrize("part", ["webhook", "extender", "deviceplugin"])
def test_identities_stay_when_workloads_are_off(render: Callable[..., Objects], part: str) -> None:
    objects = render(*(f"{each}.enabled=false" for each in ("webhook", "extender", "deviceplugin")))
    account = one(objects, "ServiceAccount", f"cardwise-{part}")
    assert account["metadata"]["namespace"] == names.NAMESPACE
    assert one(objects, "ClusterRoleBinding", f"cardwise-{part}")["subjects"] == [
        {"kind": "ServiceAccount", "name": f"cardwise-{part}", "namespace": names.NAMESPACE}
    ]


def test_nobody_has_more_rights_than_it_needs(render: Callable[..., Objects]) -> None:
    for role in (each for each in render() if each["kind"] in {"ClusterRole", "Role"}):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            secrets = "secrets" in rule["resources"]
            assert not secrets or rule["verbs"] == ["create"] or rule.get("resourceNames"), "all secrets"
            if "mutatingwebhookconfigurations" in rule["resources"]:
                assert rule["resourceNames"] == [names.WEBHOOK_CONFIGURATION]
                assert rule["verbs"] == ["get", "list", "watch", "patch"]


def test_renamed_accounts_are_known_everywhere(render: Callable[..., Objects]) -> None:
    objects = render("extender.serviceAccount.name=other", "namespace.name=gpu")
    assert "system:serviceaccount:gpu:other" in text(one(objects, "ValidatingAdmissionPolicy", "bindings.cardwise.dev"))
    assert f"system:serviceaccount:{names.NAMESPACE}" not in text(objects)


def test_nobody_but_the_device_plugin_patches_annotations(render: Callable[..., Objects]) -> None:
    policy = text(one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev"))
    accounts = set(re.findall(rf"system:serviceaccount:{names.NAMESPACE}:([\w-]+)", policy))
    assert accounts == {"cardwise-deviceplugin"}
    assert f"k == '{names.ASSIGNED}'" in policy.replace("''", "'")
    other = text(
        one(render("policies.annotationWriters={me}"), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")
    )
    assert "in ['me']" in other.replace("''", "'")


def test_each_policy_is_bound_and_switched_together(render: Callable[..., Objects]) -> None:
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


def test_the_crd_is_what_the_contract_says(render: Callable[..., Objects]) -> None:
    crd = one(render(), "CustomResourceDefinition", f"extendedresources.{names.GROUP}")["spec"]
    assert (crd["group"], crd["scope"]) == (names.GROUP, "Cluster")
    (version,) = crd["versions"]
    assert version["name"] == names.VERSION
    assert "status" in version["subresources"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    assert set(schema["spec"]["properties"]) == {"node", "index", "uuid", "model", "memoryMiB", "properties"}
    assert set(schema["status"]["properties"]) == {"health", "reason", "cardAccess", "held"}
    held = schema["status"]["properties"]["held"]["items"]["properties"]
    assert set(held) == {"podUID", "namespace", "name", "memoryMiB", "corePercent"}
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns[:5] == ["Node", "Index", "Model", "Memory", "Health"]


@pytest.mark.parametrize(
    "value",
    [
        "webhook.url=http://127.0.0.1:1",
        "webhook.url=https://127.0.0.1:1/path",
        "webhook.timeoutSeconds=31",
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
    done = _template(helm, value)
    assert done.returncode != 0
    assert "values don't meet the specifications" in done.stderr


def test_the_defaults_pass_lint(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
