"""Node affinity, selectors and taints, for nominating ahead: nodes that kube-scheduler would not refuse for a pod.

A nominated node must be one that the pod can have by the node's labels and taints, and by whether it is open. What
nodes have left is not here: it changes with every pod. Only rules that kube-scheduler certainly applies are read; it
applies the others itself. Pure; not thread-safe: the state locks.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from cardwise.core.values.decoded import Json

_MOST: Final = 256  # kinds of constraints whose nodes are remembered; pods of one workload have the same
HARD: Final = ("NoSchedule", "NoExecute")

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode


class Taint(NamedTuple):
    """A taint that keeps pods away."""

    key: str
    value: str
    effect: str


class Ground(NamedTuple):
    """A node's labels and taints. `taints`: only those that keep pods away."""

    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()


class _Condition(NamedTuple):
    key: str
    operator: str
    values: frozenset[str]

    def holds(self, value: str | None) -> bool:
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt" as operator:
                return self._compares(value, above=operator == "Gt")
        return False  # an operator of a later Kubernetes

    def _compares(self, value: str | None, *, above: bool) -> bool:
        try:
            number, bound = int(value or ""), int(next(iter(self.values), ""))
        except ValueError:
            return False
        return number > bound if above else number < bound


class _Term(NamedTuple):
    """A nodeSelectorTerm: conditions on labels and on the node's name, all of which must hold."""

    labels: tuple[_Condition, ...]
    names: tuple[_Condition, ...]


class _Toleration(NamedTuple):
    key: str
    operator: str
    value: str
    effect: str

    def tolerates(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        if self.operator == "Exists":
            return True
        return bool(self.key) and self.operator in ("", "Equal") and self.value == taint.value


class NodeConstraints(NamedTuple):
    """What a pod asks of its node. `terms`: one of them must hold; None: any node will do."""

    selector: tuple[tuple[str, str], ...]
    terms: tuple[_Term, ...] | None
    tolerations: tuple[_Toleration, ...]

    def allow(self, name: str, ground: Ground) -> bool:
        """Whether the pod may be on this node."""
        labels = ground.labels
        if any(labels.get(key) != value for key, value in self.selector):
            return False
        if any(not any(one.tolerates(taint) for one in self.tolerations) for taint in ground.taints):
            return False
        return self.terms is None or any(
            all(one.holds(labels.get(one.key)) for one in term.labels) and all(one.holds(name) for one in term.names)
            for term in self.terms
        )


def key_of(spec: Json) -> bytes:
    """A key for a pod's constraints: equal for pods that ask the same of their node. `constraints` reads it."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    return _encode([spec.get("nodeSelector") or {}, required, spec.get("tolerations") or []])


@lru_cache(maxsize=_MOST)
def constraints(key: bytes) -> NodeConstraints:
    """The constraints of the pod that `key_of` was given."""
    selector, required, tolerations = _decode(key)
    return NodeConstraints(
        tuple(sorted(selector.items())),
        None if required is None else tuple(map(_term, filter(_says, required))),
        tuple(
            _Toleration(*(str(one.get(field) or "") for field in ("key", "operator", "value", "effect")))
            for one in tolerations
        ),
    )


class Grounds:
    """All nodes. The nodes for a key are remembered, and kept up to date as nodes change."""

    def __init__(self) -> None:
        self._nodes: dict[str, Ground] = {}
        self._allowed: dict[bytes, set[str]] = {}  # by key of constraints, the least recently asked first

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, name: str, ground: Ground) -> None:
        """The node is so now."""
        if self._nodes.get(name) == ground:
            return
        self._nodes[name] = ground
        for key, allowed in self._allowed.items():
            if constraints(key).allow(name, ground):
                allowed.add(name)
            else:
                allowed.discard(name)

    def remove(self, name: str) -> None:
        self._nodes.pop(name, None)
        for allowed in self._allowed.values():
            allowed.discard(name)

    def allowed(self, key: bytes) -> set[str]:
        """The nodes that a pod with these constraints may be on; not to be changed."""
        found = self._allowed.pop(key, None)
        if found is None:
            allow = constraints(key).allow
            found = {name for name, ground in self._nodes.items() if allow(name, ground)}
            if len(self._allowed) >= _MOST:
                del self._allowed[next(iter(self._allowed))]
        self._allowed[key] = found
        return found


def _says(term: Json) -> bool:
    """A term without any condition selects no node."""
    return bool(term.get("matchExpressions") or term.get("matchFields"))


def _term(term: Json) -> _Term:
    return _Term(_conditions(term.get("matchExpressions")), _conditions(term.get("matchFields")))


def _conditions(of: Sequence[Json] | None) -> tuple[_Condition, ...]:
    return tuple(
        _Condition(str(one.get("key")), str(one.get("operator")), frozenset(map(str, one.get("values") or ())))
        for one in of or ()
    )
