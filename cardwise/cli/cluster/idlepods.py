"""Finds pods that hold a share of a GPU and do not compute. Pure.

A pod with several containers or GPUs is idle while none of them computes, so its idle time is the shortest of theirs.
An example: of the containers of a pod, `main` last computed 3 h ago and `eval` 40 min ago; the pod is idle for 40 min.
If the use of `eval` is unknown, so is the idle time of the pod. Unknown is not idle.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from cardwise.core.api import assignment
from cardwise.core.api.assignment import CardUse
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.gpus.usagereport import ContainerUsage, UsageReport
from cardwise.kube.objects.pods import Pod

_FIRST_SAMPLE_SECONDS: Final = 60.0  # a pod whose use is known since then is known from its start


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePod:
    """A pod with a share that does not compute.

    workload: what created the pod, such as Deployment/web.
    gpus: its shares by GPU.
    idle_seconds: how long it has not computed.
    is_minimum: whether it may be idle for longer, since its use was unknown before.
    """

    namespace: str
    name: str
    workload: str
    node: str
    gpus: tuple[CardUse, ...]
    idle_seconds: float
    is_minimum: bool

    @property
    def granted_mib(self) -> int:
        """MiB of all its shares."""
        return sum(gpu.mem for gpu in self.gpus)


@dataclass(slots=True)
class IdlePods:
    """The result of `find_idle_pods`.

    idle: pods that have been idle for long enough, the longest idle first.
    undecided: pods that have not computed since their use is known, which is not long enough yet; as NAMESPACE/NAME.
    unknown: pods of which it is unknown whether they compute; as NAMESPACE/NAME.
    """

    idle: list[IdlePod] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class _IdleTime(NamedTuple):
    """seconds: since the last computing; is_minimum: as in `IdlePod`."""

    seconds: float
    is_minimum: bool


def find_idle_pods(
    reports: Iterable[UsageReport], pods: Iterable[Pod], *, min_idle_seconds: float, now: datetime
) -> IdlePods:
    """Sort pods with a share by whether they have been idle for `min_idle_seconds`. Pods that compute are left out.

    now: the API server's time.
    """
    usages: dict[tuple[str, str], list[ContainerUsage]] = defaultdict(list)
    for usage in (usage for report in reports for usage in report.containers):
        if usage.running:  # also of a process without a share, or of an unknown container: the pod computes
            usages[usage.namespace, usage.pod].append(usage)
    found_pods = IdlePods()
    for pod in pods:
        gpus = _shares_of(pod)
        if not gpus:
            continue
        age = _age_seconds(pod, now)
        idle_time = _idle_time(usages[pod.metadata.namespace, pod.metadata.name], age, min_idle_seconds)
        if idle_time is None:
            found_pods.unknown.append(pod.full_name)
        elif idle_time.seconds >= min_idle_seconds:
            found_pods.idle.append(_idle_pod(pod, gpus, idle_time))
        elif idle_time.is_minimum and age >= min_idle_seconds:
            found_pods.undecided.append(pod.full_name)
    found_pods.idle.sort(key=lambda idle: (-idle.idle_seconds, idle.namespace, idle.name))
    return found_pods


def _shares_of(pod: Pod) -> tuple[CardUse, ...]:
    """The pod's shares of GPUs by GPU; none if it holds none any more."""
    if not pod.spec.node_name or pod.finished or pod.static:
        return ()
    try:
        held = assignment.decode(pod.metadata.annotations)
    except assignment.InvalidAssignment:
        return ()  # `cardwise inspect` prints a warning
    return held.card_uses() if held is not None else ()


def _age_seconds(pod: Pod, now: datetime) -> float:
    """Seconds since the pod's start on its node; 0 before."""
    started = parse_timestamp(pod.status.start_time)
    return 0.0 if started is None else max(0.0, (now - started).total_seconds())


def _idle_time(usages: Sequence[ContainerUsage], age: float, min_idle_seconds: float) -> _IdleTime | None:
    """How long none of the containers has computed; None if unknown.

    age: seconds since the pod's start. A former pod of the same name may have been idle before.
    min_idle_seconds: if one container has computed since, the others do not matter.
    """
    known = [
        _IdleTime(
            min(age, usage.idle_seconds),
            usage.idle_is_minimum and usage.idle_seconds < age - _FIRST_SAMPLE_SECONDS,
        )
        for usage in usages
        if usage.idle_seconds is not None
    ]
    if not known:
        return None
    shortest = min(known)
    has_computed = shortest.seconds < min_idle_seconds and not shortest.is_minimum
    return shortest if len(known) == len(usages) or has_computed else None


def _idle_pod(pod: Pod, gpus: tuple[CardUse, ...], idle_time: _IdleTime) -> IdlePod:
    return IdlePod(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        workload=pod.workload,
        node=pod.spec.node_name,
        gpus=gpus,
        idle_seconds=idle_time.seconds,
        is_minimum=idle_time.is_minimum,
    )
