"""How a control daemon starts, what keeps it from it, and who may talk to it."""

import fcntl
import os
import shutil
import subprocess

import pytest

from cardwise.core import mps
from cardwise.gpus import mpsnode
from mps import homes, processes
from mps.control import Refused, check
from tests.mps.contract.programs import SECONDS

NOBODY = 65534
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"  # whose interpreter every user may run


class TestStart:
    def test_it_runs_in_the_foreground_and_answers(self, running):
        assert running.started[0].poll() is None
        assert running.control.percentage() == "100.0"
        assert running.control.servers() == []
        assert "Starting control daemon" in (running.folder / "log" / "daemon.log").read_text()
        assert (running.pipe / "control").stat().st_mode & 0o777 == 0o666, "any client of the folder may talk to it"

    def test_it_is_found_by_its_folder_without_a_pid_file(self, running):
        (found,) = processes.daemons(running.pipe)
        assert found.pid == running.started[0].pid
        assert (running.pipe / "nvidia-cuda-mps-control.pid").exists() == (running.driver >= 550)

    def test_a_pipe_folder_of_88_bytes_fails_without_a_word(self, world):
        long = world.folder / ("p" * (88 - len(str(world.folder)) - 1))
        environment = world.environment | {mps.PIPE_ENV: str(long)}
        done = subprocess.run(
            [world.program, "-d"],
            env=environment,
            capture_output=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 1
        assert not list(world.folder.glob("p*/control"))

    def test_of_a_path_to_the_pipe_folder_only_the_last_part_is_made(self, world):
        deep = world.folder / "not" / "there"
        done = subprocess.run(
            [world.program, "-f"],
            env=world.environment | {mps.PIPE_ENV: str(deep)},
            capture_output=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode != 0
        assert not deep.parent.exists()

    @pytest.mark.parametrize(("written", "read"), [("50", "50.0"), ("abc", "100.0")])
    def test_what_its_environment_says_counts_and_is_not_always_told(self, world, monkeypatch, written, read):
        monkeypatch.setenv(mps.PERCENT_ENV, written)
        monkeypatch.setenv(mps.LIMIT_ENV, "0=2G")
        world.start()
        assert world.control.percentage() == read, "garbage is passed over in silence"
        assert world.control.ceiling(0) is None, "it is handed to servers all the same"

    def test_a_second_one_says_that_there_is_one(self, running):
        done = running.run("-f")
        assert (done.returncode, b"already running" in done.stdout) == (1, True)

    def test_files_of_a_dead_one_are_in_nobodys_way(self, running):
        running.started[0].kill()
        running.started[0].wait()
        assert (running.pipe / "control").exists()
        assert not mpsnode.answers(running.pipe)
        running.start()
        assert running.control.servers() == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
    def test_another_user_may_ask_and_with_535_change_limits_too(self, running, folder):
        program = shutil.copy(running.program, folder)
        environment = running.environment | {"PATH": SYSTEM_PATH}

        def said(command: str) -> str:
            line = command.encode() + b"\n"
            asked = subprocess.run([program], input=line, env=environment, user=NOBODY, capture_output=True, check=True)
            return asked.stdout.decode().strip()

        assert said("get_default_active_thread_percentage") == "100.0"
        for forbidden in ("quit", "start_server -uid 0"):
            with pytest.raises(Refused, match="rivilege"):
                check(forbidden, said(forbidden))
        said("set_default_active_thread_percentage 10")
        said("set_default_device_pinned_mem_limit 0 3G")
        limits = running.control.percentage(), running.control.ceiling(0)
        assert limits == (("10.0", 3072) if running.driver == 535 else ("100.0", None))

    def test_a_lock_that_any_client_may_take_keeps_it_from_starting(self, running):
        running.started[0].kill()
        running.started[0].wait()
        with (running.pipe / "control_lock").open() as of_a_client:
            fcntl.lockf(of_a_client, fcntl.LOCK_SH)
            done = running.run("-f")
            assert (done.returncode, b"already running" in done.stdout) == (1, True)
            homes.empty(running.pipe)
            running.start()
            assert running.control.servers() == []

    def test_an_option_that_is_not_known_starts_nothing_and_ends_with_rc_0(self, world):
        done = world.run("-f", "-nonsense")
        if world.driver >= 580:
            assert done.returncode == 0
        assert not mpsnode.answers(world.pipe)

    def test_multi_user_mode_is_in_the_help_where_there_is_one(self, world):
        said = world.run("-h")
        assert (b"multiuser" in said.stdout + said.stderr) == (world.driver >= 580)
