"""Loads: the CPU, memory and pod slots that pods use and nodes have. As in Kubernetes, requests count."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final

from msgspec import Struct

from cardwise.core.api.request import Load
from cardwise.core.values import quantity

_SAME: Final = 65_536  # distinct loads that are cached


class ResourceList(Struct):
    """A list of resources, as in requests or in a node's capacity."""

    cpu: str | int | float = 0
    memory: str | int | float = 0
    pods: str | int = 0


class Resources(Struct):
    requests: ResourceList | None = None


class ContainerLoad(Struct, rename="camel"):
    resources: Resources | None = None
    restart_policy: str = ""


class PodSpec(Struct, rename="camel"):
    """The fields of a pod that determine its load."""

    node_name: str = ""
    containers: Sequence[ContainerLoad] | None = None
    init_containers: Sequence[ContainerLoad] | None = None
    overhead: ResourceList | None = None
    resources: Resources | None = None
    priority: int | None = None


def load_of_pod(spec: PodSpec) -> Load:
    """The pod's load: the sum of its containers and sidecars, or the largest load during its initialization if that is
    larger.
    """
    cpu = memory = max_cpu = max_memory = 0
    for container in spec.init_containers or ():
        own_cpu, own_memory = _container_requests(container)
        if container.restart_policy == "Always":
            cpu, memory = cpu + own_cpu, memory + own_memory
            own_cpu = own_memory = 0
        max_cpu, max_memory = max(max_cpu, cpu + own_cpu), max(max_memory, memory + own_memory)
    for container in spec.containers or ():
        own_cpu, own_memory = _container_requests(container)
        cpu, memory = cpu + own_cpu, memory + own_memory
    cpu, memory = max(cpu, max_cpu), max(memory, max_memory)
    if spec.resources is not None and spec.resources.requests is not None:  # the pod-level requests
        pod_requests = spec.resources.requests
        cpu, memory = _parse_cpu_milli(pod_requests.cpu) or cpu, _parse_bytes(pod_requests.memory) or memory
    if spec.overhead is not None:
        cpu, memory = cpu + _parse_cpu_milli(spec.overhead.cpu), memory + _parse_bytes(spec.overhead.memory)
    return _load(cpu, memory)


def load_of_node(allocatable: ResourceList) -> Load:
    """The load that the node can take."""
    return Load(
        _parse_cpu_milli(allocatable.cpu), _parse_bytes(allocatable.memory), int(_parse_quantity(allocatable.pods))
    )


def _container_requests(container: ContainerLoad) -> tuple[int, int]:
    if container.resources is None or container.resources.requests is None:
        return 0, 0
    return _parse_cpu_milli(container.resources.requests.cpu), _parse_bytes(container.resources.requests.memory)


@lru_cache(maxsize=_SAME)
def _load(cpu: int, memory: int) -> Load:
    return Load(cpu, memory, 1)


@lru_cache(maxsize=4096)
def _parse_cpu_milli(text: str | float) -> int:
    """Parse a quantity of CPUs into thousandths, rounded up."""
    return -int(-_parse_quantity(text) * 1000 // 1)


@lru_cache(maxsize=4096)
def _parse_bytes(text: str | float) -> int:
    """Parse a quantity of bytes, rounded up."""
    return -int(-_parse_quantity(text) // 1)


def _parse_quantity(text: str | float) -> Fraction:
    """Parse a quantity; 0 for other text, which the API server rejects."""
    try:
        return quantity.parse(str(text))[0]
    except quantity.InvalidQuantity:
        return Fraction(0)
