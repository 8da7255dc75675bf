"""What NVIDIA's libcuda makes of a daemon that is not there, cannot serve or is frozen."""

import signal
import subprocess
import sys

import pytest

from cardwise.core.api import mps
from mps.daemon import directories
from tests.mps import fetch


class TestClients:
    """Of NVIDIA's libcuda, whose first call goes to the daemon before it looks for a card."""

    NO_DEVICE, CONNECTION_FAILED = 100, 805  # CUDA_ERROR_NO_DEVICE, CUDA_ERROR_MPS_CONNECTION_FAILED
    INIT = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cuInit(0))"

    @pytest.fixture
    def init(self, program):
        library = fetch.library(program.program) if program.real else None
        if library is None:
            pytest.skip("needs NVIDIA's libcuda")

        def code(seconds: float = 120.0) -> int:
            done = subprocess.run(
                [sys.executable, "-c", self.INIT, library],
                env=program.environment | {mps.PIPE_ENV: str(program.folder / mps.CLIENTS_FOLDER)},
                capture_output=True,
                timeout=seconds,
                check=True,
            )
            return int(done.stdout)

        return code

    @pytest.fixture
    def shared(self, program):
        """A daemon of which clients see its socket only."""
        directories.prepare_folders(program.folder)
        program.start()
        directories.open_to_clients(program.folder)
        return program

    def test_without_a_daemon_they_go_without_mps_and_without_a_word(self, program, init):
        assert init() == self.NO_DEVICE, "as if MPS had never been asked for; with a card it would compute unlimited"
        directories.prepare_folders(program.folder)
        assert init() == self.NO_DEVICE
        program.start()
        directories.open_to_clients(program.folder)
        program.kill()
        assert (program.folder / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET).exists()
        assert init() == self.NO_DEVICE, "a stale socket is nobody's"

    def test_a_server_that_cannot_start_fails_them(self, shared, init):
        (shared.folder / "log" / "server-fails").touch()
        assert init() == self.CONNECTION_FAILED
        log = shared.log.read_text()
        assert log.count("Starting new server") > 1, "after some attempts"

    def test_a_server_that_is_never_ready_and_a_frozen_daemon_hang_them(self, shared, init):
        with pytest.raises(subprocess.TimeoutExpired):
            init(3.0)
        shared.daemon.signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            init(3.0)
