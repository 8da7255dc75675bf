"""In place of NVIDIA's libcuda: the calls that tenant.py makes, answered by the double of a card (doublecard.py).

Plain standard library: it runs in tenants' processes, also in containers. MPS counts as there when its control socket
answers in the pipe folder; then the process' own limit and the daemon's ceiling hold, as NVIDIA's hold.
"""

import ctypes
import json
import os
import socket

ERRORS = {"out of memory": 2, "illegal address": 700, "terminated": 810}
_PIPE, _LIMIT, _PERCENT = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
)
_MIB = 1024 * 1024
_BAD_ADDRESS = 8  # where tenant.py's `crash` writes


class Library:
    """As ctypes.CDLL("libcuda.so.1")."""

    def __init__(self, address: str) -> None:
        self._card = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._card.connect(address)

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: 0  # what changes nothing that a tenant could tell

    def cuInit(self, _flags: object) -> int:  # noqa: N802 - CUDA's name, as all below
        percent = float(os.environ.get(_PERCENT, "100"))
        return self._call_card(
            "init", through=_control("get_server_list") is not None, limit=_limit(), percent=percent
        )["code"]

    def cuMemGetInfo_v2(self, free: object, total: object) -> int:  # noqa: N802
        seen = self._call_card("see")
        _write(free, seen["free"] * _MIB)
        _write(total, seen["total"] * _MIB)
        return 0

    def cuDeviceGetAttribute(self, answer: object, _attribute: object, _device: object) -> int:  # noqa: N802
        _write(answer, self._call_card("see")["sms"])
        return 0

    def cuMemAlloc_v2(self, _pointer: object, size: ctypes.c_size_t) -> int:  # noqa: N802
        return self._call_card("allocate", mib=size.value / _MIB)["code"]

    def cuMemAllocManaged(self, pointer: object, size: ctypes.c_size_t, _flags: object) -> int:  # noqa: N802
        return self.cuMemAlloc_v2(pointer, size)

    def cuMemAllocAsync(self, pointer: object, size: ctypes.c_size_t, _stream: object) -> int:  # noqa: N802
        return self.cuMemAlloc_v2(pointer, size)

    def cuMemCreate(self, pointer: object, size: ctypes.c_size_t, _properties: object, _flags: object) -> int:  # noqa: N802
        return self.cuMemAlloc_v2(pointer, size)

    def cuLaunchKernel(self, _function: object, blocks: ctypes.c_uint, *arguments: object) -> int:  # noqa: N802
        (out, _rounds) = (ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64)) for pointer in arguments[7])
        return self._call_card("launch", blocks=blocks.value, bad=out.contents.value == _BAD_ADDRESS)["code"]

    def _call_card(self, call: str, **arguments: object) -> dict:
        self._card.send(json.dumps({"call": call, **arguments}).encode())
        return json.loads(self._card.recv(65536))


def _write(pointer: object, number: int) -> None:
    """`pointer`: by ctypes.byref."""
    setattr(pointer._obj, "value", number)  # noqa: B010 - of ctypes


def _limit() -> int | None:
    """MiB that MPS gives this process; None for no limit. A key of a card that it does not see lifts all limits."""
    ceiling = _control("get_default_device_pinned_mem_limit 0") or ""
    entries = [entry.partition("=") for entry in os.environ.get(_LIMIT, "").split(",") if entry]
    if any(key != "0" for key, _, _ in entries):
        return None
    limits = [int(amount.rstrip("M")) for _, _, amount in entries]
    if ceiling:
        limits.append(int(ceiling[:-1]) * (1024 if ceiling.endswith("G") else 1))
    return min(limits, default=None)


def _control(command: str) -> str | None:
    """The answer of the MPS daemon; None where there is none, so that CUDA goes without MPS."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        try:
            daemon.connect(f"{os.environ.get(_PIPE, '/tmp/nvidia-mps')}/control")
            daemon.send(command.encode())
            return daemon.recv(65536)[1:].decode().strip()
        except OSError:
            return None
