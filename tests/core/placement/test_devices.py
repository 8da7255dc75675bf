"""Which devices other than GPUs a pod gets on a node, and the refusal of a node with too few."""

import pytest

from cardwise.core.api.request import DeviceRequest
from cardwise.core.placement.devices import WantedDevices, is_valid_grant, sort_devices
from cardwise.core.values.refusals import Refusal
from tests.core.others import device, devices, holding, uuid


def wanted_devices(*requests):
    """`("0", "rdma", 2)`, and so on."""
    return WantedDevices([DeviceRequest(*device_request) for device_request in requests])


def grants_of(here, used, *requests):
    grants = wanted_devices(*requests).grant(here, used)
    if isinstance(grants, Refusal):
        return grants
    return {key: [(share.resource_class, share.uuid) for share in shares] for key, shares in grants[1].items()}


def test_containers_get_free_devices_in_their_order_the_lowest_first():
    here = devices(5)
    assert grants_of(here, {uuid(1): 1}, ("0", "rdma", 1), ("2", "rdma", 2)) == {
        "0": [("rdma", "rdma-n1-0")],
        "2": [("rdma", "rdma-n1-2"), ("rdma", "rdma-n1-3")],
    }


def test_a_container_gets_devices_of_several_classes():
    here = [*devices(2, kind="nic"), *devices(2)]
    assert grants_of(here, {}, ("0", "nic", 1), ("0", "rdma", 2)) == {
        "0": [("nic", "nic-n1-0"), ("rdma", "rdma-n1-0"), ("rdma", "rdma-n1-1")]
    }


def test_a_device_of_two_classes_is_left_to_the_class_that_has_no_other():
    here = [device(0, "any", "fast"), device(1, "any")]
    assert grants_of(here, {}, ("0", "any", 1), ("0", "fast", 1)) == {
        "0": [("any", "rdma-n1-1"), ("fast", "rdma-n1-0")]
    }


def test_exchanges_may_go_through_several_classes():
    here = [device(0, "a", "c"), device(1, "a", "b"), device(2, "b")]
    assert grants_of(here, {}, ("0", "a", 1), ("0", "b", 1), ("0", "c", 1)) == {
        "0": [("a", "rdma-n1-1"), ("b", "rdma-n1-2"), ("c", "rdma-n1-0")]
    }


def test_after_exchanges_the_lowest_still_go_to_the_first_container():
    here = [device(0, "t"), device(1, "a", "t"), device(2, "a")]
    assert grants_of(here, {}, ("0", "a", 1), ("1", "t", 1), ("2", "t", 1)) == {
        "0": [("a", "rdma-n1-2")],
        "1": [("t", "rdma-n1-0")],
        "2": [("t", "rdma-n1-1")],
    }


def test_only_healthy_devices_without_a_holder_are_free():
    here = [device(0, healthy=False), *devices(4)[1:]]
    assert wanted_devices(("0", "rdma", 2)).available(here, {uuid(2): 1}) == 2
    assert grants_of(here, {uuid(2): 1}, ("0", "rdma", 2)) == {"0": [("rdma", "rdma-n1-1"), ("rdma", "rdma-n1-3")]}


def test_only_devices_of_the_classes_asked_for_are_counted():
    here = [*devices(3, kind="nic"), *devices(2)]
    assert wanted_devices(("0", "rdma", 1)).available(here, {}) == 2
    assert wanted_devices(("0", "rdma", 1), ("0", "nic", 1)).available(here, {}) == 5


@pytest.mark.parametrize(
    ("here", "used", "requests", "reason"),
    [
        ([], {}, [("0", "rdma", 1)], Refusal.NO_SUCH_DEVICE),
        (devices(3, kind="nic"), {}, [("0", "rdma", 1)], Refusal.NO_SUCH_DEVICE),
        (devices(1), {}, [("0", "rdma", 2)], Refusal.NO_SUCH_DEVICE),
        (devices(1), {}, [("0", "rdma", 1), ("1", "rdma", 1)], Refusal.NO_SUCH_DEVICE),
        (devices(2, "a", "b"), {}, [("0", "a", 2), ("1", "b", 1)], Refusal.NO_SUCH_DEVICE),
        # The number of devices is enough, but no assignment to the classes exists.
        (
            [device(0, "a", "b"), device(1, "c"), device(2, "c")],
            {},
            [("0", "a", 1), ("0", "b", 1), ("0", "c", 1)],
            Refusal.NO_SUCH_DEVICE,
        ),
        (devices(2), {uuid(0): 1}, [("0", "rdma", 2)], Refusal.NO_DEVICE),
        (devices(1, healthy=False), {}, [("0", "rdma", 1)], Refusal.NO_DEVICE),
        ([device(0, "a", "b"), device(1, "b")], {uuid(1): 1}, [("0", "a", 1), ("0", "b", 1)], Refusal.NO_DEVICE),
        (devices(2), {}, [("0", "rdma", 10**12)], Refusal.NO_SUCH_DEVICE),
    ],
)
def test_the_refusal_of_a_node_with_too_few_devices_tells_whether_waiting_helps(here, used, requests, reason):
    assert wanted_devices(*requests).available(here, used) is reason
    assert grants_of(here, used, *requests) is reason
    assert reason.resolvable == (reason is Refusal.NO_DEVICE)


def test_many_devices_of_one_class_are_no_effort():
    here = devices(1024, "vf", "any")
    granted = grants_of(here, {}, ("0", "vf", 512), ("1", "any", 512))
    assert [len(granted[key]) for key in "01"] == [512, 512]


def test_the_order_of_a_nodes_devices_is_that_of_their_numbers():
    shuffled = [device(10), device(2), device(2, kind="nic"), device(0)]
    assert [device.uuid for device in sort_devices(shuffled)] == ["nic-n1-2", "rdma-n1-0", "rdma-n1-2", "rdma-n1-10"]


@pytest.mark.parametrize(
    ("here", "used", "good"),
    [
        (devices(2), {uuid(0): 1, uuid(1): 1}, True),
        (devices(1), {uuid(0): 1, uuid(1): 1}, False),  # one is gone
        ([device(0), device(1, healthy=False)], {uuid(0): 1, uuid(1): 1}, False),
        ([device(0), device(1, "other")], {uuid(0): 1, uuid(1): 1}, False),
        (devices(2), {uuid(0): 1, uuid(1): 2}, False),  # another pod was given it as well
    ],
)
def test_a_plan_is_valid_while_its_devices_exist_and_no_other_pod_holds_them(here, used, good):
    assert is_valid_grant(holding("u", 0, 1).assignment, here, used) is good
