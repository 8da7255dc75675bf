"""Measures how much an extender in kube-scheduler's configuration delays pods without a GPU request.

Since 1.35, kube-scheduler can reuse its result for a pod for the next pods if they are equal (OpportunisticBatching).
It does so only if its configuration has no extender, and no default constraint that spreads pods over nodes.
Kubernetes' own default has such a constraint, so each setup is measured with this default and without default
constraints. Equal pods of 1 CPU are released at once, as in `throughput`.

Two schedulers on the same nodes do not see each other's pending assignments. `_measure_races` counts the conflicts:
half of the pods request a GPU share and use the second scheduler; the other half use the first scheduler.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from bench import throughput
from bench.throughput import Bench, RunResult
from bench.timing import Row
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster, ports, simnodes

_SETUPS = {
    "none": "no extender",
    "manual": "the extender in the same process (`manual`, `kubeadm`)",
    "own": "a second kube-scheduler beside it has the extender (`own`)",
}
_SECOND_SCHEDULER = "cardwise-scheduler"
_RACE_NODES, _PODS_PER_NODE = 100, 20  # number of nodes, and number of pods for which each node has CPU
_SPREADS = {True: "Kubernetes' default of spreading", False: "no default of spreading"}


def run(nodes: int, pods: int, runs: int) -> list[Row]:
    """Measure each setup `runs` times with `pods` pods, and the races between two schedulers."""
    with throughput.control_plane(nodes) as cluster:
        bench = Bench(cluster, pods)
        runs_by_setup: dict[tuple[bool, str], list[RunResult]] = {
            (spread, setup): [] for spread in _SPREADS for setup in _SETUPS
        }
        for number in range(runs):
            for (spread, setup), measured_runs in runs_by_setup.items():
                with _extender_setup(cluster, bench, setup) as stanzas:
                    name = f"{setup}{'s' if spread else ''}{number}"
                    measured = bench.measure(name, stanzas, gpu=False, profiles=[] if spread else [_UNSPREAD])
                print(f"{name}: {measured.pods_per_second:.0f} pods/s {measured.cpu}", file=sys.stderr)
                measured_runs.append(measured)
    with throughput.control_plane(_RACE_NODES) as cluster:
        races = [_measure_races(cluster, percent) for percent in (50, 95, 100) for _ in range(runs)]
    rows = [
        _row(f"{_SPREADS[spread]}; {_SETUPS[setup]}", measured) for (spread, setup), measured in runs_by_setup.items()
    ]
    return rows + races


def _row(label: str, runs: list[RunResult]) -> Row:
    row = throughput.row(label, runs)
    return Row(label, row.cells | {"batched": " ".join(str(run.batched) for run in runs)})


def _measure_races(cluster: Cluster, percent: int) -> Row:
    """Release pods at once that request `percent` of all nodes' CPU in total.

    A pod loses a race if its node has no CPU left for it, because the other scheduler assigned that CPU too.
    """
    pods = _RACE_NODES * _PODS_PER_NODE * percent // 100
    bench = Bench(cluster, pods)

    def manifest(i: int) -> Json:
        limits = {"cpu": f"{simnodes.CPUS * 1000 // _PODS_PER_NODE}m"}
        if i % 2:
            return throughput.pod(f"plain-{i}", limits)
        limits |= {"aliyun.com/gpu-mem": str(throughput.MIN_MIB), "cardwise.dev/share": "1"}
        return throughput.pod(f"share-{i}", limits, schedulerName=_SECOND_SCHEDULER)

    schedulers = [cluster.process("kube-scheduler"), cluster.process("second-kube-scheduler")]
    schedulers[0].stop()
    cluster.control_plane.start_scheduler([])
    with _extender_setup(cluster, bench, "own"):
        time.sleep(2)
        for scheduler in schedulers:
            scheduler.pause()
        bound_pods = bench.create_pods([manifest(i) for i in range(pods)])
        for scheduler in schedulers:
            scheduler.resume()
        seconds = bound_pods.wait(time.monotonic(), throughput.TIMEOUT)
        listed = cluster.api.get(paths.pods(throughput.NAMESPACE))["items"]
        bench.delete_pods()
    pods_by_node = Counter(pod["spec"]["nodeName"] for pod in listed)
    lost_races = sum(max(0, count - _PODS_PER_NODE) for count in pods_by_node.values())
    cells = {"pods": str(pods), "pods/s": f"{pods / seconds:.0f}", "lost races": str(lost_races)}
    return Row(f"two schedulers, pods for {percent} % of all CPU", cells)


_UNSPREAD = {
    "schedulerName": "default-scheduler",
    "pluginConfig": [{"name": "PodTopologySpread", "args": {"defaultingType": "List", "defaultConstraints": []}}],
}


@contextmanager
def _extender_setup(cluster: Cluster, bench: Bench, setup: str) -> Iterator[list[Json]]:
    """Run the extender as `setup` requires. Yields the extender stanzas of the measured scheduler's configuration."""
    if setup == "none":
        yield []
        return
    stanzas = bench.start_extender((), plain_http=False)
    if setup == "manual":
        yield stanzas
        return
    (port,) = ports.free(1)
    cluster.control_plane.start_scheduler(stanzas, profiles=[{"schedulerName": _SECOND_SCHEDULER}], second=port)
    try:
        yield []
    finally:
        cluster.process("second-kube-scheduler").stop()
        cluster.process("extender").stop()
