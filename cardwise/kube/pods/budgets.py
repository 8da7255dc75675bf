"""PodDisruptionBudgets: the pods that each covers, and how many of them may be evicted now.

Preemption may exceed them where there is no other way, but counts by how much, as kube-scheduler does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

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
    obj = _decode(raw)
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
    """By "namespace/name". Not thread-safe: the state locks."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Budget]] = {}  # by namespace and key

    def set(self, key: str, budget: Budget) -> None:
        self._of.setdefault(budget.namespace, {})[key] = budget

    def remove(self, key: str) -> None:
        namespace, _, _ = key.partition("/")
        of_namespace = self._of.get(namespace, {})
        of_namespace.pop(key, None)
        if not of_namespace:
            self._of.pop(namespace, None)

    def covering(self, namespace: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The keys of those that cover the pod."""
        of_namespace = self._of.get(namespace)
        if of_namespace is None:
            return ()
        return tuple(sorted(key for key, budget in of_namespace.items() if budget.covers(labels)))

    def allowed(self) -> dict[str, int]:
        """How many pods each lets go now."""
        return {key: budget.allowed for of_namespace in self._of.values() for key, budget in of_namespace.items()}
