"""An ExtendedResource is decoded whole, and one malformed share does not make its card unreadable."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import (
    Allocated,
    ContainerShare,
    ExtendedResource,
    ExtendedResourceStatus,
    MpsStatus,
)
from tests.build import extended_resource

CRD = Path(__file__).parents[3] / "helm" / "cardwise" / "files" / "crds" / "extendedresources.yaml"
SHARE = {"podUID": "uid-a", "namespace": "n", "name": "p", "memoryMiB": 7, "corePercent": 5, "container": "0"}


def decode(status):
    return extendedresources.decode(json.dumps(extended_resource(0) | {"status": status}).encode())


def field_names(struct):
    return {field.encode_name for field in msgspec.structs.fields(struct)}


@pytest.mark.parametrize(
    ("struct", "path"),
    [
        (ExtendedResourceStatus, "status"),
        (Allocated, "status.allocated"),
        (MpsStatus, "status.mps"),
        (ContainerShare, "status.reported.items"),
        (ContainerShare, "status.terminating.items"),
        (extendedresources.ExtendedResourceSpec, "spec"),
        (extendedresources.Cordon, "spec.cordon"),
    ],
)
def test_the_record_has_the_fields_of_the_schema(struct, path):
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for key in path.split("."):
        schema = schema["items"] if key == "items" else schema["properties"][key]
    assert field_names(struct) == set(schema["properties"])


def test_a_malformed_share_is_no_pods_and_the_others_stay():
    decoded = decode({"reported": [SHARE, {"podUID": 7}, "x", SHARE | {"podUID": "uid-b"}], "terminating": [{}, SHARE]})
    assert [share.uid for share in decoded.status.reported] == ["uid-a", "", "", "uid-b"]
    assert [share.uid for share in extendedresources.reported_shares(decoded)] == ["uid-a", "uid-b"]
    assert [share.uid for share in extendedresources.terminating_shares(decoded)] == ["uid-a"]


def test_null_in_the_status_counts_as_absent_beside_a_malformed_share():
    decoded = decode({"classes": None, "terminating": None, "mps": None, "reported": ["x"]})
    assert decoded.status == ExtendedResourceStatus(reported=(ContainerShare(uid=""),))


def test_a_status_that_cannot_be_read_otherwise_is_an_error():
    with pytest.raises(msgspec.ValidationError):
        decode({"health": 7})


def test_a_reported_share_has_no_more_than_its_card():
    reported = {"podUID": "uid-a", "memoryMiB": 99_999_999, "corePercent": 100}
    (share,) = extendedresources.reported_shares(decode({"reported": [reported]}))
    assert (share.whole, share.mem) == (False, extended_resource(0)["spec"]["memoryMiB"])


def test_records_of_equal_objects_are_equal():
    status = {"reported": [SHARE], "allocated": {"memoryMiB": 7}, "mps": {"state": "Ready"}}
    assert decode(status) == decode(status)
    assert isinstance(decode(status), ExtendedResource)
