"""The folders that containers mount: who may read them."""

import os
import subprocess

import pytest

from cardwise.core.api import mps
from mps.daemon import directories


def test_folders_are_open_to_all_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        directories.prepare_folders(folder / "a" / "b")
    finally:
        os.umask(before)
    for path in (folder / "a", folder / "a" / "b", folder / "a" / "b" / "pipe"):
        assert path.stat().st_mode & 0o777 == 0o755


def test_the_next_daemon_finds_its_folder_of_pipes_empty_and_in_order(folder):
    directories.prepare_folders(folder)
    pipe, precious = folder / mps.PIPE_FOLDER, folder / "precious"
    precious.mkdir()
    (precious / "file").touch()
    kept = pipe.stat()
    (pipe / "control_lock").touch()
    (pipe / "link").symlink_to(precious)
    (pipe / "deep" / "er").mkdir(parents=True)
    os.mkfifo(pipe / "log")
    pipe.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(pipe, 1000, 1000)
    directories.reset_pipe(folder)
    assert not list(pipe.iterdir())
    status = pipe.stat()
    assert os.path.samestat(status, kept)
    assert (status.st_mode, status.st_uid, status.st_gid) == (kept.st_mode, kept.st_uid, kept.st_gid)
    assert (precious / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_what_a_share_agent_has_mounted_over_the_folder_of_pipes_stays_there(folder):
    """The kernel takes mounts in other namespaces away with the folder that they are on."""
    directories.prepare_folders(folder)
    pipe = folder / mps.PIPE_FOLDER
    script = f"mount -t tmpfs none {pipe} && echo covered && read _ && ls {pipe}"
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout.readline() == "covered\n"
        directories.reset_pipe(folder)
        (pipe / mps.CONTROL_SOCKET).touch()
        assert agent.communicate("\n")[0] == "", "it sees the next daemon's files"
