"""What NVIDIA's libcuda makes of a daemon that is not there, cannot serve or is frozen."""

import signal
import subprocess
import sys

import pytest

from cardwise.core import mps
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
                env=program.environment,
                capture_output=True,
                timeout=seconds,
                check=True,
            )
            return int(done.stdout)

        return code

    def test_without_a_daemon_they_go_without_mps_and_without_a_word(self, program, init):
        assert init() == self.NO_DEVICE, "as if MPS had never been asked for; with a card it would compute unlimited"
        program.pipe.mkdir()
        assert init() == self.NO_DEVICE
        program.start().kill()
        assert (program.pipe / mps.CONTROL).exists()
        assert init() == self.NO_DEVICE, "a stale socket is nobody's"

    def test_a_server_that_cannot_start_fails_them(self, process, init):
        (process.folder / "log" / "server-fails").touch()
        assert init() == self.CONNECTION_FAILED
        log = process.log.read_text()
        assert log.count("Starting new server") > 1, "after some attempts"

    def test_a_server_that_is_never_ready_and_a_frozen_daemon_hang_them(self, process, init):
        with pytest.raises(subprocess.TimeoutExpired):
            init(3.0)
        process.daemon.signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            init(3.0)
