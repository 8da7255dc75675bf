"""Calls whose fields have other types than Kubernetes' are refused as malformed, and cause no unforeseen error."""

import json

import pytest

from extender.api import verbs
from extender.records.wire import Malformed, decode_filter_args
from tests.extender.gangcluster import PREFERENCES, World, member

FIELDS = [
    *(("metadata", name) for name in ("name", "namespace", "uid", "labels", "annotations", "ownerReferences")),
    *(("spec", name) for name in ("priority", "schedulerName", "affinity", "topologySpreadConstraints")),
    *(("spec", name) for name in ("containers", "initContainers", "securityContext", "schedulingGroup")),
    ("status", "nominatedNodeName"),
]
VALUES = [1, 1.5, True, "x", [1], ["x"], [None], {"a": 1}, {"name": 3}, {"nodeAffinity": 5}, {"podAffinity": ["x"]}]


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_a_field_of_another_type_is_refused_or_ignored(part, name):
    world = World({"n1": 1})
    for wrong in VALUES:
        pod = member("p", gated=False, gpu_mem=100)
        pod[part][name] = wrong
        body = json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode()
        try:
            args = decode_filter_args(body)
        except Malformed:
            continue
        verbs.filter_nodes(world.state, PREFERENCES, args)
