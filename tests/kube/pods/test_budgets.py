"""Which disruption budgets cover a pod, and that nobody can make the question dear for others."""

import json

from cardwise.kube.pods import budgets
from cardwise.kube.pods.budgets import Budgets


def budget(name, selector, allowed=1, namespace="team"):
    metadata = {"name": name, "namespace": namespace}
    made = {"metadata": metadata, "spec": {"selector": selector}, "status": {"disruptionsAllowed": allowed}}
    return budgets.decode_budget(json.dumps(made).encode())


def expression(key, operator, *values):
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def known(*made):
    found = Budgets()
    for key, one in made:
        found.set_budget(key, one)
    return found


def test_a_pod_is_covered_by_those_whose_conditions_all_hold():
    found = known(
        budget("all", {}),
        budget("none", None),
        budget("app", {"matchLabels": {"app": "a"}}),
        budget("both", {"matchLabels": {"app": "a"}} | expression("tier", "Exists")),
        budget("not", expression("app", "NotIn", "b")),
        budget("other", {}, namespace="other"),
    )
    assert found.matching("team", {"app": "a"}) == ("team/all", "team/app", "team/not")
    assert found.allowed(["team/all", "team/app"]) == {"team/all": 1, "team/app": 1}
    found.remove_budget("team/all")
    found.set_budget(*budget("app", {"matchLabels": {"app": "a"}}, 3))
    assert found.matching("team", {"app": "a"}) == ("team/app", "team/not")
    assert found.allowed(["team/app"]) == {"team/app": 3}
    assert found.matching("nowhere", {}) == ()


class Labels(dict):
    """Counts how often it is asked."""

    asked = 0

    def __contains__(self, key):
        self.asked += 1
        return super().__contains__(key)


def test_of_a_namespace_that_has_too_many_conditions_every_pod_is_protected():
    """They are asked of each pod on a node under the extender's lock, and a tenant may write millions of them."""
    keys = {"matchExpressions": [{"key": f"k{i}", "operator": "DoesNotExist"} for i in range(600)]}
    found = known(*(budget(f"b{i}", keys) for i in range(5)), budget("own", expression("a", "Exists"), namespace="b"))
    labels = Labels(app="a")
    (covers,) = found.matching("team", labels)
    assert labels.asked <= budgets.MOST_CONDITIONS
    assert found.allowed([covers]).get(covers, 0) == 0
    assert found.matching("b", {"a": ""}) == ("b/own",)
    for i in range(5):
        found.remove_budget(f"team/b{i}")
    assert found.matching("team", labels) == ()


def test_a_pod_that_very_many_cover_is_protected_by_one_that_lets_nobody_go():
    found = known(*(budget(f"b{i}", {"matchLabels": {"app": "a"}}) for i in range(budgets.MOST_BUDGETS + 1)))
    covers = found.matching("team", {"app": "a"})
    assert len(covers) == budgets.MOST_BUDGETS
    assert sorted(found.allowed(covers).values()) == [0, *[1] * (budgets.MOST_BUDGETS - 1)]
    found.remove_budget("team/b0")
    assert len(found.matching("team", {"app": "a"})) == budgets.MOST_BUDGETS


def test_what_has_changed_is_counted_by_namespace():
    found = known(budget("app", {"matchLabels": {"app": "a"}}))
    before = found.change_count("team")
    found.set_budget(*budget("app", {"matchLabels": {"app": "a"}}))
    found.set_budget(*budget("app", {}, namespace="other"))
    found.remove_budget("team/unknown")
    assert found.change_count("team") == before, "nothing of this namespace"
    found.set_budget(*budget("app", {"matchLabels": {"app": "a"}}, 3))
    assert found.change_count("team") > before
    assert found.allowed(["team/app"]) == {"team/app": 3}


def test_many_small_ones_are_too_many_as_well():
    found = known(*(budget(f"b{i}", {"matchLabels": {"app": "a"}}) for i in range(budgets.MOST_CONDITIONS + 1)))
    assert len(found.matching("team", {"app": "b"})) == 1
    found.remove_budget("team/b0")
    assert found.matching("team", {"app": "b"}) == ()
