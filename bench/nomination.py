"""Measures nomination: runs with nomination, without nomination, and without an extender take turns.

The extender nominates pods before kube-scheduler calls it for them. As in `throughput`, kube-scheduler is stopped
(SIGSTOP) while the pods are created. The extender is restarted for each run. No scheduler calls the extender before
kube-scheduler continues, so no pod is nominated before that moment.
"""

import sys
from dataclasses import dataclass
from statistics import median

from bench.throughput import Bench, RunResult, control_plane, row
from bench.timing import Row

_NEVER = 1_000_000  # more nodes than any cluster has
_DEFAULT_SAMPLING, _ALL_NODES = "stock, default sampling", "stock, 100 %"


@dataclass(frozen=True)
class _Setup:
    """A configuration that is measured.

    sampling: kube-scheduler's percentageOfNodesToScore, 0 for its default.
    policy: the extender's policy; None: no extender runs.
    above_nodes: the number of nodes above which the extender nominates.
    """

    name: str
    sampling: int
    policy: str | None = None
    above_nodes: int = _NEVER


def _setups(policies: tuple[str, ...]) -> list[_Setup]:
    setups = [_Setup(_DEFAULT_SAMPLING, 0), _Setup(_ALL_NODES, 100)]
    for policy in policies:
        setups.append(_Setup(f"{policy}, not ahead", 100, policy))
        setups.append(_Setup(f"{policy}, nominating ahead", 100, policy, above_nodes=0))
    return setups


def run(nodes: int, cards: int, pods: int, runs: int, policies: tuple[str, ...]) -> list[Row]:
    """Measure each configuration `runs` times, on `nodes` nodes with `cards` GPUs each."""
    setups = _setups(policies)
    with control_plane(nodes, cards) as cluster:
        bench = Bench(cluster, pods)
        runs_by_setup: dict[str, list[RunResult]] = {setup.name: [] for setup in setups}
        for number in range(runs):
            for i, setup in enumerate(setups):
                with_extender = setup.policy is not None
                stanzas = (
                    bench.start_extender(
                        (f"--policy={setup.policy}",),
                        plain_http=False,
                        program=("tests.cluster.nominatingextender", str(setup.above_nodes)),
                    )
                    if with_extender
                    else []
                )
                measured = bench.measure(f"k{i}r{number}", stanzas, gpu=with_extender, sampling=setup.sampling)
                print(f"{setup.name} {number}: {measured.pods_per_second:.0f} pods/s {measured.cpu}", file=sys.stderr)
                runs_by_setup[setup.name].append(measured)
    rows = [row(name, measured_runs) for name, measured_runs in runs_by_setup.items()]
    rates = {name: median([run.pods_per_second for run in measured]) for name, measured in runs_by_setup.items()}
    ratios = {
        f"{policy} to {other}": f"{rates[f'{policy}, nominating ahead'] / rates[other]:.2f}"
        for policy in policies
        for other in (_DEFAULT_SAMPLING, _ALL_NODES, f"{policy}, not ahead")
    }
    return [*rows, Row(f"nominating ahead, ratio of medians, {nodes} nodes x {cards} cards, {pods} pods", ratios)]
