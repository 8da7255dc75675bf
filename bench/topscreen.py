"""Measures the first screen of `cardwise top` in a big cluster. Each measurement starts the program anew."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import processes, timing
from bench.timing import Row

_TOP_COMMAND = [str(Path(sys.executable).with_name("cardwise")), "top", "--once"]


def first_screen(nodes: int, pods: int, calls: int) -> list[Row]:
    """The time from the start of the process to its end, and its CPU time."""
    rows = []
    with processes.compiled_environment() as env, processes.synthetic_api_server(nodes, pods) as kubeconfig:
        for screen, arguments in (("20 most used nodes", ()), ("one node", ("gpu-node-00007.example.internal",))):
            command = [*_TOP_COMMAND, "--kubeconfig", str(kubeconfig), *arguments]
            _run(command, env)  # compiles the modules
            samples = [_run(command, env) for _ in range(calls)]
            row = timing.latency(f"cardwise top --once, {screen}", [wall for wall, _ in samples])
            row.cells["CPU"] = f"{timing.percentile([cpu for _, cpu in samples], 50) * 1000:.0f} ms"
            rows.append(row)
    return rows


def _run(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Run the command. Returns its seconds, and its seconds of CPU. Raises `CalledProcessError`."""
    start, start_times = time.monotonic(), os.times()
    output = subprocess.run(command, env=env, cwd=processes.ROOT, check=True, capture_output=True, text=True).stdout
    wall, end_times = time.monotonic() - start, os.times()
    if "granted" not in output:
        raise RuntimeError(f"the program printed no screen: {output}")
    cpu = (end_times.children_user - start_times.children_user) + (
        end_times.children_system - start_times.children_system
    )
    return wall, cpu
