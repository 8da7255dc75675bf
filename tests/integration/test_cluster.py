"""The test cluster itself: what all other integration tests stand on, and that it leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, ClusterSpec, cards, images, processes, versions
from tests.cluster.__main__ import main
from tests.cluster.processes import wait_for
from tests.integration.sharing import Space, cgroups

pytestmark = [pytest.mark.cluster("bare")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A short path of its own: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="cwt-", dir="/tmp"))
    yield folder
    leftovers = Cluster.leftovers(folder)
    if leftovers not in ([], [f"folder {folder}"]):
        Cluster(folder).stop()  # else it would run on beside all later tests
        pytest.fail(f"left: {leftovers}")
    shutil.rmtree(folder, ignore_errors=True)


def pod(name: str, node: str) -> dict[str, Any]:
    container = {"name": "main", "image": images.BUSYBOX, "imagePullPolicy": "IfNotPresent"}
    spec = {"containers": [container], "nodeSelector": {"kubernetes.io/hostname": node}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_who_was_paused_stands_still(state_dir: Path) -> None:
    """Also what waits for a CPU at that moment."""
    busy = processes.Process(state_dir, "busy")
    loops = 4 * (os.cpu_count() or 1)
    busy.start(["nice", "-n", "19", "sh", "-c", f"for i in $(seq {loops}); do (while :; do :; done) & done; wait"])
    try:
        assert wait_for(lambda: len(processes.children(busy.pid)) == loops)
        for _ in range(3):
            busy.pause()
            states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in processes.children(busy.pid)]
            assert states == ["T"] * loops
            busy.resume()
    finally:
        busy.kill()


def test_who_was_killed_is_gone_with_all_workers(state_dir: Path) -> None:
    """Also what waits for a CPU at that moment: here they share one with a process that is preferred to them."""
    cpu = str(min(os.sched_getaffinity(0)))
    preferred = processes.Process(state_dir, "preferred")
    busy = processes.Process(state_dir, "busy")
    loop = "while :; do :; done"
    workers = f"for i in 1 2 3 4 5 6 7 8; do taskset -c {cpu} nice -n 19 sh -c '{loop}' & done; wait"
    try:
        preferred.start(["taskset", "-c", cpu, "nice", "-n", "-15", "sh", "-c", loop])
        busy.start(["sh", "-c", workers])
        assert wait_for(lambda: len(processes.marked(state_dir)) == 10)
        busy.kill()
        assert processes.marked(state_dir) == [preferred.pid]
    finally:
        busy.kill()
        preferred.kill()


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
    """What kubelet and container runtime on the machine itself would write: fixed folders and kernel settings."""
    fixed = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers", "/usr/libexec/kubernetes")
    fixed += ("/opt/containerd", "/opt/nri", "/run/containerd", "/etc/cni", "/run/crio", "/etc/crio")
    settings = [Path("/proc/sys") / name for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")]
    settings.append(Path("/proc/sys/net/ipv4/ip_forward"))
    existing = {path: str(Path(path).exists()) for path in fixed}
    return existing | {str(path): path.read_text() for path in settings}


def links_of(cluster: Cluster) -> list[Path]:
    """The cluster's bridge and what is plugged into it."""
    bridge = Path("/sys/class/net") / cluster.network.bridge
    return [bridge, *(bridge.parent / port.name for port in (bridge / "brif").iterdir())]


def cli(*arguments: str) -> str:
    return processes.run([sys.executable, "-m", "tests.cluster", *arguments])


@pytest.mark.node
class TestKilledHarness:
    def test_up_clears_what_was_killed_half_way_and_down_leaves_nothing_after_kill_9(self, state_dir: Path) -> None:
        machine = outside()
        command = [sys.executable, "-c", HARNESS, str(state_dir), "1"]
        harness = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        try:
            # In the middle of the start: the container runtime runs, no kubelet yet.
            assert wait_for((state_dir / "run" / f"{versions.runtime()}-n1.json").exists)
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
            for manifest in (pod("left", "n1"), pod("sim-left", "sim-1")):
                space.create(manifest)
            space.running("left", "sim-left")
            (status,) = space.get("left")["status"]["containerStatuses"]
            container = status["containerID"].rpartition("/")[2]
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
    message = str(failed.value)
    assert f"tests.cluster: {file}: " in message
    assert "write `nodes: {n1: [{model: Tesla-P100, memoryMiB: 16276}]}` and `default: [...]`" in message


def test_env_speaks_shell(cluster: Cluster) -> None:
    exports = cli("env", "--state-dir", str(cluster.state_dir))
    shown = processes.run(["bash", "-c", f"{exports}\nkubectl get namespace default -o name"])
    assert shown == "namespace/default\n"


def test_down_of_nothing_is_fine(state_dir: Path) -> None:
    assert "no cluster" in cli("down", "--state-dir", str(state_dir / "none"))
