"""The whole cluster as one object: up, look inside, break something, down."""

import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from urllib3 import BaseHTTPResponse, Timeout

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient, Query
from tests.cluster import (
    binaries,
    cards,
    chart,
    debian,
    devices,
    node,
    parts,
    partsimage,
    processes,
    services,
    simnodes,
    toolkit,
)
from tests.cluster.chart import Chart
from tests.cluster.controlplane import SERVICES, ControlPlane
from tests.cluster.network import Network
from tests.cluster.node import Node
from tests.cluster.processes import PATIENCE, Process, wait_for
from tests.cluster.services import Services
from tests.cluster.verbs import Verbs

_LONGEST_STATE_DIR = 50  # sockets lie up to 56 characters below it, and the path of one has at most 107
# For `kubectl logs`: the end of what each part has said.
_OF_ALL_PARTS = ("--selector=app.kubernetes.io/part-of=cardwise", "--all-containers", "--prefix", "--tail=20")
# What a look at something says that is not there yet, or that does not answer.
_NOT_YET = (LookupError, StopIteration, OSError, errors.NotFound, errors.Unreachable, errors.ServerError)


class PatientClient(KubeClient):
    """A test waits for an answer as long as for any event: on a busy machine the API server may stand still for longer
    than a part of ours would wait. After 60 s it breaks off what it was answering: what was only read is read again.
    """

    def get(self, path: str, query: Query | None = None, *, timeout: float | None = 10.0) -> dict[str, Any]:
        try:
            return super().get(path, query, timeout=timeout)
        except errors.Unreachable:
            return super().get(path, query, timeout=timeout)

    def _timeout(self, seconds: float | None) -> Timeout:
        return Timeout(connect=PATIENCE, read=seconds, total=seconds)

    def _open_response(self, method: str, path: str, *, timeout: float | None, **settings: Any) -> BaseHTTPResponse:
        return super()._open_response(method, path, timeout=timeout and max(timeout, PATIENCE), **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`nodes` are real kubelets n1, n2, … (root), `sim_nodes` are sim-1, sim-2, …; `cards` see `cards.py`.

    `rdma_devices`: so many has each real node. `nvidia_runtime`: each has NVIDIA's container toolkit (`toolkit`).
    `mps`: each has an MPS manager, with the control double. `agent`: each has our image, and the webhook puts the share
    agent into pods. `gates`: feature gates of Kubernetes that are on; `apis`: groups and versions that are served
    beside those by default. `real_cards`: the node has this machine's NVIDIA cards, its MPS manager NVIDIA's own
    program; and NVIDIA's runtime where the parts are pods. `chart`: our parts are no processes but pods on the real
    nodes, installed by Helm with `values`; one such cluster at a time. `former`: another tree of ours
    (tests/cluster/former.py), whose chart and code are installed first, to be upgraded. `claims`: shares are allocated
    as ResourceClaims, and kube-scheduler knows nothing of the extender.
    """

    state_dir: Path
    nodes: int = 0
    sim_nodes: int = 0
    cards: Path | None = None
    rdma_devices: int = 0
    nvidia_runtime: bool = False
    mps: bool = False
    real_cards: bool = False
    agent: bool = False
    claims: bool = False
    gates: Sequence[str] = ()
    apis: Sequence[str] = ()
    parts: bool = True
    part_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    chart: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    former: Path | None = None
    keeper: bool = True


class Cluster:
    """A running cluster. `start` cleans up what an earlier run left in the same folder."""

    def __init__(self, state_dir: Path, say: binaries.Say = lambda _: None) -> None:
        self.state_dir = state_dir.resolve()
        self._say = say
        self.bin_dir = binaries.kube(say)
        self.control_plane = ControlPlane(self.state_dir, self.bin_dir)
        self.network = Network(self.state_dir)
        self._api: KubeClient | None = None
        self._verbs: Verbs | None = None

    @classmethod
    def attach(cls, state_dir: Path) -> Self:
        """A cluster that another process started."""
        if not (state_dir / "spec.json").exists():
            raise LookupError(f"no cluster in {state_dir}; `python -m tests.cluster up` starts one")
        return cls(state_dir)

    @classmethod
    def start(cls, spec: ClusterSpec, say: binaries.Say = lambda _: None) -> Self:
        """Bring everything up and wait until it is ready."""
        _check(spec)
        if spec.nodes:
            _require_node_tools(say)
        if (spec.state_dir / "run").exists():
            say("cleaning up what an earlier run left")
            cls(spec.state_dir, say).stop()
        spec.state_dir.mkdir(parents=True, exist_ok=True)
        cluster = cls(spec.state_dir, say)
        try:
            if spec.nodes:
                _mount(spec.state_dir)
            cluster._start(spec)
        except BaseException as error:
            kept = None if isinstance(error, KeyboardInterrupt) else cluster._keep_logs()
            cluster.stop()
            if kept:
                say(f"the logs are kept in {kept}")
            raise
        return cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        return self.control_plane.kubeconfig("admin")

    @property
    def api(self) -> KubeClient:
        """A client with all rights."""
        if self._api is None:
            self._api = self.client("admin")
        return self._api

    def client(self, name: str) -> PatientClient:
        """With the rights of whose kubeconfig it is, such as cardwise-extender."""
        return PatientClient.load(self.control_plane.kubeconfig(name))

    @property
    def nodes(self) -> list[Node]:
        """The real nodes."""
        return [Node(self.state_dir, name) for name in self._spec()["nodes"]]

    @property
    def parts(self) -> parts.Parts:
        spec = self._spec()
        return parts.Parts(self.state_dir, self.control_plane.url, spec["part_args"], real_cards=spec["real_cards"])

    @property
    def chart(self) -> Chart:
        """The release, where the parts come from the chart."""
        spec = self._spec()
        return Chart(self.state_dir, self.kubeconfig, spec["values"], Path(spec["former"]) / "helm" / "cardwise")

    @property
    def has_parts(self) -> bool:
        """As processes: they can be asked."""
        return bool(self._spec()["parts"])

    def node(self, name: str) -> Node:
        return Node(self.state_dir, name)

    def process(self, name: str) -> Process:
        """etcd, kube-apiserver, kube-scheduler, …, extender, webhook, deviceplugin-n1, kubelet-n1, containerd-n1."""
        return Process(self.state_dir, name)

    def log_tail(self, name: str, lines: int = 50) -> str:
        return self.process(name).log_tail(lines)

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = PATIENCE) -> str:
        """Run kubectl as the admin; returns stdout. Raises CommandFailed with stderr."""
        return processes.run([*self._kubectl, *args], stdin=stdin, check=check, timeout=timeout)

    def kubectl_object(self, *args: str, stdin: object = None) -> dict[str, Any]:
        """As `kubectl`, without its process and with an object as the answer (verbs.py). Raises CommandFailed."""
        done = self.verbs.run(*args, stdin=stdin)
        if done.returncode:
            raise processes.CommandFailed(f"{' '.join(args)}: {done.stderr.strip()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @property
    def verbs(self) -> Verbs:
        if self._verbs is None:
            self._verbs = Verbs(self.api)
        return self._verbs

    def apply(self, documents: str | Sequence[Mapping[str, Any]]) -> None:
        """YAML text or decoded objects, server-side: what an earlier one said and these do not goes."""
        self.kubectl_object("apply", "--server-side", "--force-conflicts", stdin=documents)

    def wait(self, ready: Callable[[], object], condition: str, timeout: float = PATIENCE) -> None:
        """Wait for a condition. Where it looks for something that is not there yet, or the API server does not answer,
        it is not so yet. Raises AssertionError that names it.
        """
        trouble = ""

        def so() -> bool:
            nonlocal trouble
            try:
                return bool(ready())
            except _NOT_YET as error:
                trouble = f"; at last {error!r}"
                return False

        if not wait_for(so, timeout):
            raise AssertionError(f"not so after {timeout:.0f} s: {condition}{trouble}")

    def simulate(self, nodes: Mapping[str, Sequence[cards.TestCard]], *, keeper: bool = True) -> None:
        """Simulated nodes with these cards; `keeper`: it plays their kubelets."""
        simnodes.create(self.api, nodes)
        if keeper and not self.process("simnodes").is_alive():
            command = [str(_python()), "-m", "tests.cluster.simnodes", str(self.kubeconfig)]
            self.process("simnodes").start(command, {"PYTHONPATH": str(parts.ROOT)})

    def environment(self) -> dict[str, str]:
        """What a shell needs to look at the cluster."""
        variables = {
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self.bin_dir}:{_python().parent}:{os.environ['PATH']}",
            "CARDWISE_APISERVER_URL": self.control_plane.url,
        }
        if self.has_parts:
            variables |= {
                "CARDWISE_EXTENDER_URL": self.parts.url("extender"),
                "CARDWISE_EXTENDER_TLS": str(self.parts.tls_dir),
                "CARDWISE_WEBHOOK_URL": self.parts.url("webhook"),
            }
        return variables

    def stop(self) -> None:
        """End everything that was started from the state folder, and remove the folder."""
        if self._api is not None:
            self._api.close()
        process_names = processes.noted_names(self.state_dir)
        Services(self.state_dir, self.bin_dir).stop()
        # Nobody has the time to mind the others' end, least of all to start a container again.
        for wait in (False, True):
            for name in process_names:
                self.process(name).kill(wait=wait)
        node.cleanup(self.state_dir)
        processes.kill_marked(self.state_dir)
        node.remove_mps_cgroups()
        self.network.remove()
        _unmount(self.state_dir)
        shutil.rmtree(self.state_dir, ignore_errors=True)

    @staticmethod
    def leftovers(state_dir: Path) -> list[str]:
        """What still exists of a cluster of this folder: empty after `stop`."""
        leftovers = [f"folder {state_dir}"] if state_dir.exists() else []
        leftovers += [
            f"process {name}" for name in processes.noted_names(state_dir) if Process(state_dir, name).is_alive()
        ]
        leftovers += [f"mount {line.split()[4]}" for line in _mounts() if str(state_dir) in line]
        if Network(state_dir).exists():
            leftovers.append(f"bridge {Network(state_dir).bridge}")
        leftovers += [f"process {pid}" for pid in processes.marked(state_dir)]
        return leftovers + node.leftovers(state_dir)

    @property
    def _kubectl(self) -> list[str]:
        return [str(self.bin_dir / "kubectl"), f"--kubeconfig={self.kubeconfig}"]

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = json.loads((self.state_dir / "spec.json").read_text())
        return spec

    def _start(self, spec: ClusterSpec) -> None:
        inventory = cards.read(spec.cards)
        real = [f"n{i}" for i in range(1, spec.nodes + 1)]
        simulated = [f"sim-{i}" for i in range(1, spec.sim_nodes + 1)]
        record: dict[str, Any] = {"nodes": real, "simulated": simulated, "parts": spec.parts and not spec.chart}
        record["values"] = dict(spec.values)
        record["real_cards"] = spec.real_cards
        record["former"] = str(spec.former or parts.ROOT)
        record["part_args"] = {part: list(args) for part, args in spec.part_args.items()}
        if spec.agent:
            image = f"--share-agent-image={partsimage.AGENT}"
            record["part_args"]["webhook"] = [image, *record["part_args"].get("webhook", ())]
        if spec.claims:
            for part in ("webhook", "extender", "deviceplugin"):
                record["part_args"][part] = ["--claims", *record["part_args"].get(part, ())]
            record["values"] = {**record["values"], "scheduler": {"mode": "claims"}}
        (self.state_dir / "spec.json").write_text(json.dumps(record))
        clock = _Clock(self._say)
        gates = _switched_on("--feature-gates", spec.gates)
        if real:
            self.network.create(len(real))
        if spec.chart:
            self.network.forward(SERVICES)
            self.control_plane.address = self.network.node_address(1)
        self.control_plane.write_credentials(real)
        with ThreadPoolExecutor(1) as pool:
            runtimes = pool.submit(self._start_runtimes, real, inventory, spec)
            self.control_plane.start_api([*gates, *_switched_on("--runtime-config", spec.apis)])
            clock.report("etcd and kube-apiserver are ready")
            self.control_plane.start_controllers(gates)
            if not spec.chart:
                self.parts.apply_crds(self.api)
            runtimes.result()
        if real:
            self._start_kubelets(real)
            clock.report(f"{len(real)} kubelets and containerds have started")
        stanzas: list[dict[str, Any]] = []
        if spec.chart:
            self._install(real)
            clock.report("the chart is installed")
            stanzas = [] if spec.claims else self.chart.stanzas(self.api)
            self.process("kube-scheduler").stop()
        if spec.parts and not spec.chart:
            self.parts.apply_chart(self.api, *(["scheduler.mode=claims"] if spec.claims else []))
            self.parts.start(self.nodes)
            if spec.mps:
                self.parts.start_mps(self.nodes)
            clock.report("the chart is applied and its parts have started")
        if simulated:
            of_node = {name: inventory.get(name, inventory["default"]) for name in simulated}
            self.simulate(of_node, keeper=spec.keeper)
            clock.report(f"{len(simulated)} simulated nodes are there")
        if spec.parts and not spec.chart:
            self.parts.wait_certified()
            stanzas = [] if spec.claims else self.parts.stanzas()
        self.control_plane.start_scheduler(stanzas, gates)
        clock.report("kube-scheduler is ready")
        self._wait_ready(real, spec)
        clock.report("the cluster is ready")

    def _install(self, real: Sequence[str]) -> None:
        """The chart, into a cluster whose scheduler knows nothing of it yet."""
        Services(self.state_dir, self.bin_dir).start(self.control_plane.kubeconfig(services.PROXY), self.network)
        self.control_plane.start_scheduler([])
        for name in real:
            self.process(f"kubelet-{name}").wait_until(lambda name=name: self._node_ready(name), "Ready")
            self.kubectl("label", "node", name, f"{chart.GPU_LABEL}=true")
        if self._spec()["real_cards"]:
            toolkit.runtime_class(self.api)
        try:
            self.chart.install()
        except processes.CommandFailed as error:
            seen = self.kubectl("describe", "pods", f"--namespace={names.NAMESPACE}", check=False)
            logs = self.kubectl("logs", f"--namespace={names.NAMESPACE}", *_OF_ALL_PARTS, check=False)
            raise processes.CommandFailed(f"{error}\n{seen}\n{logs}") from error

    def _archives(self, spec: ClusterSpec) -> list[Path]:
        """Images of pods that are ours."""
        folder = self.state_dir / "images"
        folder.mkdir(exist_ok=True)
        partsimage.write(folder / "cardwise.tar", self._say, double=not spec.real_cards)
        archives = [folder / "cardwise.tar"]
        if spec.agent:
            partsimage.write_agent(folder / "agent.tar")
            archives.append(folder / "agent.tar")
        if spec.former is not None:
            partsimage.write(folder / "former.tar", self._say, spec.former, partsimage.FORMER)
            archives.append(folder / "former.tar")
        return archives

    def _start_runtimes(
        self, real: Sequence[str], inventory: Mapping[str, Sequence[cards.TestCard]], spec: ClusterSpec
    ) -> None:
        if not real:
            return
        node_bin = binaries.runtime(self._say)
        real_runtime = spec.real_cards and spec.chart
        nvidia = binaries.nvidia(self._say) if spec.nvidia_runtime or real_runtime else None
        archives = self._archives(spec) if spec.chart or spec.agent else []
        for number, name in enumerate(real, start=1):
            of_node = inventory.get(name, inventory["default"])
            seen_at = Path(node.OWN_FOLDER) if spec.chart else None
            if not spec.real_cards:
                cards.write_inventory(self.node(name).folder, name, of_node, seen_at)
            if spec.rdma_devices:
                devices.write(self.node(name).folder, name, spec.rdma_devices)
            if real_runtime:
                toolkit.write_real(self.node(name).folder)
            elif nvidia:
                toolkit.write(self.node(name).folder, name, len(of_node))
            self.node(name).start_runtime(
                node_bin=node_bin,
                network=self.network,
                number=number,
                archives=archives,
                routed=SERVICES if spec.chart else "",
                hosts_parts=spec.chart,
                nvidia=nvidia,
            )
            if spec.real_cards:
                self.node(name).write_nvidia_spec()

    def _start_kubelets(self, real: Sequence[str]) -> None:
        for number, name in enumerate(real, start=1):
            kubeconfig = self.control_plane.kubeconfig(f"kubelet-{name}")
            self.node(name).start_kubelet(
                kube_bin=self.bin_dir, kubeconfig=kubeconfig, network=self.network, number=number
            )

    def _wait_ready(self, real: Sequence[str], spec: ClusterSpec) -> None:
        def default_account() -> bool:
            try:
                self.api.get("/api/v1/namespaces/default/serviceaccounts/default")
            except errors.NotFound:
                return False
            return True

        manager = self.process("kube-controller-manager")
        manager.wait_until(default_account, "the default service account")
        for name in real:
            self.process(f"kubelet-{name}").wait_until(lambda name=name: self._node_ready(name), "Ready")
            if spec.parts:
                watched = self.process(f"kubelet-{name}" if spec.chart else f"deviceplugin-{name}")
                watched.wait_until(lambda name=name: self._node_has_cards(name), "cards in the node's status")
        if spec.parts and not spec.chart:
            self.parts.wait_ready("extender")
            self.parts.wait_ready("webhook")
            webhook = self.process("webhook")
            webhook.wait_until(lambda: parts.ca_is_patched(self.api), "caBundle in the webhook configuration")

    def _node_ready(self, name: str) -> bool:
        """Whether the node is Ready. A kubelet that has given up is started again."""
        self.node(name).keep_kubelet()
        try:
            conditions = self.api.get(paths.nodes(name))["status"].get("conditions", ())
        except errors.NotFound:
            return False
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _node_has_cards(self, name: str) -> bool:
        allocatable = self.api.get(paths.nodes(name))["status"].get("allocatable", {})
        return allocatable.get(names.SHARE, "0") != "0" and allocatable.get(names.GPU_MEM, "0") != "0"

    def _keep_logs(self) -> Path | None:
        """Copy the logs of a failed start to where the clean-up does not reach."""
        logs = self.state_dir / "logs"
        if not logs.exists():
            return None
        kept = self.state_dir.with_name(f"{self.state_dir.name}-failed-logs")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(logs, kept)
        return kept


class _Clock:
    def __init__(self, say: binaries.Say) -> None:
        self._say = say
        self._started = time.monotonic()

    def report(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._started:5.1f} s  {text}")


def _python() -> Path:
    return parts.ROOT / ".venv" / "bin" / "python"


def _switched_on(flag: str, gates: Sequence[str]) -> list[str]:
    return [f"{flag}={','.join(f'{gate}=true' for gate in gates)}"] if gates else []


def _check(spec: ClusterSpec) -> None:
    path = str(spec.state_dir.resolve())
    if len(path) > _LONGEST_STATE_DIR:
        raise ValueError(f"{path} is too long for sockets in it; shorten it to {_LONGEST_STATE_DIR} characters")
    if spec.nodes and path.startswith(tuple(f"{folder}/" for folder in node.HIDDEN)):
        raise ValueError(f"{path} lies where real nodes get folders of their own; choose a state folder under /tmp")


def _require_node_tools(say: binaries.Say) -> None:
    if os.geteuid() != 0:
        raise PermissionError("real nodes need root (kubelet, mounts, bridges); use --nodes 0 with --sim-nodes instead")
    debian.install(node.missing_packages, say)


def _mount(state_dir: Path) -> None:
    """In memory: images are unpacked there, and thousands of files go at the end without the disk."""
    processes.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "cardwise", str(state_dir.resolve())])


def _unmount(state_dir: Path) -> None:
    if any(line.split()[4] == str(state_dir) for line in _mounts()):
        processes.run(["umount", "--lazy", str(state_dir)])


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def default_state_dir() -> Path:
    """A short path (sockets are limited to 108 bytes), one per user."""
    return Path(f"/tmp/cardwise-{os.getuid()}")


def check_owner(state_dir: Path) -> None:
    """Refuse a folder of somebody else in /tmp."""
    if state_dir.exists() and (state_dir.stat().st_uid != os.getuid() or not stat.S_ISDIR(state_dir.stat().st_mode)):
        raise PermissionError(f"{state_dir} belongs to another user; give --state-dir")
