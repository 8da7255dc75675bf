"""Reads from Prometheus what containers have used of GPUs, in the form of the MPS managers' reports.

The period is divided into at most 500 steps of at least five minutes. An example: of the last 7 days a step is 21
minutes long. If a container computed in a step, and not in the ten steps after it, it has been idle for 210 minutes. If
its use was unknown in the step before the ten, it has been idle for at least 189: the first of the ten may be known in
part only. A gap that is shorter than a step is not noticed.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from cardwise.cli.cluster.prometheus import Prometheus, Sample, namespace_selector_suffix
from cardwise.cli.cluster.usagehistory import UsageHistory
from cardwise.gpus.usagereport import ContainerUsage, UsageReport

_MAX_STEPS: Final = 500
_MIN_STEP_SECONDS: Final = 300
_MINUTE_SECONDS: Final = 60
_OVERLAP_SECONDS: Final = 120  # steps overlap: between the last scrape of one and the first of the next is time as well
_BYTES_PER_MIB: Final = 1024 * 1024
_METRIC_PREFIX: Final = "cardwise_container_gpu_"
_LABELS: Final = "namespace, pod, container, workload, UUID"


class _Key(NamedTuple):
    """A container and a GPU."""

    namespace: str
    pod: str
    container: str
    workload: str
    gpu: str


class _Period(NamedTuple):
    """end: in seconds since 1970; step, seconds: in seconds."""

    end: float
    step: int
    seconds: int

    @property
    def start(self) -> float:
        """The end of the first step."""
        return self.end - (self.seconds // self.step - 1) * self.step


def read_peaks(prometheus: Prometheus, namespace: str, seconds: float) -> UsageHistory:
    """The memory that containers of a namespace have used, also of ended ones. Raises ClickException."""
    period = _read_period(prometheus, seconds)
    granted = f"{_METRIC_PREFIX}memory_granted_bytes{namespace_selector_suffix(namespace)}"
    peak = f"{_METRIC_PREFIX}memory_peak_bytes{namespace_selector_suffix(namespace)}"
    present = {_key(sample.labels) for sample in prometheus.query(_group(granted), period.end)}
    recorded = prometheus.query(_group(f"last_over_time({granted}[{period.seconds}s])"), period.end)
    series = prometheus.query_range(
        _group(f"max_over_time({peak}[{period.step}s])"), start=period.start, end=period.end, step=period.step
    )
    peaks: dict[_Key, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for container_series in series:
        for _, used_bytes in container_series.points:
            minutes = period.step // _MINUTE_SECONDS
            peaks[_key(container_series.labels)][int(used_bytes // _BYTES_PER_MIB)] += minutes
    first_times = [container_series.points[0][0] for container_series in series if container_series.points]
    observed = period.end - min(first_times, default=period.end) + period.step
    usages = [
        _usage(key, granted_mib, peaks_mib=dict(peaks[key]), running=key in present)
        for key, granted_mib in _mib_by_key(recorded).items()
    ]
    return _as_history(usages, namespace, observed)


def read_idle_times(prometheus: Prometheus, namespace: str, seconds: float) -> UsageHistory:
    """How long containers have not computed; "" for those of all namespaces. Raises ClickException."""
    period = _read_period(prometheus, seconds)
    granted = f"{_METRIC_PREFIX}memory_granted_bytes{namespace_selector_suffix(namespace)}"
    busy = f"{_METRIC_PREFIX}sm_busy_seconds_total{namespace_selector_suffix(namespace)}"
    shares = _mib_by_key(prometheus.query(_group(granted), period.end))
    known = {_key(sample.labels) for sample in prometheus.query(_group(busy), period.end)}
    series = prometheus.query_range(
        f"{_group(f'increase({busy}[{period.step + _OVERLAP_SECONDS}s])')} > bool 0",
        start=period.start,
        end=period.end,
        step=period.step,
    )
    points = {_key(container_series.labels): container_series.points for container_series in series}
    usages = []
    for key in shares.keys() | known:  # also processes without a share
        idle_time = compute_idle_time(points.get(key, ()), period.end, period.step) if key in known else None
        if idle_time is None:
            usages.append(_usage(key, shares.get(key)))
        else:
            idle_seconds, is_minimum = idle_time
            usages.append(_usage(key, shares.get(key), idle_seconds=idle_seconds, idle_is_minimum=is_minimum))
    return _as_history(usages, namespace, period.seconds)


def compute_idle_time(points: Sequence[tuple[float, float]], end: float, step: int) -> tuple[float, bool] | None:
    """For how many seconds a container has not computed, and whether it may be longer; None if unknown. Pure.

    points: the ends of the steps in which that is known, in seconds since 1970, with whether it computed (1 or 0).
    end, step: of the period.
    """
    idle_steps = 0
    for time, is_busy in reversed(points):
        if abs(end - idle_steps * step - time) > 1:
            break  # unknown in the step before
        if is_busy:
            return float(idle_steps * step), False
        idle_steps += 1
    return (float((idle_steps - 1) * step), True) if idle_steps else None


def _read_period(prometheus: Prometheus, seconds: float) -> _Period:
    minutes = math.ceil(seconds / _MAX_STEPS / _MINUTE_SECONDS)
    step = max(_MIN_STEP_SECONDS, minutes * _MINUTE_SECONDS)
    return _Period(prometheus.read_time(), step, max(step, int(seconds)))


def _group(expression: str) -> str:
    """One series for each container and GPU, also if Prometheus scrapes a manager twice."""
    return f"max by ({_LABELS}) ({expression})"


def _key(labels: Mapping[str, str]) -> _Key:
    return _Key(*(labels.get(label, "") for label in _LABELS.split(", ")))


def _mib_by_key(samples: Iterable[Sample]) -> dict[_Key, int]:
    return {_key(sample.labels): int(sample.number // _BYTES_PER_MIB) for sample in samples}


def _usage(key: _Key, granted_mib: int | None, **fields: Any) -> ContainerUsage:
    return ContainerUsage(**key._asdict(), granted_mib=granted_mib, **fields)


def _as_history(usages: list[ContainerUsage], namespace: str, observed_seconds: float) -> UsageHistory:
    history = UsageHistory(source="Prometheus has recorded")
    if usages:
        history.reports.append(UsageReport(node="", observed_seconds=observed_seconds, containers=usages))
    else:
        place = f"of namespace {namespace} " if namespace else ""
        history.notes.append(
            f"no use is known: Prometheus has no {_METRIC_PREFIX}memory_granted_bytes {place}in this time; it must "
            "scrape the MPS managers, with honor_labels"
        )
    return history
