"""The test cluster itself: what all other integration tests stand on, and that it leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cardwise.kube import paths
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as stubs
from tests.cluster import Cluster, ClusterSpec, CommandFailed, cards, images, processes, versions
from tests.cluster.__main__ import main
from tests.cluster.node import Node
from tests.cluster.processes import wait_for
from tests.cluster.simnodes import RUN_SECONDS
from tests.integration.sharing import Space, cgroups

pytestmark = [pytest.mark.cluster("bare"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SIM_NODES = 3
ONE_CARD = "test.cardwise.dev/card"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A short path of its own: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="cwt-", dir="/tmp"))
    yield folder
    left = Cluster.leftovers(folder)
    if left not in ([], [f"folder {folder}"]):
        Cluster(folder).stop()  # else it would run on beside all later tests
        pytest.fail(f"left: {left}")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def sims(cluster: Cluster) -> Iterator[list[str]]:
    """Simulated nodes."""
    with Space(cluster, "cluster") as made:
        yield made.nodes(SIM_NODES)


def pod(name: str, *, node: str | None = None, command: str | None = None, **metadata: Any) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "main", "image": images.BUSYBOX, "imagePullPolicy": "IfNotPresent"}
    if command:
        container["command"] = ["sh", "-c", command]
    spec: dict[str, Any] = {"containers": [container], "restartPolicy": "Never"}
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


def wait_phase(space: Space, name: str, wanted: str) -> None:
    space.wait(lambda: space.phase(name) == wanted, f"pod {name} is {wanted}")


def ends_at_term(space: Space, *pods: str) -> None:
    """They end at once, and not after their grace period of 30 s."""
    began = time.monotonic()
    space.delete(*pods)
    space.gone(*pods)
    assert time.monotonic() - began < 25


def test_the_control_plane_runs_a_deployment(cluster: Cluster, space: Space) -> None:
    version = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]
    assert version["gitVersion"] == versions.version()
    # Controllers make the pods and the scheduler finds the nodes: all four processes have a hand in it.
    template = {"metadata": {"labels": {"app": "d"}}, "spec": pod("d")["spec"] | {"restartPolicy": "Always"}}
    template["spec"]["nodeSelector"] = {"cardwise.dev/simulated": "true"}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment"}
    spec = {"replicas": 4, "selector": {"matchLabels": {"app": "d"}}, "template": template}
    space.kubectl("apply", "-f", "-", stdin=json.dumps(deployment | {"metadata": {"name": "d"}, "spec": spec}))
    space.kubectl("rollout", "status", "deployment/d", "--timeout=60s")
    space.kubectl("delete", "deployment", "d", "--cascade=foreground", "--timeout=60s")


def test_kubectl_failing_says_what_kubectl_said(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match='pods "nobody" not found'):
        cluster.kubectl("get", "pod", "nobody")
    assert cluster.kubectl("get", "pod", "nobody", check=False) == ""


def test_a_stopped_scheduler_binds_nothing_until_it_goes_on(cluster: Cluster, space: Space, sims: list[str]) -> None:
    scheduler = cluster.process("kube-scheduler")
    scheduler.pause()
    try:
        space.create(pod("late", node=sims[0]))
        # Another process than the one that stands still works on.
        space.create(pod("by-hand", node=sims[0]) | {"spec": pod("by-hand")["spec"] | {"nodeName": sims[0]}})
        wait_phase(space, "by-hand", "Running")
        assert space.phase("late") == "Pending"
    finally:
        scheduler.resume()
    wait_phase(space, "late", "Running")


def test_who_was_paused_stands_still(state_dir: Path) -> None:
    """Also what waits for a CPU at that moment."""
    busy = processes.Process(state_dir, "busy")
    busy.start(["sh", "-c", "for i in $(seq 32); do (while :; do :; done) & done; wait"])
    try:
        assert wait_for(lambda: len(processes.children(busy.pid)) == 32)
        for _ in range(5):
            busy.pause()
            states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in processes.children(busy.pid)]
            assert states == ["T"] * 32
            busy.resume()
    finally:
        busy.kill()


def test_a_killed_scheduler_is_another_process_after_restart(cluster: Cluster, space: Space, sims: list[str]) -> None:
    scheduler = cluster.process("kube-scheduler")
    before = scheduler.pid
    scheduler.kill()
    assert not scheduler.alive()
    scheduler.restart()
    assert scheduler.alive()
    assert scheduler.pid != before
    space.create(pod("after", node=sims[0]))
    wait_phase(space, "after", "Running")


def test_a_simulated_pod_runs_ends_and_is_deleted(space: Space, sims: list[str]) -> None:
    space.create(pod("sim-stays", node=sims[1]))
    space.create(pod("sim-ends", node=sims[1], annotations={RUN_SECONDS: "0.5"}))
    wait_phase(space, "sim-ends", "Succeeded")
    assert space.phase("sim-stays") == "Running"
    space.kubectl("wait", "--for=condition=Ready", "pod/sim-stays", "--timeout=60s")
    ends_at_term(space, "sim-stays", "sim-ends")  # nobody but the keeper can end them earlier


def test_simulated_nodes_have_cards(cluster: Cluster, sims: list[str]) -> None:
    assert len(sims) == SIM_NODES
    for name in sims:
        node = cluster.api.get(paths.nodes(name))
        assert node["status"]["allocatable"]["aliyun.com/gpu-mem"] == "32552"
        assert not node["spec"].get("taints")
    found = cluster.api.get(paths.extendedresources())["items"]
    resources = [one for one in found if one["spec"]["node"] in sims]
    indices = sorted((r["spec"]["node"], r["spec"]["index"]) for r in resources)
    assert indices == [(name, index) for name in sims for index in (0, 1)]
    assert {r["status"]["health"] for r in resources} == {"Healthy"}


class OneCard(stubs.DevicePluginServicer):
    """The least of a device plugin: one device, delivered by CDI. It runs outside of the node's namespace."""

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802 - the names of the protocol
        return wire.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield wire.ListAndWatchResponse(devices=[wire.Device(ID="one", health="Healthy")])
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait()

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = wire.ContainerAllocateResponse(cdi_devices=[wire.CDIDevice(name="test.cardwise.dev/card=one")])
        return wire.AllocateResponse(container_responses=[answer])


@contextmanager
def one_card_plugin(node: Node) -> Iterator[None]:
    folder = node.kubelet_dir / "device-plugins"
    server = grpc.server(ThreadPoolExecutor(4))
    stubs.add_DevicePluginServicer_to_server(OneCard(), server)
    server.add_insecure_port(f"unix://{folder / 'test.sock'}")
    server.start()
    try:
        with grpc.insecure_channel(f"unix://{folder / 'kubelet.sock'}") as channel:
            request = wire.RegisterRequest(version="v1beta1", endpoint="test.sock", resource_name=ONE_CARD)
            stubs.RegistrationStub(channel).Register(request, timeout=5)
        yield
    finally:
        server.stop(grace=0).wait()


@pytest.mark.node
class TestRealNode:
    def test_a_pod_runs_speaks_and_goes(self, space: Space) -> None:
        space.create(pod("real", node="n1", command="echo hello; trap 'exit 0' TERM; sleep 600 & wait"))
        wait_phase(space, "real", "Running")
        assert wait_for(lambda: space.kubectl("logs", "real") == "hello\n")
        assert space.kubectl("exec", "real", "--", "cat", "/etc/hostname") == "real\n"
        ends_at_term(space, "real")

    def test_the_idle_image_hears_term(self, space: Space) -> None:
        space.create(pod("idle", node="n2"))
        wait_phase(space, "idle", "Running")
        ends_at_term(space, "idle")

    def test_nodes_have_device_plugin_folders_of_their_own(self, cluster: Cluster, space: Space) -> None:
        sockets = [node.kubelet_dir / "device-plugins" / "kubelet.sock" for node in cluster.nodes]
        assert [socket.is_socket() for socket in sockets] == [True, True]
        assert len({socket.stat().st_ino for socket in sockets}) == 2
        assert all((node.kubelet_dir / "pod-resources" / "kubelet.sock").is_socket() for node in cluster.nodes)
        # Restarting one kubelet makes its socket anew and leaves the other's alone.
        before = [socket.stat().st_ctime_ns for socket in sockets]
        cluster.process("kubelet-n1").restart()
        assert wait_for(lambda: sockets[0].is_socket() and sockets[0].stat().st_ctime_ns != before[0])
        assert sockets[1].stat().st_ctime_ns == before[1]

    def test_a_pod_outlives_kubelet_and_containerd(self, cluster: Cluster, space: Space) -> None:
        space.create(pod("survivor", node="n2"))
        wait_phase(space, "survivor", "Running")
        since = ("exec", "survivor", "--", "cut", "-d", " ", "-f", "22", "/proc/1/stat")  # start time, proc(5)
        started = space.kubectl(*since)
        cluster.process("kubelet-n2").kill()
        cluster.process("containerd-n2").kill()
        cluster.node("n2").restart_containerd()
        cluster.process("kubelet-n2").restart()
        assert wait_for(lambda: space.kubectl(*since, check=False) == started)

    def test_a_card_opens_only_in_the_container_that_was_given_it(self, cluster: Cluster, space: Space) -> None:
        node = cluster.node("n1")
        inventory = yaml.safe_load((node.folder / "cards.yaml").read_text())["cards"]
        assert [(c["index"], c["containerPath"], c["healthy"]) for c in inventory] == [
            (0, "/dev/nvidia0", True),
            (1, "/dev/nvidia1", True),
        ]
        given = {"path": "/dev/nvidia1", "hostPath": inventory[1]["device"], "permissions": "rw"}
        device = {"name": "one", "containerEdits": {"deviceNodes": [given]}}
        spec = {"cdiVersion": "0.6.0", "kind": "test.cardwise.dev/card", "devices": [device]}
        (node.cdi_dir / "test.json").write_text(json.dumps(spec))
        asking = pod("given", node="n1")
        asking["spec"]["containers"][0]["resources"] = {"limits": {ONE_CARD: 1}}
        with one_card_plugin(node):
            for made in (asking, pod("bare", node="n1")):
                space.create(made)
            for name in ("given", "bare"):
                wait_phase(space, name, "Running")

        def opens(name: str, index: int, path: str) -> str:
            number = Path(inventory[index]["device"]).stat().st_rdev
            make = f"[ -e {path} ] || mknod {path} c {os.major(number)} {os.minor(number)}"
            return space.kubectl("exec", name, "--", "sh", "-c", f"{make}; (exec 3<{path}) 2>&1 && echo open")

        try:
            assert opens("given", 1, "/dev/nvidia1") == "open\n"
            # What it was not given it may make a node for, and yet not open: that is the device cgroup, not the node.
            for name, index in (("given", 0), ("bare", 0), ("bare", 1)):
                with pytest.raises(CommandFailed):
                    opens(name, index, f"/dev/own{index}")
                refusal = space.kubectl("exec", name, "--", "sh", "-c", f"(exec 3</dev/own{index}) 2>&1; true")
                assert "Operation not permitted" in refusal
        finally:
            (node.cdi_dir / "test.json").unlink()

    def test_an_image_made_of_a_folder_runs(self, cluster: Cluster, space: Space, tmp_path: Path) -> None:
        (tmp_path / "root" / "bin").mkdir(parents=True)
        shutil.copy("/bin/busybox", tmp_path / "root" / "bin" / "sh")
        (tmp_path / "root" / "motto").write_text("made on the spot\n")
        archive, name = tmp_path / "image.tar", "cardwise.local/motto:1"
        command = ["/bin/sh", "-c", "while read line; do echo $line; done < /motto"]
        images.write(archive, name, images.layer_of(tmp_path / "root"), command)
        cluster.node("n1").load_image(archive)
        made = pod("motto", node="n1")
        made["spec"]["containers"][0]["image"] = name
        space.create(made)
        wait_phase(space, "motto", "Succeeded")
        assert space.kubectl("logs", "motto") == "made on the spot\n"

    def test_pods_of_two_nodes_reach_each_other(self, space: Space) -> None:
        serve = "trap 'exit 0' TERM; while :; do echo answer | nc -l -p 8000; done & wait"
        for made in (pod("server", node="n1", command=serve), pod("caller", node="n2")):
            space.create(made)
        for name in ("server", "caller"):
            wait_phase(space, name, "Running")
        address = space.get("server")["status"]["podIP"]
        call = ("exec", "caller", "--", "timeout", "3", "nc", address, "8000")
        assert wait_for(lambda: space.kubectl(*call, check=False) == "answer\n")


def test_eight_cards_of_a_node_are_eight_devices() -> None:
    numbers = cards.device_numbers(8)
    assert len(set(numbers)) == 8
    allowed_everywhere = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)} | {os.makedev(5, 0), os.makedev(10, 200)}
    assert not allowed_everywhere & set(numbers)


@pytest.mark.parametrize(
    ("folder", "says"),
    [("/tmp/" + "x" * 60, "shorten it"), ("/var/lib/cwt", "under /tmp"), ("/run/cwt", "under /tmp")],
)
def test_a_folder_that_cannot_work_is_refused_before_anything_starts(folder: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Cluster.start(ClusterSpec(state_dir=Path(folder), nodes=1, parts=False))
    assert not Path(folder).exists()


HARNESS = """
import sys
from pathlib import Path
from tests.cluster import Cluster, ClusterSpec
nodes = int(sys.argv[2])
cluster = Cluster.start(ClusterSpec(state_dir=Path(sys.argv[1]), nodes=nodes, sim_nodes=1, parts=False))
print("up", flush=True)
sys.stdin.read()
"""


def outside() -> dict[str, str]:
    """What a kubelet and containerd on the machine itself would write: fixed folders and kernel settings."""
    fixed = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers", "/usr/libexec/kubernetes")
    fixed += ("/opt/containerd", "/opt/nri", "/run/containerd", "/etc/cni")
    settings = [Path("/proc/sys") / name for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")]
    settings.append(Path("/proc/sys/net/ipv4/ip_forward"))
    found = {path: str(Path(path).exists()) for path in fixed}
    return found | {str(path): path.read_text() for path in settings}


def links_of(cluster: Cluster) -> list[Path]:
    """The cluster's bridge and what is plugged into it."""
    bridge = Path("/sys/class/net") / cluster.network.bridge
    return [bridge, *(bridge.parent / port.name for port in (bridge / "brif").iterdir())]


def cli(*arguments: str) -> str:
    return processes.run([sys.executable, "-m", "tests.cluster", *arguments], timeout=120)


@pytest.mark.node
class TestKilledHarness:
    def test_up_clears_what_was_killed_half_way_and_down_leaves_nothing_after_kill_9(self, state_dir: Path) -> None:
        machine = outside()
        command = [sys.executable, "-c", HARNESS, str(state_dir), "1"]
        harness = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        try:
            # In the middle of the start: containerd runs, no kubelet yet.
            assert wait_for((state_dir / "run" / "containerd-n1.json").exists)
        finally:
            harness.send_signal(signal.SIGKILL)
            harness.communicate()
        half = processes.marked(state_dir)
        assert half
        harness = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert harness.stdout is not None
            assert harness.stdout.readline() == "up\n"
            assert [pid for pid in half if processes.start_time(pid)] == []
            cluster = Cluster.attach(state_dir)
            assert cluster.kubectl("get", "nodes", "-o", "name").split() == ["node/n1", "node/sim-1"]
            space = Space(cluster, "left")
            for made in (pod("left", node="n1"), pod("sim-left", node="sim-1")):
                space.create(made)
            space.running("left", "sim-left")
            (status,) = space.get("left")["status"]["containerStatuses"]
            container = status["containerID"].removeprefix("containerd://")
        finally:
            harness.send_signal(signal.SIGKILL)
            harness.communicate()
        links = links_of(cluster)
        assert len(links) == 2  # the bridge, and the pod's end of a pair
        assert cgroups(container)
        assert outside() == machine  # nor did it write there while it ran
        survivors = processes.marked(state_dir)
        # etcd, apiserver, controllers, scheduler, keeper; the node's namespace, containerd, kubelet and shim.
        assert len(survivors) >= 9
        cli("down", "--state-dir", str(state_dir))
        assert Cluster.leftovers(state_dir) == []
        # And by other eyes than the harness's own.
        assert [pid for pid in survivors if processes.start_time(pid)] == []
        assert not cgroups(container)
        assert wait_for(lambda: not [link for link in links if link.exists()])
        # Others on the machine may have mounted something meanwhile; all that is the cluster's lies in its folder.
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        assert [mount for mount in mounts if str(state_dir) in mount] == []

    def test_down_clears_an_up_that_was_killed_half_way(self, state_dir: Path) -> None:
        up = [sys.executable, "-m", "tests.cluster", "up", "--state-dir", str(state_dir), "--no-parts"]
        harness = subprocess.Popen(up, cwd=ROOT)
        try:
            assert wait_for((state_dir / "run" / "namespace-n1.json").exists)
        finally:
            harness.send_signal(signal.SIGKILL)
            harness.wait()
        survivors = processes.marked(state_dir)
        assert survivors
        assert "nothing left" in cli("down", "--state-dir", str(state_dir))
        assert Cluster.leftovers(state_dir) == []
        assert [pid for pid in survivors if processes.start_time(pid)] == []


def test_real_nodes_without_root_are_refused_with_the_way_out(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match=r"need root .* use --nodes 0 with --sim-nodes instead"):
        Cluster.start(ClusterSpec(state_dir=state_dir, nodes=1))
    assert list(state_dir.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "nodes: [",
        "two cards",
        "- memoryMiB: 16276",
        "",
        "default: [{model: Tesla-P100}]",
        "default: [{memoryMiB: plenty}]",
        "nodes: {n1: 2}",
    ],
)
def test_a_cards_file_that_cannot_be_read_says_what_to_write(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text(text)
    command = ["tests.cluster", "up", "--state-dir", str(state_dir), "--nodes", "0", "--cards", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as failed:
        main()
    said = str(failed.value)
    assert f"tests.cluster: {file}: " in said
    assert "write `nodes: {n1: [{model: Tesla-P100, memoryMiB: 16276}]}` and `default: [...]`" in said


def test_env_speaks_shell(cluster: Cluster) -> None:
    exports = cli("env", "--state-dir", str(cluster.state_dir))
    shown = processes.run(["bash", "-c", f"{exports}\nkubectl get namespace default -o name"])
    assert shown == "namespace/default\n"


def test_down_of_nothing_is_fine(state_dir: Path) -> None:
    assert "no cluster" in cli("down", "--state-dir", str(state_dir / "none"))
