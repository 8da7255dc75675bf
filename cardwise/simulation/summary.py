"""Runs with different seeds to one line for each workload and policy: means, and the s.d. where it says something."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final, TypeVar

from cardwise.simulation.churn import WARM, Churned, Moment
from cardwise.simulation.fill import Filled, Point
from cardwise.simulation.runs import Run
from cardwise.simulation.tally import SIZES, RefusedPods
from cardwise.simulation.workload import SimulatedWorkload

LEVELS: Final = (80, 90, 95, 100, 110, 130)  # percent arrived, those of FGD's paper that tell policies apart
_R = TypeVar("_R", Filled, Churned)


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds; `sd` is the population's."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSummary:
    """`points` are means by percent arrived; `at` is what was allocated at some of them."""

    workload: int
    policy: str
    seeds: int
    at: dict[int, Mean]
    points: tuple[Point, ...]
    first_refusal: float | None
    refused: tuple[RefusedPods, ...]
    fits: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnSummary:
    """As `FillSummary`; `moments` are means at about the same times."""

    workload: int
    policy: str
    seeds: int
    allocated: Mean
    lost: Mean
    fragmented: float
    moments: tuple[Moment, ...]
    refused: tuple[RefusedPods, ...]


def levels(workload: SimulatedWorkload, tune: float | None) -> list[int]:
    """Those of `LEVELS` that a run reaches, and its end."""
    demand = sum(workload.demand(pod.shape) for pod in workload.pods)
    end = round(100 * (tune if tune is not None else demand / workload.capacity if workload.capacity else 0))
    return [*(level for level in LEVELS if level < end), end]


def of_fills(runs: Sequence[Run], results: Sequence[Filled], shown: Sequence[int]) -> list[FillSummary]:
    """One for each workload and policy, in the order of the runs. `shown`: of which percents there are means."""
    return [
        FillSummary(
            workload=workload,
            policy=policy,
            seeds=len(of),
            at={level: mean(_at(one, level) for one in of) for level in shown},
            points=_points(of),
            first_refusal=_mean_of_those([one.first_refusal for one in of]),
            refused=_refused([one.refused for one in of]),
            fits=tuple(
                tuple(fmean(counts) for counts in zip(*of_shape, strict=True))
                for of_shape in zip(*(one.fits for one in of), strict=True)
            ),
        )
        for (workload, policy), of in _grouped(runs, results).items()
    ]


def of_churns(runs: Sequence[Run], results: Sequence[Churned]) -> list[ChurnSummary]:
    """As `of_fills`."""
    return [
        ChurnSummary(
            workload=workload,
            policy=policy,
            seeds=len(of),
            allocated=mean(one.allocated for one in of),
            lost=mean(one.lost for one in of),
            fragmented=mean(m.fragmented for one in of for m in one.moments if m.time >= WARM).mean,
            moments=_moments(of),
            refused=_refused([one.refused for one in of]),
        )
        for (workload, policy), of in _grouped(runs, results).items()
    ]


def mean(values: Iterable[float]) -> Mean:
    found = list(values)
    return Mean(fmean(found), pstdev(found)) if found else Mean(0.0, 0.0)


def _grouped(runs: Sequence[Run], results: Sequence[_R]) -> dict[tuple[int, str], list[_R]]:
    found: dict[tuple[int, str], list[_R]] = {}
    for run, result in zip(runs, results, strict=True):
        found.setdefault((run.workload, run.policy), []).append(result)
    return found


def _at(one: Filled, level: int) -> float:
    point = one.at(level)
    return point.allocated if point is not None else 0.0


def _points(of: Sequence[Filled]) -> tuple[Point, ...]:
    last = max((one.points[-1].arrived for one in of if one.points), default=-1)
    found = []
    for arrived in range(last + 1):
        at = [point for one in of if (point := one.at(arrived)) is not None]
        if at:
            found.append(Point(arrived, fmean(p.allocated for p in at), fmean(p.fragmented for p in at)))
    return tuple(found)


def _moments(of: Sequence[Churned]) -> tuple[Moment, ...]:
    """Those of all runs that belong together, which are almost at the same times."""
    return tuple(
        Moment(fmean(m.time for m in at), fmean(m.allocated for m in at), fmean(m.fragmented for m in at))
        for at in zip(*(one.moments for one in of), strict=False)
    )


def _mean_of_those(values: Sequence[float | None]) -> float | None:
    """None where there is none: nobody was refused in any run."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _refused(of: Sequence[tuple[RefusedPods, ...]]) -> tuple[RefusedPods, ...]:
    """The sums over the runs."""
    rows = [row for one in of for row in one]
    return tuple(
        RefusedPods(
            size=size,
            came=sum(row.came for row in rows if row.size == size),
            refused=sum(row.refused for row in rows if row.size == size),
            demand=sum(row.demand for row in rows if row.size == size),
            lost=sum(row.lost for row in rows if row.size == size),
        )
        for size in SIZES
        if any(row.size == size for row in rows)
    )
