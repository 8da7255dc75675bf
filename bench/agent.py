"""Measures the share agent: memory, CPU when idle, start, and the cost of a startup probe."""

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
from cardwise.core.api.mps import DaemonScope, MpsState, Status
from cardwise.core.values.quantity import MiB, Percent
from mps.daemon import directories

AGENT_COMMAND = [sys.executable, "-m", "mps.agent"]
_UUID = "GPU-5c5b2f0e-8a86-4c3c-b8a9-0a7c4a2e6f10"
_P100 = MiB(16276)
_TICKS = os.sysconf("SC_CLK_TCK")


def run(seconds: int, probes: int) -> list[Row]:
    """Measure an agent for `seconds`, on a card whose MPS daemon is Ready all the time, and then `probes` probes."""
    with (
        tempfile.TemporaryDirectory(prefix="cwb-", dir="/tmp") as scratch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon,
    ):
        env = _pod_environment(Path(scratch), daemon)
        start = time.monotonic()
        agent = subprocess.Popen(AGENT_COMMAND, env=env)
        try:
            while _run_probe(env):
                time.sleep(0.02)
            ready_seconds = time.monotonic() - start
            idle_start, start_cpu = time.monotonic(), _cpu_seconds(agent.pid)
            time.sleep(seconds)
            idle_load = (_cpu_seconds(agent.pid) - start_cpu) / (time.monotonic() - idle_start)
            memory = _memory_mib(agent.pid)
            probe_seconds, start_cpu = [], _children_cpu_seconds()
            for _ in range(probes):
                start = time.monotonic()
                assert _run_probe(env) == 0
                probe_seconds.append(time.monotonic() - start)
            cpu_per_probe = (_children_cpu_seconds() - start_cpu) / probes
        finally:
            agent.terminate()
            exit_code = agent.wait(10)
    assert exit_code == 0
    cells = {
        "resident": f"{memory['VmRSS']:.1f} MiB",
        "of that its own (anonymous)": f"{memory['RssAnon']:.1f} MiB",
        "peak": f"{memory['VmHWM']:.1f} MiB",
        "CPU when idle": f"{idle_load * 100:.3f} % of a core",
        "start to ready": f"{ready_seconds * 1000:.0f} ms",
    }
    probe = timing.latency("a probe", probe_seconds)
    return [Row("share agent", cells), Row("a probe", probe.cells | {"CPU": f"{cpu_per_probe * 1000:.0f} ms"})]


def _pod_environment(folder: Path, daemon: socket.socket) -> dict[str, str]:
    """Create the files that are mounted into the pod. Returns the agent's environment variables."""
    root = folder / "mps"
    home = Path(mps.card_daemon_folder(str(root), _UUID))
    directories.prepare_folders(home)
    daemon.bind(str(home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET))
    daemon.listen(1024)
    status = Status(
        uuids=(_UUID,),
        scope=DaemonScope.CARD,
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


def _run_probe(env: dict[str, str]) -> int:
    return subprocess.run([*AGENT_COMMAND, "--probe"], env=env, stderr=subprocess.DEVNULL, check=False).returncode


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _memory_mib(pid: int) -> dict[str, float]:
    """The sizes in MiB of /proc/PID/status, by field."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[0].startswith(("Vm", "Rss"))}
