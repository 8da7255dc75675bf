"""What a run on a lent machine has found: a file of JSON that is whole after each test, and its tables of Markdown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

FILE = "results.json"
TABLES = "results.md"
RESULTS_ENV = "CARDWISE_GPU_RESULTS"  # where the tests of one scenario write theirs


class Report(Protocol):
    """Of pytest, on one phase of a test."""

    nodeid: str
    when: str
    outcome: str
    duration: float
    longrepr: Any


class ScenarioResults:
    """A plugin of pytest: after each test, the file has what is measured and how each test ended."""

    def __init__(self, path: Path, measured: Sequence[tuple[str, str]]) -> None:
        self._path = path
        self._measured = measured
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Report) -> None:
        name = report.nodeid.rpartition("/")[2]
        test = self._tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 1)
        if report.outcome != "passed" and test["outcome"] == "passed":
            test |= {"outcome": report.outcome, "reason": _reason(report)}
        if report.when == "teardown":
            write_json(self._path, {"rows": list(self._measured), "tests": self._tests})


def write_json(path: Path, document: object) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(document, indent=1))
    scratch.replace(path)


def tables(document: Mapping[str, Any]) -> str:
    """The rows for docs/measured/gpu.md, a table for each scenario, and what did not go well."""
    machine = document["machine"]
    lines = [f"{machine['date']}, {machine['card']}; settings of the machine: {machine['settings']}."]
    for name, scenario in document["scenarios"].items():
        lines += ["", f"## {name.capitalize()}", "", f"{scenario['status']}, {scenario['seconds']:.0f} s.", ""]
        rows = [f"| {label} | {amount} |" for label, amount in scenario["rows"]]
        lines += ["| what | |", "|---|---|", *rows] if rows else ["Nothing was measured."]
        others = {name: test for name, test in scenario["tests"].items() if test["outcome"] != "passed"}
        lines += [""] if others else []
        lines += [f"- {test['outcome']}: `{name}`: {test['reason']}" for name, test in others.items()]
    return "\n".join(lines) + "\n"


def _reason(report: Report) -> str:
    """One line: of a skip its reason, of a failure its error."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else str(report.longrepr)).splitlines()[0][:300]
