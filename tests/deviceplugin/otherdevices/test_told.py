"""What the cluster is told of devices that are not GPUs, and an admin of a file that is wrong."""

from click.testing import CliRunner

from cardwise.core.api import names
from deviceplugin import __main__ as command
from tests.deviceplugin.conftest import NODE, P100, RESOURCES
from tests.deviceplugin.otherdevices.machines import FIRST, FPGA, SECOND, bind

RDMA_CLASS = {"selector": {"matchLabels": {"kind": "rdma"}}}
RDMA, FPGAS = names.CLASS_PREFIX + "rdma", names.CLASS_PREFIX + "fpga"


class TestWhatTheClusterIsTold:
    def test_an_extended_resource_for_each(self, machine, rig):
        machine.healthy(FIRST)
        resource = machine.resource(FIRST)
        assert resource["metadata"]["labels"] == {names.NODE_LABEL: NODE}
        assert resource["metadata"]["ownerReferences"][0]["uid"] == "uid-n1"
        spec = dict(resource["spec"])
        assert spec.pop("properties").items() >= {"name": "mlx5_0", "pciAddress": "0000:3b:00.0"}.items()
        assert spec == {"kind": "rdma", "node": NODE, "index": 0, "uuid": FIRST, "model": "MT4119"}
        assert machine.status(FIRST) == {"health": "Healthy", "reason": "", "gpuAccess": "cdi", "reported": []}
        assert machine.resource(FPGA)["spec"]["kind"] == "fpga"
        assert machine.resource(FPGA)["spec"]["index"] == 0
        assert rig.card(0)["spec"]["kind"] == "nvidia-gpu"
        rig.settle()
        assert rig.problems() == []

    def test_it_is_told_once(self, machine, rig):
        machine.healthy(FPGA)
        rig.settle()
        assert rig.problems() == []
        before = len(rig.writes())
        machine.tree.port(machine.ports[0], 1, "1: DOWN", rate="100 Gb/sec")
        machine.healthy(FIRST, is_healthy=False)
        paths = {request.path for request in rig.writes()[before:] if RESOURCES in request.path}
        assert paths == {f"{RESOURCES}/{FIRST}/status"}

    def test_the_capacity_of_a_class_is_its_devices_sick_ones_too(self, machine, rig):
        rig.make_class("rdma", RDMA_CLASS)
        rig.make_class("fpga", {"selector": {"matchLabels": {"kind": "fpga"}}})
        rig.make_class(
            "fast", {"selector": {"matchExpressions": [{"key": "rate", "operator": "Gt", "values": ["50"]}]}}
        )
        rig.settle()
        assert rig.capacity(RDMA) == "2"
        assert rig.capacity(FPGAS) == "1"
        assert rig.capacity(names.CLASS_PREFIX + "fast") is None, "a class that says no kind is of GPUs"
        machine.tree.port(machine.ports[0], 1, "1: DOWN")
        machine.healthy(FIRST, is_healthy=False)
        assert rig.capacity(RDMA) == "2"
        assert rig.capacity(names.GPU_MEM) == str(2 * P100), "devices are no memory"

    def test_the_marker_of_pods_without_a_card_is_offered_while_there_are_devices(self, machine, rig):
        assert rig.capacity(names.FILTER_CALL_RESOURCE) == "1000000"
        machine.file.write_text("devices: []")
        rig.settle()
        assert rig.capacity(names.FILTER_CALL_RESOURCE) is None

    def test_the_capacity_is_never_below_what_living_pods_ask(self, machine, rig):
        rig.make_class("rdma", RDMA_CLASS)
        rig.settle()
        assert rig.capacity(RDMA) == "2"
        pod = bind(rig, "a", {"0": [("rdma", FIRST), ("rdma", SECOND)]})
        machine.file.write_text("devices: []")
        rig.settle()
        assert not machine.resource(SECOND)
        assert rig.capacity(RDMA) == "2"
        rig.end(pod)
        rig.settle()
        assert rig.capacity(RDMA) is None

    def test_a_port_that_comes_up_wakes_waiting_pods(self, machine, rig):
        machine.tree.port(machine.ports[0], 1, "1: DOWN")
        assert "port 1 is DOWN" in machine.healthy(FIRST, is_healthy=False)["reason"]
        before = rig.node()["metadata"].get("annotations", {}).get(names.REQUEUE)
        machine.tree.port(machine.ports[0], 1, "4: ACTIVE")
        machine.healthy(FIRST)
        rig.settle()
        assert rig.node()["metadata"].get("annotations", {}).get(names.REQUEUE) != before

    def test_a_missing_device_node_is_a_reason(self, machine, rig):
        machine.healthy(FPGA)
        (machine.tree.dev / "vfio" / "42").unlink()
        reason = machine.healthy(FPGA, is_healthy=False)["reason"]
        assert reason == f"fpga 0 ({FPGA}): {machine.tree.dev}/vfio/42: No such file or directory"

    def test_a_device_that_left_stays_while_a_pod_holds_it(self, machine, rig):
        machine.healthy(FPGA)
        pod = bind(rig, "a", {"0": [("fpga", FPGA)]})
        rig.run(pod, "c0")
        machine.tree.remove("0000:d8:00.0")
        assert "--devices leaves it out" in machine.healthy(FPGA, is_healthy=False)["reason"]
        rig.end(pod)
        rig.settle()
        assert not machine.resource(FPGA)

    def test_nvidias_plugin_on_the_node_is_no_trouble_for_them(self, machine, rig):
        rig.edit_node(status={"capacity": {names.NVIDIA_GPU: "2"}})
        rig.settle()
        assert rig.status(0).get("health") == "Unhealthy"
        machine.healthy(FIRST)
        rig.run(bind(rig, "a", {"0": [("rdma", FIRST)]}), "c0")


class TestTheCommand:
    def test_a_node_without_cards(self, machine):
        machine.rig.cards = []
        machine.rig.write_cards()
        rig = machine.start()
        machine.healthy(FIRST)
        rig.settle()
        assert rig.problems() == []
        slot = rig.run(bind(rig, "a", {"0": [("rdma", FIRST)]}), "c0")
        assert rig.env(slot)["CARDWISE_RDMA_DEVICES"] == "mlx5_0"

    def test_cards_none_asks_for_no_driver(self, tmp_path):
        choice = command._parse_cards(None, None, "none")
        assert command._open_gpus(None, choice, tmp_path / "faults.json").cards() == []

    def test_a_bad_file_ends_the_start_with_field_and_remedy(self, tmp_path):
        file, cards = tmp_path / "devices.yaml", tmp_path / "cards.yaml"
        file.write_text("devices: [{kind: nic, pci: {vendor: 8086}}]")
        cards.write_text("cards: []")
        done = CliRunner().invoke(command.main, ["--node-name=n1", f"--simulated-gpus={cards}", f"--devices={file}"])
        assert done.exit_code == 1
        assert "devices[0].pci.vendor: 8086 is not valid" in done.output
        assert "four hexadecimal digits in quotes" in done.output
