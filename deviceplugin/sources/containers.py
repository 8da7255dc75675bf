"""Asks the container runtime (CRI) which containers live on this node: the proof that a share is free.

The API server cannot give it: a forced deletion takes the pod object away at once, while its containers keep the card
for their grace period, or for ever if they hang.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cardwise.core.api import cdiruntimes
from deviceplugin.api import cri_v1_pb2 as wire
from deviceplugin.sources.calls import Caller, CallFailed

UID_LABEL = "io.kubernetes.pod.uid"  # k:types/labels.go
NAME_LABEL = "io.kubernetes.container.name"
_TIMEOUT = 5.0
_SERVICE = wire.DESCRIPTOR.services_by_name["RuntimeService"]


class RuntimeSilent(Exception):
    """The container runtime did not answer; nothing is known."""


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What the runtime says of itself. `cdi` is None where it does not say; `cdi_dirs` likewise empty."""

    name: str
    version: str
    cdi: bool | None
    cdi_dirs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A pod as the runtime was told of it when it started; its annotations are those that it was bound with."""

    pod_uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]


class Containers:
    """The runtime behind one CRI socket. Thread-safe."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._cri = Caller(socket, _SERVICE)

    def alive(self, pod_uids: Collection[str]) -> dict[str, set[str]]:
        """For each of the pods that has anything alive: the names of its containers, and "" for its sandbox.

        A container that was only created counts, so does one whose state nobody knows. A sandbox that is ready counts,
        because the kubelet may be about to create a container in it; in one that is not, none can start any more.
        Raises RuntimeSilent.
        """
        selector = {UID_LABEL: next(iter(pod_uids))} if len(pod_uids) == 1 else {}
        containers = wire.ListContainersRequest(filter=wire.ContainerFilter(label_selector=selector))
        sandboxes = wire.ListPodSandboxRequest(filter=wire.PodSandboxFilter(label_selector=selector))
        found: dict[str, set[str]] = {}
        # Sandboxes first: what is created between the two calls is then in the second.
        for sandbox in self._call("ListPodSandbox", sandboxes).items:
            uid = sandbox.labels.get(UID_LABEL) or sandbox.metadata.uid
            if uid in pod_uids and sandbox.state == wire.SANDBOX_READY:
                found.setdefault(uid, set()).add("")
        for container in self._call("ListContainers", containers).containers:
            uid = container.labels.get(UID_LABEL, "")
            if uid in pod_uids and container.state != wire.CONTAINER_EXITED:
                found.setdefault(uid, set()).add(container.labels.get(NAME_LABEL) or container.id)
        return found

    def sandboxes(self) -> list[Sandbox]:
        """The sandboxes of all pods, also of pods that the API server does not know any more. Raises RuntimeSilent."""
        found = self._call("ListPodSandbox", wire.ListPodSandboxRequest()).items
        return [
            Sandbox(one.metadata.uid, one.metadata.namespace, one.metadata.name, dict(one.annotations)) for one in found
        ]

    def facts(self) -> RuntimeFacts:
        """Raises RuntimeSilent."""
        version = self._call("Version", wire.VersionRequest())
        status = self._call("Status", wire.StatusRequest(verbose=True))
        cdi: bool | None = None
        dirs: tuple[str, ...] = ()
        try:
            config = msgspec.json.decode(status.info.get("config", "{}"))
        except msgspec.DecodeError:
            config = None
        if isinstance(config, dict):
            cdi, dirs = _cdi_of(config)
        return RuntimeFacts(version.runtime_name, version.runtime_version, cdi, dirs)

    def close(self) -> None:
        self._cri.close()

    def _call(self, method: str, message: Any) -> Any:
        try:
            return self._cri.call(method, message, _TIMEOUT)
        except CallFailed as error:
            raise RuntimeSilent(f"{method} at {self._socket}: {error}") from error


def serves_cdi(facts: RuntimeFacts) -> bool:
    """Whether the runtime applies CDI devices: by its own word, else by what is known of the version."""
    return cdiruntimes.has_cdi(facts.name, facts.version) if facts.cdi is None else facts.cdi


def _cdi_of(config: dict[str, Any]) -> tuple[bool | None, tuple[str, ...]]:
    enabled = config.get("enableCDI")
    dirs = config.get("cdiSpecDirs")
    return (
        enabled if isinstance(enabled, bool) else None,
        tuple(str(path) for path in dirs) if isinstance(dirs, list) else (),
    )
