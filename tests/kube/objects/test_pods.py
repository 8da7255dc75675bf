"""A pod is decoded once, with the fields that all components read."""

import json

import msgspec
import pytest

from cardwise.core.api import mpsprofile, request
from cardwise.kube.objects import pods
from cardwise.kube.objects.meta import ObjectMeta
from tests import build


def decode(manifest):
    return pods.decode(json.dumps(manifest).encode())


def test_the_record_has_the_pods_request():
    manifest = build.pod("a", uid="u", gpu_mem=8138, share=1)
    assert request.parse_mutated(decode(manifest).to_json()) == request.parse_mutated(manifest)


def test_keys_of_containers_are_those_of_the_request():
    sidecar = build.container("side", gpu_mem=1) | {"restartPolicy": "Always"}
    manifest = build.pod("a", uid="u", init=[{"name": "setup"}, sidecar], containers=[{"name": "main"}])
    by_key = dict(decode(manifest).spec.containers_by_key())
    assert {key: container.name for key, container in by_key.items()} == {
        container.key: container.spec["name"] for container in request.containers(manifest)
    }
    assert [by_key[key].is_sidecar for key in ("init-0", "init-1", "0")] == [False, True, False]


def test_only_containers_with_cards_count_for_the_user_of_mps():
    containers = [{"name": f"c{uid}", "securityContext": {"runAsUser": uid}} for uid in (1000, 2000)]
    spec = pods.spec_of({"containers": containers})
    users = [pods.mps_client_of_pod(ObjectMeta(), spec, keys).user for keys in (["0"], ["1"], ["0", "1"], [])]
    assert users == [1000, 2000, mpsprofile.MIXED_USERS, mpsprofile.MIXED_USERS]


def test_a_mirror_pod_is_static():
    mirror = build.pod("a", uid="u", annotations={"kubernetes.io/config.mirror": "hash"})
    assert decode(mirror).static
    assert not decode(build.pod("a", uid="u")).static


@pytest.mark.parametrize(
    "wrong",
    [{"spec": {"containers": [{"name": 7}]}}, {"status": {"phase": []}}, {"metadata": {"labels": {"a": 1}}}, {}],
)
def test_a_pod_with_wrong_types_is_an_error(wrong):
    manifest = {"metadata": {}} | wrong if wrong else wrong
    with pytest.raises(msgspec.ValidationError):
        decode(manifest)
    with pytest.raises(msgspec.ValidationError):
        pods.record_of(manifest)


def test_what_the_api_server_leaves_out_or_writes_as_null_is_empty():
    pod = decode({"metadata": {"name": "a"}, "spec": {"containers": None, "priority": None}, "status": {}})
    assert (list(pod.spec.containers_by_key()), pod.status.all_containers(), pod.metadata.controller) == ([], (), None)
    assert not pod.finished
    assert not pod.terminating
