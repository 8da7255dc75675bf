"""PodDisruptionBudgets: which pods each budget covers, and how many of these pods may be evicted now.

As in kube-scheduler, preemption may violate budgets if there is no other way, and prefers fewer violations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from cardwise.kube import wire

# Conditions of changed budgets, as they were and as they are. All pods on thousands of nodes are compared with them.
_MAX_CHANGED_CONDITIONS: Final = 8
_MAX_CHANGED_NAMESPACES: Final = 8  # namespaces whose budgets are compared; up to 0.3 ms each
# Conditions of all budgets of a namespace; a condition counts for each of its operands. Checking takes 0.1 ms per pod.
MAX_CONDITIONS_PER_NAMESPACE: Final = 512
# In place of the labels of a pod that are too many to be kept. No label has this key.
TOO_MANY_LABELS: Final[Mapping[str, str]] = MappingProxyType({"": ""})
MAX_BUDGETS_PER_POD: Final = 8  # budgets of a pod; the API server evicts no pod that is covered by more than one budget

_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class LabelCondition:
    """A condition on one label of a pod."""

    key: str
    operator: str
    operands: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The number of conditions as which this condition counts."""
        return len(self.operands) or 1

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.operands
            case "NotIn":
                return labels.get(self.key) not in self.operands
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        return False


def parse_conditions(selector: Mapping[str, Any]) -> tuple[LabelCondition, ...]:
    """The conditions of a label selector (matchLabels, matchExpressions); a pod must meet all of them."""
    equal = [
        LabelCondition(key, "In", frozenset([label_value]))
        for key, label_value in (selector.get("matchLabels") or {}).items()
    ]
    expressions_conditions = [
        LabelCondition(expression["key"], expression["operator"], frozenset(expression.get("values") or ()))
        for expression in selector.get("matchExpressions") or ()
    ]
    return (*equal, *expressions_conditions)


# In place of conditions that are too many to be checked: equal for all such budgets, so that they are compared quickly.
_TOO_MANY_CONDITIONS: Final = (LabelCondition("", "Exists"),) * (MAX_CONDITIONS_PER_NAMESPACE + 1)


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget.

    allowed: how many pods may be evicted now.
    conditions: the budget covers a pod that meets all of them; None if it covers no pod.
    """

    namespace: str
    allowed: int
    conditions: tuple[LabelCondition, ...] | None

    def covers(self, labels: Mapping[str, str]) -> bool:
        """Whether the budget covers a pod of its namespace with these labels."""
        if self.conditions is None:
            return False
        return labels is TOO_MANY_LABELS or all(condition.matches(labels) for condition in self.conditions)


def decode_budget(raw: bytes) -> tuple[str, Budget] | None:
    """Decode a PodDisruptionBudget. Returns its key "namespace/name" and the budget.

    Budgets are compared under the lock. So conditions that are more than `Budgets` checks are replaced.
    """
    manifest = _decode(wire.trim_object(raw))
    metadata, spec, status = manifest["metadata"], manifest.get("spec") or {}, manifest.get("status") or {}
    selector = spec.get("selector")
    conditions = None if selector is None else parse_conditions(selector)
    if conditions is not None and _size(conditions) > MAX_CONDITIONS_PER_NAMESPACE:
        conditions = _TOO_MANY_CONDITIONS
    budget = Budget(metadata["namespace"], int(status.get("disruptionsAllowed") or 0), conditions)
    return f"{metadata['namespace']}/{metadata['name']}", budget


class Budgets:
    """All budgets, by "namespace/name". Not thread-safe: callers must hold the lock of the extender's state.

    A user may create budgets with millions of label conditions, and look-ups happen under that lock. So only
    `MAX_CONDITIONS_PER_NAMESPACE` label conditions of the budgets of one namespace are checked. If there are more, a
    nameless budget that forbids every disruption also covers all pods of the namespace. This budget also covers each
    pod that is covered by more than `MAX_BUDGETS_PER_POD` budgets, and each pod with `TOO_MANY_LABELS`.
    """

    def __init__(self) -> None:
        # By namespace and key. The inner mappings are replaced, never changed: snapshots share them.
        self._budgets: dict[str, Mapping[str, Budget]] = {}
        self._covering: dict[str, _Covering] = {}  # by namespace, built at the first lookup

    def snapshot(self) -> "Budgets":
        """An independent copy: later changes of one do not affect the other."""
        duplicate = Budgets()
        duplicate._budgets, duplicate._covering = self._budgets.copy(), self._covering.copy()
        return duplicate

    def set_budget(self, key: str, budget: Budget) -> None:
        namespace_budgets = self._budgets.get(budget.namespace, {})
        former = namespace_budgets.get(key)
        if former == budget:
            return
        self._budgets[budget.namespace] = {**namespace_budgets, key: budget}
        if former is None or former.conditions != budget.conditions:
            self._covering.pop(budget.namespace, None)

    def remove_budget(self, key: str) -> None:
        namespace, _, _ = key.partition("/")
        namespace_budgets = self._budgets.get(namespace, {})
        if key not in namespace_budgets:
            return
        self._covering.pop(namespace, None)
        remaining = {other_key: budget for other_key, budget in namespace_budgets.items() if other_key != key}
        if remaining:
            self._budgets[namespace] = remaining
        else:
            del self._budgets[namespace]

    def namespaces_changed_since(self, earlier: "Budgets") -> set[str]:
        """The namespaces whose budgets have changed since the snapshot `earlier`."""
        budgets, earlier_budgets = self._budgets, earlier._budgets  # noqa: SLF001 - of the same class
        # Each change makes a new inner mapping. The snapshot keeps the former mapping, so no other has its identity.
        return {
            namespace
            for namespace in budgets.keys() | earlier_budgets.keys()
            if budgets.get(namespace) is not earlier_budgets.get(namespace)
        }

    def budgets_changed_since(self, earlier: "Budgets") -> dict[str, list[Budget]]:
        """By namespace, the budgets of pods whose budgets have changed since the snapshot `earlier`. Where many have
        changed, one budget that covers all pods stands for them, because callers compare many pods with each.
        """
        namespaces = self.namespaces_changed_since(earlier)
        if len(namespaces) > _MAX_CHANGED_NAMESPACES:
            return {namespace: [Budget(namespace, 0, ())] for namespace in namespaces}
        return {namespace: self._changed_budgets(earlier, namespace) for namespace in namespaces}

    def _changed_budgets(self, earlier: "Budgets", namespace: str) -> list[Budget]:
        before, now = earlier._budgets.get(namespace, {}), self._budgets.get(namespace, {})  # noqa: SLF001
        covering_all = [Budget(namespace, 0, ())]
        if any(_exceed_conditions(budgets.values(), MAX_CONDITIONS_PER_NAMESPACE) for budgets in (before, now)):
            return covering_all  # the budget without a name may have come or gone
        # One of equal conditions is enough: most often only the number of allowed disruptions has changed.
        changed = {
            budget.conditions: budget
            for key in before.keys() | now.keys()
            if before.get(key) != now.get(key)
            for budget in (before.get(key), now.get(key))
            if budget is not None
        }.values()
        return covering_all if _exceed_conditions(changed, _MAX_CHANGED_CONDITIONS) else [*changed]

    def covering_keys(self, namespace: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The keys of the budgets that cover a pod with these labels."""
        if namespace not in self._budgets:
            return ()
        if namespace not in self._covering:
            self._covering[namespace] = _Covering(namespace, self._budgets[namespace])
        return self._covering[namespace].keys_covering(labels)

    def allowed_disruptions(self, keys: Iterable[str]) -> dict[str, int]:
        """The number of pods that may be evicted now, for each of these budgets."""
        allowances = {}
        for key in keys:
            budget = self._budgets.get(key.partition("/")[0], {}).get(key)
            allowances[key] = budget.allowed if budget is not None else 0
        return allowances


def _size(conditions: Iterable[LabelCondition]) -> int:
    """The number of conditions as which the conditions of a budget count."""
    return sum(condition.size for condition in conditions) or 1


def _exceed_conditions(budgets: Iterable[Budget], limit: int) -> bool:
    """Whether the budgets have more conditions than this. Reads no more budgets than needed."""
    count = 0
    for budget in budgets:
        count += _size(budget.conditions or ())
        if count > limit:
            return True
    return False


class _Covering:
    """Finds the budgets of a namespace that cover a pod. A budget that requires a value of a label is indexed by that
    label and value.
    """

    def __init__(self, namespace: str, budgets: Mapping[str, Budget]) -> None:
        self._by_label: dict[str, dict[str, list[tuple[str, Budget]]]] = {}  # by key and value of a label
        self._without_equality: list[tuple[str, Budget]] = []
        self._all = f"{namespace}/"  # the budget without a name
        self._overflow: tuple[str, ...] = ()
        remaining = MAX_CONDITIONS_PER_NAMESPACE
        for key, budget in budgets.items():
            conditions = budget.conditions or ()
            remaining -= _size(conditions)
            if remaining < 0:
                self._overflow = (self._all,)
                return
            equality = next(
                (condition for condition in conditions if condition.operator == "In" and len(condition.operands) == 1),
                None,
            )
            if equality is None:
                self._without_equality.append((key, budget))
            else:
                (text,) = equality.operands
                self._by_label.setdefault(equality.key, {}).setdefault(text, []).append((key, budget))

    def keys_covering(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        if labels is TOO_MANY_LABELS:
            return (self._all,)
        candidates = [*self._without_equality]
        for key, by_value in self._by_label.items():
            candidates += by_value.get(labels.get(key, ""), ())
        keys = sorted([*(key for key, budget in candidates if budget.covers(labels)), *self._overflow])
        return tuple(keys) if len(keys) <= MAX_BUDGETS_PER_POD else (self._all, *keys[: MAX_BUDGETS_PER_POD - 1])
