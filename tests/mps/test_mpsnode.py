"""Whether the node's files are believed: only while manager and daemon live."""

import os
import socket
import subprocess
import sys

import pytest

from cardwise.clock import BOOT
from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState, Scope, Status
from cardwise.gpus import mpsnode
from mps.daemon import directories
from mps.manager import Lock, RootTaken

HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"


@pytest.fixture
def home(folder):
    """A card whose files say Ready, and a socket that listens as a daemon's does."""
    made = mps.folder(str(folder), "GPU-1")
    home = folder / made.name
    directories.prepare(home)
    (folder / mps.LOCK).touch()
    write(home, MpsState.READY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(home / mps.CLIENTS / mps.CONTROL))
    listener.listen()
    yield home, listener
    listener.close()


def write(home, state: MpsState) -> None:
    status = Status(uuids=("GPU-1",), scope=Scope.CARD, state=state, checked=BOOT.now(), valid_seconds=60.0)
    directories.write_status(home, status)


def manager(folder):
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / mps.LOCK)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    held.stdout.readline()
    return held


def test_a_killed_manager_and_a_dead_daemon_are_noticed_at_once(folder, home):
    path, listener = home
    assert "no MPS manager runs" in mpsnode.problem(folder, "GPU-1")
    held = manager(folder)
    assert mpsnode.problem(folder, "GPU-1") == ""
    assert "does not serve card GPU-2" in mpsnode.problem(folder, "GPU-2")
    listener.close()
    assert "takes no connection" in mpsnode.problem(folder, "GPU-1")
    assert "is Ready, not Off" in mpsnode.problem(folder, "GPU-1", wanted=MpsState.OFF)
    write(path, MpsState.OFF)
    assert mpsnode.problem(folder, "GPU-1", wanted=MpsState.OFF) == "", "no daemon is asked where none should be"
    held.kill()
    held.communicate()
    assert "no MPS manager runs" in mpsnode.problem(folder, "GPU-1", wanted=MpsState.OFF)


def test_asking_does_not_trouble_the_daemon(folder, home):
    _, listener = home
    assert mpsnode.answers(folder / home[0].name / mps.CLIENTS)
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_there_is_one_manager_for_a_root(folder):
    first, second = Lock(folder), Lock(folder)
    first.take()
    with pytest.raises(RootTaken):
        second.take()
    assert mpsnode.manager_lives(folder)
    first.release()
    assert not mpsnode.manager_lives(folder), "and asking held nothing"
    second.take()
    assert not second.lost()
    (folder / mps.LOCK).unlink()
    assert second.lost()
    Lock(folder).release()
    assert second.lost(), "another one's is there"
    second.release()


def test_folders_are_open_to_all_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        directories.prepare(folder / "a" / "b")
    finally:
        os.umask(before)
    for path in (folder / "a", folder / "a" / "b", folder / "a" / "b" / "pipe"):
        assert path.stat().st_mode & 0o777 == 0o755
