"""The pod network of one cluster: a bridge on this machine with an address per node, made and removed by us."""

import json
import subprocess
import zlib
from pathlib import Path
from typing import Any

from tests.cluster import ports
from tests.cluster.processes import run


class Network:
    """Bridge and /16 of a state folder: node i has .0.i, its pods .i.10 and up."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._note = state / "network.json"
        self._prefix = json.loads(self._note.read_text())["prefix"] if self._note.exists() else ""  # until `create`
        number = f"{zlib.crc32(str(state).encode()):08x}"
        self.bridge = f"cw{number}"
        # A bridge without an address of its own takes the lowest of its members', so it changes as pods come and go.
        # What a pod sent to the old one was lost then, for more than 40 s.
        self._mac = f"02:00:{number[:2]}:{number[2:4]}:{number[4:6]}:{number[6:]}"

    def node_address(self, number: int) -> str:
        return f"{self._prefix}.0.{number}"

    def create(self, nodes: int) -> None:
        self._prefix = self._prefix or f"10.{self._free_second_byte(self._state)}"
        self._note.write_text(json.dumps({"prefix": self._prefix}))
        run(["ip", "link", "add", self.bridge, "address", self._mac, "type", "bridge"])
        for number in range(1, nodes + 1):
            run(["ip", "address", "add", f"{self.node_address(number)}/16", "dev", self.bridge])
        run(["ip", "link", "set", self.bridge, "up"])

    def remove(self) -> None:
        run(["ip", "link", "delete", self.bridge], check=False)

    def exists(self) -> bool:
        return Path(f"/sys/class/net/{self.bridge}").exists()

    def forward(self, services: str) -> None:
        """Pods and host reach Services: what they send to one goes through the machine and back to the bridge.

        services: addresses of Services, as a CIDR.
        """
        Path(f"/proc/sys/net/ipv4/conf/{self.bridge}/forwarding").write_text("1")
        # A machine without a network has no route to them, and kube-proxy translates only what has one.
        route = ["ip", "route", "get", services.partition("/")[0]]
        if subprocess.run(route, capture_output=True, check=False).returncode:
            run(["ip", "route", "add", services, "dev", self.bridge])

    def write_cni(self, folder: Path, number: int, routed: str = "") -> Path:
        """The CNI configuration of a node; returns its folder. `routed`: addresses that pods reach by the node."""
        conf = folder / "cni"
        conf.mkdir(parents=True, exist_ok=True)
        addresses = {
            "subnet": f"{self._prefix}.0.0/16",
            "rangeStart": f"{self._prefix}.{number}.10",
            "rangeEnd": f"{self._prefix}.{number}.250",
        }
        ipam: dict[str, Any] = {"type": "host-local", "dataDir": str(folder / "cni-addresses"), "ranges": [[addresses]]}
        if routed:
            ipam["routes"] = [{"dst": routed, "gw": self.node_address(number)}]
        bridge = {"type": "bridge", "bridge": self.bridge, "ipam": ipam}
        config = {"cniVersion": "1.0.0", "name": self.bridge, "plugins": [bridge]}
        (conf / "10-cardwise.conflist").write_text(json.dumps(config))
        return conf

    @staticmethod
    def _free_second_byte(state: Path) -> int:
        """One that no interface of this machine uses and no other process of the tests has drawn, the same for the same
        folder where possible.
        """
        addresses = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=False).stdout
        first = 64 + zlib.crc32(str(state).encode()) % 128
        bytes_ = [*range(first, 224), *range(64, first)]
        return next(n for n in bytes_ if f" 10.{n}." not in addresses and ports.claim_number("networks", n))
