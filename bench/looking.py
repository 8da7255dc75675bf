"""How long the first screen of `cardwise top` takes in a big cluster: the program itself, started anew each time."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import parts, timing
from bench.timing import Row

_TOP = [str(Path(sys.executable).with_name("cardwise")), "top", "--once"]


def first_screen(nodes: int, pods: int, calls: int) -> list[Row]:
    """Start of the process to its end, with what of it is the program's own CPU."""
    rows = []
    with parts.compiled() as env, parts.world(nodes, pods) as kubeconfig:
        for what, more in (("20 most used nodes", ()), ("one node", ("gpu-node-00007.example.internal",))):
            arguments = [*_TOP, "--kubeconfig", str(kubeconfig), *more]
            _run(arguments, env)  # compiles
            taken = [_run(arguments, env) for _ in range(calls)]
            row = timing.latency(f"cardwise top --once, {what}", [wall for wall, _ in taken])
            row.values["CPU"] = f"{timing.percentile([cpu for _, cpu in taken], 50) * 1000:.0f} ms"
            rows.append(row)
    return rows


def _run(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Seconds, and seconds of CPU. Raises `CalledProcessError`."""
    began, before = time.monotonic(), os.times()
    shown = subprocess.run(arguments, env=env, cwd=parts.ROOT, check=True, capture_output=True, text=True).stdout
    wall, after = time.monotonic() - began, os.times()
    if "granted" not in shown:
        raise RuntimeError(f"no screen: {shown}")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, spent
