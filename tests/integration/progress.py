"""How far a long run is: how many tests have ended, how long the last one took, and what runs beside it.

A plugin of pytest, for runs with tests of this folder and for `make unit`.
"""

from collections import defaultdict

import pytest
from _pytest.terminal import TerminalReporter

_LONG = 1.0  # seconds
_OFTEN = 100  # tests


class Progress:
    """In place of pytest's dots, in the process that reports: a line for each test that took long or did not pass, and
    for each hundredth.
    """

    def __init__(self, reporter: TerminalReporter) -> None:
        self._reporter = reporter
        self._total = self._done = 0
        self._running: set[str] = set()
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> object:
        status = yield
        return (status[0], "", "") if status else status

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._done += 1
        self._running.discard(nodeid)
        outcome, seconds = self._outcomes.get(nodeid, ""), self._seconds[nodeid]
        if outcome or seconds > _LONG or not self._done % _OFTEN:
            others = "".join(f"; now {_short(process)}" for process in sorted(self._running))
            line = f"[{self._done}/{self._total}] {seconds:6.1f} s  {_short(nodeid)} {outcome}{others}"
            self._reporter.write_line(line, red=outcome == "failed")


def _short(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    return f"{file.rpartition('/')[2]}::{test.rpartition('@')[0] or test}"


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(reporter))
