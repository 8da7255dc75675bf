"""Calls that take long have their own threads and delay no other call."""

import pytest

from cardwise.runtime.http import httpcalls
from tests.runtime.http.loopback import PATIENCE, answer, client, send_get, until
from tests.runtime.http.test_httpserver import tls

CLIENTS = pytest.mark.parametrize("secure", [False, True], ids=["by address", "with a certificate"])


class Caller:
    """Connects to a server, with a certificate if `secure`."""

    def __init__(self, serve, certificates, *, secure, threads=1):
        self.server = serve(tls(certificates) if secure else None, threads=threads)
        self._context = client(certificates) if secure else None

    def send_call(self, path):
        line = self.server.connect(context=self._context)
        send_get(line, path)
        return line

    def get(self):
        return self.server.get(context=self._context)

    def until_counts(self, running, waiting):
        pool = self.server.long_pool
        until(
            lambda: (len(pool._running), pool._waiting) == (running, waiting),
            f"that {running} long calls run and {waiting} wait",
        )


@CLIENTS
def test_long_calls_have_own_threads_and_one_per_owner(serve, certificates, secure):
    caller = Caller(serve, certificates, secure=secure)
    lines = [caller.send_call("/long?greedy") for _ in range(3)]
    caller.until_counts(1, 2)
    assert caller.get() == b"ok"
    if secure:  # an address without a certificate may use one of the two threads
        lines.append(caller.send_call("/long?other"))
        caller.until_counts(2, 2)
    caller.server.released.set()
    assert [answer(line) for line in lines] == [b"ok"] * len(lines)


@CLIENTS
def test_abandoned_waiting_long_call_is_dropped(serve, certificates, secure):
    caller = Caller(serve, certificates, secure=secure)
    first, second = caller.send_call("/long?a"), caller.send_call("/long?a")
    caller.until_counts(1, 1)
    calls = len(caller.server.paths)
    second.close()
    caller.until_counts(1, 0)
    caller.server.released.set()
    assert answer(first) == b"ok"
    assert len(caller.server.paths) == calls, "the application was not called for it again"


def test_call_after_a_long_one_gets_its_usual_thread(serve):
    server = serve(threads=1)
    line = server.connect()
    body = b"x" * 1000
    line.sendall(b"POST /long?a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    until(lambda: len(server.long_pool._running) == 1, "that the long call runs")
    server.released.set()
    assert answer(line) == body, "the application reads the body again"
    send_get(line, "/short")
    assert answer(line) == b"ok"
    assert server.paths == ["/long", "/long", "/short"]


@pytest.mark.parametrize("environ", [{}, {httpcalls.LONG_OWNER_KEY: "a"}, {httpcalls.LONG_OWNER_KEY: ""}])
def test_call_is_not_moved_twice_or_without_long_threads(environ):
    httpcalls.move_long_call(environ, "a")


def test_long_calls_are_answered_while_the_server_stops(serve):
    server = serve(threads=1)
    line = server.connect()
    send_get(line, "/long?a")
    assert server.waiting.acquire(timeout=PATIENCE)
    server.server.stop()
    server.released.set()
    assert answer(line) == b"ok"
