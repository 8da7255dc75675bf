"""Metrics of the GPU memory that the containers of pods use on each card.

Here and not in the share agent, since the driver tells it to privileged processes only.
"""

from collections.abc import Iterable, Mapping

from mps import metrics
from mps.audit.findings import ProcessUse
from mps.host.pods import PodView

_BYTES = 1024 * 1024

Labels = tuple[str, str, str, str]


def measured(uses: Iterable[ProcessUse], pods: Mapping[str, PodView]) -> dict[Labels, int]:
    """Bytes by namespace, pod, container ("" where it is not known) and card. `pods` by UID. Pure."""
    found: dict[Labels, int] = {}
    for use in uses:
        pod = pods.get(use.pod)
        if pod is None or use.memory is None:
            continue
        container = next((one.name for one in pod.containers if use.container and one.runtime_id == use.container), "")
        labels = (pod.namespace, pod.name, container, use.card)
        found[labels] = found.get(labels, 0) + use.memory * _BYTES
    return found


class Usage:
    """The gauge as it was set last. For one thread."""

    def __init__(self) -> None:
        self._told: set[Labels] = set()

    def tell(self, found: Mapping[Labels, int]) -> None:
        """Publishes the use; pods that use nothing any more are removed."""
        for labels, amount in found.items():
            metrics.USED.labels(*labels).set(amount)
        for labels in self._told - found.keys():
            metrics.USED.remove(*labels)
        self._told = set(found)
