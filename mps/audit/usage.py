"""Metrics of the GPU memory that the containers of pods use on each card.

The MPS manager exports these metrics, since the driver reports the memory to privileged processes only. The share agent
is not privileged.
"""

from collections.abc import Iterable, Mapping

from mps import metrics
from mps.audit.findings import ProcessUse
from mps.host.pods import PodView

_BYTES_PER_MIB = 1024 * 1024

Labels = tuple[str, str, str, str]


def usage_by_container(uses: Iterable[ProcessUse], pods: Mapping[str, PodView]) -> dict[Labels, int]:
    """The bytes that processes use, by namespace, pod, container ("" if unknown) and card. Pure.

    pods: the node's pods by UID.
    """
    bytes_by_labels: dict[Labels, int] = {}
    for use in uses:
        pod = pods.get(use.pod)
        if pod is None or use.memory is None:
            continue
        container = next(
            (container.name for container in pod.containers if use.container and container.runtime_id == use.container),
            "",
        )
        labels = (pod.namespace, pod.name, container, use.card)
        bytes_by_labels[labels] = bytes_by_labels.get(labels, 0) + use.memory * _BYTES_PER_MIB
    return bytes_by_labels


class Usage:
    """Publishes the metric of used GPU memory. Not thread-safe."""

    def __init__(self) -> None:
        self._published: set[Labels] = set()

    def publish(self, usage: Mapping[Labels, int]) -> None:
        """Set the gauge, and remove the series of pods that do not use a card any more."""
        for labels, used_bytes in usage.items():
            metrics.USED_BYTES.labels(*labels).set(used_bytes)
        for labels in self._published - usage.keys():
            metrics.USED_BYTES.remove(*labels)
        self._published = set(usage)
