"""Computes shares that fit what workloads use, and what they would bring: `cardwise advise`.

A share must cover the peak, since more is refused or taken from neighbours. So the recommended share is the peak with a
margin. An example: a pod has 24,000 MiB, and its largest minute was 9,000. With a margin of 15 % that is 10,350 MiB,
rounded up 10,368. The effect is computed by the extender's engine: it places the workload's pods again with that share,
and counts the GPUs that are empty then, and the pods of the new share that still fit.

Imports numpy, so import this module only when it is needed.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cardwise.cli.cluster import engine
from cardwise.cli.cluster.frameworks import Framework, recognise_framework
from cardwise.cli.cluster.liveworkload import LiveWorkload
from cardwise.core.api import mps
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from cardwise.gpus.usagereport import ContainerUsage, UsageReport, quantile
from cardwise.kube.objects.pods import record_of
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.workload import PodShape, SimulatedPod

_NO_LOAD = Load(0, 0, 0)
_ROUND_MIB = 64  # recommended shares are multiples of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The advice for one container of a workload. Amounts are in MiB; None is unknown.

    workload: kind and name, such as Deployment/web.
    pods: number of pods whose use is known or that hold a share.
    minutes: number of minutes, over all pods and GPUs, of which the use is known.
    requested: its share of each GPU; the largest of its pods.
    recommended: the share that fits; equal to `requested` if nothing should change.
    framework: the recognised framework.
    reason: why nothing or nothing else is recommended; None without a reason.
    """

    workload: str
    container: str
    pods: int
    minutes: int
    requested: int | None
    p50: int | None
    p99: int | None
    peak: int | None
    recommended: int | None
    framework: Framework | None
    reason: str | None = None

    @property
    def is_change(self) -> bool:
        """Whether another share than the present one is recommended."""
        return self.recommended is not None and self.recommended != self.requested


@dataclass(frozen=True, slots=True)
class Effect:
    """What the recommended shares of one workload would bring.

    more_pods: how many more of its pods would fit than now.
    empty_gpus: how many more GPUs would have no pod.
    unplaced_pods: pods that would find no place while all are recreated.
    """

    more_pods: int
    empty_gpus: int
    unplaced_pods: int = 0


@dataclass(slots=True)
class _ContainerHistory:
    """What is known of a container of a workload.

    requested, former: shares of running and of ended pods, in MiB.
    """

    peaks: Counter[int] = field(default_factory=Counter)
    requested: set[int] = field(default_factory=set)
    former: set[int] = field(default_factory=set)
    pods: set[str] = field(default_factory=set)


def advise(
    reports: Iterable[UsageReport], namespace: str, pods: Sequence[Json], *, workload: str, margin: float
) -> list[Advice]:
    """The advice for each container with a share in a namespace. Pure.

    pods: the present pods of the namespace.
    workload: only this workload, such as Deployment/web; "" for all.
    margin: percent that a share has beyond the peak.
    """
    histories: dict[tuple[str, str], _ContainerHistory] = {}
    for usage in (usage for report in reports for usage in report.containers if usage.namespace == namespace):
        if usage.granted_mib is not None and workload in ("", usage.workload):
            _add_usage(histories.setdefault((usage.workload, usage.container), _ContainerHistory()), usage)
    manifests = {record_of(pod).workload: pod for pod in pods}
    return [
        _advise_container(owner, container, history, manifests.get(owner), margin)
        for (owner, container), history in sorted(histories.items())
    ]


def _add_usage(history: _ContainerHistory, usage: ContainerUsage) -> None:
    history.peaks.update(usage.peaks_mib)
    (history.requested if usage.running else history.former).add(usage.granted_mib or 0)
    history.pods.add(usage.pod)


def _advise_container(
    workload: str, container: str, history: _ContainerHistory, manifest: Json | None, margin: float
) -> Advice:
    requested = max(history.requested or history.former)
    framework = recognise_framework(manifest, container) if manifest is not None else None
    peak = max(history.peaks, default=None)
    recommended, reason = _recommend(requested, peak, framework, margin)
    if len(history.requested) > 1:
        reason = reason or "its pods have different shares"
    return Advice(
        workload=workload,
        container=container,
        pods=len(history.pods),
        minutes=history.peaks.total(),
        requested=requested,
        p50=quantile(history.peaks, 0.5),
        p99=quantile(history.peaks, 0.99),
        peak=peak,
        recommended=recommended,
        framework=framework,
        reason=reason,
    )


def _recommend(
    requested: int, peak: int | None, framework: Framework | None, margin: float
) -> tuple[int | None, str | None]:
    """The recommended share, and why it is not what the peak suggests."""
    if peak is None:
        return None, "its use is unknown"
    if not peak:
        return None, "it has not used its GPU"
    if framework is not None and framework.preallocates:
        return requested, f"{framework.name} takes its share when it starts: lower {framework.own_limit} to learn more"
    needed = -(-peak * (100 + margin) // (100 * _ROUND_MIB)) * _ROUND_MIB
    if framework is not None and framework.start_mib is not None:
        needed = max(needed, framework.start_mib)
    # Without MPS the context of a program comes on top of its share (docs/reference/frameworks.md).
    if requested <= needed and peak <= requested + mps.MAX_CONTEXT_MIB:
        return requested, None
    return int(needed), None


def compute_effect(
    live: LiveWorkload, policy: str, namespace: str, pod_names: Iterable[str], shares: Mapping[str, int]
) -> Effect | None:
    """What new shares of a workload would bring; None if no pod of it runs.

    pod_names: names of its present pods.
    shares: the new MiB by container.
    """
    full_names = {f"{namespace}/{name}" for name in pod_names}
    running = {f"{holding.namespace}/{holding.name}" for holding in live.holdings} & full_names
    shapes = {pod.name: pod.shape for pod in live.pods if pod.name in running}
    if not shapes:
        return None
    old_shape = next(iter(shapes.values()))
    new_shape = PodShape(_resize(old_shape.request, shares), old_shape.load)
    now, _ = engine.simulate_present(live, policy, live.holdings, [old_shape])
    then, _ = engine.simulate_present(_without_pods(live, shapes), policy, _other_holdings(live, running), [new_shape])
    resized = [
        SimulatedPod(f"resized-{i}", PodShape(_resize(shape.request, shares), shape.load))
        for i, shape in enumerate(shapes.values())
    ]
    unplaced = sum(then.place_pod(pod.name, pod) is None for pod in resized)
    ((now_count,),) = now.count_fitting([old_shape])
    ((then_count,),) = then.count_fitting([new_shape])
    return Effect(then_count - now_count, _count_empty(then) - _count_empty(now), unplaced)


def _other_holdings(live: LiveWorkload, running: Collection[str]) -> list[Holding]:
    return [holding for holding in live.holdings if f"{holding.namespace}/{holding.name}" not in running]


def _without_pods(live: LiveWorkload, shapes: Mapping[str, PodShape]) -> LiveWorkload:
    """The cluster with the cpu and memory of these pods free again."""
    freed: dict[str, Load] = {}
    for holding in live.holdings:
        shape = shapes.get(f"{holding.namespace}/{holding.name}")
        if shape is not None:
            freed[holding.node] = freed.get(holding.node, _NO_LOAD).add(shape.load)
    nodes = [
        dataclasses.replace(node, free_load=node.free_load.add(freed[node.name])) if node.name in freed else node
        for node in live.nodes
    ]
    return dataclasses.replace(live, nodes=nodes)


def _resize(request: PodRequest | None, shares: Mapping[str, int]) -> PodRequest | None:
    """The request with the new MiB of each GPU, by container. Whole GPUs stay."""
    if request is None:
        return None
    return dataclasses.replace(
        request,
        containers=tuple(
            dataclasses.replace(container, mem=MiB(shares[container.name] * container.cards))
            if container.name in shares and not container.whole
            else container
            for container in request.containers
        ),
    )


def _count_empty(cluster: SimulatedCluster) -> int:
    """The number of GPUs that take pods and have none."""
    return sum(node.is_empty(i) for node in cluster.ledger.nodes() for i in range(len(node.cards)))
