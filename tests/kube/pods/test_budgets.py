"""The disruption budgets that cover a pod, and the limits of their cost."""

import json
import pickle

import pytest

from cardwise.kube.pods import budgets
from cardwise.kube.pods.budgets import Budgets
from tests import build


def budget(name, selector, allowed=1, namespace="team"):
    manifest = build.budget(name, allowed=allowed, selector=selector, namespace=namespace)
    return budgets.decode_budget(json.dumps(manifest).encode())


def expression(key, operator, *operands):
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(operands)}]}


def known(*named_budgets):
    all_budgets = Budgets()
    for key, named_budget in named_budgets:
        all_budgets.set_budget(key, named_budget)
    return all_budgets


def test_pod_is_covered_by_budgets_whose_conditions_all_match():
    known_budgets = known(
        budget("all", {}),
        budget("none", None),
        budget("app", {"matchLabels": {"app": "a"}}),
        budget("both", {"matchLabels": {"app": "a"}} | expression("tier", "Exists")),
        budget("not", expression("app", "NotIn", "b")),
        budget("other", {}, namespace="other"),
    )
    assert known_budgets.covering_keys("team", {"app": "a"}) == ("team/all", "team/app", "team/not")
    assert known_budgets.allowed_disruptions(["team/all", "team/app"]) == {"team/all": 1, "team/app": 1}
    known_budgets.remove_budget("team/all")
    known_budgets.set_budget(*budget("app", {"matchLabels": {"app": "a"}}, 3))
    assert known_budgets.covering_keys("team", {"app": "a"}) == ("team/app", "team/not")
    assert known_budgets.allowed_disruptions(["team/app"]) == {"team/app": 3}
    assert known_budgets.covering_keys("nowhere", {}) == ()


class Labels(dict):
    """Labels that count their reads."""

    reads = 0

    def __contains__(self, key):
        self.reads += 1
        return super().__contains__(key)


def test_every_pod_is_protected_in_a_namespace_with_too_many_conditions():
    """The budgets of each pod on a node are found under the extender's lock, and a tenant may create millions of
    conditions.
    """
    keys = {"matchExpressions": [{"key": f"k{i}", "operator": "DoesNotExist"} for i in range(600)]}
    known_budgets = known(
        *(budget(f"b{i}", keys) for i in range(5)), budget("own", expression("a", "Exists"), namespace="b")
    )
    labels = Labels(app="a")
    (covers,) = known_budgets.covering_keys("team", labels)
    assert labels.reads <= budgets.MAX_CONDITIONS_PER_NAMESPACE
    assert known_budgets.allowed_disruptions([covers]).get(covers, 0) == 0
    assert known_budgets.covering_keys("b", {"a": ""}) == ("b/own",)
    for i in range(5):
        known_budgets.remove_budget(f"team/b{i}")
    assert known_budgets.covering_keys("team", labels) == ()


def test_pod_with_too_many_budgets_is_fully_protected():
    known_budgets = known(
        *(budget(f"b{i}", {"matchLabels": {"app": "a"}}) for i in range(budgets.MAX_BUDGETS_PER_POD + 1))
    )
    covers = known_budgets.covering_keys("team", {"app": "a"})
    assert len(covers) == budgets.MAX_BUDGETS_PER_POD
    assert sorted(known_budgets.allowed_disruptions(covers).values()) == [0, *[1] * (budgets.MAX_BUDGETS_PER_POD - 1)]
    known_budgets.remove_budget("team/b0")
    assert len(known_budgets.covering_keys("team", {"app": "a"})) == budgets.MAX_BUDGETS_PER_POD


def test_a_snapshot_tells_which_namespaces_have_changed_since():
    known_budgets = known(budget("app", {"matchLabels": {"app": "a"}}), budget("app", {}, namespace="gone"))
    snapshot = known_budgets.snapshot()
    known_budgets.set_budget(*budget("app", {"matchLabels": {"app": "a"}}))
    known_budgets.set_budget(*budget("app", {}, namespace="other"))
    known_budgets.remove_budget("team/unknown")
    assert known_budgets.namespaces_changed_since(snapshot) == {"other"}, "nothing of team"
    known_budgets.set_budget(*budget("app", {"matchLabels": {"app": "a"}}, 3))
    assert known_budgets.namespaces_changed_since(snapshot) == {"other", "team"}
    assert known_budgets.allowed_disruptions(["team/app"]) == {"team/app": 3}
    known_budgets.remove_budget("gone/app")
    assert known_budgets.namespaces_changed_since(snapshot) == {"other", "team", "gone"}
    assert known_budgets.namespaces_changed_since(known_budgets.snapshot()) == set()


def test_a_budget_that_was_removed_and_has_come_back_counts_as_changed():
    known_budgets = known(budget("app", {}))
    snapshot = known_budgets.snapshot()
    known_budgets.remove_budget("team/app")
    known_budgets.set_budget(*budget("app", {}))
    assert known_budgets.namespaces_changed_since(snapshot) == {"team"}


def test_namespaces_that_are_gone_take_no_memory():
    known_budgets = known(budget("app", {}))
    before = len(pickle.dumps(known_budgets))
    for i in range(100):
        known_budgets.set_budget(*budget("app", {}, namespace=f"run-{i}"))
        known_budgets.covering_keys(f"run-{i}", {})
        known_budgets.remove_budget(f"run-{i}/app")
    assert len(pickle.dumps(known_budgets)) == before


def test_many_small_budgets_exceed_the_limit_too():
    known_budgets = known(
        *(budget(f"b{i}", {"matchLabels": {"app": "a"}}) for i in range(budgets.MAX_CONDITIONS_PER_NAMESPACE + 1))
    )
    assert len(known_budgets.covering_keys("team", {"app": "b"})) == 1
    known_budgets.remove_budget("team/b0")
    assert known_budgets.covering_keys("team", {"app": "b"}) == ()


@pytest.mark.parametrize(("conditions", "covers_all"), [(1, False), (budgets.MAX_CONDITIONS_PER_NAMESPACE, True)])
def test_the_budgets_that_have_changed_as_they_were_and_as_they_are(conditions, covers_all):
    """With too many conditions in the namespace, a change concerns all pods."""
    known_budgets = budgets.Budgets()
    condition = budgets.LabelCondition("app", "Exists")
    former, new = (budgets.Budget("team", allowed, (condition,) * conditions) for allowed in (1, 2))
    known_budgets.set_budget("team/same", budgets.Budget("team", 1, (condition,)))
    known_budgets.set_budget("team/changed", former)
    snapshot = known_budgets.snapshot()
    known_budgets.set_budget("team/changed", new)
    changed = known_budgets.budgets_changed_since(snapshot)["team"]
    assert changed == ([budgets.Budget("team", 0, ())] if covers_all else [new])
    assert any(budget.covers({}) for budget in changed) == covers_all


def test_many_changed_budgets_count_as_a_change_for_all_pods():
    known_budgets, snapshot = budgets.Budgets(), budgets.Budgets()
    for i in range(100):
        known_budgets.set_budget(f"team/{i}", budgets.Budget("team", 1, (budgets.LabelCondition(f"app{i}", "Exists"),)))
    (changed,) = known_budgets.budgets_changed_since(snapshot)["team"]
    assert changed.covers({})


def test_budgets_changed_in_many_namespaces_count_as_a_change_for_all_their_pods():
    known_budgets, snapshot = budgets.Budgets(), budgets.Budgets()
    for i in range(100):
        condition = budgets.LabelCondition("app", "Exists")
        known_budgets.set_budget(f"team-{i}/web", budgets.Budget(f"team-{i}", 1, (condition,)))
    changed = known_budgets.budgets_changed_since(snapshot)
    assert len(changed) == 100
    assert all(budget.covers({}) for namespace_budgets in changed.values() for budget in namespace_budgets)


def test_a_budget_of_which_only_the_number_has_changed_is_compared_once():
    known_budgets = budgets.Budgets()
    conditions = tuple(
        budgets.LabelCondition(key, "Exists") for key in ("name", "instance", "component", "tier", "env")
    )
    known_budgets.set_budget("team/web", budgets.Budget("team", 1, conditions))
    snapshot = known_budgets.snapshot()
    known_budgets.set_budget("team/web", budgets.Budget("team", 2, conditions))
    (changed,) = known_budgets.budgets_changed_since(snapshot)["team"]
    assert changed.conditions == conditions


@pytest.mark.parametrize("operators", [[("Exists", 0)] * 20_000, [("In", 20_000)], [("In", 40)] * 500])
def test_conditions_beyond_those_that_are_checked_are_not_compared(operators, monkeypatch):
    """Budgets are compared under the lock."""
    compared = []
    for method in ("__eq__", "__hash__"):
        original = getattr(budgets.LabelCondition, method)

        def count(condition, *others, original=original):
            compared.append(len(condition.operands) or 1)
            return original(condition, *others)

        monkeypatch.setattr(budgets.LabelCondition, method, count)
    expressions = [
        {"key": f"k{i}", "operator": operator, "values": [f"v{j}" for j in range(operands)]}
        for i, (operator, operands) in enumerate(operators)
    ]
    # Each change is decoded anew, as those of the watch.
    changes = [budget("b", {"matchExpressions": expressions}, allowed=i % 2) for i in range(4)]
    known_budgets = Budgets()
    for change in changes:
        snapshot = known_budgets.snapshot()
        known_budgets.set_budget(*change)
        assert known_budgets.namespaces_changed_since(snapshot) == {"team"}
        (changed,) = known_budgets.budgets_changed_since(snapshot)["team"]
        assert changed.covers({})
    assert sum(compared) <= len(changes) * 2 * (budgets.MAX_CONDITIONS_PER_NAMESPACE + 1)
    assert len(known_budgets.covering_keys("team", {"k0": "v0"})) == 1, "no pod may be evicted"
