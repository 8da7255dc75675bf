"""Summarizes runs with different seeds by workload and policy: means, and standard deviations where they matter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final, TypeVar

from cardwise.simulation.churn import WARMUP_LIFETIMES, ChurnResult, ChurnSample
from cardwise.simulation.fill import FillPoint, FillResult
from cardwise.simulation.refusals import SIZE_NAMES, RefusedPods
from cardwise.simulation.runs import SimulationRun
from cardwise.simulation.workload import SimulatedWorkload

DEMAND_LEVELS: Final = (
    80,
    90,
    95,
    100,
    110,
    130,
)  # requested cards, in percent of all cards: the levels at which policies differ in FGD's paper
_R = TypeVar("_R", FillResult, ChurnResult)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds, with the standard deviation of the population."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSummary:
    """The results of the `fill` runs of one workload and policy, averaged over the runs.

    workload: its index.
    at: allocated cards by requested cards, both in percent of all cards.
    points: the curve, averaged point by point.
    first_refusal: the mean of `FillResult.first_refusal`, in percent of all cards, over the runs that refused a pod;
        None if no run refused a pod.
    """

    workload: int
    policy: str
    seeds: int
    at: dict[int, Mean]
    points: tuple[FillPoint, ...]
    first_refusal: float | None
    refused: tuple[RefusedPods, ...]
    fits: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnSummary:
    """The results of the `churn` runs of one workload and policy, averaged over the runs. Units as in `ChurnResult`.

    workload: its index.
    samples: the samples, averaged over runs at about the same times.
    """

    workload: int
    policy: str
    seeds: int
    allocated: Mean
    refused_percent: Mean
    fragmented: float
    samples: tuple[ChurnSample, ...]
    refused: tuple[RefusedPods, ...]


def reached_levels(workload: SimulatedWorkload, demand: float | None) -> list[int]:
    """The levels of `DEMAND_LEVELS` that a run reaches, and the level at its end, in percent of all cards requested."""
    total_demand = sum(workload.demand(pod.shape) for pod in workload.pods)
    end = round(100 * (demand if demand is not None else total_demand / workload.capacity if workload.capacity else 0))
    return [*(level for level in DEMAND_LEVELS if level < end), end]


def summarize_fills(
    runs: Sequence[SimulationRun], outcomes: Sequence[FillResult], levels: Sequence[int]
) -> list[FillSummary]:
    """Summarize `fill` runs: one summary for each workload and policy, in the order of the runs.

    levels: the amounts of requested cards for which `FillSummary.at` has means, in percent of all cards.
    """
    return [
        FillSummary(
            workload=workload,
            policy=policy,
            seeds=len(group),
            at={level: mean(_allocated_at(fill, level) for fill in group) for level in levels},
            points=_mean_points(group),
            first_refusal=_mean_of_present([fill.first_refusal for fill in group]),
            refused=_sum_refused([fill.refused for fill in group]),
            fits=tuple(
                tuple(fmean(counts) for counts in zip(*shape_fits, strict=True))
                for shape_fits in zip(*(fill.fits for fill in group), strict=True)
            ),
        )
        for (workload, policy), group in _group_by_workload_and_policy(runs, outcomes).items()
    ]


def summarize_churns(runs: Sequence[SimulationRun], outcomes: Sequence[ChurnResult]) -> list[ChurnSummary]:
    """Summarize `churn` runs: one summary for each workload and policy, in the order of the runs."""
    return [
        ChurnSummary(
            workload=workload,
            policy=policy,
            seeds=len(group),
            allocated=mean(churn.allocated for churn in group),
            refused_percent=mean(churn.refused_percent for churn in group),
            fragmented=mean(m.fragmented for churn in group for m in churn.samples if m.time >= WARMUP_LIFETIMES).mean,
            samples=_mean_samples(group),
            refused=_sum_refused([churn.refused for churn in group]),
        )
        for (workload, policy), group in _group_by_workload_and_policy(runs, outcomes).items()
    ]


def mean(numbers: Iterable[float]) -> Mean:
    """Mean and standard deviation of the numbers; both 0 if there are none."""
    population = list(numbers)
    return Mean(fmean(population), pstdev(population)) if population else Mean(0.0, 0.0)


def _group_by_workload_and_policy(
    runs: Sequence[SimulationRun], outcomes: Sequence[_R]
) -> dict[tuple[int, str], list[_R]]:
    groups: dict[tuple[int, str], list[_R]] = {}
    for run, outcome in zip(runs, outcomes, strict=True):
        groups.setdefault((run.workload, run.policy), []).append(outcome)
    return groups


def _allocated_at(fill: FillResult, level: int) -> float:
    point = fill.point_at(level)
    return point.allocated if point is not None else 0.0


def _mean_points(fills: Sequence[FillResult]) -> tuple[FillPoint, ...]:
    last = max((fill.points[-1].arrived for fill in fills if fill.points), default=-1)
    means = []
    for arrived in range(last + 1):
        points = [point for fill in fills if (point := fill.point_at(arrived)) is not None]
        if points:
            means.append(FillPoint(arrived, fmean(p.allocated for p in points), fmean(p.fragmented for p in points)))
    return tuple(means)


def _mean_samples(churns: Sequence[ChurnResult]) -> tuple[ChurnSample, ...]:
    """For each n, the n-th samples of all runs, averaged: the n-th samples have almost the same times."""
    return tuple(
        ChurnSample(
            fmean(s.time for s in samples), fmean(s.allocated for s in samples), fmean(s.fragmented for s in samples)
        )
        for samples in zip(*(churn.samples for churn in churns), strict=False)
    )


def _mean_of_present(numbers: Sequence[float | None]) -> float | None:
    """The mean without the Nones; None if there are only Nones."""
    numbers_present = [number for number in numbers if number is not None]
    return fmean(numbers_present) if numbers_present else None


def _sum_refused(tables: Sequence[tuple[RefusedPods, ...]]) -> tuple[RefusedPods, ...]:
    """The sums over the runs, by size."""
    rows = [row for table in tables for row in table]
    return tuple(
        RefusedPods(
            size=size,
            arrived=sum(row.arrived for row in rows if row.size == size),
            refused=sum(row.refused for row in rows if row.size == size),
            demand=sum(row.demand for row in rows if row.size == size),
            refused_demand=sum(row.refused_demand for row in rows if row.size == size),
        )
        for size in SIZE_NAMES
        if any(row.size == size for row in rows)
    )
