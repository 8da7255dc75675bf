"""PodDisruptionBudgets: the pods that each covers, and how many of them may be evicted now.

Preemption may exceed them where there is no other way, but counts by how much, as kube-scheduler does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cardwise.kube import wire

MOST_CONDITIONS: Final = 512  # of the budgets of a namespace: some 0.1 ms for a pod
MOST_BUDGETS: Final = 8  # that cover one pod; the API server evicts no pod that more than one covers

_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class Condition:
    """On one label of a pod."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        return False


@dataclass(frozen=True, slots=True)
class Budget:
    """`conditions`: all must hold of a pod; None: it covers no pod."""

    namespace: str
    allowed: int
    conditions: tuple[Condition, ...] | None

    def covers(self, labels: Mapping[str, str]) -> bool:
        """A pod of its namespace with these labels."""
        return self.conditions is not None and all(condition.holds(labels) for condition in self.conditions)


def record(raw: bytes) -> tuple[str, Budget] | None:
    """Key, which is "namespace/name", and record."""
    obj = _decode(wire.trim(raw))
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    selector = spec.get("selector")
    conditions = None
    if selector is not None:
        equal = [Condition(key, "In", frozenset([value])) for key, value in (selector.get("matchLabels") or {}).items()]
        others = [
            Condition(one["key"], one["operator"], frozenset(one.get("values") or ()))
            for one in selector.get("matchExpressions") or ()
        ]
        conditions = (*equal, *others)
    budget = Budget(metadata["namespace"], int(status.get("disruptionsAllowed") or 0), conditions)
    return f"{metadata['namespace']}/{metadata['name']}", budget


class Budgets:
    """By "namespace/name". Not thread-safe: the state locks.

    Whoever asks holds up others meanwhile, and who may write budgets may write millions of conditions. So of one
    namespace `MOST_CONDITIONS` are asked; what comes beyond them protects all of its pods, by one budget of no name
    that lets nobody go. The same one stands for those beyond `MOST_BUDGETS` of a pod.
    """

    def __init__(self) -> None:
        self._changes: dict[str, int] = {}  # how many, by namespace
        self._of: dict[str, dict[str, Budget]] = {}  # by namespace and key
        self._covering: dict[str, _Covering] = {}  # by namespace, those that were asked about

    def set(self, key: str, budget: Budget) -> None:
        of_namespace = self._of.setdefault(budget.namespace, {})
        before = of_namespace.get(key)
        if before == budget:
            return
        self._changes[budget.namespace] = self.changes(budget.namespace) + 1
        of_namespace[key] = budget
        if before is None or before.conditions != budget.conditions:
            self._covering.pop(budget.namespace, None)

    def remove(self, key: str) -> None:
        namespace, _, _ = key.partition("/")
        of_namespace = self._of.get(namespace, {})
        if of_namespace.pop(key, None) is not None:
            self._changes[namespace] = self.changes(namespace) + 1
        self._covering.pop(namespace, None)
        if not of_namespace:
            self._of.pop(namespace, None)

    def changes(self, namespace: str) -> int:
        """How often those of the namespace have changed."""
        return self._changes.get(namespace, 0)

    def matching(self, namespace: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The keys of those that cover the pod."""
        if namespace not in self._of:
            return ()
        if namespace not in self._covering:
            self._covering[namespace] = _Covering(namespace, self._of[namespace])
        return self._covering[namespace].of(labels)

    def allowed(self, keys: Iterable[str]) -> dict[str, int]:
        """How many pods each of these lets go now."""
        found = {}
        for key in keys:
            budget = self._of.get(key.partition("/")[0], {}).get(key)
            found[key] = budget.allowed if budget is not None else 0
        return found


class _Covering:
    """Which budgets of a namespace cover a pod. Most name a value of one label: only those of its value are asked."""

    def __init__(self, namespace: str, budgets: Mapping[str, Budget]) -> None:
        self._by_value: dict[str, dict[str, list[tuple[str, Budget]]]] = {}  # by key and value of a label
        self._others: list[tuple[str, Budget]] = []
        self._all = f"{namespace}/"  # the budget of no name
        self._beyond: tuple[str, ...] = ()
        left = MOST_CONDITIONS
        for key, budget in budgets.items():
            conditions = budget.conditions or ()
            left -= max(1, len(conditions))
            if left < 0:
                self._beyond = (self._all,)
                return
            named = next((one for one in conditions if one.operator == "In" and len(one.values) == 1), None)
            if named is None:
                self._others.append((key, budget))
            else:
                (value,) = named.values
                self._by_value.setdefault(named.key, {}).setdefault(value, []).append((key, budget))

    def of(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        asked = [*self._others]
        for key, by_value in self._by_value.items():
            asked += by_value.get(labels.get(key, ""), ())
        keys = sorted([*(key for key, budget in asked if budget.covers(labels)), *self._beyond])
        return tuple(keys) if len(keys) <= MOST_BUDGETS else (self._all, *keys[: MOST_BUDGETS - 1])
