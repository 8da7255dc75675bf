"""A pod's constraints on its node's labels, name and taints: node selector, required node affinity, tolerations.

Implements these rules of kube-scheduler for the extender, the webhook and the command line. No I/O.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from cardwise.core.values.decoded import Json

HARD_TAINT_EFFECTS: Final = ("NoSchedule", "NoExecute")  # effects of taints that keep pods away
_MAX_NUMBER_LENGTH: Final = 63  # characters of a number; Kubernetes' limit for a label's value
_NUMBER: Final = re.compile("[+-]?[0-9]+")  # int() would also accept 1_000, spaces and digits of other scripts
_INT64: Final = range(-(2**63), 2**63)
REQUIRED_AFFINITY_FIELD: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED_AFFINITY_FIELD: Final = "preferredDuringSchedulingIgnoredDuringExecution"
# Maximum number of conditions in the node affinity of a pod that requests GPUs. Each is compared with each node: 64
# take 0.5 s of CPU with 5,000 nodes. The API server accepts ten thousand. The values of a condition are not counted,
# since a lookup finds them.
MAX_AFFINITY_CONDITIONS: Final = 64


class Taint(NamedTuple):
    """A taint that keeps pods away."""

    key: str
    value: str
    effect: str

    @classmethod
    def from_json(cls, taint: Json) -> Self:
        return cls(taint["key"], taint.get("value") or "", taint.get("effect") or "")

    def __str__(self) -> str:
        """The taint in the format of `kubectl taint`."""
        return f"{self.key}{'=' * bool(self.value)}{self.value}:{self.effect}"


class NodeLabelsAndTaints(NamedTuple):
    """A node's labels, and those of its taints that keep pods away."""

    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()

    @classmethod
    def from_node(cls, node: Json) -> Self:
        """The labels and taints of a Node object."""
        taints = map(Taint.from_json, (node.get("spec") or {}).get("taints") or ())
        return cls(
            node["metadata"].get("labels") or {}, tuple(taint for taint in taints if taint.effect in HARD_TAINT_EFFECTS)
        )


class _Condition(NamedTuple):
    """A condition on a label. `bound`: the number of Gt and Lt; None if it is missing or invalid."""

    key: str
    operator: str
    operands: frozenset[str]
    bound: int | None

    def matches(self, text: str | None) -> bool:
        match self.operator:
            case "In":
                return text is not None and text in self.operands
            case "NotIn":
                return text is None or text not in self.operands
            case "Exists":
                return text is not None
            case "DoesNotExist":
                return text is None
            case "Gt" | "Lt" as operator:
                return self._compare_numbers(text, above=operator == "Gt")
        return False  # an operator of a later Kubernetes

    def _compare_numbers(self, text: str | None, *, above: bool) -> bool:
        number = _parse_number(text or "")
        if number is None or self.bound is None:
            return False
        return number > self.bound if above else number < self.bound


class _Term(NamedTuple):
    """A nodeSelectorTerm: conditions on labels and on the node's name, all of which must hold."""

    labels: tuple[_Condition, ...]
    names: tuple[_Condition, ...]

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        return all(condition.matches(labels.get(condition.key)) for condition in self.labels) and all(
            condition.matches(name) for condition in self.names
        )


class Toleration(NamedTuple):
    """A pod's toleration of taints. A missing field is ""."""

    key: str
    operator: str
    value: str
    effect: str

    @classmethod
    def from_json(cls, toleration: Json) -> Self:
        return cls(*(str(toleration.get(field) or "") for field in ("key", "operator", "value", "effect")))

    def tolerates(self, taint: Taint) -> bool:
        """Whether the toleration tolerates the taint. With an operator of a later Kubernetes, it tolerates no taint."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        if self.operator == "Exists":
            return True
        return bool(self.key) and self.operator in ("", "Equal") and self.value == taint.value


class NodeConstraints(NamedTuple):
    """A pod's constraints on its node.

    selector: the labels that the node must have.
    terms: the node must match at least one of them; None if there are no terms.
    tolerations: each taint of the node must be tolerated by at least one of them.
    """

    selector: tuple[tuple[str, str], ...]
    terms: tuple[_Term, ...] | None
    tolerations: tuple[Toleration, ...]

    @classmethod
    def parse(cls, selector: Mapping[str, str], required: Sequence[Json] | None, tolerations: Sequence[Json]) -> Self:
        """Parse a pod's nodeSelector, the nodeSelectorTerms of its required node affinity, and its tolerations."""
        return cls(
            tuple(sorted(selector.items())),
            None if required is None else tuple(map(_parse_term, filter(has_conditions, required))),
            tuple(map(Toleration.from_json, tolerations)),
        )

    def admits(self, name: str, node: NodeLabelsAndTaints) -> bool:
        """Whether the pod may run on the node of this name and these labels."""
        labels = node.labels
        if any(labels.get(key) != label_value for key, label_value in self.selector):
            return False
        if self.untolerated_taints(node):
            return False
        return self.terms is None or any(term.matches(name, labels) for term in self.terms)

    def untolerated_taints(self, node: NodeLabelsAndTaints) -> list[Taint]:
        """The node's taints that the pod does not tolerate."""
        return [
            taint for taint in node.taints if not any(toleration.tolerates(taint) for toleration in self.tolerations)
        ]


class NodePreferences(NamedTuple):
    """A pod's preferred node affinity: terms with their weights. A term without conditions matches no node."""

    terms: tuple[tuple[int, _Term], ...]

    @classmethod
    def parse(cls, spec: Json) -> Self:
        """Parse the preferred node affinity of a pod's spec."""
        affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        preferred = affinity.get(_PREFERRED_AFFINITY_FIELD) or ()
        return cls(
            tuple(
                (entry["weight"], _parse_term(entry["preference"]))
                for entry in preferred
                if has_conditions(entry["preference"])
            )
        )

    def weight_of(self, name: str, node: NodeLabelsAndTaints) -> int:
        """The sum of the weights of the terms that the node matches."""
        return sum(weight for weight, term in self.terms if term.matches(name, node.labels))


def constraint_fields(spec: Json) -> tuple[Json, Sequence[Json] | None, Sequence[Json]]:
    """The arguments of `NodeConstraints.parse` from a pod's spec."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = (affinity.get(REQUIRED_AFFINITY_FIELD) or {}).get("nodeSelectorTerms")
    return spec.get("nodeSelector") or {}, required, spec.get("tolerations") or []


def count_affinity_conditions(spec: Json) -> int:
    """The number of conditions in the required and the preferred node affinity of a pod's spec."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = (affinity.get(REQUIRED_AFFINITY_FIELD) or {}).get("nodeSelectorTerms") or ()
    preferred = [entry.get("preference") or {} for entry in affinity.get(_PREFERRED_AFFINITY_FIELD) or ()]
    return len(conditions_of(required)) + len(conditions_of(preferred))


def conditions_of(terms: Iterable[Json]) -> list[Json]:
    """The conditions of all terms of a node affinity, on labels and on the node's name."""
    return [
        condition for term in terms for key in ("matchExpressions", "matchFields") for condition in term.get(key) or ()
    ]


def constraints_of(spec: Json) -> NodeConstraints:
    """The constraints of a pod with this spec."""
    return NodeConstraints.parse(*constraint_fields(spec))


def has_conditions(term: Json) -> bool:
    """Whether the term has a condition. A term without conditions matches no node."""
    return bool(term.get("matchExpressions") or term.get("matchFields"))


def _parse_term(term: Json) -> _Term:
    return _Term(_parse_conditions(term.get("matchExpressions")), _parse_conditions(term.get("matchFields")))


def _parse_conditions(expressions: Sequence[Json] | None) -> tuple[_Condition, ...]:
    return tuple(map(_parse_condition, expressions or ()))


def _parse_condition(expression: Json) -> _Condition:
    operands = frozenset(map(str, expression.get("values") or ()))
    # Parsed once, and not for each node, since the text may have thousands of digits.
    bound = _parse_number(next(iter(operands), ""))
    return _Condition(str(expression.get("key")), str(expression.get("operator")), operands, bound)


def _parse_number(text: str) -> int | None:
    """A whole number of 64 bits, as kube-scheduler reads it with Go's ParseInt; None for other texts."""
    if len(text) > _MAX_NUMBER_LENGTH or not _NUMBER.fullmatch(text):
        return None
    number = int(text)
    return number if number in _INT64 else None
