"""What daemons say, repeated: it is bounded, nobody waits for it, and the next manager hears the last of it."""

import os
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from mps.daemon.daemonlog import DaemonOutput


@pytest.fixture
def output(tmp_path):
    output = DaemonOutput(tmp_path, "GPU-1")
    yield output
    output.close()


def heard(output: DaemonOutput) -> list[str]:
    with capture_logs() as lines:
        output.copy_lines()
    assert all(line["card"] == "GPU-1" for line in lines)
    return [line["event"] for line in lines]


def talk_without_end(daemon: int) -> NoReturn:
    while True:
        os.write(daemon, b"Cmd:something\n" * 100)


def test_whole_lines_are_repeated_with_the_card(output):
    daemon = output.open()
    os.write(daemon, b"one\n\ntwo\nthr")
    assert heard(output) == ["one", "two"]
    os.write(daemon, b"ee\n")
    assert heard(output) == ["three"]
    assert heard(output) == []


def test_a_tenant_that_makes_it_talk_fills_nothing_and_stops_nobody(output, tmp_path):
    daemon = output.open()
    with pytest.raises(BlockingIOError):
        talk_without_end(daemon)
    lines = heard(output)
    assert (len(lines), lines[-1]) == (201, "dropped further lines of a daemon")
    os.write(daemon, b"still there\n")
    while lines := heard(output):
        last = lines
    assert last[-1] == "still there"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_the_next_manager_hears_what_was_said_while_there_was_none(output, tmp_path):
    daemon = os.dup(output.open())
    output.close()
    os.write(daemon, b"nobody listens\n")
    watch_pods = DaemonOutput(tmp_path, "GPU-1")
    watch_pods.open()
    assert heard(watch_pods) == ["nobody listens"]
    watch_pods.close()
    os.close(daemon)


def test_before_it_is_opened_nothing_is_heard(output):
    assert heard(output) == []
