"""What an extender in kube-scheduler's configuration costs pods that ask for no card.

Since 1.35 kube-scheduler reuses what it has found out for one pod for the equal pods after it (OpportunisticBatching),
but not in a process with an extender. And in none where a default spreads pods over nodes, as Kubernetes' own does; so
each way is measured with that default and without any. Equal pods of 1 CPU, released at once, as in `throughput`.

Two schedulers on the same nodes do not see what the other is just giving away. `_races` counts what that costs: half
of the pods ask for a card and go to the second one, half do not.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from bench import throughput
from bench.throughput import Bench, Result
from bench.timing import Row
from cardwise.kube import paths
from tests.cluster import Cluster, ports, simnodes

_WAYS = {
    "none": "no extender",
    "manual": "the extender in the same process (`manual`, `kubeadm`)",
    "own": "a second kube-scheduler beside it has the extender (`own`)",
}
_SECOND = "cardwise-scheduler"
_RACED, _PLACES = 100, 20  # nodes, and pods for which each has CPU
_SPREADS = {True: "Kubernetes' own default of spreading", False: "no default of spreading"}


def run(nodes: int, pods: int, runs: int) -> list[Row]:
    with throughput.cluster_of(nodes) as cluster:
        bench = Bench(cluster, pods)
        found: dict[tuple[bool, str], list[Result]] = {(spread, way): [] for spread in _SPREADS for way in _WAYS}
        for number in range(runs):
            for (spread, way), results in found.items():
                with _beside(cluster, bench, way) as stanzas:
                    name = f"{way}{'s' if spread else ''}{number}"
                    result = bench.measure(name, stanzas, gpu=False, profiles=[] if spread else [_UNSPREAD])
                print(f"{name}: {result.pods_per_second:.0f} pods/s {result.cpu}", file=sys.stderr)
                results.append(result)
    with throughput.cluster_of(_RACED) as cluster:
        races = [_races(cluster, percent) for percent in (50, 95, 100) for _ in range(runs)]
    return [_row(f"{_SPREADS[spread]}; {_WAYS[way]}", each) for (spread, way), each in found.items()] + races


def _row(what: str, results: list[Result]) -> Row:
    row = throughput.row(what, results)
    return Row(what, row.values | {"batched": " ".join(str(each.batched) for each in results)})


def _races(cluster: Cluster, percent: int) -> Row:
    """Pods for so much of all nodes' CPU, released at once. A race is lost by a pod for which the kubelet has no CPU
    left, since the other scheduler gave it away as well.
    """
    pods = _RACED * _PLACES * percent // 100
    bench = Bench(cluster, pods)

    def made(i: int) -> dict:
        limits = {"cpu": f"{simnodes.CPUS * 1000 // _PLACES}m"}
        if i % 2:
            return throughput.pod(f"plain-{i}", limits)
        limits |= {"aliyun.com/gpu-mem": str(throughput.LOW), "cardwise.dev/share": "1"}
        return throughput.pod(f"share-{i}", limits, schedulerName=_SECOND)

    schedulers = [cluster.process("kube-scheduler"), cluster.process("second-kube-scheduler")]
    schedulers[0].stop()
    cluster.control_plane.start_scheduler([])
    with _beside(cluster, bench, "own"):
        time.sleep(2)
        for one in schedulers:
            one.pause()
        landed = bench.create([made(i) for i in range(pods)])
        for one in schedulers:
            one.resume()
        seconds = landed.wait(time.monotonic(), throughput.LIMIT)
        found = cluster.api.get(paths.pods(throughput.NAMESPACE))["items"]
        bench.clear()
    lost = sum(max(0, there - _PLACES) for there in Counter(pod["spec"]["nodeName"] for pod in found).values())
    values = {"pods": str(pods), "pods/s": f"{pods / seconds:.0f}", "lost races": str(lost)}
    return Row(f"two schedulers, pods for {percent} % of all CPU", values)


_UNSPREAD = {
    "schedulerName": "default-scheduler",
    "pluginConfig": [{"name": "PodTopologySpread", "args": {"defaultingType": "List", "defaultConstraints": []}}],
}


@contextmanager
def _beside(cluster: Cluster, bench: Bench, way: str) -> Iterator[list[dict]]:
    """What runs beside the scheduler that is measured; the stanzas of its own configuration."""
    if way == "none":
        yield []
        return
    stanzas = bench.start_extender((), plain_http=False)
    if way == "manual":
        yield stanzas
        return
    (port,) = ports.free(1)
    cluster.control_plane.start_scheduler(stanzas, profiles=[{"schedulerName": _SECOND}], second=port)
    try:
        yield []
    finally:
        cluster.process("second-kube-scheduler").stop()
        cluster.process("extender").stop()
