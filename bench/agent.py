"""What the share agent costs each pod that has it: memory, CPU when nothing happens, and the price of a probe."""

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import timing
from bench.timing import Row
from cardwise.clock import BOOT
from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.mps import MpsState, Scope, Status
from cardwise.core.values.quantity import MiB, Percent
from mps.daemon import directories

AGENT = [sys.executable, "-m", "mps.agent"]
_UUID = "GPU-5c5b2f0e-8a86-4c3c-b8a9-0a7c4a2e6f10"
_P100 = MiB(16276)
_TICKS = os.sysconf("SC_CLK_TCK")


def run(seconds: int, probes: int) -> list[Row]:
    """Beside a card that is Ready all the while, as a pod's life mostly is."""
    with (
        tempfile.TemporaryDirectory(prefix="cwb-", dir="/tmp") as scratch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon,
    ):
        env = _pod(Path(scratch), daemon)
        before = time.monotonic()
        agent = subprocess.Popen(AGENT, env=env)
        try:
            while _probe(env):
                time.sleep(0.02)
            started = time.monotonic() - before
            began, cpu = time.monotonic(), _cpu(agent.pid)
            time.sleep(seconds)
            load = (_cpu(agent.pid) - cpu) / (time.monotonic() - began)
            memory = _memory(agent.pid)
            each, price = [], _children()
            for _ in range(probes):
                asked = time.monotonic()
                assert _probe(env) == 0
                each.append(time.monotonic() - asked)
            price = (_children() - price) / probes
        finally:
            agent.terminate()
            code = agent.wait(10)
    assert code == 0
    values = {
        "resident": f"{memory['VmRSS']:.1f} MiB",
        "of that its own (anonymous)": f"{memory['RssAnon']:.1f} MiB",
        "peak": f"{memory['VmHWM']:.1f} MiB",
        "CPU when idle": f"{load * 100:.3f} % of a core",
        "start to ready": f"{started * 1000:.0f} ms",
    }
    probe = timing.latency("a probe", each)
    return [Row("share agent", values), Row("a probe", probe.values | {"CPU": f"{price * 1000:.0f} ms"})]


def _pod(folder: Path, daemon: socket.socket) -> dict[str, str]:
    """The agent's environment; makes what is mounted into it."""
    root = folder / "mps"
    home = Path(mps.folder(str(root), _UUID))
    directories.prepare(home)
    daemon.bind(str(home / mps.CLIENTS / mps.CONTROL))
    daemon.listen(1024)
    status = Status(
        uuids=(_UUID,),
        scope=Scope.CARD,
        state=MpsState.READY,
        checked=BOOT.now(),
        valid_seconds=3600.0,
        ceilings={_UUID: _P100},
    )
    directories.write_status(home, status)
    share = CardShare(0, _UUID, MiB(8138), Percent(50), _P100)
    return {
        **os.environ,
        shareagent.ASSIGNMENT_ENV: codec.encode(Assignment({"0": (share,)}), assume_time_ns=1)[names.ASSIGNMENT],
        shareagent.WAIT_ENV: MpsState.READY,
        shareagent.FOLDER_ENV: str(folder),
        shareagent.MPS_ROOT_ENV: str(root),
    }


def _probe(env: dict[str, str]) -> int:
    return subprocess.run([*AGENT, "--probe"], env=env, stderr=subprocess.DEVNULL, check=False).returncode


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory(pid: int) -> dict[str, float]:
    """MiB."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[0].startswith(("Vm", "Rss"))}
