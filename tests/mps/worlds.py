"""A node for the MPS manager: simulated cards, the double (or the real program), and an API server of a few verbs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cardwise.core import assignment as codec
from cardwise.core import mps
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.mps import Scope, Status
from cardwise.core.quantity import MiB
from cardwise.gpus import chosen, mpsnode
from cardwise.gpus.chosen import ChosenGpus
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube.client import KubeClient
from mps import processes
from mps.machine import Pace
from mps.manager import Lock, Manager, Settings
from tests.deviceplugin.fakeapi import FakeApi, merge

DOUBLE = Path(__file__).parent / "double" / "nvidia-cuda-mps-control"
NODE = "n1"
P100 = 16276  # MiB
PODS, RESOURCES = "/api/v1/pods", "/apis/cardwise.dev/v1alpha1/extendedresources"
# Short where a test waits for it, long where it must not come.
PACE = Pace(
    probe=0.3,
    answer=2.0,
    start=20.0,
    warm=20.0,
    fault_grace=0.5,
    drain=2.0,
    quit_grace=1.0,
    orphan_grace=0.5,
    backoff=0.1,
    backoff_cap=0.5,
    stable=30.0,
)


def uuid_of(index: int) -> str:
    return f"GPU-{NODE}-{index}"


def eventually(ask: Callable[[], Any], what: str = "", timeout: float = 30) -> Any:
    deadline = time.monotonic() + timeout
    while not (answer := ask()):
        assert time.monotonic() < deadline, what or "not so in time"
        time.sleep(0.02)
    return answer


class Node:
    """`start` and `stop` a manager on it as often as you like."""

    def __init__(self, folder: Path, cards: int = 2, scope: Scope = Scope.CARD) -> None:
        self.folder = folder
        self.root = folder / "mps"
        self.cards_file = folder / "cards.yaml"
        self.cards = [
            {"index": i, "uuid": uuid_of(i), "model": "Tesla-P100", "memoryMiB": P100, "properties": {}}
            for i in range(cards)
        ]
        self.write_cards()
        self.api = FakeApi()
        for index in range(cards):
            self.add_resource(index)
        self.settings = Settings(
            node=NODE,
            root=self.root,
            scope=scope,
            control=DOUBLE,
            pace=PACE,
            exclusive=True,
            stop_daemons="idle",
            detach_before=1.0,
            driver="550.163.01",
        )
        self.manager: Manager | None = None
        self.lock: Lock | None = None
        self.clients: list[subprocess.Popen[bytes]] = []

    def write_cards(self) -> None:
        self.write_cards_raw(self.cards)

    def write_cards_raw(self, cards: list[dict[str, Any]]) -> None:
        scratch = self.cards_file.with_suffix(".new")
        scratch.write_text(yaml.safe_dump({"cards": cards}))
        scratch.rename(self.cards_file)

    def add_resource(self, index: int) -> None:
        metadata = {"name": uuid_of(index).lower(), "labels": {"cardwise.dev/node": NODE}}
        self.api.put(RESOURCES, {"metadata": metadata, "spec": {"node": NODE, "uuid": uuid_of(index)}, "status": {}})

    def start(self, *, cards: str = "", **changes: Any) -> "Node":
        """`cards` as in `--cards`."""
        self.settings = replace(self.settings, **changes)
        self.gpus = SimulatedGpus(self.cards_file)
        served = ChosenGpus(self.gpus, chosen.parse(cards)) if cards else self.gpus
        self.client = KubeClient(self.api.url)
        self.lock = Lock(self.root)
        self.lock.take()
        self.manager = Manager(self.settings, self.client, served, self.gpus)
        self.manager.start()
        return self

    def stop(self) -> None:
        if self.manager is not None:
            self.manager.stop()
            self.lock.release()
            self.client.close()
            self.manager = None

    def crash(self) -> None:
        """The manager is gone without a word; its daemons are not."""
        manager, self.manager = self.manager, None
        self.gpus.close()
        manager._stopping.set()
        manager._wake.set()
        for thread in manager._threads:
            thread.join(10)
        for daemon in manager._all():
            daemon.stop()
        publication = manager._publication
        publication._stopping.set()
        publication._wake.set()
        publication._thread.join(10)
        publication._reflector.stop()
        manager.pods.stop()
        self.client.close()
        self.lock.release()

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        for home in self.root.glob("*/pipe"):
            for process in [*processes.daemons(home), *processes.servers(home)]:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGKILL)
        for client in self.clients:
            client.kill()
            client.wait()
        self.api.close()

    # What others see.

    def home(self, index: int = 0) -> Path:
        if self.settings.scope is Scope.NODE:
            return Path(mps.node_folder(str(self.root)))
        return Path(mps.folder(str(self.root), uuid_of(index)))

    def status(self, index: int = 0) -> Status:
        found: Status = eventually(lambda: mpsnode.read(self.home(index)))
        return found

    def problem(self, index: int = 0, **asked: Any) -> str:
        return mpsnode.problem(self.root, uuid_of(index), **asked)

    def wait_ready(self, index: int = 0, **asked: Any) -> None:
        eventually(lambda: not self.problem(index, **asked), f"card {index} is not ready: {self.problem(index)}")

    def told(self, index: int = 0) -> dict:
        return (self.api.get(RESOURCES, uuid_of(index).lower()).get("status") or {}).get("mps") or {}

    def mode(self, index: int = 0) -> str:
        return str(SimulatedGpus(self.cards_file).compute_mode(uuid_of(index)))

    def daemon(self, index: int = 0) -> processes.Process:
        (found,) = processes.daemons(self.home(index) / "pipe")
        return found

    def servers(self, index: int = 0) -> list[processes.Process]:
        return processes.servers(self.home(index) / "pipe")

    def ask(self, command: str, index: int = 0) -> str:
        """As an admin would."""
        environment = os.environ | {mps.PIPE_ENV: str(self.home(index) / "pipe")}
        done = subprocess.run(
            [DOUBLE], input=command.encode(), capture_output=True, env=environment, timeout=20, check=False
        )
        return done.stdout.decode().strip()

    # What happens on the node.

    def bind(self, name: str, index: int, mib: int, *, off: bool = False, **metadata: Any) -> dict:
        given = (CardShare(index, uuid_of(index), MiB(mib), 0, MiB(P100)),)
        annotations = codec.encode(Assignment({"0": given}), assume_time_ns=1)
        if off:
            annotations[mps.MODE] = "off"
        fields = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations}
        pod = {"metadata": fields | metadata, "spec": {"nodeName": NODE}, "status": {"phase": "Running"}}
        return self.api.put(PODS, pod)

    def change_pod(self, name: str, change: dict) -> None:
        with self.api.changed:
            self.api.put(PODS, merge(self.api.get(PODS, name, "default"), change))

    def end(self, name: str) -> None:
        self.api.delete(PODS, name, "default")

    def add_client(self, index: int = 0) -> subprocess.Popen[bytes]:
        """A process that computes on the card, through its server."""
        client = self._process()
        with (self.home(index) / "log" / "clients").open("a") as file:
            file.write(f"{client.pid}\n")
        self.use(index, 300, client.pid)
        return client

    def use(self, index: int, mib: int, pid: int = 0) -> int:
        """A process, a new one without a PID, has so much of the card's memory. The PID."""
        pid = pid or self._process().pid
        card = self.cards[index]
        card["processes"] = [*card.get("processes", []), {"pid": pid, "memoryMiB": mib}]
        self.write_cards()
        return pid

    def use_changed(self, index: int, pid: int, mib: int) -> None:
        card = self.cards[index]
        card["processes"] = [one | {"memoryMiB": mib} if one["pid"] == pid else one for one in card["processes"]]
        self.write_cards()

    def _process(self) -> subprocess.Popen[bytes]:
        client = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        self.clients.append(client)
        return client

    def remove_clients(self, index: int = 0) -> None:
        for client in self.clients:
            client.kill()
            client.wait()
        self.clients.clear()
        self.cards[index].pop("processes", None)
        self.write_cards()

    def say(self, file: str, index: int = 0, text: str = "") -> Path:
        """To the double, by one of its files."""
        path = self.home(index) / "log" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
