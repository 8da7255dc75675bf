"""Tables for people and rows for programs about the runs of `cardwise simulate`."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from cardwise.cli.render import tables
from cardwise.simulation.churn import ChurnResult
from cardwise.simulation.fill import FillResult
from cardwise.simulation.refusals import SIZE_NAMES, RefusedPods
from cardwise.simulation.runs import SimulationRun
from cardwise.simulation.summary import ChurnSummary, FillSummary
from cardwise.simulation.workload import SimulatedWorkload

_FRAGMENTATION_LEVEL: Final = (
    95  # requested cards in percent of all cards: here policies differ; at 100 all free memory is fragmented
)
Rows = list[list[str]]


def format_fills(workloads: Sequence[SimulatedWorkload], summaries: Sequence[FillSummary]) -> str:
    """Format the tables of runs that fill the cluster: the allocated GPUs, and the refused pods."""
    levels = list(summaries[0].at) if summaries else []
    compared_level = max((level for level in levels if level <= 100), default=0)
    fragmentation_level = min(_FRAGMENTATION_LEVEL, compared_level)
    heads = ["TRACE", "POLICY", "SEEDS", *(f"{level}%" for level in levels)]
    rows = [[*heads, "S.D.", "IDLE GPUS", "FRAGMENTED", "FIRST REFUSAL"]]
    for fill in summaries:
        workload = workloads[fill.workload]
        idle = (100 - fill.at[compared_level].mean) / 100 * workload.capacity / workload.mean_card_size
        fragmented = next((p.fragmented for p in reversed(fill.points) if p.arrived <= fragmentation_level), 0.0)
        first_refusal = f"{fill.first_refusal:.1f}%" if fill.first_refusal is not None else "none"
        rows.append(
            [
                workload.name, fill.policy, f"{fill.seeds}", *(f"{mean.mean:.2f}" for mean in fill.at.values()),
                f"{fill.at[compared_level].sd:.2f}", f"{idle:.0f}", f"{fragmented:.1f}%", first_refusal,
            ]
        )  # fmt: skip
    refusals = [(workloads[fill.workload].name, fill.policy, fill.refused) for fill in summaries]
    return (
        "Allocated GPUs in percent, by the percentage requested so far;\n"
        f"standard deviation over the seeds and idle GPUs at {compared_level}%, unusable part of the idle GPUs at "
        f"{fragmentation_level}%:\n"
        f"{tables.align_rows(rows)}\n{_refusals_table(refusals)}"
    )


def format_churns(workloads: Sequence[SimulatedWorkload], summaries: Sequence[ChurnSummary]) -> str:
    """Format the tables of runs with --churn: the allocated GPUs, and the refused pods."""
    rows = [["TRACE", "POLICY", "SEEDS", "ALLOCATED", "S.D.", "REFUSED", "S.D.", "FRAGMENTED"]]
    rows += [
        [
            workloads[churn.workload].name, churn.policy, f"{churn.seeds}", f"{churn.allocated.mean:.2f}",
            f"{churn.allocated.sd:.2f}", f"{churn.refused_percent.mean:.2f}", f"{churn.refused_percent.sd:.2f}",
            f"{churn.fragmented:.1f}%",
        ]
        for churn in summaries
    ]  # fmt: skip
    refusals = [(workloads[churn.workload].name, churn.policy, churn.refused) for churn in summaries]
    return (
        "Allocated GPUs in percent, mean over time; refused requests in percent:\n"
        f"{tables.align_rows(rows)}\n{_refusals_table(refusals)}"
    )


def _refusals_table(refusals: Iterable[tuple[str, str, Sequence[RefusedPods]]]) -> str:
    rows = []
    for trace, policy, refused in refusals:
        refused_by_size = {row.size: row for row in refused}
        rows.append([trace, policy, *(_format_refused(refused_by_size.get(size)) for size in SIZE_NAMES)])
    heads = ["TRACE", "POLICY", *(size.upper() for size in SIZE_NAMES)]
    return f"Pods refused in percent, by the number of GPUs requested:\n{tables.align_rows([heads, *rows])}"


def _format_refused(refused: RefusedPods | None) -> str:
    return "-" if refused is None else f"{refused.refused_pods_percent:.2f}"


def format_fitting_counts(rows: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Format how many more pods fit, by shape and policy: now, and with the added nodes."""
    body = [[pod, policy, *(f"{count:.1f}".removesuffix(".0") for count in counts)] for pod, policy, counts in rows]
    heads = ["POD", "POLICY", "NOW", "WITH ADDED NODES"]
    return tables.align_rows([heads[: len(body[0])] if body else heads, *body])


def fill_rows(
    workloads: Sequence[SimulatedWorkload], runs: Sequence[SimulationRun], fills: Sequence[FillResult]
) -> Rows:
    """Return a row for every measured point of every run that fills the cluster."""
    return [
        ["trace", "policy", "seed", "arrived", "allocated", "fragmented"],
        *(
            [*_run_cells(workloads, run), f"{p.arrived}", f"{p.allocated:.4f}", f"{p.fragmented:.4f}"]
            for run, fill in zip(runs, fills, strict=True)
            for p in fill.points
        ),
    ]


def churn_rows(
    workloads: Sequence[SimulatedWorkload], runs: Sequence[SimulationRun], churns: Sequence[ChurnResult]
) -> Rows:
    """Return a row for every measured moment of every run with --churn."""
    return [
        ["trace", "policy", "seed", "time", "allocated", "fragmented"],
        *(
            [*_run_cells(workloads, run), f"{m.time:.4f}", f"{m.allocated:.4f}", f"{m.fragmented:.4f}"]
            for run, churn in zip(runs, churns, strict=True)
            for m in churn.samples
        ),
    ]


def _run_cells(workloads: Sequence[SimulatedWorkload], run: SimulationRun) -> list[str]:
    return [workloads[run.workload].name, run.policy, f"{run.seed}"]


def as_csv(rows: Iterable[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def as_json(
    workloads: Sequence[SimulatedWorkload], runs: Sequence[SimulationRun], outcomes: Sequence[FillResult | ChurnResult]
) -> list[dict[str, Any]]:
    """Return the runs as JSON. Durations are left out, so the same seeds always give the same text."""
    return [
        {
            "trace": workloads[run.workload].name,
            "policy": run.policy,
            "seed": run.seed,
            **_drop_seconds(asdict(outcome)),
        }
        for run, outcome in zip(runs, outcomes, strict=True)
    ]


def _drop_seconds(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content for key, content in fields.items() if key != "seconds"}
