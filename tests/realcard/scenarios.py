"""What runs on a lent machine, the most valuable first, each bounded in time.

A scenario is a choice of the tests of this folder in a process of its own. After each test its results are on disk, so
that a machine that is taken away leaves what it had. CARDWISE_GPU_SETTINGS=keep holds for all: no test changes the
machine's settings, and what they are before and after is in the results.
"""

import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import binaries
from tests.realcard import results
from tests.realcard.results import FILE, RESULTS_ENV, TABLES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOG = "log.txt"
_RUN_ENV = "CARDWISE_GPU_RUN"  # in all processes of a run, so that it ends no other
CLEAN_UP_SECONDS = 45.0  # for a scenario whose time is over, to take down what it has started
_SETTINGS = "compute_mode,persistence_mode,mig.mode.current,accounting.mode"


@dataclass(frozen=True, slots=True)
class Scenario:
    """seconds: at most, and it is not started with less than half of them left. cluster: starts a real Kubernetes."""

    name: str
    tests: Sequence[str]
    seconds: float
    cluster: bool = False


SCENARIOS = (
    Scenario("tenants", ["test_tenants.py"], 150),
    Scenario(
        "speed", ["test_model.py", "test_mps.py::test_what_a_neighbour_that_fills_the_card_costs_small_rounds"], 150
    ),
    Scenario("chart", ["test_cluster.py", "-k", "[pods] and not torch"], 270, cluster=True),
    Scenario("card", ["test_card.py", "test_containers.py"], 60),
    Scenario("frameworks", ["test_frameworks.py"], 150),
    Scenario("limits and faults", ["test_mps.py"], 300),
)


class Run:
    """Of scenarios, with their results in the folder `out`. `seconds`: for all of them."""

    def __init__(self, out: Path, seconds: float) -> None:
        self._out = out
        self._ends = time.monotonic() + seconds
        self._settings = settings()
        self._mark = f"{_RUN_ENV}={os.getpid()}-{time.time_ns()}"
        today = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"
        machine = {"date": today, "card": card(), "settings": self._settings}
        self.document: dict[str, Any] = {"machine": machine, "scenarios": {}}

    def run(self, scenarios: Sequence[Scenario]) -> bool:
        """Whether all that ran went well."""
        for scenario in scenarios:
            remaining = self._ends - time.monotonic()
            if remaining < scenario.seconds / 2:
                self._record(scenario, f"skipped: {remaining:.0f} s are left", 0.0, {})
            elif scenario.cluster and (missing := missing_programs()):
                self._record(scenario, f"skipped: {missing} did not travel", 0.0, {})
            else:
                self._run(scenario, min(scenario.seconds, remaining))
        statuses = [entry["status"] for entry in self.document["scenarios"].values()]
        return not any(status.startswith(("failed", "cut off")) for status in statuses)

    def _run(self, scenario: Scenario, seconds: float) -> None:
        print(f"{scenario.name}: at most {seconds:.0f} s", flush=True)
        tests = [f"{HERE}/{word}" if word.startswith("test_") else word for word in scenario.tests]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]
        file = self._out / "running.json"  # stays where this process is ended
        mark, _, number = self._mark.partition("=")
        environment = {
            "CARDWISE_GPU_PYTHON": shutil.which("python3") or sys.executable,
            **os.environ,
            "CARDWISE_GPU_SETTINGS": "keep",
            RESULTS_ENV: str(file),
            mark: number,
        }
        began = time.monotonic()
        with (self._out / LOG).open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            try:
                status = "passed" if process.wait(seconds) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = f"cut off after {seconds:.0f} s"
                process.send_signal(signal.SIGINT)  # its fixtures end what they have started
                wait_or_kill(process, CLEAN_UP_SECONDS)
        written = json.loads(file.read_text()) if file.exists() else {}
        file.unlink(missing_ok=True)
        if status == "passed" and all(test["outcome"] == "skipped" for test in written.get("tests", {}).values()):
            status = "skipped"
        if remaining := self._end_remaining():
            status += f"; {remaining} processes that it left were ended"
        self._record(scenario, status, time.monotonic() - began, written)

    def _end_remaining(self) -> int:
        """Ends the run's processes that are still there, MPS daemons and servers among them. Returns how many."""
        count = 0
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended
                if self._mark.encode() in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    count += 1
        return count

    def _record(self, scenario: Scenario, status: str, seconds: float, written: Mapping[str, Any]) -> None:
        now = settings()
        if now != self._settings:
            self.document["machine"]["settings"] = f"CHANGED by {scenario.name}: {self._settings} before, {now} now"
        entry = {"rows": [], "tests": {}, **written, "status": status, "seconds": round(seconds, 1)}
        self.document["scenarios"][scenario.name] = entry
        results.write_json(self._out / FILE, self.document)
        (self._out / TABLES).write_text(results.tables(self.document))
        print(f"{scenario.name}: {status}, {seconds:.0f} s, {len(entry['rows'])} rows", flush=True)


def wait_or_kill(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def missing_programs() -> str:
    """Of a real Kubernetes, which cannot be built there; "" if all are here."""
    needed = {"kube": binaries.KUBE_NAMES[0], "containerd": "ctr", "helm": "helm", "nvidia": "nvidia-ctk"}
    cache = binaries.cache_root()
    return ", ".join(name for name, program in needed.items() if not list(cache.glob(f"{name}-*/{program}")))


def card() -> str:
    return _nvidia_smi("name,memory.total,driver_version")


def settings() -> str:
    """The settings of the card that a test might change."""
    return _nvidia_smi(_SETTINGS)


def _nvidia_smi(fields: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown without nvidia-smi"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
