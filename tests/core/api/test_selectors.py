import pytest

from cardwise.core.api import selectors
from cardwise.core.values.invalid import InvalidRequest

K80 = {"kind": "nvidia-gpu", "model": "Tesla K80", "memory": "11441Mi", "clock": "875", "driver": "535.104.05"}


def expression(key, operator, *operands):
    return {"key": key, "operator": operator} | ({"values": list(operands)} if operands else {})


def matches(labels, *expressions):
    return selectors.parse({"matchExpressions": list(expressions)}).matches(labels)


def test_all_labels_and_expressions_must_hold():
    conjunction = {"matchLabels": {"model": "Tesla K80"}, "matchExpressions": [expression("memory", "Gt", "10GiB")]}
    assert selectors.parse(conjunction).matches(K80)
    assert not selectors.parse(conjunction).matches(K80 | {"memory": "5Gi"})
    assert not selectors.parse(conjunction).matches(K80 | {"model": "Tesla K40"})


def test_one_alternative_of_a_list_must_match():
    either = selectors.parse([
        {"matchLabels": {"model": "Tesla V100"}},
        {"matchExpressions": [expression("memory", "GtEq", "11Gi"), expression("clock", "Lt", 900)]},
    ])  # fmt: skip
    assert either.matches(K80)
    assert either.matches({"model": "Tesla V100"})
    assert not either.matches(K80 | {"clock": "900"})
    assert either.keys == {"model", "memory", "clock"}


@pytest.mark.parametrize(
    ("operator", "less", "equal", "larger"),
    [
        ("Gt", False, False, True),
        ("GtEq", False, True, True),
        ("Lt", True, False, False),
        ("LtEq", True, True, False),
    ],
)
def test_quantities_compare_as_numbers(operator, less, equal, larger):
    greater = expression("memory", operator, "10GiB")
    matched = [matches({"memory": memory}, greater) for memory in ("9999Mi", "10240Mi", "10241MiB")]
    assert matched == [less, equal, larger]


@pytest.mark.parametrize("operator", ["Gt", "GtEq", "Lt", "LtEq"])
@pytest.mark.parametrize("labels", [{}, {"driver": "535.104.05"}, {"driver": ""}])
def test_missing_or_non_numeric_labels_match_no_comparison(operator, labels):
    assert not matches(labels, expression("driver", operator, "1"))


@pytest.mark.parametrize(("unit", "text"), [("KiB", "1024"), ("MiB", "1024Ki"), ("TiB", "1024GiB"), ("PiB", "1024TiB")])
def test_units_with_a_b(unit, text):
    assert matches({"memory": f"1{unit}"}, expression("memory", "In", text))


def test_equal_amounts_are_equal_however_they_are_written():
    assert matches({"memory": "16276Mi"}, expression("memory", "In", "16276MiB"))
    assert not matches({"memory": "16276Mi"}, expression("memory", "NotIn", "16276MiB"))
    assert selectors.parse({"matchLabels": {"memory": "16Gi"}}).matches({"memory": "16384Mi"})
    assert not selectors.parse({"matchLabels": {"memory": "16Gi"}}).matches({"memory": "16276Mi"})


def test_yaml_numbers_are_read_as_text():
    assert matches({"computecapability": "8.6"}, expression("computeCapability", "In", 8.6))
    assert matches({"computecapability": "8.0"}, expression("computeCapability", "GtEq", 8))
    assert selectors.parse({"matchLabels": {"index": 0}}).matches({"index": "0"})


@pytest.mark.parametrize("text", ["10GiB", ["10GiB"], 10_737_418_240])
def test_single_comparison_value_needs_no_list(text):
    selector = selectors.parse({"matchExpressions": [{"key": "memory", "operator": "Gt", "values": text}]})
    assert selector.matches({"memory": "11Gi"})
    assert not selector.matches({"memory": "10Gi"})


def test_equal_selectors_are_equal():
    first = {"matchExpressions": [expression("memory", "In", "1Gi", "2Gi")]}
    other = {"matchExpressions": [expression("Memory", "In", "2Gi", "1Gi")], "matchLabels": {}}
    assert selectors.parse(first) == selectors.parse(other)
    assert selectors.parse(first) != selectors.parse(
        {"matchExpressions": [expression("memory", "NotIn", "1Gi", "2Gi")]}
    )


@pytest.mark.parametrize("empty", [None, {}, [], {"matchLabels": {}}, {"matchExpressions": []}, {"matchLabels": None}])
def test_an_empty_selector_is_refused(empty):
    with pytest.raises(
        InvalidRequest, match=r"^spec\.selector: an empty selector would select every GPU; write matchLabels"
    ):
        selectors.parse(empty)


def condition(*operands):
    return {"key": "model", "operator": "In", "values": list(operands)}


@pytest.mark.parametrize(
    ("large", "problem", "limit"),
    [
        ({"matchExpressions": [condition("a")] * 257}, "257 conditions are too many", 256),
        ([{"matchExpressions": [condition("a")] * 8}] * 33, "264 conditions are too many", 256),
        ([{"matchLabels": {f"k{i}": "x" for i in range(128)}}] * 3, "384 conditions are too many", 256),
        ({"matchExpressions": [condition(*map(str, range(4097)))]}, "4097 values are too many", 4096),
        ([{"matchExpressions": [condition(*range(512))] * 3}] * 3, "4608 values are too many", 4096),
    ],
)
def test_a_selector_that_is_too_large_is_refused_before_a_value_is_parsed(large, problem, limit, monkeypatch):
    monkeypatch.setattr(selectors, "_parse_number", None)
    with pytest.raises(InvalidRequest) as caught:
        selectors.parse(large, "spec.selector")
    assert caught.value.field == "spec.selector"
    assert caught.value.problem.startswith(problem)
    assert caught.value.remedy.startswith(f"write at most {limit} in all")


def test_a_selector_may_have_as_many_conditions_and_values_as_the_limits_say():
    labels = {f"k{i}": "x" for i in range(selectors.MAX_CONDITIONS - 1)}
    expressions = [condition(*range(selectors.MAX_VALUES))]
    (alternative,) = selectors.parse({"matchLabels": labels, "matchExpressions": expressions}).alternatives
    assert len(alternative) == selectors.MAX_CONDITIONS


def test_empty_alternative_error_names_its_index():
    with pytest.raises(InvalidRequest) as refused:
        selectors.parse([{"matchLabels": {"model": "x"}}, {}], "spec.resourceSelector")
    assert refused.value.field == "spec.resourceSelector[1]"


@pytest.mark.parametrize(
    ("selector", "field", "problem", "remedy"),
    [
        ("K80", "", "not a selector", "matchLabels"),
        (["K80"], "[0]", "not a selector", "matchLabels"),
        ({"matchLabel": {}}, ".matchLabel", "not a field", "matchLabels or matchExpressions"),
        ({"matchLabels": ["model"]}, ".matchLabels", "not a map", "model: Tesla K80"),
        ({"matchLabels": {"model": None}}, ".matchLabels[model]", "neither text nor a number", "quotes"),
        ({"matchLabels": {"ecc": True}}, ".matchLabels[ecc]", "neither text nor a number", "quotes"),
        ({"matchExpressions": {"key": "x"}}, ".matchExpressions", "not a list", "key, operator, values"),
        ({"matchExpressions": ["x"]}, ".matchExpressions[0]", "not an expression", "key, operator, values"),
    ],
)
def test_malformed_selector_error_names_the_field(selector, field, problem, remedy):
    with pytest.raises(InvalidRequest) as refused:
        selectors.parse(selector)
    assert refused.value.field == f"spec.selector{field}"
    assert problem in refused.value.problem
    assert remedy in refused.value.remedy


ALL_OPERATORS = "In, NotIn, Exists, DoesNotExist, Gt, Lt, GtEq, LtEq"


@pytest.mark.parametrize(
    ("bad_expression", "field", "problem", "remedy"),
    [
        (expression("memory", "Ge", "1"), "operator", "'Ge' is not an operator", ALL_OPERATORS),
        (expression("memory", "in", "1"), "operator", "'in' is not an operator", ALL_OPERATORS),
        ({"key": "memory"}, "operator", "is missing", ALL_OPERATORS),
        (expression("memory", ["In"], "1"), "operator", "is not an operator", ALL_OPERATORS),
        ({"operator": "Exists"}, "key", "is missing", "model, memory"),
        (expression("", "Exists"), "key", "is not a label", "model, memory"),
        (expression(7, "Exists"), "key", "is not a label", "model, memory"),
        (expression("memory", "Gt"), "values", "exactly one value", "10GiB"),
        (expression("memory", "Lt", "1", "2"), "values", "exactly one value", "10GiB"),
        (expression("memory", "GtEq", "much"), "values[0]", "'much' is not a quantity", "10GiB"),
        (expression("memory", "LtEq", "10GB"), "values[0]", "'10GB' is not a quantity", "10GiB"),
        (expression("memory", "LtEq", "10 GiB"), "values[0]", "'10 GiB' is not a quantity", "10GiB"),
        (expression("memory", "Gt") | {"values": "much"}, "values", "'much' is not a quantity", "10GiB"),
        (expression("memory", "Gt", False), "values[0]", "neither text nor a number", "quotes"),
        (expression("model", "In"), "values", "In needs values", "at least one value"),
        (expression("model", "NotIn") | {"values": []}, "values", "NotIn needs values", "at least one value"),
        (expression("model", "In") | {"values": "K80"}, "values", "'K80' is not a list", "at least one value"),
        (expression("model", "In", "a", None), "values[1]", "neither text nor a number", "quotes"),
        (expression("model", "Exists", "x"), "values", "Exists takes no values", "leave them out"),
        (expression("model", "DoesNotExist") | {"values": "x"}, "values", "DoesNotExist takes no values", "leave them"),
        (expression("model", "In", "x") | {"value": "x"}, "value", "not a field", "key, operator, values"),
    ],
)
def test_invalid_expression_error_names_the_field(bad_expression, field, problem, remedy):
    with pytest.raises(InvalidRequest) as refused:
        selectors.parse(
            [{"matchLabels": {"a": "b"}}, {"matchExpressions": [expression("a", "Exists"), bad_expression]}]
        )
    assert refused.value.field == f"spec.selector[1].matchExpressions[1].{field}"
    assert problem in refused.value.problem
    assert remedy in refused.value.remedy
