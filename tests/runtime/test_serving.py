"""Real gunicorn in a process of its own."""

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
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cardwise.runtime import serving
from cardwise.runtime.certstore import DirStore
from cardwise.runtime.settings import HostPort
from cardwise.runtime.tls import Rotator
from tests.fakes.clock import FakeClock
from tests.runtime.attacking import BODY, HEAD, HELLO, trickling

PROGRAM = Path(__file__).with_name("servingprogram.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    def __init__(self, **settings) -> None:
        self.port = settings.setdefault("port", free_port())
        self.slow = settings.get("slow", 0)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PROGRAM.parents[2],
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        )

    def ready(self) -> "Running":
        until = time.monotonic() + 15
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert time.monotonic() < until
                assert self.process.poll() is None, self.process.stderr.read()
                time.sleep(0.02)
            else:
                return self

    def stop(self) -> tuple[str, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise


def get(port: int, path: str, context: ssl.SSLContext | None = None, timeout: float = 10) -> str:
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout, context=context)
        if context
        else http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    )
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200
        return response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def running():
    started: list[Running] = []

    def run(**settings) -> Running:
        started.append(Running(**settings))
        return started[-1].ready()

    yield run
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


def test_fast_port_answers_while_the_slow_port_is_saturated(running):
    server = running(slow=free_port())
    waiting = [threading.Thread(target=get, args=(server.slow, "/wait"), kwargs={"timeout": 30}) for _ in range(6)]
    for thread in waiting:
        thread.start()
    time.sleep(0.3)
    # Clients that connect and say nothing hold no thread either.
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for _ in range(5):
        started = time.monotonic()
        assert "/fast fast_" in get(server.port, "/fast")
        assert time.monotonic() - started < 3.0
    for each in silent:
        each.close()
    get(server.port, "/release")
    out, err = server.stop()
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
    assert out.split() == ["app", "start", "stop"]
    assert server.process.returncode == 0
    for line in err.splitlines():
        assert json.loads(line)["component"] == "test"


def test_slow_requests_run_in_the_slow_threads_and_connections_stay_open(running):
    server = running(slow=free_port())
    connection = http.client.HTTPConnection("127.0.0.1", server.slow, timeout=5)
    for _ in range(3):
        connection.request("POST", "/body", body=b"x" * 100_000)
        response = connection.getresponse()
        assert response.getheader("Connection", "").lower() != "close"
        assert b" slow_" in response.read()
    connection.close()
    server.stop()


def test_the_application_can_have_a_connection_closed_after_its_answer(running):
    server = running()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    for path, closed in (("/fast", False), ("/close", True)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.getheader("Connection") == ("close" if closed else None)
        assert response.read().decode().startswith(path)
        assert (connection.sock is None) is closed  # as http.client does when it is told so
    server.stop()


def test_posts_of_all_forms_are_answered_in_turn_on_one_connection(running):
    server = running()
    head = "POST /echo HTTP/1.1\r\nHost: x\r\n"
    forms = [  # what Go's clients send, and what only gunicorn reads
        (f"{head}Content-Length: 3\r\n\r\none", b"one"),
        (f"{head}Content-Length: 4\r\nX-Y: a\r\nX-Y: b\r\n\r\nfour", b"four"),
        (f"{head}Transfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\n\r\n", b"two"),
        (f"{head}Content-Length: 5\r\n\r\nthree", b"three"),
        ("GET /get HTTP/1.1\r\nHost: x\r\n\r\n", b"/get"),
    ]
    for turns in (forms, forms[::-1], forms * 2):
        with socket.create_connection(("127.0.0.1", server.port), 10) as line:
            for request, said in turns:
                line.sendall(request.encode())
                answer = http.client.HTTPResponse(line)
                answer.begin()
                assert answer.read().startswith(said)
            # Two at once: the second one is there before the first is answered.
            line.sendall((forms[0][0] + forms[3][0]).encode())
            for said in (b"one", b"three"):
                answer = b""
                while not answer.endswith(said):
                    more = line.recv(1)
                    assert more, answer
                    answer += more
    server.stop()


def test_a_call_that_the_application_fails_on_ends_its_connection_and_nothing_else(running):
    server = running()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for path, status in (("/echo", 200), ("/fail", 500), ("/echo", 200), ("/echo", 200), ("/fail", 500)):
        connection.request("POST", path, body=b"{}")
        response = connection.getresponse()
        assert response.status == status
        assert b"Traceback" not in response.read()
    _, err = server.stop()
    assert "the application has failed" in err
    assert server.process.returncode == 0


def ask(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/fast")
    return connection.getresponse().read().decode()


def test_threads_stay_with_busy_connections_but_never_all(running):
    server = running(threads=4)
    with contextlib.ExitStack() as lines:
        busy = [
            lines.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)))
            for _ in range(4)
        ]
        for connection in busy:
            ask(connection)

        # Two threads stay with the first that come, until they are silent for a while, as on a busy machine.
        def stayed() -> bool:
            return len({ask(busy[0]) for _ in range(30)}) == 1

        assert any(stayed() for _ in range(20)), "each call of one connection was answered by another thread"
        # The others go through the main loop and starve nobody.
        for _ in range(10):
            for connection in busy:
                assert "/fast fast_" in ask(connection)
            get(server.port, "/fast", timeout=30)
        time.sleep(0.3)  # longer than a thread stays
        for connection in busy:
            assert "/fast fast_" in ask(connection)
        # A thread that stays does not keep the server from its end.
        ask(busy[0])
        server.stop()
    assert server.process.returncode == 0


def test_sigterm_lets_a_running_request_finish(running):
    server = running()
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(get(server.port, "/nap")))
    thread.start()
    time.sleep(0.3)
    server.stop()
    thread.join(5)
    assert len(answers) == 1
    assert server.process.returncode == 0


def test_after_sigterm_who_connects_is_refused_at_once_and_who_was_there_is_answered(running):
    server = running(threads=2, graceful=60)
    get(server.port, "/fast")  # its worker is there: one that is being made does not hear what ends it
    length = 100_000
    with socket.create_connection(("127.0.0.1", server.port), 30) as early:
        early.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length)
        server.process.send_signal(signal.SIGTERM)
        sent, until = 0, time.monotonic() + 30
        while accepts(server.port):
            early.sendall(b"x")  # or it would be given up
            sent += 1
            assert time.monotonic() < until, "others would wait in a queue that nobody looks at"
            time.sleep(0.02)
        assert server.process.poll() is None
        early.sendall(b"x" * (length - sent))
        answer = http.client.HTTPResponse(early)
        answer.begin()
        assert answer.status == 200
        assert len(answer.read()) == length
        answer.close()
    server.stop()
    assert server.process.returncode == 0


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # it was in the queue when the socket was closed; the next one is refused
    return True


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTTIN", "SIGTTOU", "SIGUSR2", "SIGWINCH"])
def test_signals_that_would_start_or_end_workers_change_nothing(running, name):
    server = running()
    worker = int(get(server.port, "/x").split()[-1])
    os.kill(server.process.pid, signal.Signals[name])
    os.kill(worker, signal.Signals[name])
    time.sleep(1.5)  # gunicorn looks at signals once a second
    assert int(get(server.port, "/x").split()[-1]) == worker
    out, _ = server.stop()
    assert out.split() == ["app", "start", "stop"]
    assert server.process.returncode == 0


def worker_of(server: Running) -> int:
    """By asking it, for as long as it takes to get an answer."""
    until = time.monotonic() + 60
    while True:
        try:
            return int(get(server.port, "/x").split()[-1])
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < until
            assert server.process.poll() is None


@pytest.mark.parametrize("way", ["stopped", "stuck"])
def test_a_serving_process_that_hangs_is_replaced(running, way):
    server = running()
    waiting = socket.create_connection(("127.0.0.1", server.port))
    waiting.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
    hanging = worker_of(server)
    if way == "stopped":
        os.kill(hanging, signal.SIGSTOP)
    else:
        get(server.port, "/stuck")
    while worker_of(server) == hanging:
        pass
    with waiting, contextlib.suppress(ConnectionResetError):
        assert waiting.recv(1) == b""  # who waited is told so
    out, err = server.stop()
    assert out.split() == ["app", "start", "app", "start", "stop"]
    assert "the serving process hangs" in err
    if way == "stuck":  # where it stood: the thread that waits among the others
        assert 'servingprogram.py", line' in err
    assert server.process.returncode == 0


def test_request_that_hangs_ends_with_the_graceful_timeout_and_stop_still_runs(running):
    server = running(slow=free_port(), graceful=3)
    hanging = socket.create_connection(("127.0.0.1", server.slow))
    hanging.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.3)
    started = time.monotonic()
    out, _ = server.stop()
    assert time.monotonic() - started < 6
    assert out.split() == ["app", "start", "stop"]
    hanging.close()


def test_failure_at_start_ends_the_process(running):
    server = Running(fail=True)
    _, err = server.process.communicate(timeout=15)
    assert server.process.returncode != 0
    assert "cannot start" in err


def client_context(directory: Path, *, show: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    if show:
        context.load_cert_chain(directory / "client.crt", directory / "client.key")
    return context


def test_mutual_tls_refuses_a_client_without_certificate(running, tmp_path):
    Rotator(DirStore(tmp_path / "store"), ["127.0.0.1"], tmp_path / "tls", need_client=True).ensure()
    server = running(tls=str(tmp_path / "tls"), client_ca=True, slow=free_port())
    assert "/x" in get(server.port, "/x", client_context(tmp_path / "tls", show=True))
    assert "/x slow_" in get(server.slow, "/x", client_context(tmp_path / "tls", show=True))
    for port in (server.port, server.slow):
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            get(port, "/x", client_context(tmp_path / "tls", show=False))
    # A server certificate of the same CA is no client certificate.
    wrong = ssl.create_default_context(cafile=tmp_path / "tls" / "ca.crt")
    wrong.load_cert_chain(tmp_path / "tls" / "tls.crt", tmp_path / "tls" / "tls.key")
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        get(server.port, "/x", wrong)
    old = client_context(tmp_path / "tls", show=True)
    with pytest.warns(DeprecationWarning, match="TLS"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)):
        get(server.port, "/x", old)
    server.stop()


@pytest.mark.parametrize("client_ca", [True, False])
def test_connections_that_trickle_keep_nobody_from_an_answer(running, tmp_path, client_ca):
    """Many more than there are threads, in handshakes that never end."""
    Rotator(DirStore(tmp_path / "store"), ["127.0.0.1"], tmp_path / "tls", need_client=True).ensure()
    server = running(tls=str(tmp_path / "tls"), client_ca=client_ca, threads=4)
    context = client_context(tmp_path / "tls", show=client_ca)
    with trickling(server.port, 80, HELLO):
        for _ in range(3):
            assert "/x" in get(server.port, "/x", context, timeout=60)
    server.stop()


def test_calls_that_trickle_keep_nobody_from_an_answer(running):
    server = running(threads=4)
    with trickling(server.port, 80, HEAD, BODY):
        for _ in range(3):
            assert "/x" in get(server.port, "/x", timeout=60)
    server.stop()


def test_renewed_certificate_is_served_without_a_restart(running, tmp_path):
    def serial(port: int) -> int:
        context = ssl.create_default_context(cafile=tmp_path / "tls" / "ca.crt")
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            return int(secure.getpeercert()["serialNumber"], 16)

    now = datetime.now(UTC)
    store = DirStore(tmp_path / "store")
    Rotator(store, ["127.0.0.1"], tmp_path / "tls", clock=FakeClock(wall=now - timedelta(days=300))).ensure()
    server = running(tls=str(tmp_path / "tls"))
    first, worker = serial(server.port), get(server.port, "/x", client_context(tmp_path / "tls", show=False))
    assert serial(server.port) == first
    Rotator(store, ["127.0.0.1"], tmp_path / "tls").ensure()
    assert serial(server.port) != first
    assert get(server.port, "/x", client_context(tmp_path / "tls", show=False)).split()[-1] == worker.split()[-1]
    # Broken files: the last good certificate goes on.
    (tmp_path / "tls" / "tls.crt").unlink()
    (tmp_path / "tls" / "tls.crt").write_bytes(b"half of it")
    assert serial(server.port) != first
    server.stop()


def test_connections_that_ask_nothing_after_the_handshake_keep_no_thread(running, tmp_path):
    """Go's clients open more connections than they use in the end: whichever is free first gets the request."""
    Rotator(DirStore(tmp_path / "store"), ["127.0.0.1"], tmp_path / "tls").ensure()
    server = running(tls=str(tmp_path / "tls"))
    context = client_context(tmp_path / "tls", show=False)
    spare = [
        context.wrap_socket(socket.create_connection(("127.0.0.1", server.port), 5), server_hostname="127.0.0.1")
        for _ in range(6)
    ]
    time.sleep(0.3)
    started = time.monotonic()
    assert "/fast" in get(server.port, "/fast", context, timeout=5)
    assert time.monotonic() - started < 3.0
    for each in spare:  # and are as good as any other when they ask at last
        each.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert each.recv(100).startswith(b"HTTP/1.1 200")
        each.close()
    server.stop()


def test_client_ca_needs_a_ca():
    with pytest.raises(ValueError, match="client_ca"):
        serving.Server(lambda: lambda environ, start: [], [HostPort("", 1)], most_body=1, client_ca=True)
