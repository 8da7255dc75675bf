"""Runs the extender of the current folder, and writes long holds of its state lock into a file.

Usage: `python bench/lockprobe.py FILE ARGUMENT…`, in a checkout; the arguments are the extender's. The file gets a line
for each hold, and for each run of the garbage collector, of at least 0.5 ms: seconds, seconds of CPU, the part of them
in the garbage collector, and the function. Works with each checkout that has `extender.cache.statelock.StateLock`.
"""

import gc
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Final

_MIN_SECONDS: Final = 0.0005


def main(path: str, *arguments: str) -> None:
    sys.path[0] = str(Path.cwd())  # instead of this script's folder
    from extender.cache.statelock import StateLock  # noqa: PLC0415 - of the checkout

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    acquire, release = StateLock.__enter__, StateLock.__exit__
    holder, holding_thread, start, start_cpu, collected, collection_start = "", 0, 0.0, 0.0, 0.0, 0.0

    def write(seconds: float, cpu: float, in_collector: float, name: str) -> None:
        if seconds >= _MIN_SECONDS:
            os.write(file, f"{seconds:.6f} {cpu:.6f} {in_collector:.6f} {name}\n".encode())

    def timed_acquire(lock: StateLock) -> None:
        nonlocal holder, holding_thread, start, start_cpu, collected
        acquire(lock)
        code = sys._getframe(1).f_code  # noqa: SLF001 - the function that holds the lock
        holder, holding_thread, collected = code.co_name, threading.get_ident(), 0.0
        start, start_cpu = time.perf_counter(), time.thread_time()

    def timed_release(lock: StateLock, *error: object) -> None:
        nonlocal holding_thread
        hold = time.perf_counter() - start, time.thread_time() - start_cpu, collected, holder
        holding_thread = 0
        release(lock, *error)
        write(*hold)

    def on_collection(phase: str, _: object) -> None:
        nonlocal collection_start, collected
        if phase == "start":
            collection_start = time.thread_time()
            return
        seconds = time.thread_time() - collection_start
        if threading.get_ident() == holding_thread:
            collected += seconds
        else:
            write(seconds, seconds, seconds, "garbage-collector")

    StateLock.__enter__, StateLock.__exit__ = timed_acquire, timed_release  # type: ignore[method-assign]
    gc.callbacks.append(on_collection)
    sys.argv = ["extender", *arguments]
    runpy.run_module("extender", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
