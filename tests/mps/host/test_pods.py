"""Who holds what, who does without MPS, and when each ends."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.quantity import MiB
from cardwise.core.values.timestamps import EARLIEST, LATEST
from cardwise.gpus.protocol import GpuCard
from mps.daemon import units
from mps.daemon.units import DaemonUnit
from mps.host import drivers, pods
from mps.host.pods import CardDemand, PodView
from tests.mps import records

CARDS = [GpuCard(index=i, uuid=f"GPU-{i}", model="m", memory=MiB(16276), devices=()) for i in range(2)]


def pod(uid: str, *holdings: tuple[str, int], **changes: object) -> PodView:
    return records.pod(uid, {"0": tuple(records.share(int(card[-1]), mem) for card, mem in holdings)}, **changes)


def test_demands_of_cards():
    demands = pods.compute_demands(
        [
            pod("a", ("GPU-0", 5), ("GPU-0", 7)),
            pod("b", ("GPU-0", 9), finished=True),
            pod("c", ("GPU-1", 3), without_mps=True),
            pod("d", ("GPU-0", 8), ends_at=1.0),  # it is being deleted, and its programs run
        ],
        CARDS,
    )
    assert demands == {"GPU-0": CardDemand((5, 7, 8), without_mps=False), "GPU-1": CardDemand((3,), without_mps=True)}
    mixed = pods.compute_demands([pod("a", ("GPU-0", 5)), pod("c", ("GPU-0", 3), without_mps=True)], CARDS)
    assert not mixed["GPU-0"].without_mps, "who wants limits gets them"
    assert mixed["GPU-1"] == CardDemand((), without_mps=False), "an empty card is on"


def test_a_pod_with_whole_cards_only_is_without_mps_where_each_card_has_a_daemon():
    whole = replace(records.share(0, 16276), whole=True)
    alone = records.pod("a", {"0": (whole,)})
    beside_a_share = records.pod("b", {"0": (whole,), "1": (records.share(1, 5),)})
    for view, scope, without_mps in (
        (alone, DaemonScope.CARD, True),
        (alone, DaemonScope.NODE, False),
        (beside_a_share, DaemonScope.CARD, False),
    ):
        assert pods.compute_demands([view], CARDS, scope)["GPU-0"].without_mps is without_mps


def test_a_pod_of_gpushare_is_known_by_the_cards_index():
    wire = {
        "metadata": {
            "uid": "u",
            "name": "p",
            "namespace": "d",
            "annotations": {"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "700"},
        },
        "status": {"phase": "Running"},
    }
    assert pods.compute_demands([pods.parse_pod(json.dumps(wire).encode())], CARDS)["GPU-1"] == CardDemand(
        (700,), without_mps=False
    )


def test_a_pod_that_cannot_be_read_holds_nothing():
    wire = {
        "metadata": {"uid": "u", "name": "p", "annotations": {"cardwise.dev/assignment": "{", names.ISOLATION: "none"}}
    }
    seen = pods.parse_pod(json.dumps(wire).encode())
    assert (seen.assignment.shares(), seen.without_mps, seen.ends_at) == ([], True, None)


@pytest.mark.parametrize(
    ("times", "ends_at", "deadline"),
    [
        # A tenant who may patch pods/status writes 9999-12-31T23:59:59-23:59; the API server returns this.
        ({"status": {"startTime": "10000-01-01T23:58:59Z"}}, None, LATEST.timestamp() + 60),
        ({"status": {"startTime": "0000-01-01T00:00:00Z"}}, None, EARLIEST.timestamp() + 60),
        ({"deletionTimestamp": "10000-01-01T00:00:00Z"}, LATEST.timestamp(), None),
    ],
)
def test_a_pod_with_a_time_that_python_does_not_have_keeps_its_share(times, ends_at, deadline):
    share = records.share(0, 700)
    metadata = {"uid": "u", "name": "p", "namespace": "d"}
    wire = {
        "metadata": metadata | {"annotations": assignment.encode(Assignment({"0": (share,)}), assume_time_ns=1)},
        "spec": {"activeDeadlineSeconds": 60},
        "status": times.get("status", {}),
    }
    wire["metadata"] |= {key: time for key, time in times.items() if key != "status"}
    pod = pods.parse_pod(json.dumps(wire).encode())
    assert (pod.ends_at, pod.deadline) == (ends_at, deadline)
    assert pods.compute_demands([pod], CARDS)["GPU-0"].shares == (700,)


def test_containers_have_their_keys_and_what_the_runtime_calls_them():
    wire = {
        "metadata": {"uid": "u", "name": "p", "annotations": {}},
        "spec": {"initContainers": [{"name": "i"}, {"name": "side"}], "containers": [{"name": "a"}, {"name": "b"}]},
        "status": {
            "initContainerStatuses": [{"name": "side", "containerID": "cri-o://c1"}],
            "containerStatuses": [{"name": "b", "containerID": "containerd://c2"}, {"name": "a"}],
        },
    }
    seen = pods.parse_pod(json.dumps(wire).encode())
    assert [(container.key, container.name, container.runtime_id) for container in seen.containers] == [
        ("init-0", "i", ""),
        ("init-1", "side", "c1"),
        ("0", "a", ""),
        ("1", "b", "c2"),
    ]
    assert seen.cgroup_uid == "u"


def test_when_the_kubelet_ends_it_by_itself():
    wire = {
        "metadata": {"uid": "u", "name": "p", "annotations": {}},
        "spec": {"activeDeadlineSeconds": 90, "terminationGracePeriodSeconds": 5},
        "status": {"startTime": "1970-01-01T00:01:00Z"},
    }
    seen = pods.parse_pod(json.dumps(wire).encode())
    assert (seen.deadline, seen.spec_grace, seen.ends_at) == (150.0, 5.0, None)
    for missing in ("spec", "status"):
        assert pods.parse_pod(json.dumps(wire | {missing: {}}).encode()).deadline is None
    assert pods.parse_pod(json.dumps(wire | {"spec": {}}).encode()).spec_grace == 30.0


def test_a_static_pods_groups_have_another_name():
    wire = {"metadata": {"uid": "mirror", "name": "p", "annotations": {"kubernetes.io/config.mirror": "5ad0"}}}
    assert pods.parse_pod(json.dumps(wire).encode()).cgroup_uid == "5ad0"


@pytest.mark.parametrize(
    ("version", "multi_user", "server_status", "max_clients"),
    [
        ("535.261.03", False, False, 48),
        ("550.163.01", False, True, 48),
        ("570.1", False, True, 48),
        ("580.95.05", True, True, 48),
        ("595.99.02", True, True, 60),
        ("615.71.09", True, True, 60),
        ("", False, False, 48),
        ("nonsense", False, False, 48),
    ],
)
def test_what_drivers_can(version, multi_user, server_status, max_clients):
    demands = drivers.capabilities_of(version)
    assert (demands.multi_user, demands.server_status) == (multi_user, server_status)
    assert demands.max_clients(CARDS[0]) == max_clients
    old = GpuCard(index=0, uuid="g", model="P100", memory=MiB(1), devices=(), properties={"computeCapability": "6.0"})
    assert demands.max_clients(old) == 16


def test_a_daemon_sees_its_cards_by_uuid_and_in_their_order():
    unit = DaemonUnit(name="node", home=Path("/mps/node"), scope=DaemonScope.NODE, cards=tuple(CARDS))
    assert units.daemon_environment(unit)["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"


@pytest.mark.parametrize(
    ("version", "too_old"), [("470.256.02", True), ("534.1", True), ("535.1", False), ("615.71.09", False), ("", False)]
)
def test_drivers_that_are_too_old(version, too_old):
    assert drivers.is_too_old(version) is too_old


@pytest.mark.parametrize(("driver", "has"), [("580", True), ("550", False)])
def test_multi_user_mode_is_used_where_the_program_has_it_and_we_may(monkeypatch, driver, has):
    from tests.mps.mpsnode import DOUBLE

    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", driver)
    table = drivers.capabilities_of("580.1")
    assert drivers.refine_capabilities(table, DOUBLE, root=True).multi_user is has
    assert not drivers.refine_capabilities(table, DOUBLE, root=False).multi_user


def test_class_of_a_container_is_its_resource_or_the_pods_annotation():
    limits = {"cardwise.dev/fast": "1", "aliyun.com/gpu-mem": "1000"}
    containers = [{"name": "a", "resources": {"limits": limits}}, {"name": "b", "resources": {}}, {"name": "c"}]
    pod = {"metadata": {"name": "p", "annotations": {names.CLASS: "slow"}}, "spec": {"containers": containers}}
    views = pods.parse_pod(json.dumps(pod).encode()).containers
    assert [view.resource_class for view in views] == ["fast", "slow", "slow"]


@pytest.mark.parametrize("name", ["a\u2028b", "a" * 49, "A_b", "cardwise.dev/x", "x" * 1_400_000])
def test_a_class_that_is_no_name_of_a_class_is_any_class(name):
    wire = {
        "metadata": {"uid": "u", "name": "p", "annotations": {names.CLASS: name}},
        "spec": {"containers": [{"name": "a"}, {"name": "b", "resources": {"limits": {f"{names.CLASS_PREFIX}t4": 1}}}]},
    }
    assert [view.resource_class for view in pods.parse_pod(json.dumps(wire).encode()).containers] == ["", "t4"]
    wire["metadata"]["annotations"][names.CLASS] = "k80"
    assert [view.resource_class for view in pods.parse_pod(json.dumps(wire).encode()).containers] == ["k80", "t4"]
