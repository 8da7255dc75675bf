"""Who does not get a device that is not a GPU, and why."""

import grpc

from deviceplugin.grants.access import Access
from tests.deviceplugin.conftest import PODS, Rig, refusal
from tests.deviceplugin.otherdevices.machines import FIRST, FPGA, SECOND, bind, grants_on_disk


class TestRefusals:
    def refused(self, rig: Rig, pod: dict) -> str:
        code, message = refusal(lambda: rig.run(pod, "c0"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        return message

    def test_a_device_that_another_holds(self, rig):
        first = bind(rig, "first", {"0": [("rdma", FIRST)]})
        rig.run(first, "c0")
        message = self.refused(rig, bind(rig, "second", {"0": [("fpga", FPGA), ("rdma", FIRST)]}))
        assert message == f"device {FIRST} is still held by default/first (uid {first['metadata']['uid']})"
        rig.run(bind(rig, "third", {"0": [("fpga", FPGA)]}), "c0")  # what was refused holds nothing

    def test_what_the_second_container_will_need_is_held_from_the_first_on(self, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST)], "1": [("rdma", SECOND)]})
        rig.run(pod, "c0")
        assert f"device {SECOND} is still held by default/a" in self.refused(
            rig, bind(rig, "b", {"0": [("rdma", SECOND)]})
        )
        rig.run(pod, "c1")

    def test_one_device_for_two_containers(self, rig):
        message = self.refused(rig, bind(rig, "a", {"0": [("rdma", FIRST)], "1": [("rdma", FIRST)]}))
        assert f"was given device {FIRST} twice" in message

    def test_a_device_that_is_not_here(self, rig):
        message = self.refused(rig, bind(rig, "a", {"0": [("rdma", "rdma-gone")]}))
        assert "device rdma-gone of class rdma is not on this node (any more), or --devices leaves it out" in message

    def test_a_sick_device(self, machine, rig):
        machine.tree.port(machine.ports[0], 1, "1: DOWN")
        pod = bind(rig, "a", {"0": [("rdma", FIRST)]})
        slot = rig.kubelet.admit(pod, "c0")
        _, message = refusal(lambda: rig.kubelet.pre_start(slot))
        assert f"rdma 0 ({FIRST}) is unhealthy: no port of mlx5_0 is ACTIVE" in message
        assert grants_on_disk(rig) == []
        machine.tree.port(machine.ports[0], 1, "4: ACTIVE")
        rig.kubelet.pre_start(slot)

    def test_without_cdi(self, machine):
        machine.rig.access = Access.ENV
        rig = machine.start()
        assert "CDI" in machine.healthy(FIRST, is_healthy=False)["reason"]
        message = self.refused(rig, bind(rig, "a", {"0": [("rdma", FIRST)]}, {"0": (0, 100)}))
        assert "other than GPUs need CDI" in message
        rig.run(rig.bind("cards", [(0, 100)]))

    def test_a_container_without_anything(self, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST)]})
        with rig.api.changed:
            pod["spec"]["containers"].append({"name": "other", "resources": {}})
            pod = rig.api.write_object(PODS, pod)
        _, message = refusal(lambda: rig.run(pod, "other"))
        assert "no GPU or device for container 'other'" in message
