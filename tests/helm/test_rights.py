"""Who may do what: RBAC as the parts and people need it, and no more."""

import pytest

from cardwise.core.api import names
from cardwise.core.gangs.gangs import Foreign
from tests.helm.rendering import ALL, OFF, OTHER, Object, Render, one

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
    objects = render(*OFF)
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
        assert may(role, names.GROUP, resource) == {"list", "watch"}
        assert may(role, names.GROUP, f"{resource}/status") == set()


def test_the_webhook_reads_what_a_namespace_asks_of_containers(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-webhook")
    assert may(role, "", "limitranges") == {"list", "watch"}
    assert may(role, "", "resourcequotas") == set()


def test_the_extender_writes_what_it_counts_and_the_automatic_classes(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-extender")
    for resource in OURS:
        assert may(role, names.GROUP, resource) >= {"list", "watch"}
        assert may(role, names.GROUP, f"{resource}/status") == {"patch"}
    assert may(role, names.GROUP, "resourceclasses") == {"list", "watch", "create", "patch", "delete"}
    assert may(role, names.GROUP, "gpuquotas") == {"list", "watch"}, "quotas are the administrator's"
    assert may(role, "policy", "poddisruptionbudgets") == {"list", "watch"}


def test_the_extender_takes_gates_away_and_undoes_half_a_gang(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-extender")
    assert may(role, "", "pods") == {"get", "list", "watch", "patch", "delete"}
    assert may(role, "", "pods/eviction") == {"create"}
    assert may(role, names.GROUP, "podgroups") == {"list", "watch", "create", "patch", "delete"}
    assert may(role, names.GROUP, "podgroups/status") == {"patch"}
    for theirs in Foreign:
        assert may(role, theirs, "podgroups") == {"get"}
        assert may(role, theirs, "podgroups/status") == set(), "conditions of others' kinds are theirs"


def test_the_device_plugin_reads_classes_and_labels_its_node(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-deviceplugin")
    assert may(role, names.GROUP, "resourceclasses") == {"list", "watch"}
    assert may(role, names.GROUP, "gpuquotas") == set()
    assert "patch" in may(role, "", "nodes")


def test_the_mps_manager_publishes_and_tells_and_evicts_only_where_it_is_to(render: Render) -> None:
    role = one(render(*ALL), "ClusterRole", "cardwise-mps")
    for resource, group in (("pods", ""), ("extendedresources", names.GROUP)):
        assert may(role, group, resource) == {"list", "watch"}
    assert may(role, names.GROUP, "extendedresources/status") == {"patch"}
    assert may(role, "", "events") == {"create", "patch"}
    assert may(role, "", "pods/eviction") == set()
    role = one(render(*OTHER), "ClusterRole", "cardwise-mps")
    assert may(role, "", "pods/eviction") == {"create"}
    assert not [each for each in render() if each["metadata"]["name"] == "cardwise-mps"]


def test_who_looks_after_machines_may_cordon_and_drain_cards_and_viewers_may_not(render: Render) -> None:
    objects = render()
    role = one(objects, "ClusterRole", "cardwise-drain")
    assert may(role, names.GROUP, "extendedresources") == {"get", "list", "watch", "patch"}
    assert may(role, "", "pods") == {"get", "list"}
    assert may(role, "", "pods/eviction") == {"create"}
    assert not [key for key in role["metadata"]["labels"] if key.startswith("rbac.authorization.k8s.io/aggregate")]
    for name in ("cardwise-view", "cardwise-edit"):
        assert may(one(objects, "ClusterRole", name), names.GROUP, "extendedresources") <= {"get", "list", "watch"}


def test_who_moves_pods_may_evict_and_change_nothing_else_and_viewers_may_not(render: Render) -> None:
    objects = render()
    role = one(objects, "ClusterRole", "cardwise-defrag")
    for resource in OURS:
        assert may(role, names.GROUP, resource) == {"get", "list", "watch"}
    assert (may(role, "", "nodes"), may(role, "", "pods")) == ({"get", "list"}, {"get", "list"})
    assert (may(role, "policy", "poddisruptionbudgets"), may(role, "batch", "jobs")) == ({"list"}, {"list"})
    assert may(role, "", "pods/eviction") == {"create"}
    assert may(role, "", "configmaps") == set()
    assert {name for rule in role["rules"] for name in rule.get("resourceNames", ())} == {names.WORKLOAD}
    assert not [key for key in role["metadata"]["labels"] if key.startswith("rbac.authorization.k8s.io/aggregate")]
    for name in ("cardwise-view", "cardwise-edit"):
        assert may(one(objects, "ClusterRole", name), "", "pods/eviction") == set()


def test_who_runs_the_cluster_sees_what_commands_that_look_show(render: Render) -> None:
    role = one(render(), "ClusterRole", "cardwise-inspect")
    for resource in ("nodes", "pods", "resourcequotas"):
        assert may(role, "", resource) == {"get", "list"}


def test_node_parts_are_kept_to_their_node(render: Render) -> None:
    policy = one(render("namespace.name=gpu"), "ValidatingAdmissionPolicy", "deviceplugin.cardwise.dev")
    (condition,) = policy["spec"]["matchConditions"]
    for part in ("deviceplugin", "mps"):
        assert f"'system:serviceaccount:gpu:cardwise-{part}'" in condition["expression"]


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


def test_the_extender_keeps_one_config_map(render: Render) -> None:
    create, rest = one(render(), "Role", "cardwise-extender-workload")["rules"]
    assert (create["resources"], create["verbs"]) == (["configmaps"], ["create"])
    assert (rest["resourceNames"], rest["verbs"]) == ([names.WORKLOAD], ["get", "patch"])


def test_people_view_but_do_not_raise_their_own_quota(render: Render) -> None:
    roles = [each for each in render() if each["kind"] == "ClusterRole"]
    aggregated = {
        label.removeprefix("rbac.authorization.k8s.io/"): role
        for role in roles
        for label in role["metadata"]["labels"]
        if label.startswith("rbac.authorization.k8s.io/aggregate-to-")
    }
    assert set(aggregated) == {"aggregate-to-view", "aggregate-to-edit"}
    role = aggregated["aggregate-to-view"]
    assert role["metadata"]["name"] == "cardwise-view"
    (rule,) = role["rules"]
    assert set(rule["resources"]) == {*OURS, "podgroups"}
    assert rule["verbs"] == ["get", "list", "watch"]
    role = aggregated["aggregate-to-edit"]
    assert role["metadata"]["name"] == "cardwise-edit"
    (rule,) = role["rules"]
    assert rule["resources"] == ["podgroups"], "their status is the extender's, everything else the administrator's"


def test_everybody_sees_types_and_only_if_told_so_cards(render: Render) -> None:
    def everybody(*sets: str) -> set[str]:
        bound = [each for each in render(*sets) if each["kind"] == "ClusterRoleBinding"]
        of_all = [each for each in bound if each["subjects"][0]["name"] == "system:authenticated"]
        return {each["roleRef"]["name"] for each in of_all}

    assert everybody() == {"cardwise-types"}
    assert everybody("people.viewTypes=false", "people.viewCards=true") == {"cardwise-view"}
    (rule,) = one(render(), "ClusterRole", "cardwise-types")["rules"]
    assert (rule["resources"], rule["verbs"]) == (["resourceclasses"], ["get", "list", "watch"])
