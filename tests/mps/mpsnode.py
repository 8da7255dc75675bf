"""A node for the MPS manager, in the test's own thread: nothing happens but by `step_all`, which moves the clock on."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.mps import DaemonScope, Status
from cardwise.core.values.quantity import MiB
from cardwise.gpus import mpsfiles, selection
from cardwise.gpus.protocol import CardError, GpuCard
from cardwise.gpus.selection import SelectedGpus
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube import paths
from mps import manager as managers
from mps import publication as publications
from mps.audit import audit
from mps.daemon.daemon import Daemon
from mps.daemon.machine import DaemonPace
from mps.host.cgroups import CgroupMembership
from mps.host.pods import PodView, parse_pod
from mps.manager import ManagerLock, ManagerSettings, MpsManager
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.fakes.events import Events
from tests.mps.hosts import FakeHost, FakeProcess

DRIVER = "550.163.01"
DOUBLE = Path(__file__).parent / "double" / "nvidia-cuda-mps-control"
NODE = "n1"
P100 = 16276  # MiB
PACE = DaemonPace()
CID = "4f1c" * 16
_LONGEST = 300.0  # seconds of the clock after which nothing more is expected


def uuid_of(index: int) -> str:
    """Of this test process: a manager notices the daemons of another one that serve a card of the same UUID."""
    return f"GPU-{NODE}-{os.getpid()}-{index}"


class Pods:
    """Those of the API server, known at once; in place of `NodePods`."""

    def __init__(self, api: ApiServer) -> None:
        self.synced = True
        self._api = api
        self._read: tuple[int, list[PodView]] = (0, [])  # at the revision of the API server
        self.late = False  # whether changes do not arrive

    def list_pods(self) -> list[PodView]:
        if not self.late and self._read[0] != self._api.revision:
            read = [parse_pod(msgspec.json.encode(pod)) for pod in self._api.all("/api/v1/pods")]
            self._read = self._api.revision, read
        return self._read[1]

    def stop(self) -> None:
        pass


class OwnNode:
    """Known at once; NVIDIA's device plugin offers so many GPUs. In place of `mps.host.ownnode.OwnNode`."""

    def __init__(self) -> None:
        self.synced = True
        self.offered = 0

    def nvidia_gpus(self) -> int:
        return self.offered

    def stop(self) -> None:
        pass


class Publication:
    """AgentSettings to nobody: see test_publication.py."""

    problem = ""

    def __init__(self) -> None:
        self.tiers: dict[str, str] = {}

    def wake(self) -> None:
        pass

    stop = wake

    def memory_tiers(self) -> dict[str, str]:
        return self.tiers


class Cards(SimulatedGpus):
    """As NVML has them: a card of `lost` does not answer. It is known all the same if it has answered before."""

    def __init__(self, path: Path, lost: set[str]) -> None:
        super().__init__(path)
        self._lost = lost
        self._met: set[str] = set()
        self._shut = False

    def close(self) -> None:
        super().close()
        self._shut = True

    def cards(self) -> list[GpuCard]:
        state = super().cards()
        self._met |= {card.uuid for card in state} - self._lost
        return [card for card in state if card.uuid in self._met]

    def unresponsive_indices(self) -> list[int]:
        known = {card.uuid for card in self.cards()}
        return [card.index for card in super().cards() if card.uuid not in known]

    def _check_present(self, uuid: str) -> None:
        super()._check_present(uuid)
        if self._shut:
            raise CardError(f"card {uuid}: Uninitialized")
        if uuid in self._lost:
            raise CardError(f"card {uuid}: GPU is lost")


class NodeClock(FakeClock):
    """Its node lives while the test's thread sleeps."""

    live: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        self.live()
        super().sleep(seconds)


class Node:
    """`start` and `stop` a manager on it as often as you like; `crash` ends one without a word."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, cards: int = 2, scope: DaemonScope = DaemonScope.CARD
    ) -> None:
        self.root = folder / "mps"
        self.clock = NodeClock()
        self.host = FakeHost(self.clock)
        self.cards_file = folder / "cards.yaml"
        self.cards = [
            {"index": i, "uuid": uuid_of(i), "model": "Tesla-P100", "memoryMiB": P100, "properties": {"driver": DRIVER}}
            for i in range(cards)
        ]
        self.write_cards()
        self.lost: set[str] = set()  # UUIDs of cards that do not answer
        self.api = ApiServer(self.clock)
        self.pods = Pods(self.api)
        self.own_node = OwnNode()
        self.events = Events()
        self.publication = Publication()
        self.settings = ManagerSettings(
            node=NODE,
            root=self.root,
            scope=scope,
            control=DOUBLE,
            pace=PACE,
            exclusive=True,
            stop_daemons="idle",
        )
        self.manager: MpsManager | None = None
        # The daemons' threads are this one.
        monkeypatch.setattr(Daemon, "start", Daemon.take_over)
        monkeypatch.setattr(managers, "watch_pods", lambda *_: self.pods)
        monkeypatch.setattr(managers, "OwnNode", lambda *_: self.own_node)
        monkeypatch.setattr(managers, "MpsStatusPublisher", lambda *_: self.publication)
        monkeypatch.setattr(managers, "EventRecorder", lambda *_, **__: self.events)
        monkeypatch.setattr(audit, "EventRecorder", lambda *_, **__: self.events)

    def write_cards(self) -> None:
        scratch = self.cards_file.with_suffix(".new")
        scratch.write_text(yaml.safe_dump({"cards": self.cards}))
        scratch.rename(self.cards_file)

    def start(self, *, cards: str = "", driver: str = "", **changes: Any) -> "Node":
        """`cards` as in `--gpus`. `driver`: the version that the cards report, if not DRIVER."""
        if driver:
            for card in self.cards:
                card["properties"] = {"driver": driver}
            self.write_cards()
        self.settings = replace(self.settings, **changes)
        self.gpus = Cards(self.cards_file, self.lost)
        served = SelectedGpus(self.gpus, selection.parse_selection(cards)) if cards else self.gpus
        self.lock = ManagerLock(self.root)
        self.lock.acquire()
        client = self.api.client(clock=self.clock)
        client.fetch_server_time()  # as the list of pods tells it
        self.manager = MpsManager(self.settings, client, served, self.gpus, host=self.host, clock=self.clock)
        self.manager.inherit_daemons()
        self.step_all()
        return self

    def step_all(self) -> None:
        """Each does what is due; then it is the next moment at which something may be. Audits look by themselves."""
        rest = self.manager.reconcile()
        for daemon in self.manager.daemons():
            rest = min(rest, daemon.step())
        if rest > 0.0:
            self.clock.advance(max(rest, 0.001))  # not less than the clock can tell apart

    def until(self, condition: Callable[[], Any], description: str = "") -> Any:
        end = self.clock.now() + _LONGEST
        while not (outcome := condition()):
            assert self.clock.now() < end, description or "not so in time"
            self.step_all()
        return outcome

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.step_all()

    def stop(self) -> None:
        self.clock.live = lambda: [daemon.step() for daemon in self.manager.daemons()]
        self.manager.stop()
        self.clock.live = lambda: None
        self.lock.release()
        self.manager = None

    def crash(self) -> None:
        """The manager is gone without a word; its daemons are not."""
        for daemon in self.manager.daemons():
            daemon.stop()
        self.manager = None
        self.lock.release()

    def close(self) -> None:
        for process in self.host.processes.values():
            process.kill()
        if self.manager is not None:
            self.lock.release()
            for daemon in self.manager.daemons():
                daemon.stop()
        self.api.close()

    # What others see.

    def home(self, index: int = 0) -> Path:
        if self.settings.scope is DaemonScope.NODE:
            return Path(mps.node_daemon_folder(str(self.root)))
        return Path(mps.card_daemon_folder(str(self.root), uuid_of(index)))

    def pipe(self, index: int = 0) -> Path:
        return self.home(index) / mps.PIPE_FOLDER

    def status(self, index: int = 0) -> Status:
        state = mpsfiles.read_state(self.home(index))
        assert state is not None
        return state

    def problem(self, index: int = 0, **requirements: Any) -> str:
        return mpsfiles.unready_reason(self.root, uuid_of(index), clock=self.clock, **requirements) or ""

    def wait_ready(self, index: int = 0, **requirements: Any) -> None:
        self.until(lambda: not self.problem(index, **requirements), f"card {index} is not ready")

    def published_status(self, index: int = 0) -> dict[str, Any]:
        """What the cluster is to be told of the card."""
        status: dict[str, Any] = msgspec.to_builtins(
            publications.card_status(self.manager.statuses()[uuid_of(index)], uuid_of(index))
        )
        return status

    def mode(self, index: int = 0) -> str:
        return str(SimulatedGpus(self.cards_file).compute_mode(uuid_of(index)))

    def daemon(self, index: int = 0) -> FakeProcess:
        (state,) = self.host.daemons(self.pipe(index))
        return state

    def servers(self, index: int = 0) -> list[FakeProcess]:
        return self.host.servers(self.pipe(index))

    def send_command(self, command: str, index: int = 0, user: int = 0) -> str:
        """As an admin would, or another user."""
        return self.daemon(index).daemon.handle_command(command.encode(), user).strip()

    def log(self, index: int = 0) -> Path:
        return self.home(index) / mps.LOG_FOLDER

    # What happens on the node.

    def bind(self, name: str, index: int, mib: int, *, without_mps: bool = False, grace: int = 60) -> None:
        """A pod of one container, `main`."""
        shares = (CardShare(index, uuid_of(index), MiB(mib), 0, MiB(P100)),)
        annotations = codec.encode(Assignment({"0": shares}), assume_time_ns=1)
        if without_mps:
            annotations[names.ISOLATION] = "none"
        container = {"name": "main", "containerID": f"containerd://{CID}"}
        pod = {
            "metadata": {"name": name, "uid": f"uid-{name}", "annotations": annotations},
            "spec": {"nodeName": NODE, "containers": [{"name": "main"}], "terminationGracePeriodSeconds": grace},
            "status": {"phase": "Running", "containerStatuses": [container]},
        }
        self.api.write_object("/api/v1/pods", pod)

    def delete(self, name: str) -> None:
        """It has its grace period."""
        self.api.client().delete(paths.pods("default", name))

    def end(self, name: str) -> None:
        """Its object is gone, with force before its processes."""
        self.api.remove(paths.pods("default", name))

    def add_client(self, index: int = 0, pod: str = "") -> FakeProcess:
        """A process, of this pod, that computes on the card through its server."""
        client = self.use(index, 300, pod)
        with (self.log(index) / "clients").open("a") as file:
            file.write(f"{client.pid}\n")
        return client

    def use(self, index: int, mib: int, pod: str = "", name: str = "python") -> FakeProcess:
        """A new process, of this pod, has so much of the card's memory."""
        process = self.host.add(name, {}, *([CgroupMembership(f"uid-{pod}", CID)] if pod else []))
        self.set_use(index, process.pid, mib)
        return process

    def set_use(self, index: int, pid: int, mib: int | None, **fields: float) -> None:
        """fields: as in the file of simulated cards, such as smPercent."""
        card = self.cards[index]
        others = [entry for entry in card.get("processes", []) if entry["pid"] != pid]
        card["processes"] = [*others, {"pid": pid, "memoryMiB": mib, **fields}]
        self.write_cards()

    def end_clients(self, index: int = 0) -> None:
        for entry in self.cards[index].pop("processes", []):
            self.host.processes[entry["pid"]].kill()
        self.write_cards()

    def touch_double_file(self, file: str, index: int = 0) -> Path:
        """To the double, by one of its files."""
        path = self.log(index) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path
