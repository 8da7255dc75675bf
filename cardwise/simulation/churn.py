"""A cluster in which pods come and go: Poisson arrivals, exponential lifetimes, so much asked for as `load` times the
cards.

FGD's protocol only fills an empty cluster, and a policy that is good at that may scatter what leaves again. Time is
counted in mean lifetimes. A refused pod is lost.
"""

import heapq
from dataclasses import dataclass
from random import Random
from typing import Final

from cardwise.simulation.cluster import Cluster
from cardwise.simulation.defaults import LIFETIMES, LOAD
from cardwise.simulation.fill import STEP, Step
from cardwise.simulation.fragments import SimulatedFragments
from cardwise.simulation.tally import RefusedPods, Tally
from cardwise.simulation.workload import SimulatedWorkload, in_order, shuffled

WARM: Final = 2.0  # lifetimes that are not measured: the cluster begins full, and not as it is in the long run
_TICKS: Final = 20  # moments a lifetime


@dataclass(frozen=True, slots=True)
class Moment:
    """One sample: what was allocated, in percent, and how much of the idle rest arriving pods could not use."""

    time: float
    allocated: float
    fragmented: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Churned:
    """One run: `allocated` is the mean over time, `lost` how much of what was asked for was refused, in percent."""

    allocated: float
    lost: float
    moments: tuple[Moment, ...]
    refused: tuple[RefusedPods, ...]


def expected(workload: SimulatedWorkload, load: float = LOAD, lifetimes: float = LIFETIMES) -> int:
    """About how many pods come in one run."""
    return int(_together(workload, load) * (1 + WARM + lifetimes))


def churn(
    workload: SimulatedWorkload,
    policy: str,
    seed: int,
    *,
    load: float = LOAD,
    lifetimes: float = LIFETIMES,
    learning: bool = True,
    step: Step | None = None,
) -> Churned:
    """One run. At the beginning so many pods come at once as there are together in the mean."""
    chance = Random(seed)
    pods = in_order(workload.pods)
    rate = _together(workload, load)
    cluster = Cluster(shuffled(workload, seed), policy)
    if not learning:
        cluster.know(pod.shape for pod in pods)
    seen = SimulatedFragments(workload, cluster)
    tally = Tally()
    ends: list[tuple[float, int]] = []
    moments: list[Moment] = []
    now, area, came = 0.0, 0.0, 0
    at_once = round(rate)
    until = WARM + lifetimes
    while now < until and at_once + rate > 0:
        coming = now if came < at_once else now + chance.expovariate(rate)
        coming = min(coming, until)
        # Who ends before the next one comes.
        while ends and ends[0][0] <= coming:
            end, which = heapq.heappop(ends)
            area += cluster.used * _measured(now, end)
            now = end
            node = cluster.remove(f"{which}")
            if node is not None:
                seen.touch(node)
        area += cluster.used * _measured(now, coming)
        now = coming
        if now >= until:
            break
        if now > len(moments) / _TICKS:
            moments.append(Moment(now, 100 * cluster.used / workload.capacity, seen.percent()))
        # Drawn for those as well who are refused: every policy sees the same pods come, for the same time.
        pod, ends_at = chance.choice(pods), now + chance.expovariate(1.0)
        if learning:
            cluster.saw(pod.shape)
        node = cluster.place(f"{came}", pod)
        if now >= WARM:
            tally.add(workload.cards_of(pod.shape), refused=node is None)
        if node is not None:
            seen.touch(node)
            heapq.heappush(ends, (ends_at, came))
        came += 1
        if step is not None and not came % STEP:
            step(STEP)
    return Churned(
        allocated=100 * area / (lifetimes * workload.capacity) if workload.capacity else 0.0,
        lost=tally.lost(),
        moments=tuple(moments),
        refused=tally.rows(),
    )


def _together(workload: SimulatedWorkload, load: float) -> float:
    """How many pods there are at a time when so much is asked for, and so come in a lifetime."""
    demand = sum(workload.demand(pod.shape) for pod in workload.pods)
    return load * workload.capacity * len(workload.pods) / demand if demand else 0.0


def _measured(start: float, end: float) -> float:
    """How much of the time between them counts."""
    return max(0.0, end - max(start, WARM))
