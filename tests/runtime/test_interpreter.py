"""The settings of Python's interpreter, and that each part applies them."""

import gc
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.runtime import interpreter

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    interval, threshold, files = sys.getswitchinterval(), gc.get_threshold(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


@pytest.mark.parametrize(("before", "after"), [(0.005, 0.001), (0.0005, 0.0005)])
def test_no_thread_keeps_another_from_running_for_long(before: float, after: float) -> None:
    """The thread that reads calls waits for the interpreter after each system call."""
    sys.setswitchinterval(before)
    interpreter.tune_interpreter()
    assert sys.getswitchinterval() == pytest.approx(after)


def test_garbage_collector_runs_rarely() -> None:
    gc.set_threshold(700, 10, 10)
    interpreter.tune_interpreter()
    assert gc.get_threshold() == (5_000, 10, 400)


@pytest.mark.parametrize(("allowed", "after"), [(1_024, 65_536), (2_048, 65_536), (None, None)])
def test_open_file_limit_suffices_for_connections(allowed: int | None, after: int | None) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed or hard_limit, hard_limit))
    interpreter.tune_interpreter()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(after or hard_limit, hard_limit), hard_limit)


@pytest.mark.parametrize("process", ["cardwise/runtime/http/serving.py", "deviceplugin/__main__.py", "mps/__main__.py"])
def test_each_process_that_serves_is_tuned_before_it_begins(process: str) -> None:
    """The webhook and the extender serve by `serving`."""
    before, called, _ = (ROOT / process).read_text().partition("interpreter.tune_interpreter()")
    assert called
    assert "health.start()" not in before
    assert "self.on_start()" not in before


def test_only_interpreter_module_changes_interpreter_settings() -> None:
    """Except the extender, which has a shorter switch interval."""
    settings = re.compile(r"setswitchinterval|gc\.set_threshold|RLIMIT_NOFILE")
    folders = ("cardwise", "webhook", "extender", "deviceplugin", "mps")
    files = {
        str(file.relative_to(ROOT))
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if settings.search(file.read_text())
    }
    assert files == {"cardwise/runtime/interpreter.py", "extender/process.py"}
