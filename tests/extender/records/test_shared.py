"""Values that records share, and the memory that they take."""

import gc
import json
import tracemalloc

import pytest

from cardwise.core.api.classes import Classifier
from cardwise.kube.pods.budgets import Budgets, decode_budget
from extender.cache.membership import ClassMembership
from extender.records import cards, feasiblenodes, podinfo, shared
from extender.records.feasiblenodes import FeasibleNodes
from tests.build import budget, extended_resource, resource_class
from tests.extender.states import as_class

MIB = 1 << 20


def kept_mib(make, times: int) -> float:
    """The MiB that stay allocated after `make` was called this number of times, each time with a different number."""
    make(0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, times + 1):
            make(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / MIB
    finally:
        tracemalloc.stop()


def test_equal_labels_are_one_object():
    assert shared.reuse_equal_labels({"a": "1", "b": "2"}) is shared.reuse_equal_labels({"b": "2", "a": "1"})
    assert shared.reuse_equal_texts(["a", "b"]) is shared.reuse_equal_texts(("a", "b"))
    long = {"a": "x" * 5000}
    assert shared.reuse_equal_labels(long) == long
    assert shared.reuse_equal_texts(["x" * 5000]) == ("x" * 5000,)


def test_labels_of_pods_that_are_gone_take_no_memory():
    def read_pod(number: int) -> None:
        metadata = {"name": "p", "namespace": "d", "uid": "u", "labels": {"a": f"{number:07d}" + "x" * MIB}}
        podinfo.decode_pod(json.dumps({"metadata": metadata, "spec": {"nodeName": "n"}}).encode())

    assert kept_mib(read_pod, 20) < 3


def test_labels_of_pods_take_little_memory_and_stay_protected():
    records = []

    def read_pod(number: int) -> None:
        labels = {f"{number}-{i}": "x" * 63 for i in range(9000)}
        metadata = {"name": "p", "namespace": "d", "uid": "u", "labels": labels}
        _, record = podinfo.decode_pod(json.dumps({"metadata": metadata, "spec": {"nodeName": "n"}}).encode())
        records.append(record)

    assert kept_mib(read_pod, 5) < 1
    budgets = Budgets()
    assert budgets.covering_keys("d", records[0].labels) == (), "the namespace has none"
    manifest = budget("other", allowed=1, selector={"matchLabels": {"a": "b"}}, namespace="d")
    key, budget_of_others = decode_budget(json.dumps(manifest).encode())
    budgets.set_budget(key, budget_of_others)
    keys = budgets.covering_keys("d", records[0].labels)
    assert budgets.allowed_disruptions(keys) == {"d/": 0}
    assert budget_of_others.covers(records[0].labels), "a change of the budget may concern the pod"


def test_labels_and_classes_that_a_card_had_take_no_memory():
    def read_card(number: int) -> None:
        card = extended_resource(0, node="n", properties={"driverversion": f"{number:07d}" + "x" * MIB})
        card["status"] = {**card.get("status", {}), "classes": [f"{number:07d}" + "x" * MIB]}
        cards.decode_card(json.dumps(card).encode())

    assert kept_mib(read_card, 20) < 5


def test_constraints_of_pods_that_are_gone_take_no_memory():
    grounds = FeasibleNodes()

    def show_constraints(number: int) -> None:
        key = feasiblenodes.constraints_key({"nodeSelector": {"a": f"{number:07d}" + "x" * MIB}})
        grounds.record_search(key, {}, feasiblenodes.search(key, {}, lambda: None))

    assert kept_mib(show_constraints, 20) < 3


@pytest.mark.parametrize("size", [8, 1000])
def test_models_and_labels_that_a_card_had_take_no_memory(size):
    membership = ClassMembership([as_class(resource_class("new", selector={"matchLabels": {"driverversion": "550"}}))])
    classifier = Classifier([as_class(resource_class("new", selector={"matchLabels": {"driverversion": "550"}}))])

    def change(number: int) -> None:
        text = f"{number:08d}" + "x" * (size - 8)
        _, record = cards.decode_card(
            json.dumps(extended_resource(0, node="n", model=text[:240], properties={"driverversion": text})).encode()
        )
        membership.classes_of(record)
        classifier.classes_of({"model": text[:240], "driverversion": text})

    for number in range(10_000):
        change(number)
    tables = [membership._members, membership._interned, classifier._class_of_model]
    tables += [table for group in membership._groups for table in (group._classes_by_labels, group._interned)]
    assert max(map(len, tables)) <= 16_384
    assert len(classifier._classes_by_labels) == (10_000 if size < 512 else 0)
    assert max(len(membership._members), len(membership._interned), len(classifier._class_of_model)) <= 4096
