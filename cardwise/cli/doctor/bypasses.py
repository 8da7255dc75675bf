"""Fields of existing pods that the chart's policies would refuse, with the chart's default values.

The rules are those of helm/cardwise/templates/policies (environment, hostpaths, runtimeclasses); a test compares both
on a real API server. Pure.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cardwise.core.api import mps, names, request
from cardwise.core.api.request import Container
from cardwise.core.values.decoded import Json

# Default values of the chart: policies.infrastructure.namespaces, policies.hostPaths, policies.runtimeClasses and
# policies.nvidiaResources.
INFRASTRUCTURE: Final = (
    "kube-system", "cardwise-system", "gpu-operator", "nvidia-gpu-operator", "nvidia-device-plugin",
    "nvidia-dra-driver-gpu", "dcgm",
)  # fmt: skip
HOST_PATHS: Final = (
    "/dev/nvidia", "/dev/char", "/proc/driver/nvidia", "/run/cdi", "/var/run/cdi", "/etc/cdi", "/var/lib/cardwise",
    "/run/cardwise", "/var/run/cardwise",
)  # fmt: skip
RUNTIME_CLASSES: Final = ("nvidia", "nvidia-cdi", "nvidia-legacy", "nvidia-experimental")
NVIDIA_RESOURCES: Final = (names.NVIDIA_GPU, "nvidia.com/gpu.shared", "nvidia.com/mig-*")

_CONTAINER_DEVICES: Final = (
    "/var/run/nvidia-container-devices"  # NVIDIA's runtime gives cards to a container that has a mount in this folder
)
_PROCESS_PATH: Final = re.compile(r"^/(proc/(self|thread-self|[0-9]+)|dev/fd)(/|$)")
_HARMLESS_VALUES: Final = ("", names.NO_CARDS, "none")
_MPS_LIMIT_PATTERNS: Final = {  # environment variables with MPS limits, which only the webhook may write
    mps.LIMIT_ENV: re.compile("0=[1-9][0-9]*M"),
    mps.PERCENT_ENV: re.compile("[1-9][0-9]?|100"),
}
_INFRASTRUCTURE_REMEDY: Final = (
    "if they manage GPUs, name their namespace in policies.infrastructure.namespaces or NAMESPACE/ACCOUNT in "
    "policies.infrastructure.serviceAccounts"
)


@dataclass(frozen=True, slots=True)
class Bypass:
    """A reason why a policy would refuse a pod, and the remedy before the installation."""

    text: str
    remedy: str


ENVIRONMENT_BYPASS: Final = Bypass(
    f"{names.ENV_VISIBLE_DEVICES}, CUDA_MPS_* or NVIDIA_GPU_MEMORY_* in env",
    f"let them request a share ({names.GPU_MEM}) instead or, if they need no GPU, set "
    f"{names.ENV_VISIBLE_DEVICES}={names.NO_CARDS}; {_INFRASTRUCTURE_REMEDY}",
)
HOST_PATH_BYPASS: Final = Bypass(
    "hostPath volumes with GPU device files, CDI specs or /proc",
    f"let them request a share ({names.GPU_MEM}) instead; {_INFRASTRUCTURE_REMEDY}",
)
RUNTIME_CLASS_BYPASS: Final = Bypass(
    "a RuntimeClass of NVIDIA's, but no request for a GPU",
    f"take runtimeClassName away, or let them request a share ({names.GPU_MEM}); {_INFRASTRUCTURE_REMEDY}",
)
OPEN_CONTAINER_BYPASS: Final = Bypass(
    "a RuntimeClass of NVIDIA's, but containers that request no GPU",
    f"set for each other container, also init containers, the variable {names.ENV_VISIBLE_DEVICES}={names.NO_CARDS}",
)


def find_bypasses(spec: Json) -> Iterator[Bypass]:
    """Yield each reason why a policy would refuse a new pod with this spec."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    requests_gpu = any(_is_own_resource(name) for container in containers for name in _requested_resources(container))
    if any(map(_opens_cards_by_env, request.containers({"spec": spec}))):
        yield ENVIRONMENT_BYPASS
    if _mounts_cards(spec, containers, requests_gpu=requests_gpu):
        yield HOST_PATH_BYPASS
    if spec.get("runtimeClassName") in RUNTIME_CLASSES:
        has_nvidia_plugin_request = not spec.get("nodeName") and any(map(_requests_nvidia, containers))
        if not requests_gpu and not has_nvidia_plugin_request:
            yield RUNTIME_CLASS_BYPASS
        # In a pod with a share, the webhook itself closes GPUs to the containers without a share.
        elif not requests_gpu and not all(
            _requests_nvidia(container) or _hides_all_cards(container) for container in containers
        ):
            yield OPEN_CONTAINER_BYPASS


def _opens_cards_by_env(container: Container) -> bool:
    """Whether the container's environment opens cards or sets limits.

    A container with a slot may have entries that the webhook has written: pods keep these entries when Cardwise
    is upgraded or uninstalled, and users copy them from such pods into their manifests.
    """
    has_slot = request.has_slot(container)
    return any(
        _is_reserved(entry) and not (has_slot and _is_written_by_webhook(entry))
        for entry in container.spec.get("env") or ()
    )


def _is_reserved(entry: Json) -> bool:
    name = str(entry.get("name"))
    if name == names.ENV_VISIBLE_DEVICES:
        return bool(entry.get("valueFrom")) or entry.get("value", "") not in _HARMLESS_VALUES
    return name.startswith(names.ENV_LIMIT_PREFIXES)


def _is_written_by_webhook(entry: Json) -> bool:
    name = str(entry.get("name"))
    if name in _MPS_LIMIT_PATTERNS:
        return _MPS_LIMIT_PATTERNS[name].fullmatch(str(entry.get("value", ""))) is not None
    path = str(((entry.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", ""))
    return name == names.ENV_VISIBLE_DEVICES and path.startswith(f"metadata.annotations['{names.DEVICES_OF}")


def _mounts_cards(spec: Json, containers: list[Json], *, requests_gpu: bool) -> bool:
    host_paths = {
        str(volume.get("name")): _normalize_path(str(volume["hostPath"].get("path", "")))
        for volume in spec.get("volumes") or ()
        if volume.get("hostPath")
    }
    for path in host_paths.values():
        if path.startswith(HOST_PATHS) or _PROCESS_PATH.match(path):
            return True
        if requests_gpu and (path == "/" or any(prefix.startswith(f"{path}/") for prefix in HOST_PATHS)):
            return True
    mounts = [mount for container in containers for mount in container.get("volumeMounts") or ()]
    return any(
        ".." in str(mount.get("mountPath", "")).split("/")
        or _normalize_path(str(mount.get("mountPath", ""))).startswith(_CONTAINER_DEVICES)
        for mount in mounts
        if mount.get("name") in host_paths
    )


def _normalize_path(path: str) -> str:
    """Return the path without empty and "." parts."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _requested_resources(container: Json) -> dict[str, str]:
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def _is_own_resource(name: str) -> bool:
    markers = (names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)
    requested = name in (names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE)
    return (requested or name.startswith(names.CLASS_PREFIX)) and name not in markers


def _requests_nvidia(container: Json) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return any(
        str(amount)[:1] in "123456789"
        for name, amount in limits.items()
        for resource in NVIDIA_RESOURCES
        if (name.startswith(resource[:-1]) if resource.endswith("*") else name == resource)
    )


def _hides_all_cards(container: Json) -> bool:
    visible_devices = [
        variable.get("value")
        for variable in container.get("env") or ()
        if variable.get("name") == names.ENV_VISIBLE_DEVICES
    ]
    return bool(visible_devices) and all(devices == names.NO_CARDS for devices in visible_devices)
