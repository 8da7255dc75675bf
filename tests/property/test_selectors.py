"""Selectors against a slow reading of docs/design/0003 that shares no code with them, and names of classes."""

import json
import re
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import classes, names, selectors
from cardwise.core.api.classes import Classifier
from tests.examples import examples

KEYS = ["memory", "model", "clock"]
COMPARE = {"Gt": lambda s: s > 0, "Lt": lambda s: s < 0, "GtEq": lambda s: s >= 0, "LtEq": lambda s: s <= 0}
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "m": Decimal("0.001")}
UNITS |= {f"{p}i{b}": 1024**n for n, p in enumerate("KMGTP", start=1) for b in ("", "B")}

# Few numbers in many spellings, so that equal and almost equal ones meet.
quantities = st.builds(
    lambda number, unit: f"{number}{unit}",
    st.sampled_from(["0", "1", "1.0", "2", "1024", "1023", "1025", "0.5", ".5", "1000"]),
    st.sampled_from(sorted(UNITS)),
)
texts = st.one_of(quantities, st.sampled_from(["", "Tesla K80", "tesla k80", "535.104.05", "1GB", "1e3", "-1", "Gi"]))
keys = st.sampled_from(KEYS).flatmap(lambda key: st.sampled_from([key, key.upper(), key.title()]))
expressions = st.one_of(
    st.builds(
        lambda key, operator, operands: {"key": key, "operator": operator, "values": operands},
        keys, st.sampled_from(["In", "NotIn"]), st.lists(texts, min_size=1, max_size=3),
    ),
    st.builds(
        lambda key, operator: {"key": key, "operator": operator}, keys, st.sampled_from(["Exists", "DoesNotExist"])
    ),
    st.builds(
        lambda key, operator, operand, bare: {
            "key": key, "operator": operator, "values": operand if bare else [operand]
        },
        keys, st.sampled_from(sorted(COMPARE)), quantities, st.booleans(),
    ),
)  # fmt: skip
conditions = st.builds(
    lambda labels, wanted: {"matchLabels": labels, "matchExpressions": wanted},
    st.dictionaries(keys, texts, max_size=2),
    st.lists(expressions, max_size=3),
).filter(lambda term: term["matchLabels"] or term["matchExpressions"])
written = st.one_of(conditions, st.lists(conditions, min_size=1, max_size=3))
cards = st.dictionaries(st.sampled_from(KEYS), texts)


def number(text):
    """The quantity by hand: digits, then a unit or an exponent."""
    parsed = re.match(r"^(-?[0-9]*\.?[0-9]*)(.*)$", text)
    digits, unit = parsed.groups()
    if not any(c.isdigit() for c in digits):
        return None
    if unit.startswith("e"):
        return Decimal(digits) * 10 ** int(unit[1:])
    return Decimal(digits) * UNITS[unit] if unit in UNITS else None


def same(first, other):
    return first == other or (number(first) is not None and number(first) == number(other))


def holds(labels, key, operator, operands):
    label = labels.get(key.lower())
    if operator in ("Exists", "DoesNotExist"):
        return (label is not None) == (operator == "Exists")
    if operator in ("In", "NotIn"):
        return (label is not None and any(same(label, wanted) for wanted in operands)) == (operator == "In")
    bound = number(operands if isinstance(operands, str) else operands[0])
    return label is not None and number(label) is not None and COMPARE[operator](number(label) - bound)


def selected(labels, selector):
    if isinstance(selector, list):
        return any(selected(labels, term) for term in selector)
    return all(holds(labels, key, "In", [amount]) for key, amount in selector["matchLabels"].items()) and all(
        holds(labels, term["key"], term["operator"], term.get("values")) for term in selector["matchExpressions"]
    )


@given(selector=written, of_cards=st.lists(cards, min_size=1, max_size=5))
@settings(max_examples=examples(150, soak=3000), deadline=None)
def test_a_selector_selects_as_specified(selector, of_cards):
    parsed = selectors.parse(selector)
    for labels in of_cards:
        assert parsed.matches(labels) == selected(labels, selector)


@given(selector=written, labels=cards)
@settings(deadline=None)
def test_only_the_keys_that_it_names_matter(selector, labels):
    parsed = selectors.parse(selector)
    seen = {key: amount for key, amount in labels.items() if key in parsed.keys}
    assert parsed.matches(labels) == parsed.matches(seen)


@given(of_classes=st.lists(written, max_size=4), of_cards=st.lists(cards, max_size=12))
@settings(deadline=None)
def test_a_classifier_equals_its_selectors_one_by_one(of_classes, of_cards):
    parsed = [
        classes.parse({"metadata": {"name": f"c{i}"}, "spec": {"selector": selector, "priority": i - 1}})
        for i, selector in enumerate(of_classes)
    ]
    classifier = Classifier(parsed)
    for labels in of_cards + of_cards:
        expected = {f"c{i}" for i, selector in enumerate(of_classes) if selected(labels, selector)}
        # Of the class that a model has by its name, another test tells.
        assert classifier.classes_of(labels) - classifier.automatic_class_of(labels.get("model", "")) == expected
        assert classifier.priority_of(expected) == max((int(name[1:]) - 1 for name in expected), default=0)


# What NVML says: most often product names, but it is any text.
models = st.one_of(
    st.text(),
    st.text(alphabet="NVIDAnvidia .-_/()0123456789", max_size=96),
    st.lists(st.sampled_from(["NVIDIA", "Tesla", "A100-SXM4-80GB", "MIG 1g.5gb", "-", "."])).map(" ".join),
)


@given(model=models)
@settings(max_examples=examples(150, soak=3000), deadline=None)
def test_every_model_has_a_class_of_a_valid_name_and_a_valid_label(model):
    name = classes.name_of_model(model)
    classes.check_name(name)
    assert name.startswith("nvidia.")
    assert re.fullmatch(r"nvidia-[a-z0-9]([-a-z0-9]{0,54}[a-z0-9])?", classes.accelerator_of_model(model))


@given(model=models)
@settings(deadline=None)
def test_the_automatic_class_of_a_model_selects_its_cards(model):
    manifest = {"metadata": {"name": classes.name_of_model(model)}, "spec": classes.auto_spec(model)}
    card = classes.card_labels(node="n1", index=0, uuid="GPU-1", model=model, memory=1, properties={}, own={})
    assert classes.parse(manifest).selector.matches(card)


@given(of_cards=st.lists(models, min_size=1, max_size=4), kept=st.sets(st.integers(0, 3)), edited=st.booleans())
@settings(deadline=None)
def test_a_card_is_in_the_class_of_its_model_unless_a_person_has_made_it(of_cards, kept, edited):
    """Whatever automatic classes have an object, and of which spellings of their models."""
    by_name = {}
    for model in of_cards:
        by_name.setdefault(classes.name_of_model(model), []).append(model)
    there = []
    for i, (name, spellings) in enumerate(sorted(by_name.items())):
        if i in kept:
            spec = classes.auto_spec(spellings[0])
            written = {} if edited else spec
            metadata = {
                "name": name,
                "labels": {names.AUTO_LABEL: "true"},
                "annotations": {names.AUTO_SPEC: json.dumps(written)},
            }
            there.append(classes.parse({"metadata": metadata, "spec": spec}))
    classifier = Classifier(there)
    theirs = {known_class.name: known_class for known_class in there if edited}
    for model in of_cards:
        card = classes.card_labels(node="n1", index=0, uuid="GPU-1", model=model, memory=1, properties={}, own={})
        name = classes.name_of_model(model)
        inside = theirs[name].selector.matches(card) if name in theirs else bool(model) or _selects(there, name, card)
        assert classifier.classes_of(card) == ({name} if inside else set())
        assert [known_class.name for known_class in classifier.select_classes(card)] == sorted(
            classifier.classes_of(card)
        )


def _selects(there, name, card):
    return any(known_class.name == name and known_class.selector.matches(card) for known_class in there)
