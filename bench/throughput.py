"""Pods a second of the real kube-scheduler with our extender, as a ratio to the same without, and requests for a pod.

A real control plane (tests/cluster) with simulated nodes. The scheduler is stopped (SIGSTOP) while the pods are
created and then let go, so that what is measured is scheduling alone; pods are counted by a watch. Stock runs place
pods of 1 CPU, ours shares of 1,024 to 16,276 MiB; both with percentageOfNodesToScore 100, by turns on one machine. A
third kind of run tells what the extended resources alone cost kube-scheduler: the shares without an extender. What the
API server was asked is counted as well: it tells a change of the code from one of the machine.
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

from bench import parts
from bench.timing import Row
from cardwise.core.api import schedulerconfig
from cardwise.kube import paths, wire
from tests.cluster import Cluster, ClusterSpec, ports
from tests.cluster.parts import says_ready
from tests.cluster.processes import Process, children, wait_for

NAMESPACE = "default"
LOW, HIGH = 1024, 16276  # MiB
LIMIT = 600  # seconds of one run
_BATCHED = 'scheduler_batch_attempts_total{profile="default-scheduler",result="hint_used"}'
_STOCK, _SHARES = "stock, pods of 1 CPU", "stock, shares without an extender"


@dataclass(frozen=True)
class Result:
    """One run. `cpu`: milliseconds of CPU for a pod by process. `batched`: pods that got the result of one before.

    `requests`: how many the API server answered, by verb and resource, as "POST pods/binding".
    """

    pods_per_second: float
    cpu: dict[str, float]
    batched: int
    requests: dict[str, int]


def run(
    code: Sequence[Path], options: tuple[str, ...], *, nodes: int, pods: int, runs: int, plain_http: bool
) -> list[Row]:
    """`code`: checkouts whose extenders are measured by turns."""
    ours = {f"with the extender{f' of {each}' if len(code) > 1 else ''}, GPU shares": each for each in code}
    with cluster_of(nodes) as cluster:
        bench = Bench(cluster, pods)
        results: dict[str, list[Result]] = {kind: [] for kind in (_STOCK, _SHARES, *ours)}
        for number in range(runs):
            for i, (kind, found) in enumerate(results.items()):
                stanzas = bench.start_extender(options, plain_http=plain_http, code=ours[kind]) if kind in ours else []
                result = bench.measure(f"run{number}-{i}", stanzas, gpu=kind != _STOCK)
                print(f"{kind} {number}: {result.pods_per_second:.0f} pods/s {result.cpu}", file=sys.stderr)
                print(f"  requests: {result.requests}", file=sys.stderr)
                found.append(result)
    rows = [row(kind, each) for kind, each in results.items()]
    best = {kind: median([each.pods_per_second for each in found]) for kind, found in results.items()}
    for kind in ours:
        ratios = {f"to {other}": f"{best[kind] / best[other]:.2f}" for other in (_STOCK, _SHARES)}
        rows.append(Row(f"ratio of medians, {kind}, {nodes} nodes x 8 cards, {pods} pods", ratios))
    return rows


@contextmanager
def cluster_of(nodes: int, cards_each: int = 8) -> Iterator[Cluster]:
    """A control plane with so many simulated nodes, and nothing of ours."""
    # One folder, so that a run cleans up what a killed one has left.
    state = Path(tempfile.gettempdir()) / f"cwb-{os.getuid()}"
    with tempfile.TemporaryDirectory(prefix="cwb-cards-") as directory:
        cards = Path(directory) / "cards.yaml"
        cards.write_text(yaml.safe_dump({"default": [{"model": "Tesla P100", "memoryMiB": HIGH}] * cards_each}))
        spec = ClusterSpec(state_dir=state, sim_nodes=nodes, cards=cards, parts=False, keeper=False)
        with Cluster.start(spec, lambda text: print(text, file=sys.stderr)) as cluster:
            yield cluster


class Bench:
    """A cluster on which runs are measured one after another."""

    def __init__(self, cluster: Cluster, pods: int) -> None:
        self._cluster = cluster
        self._pods = pods

    def start_extender(self, options: tuple[str, ...], *, plain_http: bool, code: Path = parts.ROOT) -> list[dict]:
        """That of a checkout, anew, as ours end with every run. Returns the scheduler's stanzas."""
        process = self._cluster.process("extender")
        fast, slow, metrics = ports.free(3)
        self._metrics = metrics
        tls = self._cluster.state_dir / "extender-tls"
        where = ["--plain-http"] if plain_http else ["--tls-dir", str(tls)]
        process.start(
            [
                "env", f"--chdir={code}", sys.executable, "-m", "extender",
                "--kubeconfig", str(self._cluster.kubeconfig),
                "--bind", f"127.0.0.1:{fast}",
                "--bind-port-bind", f"127.0.0.1:{slow}",
                "--metrics-bind", f"127.0.0.1:{metrics}",
                "--no-lease",
                *where,
                *options,
            ]
        )  # fmt: skip
        process.wait_until(lambda: says_ready(metrics), "/readyz", 30)
        scheme = "http" if plain_http else "https"
        files = {} if plain_http else {
            "ca_file": str(tls / "ca.crt"), "cert_file": str(tls / "client.crt"), "key_file": str(tls / "client.key")
        }  # fmt: skip
        return schedulerconfig.extender_stanzas(
            filter_url=f"{scheme}://127.0.0.1:{fast}", bind_url=f"{scheme}://127.0.0.1:{slow}", **files
        )

    def measure(
        self, name: str, stanzas: list[dict], *, gpu: bool, sampling: int = 100, profiles: Sequence[dict] = ()
    ) -> Result:
        """One run. `sampling`: percent of the nodes that the scheduler looks at, 0 for its own choice."""
        cluster, draw = self._cluster, random.Random(1)
        scheduler = cluster.process("kube-scheduler")
        scheduler.stop()
        cluster.control_plane.start_scheduler(stanzas, sampling=sampling, profiles=profiles)
        time.sleep(2)
        scheduler.pause()
        landed = self.create([_pod(name, i, draw, gpu=gpu) for i in range(self._pods)])
        requests, cpu = self._requests(), self._cpu()
        began = time.monotonic()
        scheduler.resume()
        seconds = landed.wait(began, LIMIT)
        after, asked = self._cpu(), self._requests() - requests
        batched = _values(cluster.control_plane.scheduler_metrics()).get(_BATCHED, "0")
        if stanzas:
            values = self._values()
            print(f"  mean of a call: {_mean_seconds(values)}; ahead: {_ahead(values)}", file=sys.stderr)
            cluster.process("extender").stop()
        self.clear()
        used = {who: round((after[who] - cpu[who]) * 1000 / self._pods, 2) for who in after if who in cpu}
        return Result(self._pods / seconds, used, int(float(batched)), dict(asked.most_common()))

    def _requests(self) -> Counter[str]:
        """What the API server has answered so far, but for leases and watches."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self._cluster.kubectl("get", "--raw", "/metrics")):
            if family.name == "apiserver_request":
                for sample in family.samples:
                    label = sample.labels
                    if sample.name == "apiserver_request_total" and label["resource"] not in ("", "leases"):
                        what = "/".join(filter(None, (label["resource"], label["subresource"])))
                        found[f"{label['verb']} {what}"] += int(sample.value)
        return Counter({what: count for what, count in found.items() if not what.startswith("WATCH ")})

    def _values(self) -> dict[str, str]:
        """The extender's metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=5) as answer:
            return _values(answer.read().decode())

    def create(self, pods: list[dict]) -> "Landed":
        """These pods, while no scheduler runs; counts those that get a node from now on."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda each: self._cluster.api.create(paths.pods(NAMESPACE), each), pods))
        version = self._cluster.api.get(paths.pods(NAMESPACE), {"limit": "1"})["metadata"]["resourceVersion"]
        return Landed(self._cluster, version, len(pods))

    def clear(self) -> None:
        """Without pods again."""
        api = self._cluster.api
        api.delete(paths.pods(NAMESPACE), {"gracePeriodSeconds": 0}, timeout=60)
        if not wait_for(lambda: not api.get(paths.pods(NAMESPACE), {"limit": "1"})["items"]):
            raise RuntimeError("pods were not deleted")

    def _cpu(self) -> dict[str, float]:
        found = {}
        for name in ("etcd", "kube-apiserver", "kube-scheduler", "extender"):
            process: Process = self._cluster.process(name)
            if process.noted is not None and process.alive():
                found[name] = sum(cpu_seconds(pid) for pid in [process.pid, *children(process.pid)])
        return found


def _pod(name: str, i: int, draw: random.Random, *, gpu: bool) -> dict:
    limits = {"cpu": "1"}
    if gpu:
        limits = {"aliyun.com/gpu-mem": str(draw.randint(LOW, HIGH)), "cardwise.dev/share": "1"}
    return pod(f"{name}-{i}", limits)


def pod(name: str, limits: dict[str, str], **spec: str) -> dict:
    """A pod with these limits."""
    container = {"name": "main", "image": "example.com/app:1", "resources": {"limits": limits}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def _values(metrics: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")


def _mean_seconds(values: dict[str, str]) -> dict[str, str]:
    """Of the extender's verbs."""
    found = {}
    for verb in ("filter", "bind"):
        key = f'cardwise_extender_request_seconds_%s{{verb="{verb}"}}'
        calls = float(values.get(key % "count", 0))
        if calls:
            found[verb] = f"{float(values[key % 'sum']) / calls * 1000:.1f} ms of {calls:.0f}"
    return found


def _ahead(values: dict[str, str]) -> dict[str, int]:
    """What became of pods that were decided about ahead."""
    key = 'cardwise_extender_ahead_total{outcome="'
    return {name.removeprefix(key)[:-2]: int(float(value)) for name, value in values.items() if name.startswith(key)}


class _Event(msgspec.Struct):
    type: str
    object: wire.ObjectHead


_decode_event = msgspec.json.Decoder(_Event).decode


class Landed:
    """Counts pods as they get a node."""

    def __init__(self, cluster: Cluster, version: str, pods: int) -> None:
        self._cluster = cluster
        self._pods = pods
        self._done = threading.Event()
        self._at = 0.0
        self._seen = 0
        self._thread = threading.Thread(target=self._run, args=(version,), daemon=True)
        self._thread.start()

    def wait(self, began: float, limit: float) -> float:
        """Seconds from `began` until all have one."""
        if not self._done.wait(limit):
            raise RuntimeError(f"only {self._seen} of {self._pods} pods were scheduled in {limit:.0f} s")
        return self._at - began

    def _run(self, version: str) -> None:
        query = {"fieldSelector": "spec.nodeName!="}
        while True:  # the API server ends a watch whose reader is slow
            for line in self._cluster.api.watch(paths.pods(NAMESPACE), query, version, 600):
                event = _decode_event(line)
                version = event.object.metadata.resource_version
                self._seen += event.type == "ADDED"
                if self._seen == self._pods:
                    self._at = time.monotonic()
                    self._done.set()
                    return


def cpu_seconds(pid: int) -> float:
    """Of the process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(kind: str, results: list[Result]) -> Row:
    """Of all runs of a kind."""
    rates = [each.pods_per_second for each in results]
    values = {"pods/s, median": f"{median(rates):.0f}", "runs": " ".join(f"{rate:.0f}" for rate in rates)}
    for who in ("etcd", "kube-apiserver", "kube-scheduler", "extender"):
        used = [each.cpu[who] for each in results if who in each.cpu]
        values[f"{who}, CPU/pod"] = f"{median(used):.2f} ms" if used else "-"
    values["API requests"] = f"{median([sum(each.requests.values()) for each in results]):.0f}"
    return Row(kind, values)
