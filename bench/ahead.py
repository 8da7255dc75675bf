"""Nominating ahead on the real kube-scheduler, by turns with the same without and with the stock scheduler alone.

As in `throughput`: the scheduler is stopped (SIGSTOP) while the pods are created and then let go. The extender starts
anew for each run and has not been asked yet by any scheduler, so nothing is nominated before that moment.
"""

import sys
from dataclasses import dataclass
from statistics import median

from bench.throughput import Bench, Result, cluster_of, row
from bench.timing import Row

_SAMPLED, _ALL = "stock, default sampling", "stock, 100 %"


@dataclass(frozen=True)
class _Kind:
    """One kind of run. `sampling`: percentageOfNodesToScore, 0 for kube-scheduler's default."""

    name: str
    sampling: int
    options: tuple[str, ...] | None  # of the extender; None: there is none


def _kinds(policies: tuple[str, ...]) -> list[_Kind]:
    kinds = [_Kind(_SAMPLED, 0, None), _Kind(_ALL, 100, None)]
    for policy in policies:
        for when in ("never", "always"):
            how = "not ahead" if when == "never" else "nominating ahead"
            options = (f"--policy={policy}", f"--nominate-ahead={when}")
            kinds.append(_Kind(f"{policy}, {how}", 100, options))
    return kinds


def run(nodes: int, cards: int, pods: int, runs: int, policies: tuple[str, ...]) -> list[Row]:
    """`cards`: of each node."""
    kinds = _kinds(policies)
    with cluster_of(nodes, cards) as cluster:
        bench = Bench(cluster, pods)
        results: dict[str, list[Result]] = {kind.name: [] for kind in kinds}
        for number in range(runs):
            for at, kind in enumerate(kinds):
                ours = kind.options is not None
                stanzas = bench.start_extender(kind.options, plain_http=False) if kind.options is not None else []
                result = bench.measure(f"k{at}r{number}", stanzas, gpu=ours, sampling=kind.sampling)
                print(f"{kind.name} {number}: {result.pods_per_second:.0f} pods/s {result.cpu}", file=sys.stderr)
                results[kind.name].append(result)
    rows = [row(name, found) for name, found in results.items()]
    best = {name: median([one.pods_per_second for one in found]) for name, found in results.items()}
    ratios = {
        f"{policy} to {other}": f"{best[f'{policy}, nominating ahead'] / best[other]:.2f}"
        for policy in policies
        for other in (_SAMPLED, _ALL, f"{policy}, not ahead")
    }
    return [*rows, Row(f"nominating ahead, ratio of medians, {nodes} nodes x {cards} cards, {pods} pods", ratios)]
