"""Loads: the CPU, memory and pod slots that pods use and nodes have. As in Kubernetes, requests count."""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

from cardwise.core.api.request import Load
from cardwise.core.values import quantity
from cardwise.kube.objects.pods import Container, PodSpec

_MAX_CACHED_LOADS: Final = 65_536  # distinct loads that are cached


def load_of_pod(spec: PodSpec) -> Load:
    """The pod's load: the maximum of two amounts, the sum of all containers and sidecars, and the largest load during
    initialization.
    """
    cpu = memory = max_cpu = max_memory = 0
    for container in spec.init_containers or ():
        own_cpu, own_memory = _container_requests(container)
        if container.is_sidecar:
            cpu, memory = cpu + own_cpu, memory + own_memory
            own_cpu = own_memory = 0
        max_cpu, max_memory = max(max_cpu, cpu + own_cpu), max(max_memory, memory + own_memory)
    for container in spec.containers or ():
        own_cpu, own_memory = _container_requests(container)
        cpu, memory = cpu + own_cpu, memory + own_memory
    cpu, memory = max(cpu, max_cpu), max(memory, max_memory)
    if spec.resources is not None and spec.resources.requests is not None:  # the pod-level requests
        pod_cpu, pod_memory = _cpu_and_memory(spec.resources.requests)
        cpu, memory = pod_cpu or cpu, pod_memory or memory
    if spec.overhead is not None:
        overhead_cpu, overhead_memory = _cpu_and_memory(spec.overhead)
        cpu, memory = cpu + overhead_cpu, memory + overhead_memory
    return _load(cpu, memory)


def load_of_node(allocatable: Mapping[str, str | int | float]) -> Load:
    """The load that the node can take."""
    return Load(*_cpu_and_memory(allocatable), int(_parse_quantity(allocatable.get("pods", 0))))


def _container_requests(container: Container) -> tuple[int, int]:
    if container.resources is None or container.resources.requests is None:
        return 0, 0
    return _cpu_and_memory(container.resources.requests)


def _cpu_and_memory(amounts: Mapping[str, str | int | float]) -> tuple[int, int]:
    return _parse_cpu_milli(amounts.get("cpu", 0)), _parse_bytes(amounts.get("memory", 0))


@lru_cache(maxsize=_MAX_CACHED_LOADS)
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
        return quantity.parse_amount(str(text)).number
    except quantity.InvalidQuantity:
        return Fraction(0)
