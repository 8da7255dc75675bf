"""Metrics of what containers use of GPUs. A series exists while the container holds a share or uses the GPU; a value
that the driver does not report has no series.

The labels `namespace`, `pod`, `container` and `UUID` are those of DCGM's exporter, so that its metrics can be joined.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.core.values.quantity import MiB
from mps.usage.containeruse import ContainerKey, ContainerUse

_BYTES_PER_MIB = 1024 * 1024
_LABELS = ("namespace", "pod", "container", "workload", "UUID", "class", "tier")


class ExportedUse(NamedTuple):
    """The use of a container, for the metrics.

    recent_peak: the peak of the last one to two minutes in MiB.
    busy_seconds, bandwidth_seconds: seconds of use since it is known; None if unknown.
    """

    key: ContainerKey
    use: ContainerUse
    recent_peak: MiB | None
    busy_seconds: float | None
    bandwidth_seconds: float | None


class UseCollector(Collector):
    """Collects the use at each scrape; no samples until `read_uses` is set."""

    def __init__(self) -> None:
        self.read_uses: Callable[[], Iterable[ExportedUse]] = tuple

    def collect(self) -> Iterator[Metric]:
        granted = GaugeMetricFamily(
            "cardwise_container_gpu_memory_granted_bytes", "Share of the GPU's memory", labels=_LABELS
        )
        used = GaugeMetricFamily(
            "cardwise_container_gpu_memory_used_bytes",
            "Memory of the GPU that the container's processes use in total, as the driver reports",
            labels=_LABELS,
        )
        peak = GaugeMetricFamily(
            "cardwise_container_gpu_memory_peak_bytes",
            "Largest used memory of the last one to two minutes, sampled each second",
            labels=_LABELS,
        )
        busy = CounterMetricFamily(
            "cardwise_container_gpu_sm_busy_seconds_total",
            "Seconds in which the container's kernels ran; none where the driver does not report it",
            labels=_LABELS,
        )
        bandwidth = CounterMetricFamily(
            "cardwise_container_gpu_memory_busy_seconds_total",
            "Seconds in which the GPU's memory was read or written for the container; none where unknown",
            labels=_LABELS,
        )
        for exported in self.read_uses():
            use = exported.use
            labels = [*exported.key[:3], use.workload, exported.key.uuid, use.resource_class, use.tier]
            for family, mib in ((granted, use.granted), (used, use.memory), (peak, exported.recent_peak)):
                if mib is not None:
                    family.add_metric(labels, mib * _BYTES_PER_MIB)
            for counter, seconds in ((busy, exported.busy_seconds), (bandwidth, exported.bandwidth_seconds)):
                if seconds is not None:
                    counter.add_metric(labels, seconds)
        yield from (granted, used, peak, busy, bandwidth)


USES = UseCollector()
REGISTRY.register(USES)
