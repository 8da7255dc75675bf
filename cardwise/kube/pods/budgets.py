"""PodDisruptionBudgets: the pods that each covers, and how many of them may be evicted now.

Preemption may exceed them where there is no other way, but counts by how much, as kube-scheduler does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MOST_CONDITIONS: Final = 512  # of the budgets of a namespace: some 0.1 ms for a pod

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
    """By "namespace/name". Not thread-safe: the state locks.

    Whoever asks holds up others meanwhile, and who may write budgets may write millions of conditions. So of one
    namespace `MOST_CONDITIONS` are asked; what comes beyond them protects all of its pods, by one budget of no name
    that lets nobody go.
    """

    def __init__(self) -> None:
        self.changes = 0  # counts them
        self._of: dict[str, dict[str, Budget]] = {}  # by namespace and key
        self._asked: dict[str, tuple[dict[str, Budget], bool]] = {}  # as `_few` has it

    def set(self, key: str, budget: Budget) -> None:
        self.changes += 1
        self._of.setdefault(budget.namespace, {})[key] = budget
        self._asked.pop(budget.namespace, None)

    def remove(self, key: str) -> None:
        self.changes += 1
        namespace, _, _ = key.partition("/")
        of_namespace = self._of.get(namespace, {})
        of_namespace.pop(key, None)
        self._asked.pop(namespace, None)
        if not of_namespace:
            self._of.pop(namespace, None)

    def matching(self, namespace: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The keys of those that cover the pod."""
        if namespace not in self._of:
            return ()
        if namespace not in self._asked:
            self._asked[namespace] = _few(self._of[namespace])
        few, more = self._asked[namespace]
        matching = [key for key, budget in few.items() if budget.covers(labels)]
        return tuple(sorted([*matching, f"{namespace}/"] if more else matching))

    def allowed(self, keys: Iterable[str]) -> dict[str, int]:
        """How many pods each of these lets go now."""
        found = {}
        for key in keys:
            budget = self._of.get(key.partition("/")[0], {}).get(key)
            found[key] = budget.allowed if budget is not None else 0
        return found


def _few(budgets: Mapping[str, Budget]) -> tuple[dict[str, Budget], bool]:
    """As many as have no more than `MOST_CONDITIONS` together, and whether there are others."""
    few, left = dict[str, Budget](), MOST_CONDITIONS
    for key, budget in budgets.items():
        left -= max(1, len(budget.conditions or ()))
        if left < 0:
            return few, True
        few[key] = budget
    return few, False
