"""From samples of processes to the use of containers. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cardwise.core.api.isolation import MemoryTier
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import ProcessSample
from mps.host.pods import PodView

_FULL = 100.0  # percent


class ContainerKey(NamedTuple):
    """A container of a pod and a GPU. container: "" if unknown; uuid: of the GPU."""

    namespace: str
    pod: str
    container: str
    uuid: str
    pod_uid: str


class OwnedSample(NamedTuple):
    """A sample of a process, and the pod and container of the process. runtime_id: "" if the container is unknown."""

    uuid: str
    pod_uid: str
    runtime_id: str
    sample: ProcessSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerUse:
    """What a container uses of a GPU; None is unknown.

    workload: what created the pod, such as Deployment/web.
    resource_class: the ResourceClass that it requests; "" for any GPU.
    tier: what limits its memory (`MemoryTier`); "" if unknown.
    granted: MiB of its share; None without a share of this GPU.
    memory: MiB in use now.
    peak_memory: the largest MiB since the last sample, as far as the driver knows.
    sm_percent, bandwidth_percent: as in `ProcessSample`, summed over its processes.
    """

    workload: str
    resource_class: str
    tier: str
    granted: MiB | None
    memory: MiB | None
    peak_memory: MiB | None
    sm_percent: float | None
    bandwidth_percent: float | None


def container_uses(
    pods: Iterable[PodView],
    samples: Iterable[OwnedSample],
    *,
    readable_cards: Iterable[str],
    uuid_by_index: Mapping[int, str],
    tiers: Mapping[str, str],
) -> dict[ContainerKey, ContainerUse]:
    """The use of each container with a share of a GPU, or with a process on one.

    A container without processes uses nothing, unless its GPU could not be read: then its use is unknown.

    readable_cards: UUIDs of the GPUs whose processes were listed.
    tiers: what limits the memory of shares, by UUID.
    """
    samples_by_pod: dict[str, list[OwnedSample]] = {}
    for sample in samples:
        samples_by_pod.setdefault(sample.pod_uid, []).append(sample)
    readable = set(readable_cards)
    uses: dict[ContainerKey, ContainerUse] = {}
    for pod in pods:
        pod_samples = samples_by_pod.get(pod.uid, [])
        granted = {} if pod.finished else dict(_granted(pod, uuid_by_index))
        if not granted and not pod_samples:
            continue
        by_container: dict[tuple[str, str], list[ProcessSample]] = {key: [] for key in granted}
        names = {} if pod.assignment.is_gpushare else {c.runtime_id: c.name for c in pod.containers if c.runtime_id}
        for sample in pod_samples:
            container_key = (names.get(sample.runtime_id, ""), sample.uuid)
            by_container.setdefault(container_key, []).append(sample.sample)
        for (container, uuid), process_samples in by_container.items():
            uses[ContainerKey(pod.namespace, pod.name, container, uuid, pod.uid)] = _container_use(
                pod,
                container,
                process_samples,
                granted=granted.get((container, uuid)),
                tier=tiers.get(uuid, ""),
                is_readable=uuid in readable,
            )
    return uses


def _granted(pod: PodView, uuid_by_index: Mapping[int, str]) -> Iterator[tuple[tuple[str, str], MiB]]:
    """The share of each container of each GPU, by the container's name ("" for pods of gpushare) and UUID."""
    names_by_key = {container.key: container.name for container in pod.containers}
    granted: dict[tuple[str, str], int] = {}
    for key, shares in pod.assignment.containers.items():
        for share in shares:
            if uuid := share.resolve_uuid(uuid_by_index):
                container = (names_by_key.get(key, ""), uuid)
                granted[container] = granted.get(container, 0) + share.mem
    return ((container, MiB(mib)) for container, mib in granted.items())


def _container_use(
    pod: PodView, container: str, samples: Sequence[ProcessSample], *, granted: MiB | None, tier: str, is_readable: bool
) -> ContainerUse:
    limited_by = MemoryTier.ADVISORY if pod.without_mps and tier == MemoryTier.MPS else tier
    classes = {view.name: view.resource_class for view in pod.containers}
    memory = _sum_known([sample.memory for sample in samples]) if is_readable else None
    peaks = [sample.memory if sample.peak_memory is None else sample.peak_memory for sample in samples]
    peak = _sum_known(peaks) if is_readable else None
    sm_percent = _sum_known([sample.sm_percent for sample in samples]) if is_readable else None
    bandwidth_percent = _sum_known([sample.bandwidth_percent for sample in samples]) if is_readable else None
    return ContainerUse(
        workload=pod.workload,
        resource_class=classes.get(container, ""),
        tier=limited_by,
        granted=granted,
        memory=None if memory is None else MiB(round(memory)),
        peak_memory=None if peak is None else MiB(round(peak)),
        sm_percent=None if sm_percent is None else min(_FULL, sm_percent),
        bandwidth_percent=None if bandwidth_percent is None else min(_FULL, bandwidth_percent),
    )


def _sum_known(amounts: Sequence[float | None]) -> float | None:
    """The sum; None if one of the amounts is unknown."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
