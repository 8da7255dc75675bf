"""MPS on a real kubelet and containerd: manager (with the control double), device plugin and share agent together.

Bindings are made by hand and pods are written as the webhook would, so that no other part decides anything here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.mps import MpsState, Status
from cardwise.core.values.quantity import MiB, Percent
from cardwise.gpus import mpsfiles, usagereport
from cardwise.gpus.usagereport import ContainerUsage
from cardwise.kube import errors, paths
from tests.cluster import Cluster, ports
from tests.cluster import mps as manager
from tests.cluster.images import BUSYBOX
from tests.integration.node import claimed
from tests.integration.sharing import Space

pytestmark = [pytest.mark.cluster("bare"), pytest.mark.node]

NODE, MANAGER, PLUGIN = "n2", "mps-n2", "deviceplugin-n2"
P100 = 16276
BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parents[3]

# Tells what it was given into a folder that the host can read also while the API server is away.
TELL = """
env | grep CUDA_MPS
ls /run/cardwise/mps
stat -c 'socket %i' $CUDA_MPS_PIPE_DIRECTORY/control
echo it sees $(ls -A $CUDA_MPS_PIPE_DIRECTORY)
ln -sf /etc/passwd $CUDA_MPS_PIPE_DIRECTORY/log 2>&1
mount -o remount,rw $CUDA_MPS_PIPE_DIRECTORY 2>&1
cat /run/cardwise/share/share.json && echo
touch /run/cardwise/share/mine 2>&1
echo started
"""
TURNS = 12  # measurements of each kind
STAY = "trap 'exit 0' TERM; while [ ! -e /told/go ]; do sleep 0.2; done; rm /told/go; exit $(cat /told/code)"


class World:
    """A real node with a manager and two cards; makes pods and binds them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.space = Space(cluster, "by-hand-mps")
        self.node = cluster.node(NODE)
        self.root = manager.root(self.node.folder)
        inventory = yaml.safe_load((self.node.folder / "cards.yaml").read_text())
        self.uuids = [card["uuid"] for card in inventory["cards"]]

    def start(self) -> None:
        manager.open_up(self.node.folder, self.cluster.state_dir.parent)
        kubeconfig = f"--kubeconfig={self.cluster.kubeconfig}"
        (port,) = ports.free(1)
        self.address = f"127.0.0.1:{port}"
        flags = [flag for flag in manager.flags(self.node.folder, NODE) if not flag.startswith("--metrics-bind")]
        self.cluster.process(MANAGER).start(
            [str(BIN / "cardwise-mps"), kubeconfig, f"--metrics-bind={self.address}", *flags],
            manager.environment(),
        )
        self.cluster.process(PLUGIN).start(
            [
                str(BIN / "cardwise-deviceplugin"),
                kubeconfig,
                f"--node-name={NODE}",
                f"--simulated-gpus={self.node.folder / 'cards.yaml'}",
                f"--kubelet-dir={self.node.kubelet_dir}",
                f"--cdi-dir={self.node.cdi_dir}",
                f"--state-dir={self.node.folder / 'cardwise'}",
                f"--cri-socket={self.node.cri_socket}",
                f"--mps-root={self.root}",
                "--metrics-bind=127.0.0.1:0",
                "--claims",
            ]
        )
        self.wait(lambda: self.slots() == "512", "share slots in the node's status")
        for index in range(2):
            self.wait_ready(index)

    def slots(self) -> str:
        return str(self.cluster.api.get(paths.nodes(NODE))["status"]["allocatable"].get(names.SHARE, ""))

    # The cards.

    def home(self, index: int) -> Path:
        return Path(mps.card_daemon_folder(str(self.root), self.uuids[index]))

    def status(self, index: int) -> Status:
        state = mpsfiles.read_state(self.home(index))
        assert state is not None
        return state

    def mps_status(self, index: int) -> dict[str, Any]:
        """What the card's status says of MPS."""
        card = self.cluster.api.get(paths.extendedresources(self.uuids[index].lower()))
        return dict(card.get("status", {}).get("mps") or {})

    def wait_ready(self, index: int) -> None:
        self.wait(lambda: not mpsfiles.unready_reason(self.root, self.uuids[index]), f"MPS of card {index} is ready")

    def break_down(self, index: int) -> None:
        """kill -9 of the daemon; and the next one's server gets no further than starting."""
        (self.home(index) / mps.LOG_FOLDER / "server-starting").touch()
        os.kill(self.status(index).daemon_pid, signal.SIGKILL)
        self.wait(lambda: self.status(index).state is not MpsState.READY, f"MPS of card {index} is down")

    def heal(self, index: int) -> None:
        (self.home(index) / mps.LOG_FOLDER / "server-starting").unlink(missing_ok=True)

    def use(self, index: int, used: Mapping[str, int]) -> None:
        """What the driver says of the card from now on: so many MiB for a process of each of these pods, by UID."""
        path = self.node.folder / "cards.yaml"
        inventory = yaml.safe_load(path.read_text())
        inventory["cards"][index]["processes"] = [
            {"pid": process_of(uid), "memoryMiB": mib} for uid, mib in used.items()
        ]
        scratch = path.with_suffix(".new")
        scratch.write_text(yaml.safe_dump(inventory))
        scratch.replace(path)

    def usage(self, pod: str) -> ContainerUsage | None:
        """What the manager remembers of the pod's only container."""
        with urllib.request.urlopen(f"http://{self.address}{usagereport.PATH}", timeout=10) as response:
            report = usagereport.decode_report(response.read())
        return next((usage for usage in report.containers if usage.pod == pod), None)

    # Pods.

    def pod(
        self,
        name: str,
        index: int | None,
        mib: int,
        *,
        agent: bool = False,
        restart: str = "Always",
        isolation: str = "",
        by_claim: bool = False,
    ) -> str:
        """Creates and binds; returns the UID. `index` of its card, None: it has no share."""
        share = {"name": shareagent.VOLUME_NAME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
        main: dict[str, Any] = {
            "name": "main",
            "image": BUSYBOX,
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", f"echo 1 > /told/code; ({TELL}) >> /told/log 2>&1; {STAY}"],
            "resources": {"limits": {names.GPU_MEM: str(mib), names.SHARE: "1"} if index is not None else {}},
            "volumeMounts": [{"name": "told", "mountPath": "/told"}],
        }
        if agent:
            mount = {"name": shareagent.VOLUME_NAME, "mountPath": shareagent.FOLDER, "subPath": "0", "readOnly": True}
            main["volumeMounts"].append(mount)
        spec = {
            "schedulerName": "by-hand",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": restart,
            "volumes": [{"name": "told", "emptyDir": {}}, share, *(PYTHON if agent else ())],
            "initContainers": [sidecar()] if agent else [],
            "containers": [main],
        }
        if by_claim:
            claimed.use_claim(spec)
        uid = self.space.create({"metadata": {"name": name}, "spec": spec})
        annotations = {names.ISOLATION: isolation} if isolation else {}
        if index is not None:
            card_share = CardShare(index, self.uuids[index], MiB(mib), Percent(25), MiB(P100))
            assignment = Assignment({"0": (card_share,)})
            annotations |= codec.encode(assignment, assume_time_ns=time.time_ns())
            if by_claim:
                claimed.allocate(self.space, name, assignment, NODE)
        metadata = {"name": name, "uid": uid, "annotations": annotations}
        binding = {"metadata": metadata, "target": {"kind": "Node", "name": NODE}}
        self.cluster.api.create(paths.pods(self.space.name, name, "binding"), binding)
        return uid

    def _volume(self, uid: str) -> Path:
        return self.node.kubelet_dir / "pods" / uid / "volumes" / "kubernetes.io~empty-dir" / "told"

    def output_of(self, uid: str) -> list[str]:
        path = self._volume(uid) / "log"
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, uid: str) -> int:
        return self.output_of(uid).count("started")

    def waiting(self, uid: str) -> str:
        """Why containers of the pod wait, as its status says."""
        (pod,) = (pod for pod in self.space.pods() if pod["metadata"]["uid"] == uid)
        states = [status["state"] for status in pod["status"].get("containerStatuses", ())]
        return " ".join(str((state.get("waiting") or {}).get("message", "")) for state in states)

    def exit(self, uid: str, code: int = 1) -> None:
        (self._volume(uid) / "code").write_text(str(code))
        (self._volume(uid) / "go").touch()

    def started(self, uid: str, count: int = 1) -> list[str]:
        """What the container has told in all, once it has started so often."""
        self.wait(lambda: self.starts(uid) >= count, f"start {count} of {uid}")
        assert self.starts(uid) == count
        return self.output_of(uid)

    def wait(self, ready: Callable[[], object], event: str) -> None:
        def so() -> bool:
            try:
                return bool(ready())
            except errors.KubeError:
                return False

        self.cluster.wait(so, event)


def process_of(uid: str) -> int:
    """The main process of the pod's container, by its mounts: the manager goes by cgroups."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            mounts = (entry / "mountinfo").read_text() if entry.name.isdigit() else ""
            if f"/{uid}/volumes/kubernetes.io~empty-dir/told /told " in mounts:
                command = (entry / "cmdline").read_text()
                if command.startswith("/bin/sh"):
                    return int(entry.name)
    raise AssertionError(f"pod {uid} has no process")


# The machine's own Python and this repository, in place of an image of ours.
PYTHON = [
    {"name": name, "hostPath": {"path": path}}
    for name, path in (("python", sys.base_prefix), ("lib", "/lib"), ("lib64", "/lib64"), ("source", str(REPOSITORY)))
]
AGENT = ["/python/bin/python3", "-m", "mps.agent"]


def sidecar() -> dict[str, Any]:
    """As docs/design/0007-share-agent.md has it."""
    env = {"PYTHONHOME": "/python", "PYTHONPATH": "/source", "LD_LIBRARY_PATH": "/python/lib"}
    mounts = [{"name": volume["name"], "mountPath": f"/{volume['name']}", "readOnly": True} for volume in PYTHON]
    return {
        "name": shareagent.CONTAINER_NAME,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "restartPolicy": "Always",
        "command": AGENT,
        "resources": {"limits": {names.SHARE: "1"}},
        "env": [{"name": name, "value": text} for name, text in env.items()],
        "volumeMounts": [*mounts, {"name": shareagent.VOLUME_NAME, "mountPath": shareagent.FOLDER}],
        "startupProbe": {
            "exec": {"command": [*AGENT, "--probe"]},
            "periodSeconds": 1,
            "timeoutSeconds": 30,
            "failureThreshold": 43200,
        },
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


@pytest.fixture(scope="module")
def world(cluster: Cluster) -> Iterator[World]:
    world = World(cluster)
    world.start()
    yield world
    for name in (PLUGIN, MANAGER):
        cluster.process(name).stop()


@pytest.fixture(autouse=True)
def clean(world: World) -> Iterator[None]:
    yield
    for index in range(2):
        world.heal(index)
        world.wait_ready(index)
    world.space.clear()


def inode(world: World, index: int) -> int:
    return (world.home(index) / mps.PIPE_FOLDER / mps.CONTROL_SOCKET).stat().st_ino


def test_use_of_a_container_is_measured_from_its_processes_on_the_node(world):
    uid = world.pod("measured", 0, 2000)
    idle = world.pod("idle", 0, 1000)
    world.started(uid)
    world.started(idle)
    world.use(0, {uid: 700})
    world.wait(lambda: (usage := world.usage("measured")) and 700 in usage.peaks_mib, "use is measured")
    usage = world.usage("measured")
    assert (usage.namespace, usage.container, usage.workload) == (world.space.name, "main", "Pod/measured")
    assert (usage.gpu, usage.granted_mib, usage.idle_seconds) == (world.uuids[0], 2000, None)
    assert set(world.usage("idle").peaks_mib) == {0}, "it holds a share and uses nothing"
    world.use(0, {})


def test_a_container_goes_through_the_daemon_of_its_card_and_sees_no_other(world):
    for index in range(2):
        output = world.started(world.pod(f"on{index}", index, 8138))
        assert f"CUDA_MPS_PIPE_DIRECTORY={mps.CONTAINER_PIPE}" in output
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8138M" in output
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in output
        assert f"socket {inode(world, index)}" in output
        assert output.count("pipe") == 1, "only its card's pipe is there"
        assert "it sees control" in output, "of the daemon's files only its socket"
        assert any("log" in line and "Read-only file system" in line for line in output), "root plants no link there"
        assert world.status(index).ceilings[world.uuids[index]] >= 8138, "raised before it started"


def test_a_container_by_claim_starts_again_only_while_mps_is_ready(world):
    """The kubelet calls nobody for its restart: the start block holds."""
    uid = world.pod("a", 0, 8138, agent=True, isolation="mps", by_claim=True)
    output = world.started(uid)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8138M" in output
    assert f"socket {inode(world, 0)}" in output
    world.break_down(0)
    world.wait(lambda: claimed.blocked_starts(world.node.cdi_dir), "the start is blocked")
    world.exit(uid)
    world.wait(lambda: "MPS on GPU" in world.waiting(uid), "it says why it waits")
    other = world.pod("other", 1, 8138, isolation="mps", by_claim=True)
    world.started(other)
    assert world.starts(uid) == 1
    world.heal(0)
    assert f"socket {inode(world, 0)}" in world.started(uid, 2)[-20:]


def test_who_uses_more_than_his_share_or_another_card_is_told_so_at_his_pod(world):
    greedy, modest = world.pod("greedy", 0, 1000), world.pod("modest", 0, 1000)
    for uid in (greedy, modest):
        world.started(uid)
    world.use(0, {greedy: 5000, modest: 1500})
    world.use(1, {greedy: 70})
    try:
        card, other = world.uuids
        overrun = f"MemoryOverrun: container main uses 5000 MiB of card {card} and has a share of 1000 MiB"
        wrong = f"WrongGPU: container main uses 70 MiB of card {other} without a share of it (it has {card})"
        for message in (overrun, wrong):
            world.wait(lambda message=message: message in world.space.reasons("greedy"), message)
        world.use(0, {greedy: 5000, modest: 6000})
        world.wait(lambda: "main uses 6000 MiB" in world.space.reasons("modest"), "he is looked at too")
        assert "uses 1500" not in world.space.reasons("modest"), "a context of its own is tolerated"
    finally:
        for index in range(2):
            world.use(index, {})


def test_nothing_starts_on_a_card_whose_daemon_was_killed_until_it_is_healed(world):
    before = world.pod("before", 0, 4000)
    world.started(before)
    world.break_down(0)
    world.exit(before)
    after = world.pod("after", 0, 4000)
    other = world.pod("other", 1, 4000)
    world.started(other)
    for name in ("before", "after"):
        world.wait(lambda name=name: f"GPU {world.uuids[0]}" in world.space.reasons(name), f"{name} is told why")
    assert (world.starts(before), world.starts(after)) == (1, 0)
    world.heal(0)
    output = world.started(before, 2)
    assert output.count("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4000M") == 2, "never without its limit"
    assert f"socket {inode(world, 0)}" in output, "the new daemon's"
    world.started(after)


@pytest.mark.parametrize("failure", ["stop", "kill"])
def test_a_manager_that_stays_away_closes_its_cards_and_leaves_what_runs_alone(world, failure):
    runs = world.pod("runs", 0, 1000)
    world.started(runs)
    daemon = world.status(0).daemon_pid
    getattr(world.cluster.process(MANAGER), failure)()
    for index in range(2):
        world.wait(lambda index=index: world.mps_status(index).get("state") == MpsState.DOWN, "the cluster knows")
    name = f"late-{failure}"  # events stay
    late = world.pod(name, 1, 1000)
    world.wait(lambda: "no MPS manager runs on this node" in world.space.reasons(name), "it is told why")
    assert mpsfiles.is_daemon_listening(world.home(0) / mps.CLIENTS_FOLDER), "its daemon serves who is on the card"
    world.cluster.process(MANAGER).restart()
    world.started(late)
    for index in range(2):
        world.wait(lambda index=index: world.mps_status(index).get("state") == MpsState.READY, "the cluster knows")
    assert world.status(0).daemon_pid == daemon, "the daemon was taken over"
    assert (world.starts(runs), world.starts(late)) == (1, 1)


@pytest.mark.soak  # the device plugin waits for 20 s after the status is 20 s old
def test_a_manager_that_stands_still_keeps_containers_back_until_it_goes_on(world):
    """Its daemons go on, so what runs is served; and the card's status is not believed any more."""
    runs = world.pod("runs-on", 0, 1000)
    world.started(runs)
    daemon = world.status(0).daemon_pid
    with contextlib.ExitStack() as stack:
        world.cluster.process(MANAGER).pause()
        stack.callback(world.cluster.process(MANAGER).resume)
        began = time.monotonic()
        for index in range(2):
            world.wait(lambda index=index: world.mps_status(index).get("state") == MpsState.DOWN, "the cluster knows")
        print(f"the cluster knew after {time.monotonic() - began:.0f} s")
        late = world.pod("late-frozen", 1, 1000)
        world.wait(lambda: "MPS manager" in world.space.reasons("late-frozen"), "it is told why")
        assert mpsfiles.is_daemon_listening(world.home(0) / mps.CLIENTS_FOLDER), "its daemon serves who is on the card"
        assert (world.starts(runs), world.starts(late)) == (1, 0)
    world.started(late)
    for index in range(2):
        world.wait(lambda index=index: world.mps_status(index).get("state") == MpsState.READY, "the cluster knows")
    assert world.status(0).daemon_pid == daemon, "the daemon is the same"
    assert (world.starts(runs), world.starts(late)) == (1, 1)


@contextlib.contextmanager
def another_daemon(world: World, index: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An MPS daemon of the machine that serves the card."""
    environment = dict(os.environ) | {
        mps.PIPE_ENV: str(folder / "pipe"),
        mps.LOG_ENV: str(folder / "log"),
        "CUDA_VISIBLE_DEVICES": world.uuids[index],
    }
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    another = subprocess.Popen([manager.DOUBLE / "nvidia-cuda-mps-control", "-f"], env=environment)
    try:
        yield another
    finally:
        another.kill()
        another.wait()


@pytest.mark.soak  # its numbers go to docs/measured.md
def test_how_long_pods_take_from_their_creation_to_their_first_line_with_mps_and_without(world, tmp_path):
    """In turns, so that what else the machine does falls on all alike."""
    seconds: dict[str, list[float]] = {}

    def measure(kind: str, name: str, *, with_mps: bool = False, **settings: Any) -> None:
        began = time.monotonic()
        uid = world.pod(name, **settings)
        while not world.starts(uid):
            assert time.monotonic() - began < 120.0, world.space.reasons(name)
            time.sleep(0.01)
        seconds.setdefault(kind, []).append(time.monotonic() - began)
        assert any("CUDA_MPS" in line for line in world.output_of(uid)) is with_mps
        world.space.clear()

    with another_daemon(world, 1, tmp_path):
        world.cluster.process(MANAGER).restart()
        world.wait(lambda: world.mps_status(1).get("state") == MpsState.UNAVAILABLE, "one card is without MPS")
        world.wait_ready(0)
        for turn in range(TURNS):
            measure("no GPU", f"plain-{turn}", index=None, mib=0)
            measure("a share without MPS", f"without-{turn}", index=1, mib=1000)
            measure("a share with MPS", f"with-{turn}", index=0, mib=1000, with_mps=True)
            measure("the same with the share agent", f"agent-{turn}", index=0, mib=1000, agent=True, with_mps=True)
        for turn in range(TURNS):
            measure("no GPU, one after the other", f"managed-{turn}", index=None, mib=0)
        world.cluster.process(MANAGER).stop()
        for turn in range(TURNS):
            measure("no GPU, one after the other, without a manager", f"unmanaged-{turn}", index=None, mib=0)
    world.cluster.process(MANAGER).restart()
    for kind, times in seconds.items():
        ordered = sorted(times)
        print(f"{kind}: p50 {ordered[len(ordered) // 2]:.2f} s, min {ordered[0]:.2f} s, max {ordered[-1]:.2f} s")


def test_beside_another_mps_daemon_pods_share_the_card_without_mps_until_they_have_ended(world, tmp_path):
    """The daemon is the machine's, as a systemd unit would start it. A manager that starts looks at once."""
    with another_daemon(world, 1, tmp_path) as another:
        world.cluster.process(MANAGER).restart()
        world.wait(lambda: world.mps_status(1).get("state") == MpsState.UNAVAILABLE, "the cluster knows")
        assert f"(process {another.pid}, folder {tmp_path / 'pipe'}): end it" in world.mps_status(1)["reason"]
        world.wait_ready(0)  # the other card is not its
        free, agreed = world.pod("free", 1, 1000), world.pod("agreed", 1, 1000, agent=True)
        required = world.pod("demands", 1, 1000, isolation="mps")
        for uid in (free, agreed):
            assert not any("CUDA_MPS" in line for line in world.started(uid))
        assert '"enforced": "advisory"' in next(line for line in world.output_of(agreed) if line.startswith("{"))
        world.wait(
            lambda: "is Unavailable, not Ready: an MPS daemon that" in world.space.reasons("demands"), "it waits"
        )
    world.cluster.process(MANAGER).restart()
    world.wait(lambda: "have ended" in world.mps_status(1).get("reason", ""), "MPS waits for the pods")
    assert (world.starts(free), world.starts(agreed), world.starts(required)) == (1, 1, 0)
    world.exit(free)
    assert not any("CUDA_MPS" in line for line in world.started(free, 2)), "it goes on as it began"
    world.space.clear()
    world.wait_ready(1)


def agent(world: World, name: str) -> dict[str, Any]:
    statuses = world.space.get(name)["status"].get("initContainerStatuses") or [{}]
    return dict(statuses[0])


def test_the_agent_holds_the_pod_back_tells_it_its_share_and_ends_with_it(world):
    world.break_down(1)
    uid = world.pod("job", 1, 8138, agent=True, restart="Never")
    world.wait(lambda: "running" in agent(world, "job").get("state", {}), "the agent runs")
    world.wait(lambda: "Startup probe failed: MPS on GPU" in world.space.reasons("job"), "see the pod's events")
    assert agent(world, "job")["started"] is False
    assert world.starts(uid) == 0
    world.heal(1)
    output = world.started(uid)
    share = next(json.loads(line) for line in output if line.startswith("{"))
    assert share == {
        "card": 1,
        "uuid": world.uuids[1],
        "limitMiB": 8138,
        "totalMiB": P100,
        "fraction": 0.5,
        "enforced": "mps",
    }
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8138M" in output
    assert any("Read-only file system" in line for line in output), "nobody but the agent writes there"
    seen = world.space.kubectl(
        "exec", "job", "-c", shareagent.CONTAINER_NAME, "--", "sh", "-c",
        f"id -u; ls {shareagent.MPS_ROOT}; ls {shareagent.MPS_ROOT}/*/log; ls -d /run/cardwise/node/mps/*/pipe; "
        f"touch {shareagent.MPS_ROOT}/*/ready; env | grep CUDA; ls /dev | grep nvidia; true",
    ).splitlines()  # fmt: skip
    home = world.home(1).name
    assert seen == ["65532", home, f"{shareagent.MPS_ROOT}/{home}/pipe"], "its card's state, and nobody's log"
    world.exit(uid, 0)
    world.wait(lambda: world.space.get("job")["status"]["phase"] == "Succeeded", "the Job's pod completes")
    terminated = agent(world, "job")["state"]["terminated"]
    assert terminated["exitCode"] == 0
    assert agent(world, "job")["restartCount"] == 0
