"""Simulates pods that arrive and leave: Poisson arrivals and exponential lifetimes, at a given mean load of the cards.

FGD's protocol only fills an empty cluster; a policy that does well there may leave scattered free memory once pods end.
Time is counted in mean lifetimes of a pod. A refused pod does not arrive again.
"""

import heapq
from dataclasses import dataclass
from random import Random
from typing import Final

from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.defaults import LIFETIMES, LOAD
from cardwise.simulation.fill import PROGRESS_STEP, OnProgress
from cardwise.simulation.fragments import SimulatedFragments
from cardwise.simulation.refusals import RefusalCounter, RefusedPods
from cardwise.simulation.workload import SimulatedWorkload, shuffled_nodes, sorted_by_name

# The run before measurement, in mean lifetimes of a pod: the cluster starts full, and has to reach its steady state.
WARMUP_LIFETIMES: Final = 2.0
_SAMPLES_PER_LIFETIME: Final = 20


@dataclass(frozen=True, slots=True)
class ChurnSample:
    """One sample of a run.

    time: in mean lifetimes since the start.
    allocated: percent of all cards.
    fragmented: percent of the idle cards that arriving pods could not use.
    """

    time: float
    allocated: float
    fragmented: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnResult:
    """One run.

    allocated: percent of all cards, the mean over time.
    refused_percent: percent of the requested cards that were refused.
    """

    allocated: float
    refused_percent: float
    samples: tuple[ChurnSample, ...]
    refused: tuple[RefusedPods, ...]


def expected_arrivals(workload: SimulatedWorkload, load: float = LOAD, lifetimes: float = LIFETIMES) -> int:
    """The approximate number of pods that arrive in one run."""
    return int(_mean_running_pods(workload, load) * (1 + WARMUP_LIFETIMES + lifetimes))


def simulate_churn(
    workload: SimulatedWorkload,
    policy: str,
    seed: int,
    *,
    load: float = LOAD,
    lifetimes: float = LIFETIMES,
    learning: bool = True,
    on_progress: OnProgress | None = None,
) -> ChurnResult:
    """Simulate one run. At the start, the average number of running pods arrives at once.

    load: mean demand of the running pods, as a multiple of all cards.
    lifetimes: measured time, in mean lifetimes of a pod.
    learning: whether the policies learn the workload from arriving pods; if not, they know it from the start.
    on_progress: called with the number of pods that arrived since the last call.
    """
    random = Random(seed)
    pods = sorted_by_name(workload.pods)
    rate = _mean_running_pods(workload, load)
    cluster = SimulatedCluster(shuffled_nodes(workload, seed), policy)
    if not learning:
        cluster.set_workload(pod.shape for pod in pods)
    fragments = SimulatedFragments(workload, cluster)
    counter = RefusalCounter()
    ends: list[tuple[float, int]] = []
    samples: list[ChurnSample] = []
    now, allocated_time, arrived = 0.0, 0.0, 0
    initial_pods = round(rate)
    end_time = WARMUP_LIFETIMES + lifetimes
    while now < end_time and initial_pods + rate > 0:
        arrival = now if arrived < initial_pods else now + random.expovariate(rate)
        arrival = min(arrival, end_time)
        # Remove the pods that end before the next arrival.
        while ends and ends[0][0] <= arrival:
            end, number = heapq.heappop(ends)
            allocated_time += cluster.allocated * _measured_time(now, end)
            now = end
            node = cluster.remove_pod(f"{number}")
            if node is not None:
                fragments.mark_changed(node)
        allocated_time += cluster.allocated * _measured_time(now, arrival)
        now = arrival
        if now >= end_time:
            break
        if now > len(samples) / _SAMPLES_PER_LIFETIME:
            samples.append(
                ChurnSample(now, 100 * cluster.allocated / workload.capacity, fragments.fragmented_percent())
            )
        # Lifetimes are drawn for refused pods too, so that every policy gets the same pods with the same lifetimes.
        pod, ends_at = random.choice(pods), now + random.expovariate(1.0)
        if learning:
            cluster.observe_arrival(pod.shape)
        node = cluster.place_pod(f"{arrived}", pod)
        if now >= WARMUP_LIFETIMES:
            counter.add(workload.size_in_cards(pod.shape), refused=node is None)
        if node is not None:
            fragments.mark_changed(node)
            heapq.heappush(ends, (ends_at, arrived))
        arrived += 1
        if on_progress is not None and not arrived % PROGRESS_STEP:
            on_progress(PROGRESS_STEP)
    return ChurnResult(
        allocated=100 * allocated_time / (lifetimes * workload.capacity) if workload.capacity else 0.0,
        refused_percent=counter.refused_cards_percent(),
        samples=tuple(samples),
        refused=counter.rows(),
    )


def _mean_running_pods(workload: SimulatedWorkload, load: float) -> float:
    """The mean number of running pods at this load, which is also the number of arrivals in a lifetime."""
    demand = sum(workload.demand(pod.shape) for pod in workload.pods)
    return load * workload.capacity * len(workload.pods) / demand if demand else 0.0


def _measured_time(start: float, end: float) -> float:
    """The part of the time from `start` to `end` that is after the warm-up, in mean lifetimes."""
    return max(0.0, end - max(start, WARMUP_LIFETIMES))
