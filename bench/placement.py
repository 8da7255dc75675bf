"""How much of the cards each policy fills, on Alibaba's trace openb: FGD's own protocol, and with pods that leave.

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
from cardwise.simulation.churn import Churned, churn
from cardwise.simulation.cluster import Cluster
from cardwise.simulation.fill import WARM_EVERY, Filled, fill
from cardwise.simulation.runs import Run
from cardwise.simulation.summary import FillSummary, Mean
from cardwise.simulation.workload import SimulatedNode, SimulatedWorkload
from extender.cache.scoredpolicies import AT_ONCE

_FULL = 0.85
LEVELS = (80, 90, 95, 100, 110, 130)
PUBLISHED = "published_fgd_atc23.csv"
_BESIDE = Path(__file__).parents[2] / "shared" / "data" / "openb"


def folder(given: Path | None) -> Path:
    """The trace: as given, of the environment, or where this project keeps it. Exits where it is nowhere."""
    found = given or Path(os.environ.get("CARDWISE_OPENB", _BESIDE))
    try:
        traces.names(found)
    except InvalidRequest as error:
        sys.exit(f"{error}; then name it by --traces or CARDWISE_OPENB")
    return found


def published(at: Path) -> dict[tuple[str, str], dict[int, Mean]]:
    """By trace and policy, what FGD's artefact expects; nothing where its table is not there."""
    path = at / PUBLISHED
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


def names(at: Path, chosen: Sequence[str]) -> list[str]:
    """The traces to run: those chosen, else those that results are published of, else all."""
    there = traces.names(at)
    known = [name for name in dict.fromkeys(trace for trace, _ in published(at)) if name in there]
    return list(chosen) or known or there


def filling(
    at: Path,
    chosen: Sequence[str],
    policies: Sequence[str],
    seeds: range,
    processes: int,
    *,
    known: bool,
    bounded: bool,
) -> list[Row]:
    """Each policy on each trace, and what is published of it; last the means over the traces."""
    workloads = [traces.read(at, name) for name in names(at, chosen)]
    plan = _plan(workloads, policies, seeds)
    times: dict[str, list[float]] = {}

    def told(run: Run, one: Filled) -> None:
        times.setdefault(run.policy, []).extend(one.seconds)
        point, name = one.at(100), workloads[run.workload].name
        said = f"{point.allocated:.2f} at 100 %" if point else "nothing"
        print(f"{name} {run.policy} seed {run.seed}: {said}, {sum(one.seconds):.1f} s", file=sys.stderr, flush=True)

    job = partial(
        fill, learning=not known, fragments=len(workloads) == 1 and not bounded, at_once=AT_ONCE if bounded else None
    )
    results = runs.run_all(job, workloads, plan, processes=processes, done=told)
    found = summary.of_fills(plan, results, LEVELS)
    theirs = published(at)
    rows = [_row(workloads, one, theirs) for one in found]
    rows += _means(workloads, found, theirs, policies) if len(workloads) > 1 else []
    return rows + [timing.latency(f"{policy}: a decision", times[policy]) for policy in policies]


def churning(
    at: Path, trace: str, policies: Sequence[str], seeds: range, processes: int, *, lifetimes: float
) -> list[Row]:
    """Each policy where pods come and go, load 1.0."""
    workloads = [traces.read(at, trace)]
    plan = _plan(workloads, policies, seeds)

    def told(run: Run, one: Churned) -> None:
        said = f"{one.allocated:.2f} allocated, {one.lost:.2f} refused"
        print(f"{trace} {run.policy} seed {run.seed}, churn: {said}", file=sys.stderr, flush=True)

    results = runs.run_all(partial(churn, lifetimes=lifetimes), workloads, plan, processes=processes, done=told)
    return [
        Row(
            f"{trace}, churn, {one.policy}",
            {
                "seeds": f"{one.seeds}",
                "allocated": _with_sd(one.allocated),
                "refused": _with_sd(one.lost),
                "fragmented": f"{one.fragmented:.1f}",
            },
        )
        for one in summary.of_churns(plan, results)
    ]


def deciding(at: Path, trace: str, policies: Sequence[str], nodes: int, decisions: int) -> list[Row]:
    """What a decision takes among so many nodes of eight cards, 85 percent full: the engine as the extender has it.

    For each pod that comes one goes. Scores beforehand are made between decisions, as by the extender's
    `WorkloadController`, and are not counted, but told.
    """
    pods = [pod for pod in traces.read(at, trace).pods if pod.shape.request]
    rows = []
    for policy in policies:
        chance = Random(42)
        before = _resident()
        cluster = Cluster(_eights(nodes), "binpack", at_once=AT_ONCE)
        there = 0
        while cluster.used < _FULL * 8 * nodes * traces.WHOLE:
            cluster.place(f"{there}", chance.choice(pods))
            there += 1
        bare = _resident()
        cluster.policy = policy
        cluster.engine.want(policy)
        cluster.know(pod.shape for pod in pods)
        walls, cpus, warming = [], [], 0.0
        for i in range(decisions):
            if not i % WARM_EVERY:
                start = time.thread_time()
                cluster.warm()
                warming += time.thread_time() - start
            cluster.remove(f"{chance.randrange(there + i)}")
            wall, cpu = time.perf_counter(), time.thread_time()
            cluster.place(f"{there + i}", chance.choice(pods))
            cpus.append(time.thread_time() - cpu)
            walls.append(time.perf_counter() - wall)
        rows += [timing.latency(f"{policy}: a decision", walls), timing.latency(f"{policy}: its cpu", cpus)]
        per_pod = f"{warming / decisions * 1000:.2f} ms cpu a pod"
        memory = {"nodes and pods": f"{bare - before} MiB", "scores": f"{_resident() - bare} MiB"}
        rows.append(Row(f"{policy}: memory, scores beforehand", memory | {"beforehand": per_pod}))
    return rows


def _eights(nodes: int) -> list[SimulatedNode]:
    return [
        SimulatedNode(
            f"node-{n:05d}",
            tuple(Card(index=i, uuid=f"{n}-{i}", mem=MiB(traces.WHOLE), model="G2") for i in range(8)),
            Load(96_000, 384 << 30, 110),
        )
        for n in range(nodes)
    ]


def _resident() -> int:
    """MiB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


def _plan(workloads: Sequence[SimulatedWorkload], policies: Sequence[str], seeds: range) -> list[Run]:
    """Seed by seed, so that there is something of everything soon."""
    return [Run(i, policy, seed) for seed in seeds for i in range(len(workloads)) for policy in policies]


def _row(
    workloads: Sequence[SimulatedWorkload], one: FillSummary, theirs: dict[tuple[str, str], dict[int, Mean]]
) -> Row:
    name = workloads[one.workload].name
    values = {"seeds": f"{one.seeds}"} | {f"{level} %": f"{one.at[level].mean:.2f}" for level in LEVELS}
    values |= {"s.d. at 100": f"{one.at[100].sd:.2f}"}
    values |= {
        "first refusal": f"{one.first_refusal:.1f}" if one.first_refusal is not None else "none",
        "FGD published": _at_100(theirs, name, "FGD", lambda mean: f"{mean.mean:.2f} ({mean.sd:.2f})"),
        "above it": _at_100(theirs, name, "FGD", lambda mean: f"{one.at[100].mean - mean.mean:+.2f}"),
        "BestFit published": _at_100(theirs, name, "BestFit", lambda mean: f"{mean.mean:.2f}"),
    }
    return Row(f"{name}, {one.policy}", values)


def _means(
    workloads: Sequence[SimulatedWorkload],
    found: Sequence[FillSummary],
    theirs: dict[tuple[str, str], dict[int, Mean]],
    policies: Sequence[str],
) -> list[Row]:
    rows = []
    for policy in policies:
        of = [one for one in found if one.policy == policy]
        above = [
            one.at[100].mean - theirs[name, "FGD"][100].mean
            for one in of
            if ((name := workloads[one.workload].name), "FGD") in theirs
        ]
        values = {"traces": f"{len(of)}", "mean at 100 %": f"{fmean(one.at[100].mean for one in of):.2f}"}
        if above:
            values |= {"above FGD published": f"{fmean(above):+.2f}", "least": f"{min(above):+.2f}"}
        rows.append(Row(policy, values))
    return rows


def _at_100(
    theirs: dict[tuple[str, str], dict[int, Mean]], trace: str, policy: str, written: Callable[[Mean], str]
) -> str:
    found = theirs.get((trace, policy))
    return written(found[100]) if found is not None else "-"


def _with_sd(mean: Mean) -> str:
    return f"{mean.mean:.2f} ({mean.sd:.2f})"
