"""ResourceClasses and GPUQuotas: what cannot be read is told from what can, and an object that is none raises."""

import json

import msgspec
import pytest

from cardwise.kube.objects import gpuquotas, resourceclasses
from cardwise.kube.objects.unreadable import Unreadable
from tests.build import gpu_quota, resource_class


def encode(manifest):
    return json.dumps(manifest).encode()


def test_a_class_is_a_class_or_says_why_not():
    record = resourceclasses.decode(encode(resource_class("k80", model="Tesla K80")))
    assert (record.name, record.resource_class, record.problem) == ("k80", record.parsed, None)
    record = resourceclasses.decode(encode(resource_class("k80") | {"spec": {"selector": {}}}))
    assert (record.resource_class, record.parsed) == (None, Unreadable(record.problem))
    assert "empty selector" in record.problem


def test_a_quota_is_a_quota_or_says_why_not():
    record = gpuquotas.decode(encode(gpu_quota({"shares": 1}) | {"status": {"used": [{"shares": 3}]}}))
    assert (record.key, record.quota, record.problem) == ("default/team", record.parsed, None)
    assert record.used["", ""].shares == 3
    record = gpuquotas.decode(encode(gpu_quota({"shares": -1})))
    assert (record.quota, record.parsed) == (None, Unreadable(record.problem))
    assert "spec.hard[0].shares" in record.problem


@pytest.mark.parametrize("raw", [b"[]", b"{", b'{"metadata": 7}'])
def test_what_is_no_object_raises(raw):
    for decode in (resourceclasses.decode, gpuquotas.decode):
        with pytest.raises((msgspec.DecodeError, KeyError)):
            decode(raw)
