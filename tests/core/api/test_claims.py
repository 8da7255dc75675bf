import contextlib
import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api import assignment as codec
from cardwise.core.api import claims, names, request, shareagent
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.api.claims import InvalidClaim
from cardwise.core.values.invalid import InvalidRequest
from tests.build import container, pod, shares

NAME = "cardwise-0123456789abcdef"
MOMENT = "2026-11-30T12:00:00Z"


def claiming(name, **resources):
    manifest = container(name, **resources)
    manifest["resources"]["claims"] = [{"name": "cardwise", "request": name}]
    return manifest


def claiming_pod(*containers, init=()):
    manifest = pod("p", containers=list(containers))
    manifest["metadata"] |= {"namespace": "default", "uid": "uid-p"}
    manifest["spec"] |= {
        "resourceClaims": [{"name": "cardwise", "resourceClaimName": NAME}],
        "initContainers": list(init),
    }
    return manifest


def allocated(manifest, assignment, node="n1"):
    pod_of_claim = claims.read_pod(manifest)
    assert pod_of_claim is not None
    status = claims.new_status(pod_of_claim, assignment, node, MOMENT)
    return claims.new_claim(pod_of_claim, assignment) | {"status": status}


ONE = Assignment({"0": shares(900, 1)})


def allocated_one():
    return allocated(claiming_pod(claiming("main", gpu_mem=900)), ONE)


def test_the_claim_of_one_share():
    assert allocated_one() == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": NAME,
            "namespace": "default",
            "annotations": {},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": False}],
        },
        "spec": {"devices": {"requests": [{"name": "main", "exactly": {"deviceClassName": "cardwise.dev"}}]}},
        "status": {
            "allocation": {
                "allocationTimestamp": MOMENT,
                "nodeSelector": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
                    ]
                },
                "devices": {
                    "results": [{"request": "main", "driver": "cardwise.dev", "pool": "n1", "device": "gpu-1"}],
                    "config": [
                        {
                            "source": "FromClaim",
                            "requests": ["main"],
                            "opaque": {
                                "driver": "cardwise.dev",
                                "parameters": {"v": 1, "containers": {"0": [[1, "GPU-n1-1", 900, 0, 16276]]}},
                            },
                        }
                    ],
                },
            },
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "uid-p"}],
        },
    }


def test_several_cards_are_counted_and_the_share_agent_has_no_share():
    agent = claiming(shareagent.CONTAINER_NAME) | {"restartPolicy": "Always"}
    manifest = claiming_pod(claiming("main", gpu_mem=1800), claiming("nic"), init=[agent])
    assignment = Assignment({"0": shares(900, 2, 3)}, {"1": (AssignedDevice("nic", "0000:81:00.0"),)})
    claim = allocated(manifest, assignment)
    several = {"deviceClassName": "cardwise.dev", "allocationMode": "ExactCount", "count": 2}
    assert [entry["exactly"] for entry in claim["spec"]["devices"]["requests"]][1] == several
    allocation = claims.decode(claim)
    assert allocation is not None
    assert (allocation.assignment, allocation.node) == (assignment, "n1")
    assert allocation.keys == {"cardwise-agent": None, "main": "0", "nic": "1"}
    devices = [entry["device"] for entry in claim["status"]["allocation"]["devices"]["results"]]
    assert devices == ["gpu-2", "gpu-2", "gpu-3", claims.other_device("0000:81:00.0")]


card_shares = st.builds(
    CardShare,
    index=st.integers(0, 15),
    uuid=st.text("0123456789abcdef-", min_size=1, max_size=40),
    mem=st.integers(1, 200_000),
    core=st.integers(0, 100),
    total=st.integers(1, 200_000),
    whole=st.booleans(),
)
devices = st.builds(AssignedDevice, st.text("abc.", min_size=1, max_size=9), st.text(min_size=1, max_size=30))
parts = st.one_of(
    st.tuples(st.lists(card_shares, min_size=1, max_size=4), st.lists(devices, max_size=2)),
    st.tuples(st.just([]), st.lists(devices, min_size=1, max_size=2)),
    st.none(),  # a container without a GPU
)


@st.composite
def pods_with_assignments(draw):
    containers, cards, others = {"init-": [], "": []}, {}, {}
    for prefix, manifest in containers.items():
        for i, part in enumerate(draw(st.lists(parts, max_size=2))):
            name = f"c{prefix.strip('-')}{i}"
            manifest.append(claiming(name) if part else container(name))
            if part and part[0]:
                cards[f"{prefix}{i}"] = tuple(part[0])
            if part and part[1]:
                others[f"{prefix}{i}"] = tuple(part[1])
    for manifest in containers["init-"]:
        manifest["restartPolicy"] = "Always"
    return claiming_pod(*containers[""], init=containers["init-"]), Assignment(cards, others)


@given(pods_with_assignments(), st.from_regex(r"[a-z0-9]{1,20}(\.[a-z0-9]{1,20})?", fullmatch=True))
def test_round_trip(case, node):
    manifest, assignment = case
    if sum(map(len, assignment.containers.values())) + sum(map(len, assignment.devices.values())) > claims.MAX_DEVICES:
        with pytest.raises(InvalidRequest, match="in total"):
            allocated(manifest, assignment)
        return
    claim = json.loads(json.dumps(allocated(manifest, assignment, node)))
    if not assignment.containers and not assignment.devices:
        with pytest.raises(InvalidClaim, match="names no GPU"):
            claims.decode(claim)
        return
    allocation = claims.decode(claim)
    assert allocation is not None
    assert (allocation.node, allocation.pod_uid, allocation.pod_name) == (node, "uid-p", "p")
    assert allocation.assignment == assignment == codec.decode(codec.encode(assignment, assume_time_ns=0))
    assert set(allocation.keys.values()) == {*assignment.containers, *assignment.devices}
    assert claims.is_ours(claim)


@given(st.data())
def test_any_damage_is_an_invalid_claim_and_nothing_else(data):
    claim = copy.deepcopy(allocated_one())
    path, field = [], claim
    while isinstance(field, (dict, list)) and field and (len(path) < 2 or data.draw(st.booleans())):
        path.append(data.draw(st.sampled_from(sorted(field) if isinstance(field, dict) else range(len(field)))))
        field = field[path[-1]]
    parent = claim
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = data.draw(st.sampled_from([None, "", "x", 7, [], {}, [{}], [None], {"a": "b"}, {"v": 1}, -1]))
    with contextlib.suppress(InvalidClaim):
        allocation = claims.decode(claim)
        assert allocation is None or allocation.assignment == ONE or "config" in path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda status: status.update(reservedFor=[]), r"status\.reservedFor: does not name exactly one pod"),
        (lambda status: status["reservedFor"][0].update(uid="thief"), "pod 'p' does not own the claim"),
        (lambda status: status["allocation"].pop("nodeSelector"), "nodeSelector: does not name exactly one node"),
        (lambda status: status["allocation"]["devices"]["results"][0].update(pool="n2"), r"results\[0\]: is a device"),
        (lambda status: status["allocation"]["devices"]["results"][0].update(device="gpu-9"), "differ from the param"),
        (lambda status: status["allocation"]["devices"].update(config=[]), "has no entry for 'main'"),
        (
            lambda status: status["allocation"]["devices"]["config"][0]["opaque"].update(parameters={"v": 2}),
            "has version 2, this program reads 1",
        ),
    ],
)
def test_a_wrong_claim_names_field_and_remedy(change, message):
    claim = allocated_one()
    change(claim["status"])
    with pytest.raises(InvalidClaim, match=message) as caught:
        claims.decode(claim)
    assert "delete the pod" in str(caught.value)


def test_a_claim_without_an_allocation_is_none():
    assert claims.decode(allocated_one() | {"status": {}}) is None
    assert claims.decode(allocated_one() | {"status": None}) is None


def test_a_container_with_a_gpu_must_name_the_claim_and_no_other_may():
    with pytest.raises(InvalidRequest, match="container 0 has no entry cardwise"):
        allocated(claiming_pod(container("main", gpu_mem=900)), ONE)
    with pytest.raises(InvalidRequest, match="container 1 has the entry cardwise"):
        allocated(claiming_pod(claiming("main", gpu_mem=900), claiming("other")), ONE)


def test_a_request_that_is_not_the_containers_name_is_refused():
    manifest = claiming_pod(claiming("main", gpu_mem=900))
    del manifest["spec"]["containers"][0]["resources"]["claims"][0]["request"]
    with pytest.raises(InvalidRequest, match=r"claims\[0\]\.request: '' is not the container's name"):
        claims.claiming_containers(manifest)


def test_the_name_of_a_claim():
    assert claims.format_name(bytes(range(8))) == "cardwise-0001020304050607"
    assert claims.claim_name(claiming_pod()) == NAME
    assert claims.claim_name(pod()) is None
    forged = claiming_pod()
    forged["spec"]["resourceClaims"][0]["resourceClaimName"] = "cardwise-mine"
    with pytest.raises(InvalidRequest, match=r"resourceClaims\[0\]\.resourceClaimName: 'cardwise-mine' is not"):
        claims.claim_name(forged)


def test_more_than_a_claim_can_have_is_refused():
    claims.check_size({f"c{i}": 1 for i in range(32)})
    with pytest.raises(InvalidRequest, match="33 containers use a GPU"):
        claims.check_size({f"c{i}": 1 for i in range(33)})
    with pytest.raises(InvalidRequest, match="33 GPUs and devices in total"):
        claims.check_size({"a": 32, "agent": 0})


def test_claims_of_other_classes_are_not_ours():
    claim = allocated_one()
    claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "gpu.nvidia.com"
    assert not claims.is_ours(claim)
    assert not claims.is_ours({"spec": {"devices": {"requests": [{"name": "a", "firstAvailable": []}]}}})


def test_a_pod_with_a_claim_needs_no_slot():
    manifest = claiming_pod(claiming("main", gpu_mem=900))
    assert request.parse_mutated(manifest) is not None
    del manifest["spec"]["containers"][0]["resources"]["claims"]
    with pytest.raises(request.NotRewritten):
        request.parse_mutated(manifest)


def test_names_that_kubernetes_allows():
    assert names.ALLOCATION_GATE.startswith("cardwise.dev/")
    assert all(len(claims.other_device(uuid)) <= 63 for uuid in ("", "x" * 300))
