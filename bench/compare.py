"""Compares the extenders of two checkouts: each measurement runs with both in turn, on the same synthetic cluster.

Everything is measured from outside, over HTTP, so a checkout only needs `python -m extender`. The state lock is
measured by `lockprobe`.
"""

import http.client
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import yaml

from bench import processes, serving, timing
from bench.serving import SIZES, Caller
from bench.synthetic import CARDS, P100, bound_pod, card, encode_node_names, filter_body, node_name, pod
from bench.timing import Row
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.cluster import ports

_PODS: Final = "/api/v1/namespaces/default/pods"
_GANG_SIZE: Final = 100
_PODS_ON_FULL_NODE: Final = 110
_MIB_ON_FULL_NODE: Final = P100 // (_PODS_ON_FULL_NODE // CARDS + 1) - 5  # of each pod; 13 or 14 pods share a card
_PLAN_SECONDS: Final = 30.0  # maximum seconds until a gang that fits is planned
_EVENT_SECONDS: Final = 0.05  # seconds until the extender has handled the watch events
_RELISTS: Final = 3  # times that all watches end during the commits
_HOLDERS: Final = 6  # functions with the longest holds of the lock that get a row
_COLLECTOR: Final = "garbage-collector"  # how `lockprobe` names a run of the collector
_GOAL_SECONDS: Final = 0.002  # the goal for the longest hold


def run(base: str, *, nodes: int, pods: int, calls: int, seconds: float, commits: int, turns: int) -> list[Row]:
    """Measure this checkout and the commit `base`, in `turns` turns.

    calls: number of filter calls and of preempt calls in each turn.
    seconds: how long filter is called beside gangs that are planned without end, in each turn.
    commits: number of pods that are created and bound in each turn, while the state lock is measured.
    """
    rows: list[Row] = []
    with _checkout(base) as base_checkout:
        checkouts = {base: base_checkout, "this checkout": processes.ROOT}
        for turn, (name, code) in itertools.product(range(1, turns + 1), checkouts.items()):
            label = f"{name}, turn {turn}"
            print(f"{label}: {time.strftime('%H:%M:%S')}", file=sys.stderr)
            rows += serving.measure_memory(nodes, pods, code=code, label=label)
            with _extender(nodes, pods, code) as (extender, api, _):
                rows.append(_measure_filter(label, extender, nodes, calls))
                rows += _measure_beside_gangs(label, extender, api, nodes, seconds)
                rows.append(_measure_preempt(label, extender, api, calls))
            with _extender(nodes, pods, code) as cluster:
                rows += _measure_commits(label, cluster, nodes, commits)
    return sorted(rows, key=lambda row: row.label.partition(":")[0])


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """A checkout of this commit, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="cardwise-bench-") as folder:
        path = Path(folder) / "base"
        git = ["git", "-C", str(processes.ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


class _ApiClient:
    """Creates and deletes objects in the synthetic API server, over one connection."""

    def __init__(self, kubeconfig: Path) -> None:
        server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        self._connection = http.client.HTTPConnection(urlsplit(server).netloc)

    def create(self, path: str, manifest: Json) -> None:
        self._call("POST", path, json.dumps(manifest).encode())

    def delete_pod(self, manifest: Json) -> None:
        self._call("DELETE", f"{_PODS}/{manifest['metadata']['name']}", b"{}")

    def end_watches(self) -> None:
        """End all watches as expired, so that their clients list all objects again."""
        self._call("POST", "/expire-watches", b"{}")

    def _call(self, method: str, path: str, body: bytes) -> None:
        self._connection.request(method, path, body=body)
        response = self._connection.getresponse()
        response.read()
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise RuntimeError(f"{method} {path}: {response.status}")


class _Hold(NamedTuple):
    """A hold of the lock: seconds, seconds of CPU, and the part of them in the garbage collector."""

    wall: float
    cpu: float
    collected: float


class _Measured(NamedTuple):
    """A running extender, its API server, and the file that `lockprobe` writes."""

    extender: processes.ExtenderProcess
    api: _ApiClient
    holds: Path


@contextmanager
def _extender(nodes: int, pods: int, code: Path) -> Iterator[_Measured]:
    """Run the extender of the checkout with a synthetic cluster."""
    with tempfile.TemporaryDirectory(prefix="cardwise-bench-") as folder:
        # With a port for bind alone, because otherwise no member of a gang may wait in bind.
        options = "--bind-port-bind", f"127.0.0.1:{ports.free(1)[0]}"
        holds = Path(folder) / "holds"
        holds.touch()
        with (
            processes.synthetic_api_server(nodes, pods) as kubeconfig,
            processes.run_extender(kubeconfig, *options, code=code, lock_holds=holds) as extender,
        ):
            time.sleep(serving.STATUS_WRITES_SECONDS)
            yield _Measured(extender, _ApiClient(kubeconfig), holds)


def _call_filter(caller: Caller, nodes: bytes, uids: Iterator[str], rng: random.Random) -> float:
    """Call filter for a new pod. Returns the seconds."""
    uid = next(uids)
    return caller.post("filter", filter_body(pod(uid, uid, rng.choice(SIZES)), nodes))[0]


def _measure_filter(label: str, extender: processes.ExtenderProcess, nodes: int, calls: int) -> Row:
    caller, rng, uids = Caller(extender.port), random.Random(7), (f"idle-{i}" for i in itertools.count())
    body = encode_node_names(nodes)
    seconds = [_call_filter(caller, body, uids, rng) for _ in range(calls + 50)][50:]
    return timing.latency(f"filter alone: {label}", seconds)


def _gang(number: int) -> list[Json]:
    manifests = []
    for i in range(_GANG_SIZE):
        manifest = pod(f"gang-{number}-{i}", f"u-gang-{number}-{i}", 1024)
        manifest["metadata"]["labels"][names.GANG] = f"gang-{number}"
        annotations = {names.GROUP_NAME: f"gang-{number}", names.GROUP_NUM: str(_GANG_SIZE)}
        manifest["metadata"] |= {"annotations": annotations, "creationTimestamp": "2026-11-21T09:00:00Z"}
        manifests.append(manifest)
    return manifests


def _plan_gangs(
    extender: processes.ExtenderProcess, api: _ApiClient, nodes: bytes, is_over: Callable[[], bool], plans: list[float]
) -> None:
    """Create a gang, wait until it is planned, and delete it, without end. Adds the seconds of each plan to `plans`."""
    caller = Caller(extender.port)
    for number in itertools.count():
        members = _gang(number)
        for manifest in members:
            api.create(_PODS, manifest)
        start = time.monotonic()
        while not json.loads(caller.post("filter", filter_body(members[0], nodes))[1]).get("NodeNames"):
            if (plans and is_over()) or time.monotonic() - start > _PLAN_SECONDS:
                break
            time.sleep(0.005)
        else:
            plans.append(time.monotonic() - start)
        for manifest in members:
            api.delete_pod(manifest)
        if is_over():
            return


def _measure_beside_gangs(
    label: str, extender: processes.ExtenderProcess, api: _ApiClient, nodes: int, seconds: float
) -> list[Row]:
    body, rng, uids = encode_node_names(nodes), random.Random(8), (f"beside-{i}" for i in itertools.count())
    start = time.monotonic()
    deadline = start + seconds
    plans: list[float] = []
    thread = threading.Thread(
        target=_plan_gangs, args=(extender, api, body, lambda: time.monotonic() >= deadline, plans)
    )
    thread.start()
    caller, durations = Caller(extender.port), []
    while time.monotonic() < deadline:
        durations.append(_call_filter(caller, body, uids, rng))
        time.sleep(0.005)
    thread.join()
    if not plans:
        raise RuntimeError(
            f"{label}: no gang of {_GANG_SIZE} was planned within {_PLAN_SECONDS:g} s. Each filter call reserves a "
            f"share: are {nodes} nodes too few for them and a gang? Give more by --nodes"
        )
    plan_row = timing.latency(f"gang of {_GANG_SIZE} until it is planned: {label}", plans)
    plan_row.cells["gangs/s"] = f"{len(plans) / (time.monotonic() - start):.2f}"
    return [timing.latency(f"filter beside gangs of {_GANG_SIZE}: {label}", durations), plan_row]


def _full_node(api: _ApiClient, number: int) -> str:
    """Create a node of 8 cards with 110 pods, which use all cards. Returns its name."""
    api.create("/api/v1/nodes", {"metadata": {"name": node_name(number)}})
    for i in range(CARDS):
        api.create("/apis/cardwise.dev/v1alpha1/extendedresources", card(number, i, 1))
    rng = random.Random(number)
    for i in range(_PODS_ON_FULL_NODE):
        manifest = bound_pod(f"full-{i}", f"u-full-{i}", _MIB_ON_FULL_NODE, number, i % CARDS)
        manifest["spec"]["priority"] = rng.randrange(6)
        api.create(_PODS, manifest)
    return node_name(number)


def _measure_preempt(label: str, extender: processes.ExtenderProcess, api: _ApiClient, calls: int) -> Row:
    caller, rng, durations = Caller(extender.port), random.Random(9), []
    node = _full_node(api, 100_000)
    time.sleep(1.0)
    for i in range(calls):
        preemptor = pod(f"preemptor-{i}", f"u-preemptor-{i}", 0)
        gpus = rng.choice([{names.GPU_MEM: str(P100 // 2)}, {names.WHOLE_GPU: str(rng.choice([1, 2, 4, 8]))}])
        amounts = gpus | {names.SHARE: "1", "cpu": "1"}
        preemptor["spec"]["containers"][0]["resources"] = {"limits": amounts, "requests": amounts}
        preemptor["spec"]["priority"] = 1000
        api.create(_PODS, preemptor)
        time.sleep(_EVENT_SECONDS)
        body = json.dumps({"Pod": preemptor, "NodeNameToMetaVictims": {node: {"Pods": []}}}).encode()
        seconds, response = caller.post("preempt", body)
        if not json.loads(response).get("NodeNameToMetaVictims"):
            raise RuntimeError(f"{label}: no victims: {response[:500]!r}")
        durations.append(seconds)
        api.delete_pod(preemptor)
    return timing.latency(f"preempt on a node of {CARDS} cards and {_PODS_ON_FULL_NODE} pods: {label}", durations)


def _measure_commits(label: str, cluster: _Measured, nodes: int, commits: int) -> list[Row]:
    """Create and bind pods, and end all watches `_RELISTS` times meanwhile. Returns the longest holds of the state
    lock.
    """
    extender, api, holds = cluster
    caller, rng, body = Caller(extender.port), random.Random(10), encode_node_names(nodes)
    with holds.open() as lines:
        lines.seek(0, 2)  # the start of the extender does not count
        start = time.monotonic()
        for i in range(commits):
            if i and i % (commits // (_RELISTS + 1)) == 0:
                api.end_watches()
            manifest = pod(f"commit-{i}", f"u-commit-{i}", rng.choice(SIZES[:20]))
            api.create(_PODS, manifest)
            chosen = json.loads(caller.post("filter", filter_body(manifest, body))[1])["NodeNames"]
            call = {"PodName": f"commit-{i}", "PodNamespace": "default", "PodUID": f"u-commit-{i}", "Node": chosen[0]}
            response = caller.post("bind", json.dumps(call).encode())[1]
            if json.loads(response)["Error"]:
                raise RuntimeError(f"{label}: {response!r}")
        seconds = time.monotonic() - start
        time.sleep(1.0)
        samples_by_holder: dict[str, list[_Hold]] = {}
        for line in lines:
            wall, cpu, collected, holder = line.split()
            samples_by_holder.setdefault(holder, []).append(_Hold(float(wall), float(cpu), float(collected)))
    rows = [Row(f"commits: {label}", {"commits": str(commits), "commits/s": f"{commits / seconds:.0f}"})]
    for holder, samples in sorted(samples_by_holder.items(), key=lambda entry: max(entry[1]), reverse=True)[:_HOLDERS]:
        longest = max(samples)
        cells = {"longest": f"{longest.wall * 1000:.2f} ms", "its CPU": f"{longest.cpu * 1000:.2f} ms"}
        cells |= {"of it the collector": f"{longest.collected * 1000:.2f} ms"}
        cells |= {"most CPU": f"{max(hold.cpu for hold in samples) * 1000:.2f} ms"}
        cells |= {"above 2 ms": str(sum(hold.wall > _GOAL_SECONDS for hold in samples))}
        # The collector can run in a thread that does not hold the lock: other threads wait for it, too.
        name = "collector without the lock" if holder == _COLLECTOR else f"hold of the lock, {holder}"
        rows.append(Row(f"{name}: {label}", cells))
    return rows
