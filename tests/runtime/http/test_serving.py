"""The serving process and its parent: real processes, which report their progress on standard output."""

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from cardwise.runtime.http import serving
from cardwise.runtime.settings import HostPort
from tests.cluster import ports
from tests.runtime.http.loopback import PATIENCE, answer, client, get, send_get, until_refused

PROGRAM = Path(__file__).with_name("servingprogram.py")
IGNORED = [signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2, signal.SIGWINCH]


class Running:
    """`output` are the lines of its standard output, `logged` those of the other."""

    def __init__(self, **settings) -> None:
        self.port = settings.setdefault("port", ports.free(1)[0])
        self.slow = settings.get("slow", 0)
        self.output: list[str] = []
        self.logged: list[str] = []
        self._line_added = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PROGRAM.parents[3],
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])},
        )
        pipes = ((self.process.stdout, self.output), (self.process.stderr, self.logged))
        self._readers = [threading.Thread(target=self._read, args=pipe_arguments) for pipe_arguments in pipes]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                with self._line_added:
                    lines.append(line.rstrip("\n"))
                    self._line_added.notify_all()

    def until(self, *words: str) -> None:
        """Wait until the process has printed exactly these words."""
        with self._line_added:
            assert self._line_added.wait_for(lambda: len(self.output) >= len(words), PATIENCE), self.logged
            assert self.output == list(words)

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()


def connect_and_get(port: int, path: str) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), PATIENCE)
    send_get(line, path)
    return line


def answered_by(port: int, context: ssl.SSLContext | None = None) -> tuple[str, int]:
    """The thread and the process."""
    _, thread, process = get(port, "/x", context).decode().split()
    return thread, int(process)


@pytest.fixture
def running() -> Iterator[type[Running]]:
    started: list[Running] = []

    def run(**settings) -> Running:
        started.append(Running(**settings))
        return started[-1]

    yield run
    for program in started:
        program.process.kill()
        program.ended()


def test_the_slow_address_has_threads_of_its_own_and_both_ask_for_certificates(running, certificates):
    server = running(slow=ports.free(1)[0], tls=str(certificates), client_ca=True)
    server.until("app", "start")
    known, nobody = client(certificates), client(certificates, show=False)
    waiting = [threading.Thread(target=get, args=(server.slow, "/wait", known)) for _ in range(6)]
    for thread in waiting:
        thread.start()
    server.until("app", "start", *["waits"] * 3)  # as many as there are slow threads
    for _ in range(5):
        assert answered_by(server.port, known)[0].startswith("fast_")
    for port in (server.port, server.slow):
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            get(port, "/x", nobody)
    get(server.port, "/release", known)
    for thread in waiting:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert answered_by(server.slow, known)[0].startswith("slow_")
    assert server.stop() == 0
    assert server.output == ["app", "start", *["waits"] * 6, "stop"]
    assert {json.loads(line)["component"] for line in server.logged} == {"test"}


def test_prompt_calls_have_own_threads(running):
    server = running()
    server.until("app", "start")
    waiting = [threading.Thread(target=get, args=(server.port, "/wait")) for _ in range(2)]
    for thread in waiting:
        thread.start()
    server.until("app", "start", "waits", "waits")  # all other threads are busy
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    assert get_body(line, "/prompt").startswith("/prompt prompt_")
    server.process.send_signal(signal.SIGTERM)  # this releases the waiting calls, which are answered
    assert get_body(line, "/x").startswith("/x fast_")
    for thread in waiting:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    line.close()
    assert server.ended() == 0


def get_body(line: http.client.HTTPConnection, path: str) -> str:
    line.request("GET", path)
    return line.getresponse().read().decode()


def test_sigterm_refuses_new_clients_and_answers_waiting_ones(running):
    server = running(graceful=60)
    server.until("app", "start")
    length = 100_000
    with (
        connect_and_get(server.port, "/wait") as waiting,
        socket.create_connection(("127.0.0.1", server.port)) as early,
    ):
        server.until("app", "start", "waits")
        early.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length)
        server.process.send_signal(signal.SIGTERM)
        until_refused(server.port)  # otherwise others would wait in a queue that no thread serves
        assert server.process.poll() is None
        early.sendall(b"x" * length)
        for line in (early, waiting):  # the calls wait for the stop
            answer(line)
    assert server.ended() == 0
    assert server.output == ["app", "start", "waits", "stop"]


def test_gunicorn_worker_signals_are_ignored(running):
    server = running()
    server.until("app", "start")
    worker = answered_by(server.port)[1]
    for process in (server.process.pid, worker):
        status = Path(f"/proc/{process}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert [name for name in IGNORED if not ignored >> (name - 1) & 1] == []
        for name in IGNORED:
            os.kill(process, name)
    assert answered_by(server.port)[1] == worker
    assert server.stop() == 0
    assert server.output == ["app", "start", "stop"]


@pytest.mark.parametrize("way", ["stopped", "stuck"])
def test_a_serving_process_that_hangs_is_replaced(running, way):
    server = running()
    server.until("app", "start")
    with connect_and_get(server.port, "/wait") as waiting:
        server.until("app", "start", "waits")
        hanging = answered_by(server.port)[1]
        if way == "stopped":
            os.kill(hanging, signal.SIGSTOP)
        else:
            get(server.port, "/stuck")
        with contextlib.suppress(ConnectionResetError):
            assert waiting.recv(1) == b""  # the waiting client gets an error
    server.until("app", "start", "waits", "app", "start")
    assert answered_by(server.port)[1] != hanging
    assert server.stop() == 0
    assert server.output == ["app", "start", "waits", "app", "start", "stop"]
    log = "\n".join(server.logged)
    assert "replacing the serving process: it hangs" in log
    if way == "stuck":  # the stacks contain the line where the waiting thread stood
        assert 'servingprogram.py", line' in log


def test_a_call_that_hangs_ends_with_the_graceful_timeout_and_stop_still_runs(running):
    server = running(graceful=10, hangs=True)
    server.until("app", "start")
    with connect_and_get(server.port, "/wait"):
        server.until("app", "start", "waits")
        assert server.stop() == 0
    assert server.output == ["app", "start", "waits", "stop"]


def test_failure_at_start_ends_the_process(running):
    server = running(fail=True)
    assert server.ended() != 0
    assert "cannot start" in "\n".join(server.logged)


def test_client_ca_needs_a_ca():
    with pytest.raises(ValueError, match="client_ca"):
        serving.Server(lambda: lambda environ, start: [], [HostPort("", 1)], max_body_bytes=1, client_ca=True)
