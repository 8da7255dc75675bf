"""gpushare's device plugin as the kubelet knew it: a device for each MiB of each card, and a share that is environment.

Written from what is known of gpushare-device-plugin (`pkg/gpu/nvidia/server.go`, `allocate.go`), with the socket and
the device names that it has.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from cardwise.core.api import names
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from tests.cluster.processes import PATIENCE
from tests.fakes import grpcs

_SOCKET = "aliyungpushare.sock"


class GpusharePlugin:
    """From `start` to `stop`. `kubelet_dir` is the root folder of a node's kubelet."""

    def __init__(self, kubelet_dir: Path, mib: int) -> None:
        self._folder = kubelet_dir / "device-plugins"
        devices = [wire.Device(ID=f"GPU-gpushare-_-{number}", health="Healthy") for number in range(mib)]
        self._listing = wire.ListAndWatchResponse(devices=devices)
        self._stopping = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        grpcs.serve(self._server, wire.DESCRIPTOR.services_by_name["DevicePlugin"], self)

    def start(self) -> None:
        self._server.add_insecure_port(f"unix:{self._folder / _SOCKET}")
        self._server.start()
        request = wire.RegisterRequest(version="v1beta1", endpoint=_SOCKET, resource_name=names.GPU_MEM)
        with grpc.insecure_channel(f"unix:{self._folder / 'kubelet.sock'}") as channel:
            grpcs.stub(channel, wire.DESCRIPTOR.services_by_name["Registration"]).Register(request, timeout=PATIENCE)

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop(1.0).wait()
        (self._folder / _SOCKET).unlink(missing_ok=True)

    def GetDevicePluginOptions(self, request: object, context: object) -> wire.DevicePluginOptions:  # noqa: N802
        return wire.DevicePluginOptions()

    def ListAndWatch(self, request: object, context: object) -> Iterator[wire.ListAndWatchResponse]:  # noqa: N802
        yield self._listing
        self._stopping.wait()

    def Allocate(self, request: wire.AllocateRequest, context: object) -> wire.AllocateResponse:  # noqa: N802
        answer = wire.AllocateResponse()
        for container in request.container_requests:
            size = len(container.devices_ids)
            answer.container_responses.add(envs={"NVIDIA_VISIBLE_DEVICES": "1", names.CONTAINER_MEM: str(size)})
        return answer
