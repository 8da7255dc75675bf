"""Answering of calls by threads, and TLS certificates: over loopback, with a clock that stands still."""

import contextlib
import functools
import http.client
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import BinaryIO

import pytest
import structlog

from cardwise.runtime.http import httpcalls, serving
from cardwise.runtime.http.serving import TlsFiles
from cardwise.runtime.tls.certstore import DirStore
from cardwise.runtime.tls.tls import Rotator
from tests.fakes.clock import FakeClock
from tests.runtime.http.loopback import PATIENCE, Contexts, Serving, client, send_get, until


class Answering(Serving):
    """/echo returns the call; /thread returns the answering thread; /wait does so after waiting; /close ends the
    connection; /fail raises.
    """

    def app(self, environ, start_response):
        path = environ["PATH_INFO"]
        if path == "/wait":
            self.waiting.release()
            assert self.released.wait(PATIENCE)
            self.released.clear()
        elif path == "/close":
            environ[httpcalls.CLOSE_KEY]()
        elif path == "/fail":
            raise RuntimeError("the application has failed")
        start_response("200 OK", [])
        thread = threading.current_thread().name.encode()
        return [{"/echo": environ["wsgi.input"].read(), "/thread": thread, "/wait": thread}.get(path, path.encode())]


@pytest.fixture
def answering(serve) -> Callable[..., Answering]:
    return functools.partial(serve, kind=Answering)


def answer(reading: BinaryIO) -> bytes:
    """The next one. Each connection is read through one file, which may have buffered more than the test has read."""
    assert reading.readline().startswith(b"HTTP/1.1 200")
    return reading.read(int(http.client.parse_headers(reading)["Content-Length"]))


def test_posts_in_all_encodings_are_answered_in_order(answering):
    server = answering()
    head = "POST /echo HTTP/1.1\r\nHost: x\r\n"
    forms = [
        (f"{head}Content-Length: 3\r\n\r\none", b"one"),
        (f"{head}Content-Length: 4\r\nX-Y: a\r\nX-Y: b\r\n\r\nfour", b"four"),
        (f"{head}Transfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\n\r\n", b"two"),
        ("GET /get HTTP/1.1\r\nHost: x\r\n\r\n", b"/get"),
    ]
    for turns in (forms, forms[::-1], forms * 2):
        line = server.connect()
        with line.makefile("rb") as reading:
            for request, body in turns:
                line.sendall(request.encode())
                assert answer(reading) == body


def test_client_that_does_not_wait_for_the_response_gets_it_and_the_end(answering):
    """HTTP/1.1 lets a server close the connection; the client then knows which calls were not answered."""
    server = answering()
    line = server.connect()
    line.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\noneGET /two HTTP/1.1\r\nHost: x\r\n\r\n")
    with line.makefile("rb") as reading:
        head, _, body = reading.read().partition(b"\r\n\r\n")
    assert (head.startswith(b"HTTP/1.1 200"), b"\r\nConnection: close" in head, body) == (True, True, b"one")


@pytest.mark.parametrize("secure", [False, True])
def test_client_gets_100_continue_before_its_body(answering, certificates, secure):
    context = serving.server_context(certificates / "tls.crt", certificates / "tls.key", None)
    server = answering((lambda: context) if secure else None)
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    line = server.connect(context=client(certificates, show=False) if secure else None)
    with line.makefile("rb") as reading:
        for _ in range(3):
            line.sendall(head)
            assert [reading.readline(), reading.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
            line.sendall(b"body")
            assert answer(reading) == b"body"


def test_application_can_close_the_connection_after_its_response(answering):
    server = answering()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as connection:
        for path, closed in (("/get", False), ("/close", True)):
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.getheader("Connection") == ("close" if closed else None)
            assert response.read().decode() == path
            assert (connection.sock is None) is closed  # as http.client does with this header


def test_failing_call_ends_only_its_connection(answering, capsys):
    server = answering()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as connection:
        for path, status in (("/echo", 200), ("/fail", 500), ("/echo", 200), ("/echo", 200), ("/fail", 500)):
            connection.request("POST", path, body=b"{}")
            response = connection.getresponse()
            assert response.status == status
            assert b"Traceback" not in response.read()
    assert capsys.readouterr().out.count("RuntimeError: the application has failed") == 2


def test_a_thread_stays_with_a_connection_whose_next_call_is_there(answering):
    server = answering(threads=4)
    others = threading.Barrier(4)
    for _ in range(4):
        server.pool.submit(others.wait)  # all threads are idle; a call goes to the thread that has been idle longest
    until(lambda: server.pool._free == 4, "all threads are idle again")
    line = server.connect()
    with line.makefile("rb") as reading:
        for _ in range(10):
            send_get(line, "/wait")
            assert server.waiting.acquire(timeout=PATIENCE)
            send_get(line, "/thread")
            server.released.set()
            # In one round only: between rounds a thread stays for a tenth of a second.
            assert answer(reading) == answer(reading), "another thread had the call that was there"


def test_a_call_of_another_owner_runs_in_a_place_of_its_own_though_a_thread_stays_with_its_connection(answering):
    server = answering(threads=4, call_owner=lambda environ: environ["QUERY_STRING"])
    line = server.connect()
    send_get(line, "/wait?x")
    assert server.waiting.acquire(timeout=PATIENCE)
    for owner in ("x", "y", "x"):
        send_get(line, f"/wait?{owner}")  # the thread that answers the former call receives it
        server.released.set()
        assert server.waiting.acquire(timeout=PATIENCE)
        assert list(server.pool._running)[-1].owner == owner, "its owner is charged"
        assert list(server.server._clients["127.0.0.1"].flows) == [(server.pool, owner)]


def test_never_do_all_threads_stay_with_connections(answering):
    server = answering(threads=4)
    over, answered = threading.Event(), threading.Semaphore(0)

    def keeps_asking() -> None:
        line = server.connect()
        with line.makefile("rb") as reading:
            while not over.is_set():
                send_get(line, "/get")
                assert answer(reading) == b"/get"
                answered.release()

    with ThreadPoolExecutor() as pool:
        busy = [pool.submit(keeps_asking) for _ in range(4)]
        try:
            for _ in range(400):
                assert answered.acquire(timeout=PATIENCE)
            for _ in range(3):
                assert server.get("/get") == b"/get"
        finally:
            over.set()
        for future in busy:
            future.result(PATIENCE)


@pytest.fixture
def contexts(tmp_path) -> Contexts:
    """A server with certificates in `tmp_path` that the test renews."""
    old = FakeClock(wall=datetime.now(UTC) - timedelta(days=300))
    Rotator(DirStore(tmp_path / "store"), ["127.0.0.1"], tmp_path, need_client=True, clock=old).ensure_certificates()
    return serving._Contexts(TlsFiles.in_dir(tmp_path), client_ca=True)


def test_client_needs_a_client_certificate_and_tls_1_2(answering, tmp_path, contexts):
    server = answering(contexts)
    assert server.get("/get", context=client(tmp_path)) == b"/get"
    wrong = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    wrong.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")  # of the same CA, but a server's
    old = client(tmp_path)
    with pytest.warns(DeprecationWarning, match="TLS"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (client(tmp_path, show=False), wrong, old):
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            server.get("/get", context=context)


def test_idle_connections_occupy_no_thread(answering, tmp_path, contexts):
    """Go's clients open more connections than they use: the first free one gets the call."""
    server = answering(contexts, threads=1)
    spare = [server.connect(context=client(tmp_path)) for _ in range(6)]
    assert server.get("/get", context=client(tmp_path)) == b"/get"
    for line in spare:  # and their later calls are answered as usual
        send_get(line, "/get")
        with line.makefile("rb") as reading:
            assert answer(reading) == b"/get"


def test_renewed_certificate_is_served(answering, tmp_path, contexts):
    server = answering(contexts)

    def serial() -> int:
        return int(server.connect(context=client(tmp_path)).getpeercert()["serialNumber"], 16)

    first = serial()
    assert serial() == first
    Rotator(DirStore(tmp_path / "store"), ["127.0.0.1"], tmp_path, need_client=True).ensure_certificates()
    renewed = serial()
    assert renewed != first
    # While files are being changed, the last good certificate stays in use.
    (tmp_path / "tls.crt").unlink()
    (tmp_path / "tls.crt").write_bytes(b"half of it")
    assert serial() == renewed


@pytest.mark.parametrize(("served", "cut"), [(True, 300), (True, None), (False, 300), (False, None)])
def test_unreadable_files_are_neither_reloaded_nor_logged_per_connection(tmp_path, contexts, monkeypatch, served, cut):
    """Every client that reaches the port can connect, without a certificate."""
    clock, loads, load = FakeClock(), [], serving.server_context
    monkeypatch.setattr(serving, "server_context", lambda *files: loads.append(files) or load(*files))
    contexts = serving._Contexts(TlsFiles.in_dir(tmp_path), client_ca=True, clock=clock)
    first = contexts() if served else None
    good = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.crt").unlink()
    if cut is not None:
        (tmp_path / "ca.crt").write_bytes(good[:cut])
    loads.clear()

    def connects() -> None:
        with contextlib.nullcontext() if served else pytest.raises(OSError, match=r".+"):
            assert contexts() is first

    with structlog.testing.capture_logs() as lines:
        for _ in range(50):
            connects()
        assert len(loads) == 1
        clock.advance(60.0)
        connects()
    assert len(loads) == 2, "what hindered may be no file: too many open ones, say"
    assert len(lines) == 1
    (tmp_path / "ca.crt").unlink(missing_ok=True)
    (tmp_path / "ca.crt").write_bytes(good)
    assert contexts() is not first
