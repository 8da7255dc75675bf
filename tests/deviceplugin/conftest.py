import contextlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import pytest
import yaml

from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.devices.protocol import Devices, NoDevices
from cardwise.gpus import selection
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from deviceplugin.grants.access import Access
from deviceplugin.grants.mpswait import HasManager
from deviceplugin.plugin import slots
from deviceplugin.process import NodeAgent, NodeAgentSettings
from deviceplugin.sources.containers import RuntimeContainers
from deviceplugin.sources.kubelet import Kubelet
from tests.deviceplugin.fakenode import FakeKubelet, FakeRuntime, Plugin, SeenKubelet, SeenRuntime
from tests.fakes.apiserver import ApiServer, Request
from tests.fakes.clock import FakeClock
from tests.fakes.events import Events

NODE = "n1"
PODS_HERE = "/api/v1/namespaces/default/pods"
P100 = 16276  # MiB
PODS, NODES, RESOURCES = "/api/v1/pods", "/api/v1/nodes", "/apis/cardwise.dev/v1alpha1/extendedresources"
CLASSES = "/apis/cardwise.dev/v1alpha1/resourceclasses"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # where folders are made and removed in no time
_QUIET_SECONDS = 3  # the agent repeats a write after two


def card_uuid(index: int) -> str:
    return f"GPU-{NODE}-{index}"


class Rig:
    """A node with two cards and the agent of it, whose threads are not started: `settle` does their work.

    Its clock is the test's, so that what waits in the test's thread only moves it. That of the MPS manager stands still
    meanwhile. tests/deviceplugin/served.py has the same node with all threads and sockets.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.mps_clock = FakeClock()
        self.cards_file = folder / "cards.yaml"
        self.cards = [
            {"index": i, "uuid": card_uuid(i), "model": "Tesla-P100", "memoryMiB": P100, "device": self.device(i)}
            for i in range(2)
        ]
        self.write_cards()
        self.access: Access | None = None
        self.chosen: str | None = None  # --gpus
        self.devices: Devices | None = None
        self.mps = HasManager.SEEN
        self.mps_root = folder / "mps"
        self.core_overcommit = 100
        self.claims = False
        self.api = ApiServer(self.clock)
        self.api.write_object(
            NODES,
            {"metadata": {"name": NODE, "uid": "uid-n1"}, "status": {"capacity": {"cpu": "8"}, "allocatable": {}}},
        )
        self.kubelet = FakeKubelet(folder / "kubelet")
        self.runtime = FakeRuntime()
        self.recorder = Events()
        self.gpus: SimulatedGpus | None = None
        self.agent: NodeAgent | None = None
        self.client: KubeClient | None = None

    def device(self, index: int) -> str:
        path = self.folder / f"nvidia{index}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(4, 20 + index))
        except PermissionError:
            return "/dev/null"  # without root: a device node all the same
        return str(path)

    def write_cards(self) -> None:
        scratch = self.cards_file.with_suffix(".new")
        scratch.write_text(yaml.safe_dump({"cards": self.cards}))
        scratch.rename(self.cards_file)

    def make(self, kubelet: Kubelet, containers: RuntimeContainers) -> NodeAgent:
        settings = NodeAgentSettings(
            node=NODE,
            kubelet_dir=self.kubelet.folder,
            cdi_dir=self.folder / "cdi",
            state_dir=self.folder / "state",
            cri_socket=self.folder / "cri.sock",
            access=self.access,
            nvidia_specs=None,
            cards=None if self.chosen is None else selection.parse_selection(self.chosen),
            mps=self.mps,
            mps_root=self.mps_root,
            core_overcommit=self.core_overcommit,
            claims=self.claims,
        )
        self.client = self.api.client(clock=self.clock)
        self.gpus = SimulatedGpus(self.cards_file, clock=self.clock)
        self.agent = NodeAgent(
            settings,
            client=self.client,
            gpus=self.gpus,
            devices=self.devices or NoDevices(self.clock),
            kubelet=kubelet,
            containers=containers,
            events=self.recorder,
            clock=self.clock,
            mps_clock=self.mps_clock,
        )
        return self.agent

    def start(self) -> "Rig":
        agent = self.make(SeenKubelet(self.kubelet, self.clock), SeenRuntime(self.runtime))
        agent._report_start_problems()
        inventory = agent._inventory
        self.reflectors = [watcher._reflector for watcher in (agent.pods, inventory.node, inventory._classes)]
        self.reflectors.append(inventory._resources)
        self.seen: object = None
        self.kubelet.plugin = Plugin(agent._create_server(self.folder / "plugin.sock"))
        self.kubelet.devices = list(slots.SLOT_IDS)
        self.settle()
        return self

    def see(self) -> None:
        """The watches tell the agent what there is by now."""
        now = (self.api.revision, self.api.down, *self.api.missing)
        if now == self.seen:
            return
        self.seen = now
        for reflector in self.reflectors:
            try:
                reflector._relist()
            except errors.KubeError:
                reflector.errors += 1

    def settle(self) -> None:
        """Lets time pass until the agent has done all that it does by itself."""
        quiet = 0
        while quiet < _QUIET_SECONDS:
            before = self.api.revision
            self.pass_second()
            quiet = quiet + 1 if self.api.revision == before else 0

    def pass_second(self) -> None:
        """Each thread of the agent takes its turn."""
        self.see()
        # What is told comes first: it must be true before all else has been looked at.
        agent = self.agent
        for loop in (agent._inventory._loop, agent._release, agent._start_block_loop, agent._marker._loop):
            loop.run_once()
        self.clock.advance(1.0)

    def problems(self) -> list[str]:
        """Why it is not ready, but for the registration, which has no socket here."""
        return [problem for problem in self.agent.problems() if "not registered" not in problem]

    def stop(self) -> None:
        if self.agent is not None:
            self.agent.stop()
            self.client.close()
            self.agent = self.client = None

    def close(self) -> None:
        self.stop()
        self.api.close()

    def put_pod(
        self,
        name: str,
        assignment: Assignment,
        limits: Mapping[str, Mapping[str, str]],
        *,
        sidecars: Mapping[str, Mapping[str, str]] | None = None,
        namespace: str = "default",
        **annotations: str,
    ) -> dict:
        """A bound pod with the limits of each of its containers, by name."""
        by_env = self.status(0).get("gpuAccess") == "env"  # as the extender reads it
        pod = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "annotations": codec.encode(assignment, assume_time_ns=1, env_access=by_env) | annotations,
            },
            "spec": {
                "nodeName": NODE,
                "initContainers": [
                    _container(*limit) | {"restartPolicy": "Always"} for limit in (sidecars or {}).items()
                ],
                "containers": [_container(*limit) for limit in limits.items()],
            },
            "status": {"phase": "Pending"},
        }
        return self.api.write_object(PODS, pod)

    def bind(self, name: str, shares: Sequence[tuple[int, int]], *, containers: Sequence[str] = ("main",)) -> dict:
        """A bound pod: `shares` are (card index, MiB) of each of its containers."""
        return self.bind_each(name, dict.fromkeys(containers, shares))

    def bind_each(self, name: str, shares: Mapping[str, Sequence[tuple[int, int]]]) -> dict:
        """A bound pod: `shares` are (card index, MiB) by container, some may have none."""
        held = [tuple(CardShare(index, card_uuid(index), mib, 0, P100) for index, mib in of) for of in shares.values()]
        assignment = Assignment({str(position): of for position, of in enumerate(held) if of})
        limits = {
            container: {names.GPU_MEM: str(sum(mib for _, mib in of)), names.SHARE: "1"} if of else {}
            for container, of in shares.items()
        }
        return self.put_pod(name, assignment, limits)

    def bind_again(self, pod: dict, shares: Sequence[tuple[int, int]]) -> dict:
        """Bind the pod to this node again under its UID: etcd was restored from a backup that has it waiting."""
        return self.bind_again_each(pod, dict.fromkeys([entry["name"] for entry in pod["spec"]["containers"]], shares))

    def bind_again_each(self, pod: dict, shares: Mapping[str, Sequence[tuple[int, int]]]) -> dict:
        """As `bind_again`, with shares by container."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        again = self.bind_each(f"{name}-template", shares)
        self.force_delete(again)
        return self.api.write_object(PODS, again | {"metadata": again["metadata"] | {"name": name, "uid": uid}})

    def run(self, pod: dict, container: str = "main", slot: str | None = None) -> str:
        """All that the kubelet does to start a container. Raises grpc.RpcError."""
        self.see()
        slot = self.kubelet.admit(pod, container, slot)
        self.runtime.make_sandbox(pod)
        self.kubelet.pre_start(slot)
        self.runtime.run(pod, container)
        return slot

    def end(self, pod: dict) -> None:
        """A graceful deletion: containers first, then the object."""
        self.runtime.kill(pod["metadata"]["uid"])
        self.force_delete(pod)
        self.kubelet.forget(pod["metadata"]["uid"])

    def force_delete(self, pod: dict) -> None:
        self.api.remove(f"{PODS_HERE}/{pod['metadata']['name']}")

    def spec(self, slot: str) -> dict | None:
        path = self.folder / "cdi" / f"cardwise.dev-share-{slot}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def edits(self, slot: str) -> dict:
        return self.spec(slot)["devices"][0]["containerEdits"]

    def env(self, slot: str) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.edits(slot)["env"])

    def card(self, index: int) -> dict | None:
        return self.api.get(f"{RESOURCES}/{card_uuid(index).lower()}")

    def status(self, index: int) -> dict:
        return (self.card(index) or {}).get("status") or {}

    def node(self) -> dict:
        return self.api.get(f"{NODES}/{NODE}")

    def capacity(self, name: str) -> str | None:
        """What the node offers of a resource, capacity and allocatable being of one mind."""
        status = self.node()["status"]
        amounts = {status[kind].get(name) for kind in ("capacity", "allocatable")}
        return amounts.pop() if len(amounts) == 1 else "torn"

    def edit_node(self, **changes: object) -> None:
        """As somebody else does; a null takes away."""
        self.api.edit(f"{NODES}/{NODE}", **changes)

    def make_class(self, name: str, spec: dict) -> None:
        self.api.write_object(CLASSES, {"metadata": {"name": name}, "spec": spec})

    def writes(self) -> list[Request]:
        """What the agent has sent to the API server that was no question."""
        return [limit for limit in self.api.sent() if limit.verb not in ("get", "list", "watch")]

    def events(self, reason: str) -> list[str]:
        """The messages of events of this reason."""
        return self.recorder.messages(reason)

    def held_on_disk(self, index: int) -> int:
        total = 0
        for folder in (self.folder / "state" / "grants").iterdir():
            with contextlib.suppress(FileNotFoundError):  # freed under our eyes
                for path in list(folder.glob("*.json"))[:1]:  # each has all shares of its pod
                    shares = json.loads(path.read_text())["podShares"]
                    total += sum(share["mem"] for share in shares if share["index"] == index)
        return total


def _container(name: str, limits: Mapping[str, str]) -> dict:
    return {"name": name, "resources": {"limits": limits}}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because socket paths end at 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="cwdp-", dir=MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def rig(folder: Path) -> Iterator[Rig]:
    rig = Rig(folder)
    rig.start()
    yield rig
    rig.close()


@pytest.fixture
def idle_rig(folder: Path) -> Iterator[Rig]:
    """Not started yet."""
    rig = Rig(folder)
    yield rig
    rig.close()


def offers(rig: Rig, resource: str, amount: str | None) -> None:
    rig.settle()
    assert rig.capacity(resource) == amount


def health(rig: Rig) -> list[str | None]:
    return [rig.status(card["index"]).get("health") for card in rig.cards]


def told_of(rig, index: int) -> list[list[str]]:
    """The names of the pods that hold the card, by each status of it that was ever written."""
    path = f"{RESOURCES}/{card_uuid(index).lower()}/status"
    return [[held["name"] for held in limit.body["status"]["reported"]] for limit in rig.api.sent("patch", path)]


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Status and message of a gRPC call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def refused(call: Callable[[], object]) -> str:
    """The message of a gRPC call that may fail, "" when it does not."""
    try:
        call()
    except grpc.RpcError as error:
        return error.details()
    return ""
