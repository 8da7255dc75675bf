"""Devices by polling: changes are detected, and an invalid file changes nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from cardwise.core.values.invalid import InvalidRequest
from cardwise.devices.offered import OfferedDevices
from cardwise.devices.protocol import NoDevices
from tests.devices.trees import Tree, connectx5


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text("devices: [{kind: rdma}]")
    return path


@pytest.fixture
def offered(tree, file, clock):
    return OfferedDevices(file, sysfs=tree.sysfs, dev=tree.dev, node="n1", clock=clock)


def names(offered: OfferedDevices) -> list[str]:
    return [device.name or device.pci_address for device in offered.devices()]


def test_port_failures_and_new_devices_are_reported(tree, offered):
    first, second = connectx5(tree)
    assert offered.wait_change(5), "what is there at first is news"
    assert not offered.wait_change(0)
    tree.port(first, 1, "1: DOWN")
    assert offered.wait_change(5)
    assert all(device.problem for device in offered.devices())
    tree.rdma("rxe0", number=5)
    assert offered.wait_change(5)
    assert names(offered) == ["mlx5_0", "mlx5_1", "rxe0"]
    (tree.sysfs / "class" / "infiniband" / second.name).unlink()
    assert offered.wait_change(5)
    assert names(offered) == ["mlx5_0", "rxe0"]


def test_change_during_a_wait_is_reported(tree, offered, clock):
    offered.wait_change(0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(offered.wait_change, 60)
        clock.step()
        clock.until_waiting()
        connectx5(tree)
        before = clock.now()
        clock.step()
        assert waiting.result(60)
    assert clock.now() - before <= 1


def test_change_that_devices_already_returned_still_ends_the_wait(tree, offered):
    offered.wait_change(0)
    connectx5(tree)
    assert len(offered.devices()) == 2
    assert offered.wait_change(5)


def test_the_file_is_read_again_and_a_bad_one_changes_nothing(tree, file, offered):
    connectx5(tree)
    tree.pci("0000:d8:00.0", "10ee", "9038", "120000")
    assert names(offered) == ["mlx5_0", "mlx5_1"]
    file.write_text('devices: [{kind: fpga, pci: {class: "12"}}]')
    assert names(offered) == ["0000:d8:00.0"]
    with capture_logs() as logs:
        file.write_text("devices: [{kind: fpga}]")
        assert names(offered) == names(offered) == ["0000:d8:00.0"]
        file.unlink()
        assert names(offered) == ["0000:d8:00.0"]
    errors = [line["error"] for line in logs if line["log_level"] == "error"]
    assert len(errors) == 2, "each problem once"
    assert "devices[0].pci: is missing" in errors[0]
    file.write_text("devices: []")
    assert names(offered) == []


def test_a_bad_file_at_the_start_is_an_error(tree, file):
    file.write_text("devices: 1")
    with pytest.raises(InvalidRequest, match="devices"):
        OfferedDevices(file, sysfs=tree.sysfs, dev=tree.dev, node="n1")
    with pytest.raises(OSError, match="No such file"):
        OfferedDevices(file.with_name("none"), sysfs=tree.sysfs, dev=tree.dev, node="n1")


@pytest.mark.parametrize("kind", ["offered", "none"])
def test_a_wait_ends_in_time_and_by_close(offered, clock, kind):
    devices = offered if kind == "offered" else NoDevices(clock)
    devices.wait_change(0)
    before = clock.now()
    assert not devices.wait_change(2.5)
    assert clock.now() - before == 2.5
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(devices.wait_change, 60)
        clock.until_waiting()
        devices.close()
        assert not waiting.result(60)
