"""Measures gangs on a real control plane: creation of their members, gangs per second, and the last step of a big gang.

The nodes are simulated, and all parts of Cardwise run, with the webhook. As in `throughput`, kube-scheduler is stopped
(SIGSTOP) while pods are created, and a watch counts the bound pods. Single pods with the same shares are measured for
comparison.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import yaml

from bench.throughput import BoundPods, cpu_seconds
from bench.timing import Row
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.build import P100, pod
from tests.cluster import Cluster, ClusterSpec
from tests.cluster.processes import children, wait_for

NAMESPACE = "default"
CLIENTS = 8
_PARTS = ("etcd", "kube-apiserver", "webhook", "extender", "kube-scheduler")
_TIMEOUT = 300  # maximum seconds until all pods of a measurement are bound


def run(nodes: int, gangs: int, size: int, big: int, runs: int) -> list[Row]:
    """Measure `gangs` gangs of `size` members on nodes of 8 GPUs, and `runs` times one gang of `big` members."""
    with _cluster(nodes) as cluster:
        bench = _Bench(cluster)
        pods = gangs * size
        singles = [_share(f"single-{i}") for i in range(pods)]
        members = [_member(f"g{i // size}-{i % size}", f"g{i // size}", size) for i in range(pods)]
        rows = [
            *bench.measure_pods(f"{pods} single pods", singles, gangs=0),
            *bench.measure_pods(f"{gangs} gangs of {size}", members, gangs=gangs),
        ]
        steps = [bench.measure_last_step(f"big{number}", big) for number in range(runs)]
        return [
            *rows,
            _seconds_row(
                f"gang of {big}: {big - 1} members created, scheduler running", [creation for creation, _ in steps]
            ),
            _seconds_row(f"gang of {big}: last member created to last bind", [last for _, last in steps]),
        ]


@contextmanager
def _cluster(nodes: int) -> Iterator[Cluster]:
    state = (
        Path(tempfile.gettempdir()) / f"cwg-{os.getuid()}"
    )  # always the same folder, so that a run cleans up after a killed run
    with tempfile.TemporaryDirectory(prefix="cwg-cards-") as directory:
        cards = Path(directory) / "cards.yaml"
        cards.write_text(yaml.safe_dump({"default": [{"model": "Tesla P100", "memoryMiB": P100}] * 8}))
        spec = ClusterSpec(state_dir=state, sim_nodes=nodes, cards=cards, keeper=False)
        with Cluster.start(spec, lambda text: print(text, file=sys.stderr)) as cluster:
            yield cluster


class _Bench:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scheduler = cluster.process("kube-scheduler")

    def measure_pods(self, label: str, pods: list[Json], *, gangs: int) -> list[Row]:
        """Create all pods while kube-scheduler is stopped, then continue it. Returns rows for creation and binding."""
        self._scheduler.pause()
        start_cpu, start = self._cpu_by_process(), time.monotonic()
        self._create_pods(pods)
        seconds = time.monotonic() - start
        created = _row(
            f"{label}: created by {CLIENTS} clients",
            seconds,
            len(pods),
            0,
            self._cpu_per_pod_since(start_cpu, len(pods)),
        )
        if not wait_for(lambda: not self._has_gated_pods(), _TIMEOUT):
            raise RuntimeError("the scheduling gates were not removed")
        ungated = time.monotonic() - start - seconds
        print(f"{label}: gates removed {ungated:.1f} s after the last creation", file=sys.stderr)
        bound_pods = BoundPods(self._cluster, self._resource_version(), len(pods))
        start_cpu, start = self._cpu_by_process(), time.monotonic()
        self._scheduler.resume()
        seconds = bound_pods.wait(start, _TIMEOUT)
        bound = _row(f"{label}: bound", seconds, len(pods), gangs, self._cpu_per_pod_since(start_cpu, len(pods)))
        self._delete_pods()
        return [created, bound]

    def measure_last_step(self, gang: str, size: int) -> tuple[float, float]:
        """Create all members but one, then the last member.

        Returns the seconds for the creation of the first members, and the seconds from the creation of the last member
        to the last bind.
        """
        *first, last = [_member(f"{gang}-{i}", gang, size) for i in range(size)]
        start = time.monotonic()
        self._create_pods(first)
        created = time.monotonic() - start
        bound_pods = BoundPods(self._cluster, self._resource_version(), size)
        start = time.monotonic()
        self._create_pods([last])
        seconds = bound_pods.wait(start, _TIMEOUT)
        self._delete_pods()
        return created, seconds

    def _create_pods(self, pods: list[Json]) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda manifest: self._cluster.api.create(paths.pods(NAMESPACE), manifest, timeout=60), pods))

    def _has_gated_pods(self) -> bool:
        pods = list(self._cluster.api.list_objects(paths.pods(NAMESPACE)))
        return any(manifest["spec"].get("schedulingGates") for manifest in pods)

    def _resource_version(self) -> str:
        return str(self._cluster.api.get(paths.pods(NAMESPACE), {"limit": "1"})["metadata"]["resourceVersion"])

    def _delete_pods(self) -> None:
        api = self._cluster.api
        api.delete(paths.pods(NAMESPACE), {"gracePeriodSeconds": 0}, timeout=60)
        if not wait_for(lambda: not api.get(paths.pods(NAMESPACE), {"limit": "1"})["items"], 60):
            raise RuntimeError("pods were not deleted")
        if not wait_for(lambda: not api.get(paths.podgroups(NAMESPACE), {"limit": "1"})["items"], 120):
            raise RuntimeError("automatic PodGroups were not deleted")

    def _cpu_by_process(self) -> dict[str, float]:
        """Seconds of CPU so far of each part and its child processes."""
        pids = {name: self._cluster.process(name).pid for name in _PARTS}
        return {name: sum(map(cpu_seconds, (pid, *children(pid)))) for name, pid in pids.items()}

    def _cpu_per_pod_since(self, start_cpu: dict[str, float], pods: int) -> dict[str, float]:
        """Milliseconds of CPU per pod since `start_cpu`, by process."""
        return {name: (now - start_cpu[name]) * 1000 / pods for name, now in self._cpu_by_process().items()}


def _share(name: str) -> Json:
    return pod(name, gpu_mem=P100 // 4)


def _member(name: str, gang: str, size: int) -> Json:
    annotations = {names.GROUP_NAME: gang, names.GROUP_NUM: str(size)}
    return pod(name, gpu_mem=P100 // 4, annotations=annotations)


def _row(label: str, seconds: float, pods: int, gangs: int, cpu: dict[str, float]) -> Row:
    cells = {"pods/s": f"{pods / seconds:.0f}", "gangs/s": f"{gangs / seconds:.1f}" if gangs else "-"}
    return Row(label, cells | {f"{name}, CPU/pod": f"{milliseconds:.2f} ms" for name, milliseconds in cpu.items()})


def _seconds_row(label: str, runs: list[float]) -> Row:
    return Row(label, {"median": f"{median(runs):.2f} s", "runs": " ".join(f"{seconds:.2f}" for seconds in runs)})
