"""Reads from the container runtime (CRI) which containers are alive on this node.

Only the runtime proves that a share is free. A forced deletion removes the pod object from the API server at once. But
the pod's containers keep the card for their grace period, or forever if they hang.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cardwise.core.api import cdiruntimes
from deviceplugin.api import cri_v1_pb2 as wire
from deviceplugin.sources.calls import CallFailed, GrpcCaller

UID_LABEL = "io.kubernetes.pod.uid"  # k:types/labels.go
CONTAINER_NAME_LABEL = "io.kubernetes.container.name"
_TIMEOUT = 5.0
LIVE_SECONDS = 2 * _TIMEOUT  # the maximum time of `live_containers`
ADOPTION_SECONDS = LIVE_SECONDS + _TIMEOUT  # the maximum time of `sandboxes` and `live_containers` together
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class RuntimeUnavailable(Exception):
    """The container runtime did not answer."""


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """Name, version and CDI settings of the container runtime.

    cdi: whether CDI is enabled; None if the runtime does not report this.
    cdi_dirs: the folders from which the runtime reads CDI specs; empty if unknown.
    """

    name: str
    version: str
    cdi: bool | None
    cdi_dirs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A pod sandbox.

    annotations: the pod's annotations when the sandbox started.
    ready: whether its containers may run.
    """

    pod_uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]
    ready: bool


class RuntimeContainers:
    """A client of the container runtime at one CRI socket. Thread-safe."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._cri = GrpcCaller(socket, _SERVICE)

    def live_containers(self, pod_uids: Collection[str]) -> dict[str, set[str]]:
        """The names of the live containers of each of these pods, by pod UID; "" stands for the pod's sandbox.

        A container that was created but not started yet is treated as alive, and so is a container in an unknown state.
        A ready sandbox is also treated as alive, because the kubelet may be about to create a container in it. In any
        other sandbox no container can start. Pods without live containers are left out. Raises RuntimeUnavailable.
        """
        selector = {UID_LABEL: next(iter(pod_uids))} if len(pod_uids) == 1 else {}
        containers = wire.ListContainersRequest(filter=wire.ContainerFilter(label_selector=selector))
        sandboxes = wire.ListPodSandboxRequest(filter=wire.PodSandboxFilter(label_selector=selector))
        names_by_pod: dict[str, set[str]] = {}
        # List sandboxes first: a container that is created between the two calls is then in the second list.
        for sandbox in self._call("ListPodSandbox", sandboxes).items:
            uid = sandbox.labels.get(UID_LABEL) or sandbox.metadata.uid
            if uid in pod_uids and sandbox.state == wire.SANDBOX_READY:
                names_by_pod.setdefault(uid, set()).add("")
        for container in self._call("ListContainers", containers).containers:
            uid = container.labels.get(UID_LABEL, "")
            if uid in pod_uids and container.state != wire.CONTAINER_EXITED:
                names_by_pod.setdefault(uid, set()).add(container.labels.get(CONTAINER_NAME_LABEL) or container.id)
        return names_by_pod

    def sandboxes(self, pod_uid: str = "") -> list[Sandbox]:
        """The sandboxes of all pods, also of pods that the API server has deleted. Raises RuntimeUnavailable.

        pod_uid: if set, return only the sandboxes of this pod.
        """
        selector = {UID_LABEL: pod_uid} if pod_uid else {}
        request = wire.ListPodSandboxRequest(filter=wire.PodSandboxFilter(label_selector=selector))
        sandboxes = self._call("ListPodSandbox", request).items
        return [
            Sandbox(
                sandbox.metadata.uid,
                sandbox.metadata.namespace,
                sandbox.metadata.name,
                dict(sandbox.annotations),
                sandbox.state == wire.SANDBOX_READY,
            )
            for sandbox in sandboxes
        ]

    def facts(self) -> RuntimeFacts:
        """Read the name, version and CDI settings of the runtime. Raises RuntimeUnavailable."""
        version = self._call("Version", wire.VersionRequest())
        status = self._call("Status", wire.StatusRequest(verbose=True))
        cdi: bool | None = None
        dirs: tuple[str, ...] = ()
        try:
            config = msgspec.json.decode(status.info.get("config", "{}"))
        except msgspec.DecodeError:
            config = None
        if isinstance(config, dict):
            cdi, dirs = _parse_cdi_settings(config)
        return RuntimeFacts(version.runtime_name, version.runtime_version, cdi, dirs)

    def close(self) -> None:
        self._cri.close()

    def _call(self, method: str, message: Any) -> Any:
        try:
            return self._cri.call(method, message, _TIMEOUT)
        except CallFailed as error:
            raise RuntimeUnavailable(f"{method} at {self._socket}: {error}") from error


def serves_cdi(facts: RuntimeFacts) -> bool:
    """Whether the runtime supports CDI devices. The runtime's settings decide; if they are unknown, its version
    decides.
    """
    return cdiruntimes.has_cdi(facts.name, facts.version) if facts.cdi is None else facts.cdi


def _parse_cdi_settings(config: dict[str, Any]) -> tuple[bool | None, tuple[str, ...]]:
    enabled = config.get("enableCDI")
    dirs = config.get("cdiSpecDirs")
    return (
        enabled if isinstance(enabled, bool) else None,
        tuple(str(path) for path in dirs) if isinstance(dirs, list) else (),
    )
