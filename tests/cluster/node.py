"""A real node: kubelet on containerd (or CRI-O) and runc, in a mount namespace of its own.

The namespace is why several kubelets fit on one machine: the device plugin folder is fixed at
/var/lib/kubelet/device-plugins and shims keep sockets under /run, so these are private here (not bind mounts on
folders of the machine: removing such a folder would undo the mount of every other cluster). A holder process keeps
the namespace while containerd and kubelet are restarted; when it ends, the node's mounts go with it.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster import binaries, crio, images, ports, toolkit, versions
from tests.cluster.network import Network
from tests.cluster.processes import Process, run, wait_for

_CGROUPS = Path("/sys/fs/cgroup")
# Of all pods of a node together: as much as eight threads. With the usual 1024 our parts in pods had as little CPU as
# one thread of the programs beside them, and did not answer for minutes on a busy machine.
_SHARES = "8192"
_KUBELET_PLUGINS = Path("/var/lib/kubelet/device-plugins")
# Folders of the machine that a node gets empty ones for: kubelet, containerd, runc and CNI write to fixed paths there.
HIDDEN = ("/run", "/var/lib", "/var/log")
# Where pods of a node find its folders: those that every node has, by their names in ours, and ours as a whole.
USUAL = {"kubelet": "/var/lib/kubelet", versions.runtime(): f"/run/{versions.runtime()}", "cdi": "/var/run/cdi"}
OWN_FOLDER = "/var/lib/cardwise-test-node"
# What the kubelet would otherwise set on the machine itself (kubelet `setupKernelTunables`): it reads its wish instead.
_TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


# By whether it is containerd 1, which has one plugin for all of CRI: the version of its configuration, that plugin,
# what comes before the plugin's settings, and its setting of the folder with CNI's programs.
_CONTAINERD = {
    True: (2, "io.containerd.grpc.v1.cri", "{cri}\n  sandbox_image = {pause}", 'bin_dir = "/usr/lib/cni"'),
    False: (
        3,
        "io.containerd.cri.v1.runtime",
        '[plugins."io.containerd.cri.v1.images".pinned_images]\n  sandbox = {pause}\n{cri}',
        'bin_dirs = ["/usr/lib/cni"]',
    ),
}

# `$CARDWISE_CGROUP=2`: nodes have cgroup v2 where the machine mounts version 1. The controllers stay in version 1, so
# runc is asked for devices alone, which version 2 has no controller for.
CGROUP = "CARDWISE_CGROUP"
_RUNC = "/usr/sbin/runc"
_RUNC_OF_V2 = f"""\
#!{sys.executable} -S
import json, os, sys
if "create" in sys.argv:
    file = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    spec = json.load(open(file))
    spec["linux"]["resources"] = {{"devices": spec["linux"]["resources"]["devices"]}}
    json.dump(spec, open(file, "w"))
os.execv("{_RUNC}", ["runc", *sys.argv[1:]])
"""

_RUNTIME = """\
  [plugins."{plugin}".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{plugin}".containerd.runtimes.{name}.options]
      BinaryName = "{binary}"
      SystemdCgroup = false
"""


def has_pod_cgroups() -> bool:
    """Whether the kubelet makes cgroups of pods: not where their version has no controllers."""
    return os.environ.get(CGROUP) != "2"


def _has_v1() -> bool:
    return has_pod_cgroups() and not (_CGROUPS / "cgroup.controllers").exists()


@dataclass(frozen=True, slots=True)
class Node:
    """Folders and processes of one real node."""

    state: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.state / "nodes" / self.name

    @property
    def kubelet_dir(self) -> Path:
        return self.folder / "kubelet"

    @property
    def cdi_dir(self) -> Path:
        return self.folder / "cdi"

    @property
    def manifests(self) -> Path:
        """Of static pods, on nodes whose parts are pods."""
        return self.folder / "kubernetes" / "manifests"

    @property
    def runtime_dir(self) -> Path:
        return self.folder / versions.runtime()

    @property
    def cri_socket(self) -> Path:
        return self.runtime_dir / f"{versions.runtime()}.sock"

    @property
    def cgroup(self) -> str:
        """Of its pods, in each hierarchy of version 1; no other node of the machine has one of this name."""
        return f"{_cgroup_prefix(self.state)}-{self.name}"

    def process(self, part: str) -> Process:
        return Process(self.state, f"{part}-{self.name}")

    def start_runtime(
        self,
        *,
        node_bin: Path,
        network: Network,
        number: int,
        archives: Sequence[Path] = (),
        routed: str = "",
        hosts_parts: bool = False,
        nvidia: Path | None = None,
    ) -> None:
        """All that needs no API server: the runtime with its images; `number` (from 1) gives the node's address.

        `archives` are images besides those that every node has. `routed`: see `Network.write_cni`. `hosts_parts`: pods
        on it find the folders of kubelet and runtime where they usually are, and the node's own at `OWN_FOLDER`.
        `nvidia`: folder of NVIDIA's container toolkit, whose runtime it has beside runc.
        """
        for path in (self.kubelet_dir / "device-plugins", self.cdi_dir, self.runtime_dir):
            path.mkdir(parents=True, exist_ok=True)
        cdi_dir = USUAL["cdi"] if hosts_parts else str(self.cdi_dir)
        path = ":".join(map(str, filter(None, (node_bin, nvidia, "/usr/sbin:/usr/bin:/sbin:/bin"))))
        environment = {"PATH": path} | (toolkit.environment(self.folder) if nvidia else {})
        self._write_runtime_config(network.write_cni(self.folder, number, routed), cdi_dir, nvidia, environment)
        self._write_kubelet_config(network.node_address(number), self.manifests if hosts_parts else None)
        if has_pod_cgroups():
            for hierarchy in _hierarchies():
                (hierarchy / self.cgroup).mkdir(exist_ok=True)
                shares = hierarchy / self.cgroup / "cpu.shares"
                if shares.exists():  # in one of version 1
                    shares.write_text(_SHARES)
        self._hold_namespace(hosts_parts=hosts_parts)
        self._start_runtime(node_bin, environment)
        usual = self.state / "images" / "usual.tar"
        images.write_usual(usual)
        for archive in [usual, *archives]:
            self.load_image(archive)

    def load_image(self, archive: Path) -> None:
        """Give this node an image: an OCI archive as `images.write` makes it."""
        if versions.crio():
            for command in crio.load_commands(self.runtime_dir, archive):
                run(self._inside(*command))
            return
        # Locally: through containerd's transfer service an image of 250 MB takes 5 s of CPU, not 2.
        run(self._ctr("images", "import", "--local", str(archive)))

    def tag_image(self, name: str, new_name: str) -> None:
        """Give an image of this node another name too. Only with containerd."""
        run(self._ctr("images", "tag", name, new_name))

    def _ctr(self, *args: str) -> list[str]:
        program = str(binaries.containerd(lambda _: None) / "ctr")
        return self._inside(program, "--address", str(self.cri_socket), "-n", "k8s.io", *args)

    def _wait_booted(self, logged: int) -> None:
        """Until CRI answers: a kubelet that is started before that gives up at once."""
        process = self.process(versions.runtime())
        booted = crio.BOOTED if versions.crio() else b"successfully booted"
        process.wait_until(lambda: booted in process.log.read_bytes()[logged:], "booted")

    def _hold_namespace(self, *, hosts_parts: bool) -> None:
        ready = self.folder / "namespace-ready"
        ready.unlink(missing_ok=True)
        lines = ["set -e", *(f"mount -t tmpfs cardwise {folder}" for folder in HIDDEN)]
        lines += ["mkdir -p /run/netns", f"mkdir -p {_KUBELET_PLUGINS}"]
        lines += [f"mount --bind {self.kubelet_dir / 'device-plugins'} {_KUBELET_PLUGINS}"]
        if hosts_parts:
            seen = {OWN_FOLDER: self.folder} | {usual: self.folder / name for name, usual in USUAL.items()}
            for usual, here in seen.items():
                lines += [f"mkdir -p {usual}", f"mount --bind {here} {usual}"]
        stand_ins = {f"sys/{name}": f"{tunable}\n" for name, tunable in _TUNABLES.items()}
        if versions.crio() and _has_v1():
            stand_ins["cgroups"] = crio.mounted_controllers()
        for name, text in stand_ins.items():
            stand_in = self.folder / "proc" / name
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            stand_in.write_text(text)
            lines.append(f"mount --bind {stand_in} /proc/{name}")
        if os.environ.get(CGROUP) == "2":
            lines.append(f"mount -t cgroup2 cardwise {_CGROUPS}")
        lines += [f"touch {ready}", "exec sleep infinity"]
        holder = self.process("namespace")
        holder.start(["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines)])
        holder.wait_until(ready.exists, "mounts")

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.process('namespace').pid}/ns/mnt", "--", *command]

    def _start_runtime(self, node_bin: Path, environment: Mapping[str, str]) -> None:
        name = versions.runtime()
        process = self.process(name)
        process.start(self._inside(str(node_bin / name), "--config", str(self._runtime_config)), environment)
        self._wait_booted(0)

    def start_kubelet(self, *, kube_bin: Path, kubeconfig: Path, network: Network, number: int) -> None:
        """It registers the node; without waiting for that."""
        command = self._inside(
            str(kube_bin / "kubelet"),
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--root-dir={self.kubelet_dir}",
            f"--cert-dir={self.folder / 'kubelet-pki'}",
            f"--node-ip={network.node_address(number)}",
            "--housekeeping-interval=5m",  # cAdvisor reads statistics, which nobody asks for: a quarter of its CPU
        )
        self.process("kubelet").start(command, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})

    def keep_kubelet(self) -> None:
        """Start it again where it has given up, as systemd does: it waits 5 s for the runtime's first answer."""
        kubelet = self.process("kubelet")
        if not kubelet.is_alive():
            kubelet.restart()

    @property
    def checkpoint(self) -> Path:
        """Of the kubelet. It writes it when a device plugin gives it devices, and else only for a pod."""
        return self.kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint"

    @contextlib.contextmanager
    def slots_listed(self) -> Iterator[None]:
        """What is done in it makes the device plugin register: waits until the kubelet has its slots.

        A pod that is bound before is failed by the kubelet, for good (UnexpectedAdmissionError); its owner makes
        another, and no device plugin can change that. The plugin's log is too early, and the node's status may be
        that of before.
        """

        def written() -> int:
            return self.checkpoint.stat().st_mtime_ns if self.checkpoint.exists() else 0

        def listed() -> bool:
            self.keep_kubelet()
            return written() not in (0, before)

        before = written()
        yield
        assert wait_for(listed), "the kubelet has no slots of the plugin"

    def _write_kubelet_config(self, address: str, manifests: Path | None) -> None:
        port, health_port = ports.free(2)
        config: dict[str, object] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "port": port,
            "readOnlyPort": 0,
            "healthzPort": health_port,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(self.state / "pki" / "ca.crt")},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.cri_socket}",
            "cgroupDriver": "cgroupfs",
            # Without, a resize in place makes it panic (1.33 to 1.37): doPodResizeAction takes for granted what
            # podContainerManagerNoop says of pods' cgroups, which is nil.
            "cgroupsPerQOS": has_pod_cgroups(),
            "cgroupRoot": f"/{self.cgroup}",
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(self.folder / "pod-logs"),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "clusterDNS": ["10.0.0.10"],  # nothing answers there; without one every pod gets a warning
            "maxPods": 250,
            "registerNode": True,
            "nodeStatusUpdateFrequency": "5s",
            "nodeStatusReportFrequency": "5m",  # where nothing has changed
            "serializeImagePulls": False,
            "syncFrequency": "10s",
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "shutdownGracePeriod": "0s",
        }
        if versions.at_least(35):
            # A container that has ended starts again after at most so long, not after 10, 20, 40 s.
            config["crashLoopBackOff"] = {"maxContainerRestartPeriod": "1s"}
        if manifests is not None:
            manifests.mkdir(parents=True, exist_ok=True)
            config["staticPodPath"] = str(manifests)
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(config))

    def start_nri_plugin(self) -> None:
        """That of NVIDIA's toolkit, which the runtime asks about each container."""
        plugin = self.process("nri")
        plugin.start(self._inside(str(binaries.nvidia(lambda _: None) / "nri"), "/run/nri/nri.sock"))
        plugin.wait_until(lambda: b"Started plugin" in plugin.log.read_bytes(), "registered")

    def write_nvidia_spec(self) -> None:
        """The CDI spec of this machine's own cards."""
        run(self._inside(*toolkit.real_spec(self.cdi_dir)))

    def default_runtime(self, name: str) -> None:
        """Of containers whose pods name no RuntimeClass: runc or nvidia. Restarts containerd or CRI-O."""
        file = self._runtime_config
        file.write_text(re.sub('(default_runtime.*) = ".*"', rf'\1 = "{name}"', file.read_text()))
        process = self.process(versions.runtime())
        logged = process.log.stat().st_size
        process.restart()
        self._wait_booted(logged)

    @property
    def _runtime_config(self) -> Path:
        return self.folder / f"{versions.runtime()}.toml"

    def _runc(self) -> str:
        if os.environ.get(CGROUP) != "2":
            return _RUNC
        wrapper = self.folder / "runc"
        wrapper.write_text(_RUNC_OF_V2)
        wrapper.chmod(0o755)
        return str(wrapper)

    def _write_runtime_config(
        self, cni_conf: Path, cdi_dir: str, nvidia: Path | None, environment: Mapping[str, str]
    ) -> None:
        base = self.runtime_dir
        runtimes = {"runc": self._runc()} | ({"nvidia": str(nvidia / "nvidia-container-runtime")} if nvidia else {})
        if versions.crio():
            text = crio.config(
                base,
                socket=self.cri_socket,
                runtimes=runtimes,
                environment=environment,
                cni_conf=cni_conf,
                cdi_dir=cdi_dir,
            )
            self._runtime_config.write_text(text)
            return
        version, cri, head, cni = _CONTAINERD[versions.containerd().startswith("1.")]
        self._runtime_config.write_text(f"""\
version = {version}
root = "{base}/root"
state = "{base}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{self.cri_socket}"
[ttrpc]
  address = "{base}/ttrpc.sock"
[plugins."io.containerd.nri.v1.nri"]
  disable = false
{head.format(cri=f'[plugins."{cri}"]', pause=f'"{images.PAUSE}"')}
  enable_cdi = true
  cdi_spec_dirs = ["{cdi_dir}"]
  restrict_oom_score_adj = true
  [plugins."{cri}".cni]
    {cni}
    conf_dir = "{cni_conf}"
  [plugins."{cri}".containerd]
    default_runtime_name = "runc"
{"".join(_RUNTIME.format(plugin=cri, name=name, binary=binary) for name, binary in runtimes.items())}""")


def cleanup(state: Path) -> None:
    """End what a node leaves when its processes are killed: containers, shims and their cgroups."""
    cgroups = _cgroups_of(state)
    for cgroup in cgroups:
        _kill_members(cgroup)
    for pid in _shims(state):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not _shims(state))
    for cgroup in cgroups:
        wait_for(lambda cgroup=cgroup: _remove(cgroup))
        with contextlib.suppress(OSError):
            cgroup.parent.rmdir()  # k8s.io, when nobody else has containers there


def remove_mps_cgroups() -> None:
    """Those that MPS daemons of the chart were put into, unless another cluster's are there."""
    for parent in _hierarchies():
        cgroup = parent / "cardwise-mps"
        # What was killed a moment ago may still be counted.
        wait_for(lambda cgroup=cgroup: not cgroup.exists() or _has_members(cgroup) or _emptied(cgroup), 2)


def leftovers(state: Path) -> list[str]:
    """Pods' and containers' cgroups and shims that still exist."""
    leftovers = [f"cgroup {path}" for path in _cgroups_of(state)]
    return leftovers + [f"shim {pid}" for pid in _shims(state)]


def _container_ids(state: Path) -> set[str]:
    """Ids of containers that this state folder's containerds have started, from their bundles and our note."""
    note = state / "container-ids.json"
    known = set(json.loads(note.read_text())) if note.exists() else set()
    for tasks in state.glob("nodes/*/containerd/state/io.containerd.runtime.v2.task/k8s.io"):
        known |= {path.name for path in tasks.iterdir()}
    if state.exists():
        note.write_text(json.dumps(sorted(known)))
    return known


def _cgroups_of(state: Path) -> list[Path]:
    """Those below `Node.cgroup`, the inner ones first; and k8s.io/<container id>, on nodes without cgroups of pods."""
    ids = _container_ids(state)
    of_pods = [
        Path(path)
        for parent in _hierarchies()
        for top in parent.glob(f"{_cgroup_prefix(state)}-*")
        for path, _, _ in os.walk(top, topdown=False)
    ]
    return of_pods + [path for parent in _hierarchies() for name in ids if (path := parent / "k8s.io" / name).is_dir()]


def _cgroup_prefix(state: Path) -> str:
    return f"cardwise-{hashlib.sha256(str(state).encode()).hexdigest()[:12]}"


def _hierarchies() -> list[Path]:
    """Each controller's of version 1; where version 2 alone is mounted, its root."""
    hierarchies = [path for path in _CGROUPS.iterdir() if path.is_dir()]
    return [_CGROUPS] if (_CGROUPS / "cgroup.controllers").exists() else hierarchies


def _kill_members(cgroup: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _has_members(cgroup: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool((cgroup / "cgroup.procs").read_text())
    return False


def _emptied(cgroup: Path) -> bool:
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


def _remove(cgroup: Path) -> bool:
    _kill_members(cgroup)
    return _emptied(cgroup)


def _shims(state: Path) -> list[int]:
    """containerd's name its socket, CRI-O's (conmon) the container's folder; both lie in the state folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            mine = any(word.startswith(f"{state}/nodes/".encode()) for word in words)
            if mine and words[0].endswith((b"containerd-shim-runc-v2", b"/conmon")):
                pids.append(int(path.parent.name))
    return pids


# Debian's packages that real nodes need, with what for.
PURPOSE_BY_PACKAGE = {
    "runc": "starts containers",
    "containernetworking-plugins": "connects pods to the node's network",
    "busybox-static": "the program in the demo's image of pods",
    "iproute2": "makes the nodes' networks",
    "util-linux": "enters the nodes' namespaces",
    "iptables": "routes Services",
} | dict.fromkeys(crio.PACKAGES, "part of CRI-O, the nodes' container runtime")


def missing_packages() -> list[str]:
    """Debian packages that a real node needs and this machine lacks."""
    needed = {
        "runc": Path("/usr/sbin/runc"),
        "containernetworking-plugins": Path("/usr/lib/cni/bridge"),
        "busybox-static": Path("/bin/busybox"),
    } | (crio.PACKAGES if versions.crio() else {})
    missing = [package for package, path in needed.items() if not path.exists()]
    programs = {"iproute2": "ip", "util-linux": "nsenter", "iptables": "iptables"}
    return missing + [package for package, program in programs.items() if not shutil.which(program)]
