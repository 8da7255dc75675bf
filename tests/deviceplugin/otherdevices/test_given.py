"""What containers get of devices that are not GPUs, alone and beside cards."""

import json
import os
from pathlib import Path

import yaml

from cardwise.core.api import names
from cardwise.core.api.assignment import CardShare
from cardwise.core.values.quantity import MiB
from cardwise.devices.protocol import DeviceNode, OtherDevice
from cardwise.gpus.protocol import DevicePath, GpuCard
from deviceplugin.grants import cdi
from deviceplugin.grants.access import Delivery
from deviceplugin.grants.grants import GrantedDevice
from deviceplugin.grants.hardware import Hardware
from tests.deviceplugin.claimedpods import ClaimedPod
from tests.deviceplugin.conftest import PODS_HERE
from tests.deviceplugin.otherdevices.machines import FIRST, FPGA, SECOND, bind, given_devices
from tests.deviceplugin.records import grant


class TestWhatAContainerGets:
    def test_a_card_and_devices_in_one_spec(self, machine, rig):
        pod = bind(rig, "a", {"0": [("rdma", SECOND), ("my.fpga-x", FPGA)]}, {"0": (1, 4000)})
        slot = rig.run(pod, "c0")
        assert given_devices(rig, slot) == [
            "/dev/nvidia1",
            "/dev/infiniband/umad2",
            "/dev/infiniband/uverbs1",
            "/dev/infiniband/rdma_cm",
            "/dev/vfio/42",
            "/dev/vfio/vfio",
        ]
        nodes = {node["path"]: node for node in rig.edits(slot)["deviceNodes"]}
        own = nodes["/dev/infiniband/uverbs1"]
        assert own["hostPath"] == f"{machine.tree.dev}/infiniband/uverbs1"
        number = Path(own["hostPath"]).stat().st_rdev
        assert (own["major"], own["minor"], own["type"]) == (os.major(number), os.minor(number), "c")
        env = rig.env(slot)
        assert env["CARDWISE_MEM_LIMIT_MIB"] == "4000"
        assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert env["PCIDEVICE_CARDWISE_DEV_RDMA"] == "0000:3b:00.1"
        assert env["PCIDEVICE_CARDWISE_DEV_MY_FPGA_X"] == "0000:d8:00.0"
        assert env["CARDWISE_RDMA_DEVICES"] == "mlx5_1"

    def test_devices_alone_open_no_card(self, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST), ("rdma", SECOND)]})
        slot = rig.run(pod, "c0")
        assert rig.env(slot) == {
            "NVIDIA_VISIBLE_DEVICES": "void",
            "PCIDEVICE_CARDWISE_DEV_RDMA": "0000:3b:00.0,0000:3b:00.1",
            "CARDWISE_RDMA_DEVICES": "mlx5_0,mlx5_1",
        }
        assert given_devices(rig, slot).count("/dev/infiniband/rdma_cm") == 1
        assert len(given_devices(rig, slot)) == 5
        annotations = rig.api.get(f"{PODS_HERE}/a")["metadata"]["annotations"]
        assert names.ASSIGNED not in annotations, "gpushare's mark is for cards"

    def test_two_containers_get_their_own(self, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST)], "1": [("rdma", SECOND)]}, {"1": (0, 100)})
        first, second = rig.run(pod, "c0"), rig.run(pod, "c1")
        assert rig.env(first)["CARDWISE_RDMA_DEVICES"] == "mlx5_0"
        assert "CARDWISE_MEM_LIMIT_MIB" not in rig.env(first)
        assert rig.env(second)["CARDWISE_RDMA_DEVICES"] == "mlx5_1"
        assert "/dev/nvidia0" not in given_devices(rig, first)
        assert "/dev/nvidia0" in given_devices(rig, second)

    def test_a_device_without_nodes_is_named(self, machine, rig):
        card = machine.tree.pci("0000:5e:00.0", "8086", "1572", "020000", driver="i40e", net=["eth0"])
        machine.file.write_text('devices: [{kind: nic, pci: {vendor: "8086"}}]')
        machine.healthy("pci-n1-0000-5e-00.0")
        slot = rig.run(bind(rig, "a", {"0": [("nic", f"pci-n1-{card.name.replace(':', '-')}")]}), "c0")
        assert given_devices(rig, slot) == []
        assert rig.env(slot)["PCIDEVICE_CARDWISE_DEV_NIC"] == "0000:5e:00.0"

    def test_a_pod_of_cards_only_is_as_ever(self, rig):
        slot = rig.run(rig.bind("a", [(0, 100)]))
        assert given_devices(rig, slot) == ["/dev/nvidia0"]
        assert not [name for name in rig.env(slot) if name.startswith(("PCIDEVICE_", "CARDWISE_RDMA"))]


def test_the_edits_of_a_real_card_and_of_devices_together(tmp_path):
    nvidia = {
        "cdiVersion": "0.7.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "GPU-0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
        "containerEdits": {"mounts": [{"hostPath": "/lib/libcuda.so", "containerPath": "/lib/libcuda.so"}]},
    }
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(nvidia))
    path = DevicePath("/dev/nvidia0", "/dev/nvidia0")
    card = GpuCard(index=0, uuid="GPU-0", model="m", memory=MiB(1000), devices=(path,))
    device = OtherDevice(
        kind="rdma", index=0, uuid="rdma-1", model="m", nodes=(DeviceNode("/dev/null", "/dev/infiniband/uverbs0"),)
    )
    delivery = Delivery(tmp_path / "cdi", cdi.NvidiaSpecs([tmp_path / "nvidia.yaml"]))
    here = Hardware({"GPU-0": card}, {"rdma-1": device})
    share, given_devices = CardShare(0, "GPU-0", 100, 0, 1000), GrantedDevice("rdma", "rdma-1")

    def delivered(shares: tuple[CardShare, ...]) -> tuple[str, list[str], list]:
        env = grant(shares=shares, pod_shares=shares, devices=(given_devices,), pod_devices=(given_devices,))
        delivery.deliver_grant(env, here)
        spec = json.loads(cdi.spec_path(tmp_path / "cdi", "s001").read_text())
        edits = spec["devices"][0]["containerEdits"]
        return spec["cdiVersion"], [node["path"] for node in edits["deviceNodes"]], edits.get("mounts", [])

    mounts = nvidia["containerEdits"]["mounts"]
    assert delivered((share,)) == ("0.7.0", ["/dev/nvidia0", "/dev/infiniband/uverbs0"], mounts)
    assert delivered(()) == ("0.6.0", ["/dev/infiniband/uverbs0"], []), "no card, no driver"


class TestByClaim:
    """The same devices, allocated by ResourceClaim."""

    def test_a_container_gets_its_devices_and_no_other(self, machine, rig):
        devices = {"first": [("rdma", SECOND), ("my.fpga-x", FPGA)], "second": [("rdma", FIRST)]}
        pod = ClaimedPod(rig, "a", {"first": [(1, 4000)], "second": []}, devices=devices)
        first, second = pod.prepare()
        assert (first.devices[0], len(first.devices), len(second.devices)) == ("gpu-1", 3, 1)
        assert pod.nodes("first")[:2] == ["/dev/nvidia1", "/dev/infiniband/umad2"]
        assert "/dev/vfio/42" in pod.nodes("first")
        assert not [node for node in pod.nodes("second") if "nvidia" in node or "vfio" in node]
        assert pod.env("second")["CARDWISE_RDMA_DEVICES"] == "mlx5_0"

    def test_a_device_that_fails_blocks_its_container_alone(self, machine, rig):
        pod = ClaimedPod(
            rig, "a", {"first": [], "second": []}, devices={"first": [("rdma", FIRST)], "second": [("rdma", SECOND)]}
        )
        pod.run("first", "second")
        machine.tree.port(machine.ports[1], 1, "1: DOWN")
        rig.settle()
        assert f"({SECOND}) is unhealthy" in pod.blocked("second")
        assert pod.blocked("first") == ""
        machine.tree.port(machine.ports[1], 1, "4: ACTIVE")
        rig.settle()
        assert pod.blocked("second") == ""
