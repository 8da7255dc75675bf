"""Discovery of devices in sysfs, with the layouts of real hardware."""

import pytest

from cardwise.devices.discovery import discover
from cardwise.devices.protocol import DeviceNode, OtherDevice
from cardwise.devices.settings import parse_rules
from tests.devices.trees import Tree, connectx5

RDMA = "devices: [{kind: rdma}]"


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def discover_devices(tree: Tree, text: str) -> list[OtherDevice]:
    return discover(parse_rules(text, "f"), tree.sysfs, tree.dev, "n1")


def nodes(device: OtherDevice) -> list[str]:
    """The device nodes as a container sees them; checks their paths on the host."""
    return [node.container for node in device.nodes]


def test_devices_without_a_rule_are_not_offered(tree):
    connectx5(tree)
    assert discover_devices(tree, "devices: []") == []


def test_machine_without_devices(tmp_path):
    assert discover(parse_rules(RDMA, "f"), tmp_path / "none", tmp_path, "n1") == []


class TestRdma:
    def test_a_connectx5_of_two_ports(self, tree):
        connectx5(tree)
        first, second = discover_devices(tree, RDMA)
        assert first == OtherDevice(
            kind="rdma",
            index=0,
            uuid="rdma-0c42-a103-0016-0542",
            model="MT4119",
            nodes=tuple(
                DeviceNode(str(tree.dev / "infiniband" / name), f"/dev/infiniband/{name}")
                for name in ("umad0", "uverbs0")
            ),
            common=(DeviceNode(str(tree.dev / "infiniband" / "rdma_cm"), "/dev/infiniband/rdma_cm"),),
            pci_address="0000:3b:00.0",
            name="mlx5_0",
            properties={
                "pciAddress": "0000:3b:00.0",
                "vendor": "15b3",
                "device": "1017",
                "class": "020700",
                "driver": "mlx5_core",
                "numaNode": "1",
                "name": "mlx5_0",
                "firmware": "16.35.2000",
                "board": "MT_0000000008",
                "netdev": "ib0",
                "linkLayer": "InfiniBand",
                "rate": "100",
            },
        )
        assert (second.index, second.name, nodes(second)) == (
            1,
            "mlx5_1",
            ["/dev/infiniband/umad2", "/dev/infiniband/uverbs1"],
        )
        assert second.problem == (
            "no port of mlx5_1 is ACTIVE: port 1 is DOWN; look at `rdma link`, the cable and the switch"
        )

    def test_one_device_of_two_ports_is_healthy_while_one_is_active(self, tree):
        pci_folder = tree.pci("0000:3b:00.0", "15b3", "1003", "028000", driver="mlx4_core", net=["ens1d1", "ens1"])
        ports = {1: "1: DOWN", 2: "4: ACTIVE"}
        folder = tree.rdma(
            "mlx4_0", pci_folder=pci_folder, guid="e41d:2d03:0000:0010", ports=ports, link_layer="Ethernet"
        )
        tree.port(folder, 1, "1: DOWN", "InfiniBand", "2.5 Gb/sec (1X SDR)")
        (device,) = discover_devices(tree, RDMA)
        assert device.problem is None
        assert nodes(device) == ["/dev/infiniband/umad0", "/dev/infiniband/umad1", "/dev/infiniband/uverbs0"]
        properties = {key: device.properties[key] for key in ("linkLayer", "rate", "netdev")}
        assert properties == {"linkLayer": "Ethernet", "rate": "100", "netdev": "ens1,ens1d1"}, "of the port that is up"
        assert device.model == "15b3:1003"
        tree.port(folder, 2, "2: INIT")
        (device,) = discover_devices(tree, RDMA)
        assert "port 1 is DOWN, port 2 is INIT" in device.problem

    def test_soft_roce_without_a_guid_is_named_by_its_node(self, tree):
        tree.rdma("rxe_0", parent="eth0", link_layer="Ethernet", rate="2.5 Gb/sec (1X SDR)")
        (device,) = discover_devices(tree, RDMA)
        assert (device.uuid, device.model, device.pci_address) == ("rdma-n1-rxe-0", "rxe_0", "")
        assert device.properties == {"name": "rxe_0", "netdev": "eth0", "linkLayer": "Ethernet", "rate": "2.5"}
        assert discover_devices(tree, 'devices: [{kind: rdma, pci: {vendor: "15b3"}}]') == []

    def test_duplicate_guid_is_not_used_as_a_name(self, tree):
        for number in range(2):
            pci_folder = tree.pci(f"0000:3b:00.{number}", "15b3", "101b", "020000")
            tree.rdma(f"mlx5_{number}", pci_folder=pci_folder, guid="0c42:a103:0016:0542", number=number)
        assert [device.uuid for device in discover_devices(tree, RDMA)] == ["rdma-n1-mlx5-0", "rdma-n1-mlx5-1"]

    def test_a_function_on_an_auxiliary_bus_belongs_to_its_pci_device(self, tree):
        pci_folder = tree.pci("0000:3b:00.0", "15b3", "101d", "020000", driver="mlx5_core")
        tree.rdma("mlx5_2", pci_folder=pci_folder / "mlx5_core.sf.2", guid="0c42:a103:0016:0600")
        (device,) = discover_devices(tree, RDMA)
        assert (device.pci_address, device.properties["vendor"]) == ("0000:3b:00.0", "15b3")

    def test_the_names_are_in_the_order_of_their_numbers(self, tree):
        for number in (10, 2):
            pci_folder = tree.pci(f"0000:{number:02x}:00.0", "15b3", "101b", "020000")
            tree.rdma(f"mlx5_{number}", pci_folder=pci_folder, guid=f"0:0:0:{number}", number=number)
        assert [(device.index, device.name) for device in discover_devices(tree, RDMA)] == [
            (0, "mlx5_2"),
            (1, "mlx5_10"),
        ]

    def test_rdma_device_without_uverbs_is_unhealthy(self, tree):
        connectx5(tree)
        (tree.sysfs / "class" / "infiniband_verbs" / "uverbs0").unlink()
        (tree.sysfs / "class" / "infiniband_mad" / "umad0").unlink()
        assert "load the module ib_uverbs" in discover_devices(tree, RDMA)[0].problem

    def test_unreadable_attribute_hides_no_other_device(self, tree):
        first, _ = connectx5(tree)
        for name in ("fw_ver", "ports/1/rate"):
            (first / name).unlink()
            (first / name).mkdir()  # reading the file fails, as if the firmware did not answer
        device, other = discover_devices(tree, RDMA)
        assert (device.problem, device.model, other.name) == (None, "MT4119", "mlx5_1")
        assert not {"firmware", "rate"} & device.properties.keys()


class TestPci:
    def test_fpga_bound_to_vfio(self, tree):
        tree.pci("0000:3b:00.0", "10ee", "9038", "120000", driver="vfio-pci", group="42", numa=0)
        tree.pci("0000:3c:00.0", "10ee", "9038", "120000")
        tree.misc("vfio", "10:196")
        first, second = discover_devices(tree, 'devices: [{kind: fpga, pci: {class: "1200"}}]')
        assert (first.uuid, first.model, first.index) == ("pci-n1-0000-3b-00.0", "10ee:9038", 0)
        assert nodes(first) == ["/dev/vfio/42"]
        assert [node.host for node in first.common] == [str(tree.dev / "vfio" / "vfio")]
        assert first.properties == {
            "pciAddress": "0000:3b:00.0",
            "vendor": "10ee",
            "device": "9038",
            "class": "120000",
            "driver": "vfio-pci",
            "numaNode": "0",
        }
        assert (nodes(second), second.common, second.problem) == ([], (), None), "no driver has it"

    def test_network_card_with_a_kernel_driver_has_no_nodes(self, tree):
        card = tree.pci("0000:5e:00.0", "8086", "1572", "020000", driver="i40e", group="7", net=["eth0"])
        tree.character(card, "ptp/ptp0", "248:0", "ptp0")
        (device,) = discover_devices(tree, 'devices: [{kind: nic, pci: {vendor: "8086", class: "02"}}]')
        assert (nodes(device), device.common, device.problem) == ([], (), None)

    def test_all_character_devices_of_an_fpga_driver(self, tree):
        card = tree.pci("0000:d8:00.0", "10ee", "903f", "070001", driver="xdma")
        for minor, name in enumerate(("xdma0_control", "xdma0_h2c_0", "xdma0_user")):
            tree.character(card, f"xdma/{name}", f"236:{minor}", name)
        tree.character(card, "drm/renderD128", "226:128", "dri/renderD128")
        tree.character(card, "uio/uio3", "235:3")  # a kernel whose uevent names no node
        behind = tree.pci("0000:d9:00.0", "10ee", "0001", "120000", behind=card)
        tree.character(behind, "uio/uio4", "235:4", "uio4")
        (device,) = discover_devices(tree, 'devices: [{kind: fpga, pci: {vendor: "10ee", device: "903f"}}]')
        assert nodes(device) == [
            "/dev/dri/renderD128",
            "/dev/uio3",
            "/dev/xdma0_control",
            "/dev/xdma0_h2c_0",
            "/dev/xdma0_user",
        ]

    def test_kinds_are_counted_apart_and_the_first_entry_wins(self, tree):
        for address, device in (("0000:01:00.0", "0001"), ("0000:02:00.0", "0002"), ("0000:03:00.0", "0001")):
            tree.pci(address, "10ee", device, "120000")
        text = """
        devices:
          - {kind: big, pci: {device: "0002"}}
          - {kind: fpga, pci: {class: "1200"}}
          - {kind: late, pci: {vendor: "10ee"}}
        """
        properties = [(device.kind, device.index, device.pci_address) for device in discover_devices(tree, text)]
        assert properties == [("big", 0, "0000:02:00.0"), ("fpga", 0, "0000:01:00.0"), ("fpga", 1, "0000:03:00.0")]


class TestOnePieceOfHardwareIsGivenOnce:
    def test_rdma_device_is_not_offered_as_a_network_card_too(self, tree):
        connectx5(tree)
        text = 'devices: [{kind: rdma}, {kind: nic, pci: {vendor: "15b3"}}]'
        assert [device.kind for device in discover_devices(tree, text)] == ["rdma", "rdma"]
        text = 'devices: [{kind: nic, pci: {vendor: "15b3"}}, {kind: rdma}]'
        first, second = discover_devices(tree, text)
        assert (first.kind, second.kind) == ("nic", "nic")
        assert nodes(first) == ["/dev/infiniband/umad0", "/dev/infiniband/uverbs0"], "no issm, no clock"

    def test_devices_of_one_iommu_group(self, tree):
        for number in range(2):
            tree.pci(f"0000:3b:00.{number}", "10ee", "9038", "120000", driver="vfio-pci", group="42")
        first, second = discover_devices(tree, 'devices: [{kind: fpga, pci: {vendor: "10ee"}}]')
        assert first.problem is None
        assert second.problem == (
            f"{tree.dev}/vfio/42 is the node of fpga 0 (0000:3b:00.0) as well, so a container with one of them would "
            "reach the other; this one is not offered"
        )
