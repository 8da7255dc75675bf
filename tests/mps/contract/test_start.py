"""How a control daemon starts, what keeps it from it, and who may talk to it."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cardwise.core.api import mps
from cardwise.gpus import mpsfiles
from mps.daemon import directories
from mps.host.control import CommandRefused, check_answer
from mps.host.processes import LOCAL
from tests.mps.contract.programs import SECONDS

NOBODY = 65534
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"  # whose interpreter every user may run


class TestStart:
    @pytest.mark.parametrize(("written", "read"), [("50", "50.0"), ("abc", "100.0")])
    def test_what_its_environment_says_counts_and_is_not_always_told(self, world, monkeypatch, written, read):
        monkeypatch.setenv(mps.PERCENT_ENV, written)
        monkeypatch.setenv(mps.LIMIT_ENV, "0=2G")
        world.start()
        assert world.control.percentage() == read, "garbage is passed over in silence"
        assert world.control.ceiling(0) is None, "it is handed to servers all the same"

    def test_files_of_a_dead_one_are_in_nobodys_way(self, running):
        running.kill()
        assert (running.pipe / "control").exists()
        assert not mpsfiles.is_daemon_listening(running.pipe)
        running.start()
        assert running.control.servers() == []


class TestProgram:
    """As a process."""

    def test_it_runs_in_the_foreground_and_answers(self, process):
        assert process.daemon.is_alive()
        assert process.control.percentage() == "100.0"
        assert process.control.servers() == []
        assert "Starting control daemon" in process.log.read_text()
        assert (process.pipe / "control").stat().st_mode & 0o777 == 0o666, "any client of the folder may talk to it"
        (daemon,) = process.host.daemons(process.pipe)
        assert daemon.pid == process.daemon.pid
        assert (process.pipe / "nvidia-cuda-mps-control.pid").exists() == (process.driver >= 550)

    def test_a_pipe_folder_of_88_bytes_fails_without_a_word(self, program):
        long = program.folder / ("p" * (88 - len(str(program.folder)) - 1))
        assert program.run("-d", CUDA_MPS_PIPE_DIRECTORY=str(long)).returncode == 1
        assert not list(program.folder.rglob("control"))

    def test_of_a_path_to_the_pipe_folder_only_the_last_part_is_made(self, program):
        deep = program.folder / "not" / "there"
        assert program.run("-f", CUDA_MPS_PIPE_DIRECTORY=str(deep)).returncode != 0
        assert not deep.parent.exists()

    def test_a_second_one_says_that_there_is_one(self, process):
        done = process.run("-f")
        assert (done.returncode, b"already running" in done.stdout) == (1, True)

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
    def test_another_user_may_ask_and_with_535_change_limits_too(self, process, folder):
        front = shutil.copy(process.program, folder)
        environment = process.environment | {"PATH": SYSTEM_PATH}

        def answer_to(command: str) -> str:
            line = command.encode() + b"\n"
            completed = subprocess.run(
                [front], input=line, env=environment, user=NOBODY, capture_output=True, check=True
            )
            return completed.stdout.decode().strip()

        assert answer_to("get_default_active_thread_percentage") == "100.0"
        for forbidden in ("quit", "start_server -uid 0"):
            with pytest.raises(CommandRefused, match="rivilege"):
                check_answer(forbidden, answer_to(forbidden))
        answer_to("set_default_active_thread_percentage 10")
        answer_to("set_default_device_pinned_mem_limit 0 3G")
        limits = process.control.percentage(), process.control.ceiling(0)
        assert limits == (("10.0", 3072) if process.driver == 535 else ("100.0", None))

    def test_a_lock_that_any_client_may_take_keeps_it_from_starting(self, process):
        process.kill()
        with (process.pipe / "control_lock").open() as of_a_client:
            fcntl.lockf(of_a_client, fcntl.LOCK_SH)
            done = process.run("-f")
            assert (done.returncode, b"already running" in done.stdout) == (1, True)
            directories.reset_pipe(process.folder)
            process.start()
            assert process.control.servers() == []

    def test_an_option_that_is_not_known_starts_nothing_and_ends_with_rc_0(self, program):
        done = program.run("-f", "-nonsense")
        if program.driver >= 580:
            assert done.returncode == 0
        assert not mpsfiles.is_daemon_listening(program.pipe)

    def test_multi_user_mode_is_in_the_help_where_there_is_one(self, program):
        answer_to = program.run("-h")
        assert (b"multiuser" in answer_to.stdout + answer_to.stderr) == (program.driver >= 580)

    def test_a_world_that_is_closed_leaves_no_process(self, process):
        process.server()
        process.front.send("start_server -uid 1000", SECONDS)
        process.close()
        everyone = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        leftover_pids = [pid for pid in everyone if LOCAL.environment(pid).get(mps.PIPE_ENV) == str(process.pipe)]
        assert leftover_pids == []
