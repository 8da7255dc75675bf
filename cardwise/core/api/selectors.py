"""Selectors of cards: Kubernetes' label selectors, extended by comparisons of quantities.

A selector is parsed once; an error names the field. It is then evaluated for each card of the cluster, with the labels
that `classes.card_labels` computes.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from cardwise.core.values import amounts
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity
from cardwise.core.values.wording import quote_text

_COMPARISON_OPERATORS = {"Gt": operator.gt, "Lt": operator.lt, "GtEq": operator.ge, "LtEq": operator.le}
_SET_OPERATORS = ("In", "NotIn")
_PRESENCE_OPERATORS = ("Exists", "DoesNotExist")
_OPERATORS = (*_SET_OPERATORS, *_PRESENCE_OPERATORS, *_COMPARISON_OPERATORS)
_FIELDS = ("matchLabels", "matchExpressions")
_EXPRESSION_FIELDS = ("key", "operator", "values")
# Conditions and values of all alternatives of a selector together. Each value is parsed, and each condition is
# evaluated for each new kind of card.
MAX_CONDITIONS = 256
MAX_VALUES = 4096
_MAX_CACHED_NUMBERS = 4096  # cached numbers of label values; cards of one model have equal values
_MAX_NUMBER_LENGTH = 64  # characters of a string that is parsed as a number; a label value has at most 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """One condition on a label.

    key: the label, in lower case.
    texts: the values of In and NotIn.
    numbers: the values of In and NotIn that are quantities, as numbers.
    bound: the value of Gt, Lt, GtEq and LtEq.
    """

    key: str
    operator: str
    texts: frozenset[str] = frozenset()
    numbers: frozenset[Fraction] = frozenset()
    bound: Fraction = Fraction(0)

    def matches(self, text: str | None) -> bool:
        """Whether a card with this label value meets the condition. `text` is None if the card lacks the label."""
        match self.operator:
            case "In":
                return self._is_listed(text)
            case "NotIn":
                return not self._is_listed(text)
            case "Exists":
                return text is not None
            case "DoesNotExist":
                return text is None
        number = None if text is None else _parse_number(text)
        return number is not None and _COMPARISON_OPERATORS[self.operator](number, self.bound)

    def _is_listed(self, text: str | None) -> bool:
        if text is None:
            return False
        return text in self.texts or (bool(self.numbers) and _parse_number(text) in self.numbers)


@dataclass(frozen=True, slots=True)
class Selector:
    """Alternatives, of which at least one must match. An alternative matches if all its conditions match."""

    alternatives: tuple[tuple[Expression, ...], ...]

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the labels that the selector uses, in lower case."""
        return frozenset(condition.key for conditions in self.alternatives for condition in conditions)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the selector selects a card with these labels; the keys of `labels` must be in lower case."""
        return any(
            all(condition.matches(labels.get(condition.key)) for condition in conditions)
            for conditions in self.alternatives
        )


def parse(selector: object, field: str = "spec.selector") -> Selector:
    """A selector from its decoded JSON, a map or a list of maps. Raises InvalidRequest."""
    if isinstance(selector, Mapping):
        _check_size([selector], field)
        return Selector((_parse_conditions(selector, field),))
    if isinstance(selector, list) and selector:
        _check_size(selector, field)
        return Selector(
            tuple(_parse_conditions(alternative, f"{field}[{i}]") for i, alternative in enumerate(selector))
        )
    if selector is None or selector == []:
        raise _empty_error(field)
    raise InvalidRequest(
        field, f"{quote_text(selector)} is not a selector", "write a map with matchLabels or matchExpressions"
    )


def _empty_error(field: str) -> InvalidRequest:
    return InvalidRequest(
        field,
        "an empty selector would select every GPU",
        "write matchLabels or matchExpressions with at least one entry",
    )


def _check_size(alternatives: list[object] | list[Mapping[str, object]], field: str) -> None:
    """Check the size of a selector before its parts are parsed. Raises InvalidRequest."""
    conditions = values_count = 0
    for alternative in alternatives:
        parts = [alternative.get(name) for name in _FIELDS] if isinstance(alternative, Mapping) else []
        for part in parts:
            conditions += len(part) if isinstance(part, Mapping | list) else 0
            for expression in part if isinstance(part, list) else ():
                operands = expression.get("values") if isinstance(expression, Mapping) else None
                values_count += len(operands) if isinstance(operands, list) else 0
    if conditions > MAX_CONDITIONS:
        remedy = f"write at most {MAX_CONDITIONS} in all alternatives together; one In takes many values"
        raise InvalidRequest(field, f"{conditions} conditions are too many for a selector", remedy)
    if values_count > MAX_VALUES:
        remedy = f"write at most {MAX_VALUES} in all conditions together, or select the GPUs by another label"
        raise InvalidRequest(field, f"{values_count} values are too many for a selector", remedy)


def _parse_conditions(selector: object, field: str) -> tuple[Expression, ...]:
    if not isinstance(selector, Mapping):
        raise InvalidRequest(
            field, f"{quote_text(selector)} is not a selector", "write a map with matchLabels or matchExpressions"
        )
    for name in selector:
        if name not in _FIELDS:
            raise InvalidRequest(f"{field}.{name}", "is not a field of a selector", f"write {' or '.join(_FIELDS)}")
    labels = selector.get("matchLabels") or {}
    if not isinstance(labels, Mapping):
        raise InvalidRequest(
            f"{field}.matchLabels", f"{quote_text(labels)} is not a map", "write a map such as model: Tesla K80"
        )
    expressions = selector.get("matchExpressions") or []
    if not isinstance(expressions, list):
        raise InvalidRequest(
            f"{field}.matchExpressions",
            f"{quote_text(expressions)} is not a list",
            f"write a list of maps with {', '.join(_EXPRESSION_FIELDS)}",
        )
    parsed_expressions = [
        _parse_equal(key, label_value, f"{field}.matchLabels[{key}]") for key, label_value in labels.items()
    ]
    parsed_expressions += [
        _parse_expression(expression, f"{field}.matchExpressions[{i}]") for i, expression in enumerate(expressions)
    ]
    if not parsed_expressions:
        raise _empty_error(field)
    return tuple(parsed_expressions)


def _parse_equal(key: str, text: object, field: str) -> Expression:
    return _parse_in(_parse_key(key, field), "In", [_parse_text(text, field)])


def _parse_in(key: str, name: str, texts: list[str]) -> Expression:
    numbers = frozenset(number for number in map(_parse_number, texts) if number is not None)
    return Expression(key=key, operator=name, texts=frozenset(texts), numbers=numbers)


def _parse_expression(fields: object, field: str) -> Expression:
    if not isinstance(fields, Mapping):
        raise InvalidRequest(
            field, f"{quote_text(fields)} is not an expression", f"write a map with {', '.join(_EXPRESSION_FIELDS)}"
        )
    for name in fields:
        if name not in _EXPRESSION_FIELDS:
            remedy = f"write {', '.join(_EXPRESSION_FIELDS)}"
            raise InvalidRequest(f"{field}.{name}", "is not a field of an expression", remedy)
    key = _parse_key(fields.get("key"), f"{field}.key")
    name, operands = fields.get("operator"), fields.get("values")
    if not isinstance(name, str) or name not in _OPERATORS:
        problem = "is missing" if name is None else f"{quote_text(name)} is not an operator"
        raise InvalidRequest(f"{field}.operator", problem, f"write one of {', '.join(_OPERATORS)}")
    field = f"{field}.values"
    if name in _PRESENCE_OPERATORS:
        if operands is not None and operands != []:
            raise InvalidRequest(field, f"{name} takes no values", "leave them out, or write In or NotIn")
        return Expression(key=key, operator=name)
    if name in _COMPARISON_OPERATORS:
        return Expression(key=key, operator=name, bound=_parse_bound(name, operands, field))
    if not isinstance(operands, list) or not operands:
        problem = (
            f"{name} needs values" if operands is None or operands == [] else f"{quote_text(operands)} is not a list"
        )
        raise InvalidRequest(field, problem, "write a list of at least one value, such as [Tesla K80]")
    return _parse_in(key, name, [_parse_text(operand, f"{field}[{i}]") for i, operand in enumerate(operands)])


def _parse_key(key: object, field: str) -> str:
    if not isinstance(key, str) or not key:
        problem = "is missing" if key is None else f"{quote_text(key)} is not a label"
        raise InvalidRequest(field, problem, "write a label of the GPU, such as model, memory or driver")
    return key.lower()


def _parse_bound(name: str, operands: object, field: str) -> Fraction:
    remedy = "write one quantity, such as 10GiB, 1480 or 3.5"
    if operands is None or (isinstance(operands, list) and len(operands) != 1):
        raise InvalidRequest(field, f"{name} takes exactly one value", remedy)
    if isinstance(operands, list):
        operands, field = operands[0], f"{field}[0]"
    try:
        return amounts.parse_quantity(_parse_text(operands, field))
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, remedy) from error


def _parse_text(scalar: object, field: str) -> str:
    """A value as text, because label values are text, while YAML reads `8.6` and `0` as numbers."""
    if isinstance(scalar, str):
        return scalar
    if isinstance(scalar, int | float) and not isinstance(scalar, bool):
        return str(scalar)
    raise InvalidRequest(
        field, f"{quote_text(scalar)} is neither text nor a number", "write text, in quotes where YAML needs them"
    )


def _parse_number(text: str) -> Fraction | None:
    """The text as a number; None if it is not one. Long texts are not parsed, so that they do not fill the cache."""
    return _parse_short_number(text) if len(text) <= _MAX_NUMBER_LENGTH else None


@lru_cache(maxsize=_MAX_CACHED_NUMBERS)
def _parse_short_number(text: str) -> Fraction | None:
    try:
        return amounts.parse_quantity(text)
    except InvalidQuantity:
        return None
