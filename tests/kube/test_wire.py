"""Objects are trimmed before they are made into dicts."""

import json

import pytest

from cardwise.kube import wire

META = {
    "name": "p",
    "generateName": "p-",
    "namespace": "n",
    "uid": "u",
    "resourceVersion": "7",
    "generation": 1,
    "creationTimestamp": None,
    "deletionTimestamp": "2026-01-01T00:00:00Z",
    "deletionGracePeriodSeconds": 30,
    "labels": {"a": "b"},
    "annotations": {"a": '\u00e4 " '},
    "ownerReferences": [{"controller": True}],
    "finalizers": ["f"],
}
MANAGED = {"managedFields": [{"manager": "m", "fieldsV1": {"f:x": {}}}]}


@pytest.mark.parametrize("read", ["spec", "status", "template", "target"])
def test_read_fields_are_unchanged(read: str) -> None:
    manifest = {"apiVersion": "v1", "kind": "K", "metadata": META, read: {"x": [1, None, {}]}}
    assert json.loads(wire.trim_object(json.dumps(manifest).encode())) == manifest
    fat = json.dumps(manifest | {"metadata": META | MANAGED, "other": 1}).encode()
    assert json.loads(wire.trim_object(fat)) == manifest
    assert json.loads(wire.trim_object(fat, managed_fields=True)) == manifest | {"metadata": META | MANAGED}


def test_absent_fields_stay_absent() -> None:
    for manifest in ({}, {"metadata": {}}, {"spec": None}, {"metadata": {"labels": None}}):
        assert json.loads(wire.trim_object(json.dumps(manifest).encode())) == manifest


def test_unread_depth_is_ignored() -> None:
    deep = b'{"metadata":{"name":"p","managedFields":' + b"[" * 9_000 + b"]" * 9_000 + b"}}"
    assert wire.trim_object(deep) == b'{"metadata":{"name":"p"}}'


def test_only_managed_fields_are_removed() -> None:
    manifest = {
        "kind": "ConfigMap",
        "metadata": META | {"selfLink": "x"},
        "data": {"a": '"managedFields"'},
        "items": None,
    }
    fat = json.dumps(manifest | {"metadata": manifest["metadata"] | MANAGED}).encode()
    assert json.loads(wire.drop_managed_fields(fat)) == manifest
    deep = b'{"metadata":{"managedFields":' + b"[" * 9_000 + b"]" * 9_000 + b'},"data":{}}'
    assert wire.drop_managed_fields(deep) == b'{"metadata":{},"data":{}}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"data":{"x":1},  "metadata":{}}',
        b'["managedFields"]',
        b'{"metadata":null,"managedFields":[]}',
        b'{"items":[{"metadata":{"managedFields":[]}}]}',
        b'{"metadata":{"managedFields":[}',
    ],
)
def test_object_without_managed_fields_is_unchanged(raw: bytes) -> None:
    assert wire.drop_managed_fields(raw) == raw
