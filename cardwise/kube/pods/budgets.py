"""PodDisruptionBudgets: the pods that each covers, and how many of them may be evicted now.

Preemption may exceed them where there is no other way, but counts by how much, as kube-scheduler does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cardwise.kube import wire

MAX_CONDITIONS_PER_NAMESPACE: Final = 512  # of the budgets of a namespace: some 0.1 ms for a pod
MAX_BUDGETS_PER_POD: Final = 8  # that cover one pod; the API server evicts no pod that more than one covers

_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class LabelCondition:
    """On one label of a pod."""

    key: str
    operator: str
    operands: frozenset[str] = frozenset()

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


@dataclass(frozen=True, slots=True)
class Budget:
    """`conditions`: all must hold of a pod; None: it covers no pod."""

    namespace: str
    allowed: int
    conditions: tuple[LabelCondition, ...] | None

    def covers(self, labels: Mapping[str, str]) -> bool:
        """A pod of its namespace with these labels."""
        return self.conditions is not None and all(condition.matches(labels) for condition in self.conditions)


def decode_budget(raw: bytes) -> tuple[str, Budget] | None:
    """Key, which is "namespace/name", and record."""
    manifest = _decode(wire.trim_object(raw))
    metadata, spec, status = manifest["metadata"], manifest.get("spec") or {}, manifest.get("status") or {}
    selector = spec.get("selector")
    conditions = None
    if selector is not None:
        equal = [
            LabelCondition(key, "In", frozenset([text])) for key, text in (selector.get("matchLabels") or {}).items()
        ]
        others = [
            LabelCondition(expression["key"], expression["operator"], frozenset(expression.get("values") or ()))
            for expression in selector.get("matchExpressions") or ()
        ]
        conditions = (*equal, *others)
    budget = Budget(metadata["namespace"], int(status.get("disruptionsAllowed") or 0), conditions)
    return f"{metadata['namespace']}/{metadata['name']}", budget


class Budgets:
    """By "namespace/name". Not thread-safe: the state locks.

    Whoever asks holds up others meanwhile, and who may write budgets may write millions of conditions. So of one
    namespace `MAX_CONDITIONS_PER_NAMESPACE` are asked; what comes beyond them protects all of its pods, by one budget
    of no name that lets nobody go. The same one stands for those beyond `MAX_BUDGETS_PER_POD` of a pod.
    """

    def __init__(self) -> None:
        self._changes: dict[str, int] = {}  # how many, by namespace
        self._of: dict[str, dict[str, Budget]] = {}  # by namespace and key
        self._covering: dict[str, _Covering] = {}  # by namespace, those that were asked about

    def set_budget(self, key: str, budget: Budget) -> None:
        of_namespace = self._of.setdefault(budget.namespace, {})
        before = of_namespace.get(key)
        if before == budget:
            return
        self._changes[budget.namespace] = self.change_count(budget.namespace) + 1
        of_namespace[key] = budget
        if before is None or before.conditions != budget.conditions:
            self._covering.pop(budget.namespace, None)

    def remove_budget(self, key: str) -> None:
        namespace, _, _ = key.partition("/")
        of_namespace = self._of.get(namespace, {})
        if of_namespace.pop(key, None) is not None:
            self._changes[namespace] = self.change_count(namespace) + 1
        self._covering.pop(namespace, None)
        if not of_namespace:
            self._of.pop(namespace, None)

    def change_count(self, namespace: str) -> int:
        """How often those of the namespace have changed."""
        return self._changes.get(namespace, 0)

    def covering_keys(self, namespace: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The keys of those that cover the pod."""
        if namespace not in self._of:
            return ()
        if namespace not in self._covering:
            self._covering[namespace] = _Covering(namespace, self._of[namespace])
        return self._covering[namespace].keys_covering(labels)

    def allowed_disruptions(self, keys: Iterable[str]) -> dict[str, int]:
        """How many pods each of these lets go now."""
        allowances = {}
        for key in keys:
            budget = self._of.get(key.partition("/")[0], {}).get(key)
            allowances[key] = budget.allowed if budget is not None else 0
        return allowances


class _Covering:
    """Which budgets of a namespace cover a pod. Most name a value of one label: only those of its value are asked."""

    def __init__(self, namespace: str, budgets: Mapping[str, Budget]) -> None:
        self._by_value: dict[str, dict[str, list[tuple[str, Budget]]]] = {}  # by key and value of a label
        self._others: list[tuple[str, Budget]] = []
        self._all = f"{namespace}/"  # the budget of no name
        self._beyond: tuple[str, ...] = ()
        remaining = MAX_CONDITIONS_PER_NAMESPACE
        for key, budget in budgets.items():
            conditions = budget.conditions or ()
            remaining -= max(1, len(conditions))
            if remaining < 0:
                self._beyond = (self._all,)
                return
            named = next(
                (condition for condition in conditions if condition.operator == "In" and len(condition.operands) == 1),
                None,
            )
            if named is None:
                self._others.append((key, budget))
            else:
                (text,) = named.operands
                self._by_value.setdefault(named.key, {}).setdefault(text, []).append((key, budget))

    def keys_covering(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        candidates = [*self._others]
        for key, by_value in self._by_value.items():
            candidates += by_value.get(labels.get(key, ""), ())
        keys = sorted([*(key for key, budget in candidates if budget.covers(labels)), *self._beyond])
        return tuple(keys) if len(keys) <= MAX_BUDGETS_PER_POD else (self._all, *keys[: MAX_BUDGETS_PER_POD - 1])
