"""Measures placement policies on Alibaba's trace openb: allocation by FGD's protocol and with leaving pods, latency.

The trace is not shipped: its licence is for research and study.
"""

import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

from bench import timing
from bench.timing import Row
from cardwise.core.api.cards import Card
from cardwise.core.api.request import Load
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.simulation import runs, summary, traces
from cardwise.simulation.churn import ChurnResult, simulate_churn
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.fill import PODS_BETWEEN_REFRESHES, FillResult, simulate_fill
from cardwise.simulation.runs import SimulationRun
from cardwise.simulation.summary import FillSummary, Mean
from cardwise.simulation.workload import SimulatedNode, SimulatedWorkload
from extender.placing.scoredpolicies import MAX_SCORED_NODES

_INITIAL_SHARE = 0.85  # the share of all cards that is allocated before decisions are measured
LEVELS = (80, 90, 95, 100, 110, 130)
_PUBLISHED_FILE = "published_fgd_atc23.csv"
_SHARED_TRACE = Path(__file__).parents[2] / "shared" / "data" / "openb"


def find_traces(option: Path | None) -> Path:
    """The folder of the traces: from the option, from CARDWISE_OPENB, or the project's. Exits if it has no trace."""
    folder = option or Path(os.environ.get("CARDWISE_OPENB", _SHARED_TRACE))
    try:
        traces.pod_list_names(folder)
    except InvalidRequest as error:
        sys.exit(f"{error}; then name the folder by --traces or CARDWISE_OPENB")
    return folder


def read_published(folder: Path) -> dict[tuple[str, str], dict[int, Mean]]:
    """FGD's published allocation in percent, by trace and policy, then by level; empty if the folder has no table."""
    path = folder / _PUBLISHED_FILE
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            (row["trace"], row["policy"]): {
                level: Mean(float(row[f"mean@{level}"]), float(row[f"sd@{level}"])) for level in LEVELS
            }
            for row in csv.DictReader(file)
            if row["metric"] == "alloc_pct"
        }


def _traces_to_run(folder: Path, chosen: Sequence[str]) -> list[str]:
    """The chosen traces; by default the traces with published results, or all traces without published results."""
    available = traces.pod_list_names(folder)
    with_results = [name for name in dict.fromkeys(trace for trace, _ in read_published(folder)) if name in available]
    return list(chosen) or with_results or available


def measure_filling(
    folder: Path,
    chosen: Sequence[str],
    policies: Sequence[str],
    seeds: range,
    processes: int,
    *,
    known: bool,
    bounded: bool,
) -> list[Row]:
    """Fill the cards by each policy on each trace.

    seeds: the seeds of the runs, one run for each seed.
    known: whether the policies know the workload from the start.
    bounded: whether decisions score only as many nodes as in the extender.

    Returns a row for each policy and trace with FGD's published numbers, the means over the traces, and latencies.
    """
    workloads = [traces.read_trace(folder, name) for name in _traces_to_run(folder, chosen)]
    plan = _plan_runs(workloads, policies, seeds)
    times: dict[str, list[float]] = {}

    def print_run(run: SimulationRun, outcome: FillResult) -> None:
        times.setdefault(run.policy, []).extend(outcome.seconds)
        point, name = outcome.point_at(100), workloads[run.workload].name
        allocated = f"{point.allocated:.2f} at 100 %" if point else "nothing"
        seconds = f"{sum(outcome.seconds):.1f} s"
        print(f"{name} {run.policy} seed {run.seed}: {allocated}, {seconds}", file=sys.stderr, flush=True)

    job = partial(
        simulate_fill,
        learning=not known,
        fragments=len(workloads) == 1 and not bounded,
        max_scored_nodes=MAX_SCORED_NODES if bounded else None,
    )
    outcomes = runs.run_all(job, workloads, plan, processes=processes, on_run_done=print_run)
    summaries = summary.summarize_fills(plan, outcomes, LEVELS)
    published = read_published(folder)
    rows = [_row(workloads, fills, published) for fills in summaries]
    rows += _mean_rows(workloads, summaries, published, policies) if len(workloads) > 1 else []
    return rows + [timing.latency(f"{policy}: a decision", times[policy]) for policy in policies]


def measure_churn(
    folder: Path, trace: str, policies: Sequence[str], seeds: range, processes: int, *, lifetimes: float
) -> list[Row]:
    """Simulate arriving and leaving pods by each policy, at load 1.0, for `lifetimes` mean lifetimes of a pod."""
    workloads = [traces.read_trace(folder, trace)]
    plan = _plan_runs(workloads, policies, seeds)

    def print_run(run: SimulationRun, outcome: ChurnResult) -> None:
        percents = f"{outcome.allocated:.2f} allocated, {outcome.refused_percent:.2f} refused"
        print(f"{trace} {run.policy} seed {run.seed}, churn: {percents}", file=sys.stderr, flush=True)

    job = partial(simulate_churn, lifetimes=lifetimes)
    outcomes = runs.run_all(job, workloads, plan, processes=processes, on_run_done=print_run)
    return [
        Row(
            f"{trace}, churn, {churns.policy}",
            {
                "seeds": f"{churns.seeds}",
                "allocated": _with_sd(churns.allocated),
                "refused": _with_sd(churns.refused_percent),
                "fragmented": f"{churns.fragmented:.1f}",
            },
        )
        for churns in summary.summarize_churns(plan, outcomes)
    ]


def measure_decisions(folder: Path, trace: str, policies: Sequence[str], nodes: int, decisions: int) -> list[Row]:
    """Measure the latency of a decision in a cluster of 8-GPU nodes that is 85 % full, with the extender's engine.

    For each arriving pod a random pod is removed. Stale scores are recomputed between decisions, as the extender's
    `WorkloadController` does; the time of this is reported separately.
    """
    pods = [pod for pod in traces.read_trace(folder, trace).pods if pod.shape.request]
    rows = []
    for policy in policies:
        random = Random(42)
        start_mib = _resident_mib()
        cluster = SimulatedCluster(_eight_card_nodes(nodes), "binpack", max_scored_nodes=MAX_SCORED_NODES)
        placed = 0
        while cluster.allocated < _INITIAL_SHARE * 8 * nodes * traces.CARD_UNITS:
            cluster.place_pod(f"{placed}", random.choice(pods))
            placed += 1
        filled_mib = _resident_mib()
        cluster.policy = policy
        cluster.engine.prepare_policy(policy)
        cluster.set_workload(pod.shape for pod in pods)
        walls, cpus, refreshing = [], [], 0.0
        for i in range(decisions):
            if not i % PODS_BETWEEN_REFRESHES:
                start = time.thread_time()
                cluster.refresh_scores()
                refreshing += time.thread_time() - start
            cluster.remove_pod(f"{random.randrange(placed + i)}")
            wall, cpu = time.perf_counter(), time.thread_time()
            cluster.place_pod(f"{placed + i}", random.choice(pods))
            cpus.append(time.thread_time() - cpu)
            walls.append(time.perf_counter() - wall)
        rows += [timing.latency(f"{policy}: a decision", walls), timing.latency(f"{policy}: its cpu", cpus)]
        per_pod = f"{refreshing / decisions * 1000:.2f} ms cpu a pod"
        memory = {
            "nodes and pods": f"{filled_mib - start_mib} MiB", "scores": f"{_resident_mib() - filled_mib} MiB"
        }  # fmt: skip
        rows.append(Row(f"{policy}: memory, refreshing scores", memory | {"refreshing": per_pod}))
    return rows


def _eight_card_nodes(nodes: int) -> list[SimulatedNode]:
    return [
        SimulatedNode(
            f"node-{n:05d}",
            tuple(Card(index=i, uuid=f"{n}-{i}", mem=MiB(traces.CARD_UNITS), model="G2") for i in range(8)),
            Load(96_000, 384 << 30, 110),
        )
        for n in range(nodes)
    ]


def _resident_mib() -> int:
    """The resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


def _plan_runs(workloads: Sequence[SimulatedWorkload], policies: Sequence[str], seeds: range) -> list[SimulationRun]:
    """All runs, seed by seed, so that each policy and trace has its first results early."""
    return [SimulationRun(i, policy, seed) for seed in seeds for i in range(len(workloads)) for policy in policies]


def _row(
    workloads: Sequence[SimulatedWorkload], fills: FillSummary, published: dict[tuple[str, str], dict[int, Mean]]
) -> Row:
    name = workloads[fills.workload].name
    columns = {"seeds": f"{fills.seeds}"} | {f"{level} %": f"{fills.at[level].mean:.2f}" for level in LEVELS}
    columns |= {"s.d. at 100": f"{fills.at[100].sd:.2f}"}
    columns |= {
        "first refusal": f"{fills.first_refusal:.1f}" if fills.first_refusal is not None else "none",
        "FGD published": _format_published(published, name, "FGD", lambda mean: f"{mean.mean:.2f} ({mean.sd:.2f})"),
        "above it": _format_published(published, name, "FGD", lambda mean: f"{fills.at[100].mean - mean.mean:+.2f}"),
        "BestFit published": _format_published(published, name, "BestFit", lambda mean: f"{mean.mean:.2f}"),
    }
    return Row(f"{name}, {fills.policy}", columns)


def _mean_rows(
    workloads: Sequence[SimulatedWorkload],
    summaries: Sequence[FillSummary],
    published: dict[tuple[str, str], dict[int, Mean]],
    policies: Sequence[str],
) -> list[Row]:
    rows = []
    for policy in policies:
        group = [fills for fills in summaries if fills.policy == policy]
        differences = [
            fills.at[100].mean - published[name, "FGD"][100].mean
            for fills in group
            if ((name := workloads[fills.workload].name), "FGD") in published
        ]
        columns = {"traces": f"{len(group)}", "mean at 100 %": f"{fmean(fills.at[100].mean for fills in group):.2f}"}
        if differences:
            columns |= {"above FGD published": f"{fmean(differences):+.2f}", "least": f"{min(differences):+.2f}"}
        rows.append(Row(policy, columns))
    return rows


def _format_published(
    published: dict[tuple[str, str], dict[int, Mean]], trace: str, policy: str, format_mean: Callable[[Mean], str]
) -> str:
    means = published.get((trace, policy))
    return format_mean(means[100]) if means is not None else "-"


def _with_sd(mean: Mean) -> str:
    return f"{mean.mean:.2f} ({mean.sd:.2f})"
