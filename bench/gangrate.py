"""Gangs on a real control plane: what their members cost at creation, gangs a second, and a big gang's last step.

Simulated nodes and all parts, webhook included. While pods are created the scheduler is stopped (SIGSTOP), as in
`throughput`; then it is let go, and pods are counted by a watch. Single pods of the same shares stand beside the gangs.
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

from bench.throughput import Landed, cpu_seconds
from bench.timing import Row
from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import P100, pod
from tests.cluster import Cluster, ClusterSpec
from tests.cluster.processes import children, wait_for

NAMESPACE = "default"
CLIENTS = 8
_PARTS = ("etcd", "kube-apiserver", "webhook", "extender", "kube-scheduler")
_LIMIT = 300  # seconds


def run(nodes: int, gangs: int, size: int, big: int, runs: int) -> list[Row]:
    """`gangs` of `size` members on nodes of 8 cards, and `runs` times one gang of `big`."""
    with _cluster(nodes) as cluster:
        bench = _Bench(cluster)
        pods = gangs * size
        singles = [_share(f"single-{i}") for i in range(pods)]
        members = [_member(f"g{i // size}-{i % size}", f"g{i // size}", size) for i in range(pods)]
        rows = [
            *bench.crowd(f"{pods} single pods", singles, gangs=0),
            *bench.crowd(f"{gangs} gangs of {size}", members, gangs=gangs),
        ]
        steps = [bench.last_step(f"big{number}", big) for number in range(runs)]
        return [
            *rows,
            _seconds(f"gang of {big}: {big - 1} members created, scheduler running", [created for created, _ in steps]),
            _seconds(f"gang of {big}: last member created to last bind", [last for _, last in steps]),
        ]


@contextmanager
def _cluster(nodes: int) -> Iterator[Cluster]:
    state = Path(tempfile.gettempdir()) / f"cwg-{os.getuid()}"  # one folder: a run cleans up what a killed one has left
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

    def crowd(self, what: str, pods: list[dict], *, gangs: int) -> list[Row]:
        """All are created while the scheduler is stopped, and then bound."""
        self._scheduler.pause()
        before, began = self._cpu(), time.monotonic()
        self._create(pods)
        seconds = time.monotonic() - began
        created = _row(f"{what}: created by {CLIENTS} clients", seconds, len(pods), 0, self._since(before, len(pods)))
        if not wait_for(lambda: not self._gated(), _LIMIT):
            raise RuntimeError("gates were not taken away")
        freed = time.monotonic() - began - seconds
        print(f"{what}: gates gone {freed:.1f} s after the last creation", file=sys.stderr)
        landed = Landed(self._cluster, self._version(), len(pods))
        before, began = self._cpu(), time.monotonic()
        self._scheduler.resume()
        seconds = landed.wait(began, _LIMIT)
        bound = _row(f"{what}: bound", seconds, len(pods), gangs, self._since(before, len(pods)))
        self._clear()
        return [created, bound]

    def last_step(self, gang: str, size: int) -> tuple[float, float]:
        """All but one member are there, then the last one comes. Seconds for the one and the other."""
        *first, last = [_member(f"{gang}-{i}", gang, size) for i in range(size)]
        began = time.monotonic()
        self._create(first)
        created = time.monotonic() - began
        landed = Landed(self._cluster, self._version(), size)
        began = time.monotonic()
        self._create([last])
        seconds = landed.wait(began, _LIMIT)
        self._clear()
        return created, seconds

    def _create(self, pods: list[dict]) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda each: self._cluster.api.create(paths.pods(NAMESPACE), each, timeout=60), pods))

    def _gated(self) -> bool:
        found = list(self._cluster.api.objects(paths.pods(NAMESPACE)))
        return any(each["spec"].get("schedulingGates") for each in found)

    def _version(self) -> str:
        return str(self._cluster.api.get(paths.pods(NAMESPACE), {"limit": "1"})["metadata"]["resourceVersion"])

    def _clear(self) -> None:
        api = self._cluster.api
        api.delete(paths.pods(NAMESPACE), {"gracePeriodSeconds": 0}, timeout=60)
        if not wait_for(lambda: not api.get(paths.pods(NAMESPACE), {"limit": "1"})["items"], 60):
            raise RuntimeError("pods were not deleted")
        if not wait_for(lambda: not api.get(paths.podgroups(NAMESPACE), {"limit": "1"})["items"], 120):
            raise RuntimeError("automatic PodGroups were not deleted")

    def _cpu(self) -> dict[str, float]:
        pids = {name: self._cluster.process(name).pid for name in _PARTS}
        return {name: sum(cpu_seconds(each) for each in (pid, *children(pid))) for name, pid in pids.items()}

    def _since(self, before: dict[str, float], pods: int) -> dict[str, float]:
        return {name: (after - before[name]) * 1000 / pods for name, after in self._cpu().items()}


def _share(name: str) -> dict:
    return pod(name, gpu_mem=P100 // 4)


def _member(name: str, gang: str, size: int) -> dict:
    said = {names.GROUP_NAME: gang, names.GROUP_NUM: str(size)}
    return pod(name, gpu_mem=P100 // 4, annotations=said)


def _row(what: str, seconds: float, pods: int, gangs: int, cpu: dict[str, float]) -> Row:
    values = {"pods/s": f"{pods / seconds:.0f}", "gangs/s": f"{gangs / seconds:.1f}" if gangs else "-"}
    return Row(what, values | {f"{name}, CPU/pod": f"{used:.2f} ms" for name, used in cpu.items()})


def _seconds(what: str, runs: list[float]) -> Row:
    return Row(what, {"median": f"{median(runs):.2f} s", "runs": " ".join(f"{each:.2f}" for each in runs)})
