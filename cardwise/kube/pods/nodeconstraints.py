"""What a pod asks of its node's labels, name and taints: node selector, required node affinity, tolerations.

One reading of these rules of kube-scheduler, for the extender, the webhook and the command line. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self

from cardwise.core.values.decoded import Json

HARD: Final = ("NoSchedule", "NoExecute")  # effects of taints that keep pods away
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


class Taint(NamedTuple):
    """A taint that keeps pods away."""

    key: str
    value: str
    effect: str

    @classmethod
    def of(cls, taint: Json) -> Self:
        return cls(taint["key"], taint.get("value") or "", taint.get("effect") or "")

    def __str__(self) -> str:
        """As `kubectl taint` spells it."""
        return f"{self.key}{'=' * bool(self.value)}{self.value}:{self.effect}"


class Ground(NamedTuple):
    """A node's labels and taints. `taints`: only those that keep pods away."""

    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()

    @classmethod
    def of(cls, node: Json) -> Self:
        """Of a Node object."""
        taints = map(Taint.of, (node.get("spec") or {}).get("taints") or ())
        return cls(node["metadata"].get("labels") or {}, tuple(one for one in taints if one.effect in HARD))


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


class Toleration(NamedTuple):
    """A pod's toleration of taints. "" in a field: it was left out."""

    key: str
    operator: str
    value: str
    effect: str

    @classmethod
    def of(cls, toleration: Json) -> Self:
        return cls(*(str(toleration.get(field) or "") for field in ("key", "operator", "value", "effect")))

    def tolerates(self, taint: Taint) -> bool:
        """Whether the taint does not keep the pod away. An operator of a later Kubernetes tolerates nothing."""
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
    tolerations: tuple[Toleration, ...]

    @classmethod
    def read(cls, selector: Mapping[str, str], required: Sequence[Json] | None, tolerations: Sequence[Json]) -> Self:
        """Of a pod's nodeSelector, the nodeSelectorTerms of its required node affinity, and its tolerations."""
        return cls(
            tuple(sorted(selector.items())),
            None if required is None else tuple(map(_term, filter(_says, required))),
            tuple(map(Toleration.of, tolerations)),
        )

    def allow(self, name: str, ground: Ground) -> bool:
        """Whether the pod may be on this node."""
        labels = ground.labels
        if any(labels.get(key) != value for key, value in self.selector):
            return False
        if self.untolerated(ground):
            return False
        return self.terms is None or any(
            all(one.holds(labels.get(one.key)) for one in term.labels) and all(one.holds(name) for one in term.names)
            for term in self.terms
        )

    def untolerated(self, ground: Ground) -> list[Taint]:
        """The node's taints that keep the pod away."""
        return [taint for taint in ground.taints if not any(one.tolerates(taint) for one in self.tolerations)]


def fields(spec: Json) -> tuple[Json, Sequence[Json] | None, Sequence[Json]]:
    """What `NodeConstraints.read` needs of a pod's spec."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms")
    return spec.get("nodeSelector") or {}, required, spec.get("tolerations") or []


def of(spec: Json) -> NodeConstraints:
    """The constraints of a pod with this spec."""
    return NodeConstraints.read(*fields(spec))


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
