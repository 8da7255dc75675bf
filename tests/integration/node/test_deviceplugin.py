"""The device plugin on a real kubelet and container runtime; bindings are made by hand, so no other part is needed."""

import errno
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube import errors, paths
from deviceplugin.plugin.registration import SOCKET_PREFIX
from tests.cluster import Cluster, processes, versions
from tests.cluster.cards import DEFAULT, device_numbers, write_inventory
from tests.cluster.controlplane import SCHEDULER
from tests.cluster.images import BUSYBOX
from tests.cluster.processes import run
from tests.integration.sharing import Space

pytestmark = [pytest.mark.cluster("bare"), pytest.mark.node]

NODE = "n1"
P100 = 16276  # MiB
PLUGIN = f"deviceplugin-{NODE}"

# Tells what it was given into a folder that the host can read also while the API server is away. A card that was not
# given is tried by a node of the container's own making; the number is filled in.
TELL = """
for card in 0 1; do
  if [ -e /dev/nvidia$card ]; then (exec 3</dev/nvidia$card) && echo "has $card"; fi
done
mknod /tmp/other c %(major)s %(minor)s && (exec 4</tmp/other) 2>&1 && echo "opened the other"
env | grep -E 'ALIYUN|NVIDIA|CARDWISE|CUDA|CUPY'
echo "started"
"""
STAY = "trap 'exit 0' TERM; while [ ! -e /told/go ]; do sleep 0.2; done; rm /told/go; exit 1"
DAY = 24 * 3600

# The plugin's time of day is so many seconds off as the file says, from one look to the next. No namespace of Linux has
# a time of day of its own, and to move the machine's would be to move that of all clusters on it.
MOVED = """
import time
from pathlib import Path
from cardwise.clock import SystemClock

SystemClock.wall_ns = lambda _: time.time_ns() + int(Path({off!r}).read_text()) * 10**9
"""

# The plugin kills itself at a moment of a container's start, while the file says so, as when the machine takes its
# container away. No further step of the start comes before its death.
DYING = """
import os, signal, threading
from pathlib import Path
from deviceplugin.grants.access import Delivery
from deviceplugin.grants.grants import GrantStore
from deviceplugin.plugin.server import PluginServer

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def is_time(moment):
    return Path({moment!r}).read_text() == moment

def after(moment, method):
    def call(*args):
        answer = method(*args)
        if is_time(moment):
            die()
        return answer
    return call

def allocate(*args, method=PluginServer._allocate):
    answer = method(*args)
    if is_time("allocated"):
        threading.Timer(0.3, die).start()  # the kubelet has the answer by then
    return answer

def prestart(*args, method=PluginServer._pre_start_container):
    if is_time("allocated"):
        threading.Event().wait()
    return method(*args)

PluginServer._allocate = allocate
PluginServer._pre_start_container = prestart
GrantStore.add = after("granted", GrantStore.add)
Delivery.deliver_grant = after("delivered", Delivery.deliver_grant)
"""
# The moments, and whether the grant is on disk by then.
MOMENTS = {"allocated": False, "granted": True, "delivered": True}


class Hand:
    """Makes pods and binds them to a card, as the webhook and the extender would."""

    options: tuple[str, ...] = ()  # of the plugin, beside those that say where the node is

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.space = Space(cluster, "by-hand")
        self.folder = cluster.node(NODE).folder
        self.state = self.folder / "cardwise"
        inventory = yaml.safe_load((self.folder / "cards.yaml").read_text())
        self.cards = inventory["cards"]
        # runc lets every container open /dev/net/tun (10:200), so it proves nothing as a card.
        numbers = [number for number in device_numbers(8) if number != os.makedev(10, 200)]
        for card, number in zip(self.cards, numbers, strict=False):
            path = self.folder / f"card{card['index']}"
            os.mknod(path, 0o666 | stat.S_IFCHR, number)
            card["device"] = str(path)
        self.write_cards()

    def start_plugin(self, environment: dict[str, str] | None = None, *, name: str = NODE) -> None:
        """`name`: of the machine's Node."""
        node = self.cluster.node(NODE)
        with node.slots_listed():
            self.cluster.process(PLUGIN).start(
                [
                    str(Path(sys.executable).parent / "cardwise-deviceplugin"),
                    f"--kubeconfig={self.cluster.kubeconfig}",
                    f"--node-name={name}",
                    f"--simulated-gpus={self.folder / 'cards.yaml'}",
                    f"--kubelet-dir={node.kubelet_dir}",
                    f"--cdi-dir={node.cdi_dir}",
                    f"--state-dir={self.state}",
                    f"--cri-socket={node.cri_socket}",
                    "--metrics-bind=127.0.0.1:0",
                    *self.options,
                ],
                environment,
            )
        self.wait(lambda: self.allocatable(name) == "512", "share slots in the node's status")

    def allocatable(self, name: str = NODE) -> str:
        node = self.cluster.api.get(paths.nodes(name))
        return node["status"]["allocatable"].get(names.SHARE, "")

    def write_cards(self) -> None:
        scratch = self.folder / "cards.yaml.new"
        scratch.write_text(yaml.safe_dump({"cards": self.cards}))
        scratch.rename(self.folder / "cards.yaml")

    def number(self, index: int) -> tuple[int, int]:
        device = Path(self.cards[index]["device"]).stat().st_rdev
        return os.major(device), os.minor(device)

    def pod(
        self,
        name: str,
        index: int,
        mib: int,
        then: str = STAY,
        *,
        grace: int = 1,
        env: dict | None = None,
        node: str = NODE,
    ) -> str:
        """Creates and binds; returns the UID."""
        other = self.number(1 - index)
        limits = {names.GPU_MEM: str(mib), names.SHARE: "1"}
        script = f"({TELL % {'major': other[0], 'minor': other[1]}}) >> /told/log 2>&1; {then}"
        pod = {
            "metadata": {"name": name},
            "spec": {
                "schedulerName": "by-hand",
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": grace,
                "volumes": [{"name": "told", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "main",
                        "image": BUSYBOX,
                        "imagePullPolicy": "Never",
                        "command": ["/bin/sh", "-c", script],
                        "env": [{"name": key, "value": text} for key, text in (env or {}).items()],
                        "resources": {"limits": limits},
                        "volumeMounts": [{"name": "told", "mountPath": "/told"}],
                    }
                ],
            },
        }
        uid = self.space.create(pod)
        share = CardShare(index, self.cards[index]["uuid"], MiB(mib), Percent(0), MiB(P100))
        binding = {
            "metadata": {
                "name": name,
                "uid": uid,
                "annotations": codec.encode(Assignment({"0": (share,)}), assume_time_ns=time.time_ns()),
            },
            "target": {"kind": "Node", "name": node},
        }
        self.cluster.api.create(paths.pods(self.space.name, name, "binding"), binding)
        return uid

    def output_of(self, uid: str) -> str:
        path = self._volume(uid) / "log"
        return path.read_text() if path.exists() else ""

    def starts(self, uid: str) -> int:
        return self.output_of(uid).splitlines().count("started")

    def let_it_exit(self, uid: str) -> None:
        (self._volume(uid) / "go").touch()

    def _volume(self, uid: str) -> Path:
        return self.cluster.node(NODE).kubelet_dir / "pods" / uid / "volumes" / "kubernetes.io~empty-dir" / "told"

    def delete(self, *pods: str, force: bool = False) -> None:
        self.space.delete(*pods, grace=0 if force else None)
        self.space.wait_for_deletion(*pods)

    def status(self, index: int) -> dict:
        card = self.cluster.api.get(paths.extendedresources(self.cards[index]["uuid"].lower()))
        return dict(card.get("status") or {})

    def say_full(self, filler: Path) -> bool:
        """Whether both cards say that the disk of `filler` is full. It is filled at each look: the plugin writes there
        for a moment, to see whether it can, and what it wrote is room again afterwards.
        """
        fill(filler)
        return all("No space left on device" in self.status(card).get("reason", "") for card in range(2))

    def events(self, pod: str) -> str:
        return self.space.reasons(pod)

    def container_id(self, pod: str) -> str:
        statuses = self.space.get(pod)["status"].get("containerStatuses") or [{}]
        return str(statuses[0].get("containerID", "")).rpartition("/")[2]

    def shim(self, pod: str) -> int:
        """Process id of the pod's containerd shim: the parent of its container's first process."""
        (first,) = self.folder.glob(f"containerd/state/*/k8s.io/{self.container_id(pod)}/init.pid")
        return int(processes.stat(int(first.read_text()))[1])

    def grants(self) -> list[dict]:
        findings = []
        for path in (self.state / "grants").glob("*/*.json"):
            with suppress(FileNotFoundError):  # the plugin frees it just now
                findings.append(json.loads(path.read_text()))
        return findings

    def specs(self) -> set[str]:
        """The files in the node's CDI folder."""
        return {path.name for path in self.cluster.node(NODE).cdi_dir.iterdir()}

    def wait(self, ready: Callable[[], object], event: str) -> None:
        def so() -> bool:
            try:
                return bool(ready())
            except errors.KubeError:
                return False

        self.cluster.wait(so, event)


@pytest.fixture(scope="module")
def hand(cluster: Cluster) -> Iterator[Hand]:
    hand = Hand(cluster)
    hand.start_plugin()
    yield hand
    cluster.process(PLUGIN).stop()
    write_inventory(hand.folder, NODE, DEFAULT)


@pytest.fixture(autouse=True)
def clean(hand: Hand) -> Iterator[None]:
    yield
    # A kubelet whose API server was away asks again after at most 60 s (its backoff of 30 s, doubled by jitter).
    hand.space.clear()
    hand.wait(lambda: not hand.grants(), "every share freed")


def test_a_container_has_its_card_and_no_other(hand):
    uid = hand.pod("a", 1, 8138, env={"NVIDIA_VISIBLE_DEVICES": "all"})
    hand.wait(lambda: hand.starts(uid), "the container told")
    lines = hand.output_of(uid).splitlines()
    assert "has 1" in lines
    assert "has 0" not in lines
    assert "opened the other" not in lines
    assert any("Operation not permitted" in line for line in lines), "mknod or open of the other card is refused"
    assert "CARDWISE_MEM_LIMIT_MIB=8138" in lines
    assert "CARDWISE_MEM_FRACTION=0.5000" in lines
    assert "ALIYUN_COM_GPU_MEM_IDX=1" in lines
    hand.space.marked("a")


@pytest.mark.skipif(versions.crio() is not None, reason="CRI-O: a pod's variables come after CDI's (docs/support.md)")
def test_what_the_node_says_of_a_share_beats_what_the_pod_says(hand):
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "CARDWISE_MEM_LIMIT_MIB": "99999"}
    uid = hand.pod("a", 1, 8138, env=env)
    hand.wait(lambda: hand.starts(uid), "the container told")
    lines = hand.output_of(uid).splitlines()
    assert "NVIDIA_VISIBLE_DEVICES=void" in lines
    assert "CARDWISE_MEM_LIMIT_MIB=8138" in lines


def test_twenty_equal_pods_bound_together_are_not_swapped(hand):
    with ThreadPoolExecutor(8) as threads:
        uids = list(threads.map(lambda i: hand.pod(f"p{i}", i % 2, 250), range(20)))
    hand.wait(lambda: all(hand.starts(uid) for uid in uids), "all of them told")
    for i, uid in enumerate(uids):
        lines = hand.output_of(uid).splitlines()
        assert f"has {i % 2}" in lines
        assert f"has {1 - i % 2}" not in lines
        assert "opened the other" not in lines


def test_a_kubelet_restart_changes_nothing_for_containers(hand):
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    with hand.cluster.node(NODE).slots_listed():
        hand.cluster.process(f"kubelet-{NODE}").restart()
    after = hand.pod("b", 0, 8138)
    hand.wait(lambda: hand.starts(after), "a new pod after the restart")
    hand.let_it_exit(uid)
    hand.wait(lambda: hand.starts(uid) == 2, "the old container starts again")
    assert hand.output_of(uid).count("has 1") == 2
    assert "has 0" not in hand.output_of(uid)


def test_a_kubelet_whose_checkpoint_is_removed_changes_nothing_for_containers(hand):
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    hand.cluster.node(NODE).checkpoint.unlink()
    after = hand.pod("b", 0, 8138)
    hand.wait(lambda: hand.starts(after), "a new pod without the checkpoint")
    hand.let_it_exit(uid)
    hand.wait(lambda: hand.starts(uid) == 2, "the old container starts again")
    assert (hand.output_of(uid).count("has 1"), hand.output_of(after).count("has 0")) == (2, 1)
    assert "has 0" not in hand.output_of(uid)
    assert "has 1" not in hand.output_of(after)


def test_a_kubelet_that_starts_without_its_checkpoint_gives_nobody_anothers_card(hand):
    """It knows of no slot that is taken. A container of before runs on, but the kubelet starts it no second time."""
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    with hand.cluster.node(NODE).slots_listed():
        kubelet = hand.cluster.process(f"kubelet-{NODE}")
        kubelet.kill()
        hand.cluster.node(NODE).checkpoint.unlink()
        kubelet.restart()
    after = hand.pod("b", 0, 8138)
    hand.wait(lambda: hand.starts(after), "a new pod")
    assert "has 0" in hand.output_of(after)
    assert "has 1" not in hand.output_of(after)
    assert len(hand.grants()) == 2
    hand.let_it_exit(uid)
    hand.wait(lambda: "no devices found allocated" in hand.events("a"), "the kubelet says why it does not start it")
    hand.delete("a", "b")
    hand.wait(lambda: hand.grants() == [], "both shares are free")


@pytest.mark.parametrize("frozen", [PLUGIN, f"{versions.runtime()}-{NODE}", f"kubelet-{NODE}"])
def test_pods_that_are_bound_while_a_part_of_the_node_stands_still_get_their_cards(hand, frozen):
    process = hand.cluster.process(frozen)
    process.pause()
    try:
        uids = [hand.pod(f"p{i}", i % 2, 500) for i in range(6)]
        hand.wait(lambda: all(hand.space.get(f"p{i}")["spec"].get("nodeName") for i in range(6)), "all are bound")
    finally:
        process.resume()
    hand.wait(lambda: all(hand.starts(uid) for uid in uids), "all of them told")
    for i, uid in enumerate(uids):
        assert f"has {i % 2}" in hand.output_of(uid)
        assert f"has {1 - i % 2}" not in hand.output_of(uid)
    hand.delete(*(f"p{i}" for i in range(6)))
    hand.wait(lambda: hand.grants() == [], "every share is free")


def test_a_plugin_whose_socket_is_removed_registers_anew(hand):
    with hand.cluster.node(NODE).slots_listed():
        for path in (hand.cluster.node(NODE).kubelet_dir / "device-plugins").glob(f"{SOCKET_PREFIX}*.sock"):
            path.unlink()
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "a new pod")
    assert "has 1" in hand.output_of(uid)


def test_a_killed_plugin_comes_back(hand):
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    with hand.cluster.node(NODE).slots_listed():
        hand.cluster.process(PLUGIN).kill()
        hand.cluster.process(PLUGIN).restart()
    after = hand.pod("b", 0, 8138)
    hand.wait(lambda: hand.starts(after), "a new pod after the restart")
    hand.let_it_exit(uid)
    hand.wait(lambda: hand.starts(uid) == 2, "the old container starts again")
    sockets = list((hand.cluster.node(NODE).kubelet_dir / "device-plugins").glob("cardwise-*.sock"))
    assert len(sockets) == 1


@pytest.fixture
def moment(hand: Hand, tmp_path: Path) -> Iterator[Path]:
    """The file that names the moment at which the plugin dies."""
    moment = tmp_path / "moment"
    moment.write_text("")
    (tmp_path / "sitecustomize.py").write_text(DYING.format(moment=str(moment)))
    hand.cluster.process(PLUGIN).stop()
    hand.start_plugin({"PYTHONPATH": str(tmp_path)})
    yield moment
    hand.cluster.process(PLUGIN).stop()
    hand.start_plugin()


def die_in_the_start(hand: Hand, moment: Path, when: str, pod: str) -> str:
    """The plugin dies at this moment of the pod's start, with a grant or without. Returns the pod's UID."""
    before = len(hand.grants())
    moment.write_text(when)
    uid = hand.pod(pod, 1, 8138)
    hand.wait(lambda: not hand.cluster.process(PLUGIN).is_alive(), "the plugin is dead")
    moment.write_text("")
    assert (len(hand.grants()) - before, hand.starts(uid)) == (MOMENTS[when], 0)
    return uid


def come_back(hand: Hand) -> None:
    with hand.cluster.node(NODE).slots_listed():
        hand.cluster.process(PLUGIN).restart()


@pytest.mark.parametrize("when", MOMENTS)
def test_a_plugin_that_is_killed_in_a_start_gives_the_pod_its_card_and_nothing_twice(hand, moment, when):
    specs = hand.specs()
    runs = hand.pod(f"runs-{when}", 0, 8138)
    hand.wait(lambda: hand.starts(runs), "a pod of the same size on the other card")
    uid = die_in_the_start(hand, moment, when, f"starts-{when}")
    come_back(hand)
    hand.wait(lambda: hand.starts(uid), "the container starts")
    beside = hand.pod(f"beside-{when}", 1, 7138)
    hand.wait(lambda: hand.starts(beside), "a pod beside it")
    over = hand.pod(f"over-{when}", 1, 1001)
    hand.wait(lambda: "are still held by" in hand.events(f"over-{when}"), "a third one is told that there is no room")
    for pod, card in ((runs, 0), (uid, 1), (beside, 1)):
        lines = hand.output_of(pod).splitlines()
        assert (lines.count("started"), f"has {card}" in lines, f"has {1 - card}" in lines) == (1, True, False)
        assert "opened the other" not in lines
    assert not hand.starts(over)
    assert sorted(grant["podUid"] for grant in hand.grants()) == sorted((runs, uid, beside))
    hand.space.clear()
    hand.wait(lambda: not hand.grants() and hand.specs() == specs, "no grant and no spec stays behind")


def test_a_pod_that_goes_while_its_plugin_is_dead_leaves_no_grant(hand, moment):
    specs = hand.specs()
    die_in_the_start(hand, moment, "delivered", "goes")
    hand.delete("goes")
    come_back(hand)
    hand.wait(lambda: not hand.grants() and hand.specs() == specs, "no grant and no spec stays behind")
    whole = hand.pod("whole", 1, P100)
    hand.wait(lambda: hand.starts(whole), "another pod has the whole card")
    assert ("has 1" in hand.output_of(whole), "has 0" in hand.output_of(whole)) == (True, False)


def test_a_node_whose_time_of_day_jumps_gives_every_container_its_card(hand, tmp_path):
    off = tmp_path / "off"
    off.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(MOVED.format(off=str(off)))
    plugin = hand.cluster.process(PLUGIN)
    plugin.stop()
    hand.start_plugin({"PYTHONPATH": str(tmp_path)})
    try:
        stays, went = hand.pod("stays", 1, 8138), hand.pod("before", 0, P100)
        hand.wait(lambda: hand.starts(stays) and hand.starts(went), "both told")
        for turn, days in enumerate((30, -30)):
            off.write_text(str(days * DAY))
            with hand.cluster.node(NODE).slots_listed():
                plugin.kill()
                plugin.restart()
            hand.delete("before")
            hand.wait(lambda: len(hand.grants()) == 1, "the share is freed")
            went = hand.pod("before", 0, P100)
            hand.wait(lambda uid=went: hand.starts(uid), f"another pod, {days} days off")
            assert "has 0" in hand.output_of(went)
            hand.let_it_exit(stays)
            hand.wait(lambda turn=turn: hand.starts(stays) == turn + 2, f"it starts again, {days} days off")
            assert "has 1" not in hand.output_of(went)
        assert hand.output_of(stays).count("has 1") == 3
        assert "has 0" not in hand.output_of(stays)
    finally:
        plugin.stop()
        hand.start_plugin()


def test_grants_of_a_newer_plugin_are_told_of_and_nothing_is_lost_or_given_twice(hand):
    """A downgrade, with a container that runs on one card, and one on the other whose grant stays as it was."""
    plugin = hand.cluster.process(PLUGIN)
    newer, other = hand.pod("newer", 1, 12_000), hand.pod("other", 0, 2_000)
    hand.wait(lambda: hand.starts(newer) and hand.starts(other), "both told")
    plugin.stop()
    (path,) = (hand.state / "grants" / newer).glob("*.json")
    written = {"version": 9, "holder": {"uid": newer}, "cards": [{"id": hand.cards[1]["uuid"], "bytes": 12_000 << 20}]}
    path.write_text(json.dumps(written))
    hand.start_plugin()
    hand.wait(lambda: len(hand.grants()) == 2, "the container's grant is written again")
    events = hand.cluster.api.get(paths.events("default"), {"fieldSelector": f"involvedObject.name={NODE}"})["items"]
    assert [event["message"] for event in events if "another version of the device plugin" in event["message"]]
    (aside,) = (hand.state / "grants-unreadable").glob(f"{newer}.*")
    assert json.loads(aside.read_text()) == written
    late = hand.pod("late", 1, 6_000)  # what whoever does not know of the first would give
    hand.wait(lambda: "are still held by" in hand.events("late"), "the pod is told that there is no room")
    assert not hand.starts(late)
    for uid, card in ((newer, 1), (other, 0)):
        hand.let_it_exit(uid)
        hand.wait(lambda uid=uid: hand.starts(uid) == 2, "the container starts again")
        assert hand.output_of(uid).count(f"has {card}") == 2
    aside.unlink()


def test_a_state_folder_that_is_full_closes_the_cards_until_there_is_room(hand):
    plugin, small = hand.cluster.process(PLUGIN), hand.folder / "small"
    plugin.stop()
    small.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=256k", "cardwise", str(small)])
    before, hand.state = hand.state, small
    try:
        hand.start_plugin()
        runs = hand.pod("runs", 0, 8138)
        hand.wait(lambda: hand.starts(runs), "it told")
        hand.wait(lambda: hand.say_full(small / "filler"), "both cards say why")
        assert [hand.status(card)["health"] for card in range(2)] == ["Unhealthy", "Unhealthy"]
        late = hand.pod("late", 1, 8138)
        hand.wait(lambda: "No space left on device" in hand.events("late"), "the pod is told why")
        hand.let_it_exit(runs)
        (small / "filler").unlink()
        hand.wait(lambda: hand.status(0)["health"] == "Healthy", "the cards are back")
        hand.wait(lambda: hand.starts(late) and hand.starts(runs) == 2, "both start")
        assert ("has 1" in hand.output_of(late), hand.output_of(runs).count("has 0")) == (True, 2)
        hand.delete("runs", "late")
        hand.wait(lambda: not hand.grants(), "every share is freed")
    finally:
        plugin.stop()
        run(["umount", str(small)])
        small.rmdir()
        hand.state = before
        hand.start_plugin()


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - whatever the file system calls it


def test_a_container_restarts_while_the_api_server_is_stopped(hand):
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    hand.cluster.process("kube-apiserver").kill()  # it would wait a minute for those who watch
    try:
        hand.cluster.process(PLUGIN).kill()
        hand.cluster.process(PLUGIN).restart()
        hand.let_it_exit(uid)
        hand.wait(lambda: hand.starts(uid) == 2, "the container starts again")
    finally:
        hand.cluster.process("kube-apiserver").restart()
    hand.wait(lambda: hand.cluster.api.get(paths.nodes(NODE)), "the API server is back")
    assert hand.output_of(uid).count("has 1") == 2
    assert "has 0" not in hand.output_of(uid)
    assert hand.output_of(uid).count("CARDWISE_MEM_LIMIT_MIB=8138") == 2


@pytest.mark.skipif(versions.crio() is not None, reason="CRI-O: conmon has no part in a kill, so no container hangs")
@pytest.mark.parametrize("lost", [False, True], ids=["", "state-lost"])
def test_a_hanging_container_of_a_force_deleted_pod_keeps_its_card(hand, lost):
    hangs, claims = f"hangs-{lost}".lower(), f"claims-{lost}".lower()  # events stay
    uid = hand.pod(hangs, 0, P100)
    hand.wait(lambda: hand.container_id(hangs), "the container's id")
    # Nobody can kill a container whose shim does not answer; it lives on, like one stuck in a driver.
    shim = hand.shim(hangs)
    os.kill(shim, signal.SIGSTOP)
    try:
        hand.wait(lambda: processes.stat(shim)[0] == "T", "the shim stands still")
        hand.delete(hangs, force=True)
        hand.wait(lambda: [held["podUID"] for held in hand.status(0).get("reported", ())] == [uid], "reported as held")
        if lost:
            hand.cluster.process(PLUGIN).stop()
            shutil.rmtree(hand.state)
            hand.start_plugin()
            hand.wait(hand.grants, "a grant by what the runtime remembers")
        claimant = hand.pod(claims, 0, P100)
        hand.wait(lambda: f"still held by {hand.space.name}/{hangs}" in hand.events(claims), "the claimant is told who")
        assert not hand.starts(claimant)
    finally:
        os.kill(shim, signal.SIGCONT)
    hand.wait(lambda: hand.starts(claimant), "the claimant starts")
    assert [grant["podUid"] for grant in hand.grants()] == [claimant]
    hand.wait(lambda: hand.status(0).get("reported") == [], "no longer held")


def test_a_machine_that_comes_back_under_another_name_has_its_cards_for_new_pods(hand):
    """The pod of its former name stays in the API, Running, on a Node that nobody answers for."""
    former = hand.pod("former", 0, P100)
    hand.wait(lambda: hand.starts(former), "the container told")
    again = f"{NODE}-again"
    plugin, kubelet = hand.cluster.process(PLUGIN), hand.cluster.process(f"kubelet-{NODE}")
    before = kubelet.recorded
    assert before is not None
    changed = {"--hostname-override": again, "--kubeconfig": hand.cluster.kubeconfig}
    command = [
        f"{option}={changed.get(option, setting)}" if setting else option
        for option, _, setting in (word.partition("=") for word in before.command)
    ]
    try:
        plugin.stop()
        kubelet.stop()
        kubelet.start(command, before.environment)
        hand.wait(lambda: hand.cluster.api.get(paths.nodes(again)), "the Node of the new name")
        for card in hand.cards:
            hand.cluster.api.delete(paths.extendedresources(card["uuid"].lower()))
        hand.start_plugin(name=again)
        uid = hand.pod("latter", 0, P100, node=again)
        hand.wait(lambda: hand.starts(uid), "a pod of the new name has the card")
        assert "has 0" in hand.output_of(uid)
        assert hand.space.get("former")["status"]["phase"] == "Running"
        assert [grant["podUid"] for grant in hand.grants()] == [uid]
        hand.wait(lambda: hand.status(0)["reported"] == [], "nothing is reported of the former pod")
    finally:
        hand.delete("former", "latter", force=True)
        plugin.stop()
        kubelet.stop()
        kubelet.start(before.command, before.environment)
        hand.cluster.api.delete(paths.nodes(again))
        for card in hand.cards:
            with suppress(errors.NotFound):
                hand.cluster.api.delete(paths.extendedresources(card["uuid"].lower()))
        hand.start_plugin()


def test_a_pod_that_waits_again_after_a_restore_of_etcd_frees_its_card(hand):
    """It is not deleted. The kubelet ends its containers as those of a deleted pod, and kube-scheduler exits."""
    former = hand.pod("former", 0, P100)
    hand.wait(lambda: hand.starts(former), "the container told")
    scheduler = hand.cluster.process(SCHEDULER)
    scheduler.kill()
    try:
        hand.cluster.control_plane.restore_pod(hand.space.name, "former")
        assert "nodeName" not in hand.space.get("former")["spec"]
        latter = hand.pod("latter", 0, P100)
        hand.wait(lambda: hand.starts(latter), "another pod has the card")
        assert [grant["podUid"] for grant in hand.grants()] == [latter]
        hand.wait(lambda: hand.status(0)["reported"] == [], "nothing is reported of the former pod")
        assert "nodeName" not in hand.space.get("former")["spec"]
    finally:
        scheduler.restart()


def test_a_pod_that_nobody_placed_does_not_start(hand):
    hand.cluster.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "unplaced", "namespace": hand.space.name},
                "spec": {
                    "nodeName": NODE,
                    "terminationGracePeriodSeconds": 1,
                    "containers": [
                        {
                            "name": "main",
                            "image": BUSYBOX,
                            "imagePullPolicy": "Never",
                            "resources": {"limits": {names.SHARE: "1"}},
                        }
                    ],
                },
            }
        ]
    )
    hand.wait(lambda: "was not placed by the Cardwise extender" in hand.events("unplaced"), "told why")
