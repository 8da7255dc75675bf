"""A kubelet and a container runtime as the device plugin sees them: what they answer, and three gRPC services of it."""

# The names of the verbs are gRPC's.
# ruff: noqa: N802

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from cardwise.clock import Clock
from cardwise.core.api import names
from deviceplugin.api import cri_v1_pb2 as cri
from deviceplugin.api import deviceplugin_v1beta1_pb2 as plugin
from deviceplugin.api import podresources_v1_pb2 as resources
from deviceplugin.plugin.server import PluginServer
from deviceplugin.sources.containers import RuntimeContainers, RuntimeUnavailable
from deviceplugin.sources.kubelet import Kubelet
from tests.fakes import grpcs

PATIENCE = 60.0  # seconds after which a test that waits for an event is broken


class Ended(grpc.RpcError):
    """How a call ends that has no socket."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code = lambda: code
        self.details = lambda: details


class Plugin:
    """A stub of a server's verbs that calls them in the caller's thread. `active`: it has not given up its calls."""

    def __init__(self, server: PluginServer) -> None:
        self._server = server
        self.active = True

    def Allocate(self, request: plugin.AllocateRequest, timeout: float) -> plugin.AllocateResponse:
        return self.call("Allocate", request.SerializeToString())

    def PreStartContainer(self, request: plugin.PreStartContainerRequest, timeout: float) -> None:
        self.call("PreStartContainer", request.SerializeToString())

    def call(self, verb: str, body: bytes) -> Any:
        return self._server.handlers()[verb].unary_unary(body, self)

    def is_active(self) -> bool:
        return self.active

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Ended(code, details)


class FakeKubelet:
    """Hands out slots to containers, and calls the plugin as the kubelet does: `plugin` is whose turn it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugins = folder / "device-plugins"
        self.plugins.mkdir(parents=True)
        (folder / "pod-resources").mkdir()
        self.lock = threading.Lock()
        self.holders: dict[str, list[tuple[str, str, str, str]]] = {}  # slot -> (namespace, pod, uid, container)
        self.devices: list[str] = []
        self.plugin: Any = None
        self.lists = 0
        self.write_checkpoint()

    def List(self, request, context):
        with self.lock:
            self.lists += 1
            answer = resources.ListPodResourcesResponse()
            for slot, holders in self.holders.items():
                for namespace, pod, _, container in holders:
                    entry = answer.pod_resources.add(name=pod, namespace=namespace)
                    entry.containers.add(name=container).devices.add(resource_name=names.SHARE, device_ids=[slot])
            return answer

    def admit(self, pod: dict, container: str, slot: str | None = None) -> str:
        """Admission: a free slot, Allocate, the checkpoint."""
        metadata = pod["metadata"]
        with self.lock:
            slot = slot or next(device for device in self.devices if device not in self.holders)
            self.holders.setdefault(slot, []).append(
                (metadata["namespace"], metadata["name"], metadata["uid"], container)
            )
            self.write_checkpoint()
        self.allocation = self.plugin.Allocate(
            plugin.AllocateRequest(container_requests=[plugin.ContainerAllocateRequest(devices_ids=[slot])]),
            timeout=PATIENCE,
        )
        return slot

    def forget(self, pod_uid: str) -> None:
        """The pod has ended for the kubelet: its slots are free again."""
        with self.lock:
            for slot, holders in list(self.holders.items()):
                remaining = [holder for holder in holders if holder[2] != pod_uid]
                if remaining:
                    self.holders[slot] = remaining
                else:
                    del self.holders[slot]
            self.write_checkpoint()

    def pre_start(self, slot: str) -> None:
        self.plugin.PreStartContainer(plugin.PreStartContainerRequest(devices_ids=[slot]), timeout=PATIENCE)

    def write_checkpoint(self) -> None:
        entries = [
            {
                "PodUID": uid,
                "ContainerName": container,
                "ResourceName": names.SHARE,
                "DeviceIDs": {"-1": [slot]},
                "AllocResp": "",
            }
            for slot, holders in self.holders.items()
            for _, _, uid, container in holders
        ]
        path = self.plugins / "kubelet_internal_checkpoint"
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}))
        scratch.rename(path)


class SeenKubelet(Kubelet):
    """The sources of a fake kubelet, asked without a socket."""

    def __init__(self, kubelet: FakeKubelet, clock: Clock) -> None:
        super().__init__(kubelet.folder, clock)
        self._kubelet = kubelet

    def _list_pod_resources(self) -> resources.ListPodResourcesResponse:
        return self._kubelet.List(None, None)


class FakeRuntime:
    """Containers that are alive, by pod UID."""

    def __init__(self) -> None:
        self.cdi = True
        self.version = "v2.1.4"
        self.running: dict[str, set[str]] = {}
        self.sandboxes: dict[str, dict] = {}  # the pods that they were made for
        self.silent = False

    def make_sandbox(self, pod: dict) -> None:
        """Unless the pod has one."""
        self.sandboxes.setdefault(pod["metadata"]["uid"], pod)

    def run(self, pod: dict, container: str) -> None:
        self.make_sandbox(pod)
        self.running.setdefault(pod["metadata"]["uid"], set()).add(container)

    def kill(self, pod_uid: str) -> None:
        self.running.pop(pod_uid, None)
        self.sandboxes.pop(pod_uid, None)

    def Version(self, request, context):
        return cri.VersionResponse(runtime_name="containerd", runtime_version=self.version)

    def Status(self, request, context):
        return cri.StatusResponse(info={"config": json.dumps({"enableCDI": self.cdi})})

    def ListPodSandbox(self, request, context):
        answer = cri.ListPodSandboxResponse()
        for uid, pod in list(self.sandboxes.items()):
            metadata = pod["metadata"]
            sandbox = answer.items.add(id=uid, state=cri.SANDBOX_READY, labels={"io.kubernetes.pod.uid": uid})
            sandbox.metadata.uid = uid
            sandbox.metadata.namespace, sandbox.metadata.name = metadata.get("namespace", ""), metadata.get("name", "")
            sandbox.annotations.update(metadata.get("annotations", {}))
        return answer

    def ListContainers(self, request, context):
        answer = cri.ListContainersResponse()
        for uid, containers in list(self.running.items()):
            for name in containers:
                labels = {"io.kubernetes.pod.uid": uid, "io.kubernetes.container.name": name}
                answer.containers.add(id=f"{uid}/{name}", state=cri.CONTAINER_RUNNING, labels=labels)
        return answer


class SeenRuntime(RuntimeContainers):
    """The containers of a fake runtime, asked without a socket."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(Path("/none"))
        self._runtime = runtime

    def _call(self, method: str, message: Any) -> Any:
        if self._runtime.silent:
            raise RuntimeUnavailable(f"{method}: silent")
        return getattr(self._runtime, method)(message, None)


class _Service:
    def __init__(self, socket: Path, service: ServiceDescriptor, served: object) -> None:
        self.socket = socket
        self.server = grpc.server(ThreadPoolExecutor(32))
        grpcs.serve(self.server, service, served)
        self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()

    def stop(self) -> None:
        self.server.stop(0).wait()
        self.socket.unlink(missing_ok=True)


class ServedKubelet(FakeKubelet):
    """On its sockets. Plugins register with it, and it connects back."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.registered: list[plugin.RegisterRequest] = []
        self.refuse_lists = 0  # so many Lists are answered as over the rate limit
        self.channel: grpc.Channel | None = None
        self.stream = None
        self.start()

    def start(self) -> None:
        self.resources = _Service(
            self.folder / "pod-resources" / "kubelet.sock",
            resources.DESCRIPTOR.services_by_name["PodResourcesLister"],
            self,
        )
        self.registration = _Service(
            self.plugins / "kubelet.sock", plugin.DESCRIPTOR.services_by_name["Registration"], self
        )

    def stop(self) -> None:
        self.disconnect()
        self.registration.stop()
        self.resources.stop()

    def restart(self) -> None:
        """As the kubelet: forgets its plugins, and deletes every socket in the folder when it starts."""
        self.stop()
        for path in self.plugins.glob("*.sock"):
            path.unlink()
        self.start()

    def disconnect(self) -> None:
        channel, self.channel = self.channel, None
        if self.stream is not None:
            self.stream.cancel()
            self.stream = None
        if channel is not None:
            channel.close()

    def Register(self, request, context):
        self.disconnect()
        channel = grpc.insecure_channel(f"unix:{self.plugins / request.endpoint}")
        stub = grpcs.stub(channel, plugin.DESCRIPTOR.services_by_name["DevicePlugin"])
        options = stub.GetDevicePluginOptions(plugin.Empty(), timeout=PATIENCE)
        assert options.pre_start_required
        self.stream = stub.ListAndWatch(plugin.Empty())
        first = next(self.stream)
        self.channel, self.plugin = channel, stub
        self.devices = [device.ID for device in first.devices]
        self.registered.append(request)
        return plugin.Empty()

    def List(self, request, context):
        if self.refuse_lists:
            self.refuse_lists -= 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return super().List(request, context)


class ServedRuntime(FakeRuntime):
    """On its CRI socket."""

    def __init__(self, socket: Path) -> None:
        super().__init__()
        self._service = _Service(socket, cri.DESCRIPTOR.services_by_name["RuntimeService"], self)

    def stop(self) -> None:
        self._service.stop()
