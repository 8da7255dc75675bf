"""Sums up what was granted, used and idle, from the recording rules in Prometheus (helm/cardwise/files/rules).

The rules record the state of each workload. A sum over time takes it every five minutes. An example: a workload had
8,000 MiB at 24 of these times, which is two hours: 16,000 MiB-hours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cardwise.cli.cluster.prometheus import Prometheus, namespace_selector_suffix

_STEP_SECONDS: Final = 300
_HOUR_SECONDS: Final = 3600
_BYTES_PER_MIB: Final = 1024 * 1024
_RULE_PREFIX: Final = "workload:cardwise_container_gpu_memory"
_CAPACITY_RULE: Final = "cluster:cardwise_gpu_memory_bytes:sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of one group of workloads.

    names: what the group has in common, such as its namespace.
    granted, used, idle, unknown: MiB-hours. Used is within the shares; idle is granted to containers that did not
        compute for ten minutes or longer; unknown is granted to those of which that is unknown.
    gpu_hours: hours of granted GPUs. A share counts by its part of the GPU.
    """

    names: tuple[str, ...]
    granted: float
    gpu_hours: float
    used: float
    idle: float
    unknown: float


@dataclass(frozen=True, slots=True)
class RecordedTotals:
    """The totals of all groups, the largest first. capacity: MiB-hours of the cluster's GPUs; 0 if unknown."""

    groups: list[Totals] = field(default_factory=list)
    capacity: float = 0.0


def read_totals(prometheus: Prometheus, labels: Sequence[str], namespace: str, seconds: float) -> RecordedTotals:
    """Sum up a period. Raises ClickException.

    labels: by which workloads are grouped.
    namespace: only this one; "" for all.
    seconds: how far back the period begins.
    """
    now = prometheus.read_time()

    def read_hours(series: str, labels: Sequence[str]) -> Mapping[tuple[str, ...], float]:
        """The hours of the summed up series, by the values of the labels."""
        sums = f"sum by ({', '.join(labels)}) (sum_over_time({series}[{int(seconds)}s:{_STEP_SECONDS}s]))"
        return {
            tuple(sample.labels.get(label, "") for label in labels): sample.number * _STEP_SECONDS / _HOUR_SECONDS
            for sample in prometheus.query(sums, now)
        }

    selector = namespace_selector_suffix(namespace)
    granted, gpus, used, idle, unknown = (
        read_hours(f"{_RULE_PREFIX}_{name}{selector}", labels)
        for name in (
            "granted_bytes:sum",
            "granted_gpus:sum",
            "used_bytes:sum",
            "granted_bytes:idle",
            "granted_bytes:unknown",
        )
    )
    groups = [
        Totals(
            names=names,
            granted=byte_hours / _BYTES_PER_MIB,
            gpu_hours=gpus.get(names, 0.0),
            used=used.get(names, 0.0) / _BYTES_PER_MIB,
            idle=idle.get(names, 0.0) / _BYTES_PER_MIB,
            unknown=unknown.get(names, 0.0) / _BYTES_PER_MIB,
        )
        for names, byte_hours in granted.items()
    ]
    groups.sort(key=lambda totals: (-totals.granted, totals.names))
    return RecordedTotals(groups, sum(read_hours(_CAPACITY_RULE, ()).values()) / _BYTES_PER_MIB)
