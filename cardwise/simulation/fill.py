"""Fills an empty cluster by the protocol of FGD's artefact (Weng et al., USENIX ATC 2023), for comparable results.

The pods arrive one after another, in an order shuffled by the seed. Pods drawn from the same list are added, or some
are left out, until their requests sum up to `demand` times the cards. Pods never end, and each pod arrives only once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.defaults import DEMAND
from cardwise.simulation.fragments import SimulatedFragments
from cardwise.simulation.refusals import RefusalCounter, RefusedPods
from cardwise.simulation.workload import (
    PodShape,
    SimulatedNode,
    SimulatedPod,
    SimulatedWorkload,
    shuffled_nodes,
    sorted_by_name,
)

PROGRESS_STEP: Final = 100  # pods between two reports of progress
# Pods between two refreshes of scores, if `max_scored_nodes` limits decisions: half a second at 100 pods a second.
PODS_BETWEEN_REFRESHES: Final = 50

OnProgress = Callable[[int], None]  # called with the number of pods that arrived since the last call


@dataclass(frozen=True, slots=True)
class FillPoint:
    """One point of the curve of a run.

    arrived: the cards that pods have requested so far, in percent of all cards.
    allocated: the allocated cards in percent of all cards, as the mean over the pods that arrived at this percent.
    fragmented: percent of the idle cards that arriving pods could not use.
    """

    arrived: int
    allocated: float
    fragmented: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """One run.

    first_refusal: the cards requested before the first refusal, in percent of all cards; None if no pod was refused.
    fits: for each of the extra shapes, how many more pods fitted at the end, then with the added nodes.
    seconds: the duration of each decision, which differs from run to run; the other fields do not differ.
    """

    points: tuple[FillPoint, ...]
    refused: tuple[RefusedPods, ...]
    first_refusal: float | None
    fits: tuple[tuple[int, ...], ...] = ()
    seconds: tuple[float, ...] = field(default=(), compare=False)

    def point_at(self, arrived: int) -> FillPoint | None:
        """The last point up to `arrived` percent; None without such a point. A big pod may skip several percent."""
        return next((point for point in reversed(self.points) if point.arrived <= arrived), None)


def expected_arrivals(workload: SimulatedWorkload, demand: float | None = DEMAND) -> int:
    """The approximate number of pods that arrive in one run."""
    total_demand = sum(workload.demand(pod.shape) for pod in workload.pods)
    times = 1.0 if demand is None or not total_demand else demand * workload.capacity / total_demand
    return round(times * len(workload.pods))


def arrival_order(workload: SimulatedWorkload, seed: int, demand: float | None = DEMAND) -> list[SimulatedPod]:
    """The pods in order of arrival.

    demand: requested cards as a multiple of all cards, reached by drawing further pods or leaving pods out; None: each
      pod of the workload arrives once.
    """
    random = Random(seed)
    pods = sorted_by_name(workload.pods)
    random.shuffle(pods)
    arriving = list(pods)
    if demand is None:
        return arriving
    goal, requested = demand * workload.capacity, sum(workload.demand(pod.shape) for pod in arriving)
    while requested > goal:
        requested -= workload.demand(arriving.pop(random.randrange(len(arriving))).shape)
    has_demand = any(workload.demand(pod.shape) for pod in pods)
    while has_demand and requested < goal:
        pod = random.choice(pods)
        requested += workload.demand(pod.shape)
        if requested > goal:
            break
        arriving.append(pod)
    return arriving


def simulate_fill(
    workload: SimulatedWorkload,
    policy: str,
    seed: int,
    *,
    demand: float | None = DEMAND,
    learning: bool = True,
    fragments: bool = True,
    extra_shapes: Sequence[PodShape] = (),
    added_nodes: Sequence[SimulatedNode] = (),
    max_scored_nodes: int | None = None,
    on_progress: OnProgress | None = None,
) -> FillResult:
    """Simulate one run of the protocol.

    demand: requested cards as a multiple of all cards; None: each pod of the workload arrives once.
    learning: whether the policies learn the workload from arriving pods; otherwise they know it from the start, as FGD
      does in its artefact.
    fragments: whether to measure fragmentation; otherwise it is reported as 0.
    extra_shapes: shapes of pods; at the end, the number of further pods of each shape that fit is counted.
    added_nodes: nodes to add after this count, for a second count.
    max_scored_nodes: the maximum number of nodes that one decision scores; None for all.
    on_progress: called with the number of pods that arrived since the last call.
    """
    arriving = arrival_order(workload, seed, demand)
    cluster = SimulatedCluster(shuffled_nodes(workload, seed), policy, max_scored_nodes=max_scored_nodes)
    if not learning:
        cluster.set_workload(pod.shape for pod in sorted_by_name(workload.pods))
    measured_fragments = SimulatedFragments(workload, cluster) if fragments else None
    sums: dict[int, tuple[int, int]] = {}  # by percent: the number of pods, and the sum of the allocations after each
    fragmented: dict[int, float] = {}
    counter = RefusalCounter()
    requested, first_refusal = 0.0, None
    seconds: list[float] = []
    for i, pod in enumerate(arriving):
        if learning:
            cluster.observe_arrival(pod.shape)
        if max_scored_nodes is not None and not i % PODS_BETWEEN_REFRESHES:
            cluster.refresh_scores()
        start = time.perf_counter()
        node = cluster.place_pod(f"{i}", pod)
        seconds.append(time.perf_counter() - start)
        requested += workload.demand(pod.shape)
        percent = 100 * requested / workload.capacity
        counter.add(workload.size_in_cards(pod.shape), refused=node is None)
        if node is None:
            first_refusal = percent if first_refusal is None else first_refusal
        elif measured_fragments is not None:
            measured_fragments.mark_changed(node)
        count, total = sums.get(round(percent), (0, 0))
        sums[round(percent)] = count + 1, total + cluster.allocated
        if measured_fragments is not None and int(percent) not in fragmented:
            fragmented[int(percent)] = measured_fragments.fragmented_percent()
        if on_progress is not None and not (i + 1) % PROGRESS_STEP:
            on_progress(PROGRESS_STEP)
    if on_progress is not None:
        on_progress(len(arriving) % PROGRESS_STEP)
    points = []
    fragmented_percent = 0.0
    for arrived, (count, total) in sorted(sums.items()):
        fragmented_percent = fragmented.get(arrived, fragmented_percent)
        points.append(FillPoint(arrived, 100 * total / count / workload.capacity, fragmented_percent))
    return FillResult(
        points=tuple(points),
        refused=counter.rows(),
        first_refusal=first_refusal,
        fits=cluster.count_fitting(extra_shapes, added_nodes),
        seconds=tuple(seconds),
    )
