"""Who may do what: RBAC as the parts and people need it, and no more."""

import pytest

from cardwise.core import names
from tests.helm.rendering import Object, Render, one

OURS = ("extendedresources", "resourceclasses", "gpuquotas")


def may(role: Object, group: str, resource: str) -> set[str]:
    """The verbs that a role gives, on all objects of the resource."""
    return {
        verb
        for rule in role["rules"]
        if group in rule["apiGroups"] and resource in rule["resources"] and not rule.get("resourceNames")
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("part", ["webhook", "extender", "deviceplugin"])
def test_identities_stay_when_workloads_are_off(render: Render, part: str) -> None:
    objects = render(*(f"{each}.enabled=false" for each in ("webhook", "extender", "deviceplugin")))
    account = one(objects, "ServiceAccount", f"cardwise-{part}")
    assert account["metadata"]["namespace"] == names.NAMESPACE
    assert one(objects, "ClusterRoleBinding", f"cardwise-{part}")["subjects"] == [
        {"kind": "ServiceAccount", "name": f"cardwise-{part}", "namespace": names.NAMESPACE}
    ]


def test_nobody_has_more_rights_than_it_needs(render: Render) -> None:
    for role in (each for each in render() if each["kind"] in {"ClusterRole", "Role"}):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            secrets = "secrets" in rule["resources"]
            assert not secrets or rule["verbs"] == ["create"] or rule.get("resourceNames"), "all secrets"
            if "mutatingwebhookconfigurations" in rule["resources"]:
                assert rule["resourceNames"] == [names.WEBHOOK_CONFIGURATION]
                assert rule["verbs"] == ["get", "list", "watch", "patch"]


def test_the_webhook_only_reads_our_objects(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-webhook")
    for resource in OURS:
        assert may(role, names.GROUP, resource) == {"get", "list", "watch"}
        assert may(role, names.GROUP, f"{resource}/status") == set()


def test_the_extender_writes_what_it_counts_and_the_automatic_classes(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-extender")
    for resource in OURS:
        assert may(role, names.GROUP, resource) >= {"get", "list", "watch"}
        assert may(role, names.GROUP, f"{resource}/status") == {"patch"}
    assert may(role, names.GROUP, "resourceclasses") == {"get", "list", "watch", "create", "delete"}
    assert may(role, names.GROUP, "gpuquotas") == {"get", "list", "watch"}, "quotas are the administrator's"


def test_the_device_plugin_reads_classes_and_labels_its_node(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-deviceplugin")
    assert may(role, names.GROUP, "resourceclasses") == {"get", "list", "watch"}
    assert may(role, names.GROUP, "gpuquotas") == set()
    assert "patch" in may(role, "", "nodes")


def test_the_extender_writes_one_lease_only(render: Render) -> None:
    objects = render("namespace.name=gpu")
    role = one(objects, "Role", "cardwise-extender-lease")
    assert role["metadata"]["namespace"] == "gpu"
    create, rest = role["rules"]
    assert (create["verbs"], create["resources"], create["apiGroups"]) == (
        ["create"],
        ["leases"],
        ["coordination.k8s.io"],
    )
    assert (rest["verbs"], rest["resourceNames"]) == (["get", "update"], [names.LEASE])
    bound = one(objects, "RoleBinding", "cardwise-extender-lease")
    assert (bound["metadata"]["namespace"], bound["roleRef"]["name"]) == ("gpu", "cardwise-extender-lease")
    assert bound["subjects"] == [{"kind": "ServiceAccount", "name": "cardwise-extender", "namespace": "gpu"}]


def test_people_view_but_do_not_raise_their_own_quota(render: Render) -> None:
    roles = [each for each in render() if each["kind"] == "ClusterRole"]
    aggregated = {
        label.removeprefix("rbac.authorization.k8s.io/"): role
        for role in roles
        for label in role["metadata"]["labels"]
        if label.startswith("rbac.authorization.k8s.io/aggregate-to-")
    }
    assert set(aggregated) == {"aggregate-to-view"}
    role = aggregated["aggregate-to-view"]
    assert role["metadata"]["name"] == "cardwise-view"
    (rule,) = role["rules"]
    assert set(rule["resources"]) == set(OURS)
    assert rule["verbs"] == ["get", "list", "watch"]
