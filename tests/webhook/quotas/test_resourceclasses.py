"""ResourceClasses: spellings of the selector, errors and warnings."""

from typing import Any

import pytest

from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests.build import resource_class
from tests.webhook.reviews import Known, mutate_object, mutate_object_twice, on_validate
from webhook.cluster.cards import CardSizes
from webhook.server import review

K80 = {"matchLabels": {"model": "Tesla K80"}}
P100 = {"matchLabels": {"model": "Tesla P100"}}


def class_manifest(**spec: object) -> Json:
    return {"metadata": {"name": "mine"}, "spec": spec}


def validate_class(manifest: Json, *cards: Json) -> review.Decision:
    return on_validate(manifest, "resourceclasses", Known(card_labels=list(cards)))


@pytest.mark.parametrize("spelling", ["resourceSelector", "labelSelector", "selector"])
def test_the_selector_has_one_place(spelling: str) -> None:
    spelled = class_manifest(**{spelling: K80, "priority": 3})
    assert mutate_object_twice(spelled, "resourceclasses", Known()) == class_manifest(selector=K80, priority=3)


def test_a_manifest_with_the_other_spelling_can_be_applied_again() -> None:
    def applied(**spec: object) -> Json:
        return mutate_object(
            class_manifest(**spec), "resourceclasses", Known(), operation="UPDATE", old=class_manifest(selector=K80)
        )

    assert applied(selector=K80, resourceSelector=K80) == class_manifest(selector=K80)
    assert applied(selector=K80, resourceSelector=P100) == class_manifest(selector=P100)


def test_two_selectors_that_differ_are_refused() -> None:
    two = class_manifest(selector=K80, labelSelector=P100)
    assert mutate_object(two, "resourceclasses", Known()) == two
    assert validate_class(two).message.startswith("spec.labelSelector: spec.selector is also set")


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (resource_class("cpu"), "metadata.name: 'cpu' is reserved for another resource name"),
        (resource_class("x" * 49), "metadata.name: "),
        (class_manifest(), "spec.selector: an empty selector would select every GPU"),
        (class_manifest(selector=7), "spec.selector: 7 is not a selector"),
        (class_manifest(selector=K80, share={"memoryMiB": -1}), "spec.share.memoryMiB: "),
        ({"metadata": {"name": "mine"}}, "spec: is missing"),
    ],
)
def test_unparsable_class_error_names_the_field(manifest: Json, says: str) -> None:
    decision = validate_class(manifest)
    assert not decision.allowed
    assert decision.message.startswith(says)


def test_selector_without_a_match_gets_a_warning() -> None:
    assert validate_class(class_manifest(selector=K80), {"model": "Tesla K80"}).warnings == ()
    assert validate_class(class_manifest(selector=K80), {"model": "Tesla P100"}).warnings == (
        "spec.selector: does not match any GPU now; pods that request mine wait until one comes",
    )
    (warning,) = validate_class(
        class_manifest(selector={"matchLabels": {"modle": "Tesla K80"}}), {"model": "Tesla K80"}
    ).warnings
    assert warning.endswith("wait until one comes; did you mean model instead of modle?")


def test_a_class_that_takes_too_long_to_compare_is_allowed_without_these_warnings() -> None:
    """Any client that reaches the webhook may send it: a review of 64 alternatives blocked all threads for 5 s."""
    known = Known(cards_of={"mine": CardSizes(MiB(8))}, comparable=False)
    decision = on_validate(class_manifest(selector=K80, share={"memoryMiB": 1 << 30}), "resourceclasses", known)
    assert decision.allowed
    assert decision.warnings == ()


def test_the_cards_are_compared_once_for_all_warnings() -> None:
    known = Known(cards_of={"mine": CardSizes(MiB(8))})
    decision = on_validate(class_manifest(selector=K80, share={"memoryMiB": 1 << 30}), "resourceclasses", known)
    assert "does not match any" in str(decision.warnings)
    assert "more than the largest" in str(decision.warnings)
    assert known.compared == ["mine"]


def test_rounded_share_gets_a_warning() -> None:
    (warning,) = validate_class(
        class_manifest(selector=K80, share={"memoryMiB": "1.3GiB"}), {"model": "Tesla K80"}
    ).warnings
    assert warning == "spec.share.memoryMiB: 1.3Gi is not a whole number of MiB and counts as 1332Mi"


def class_with_comparison(operator: str, amount: object, key: str = "memory") -> Json:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": [amount]}]}


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        (class_with_comparison("Gt", "10"), "memory Gt 10 is read as bytes; write 10Gi "),
        (class_with_comparison("LtEq", 10240, "Memory"), "memory LtEq 10240 is read as bytes; write 10240Mi "),
        (class_with_comparison("In", "16276"), "memory In 16276 is read as bytes; write 16276Mi "),
        ([K80, {"matchLabels": {"memory": 16}}], "memory In 16 is read as bytes; write 16Gi "),
    ],
)
def test_memory_without_a_suffix_gets_a_warning(selector: Any, says: str) -> None:
    *_, warning = validate_class(class_manifest(selector=selector), {"model": "Tesla K80"}).warnings
    assert warning.startswith(f"spec.selector: {says}")


@pytest.mark.parametrize(
    "selector",
    [
        class_with_comparison("Gt", "10Gi"),
        class_with_comparison("Gt", "10GiB"),
        class_with_comparison("GtEq", 17_066_622_976),
        class_with_comparison("Gt", "0"),
        class_with_comparison("Gt", "10", "clock"),
        {"matchExpressions": [{"key": "memory", "operator": "Exists"}]},
    ],
)
def test_other_amounts_get_no_warning(selector: Json) -> None:
    assert validate_class(class_manifest(selector=selector), {"memory": "16276Mi", "clock": "875"}).warnings == ()


def test_share_larger_than_any_card_of_the_class_gets_a_warning() -> None:
    def warnings_for(memory: str, largest: int) -> tuple[str, ...]:
        known = Known(card_labels=[{"model": "Tesla K80"}], cards_of={"mine": CardSizes(MiB(largest), 1)})
        return on_validate(class_manifest(selector=K80, share={"memoryMiB": memory}), "resourceclasses", known).warnings

    (warning,) = warnings_for("40Gi", 16160)
    assert warning == (
        "spec.share.memoryMiB: 40960 is more than the largest GPU of the class has (16160); "
        "no pod gets mine until a larger one joins"
    )
    assert warnings_for("16160", 16160) == ()
    assert warnings_for("40Gi", 0) == ()
