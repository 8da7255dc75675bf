"""What an extender in kube-scheduler's configuration costs pods that ask for no card.

Since 1.35 kube-scheduler reuses what it has found out for one pod for the equal pods after it (OpportunisticBatching),
but not in a process with an extender. And in none where a default spreads pods over nodes, as Kubernetes' own does; so
each way is measured with that default and without any. Equal pods of 1 CPU, released at once, as in `throughput`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench import throughput
from bench.throughput import Bench, Result
from bench.timing import Row
from tests.cluster import Cluster, ports

_WAYS = {
    "none": "no extender",
    "manual": "the extender in the same process (`manual`, `kubeadm`)",
    "own": "a second kube-scheduler beside it has the extender (`own`)",
}
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
    return [throughput.row(f"{_SPREADS[spread]}; {_WAYS[way]}", each) for (spread, way), each in found.items()]


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
    cluster.control_plane.start_scheduler(stanzas, profiles=[{"schedulerName": "cardwise-scheduler"}], second=port)
    try:
        yield []
    finally:
        cluster.process("second-kube-scheduler").stop()
        cluster.process("extender").stop()
