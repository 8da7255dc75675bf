"""Who may do what: RBAC as the parts and people need it, and no more."""

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.helm.rendering import OFF, Render, get_object

OURS = ("extendedresources", "resourceclasses", "gpuquotas")


def may(role: Json, group: str, resource: str) -> set[str]:
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
    account = get_object(objects, "ServiceAccount", f"cardwise-{part}")
    assert account["metadata"]["namespace"] == names.NAMESPACE
    assert get_object(objects, "ClusterRoleBinding", f"cardwise-{part}")["subjects"] == [
        {"kind": "ServiceAccount", "name": f"cardwise-{part}", "namespace": names.NAMESPACE}
    ]


def test_nobody_has_more_rights_than_it_needs(render: Render) -> None:
    for role in (manifest for manifest in render() if manifest["kind"] in {"ClusterRole", "Role"}):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            secrets = "secrets" in rule["resources"]
            assert not secrets or rule["verbs"] == ["create"] or rule.get("resourceNames"), "all secrets"
            if "mutatingwebhookconfigurations" in rule["resources"]:
                assert rule["resourceNames"] == [names.WEBHOOK_CONFIGURATION, names.LATE_CONFIGURATION]
                assert rule["verbs"] == ["get", "list", "watch", "patch"]


CARDS, CLASSES, GROUPS = "cardwise.dev/extendedresources", "cardwise.dev/resourceclasses", "cardwise.dev/podgroups"
EVENTS = {f"{verb} {group}/events" for verb in ("create", "patch") for group in ("core", "events.k8s.io")}
WRITES = {
    "webhook": {
        f"patch admissionregistration.k8s.io/{kind}webhookconfigurations" for kind in ("mutating", "validating")
    },
    "extender": {
        *EVENTS,
        *(f"{verb} {kind}" for verb in ("create", "patch", "delete") for kind in (CLASSES, GROUPS)),
        *(f"patch {kind}/status" for kind in (CARDS, CLASSES, GROUPS, "cardwise.dev/gpuquotas", "core/pods")),
        *("patch core/nodes", "patch core/pods", "delete core/pods", "create core/pods/binding"),
        "create core/pods/eviction",
    },
    "deviceplugin": {
        *EVENTS,
        *(f"{verb} {CARDS}" for verb in ("create", "patch", "delete")),
        *("patch core/nodes", "patch core/nodes/status", "patch core/pods", f"patch {CARDS}/status"),
    },
    "mps": {*EVENTS, f"patch {CARDS}/status"},
}


@pytest.mark.parametrize("part", WRITES)
def test_what_parts_may_write_in_all_namespaces(render: Render, part: str) -> None:
    """The table of docs/security.md; of it fields and objects are the policies' (`test_policies`)."""
    role = get_object(render(), "ClusterRole", f"cardwise-{part}")
    assert WRITES[part] == {
        f"{verb} {group or 'core'}/{resource}"
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if verb not in ("get", "list", "watch")
    }


@pytest.mark.parametrize("part", ["webhook", "extender"])
def test_a_part_may_create_read_and_update_its_secret(render: Render, part: str) -> None:
    """The verbs of `cardwise.runtime.tls.certstore`."""
    role = get_object(render(), "Role", f"cardwise-{part}-tls")
    verbs_by_names = {tuple(rule.get("resourceNames", ())): rule["verbs"] for rule in role["rules"]}
    assert verbs_by_names == {(f"cardwise-{part}-tls",): ["get", "update"], (): ["create"]}


def test_who_looks_after_machines_may_cordon_and_drain_cards_and_viewers_may_not(render: Render) -> None:
    objects = render()
    role = get_object(objects, "ClusterRole", "cardwise-drain")
    assert may(role, names.GROUP, "extendedresources") == {"get", "list", "watch", "patch"}
    assert may(role, "", "pods") == {"get", "list"}
    assert may(role, "", "pods/eviction") == {"create"}
    assert not [key for key in role["metadata"]["labels"] if key.startswith("rbac.authorization.k8s.io/aggregate")]
    for name in ("cardwise-view", "cardwise-edit"):
        assert may(get_object(objects, "ClusterRole", name), names.GROUP, "extendedresources") <= {
            "get",
            "list",
            "watch",
        }


def test_who_moves_pods_may_evict_and_change_nothing_else_and_viewers_may_not(render: Render) -> None:
    objects = render()
    role = get_object(objects, "ClusterRole", "cardwise-defrag")
    for resource in OURS:
        assert may(role, names.GROUP, resource) == {"get", "list", "watch"}
    assert (may(role, "", "nodes"), may(role, "", "pods")) == ({"get", "list"}, {"get", "list"})
    assert (may(role, "policy", "poddisruptionbudgets"), may(role, "batch", "jobs")) == ({"list"}, {"list"})
    assert may(role, "", "pods/eviction") == {"create"}
    assert may(role, "", "configmaps") == set()
    assert {name for rule in role["rules"] for name in rule.get("resourceNames", ())} == {names.WORKLOAD}
    assert not [key for key in role["metadata"]["labels"] if key.startswith("rbac.authorization.k8s.io/aggregate")]
    for name in ("cardwise-view", "cardwise-edit"):
        assert may(get_object(objects, "ClusterRole", name), "", "pods/eviction") == set()


def test_node_parts_are_kept_to_their_node(render: Render) -> None:
    policy = get_object(render("namespace.name=gpu"), "ValidatingAdmissionPolicy", "deviceplugin.cardwise.dev")
    (condition,) = policy["spec"]["matchConditions"]
    for part in ("deviceplugin", "mps"):
        assert f"'system:serviceaccount:gpu:cardwise-{part}'" in condition["expression"]


def test_people_view_but_do_not_raise_their_own_quota(render: Render) -> None:
    roles = [manifest for manifest in render() if manifest["kind"] == "ClusterRole"]
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
        bound = [manifest for manifest in render(*sets) if manifest["kind"] == "ClusterRoleBinding"]
        of_all = [binding for binding in bound if binding["subjects"][0]["name"] == "system:authenticated"]
        return {binding["roleRef"]["name"] for binding in of_all}

    assert everybody() == {"cardwise-types"}
    assert everybody("people.viewTypes=false", "people.viewGPUs=true") == {"cardwise-view"}
    (rule,) = get_object(render(), "ClusterRole", "cardwise-types")["rules"]
    assert (rule["resources"], rule["verbs"]) == (["resourceclasses"], ["get", "list", "watch"])
