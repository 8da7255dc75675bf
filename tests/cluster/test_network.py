"""The bridge of a cluster's pods."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.network import Network
from tests.cluster.processes import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes a bridge: root")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    new_network = Network(tmp_path)
    new_network.create(1)
    yield new_network
    run(["ip", "link", "delete", f"{new_network.bridge}p"], check=False)  # where the test has failed
    new_network.remove()


def test_it_keeps_its_hardware_address_when_pods_come_and_go(network):
    """Pods remember it: else the node is out of their reach until they ask again."""
    address_file = Path(f"/sys/class/net/{network.bridge}/address")
    before = address_file.read_text()
    pod, inside = f"{network.bridge}p", f"{network.bridge}q"
    run(["ip", "link", "add", pod, "address", "02:00:00:00:00:00", "type", "veth", "peer", "name", inside])
    run(["ip", "link", "set", pod, "master", network.bridge])
    assert address_file.read_text() == before
    run(["ip", "link", "delete", pod])
    assert address_file.read_text() == before


def test_services_have_a_route_on_a_machine_without_a_network(tmp_path):
    program = f"""
from pathlib import Path
from tests.cluster.network import Network
from tests.cluster.processes import run
network = Network(Path({str(tmp_path)!r}))
network.create(1)
network.forward("10.96.0.0/16")
print(run(["ip", "route", "get", "10.96.0.1"]))
"""
    assert " dev cw" in run(["unshare", "--net", sys.executable, "-c", program])
