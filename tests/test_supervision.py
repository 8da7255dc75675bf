"""Threads of the parts do not end by an exception, whatever fails in them."""

import ast
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cardwise import supervision
from cardwise.supervision import supervised_thread
from tests.fakes.clock import FakeClock

ROOT = Path(__file__).parents[1]
PARTS = ("cardwise", "extender", "webhook", "deviceplugin", "mps")
# Threads that do one thing and end: file, and the name of the thread.
ONE_SHOT = {
    ("cardwise/supervision.py", None),
    ("cardwise/gpus/calls.py", None),
    ("extender/process.py", "lease-release"),
}


class FailingLogger:
    """A logger whose every line fails."""

    def __getattr__(self, name: str):
        def fail(*_: object, **__: object) -> None:
            raise OSError("cannot log")

        return fail


def test_a_loop_that_raises_runs_again_after_growing_pauses():
    clock = FakeClock()
    began: list[float] = []

    def loop() -> None:
        began.append(clock.now() - 1000)
        if len(began) <= 7:
            raise RuntimeError("failed")

    with capture_logs() as lines:
        thread = supervised_thread(loop, "worker", clock)
        thread.start()
        clock.step_until(lambda: len(began) == 7)
        clock.step()
        thread.join(60)
    assert not thread.is_alive(), "a loop that returns has been stopped"
    assert thread.daemon
    assert began == [0, 1, 3, 7, 15, 31, 61, 91]
    assert len(lines) == 7
    assert lines[0]["thread"] == "worker"


def test_the_pause_is_short_again_after_the_loop_has_run_well():
    clock = FakeClock()
    began: list[float] = []

    def loop() -> None:
        began.append(clock.now() - 1000)
        if len(began) == 3:
            clock.sleep(100)
        if len(began) <= 3:
            raise RuntimeError("failed")

    thread = supervised_thread(loop, "worker", clock)
    thread.start()
    clock.step_until(lambda: len(began) == 3)
    clock.step()
    clock.step()
    thread.join(60)
    assert began == [0, 1, 3, 104]


def test_a_logger_that_fails_does_not_end_the_thread(monkeypatch, capsys):
    monkeypatch.setattr(supervision, "_log", FailingLogger())
    clock, done = FakeClock(), threading.Event()
    failures = [RuntimeError("the cause")]

    def loop() -> None:
        if failures:
            raise failures.pop()
        done.set()

    supervised_thread(loop, "worker", clock).start()
    clock.step()
    assert done.wait(60)
    assert "RuntimeError: the cause" in capsys.readouterr().err


def threads(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("threading.Thread"):
            yield {keyword.arg: keyword.value for keyword in node.keywords}


@pytest.mark.parametrize("part", PARTS)
def test_each_thread_is_supervised_or_does_one_thing(part):
    unsupervised = []
    for path in sorted((ROOT / part).rglob("*.py")):
        for keywords in threads(ast.parse(path.read_text())):
            name = keywords.get("name")
            thread = str(path.relative_to(ROOT)), name.value if isinstance(name, ast.Constant) else None
            if thread not in ONE_SHOT:
                unsupervised.append(thread)
    assert not unsupervised
