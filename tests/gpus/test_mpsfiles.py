"""Readiness by the files of the MPS manager: only while all of them agree, and manager and daemon run."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus import mpsfiles
from cardwise.gpus.mpsfiles import CardReadiness
from tests.fakes.clock import FakeClock
from tests.mps.agent.pods import ONE, TWO, Card

HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
NEED = MiB(8138)
CLOCK = FakeClock()  # the manager's clock; it stands still


@pytest.fixture
def folder():
    """Short, because the paths of pipes end at 87 bytes."""
    path = Path(tempfile.mkdtemp(prefix="cwmps-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def card(folder):
    """A card whose files say Ready and whose daemon listens."""
    (folder / mps.LOCK_FILE).touch()
    card = Card(folder, clock=CLOCK).runs().says()
    yield card
    card.dies()


def manager(folder):
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / mps.LOCK_FILE)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    held.stdout.readline()
    return held


def readiness(folder) -> CardReadiness:
    return mpsfiles.card_readiness(folder, ONE, memory_limit=NEED, clock=CLOCK)


def problem(folder, uuid=ONE, **requirements) -> str | None:
    return mpsfiles.unready_reason(folder, uuid, clock=CLOCK, **requirements)


def test_killed_manager_and_dead_daemon_are_detected_at_once(folder, card):
    assert "no MPS manager runs" in problem(folder)
    held = manager(folder)
    assert problem(folder) is None
    assert "does not serve GPU-2" in problem(folder, TWO)
    card.dies()
    assert "takes no connection" in problem(folder)
    assert "is Ready, not Off" in problem(folder, required_state=MpsState.OFF)
    card.says(state=MpsState.OFF)
    assert problem(folder, required_state=MpsState.OFF) is None, "no daemon is asked where none should be"
    held.kill()
    held.communicate()
    assert "no MPS manager runs" in problem(folder, required_state=MpsState.OFF)


def test_check_does_not_disturb_the_daemon(card):
    assert mpsfiles.is_daemon_listening(card.home / mps.CLIENTS_FOLDER)
    card.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        card.socket.accept()


# Without the lock, as in a pod.


def test_a_ready_card(folder, card):
    assert readiness(folder) == CardReadiness(None, MpsState.READY)


@pytest.mark.parametrize("state", [state for state in MpsState if state is not MpsState.READY])
def test_card_in_another_state_is_not_ready(folder, card, state):
    card.says(state=state, reason="because")
    assert readiness(folder).state is state
    assert f"is {state}, not Ready: because" in readiness(folder).reason


def test_stale_or_wrong_state_is_not_ready(folder, card):
    card.says(checked=CLOCK.now() - 30, valid_seconds=12.0)
    assert "has not checked GPU GPU-1 for over" in readiness(folder).reason
    card.says(checked=CLOCK.now(), valid_seconds=600.0, ceilings={ONE: MiB(8000)})
    assert "allows 8000 MiB, and 8138 MiB are needed" in readiness(folder).reason
    card.says(uuids=(TWO,), ceilings={TWO: NEED})
    assert "does not serve GPU-1" in readiness(folder).reason


def test_daemon_that_died_after_the_state_was_written(folder, card):
    card.dies()
    assert "takes no connection" in readiness(folder).reason
    assert readiness(folder).state is MpsState.READY
    card.runs()
    assert readiness(folder).reason is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": 99}', b"0" * 100_000])
def test_damaged_state_file_is_not_ready(folder, card, content):
    (card.home / mps.READY_FILE).write_bytes(content)
    assert readiness(folder) == CardReadiness("the MPS manager of the node does not serve GPU-1 (yet)", None)


def test_the_daemon_of_a_whole_node(folder, card):
    card.home = card.home.rename(folder / mps.NODE_FOLDER)
    assert readiness(folder).reason is None
