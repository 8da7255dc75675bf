"""Measures pods per second of the real kube-scheduler with and without the extender, and API requests per pod.

The control plane is real (tests/cluster), its nodes are simulated. kube-scheduler is stopped (SIGSTOP) while the pods
are created and continued after that, so that only scheduling is measured; a watch counts the bound pods. There are
three kinds of runs, in turn on the same machine, with percentageOfNodesToScore 100. Stock runs place pods of 1 CPU.
Runs with the extender place GPU shares of 1,024 to 16,276 MiB. The third kind places such shares without an extender,
and shows the cost of the extended resources alone. API requests are counted too, since their number does not depend on
the speed of the machine.
"""

import os
import random
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench import processes
from bench.timing import Row
from cardwise.core.api import schedulerconfig
from cardwise.core.values.decoded import Json
from cardwise.kube import paths, wire
from tests.cluster import Cluster, ClusterSpec, ports
from tests.cluster.parts import says_ready
from tests.cluster.processes import Process, children, wait_for

NAMESPACE = "default"
MIN_MIB, MAX_MIB = 1024, 16276  # the smallest and the largest share in MiB
TIMEOUT = 600  # maximum seconds of a run
_BATCHED = 'scheduler_batch_attempts_total{profile="default-scheduler",result="hint_used"}'
_STOCK, _SHARES = "stock, pods of 1 CPU", "stock, shares without an extender"


@dataclass(frozen=True)
class RunResult:
    """The measurements of one run.

    cpu: milliseconds of CPU per pod, by process.
    batched: pods for which kube-scheduler reused the result of an earlier pod (OpportunisticBatching).
    requests: number of requests to the API server, by verb and resource, for example "POST pods/binding".
    """

    pods_per_second: float
    cpu: dict[str, float]
    batched: int
    requests: dict[str, int]


def run(
    code: Sequence[Path], options: tuple[str, ...], *, nodes: int, pods: int, runs: int, plain_http: bool
) -> list[Row]:
    """Measure each kind of run `runs` times.

    code: checkouts whose extenders are measured in turn.
    options: options of the extender's command line.
    """
    checkouts = {f"with the extender{f' of {root}' if len(code) > 1 else ''}, GPU shares": root for root in code}
    with control_plane(nodes) as cluster:
        bench = Bench(cluster, pods)
        runs_by_kind: dict[str, list[RunResult]] = {kind: [] for kind in (_STOCK, _SHARES, *checkouts)}
        for number in range(runs):
            for i, (kind, measured_runs) in enumerate(runs_by_kind.items()):
                stanzas = []
                if kind in checkouts:
                    stanzas = bench.start_extender(options, plain_http=plain_http, code=checkouts[kind])
                measured = bench.measure(f"run{number}-{i}", stanzas, gpu=kind != _STOCK)
                print(f"{kind} {number}: {measured.pods_per_second:.0f} pods/s {measured.cpu}", file=sys.stderr)
                print(f"  requests: {measured.requests}", file=sys.stderr)
                measured_runs.append(measured)
    rows = [row(kind, measured_runs) for kind, measured_runs in runs_by_kind.items()]
    rates = {kind: median([run.pods_per_second for run in measured]) for kind, measured in runs_by_kind.items()}
    for kind in checkouts:
        ratios = {f"to {other}": f"{rates[kind] / rates[other]:.2f}" for other in (_STOCK, _SHARES)}
        rows.append(Row(f"ratio of medians, {kind}, {nodes} nodes x 8 cards, {pods} pods", ratios))
    return rows


@contextmanager
def control_plane(nodes: int, cards_each: int = 8) -> Iterator[Cluster]:
    """A control plane with simulated nodes of `cards_each` GPUs, without Cardwise."""
    # Always the same folder, so that a run cleans up after a killed run.
    state = Path(tempfile.gettempdir()) / f"cwb-{os.getuid()}"
    with tempfile.TemporaryDirectory(prefix="cwb-cards-") as directory:
        cards = Path(directory) / "cards.yaml"
        cards.write_text(yaml.safe_dump({"default": [{"model": "Tesla P100", "memoryMiB": MAX_MIB}] * cards_each}))
        spec = ClusterSpec(state_dir=state, sim_nodes=nodes, cards=cards, parts=False, keeper=False)
        with Cluster.start(spec, lambda text: print(text, file=sys.stderr)) as cluster:
            yield cluster


class Bench:
    """Measures runs of `pods` pods on a cluster, one after another."""

    def __init__(self, cluster: Cluster, pods: int) -> None:
        self._cluster = cluster
        self._pods = pods

    def start_extender(
        self,
        options: tuple[str, ...],
        *,
        plain_http: bool,
        code: Path = processes.ROOT,
        program: tuple[str, ...] = ("extender",),
    ) -> list[Json]:
        """Start the extender of a checkout; `measure` stops it. Returns its stanzas for kube-scheduler's configuration.

        options: options of the extender's command line.
        program: the module that starts it, with its arguments.
        """
        process = self._cluster.process("extender")
        port, bind_port, metrics = ports.free(3)
        self._metrics = metrics
        tls = self._cluster.state_dir / "extender-tls"
        serving = ["--plain-http"] if plain_http else ["--tls-dir", str(tls)]
        process.start(
            [
                "env", f"--chdir={code}", sys.executable, "-m", *program,
                "--kubeconfig", str(self._cluster.kubeconfig),
                "--bind", f"127.0.0.1:{port}",
                "--bind-port-bind", f"127.0.0.1:{bind_port}",
                "--metrics-bind", f"127.0.0.1:{metrics}",
                "--no-lease",
                *serving,
                *options,
            ]
        )  # fmt: skip
        process.wait_until(lambda: says_ready(metrics), "/readyz", 30)
        scheme = "http" if plain_http else "https"
        files = {} if plain_http else {
            "ca_file": str(tls / "ca.crt"), "cert_file": str(tls / "client.crt"), "key_file": str(tls / "client.key")
        }  # fmt: skip
        return schedulerconfig.extender_stanzas(
            filter_url=f"{scheme}://127.0.0.1:{port}", bind_url=f"{scheme}://127.0.0.1:{bind_port}", **files
        )

    def measure(
        self, name: str, stanzas: list[Json], *, gpu: bool, sampling: int = 100, profiles: Sequence[Json] = ()
    ) -> RunResult:
        """Measure one run.

        name: prefix of the pods' names.
        stanzas: the extender stanzas of kube-scheduler's configuration; empty: no extender runs.
        gpu: whether the pods request GPU shares; otherwise they request 1 CPU.
        sampling: percentageOfNodesToScore, 0 for kube-scheduler's default.
        profiles: the profiles of kube-scheduler's configuration.
        """
        cluster, rng = self._cluster, random.Random(1)
        scheduler = cluster.process("kube-scheduler")
        scheduler.stop()
        cluster.control_plane.start_scheduler(stanzas, sampling=sampling, profiles=profiles)
        time.sleep(2)
        scheduler.pause()
        bound_pods = self.create_pods([_pod(name, i, rng, gpu=gpu) for i in range(self._pods)])
        start_requests, start_cpu = self._request_counts(), self._cpu_by_process()
        start = time.monotonic()
        scheduler.resume()
        seconds = bound_pods.wait(start, TIMEOUT)
        end_cpu, requests = self._cpu_by_process(), self._request_counts() - start_requests
        batched = _parse_metrics(cluster.control_plane.scheduler_metrics()).get(_BATCHED, "0")
        if stanzas:
            metrics = self._extender_metrics()
            latencies = _mean_latencies(metrics)
            print(f"  mean of a call: {latencies}; nomination: {_nomination_outcomes(metrics)}", file=sys.stderr)
            cluster.process("extender").stop()
        self.delete_pods()
        cpu = {
            process: round((end_seconds - start_cpu[process]) * 1000 / self._pods, 2)
            for process, end_seconds in end_cpu.items()
            if process in start_cpu
        }
        return RunResult(self._pods / seconds, cpu, int(float(batched)), dict(requests.most_common()))

    def _request_counts(self) -> Counter[str]:
        """The requests that the API server has served so far, by verb and resource, without leases and watches."""
        requests: Counter[str] = Counter()
        for family in text_string_to_metric_families(self._cluster.kubectl("get", "--raw", "/metrics")):
            if family.name == "apiserver_request":
                for sample in family.samples:
                    label = sample.labels
                    if sample.name == "apiserver_request_total" and label["resource"] not in ("", "leases"):
                        resource = "/".join(filter(None, (label["resource"], label["subresource"])))
                        requests[f"{label['verb']} {resource}"] += int(sample.value)
        return Counter({request: count for request, count in requests.items() if not request.startswith("WATCH ")})

    def _extender_metrics(self) -> dict[str, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=5) as response:
            return _parse_metrics(response.read().decode())

    def create_pods(self, pods: list[Json]) -> "BoundPods":
        """Create pods while no scheduler runs. Returns a counter of the pods that are bound from now on."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda manifest: self._cluster.api.create(paths.pods(NAMESPACE), manifest), pods))
        version = self._cluster.api.get(paths.pods(NAMESPACE), {"limit": "1"})["metadata"]["resourceVersion"]
        return BoundPods(self._cluster, version, len(pods))

    def delete_pods(self) -> None:
        """Delete all pods, and wait until they are gone."""
        api = self._cluster.api
        api.delete(paths.pods(NAMESPACE), {"gracePeriodSeconds": 0}, timeout=60)
        if not wait_for(lambda: not api.get(paths.pods(NAMESPACE), {"limit": "1"})["items"]):
            raise RuntimeError("pods were not deleted")

    def _cpu_by_process(self) -> dict[str, float]:
        """Seconds of CPU so far of each running process."""
        seconds = {}
        for name in ("etcd", "kube-apiserver", "kube-scheduler", "extender"):
            process: Process = self._cluster.process(name)
            if process.recorded is not None and process.is_alive():
                seconds[name] = sum(cpu_seconds(pid) for pid in [process.pid, *children(process.pid)])
        return seconds


def _pod(name: str, i: int, rng: random.Random, *, gpu: bool) -> Json:
    limits = {"cpu": "1"}
    if gpu:
        limits = {"aliyun.com/gpu-mem": str(rng.randint(MIN_MIB, MAX_MIB)), "cardwise.dev/share": "1"}
    return pod(f"{name}-{i}", limits)


def pod(name: str, limits: dict[str, str], **spec: str) -> Json:
    """A pod with these limits."""
    container = {"name": "main", "image": "example.com/app:1", "resources": {"limits": limits}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def _parse_metrics(text: str) -> dict[str, str]:
    """The samples of metrics in Prometheus' text format, by name with labels."""
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")


def _mean_latencies(metrics: dict[str, str]) -> dict[str, str]:
    """The mean latency of the extender's verbs."""
    latencies = {}
    for verb in ("filter", "bind"):
        key = f'cardwise_extender_request_seconds_%s{{verb="{verb}"}}'
        calls = float(metrics.get(key % "count", 0))
        if calls:
            latencies[verb] = f"{float(metrics[key % 'sum']) / calls * 1000:.1f} ms of {calls:.0f}"
    return latencies


def _nomination_outcomes(metrics: dict[str, str]) -> dict[str, int]:
    """The number of nominated pods by outcome."""
    key = 'cardwise_extender_nominations_total{outcome="'
    return {name.removeprefix(key)[:-2]: int(float(count)) for name, count in metrics.items() if name.startswith(key)}


class _Event(msgspec.Struct):
    type: str
    object: wire.ObjectHead


_decode_event = msgspec.json.Decoder(_Event).decode


class BoundPods:
    """Counts bound pods by a watch that starts at resourceVersion `version`, until `pods` pods are bound."""

    def __init__(self, cluster: Cluster, version: str, pods: int) -> None:
        self._cluster = cluster
        self._pods = pods
        self._done = threading.Event()
        self._end = 0.0
        self._count = 0
        self._thread = threading.Thread(target=self._watch, args=(version,), daemon=True)
        self._thread.start()

    def wait(self, start: float, timeout: float) -> float:
        """Wait until all pods are bound. Returns the seconds since `start`, a time of the monotonic clock."""
        if not self._done.wait(timeout):
            raise RuntimeError(f"only {self._count} of {self._pods} pods were bound in {timeout:.0f} s")
        return self._end - start

    def _watch(self, version: str) -> None:
        query = {"fieldSelector": "spec.nodeName!="}
        while True:  # the API server ends a watch whose reader is slow
            for line in self._cluster.api.watch(paths.pods(NAMESPACE), query, version, 600):
                event = _decode_event(line)
                version = event.object.metadata.resource_version
                self._count += event.type == "ADDED"
                if self._count == self._pods:
                    self._end = time.monotonic()
                    self._done.set()
                    return


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that the process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(label: str, runs: list[RunResult]) -> Row:
    """A row with the medians of the runs."""
    rates = [run.pods_per_second for run in runs]
    cells = {"pods/s, median": f"{median(rates):.0f}", "runs": " ".join(f"{rate:.0f}" for rate in rates)}
    for process in ("etcd", "kube-apiserver", "kube-scheduler", "extender"):
        milliseconds = [run.cpu[process] for run in runs if process in run.cpu]
        cells[f"{process}, CPU/pod"] = f"{median(milliseconds):.2f} ms" if milliseconds else "-"
    cells["API requests"] = f"{median([sum(run.requests.values()) for run in runs]):.0f}"
    return Row(label, cells)
