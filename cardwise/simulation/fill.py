"""Filling an empty cluster: the protocol of FGD's artefact (Weng et al., USENIX ATC 2023), so that numbers compare.

The pods are shuffled by the seed and come one after another; pods drawn from the same list follow, or some are left
out, until so much has been asked for as `tune` times the cards. Nothing leaves, and a refused pod does not come again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from cardwise.simulation.cluster import Cluster
from cardwise.simulation.defaults import TUNE
from cardwise.simulation.fragments import SimulatedFragments
from cardwise.simulation.tally import RefusedPods, Tally
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedPod, SimulatedWorkload, in_order, shuffled

STEP: Final = 100  # pods between two reports of progress
WARM_EVERY: Final = 50  # pods, where decisions are bounded: what comes in half a second that many come in

Step = Callable[[int], None]  # is told how many more pods have come


@dataclass(frozen=True, slots=True)
class Point:
    """When so many percent of the cards had been asked for: how many percent were allocated, in the mean over the pods
    that came around then, and how much of the idle rest the pods that come could not use.
    """

    arrived: int
    allocated: float
    fragmented: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One run. `first_refusal`: how many percent had been asked for then; None where nobody was refused.

    `fits`: of each shape that was asked about, how many more had room at the end, and with the added nodes.
    `seconds`: what the decisions took, which differs from run to run; the rest does not.
    """

    points: tuple[Point, ...]
    refused: tuple[RefusedPods, ...]
    first_refusal: float | None
    fits: tuple[tuple[int, ...], ...] = ()
    seconds: tuple[float, ...] = field(default=(), compare=False)

    def at(self, arrived: int) -> Point | None:
        """The last point up to so many percent: where pods are few and big, some percents have none."""
        return next((point for point in reversed(self.points) if point.arrived <= arrived), None)


def expected(workload: SimulatedWorkload, tune: float | None = TUNE) -> int:
    """About how many pods come in one run."""
    demand = sum(workload.demand(pod.shape) for pod in workload.pods)
    times = 1.0 if tune is None or not demand else tune * workload.capacity / demand
    return round(times * len(workload.pods))


def arrivals(workload: SimulatedWorkload, seed: int, tune: float | None = TUNE) -> list[SimulatedPod]:
    """The pods in the order in which they come; with None just those that there are."""
    chance = Random(seed)
    pods = in_order(workload.pods)
    chance.shuffle(pods)
    coming = list(pods)
    if tune is None:
        return coming
    goal, asked = tune * workload.capacity, sum(workload.demand(pod.shape) for pod in coming)
    while asked > goal:
        asked -= workload.demand(coming.pop(chance.randrange(len(coming))).shape)
    some = any(workload.demand(pod.shape) for pod in pods)
    while some and asked < goal:
        pod = chance.choice(pods)
        asked += workload.demand(pod.shape)
        if asked > goal:
            break
        coming.append(pod)
    return coming


def fill(
    workload: SimulatedWorkload,
    policy: str,
    seed: int,
    *,
    tune: float | None = TUNE,
    learning: bool = True,
    fragments: bool = True,
    more: Sequence[PodShape] = (),
    added: Sequence[SimulatedNode] = (),
    at_once: int | None = None,
    step: Step | None = None,
) -> Filled:
    """One run of the protocol.

    `learning`: the policies learn the pods from those that have come, else they know them beforehand, as FGD does in
    the artefact. `fragments`: measure them, else they are 0. `more`: shapes of which is asked how many still fit at the
    end, and then with the nodes that are `added`. `at_once`: so many nodes a decision scores at most, see `Cluster`.
    """
    coming = arrivals(workload, seed, tune)
    cluster = Cluster(shuffled(workload, seed), policy, at_once=at_once)
    if not learning:
        cluster.know(pod.shape for pod in in_order(workload.pods))
    seen = SimulatedFragments(workload, cluster) if fragments else None
    sums: dict[int, tuple[int, int]] = {}  # by percent: how many pods, and the sum of what was allocated after each
    fragmented: dict[int, float] = {}
    tally = Tally()
    asked, first = 0.0, None
    seconds: list[float] = []
    for i, pod in enumerate(coming):
        if learning:
            cluster.saw(pod.shape)
        if at_once is not None and not i % WARM_EVERY:
            cluster.warm()
        before = time.perf_counter()
        node = cluster.place(f"{i}", pod)
        seconds.append(time.perf_counter() - before)
        asked += workload.demand(pod.shape)
        percent = 100 * asked / workload.capacity
        tally.add(workload.cards_of(pod.shape), refused=node is None)
        if node is None:
            first = percent if first is None else first
        elif seen is not None:
            seen.touch(node)
        many, used = sums.get(round(percent), (0, 0))
        sums[round(percent)] = many + 1, used + cluster.used
        if seen is not None and int(percent) not in fragmented:
            fragmented[int(percent)] = seen.percent()
        if step is not None and not (i + 1) % STEP:
            step(STEP)
    if step is not None:
        step(len(coming) % STEP)
    points = []
    frag = 0.0
    for at, (many, used) in sorted(sums.items()):
        frag = fragmented.get(at, frag)
        points.append(Point(at, 100 * used / many / workload.capacity, frag))
    return Filled(
        points=tuple(points),
        refused=tally.rows(),
        first_refusal=first,
        fits=cluster.fits(more, added),
        seconds=tuple(seconds),
    )
