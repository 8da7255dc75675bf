"""A tenant's program: plain CUDA by ctypes, so that nothing but the driver is needed. Run as a script, in a process of
its own, with the environment of a container; tells what it meets in lines of JSON.

    tenant.py see              what the card looks like: {"free": MiB, "total": MiB, "sms": n}
    tenant.py fill             allocates until it is refused: also {"allocated": MiB, "error": code}
    tenant.py hold MIB         allocates, says {"held": MiB}, and stays until its input ends
    tenant.py take CALL MIB    allocates so much in small pieces by this call (see CALLS) until it is refused, says
                               {"allocated": MiB, "error": code}, and stays until its input ends
    tenant.py grow             says {"ready"}; for each line of input allocates that many MiB: {"error": code}
    tenant.py work BLOCKS S    says {"ready"}, waits for a line, computes for S seconds: as busy, and how long a round
                               took: {"p50": microseconds, "p99": microseconds}
    tenant.py busy BLOCKS      says {"ready"}, computes until its input ends or an error: {"rounds": n, "error": code}
    tenant.py crash            writes where it may not: {"error": code}
"""

import ctypes
import importlib
import json
import os
import sys
import threading
import time

MIB = 1024 * 1024
SMALLEST = 2 * MIB  # what the driver hands out at once
SMS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
THREADS = 128
ROUNDS = 200_000  # of the kernel's loop: about a millisecond on one multiprocessor
OK = 0
PIECE = 16 * MIB
DOUBLE_ENV = "CARDWISE_DOUBLE_CARD"  # the socket of the double of a card, in place of a real one

# Writes the end of a long sum to where it is told, so that nothing of it can be left out.
KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry work(
    .param .u64 work_out,
    .param .u32 work_rounds
)
{
    .reg .pred %p<2>;
    .reg .f32 %f<3>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;

    ld.param.u64 %rd1, [work_out];
    ld.param.u32 %r1, [work_rounds];
    cvta.to.global.u64 %rd2, %rd1;
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F000000;
AGAIN:
    fma.rn.f32 %f1, %f1, %f2, %f2;
    add.s32 %r1, %r1, -1;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    st.global.f32 [%rd2], %f1;
    ret;
}
"""


class CudaError(Exception):
    """A call that failed; `code` is CUDA's."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL
# CUDA's calls that allocate on the card, with what follows pointer and size.
CALLS = {
    "plain": ("cuMemAlloc_v2", ()),
    "managed": ("cuMemAllocManaged", (GLOBAL,)),
    "async": ("cuMemAllocAsync", (None,)),
    "virtual": ("cuMemCreate", (ctypes.byref(Properties(PINNED, 0, Location(ON_DEVICE, 0))), ctypes.c_uint64(0))),
}


def library() -> "ctypes.CDLL":
    """The driver's, or its double, which lies beside this file."""
    double = os.environ.get(DOUBLE_ENV)
    return importlib.import_module("doublecuda").Library(double) if double else ctypes.CDLL("libcuda.so.1")


class Card:
    """The first card that this process sees, with a context on it."""

    def __init__(self) -> None:
        self._cuda = library()
        self.call("cuInit", 0)
        self._device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def code(self, name: str, *arguments: object) -> int:
        return int(getattr(self._cuda, name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        code = self.code(name, *arguments)
        if code != OK:
            raise CudaError(name, code)

    def snapshot(self) -> dict:
        free, total, sms = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self.call("cuDeviceGetAttribute", ctypes.byref(sms), SMS, self._device)
        return {"free": free.value // MIB, "total": total.value // MIB, "sms": sms.value}

    def allocate(self, size: int) -> int:
        """CUDA's code."""
        return self.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size))

    def fill(self) -> dict:
        """Ever smaller pieces, so that what is left at the end is less than the smallest."""
        seen, allocated, size, error = self.snapshot(), 0, 256 * MIB, OK
        while size >= SMALLEST:
            code = self.allocate(size)
            if code == OK:
                allocated += size
            else:
                error, size = code, size // 2
        return seen | {"allocated": allocated // MIB, "error": error}

    def allocate_by(self, call: str, mib: int) -> dict:
        name, arguments = CALLS[call]
        code, pieces = OK, 0
        while code == OK and pieces * PIECE < mib * MIB:
            code = self.code(name, ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(PIECE), *arguments)
            pieces += code == OK
        return {"allocated": pieces * PIECE // MIB, "error": code}

    def load(self) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(KERNEL))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"work")
        return function

    def launch(self, function: ctypes.c_void_p, blocks: int, out: int, rounds: int = ROUNDS) -> int:
        """Launches and waits for the end. CUDA's code."""
        parameters = (ctypes.c_uint64(out), ctypes.c_uint32(rounds))
        arguments = (ctypes.c_void_p * 2)(
            *(ctypes.cast(ctypes.byref(parameter), ctypes.c_void_p) for parameter in parameters)
        )
        grid = [ctypes.c_uint(number) for number in (blocks, 1, 1, THREADS, 1, 1, 0)]
        code = self.code("cuLaunchKernel", function, *grid, None, arguments, None)
        return code if code != OK else self.code("cuCtxSynchronize")

    def place(self) -> int:
        """Where a kernel may write."""
        out = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(SMALLEST))
        return out.value


def print_line(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def compute(card: Card, blocks: int, until: "threading.Event", seconds: float) -> None:
    function, out = card.load(), card.place()
    card.launch(function, blocks, out)  # the first one is compiled
    print_line(ready=True)
    if seconds:
        sys.stdin.readline()
    took, error, began = [], OK, time.monotonic()
    last = began
    while error == OK and not until.is_set() and not (seconds and last >= began + seconds):
        error = card.launch(function, blocks, out)
        now = time.monotonic()
        took.append(now - last)
        last = now
    report = {"rounds": len(took) - (error != OK), "error": error}
    if seconds:
        took.sort()
        report |= {name: round(took[len(took) * part // 100] * 1e6) for name, part in (("p50", 50), ("p99", 99))}
    print_line(**report)


def main(program: str, *numbers: str) -> None:
    card = Card()
    match program:
        case "see":
            print_line(**card.snapshot())
        case "fill":
            print_line(**card.fill())
        case "hold":
            code = card.allocate(int(numbers[0]) * MIB)
            print_line(held=int(numbers[0]) if code == OK else 0, error=code)
            sys.stdin.read()
        case "take":
            print_line(**card.allocate_by(numbers[0], int(numbers[1])))
            sys.stdin.read()
        case "grow":
            print_line(ready=True)
            for line in sys.stdin:
                print_line(error=card.allocate(int(line) * MIB))
        case "work":
            compute(card, int(numbers[0]), threading.Event(), float(numbers[1]))
        case "busy":
            over = threading.Event()
            threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
            compute(card, int(numbers[0]), over, 0.0)
        case "crash":
            function = card.load()
            print_line(error=card.launch(function, 1, 8, 1))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CudaError as failed:
        print_line(error=failed.code, call=str(failed))
