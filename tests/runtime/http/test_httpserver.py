"""The cost of slow, silent or many clients: over loopback, with a clock that the test moves."""

import contextlib
import errno
import http.client
import os
import select
import socket
import ssl
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cardwise.kube.fairqueueing import FairQueueing
from cardwise.runtime.http import httpserver
from cardwise.runtime.http.httpserver import ConnectionPhase, PhaseLimits
from cardwise.runtime.http.serving import server_context
from cardwise.runtime.http.threads import CallThreads
from tests.runtime.http.attacking import BODY, HEAD, HELLO
from tests.runtime.http.loopback import BIG, PATIENCE, Contexts, Serving, answer, client, send_get, until, until_refused


def tls(certificates: Path, *, client_ca: bool = True) -> Contexts:
    ca = certificates / "ca.crt" if client_ca else None
    context = server_context(certificates / "tls.crt", certificates / "tls.key", ca)
    return lambda: context


def closed(line: socket.socket) -> bool:
    """Wait until the server closes the connection; earlier data is discarded."""
    with contextlib.suppress(ConnectionError):
        while line.recv(65_536):
            pass
    return True


def still_open(line: socket.socket) -> bool:
    """Whether the connection is open as far as the client knows: first wait for a later action of the server."""
    line.setblocking(False)
    try:
        return bool(line.recv(1))
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("sent", [b"", HELLO[:1], HELLO[:100]])
def test_handshake_is_limited_to_two_seconds(serve, certificates, sent):
    server = serve(tls(certificates))
    line = server.connect()
    line.sendall(sent)
    assert server.get(context=client(certificates)) == b"ok"  # the server has read it by now, and it occupies no thread
    for byte in HELLO[len(sent) : len(sent) + 19]:
        line.sendall(bytes([byte]))  # however many calls arrive meanwhile
        server.clock.advance(0.1)
    server.get(context=client(certificates))
    assert still_open(line)
    server.clock.advance(0.11)
    line.setblocking(True)
    assert closed(line)


def test_client_without_a_hello_has_no_tls_object(serve, certificates):
    objects, context = [], tls(certificates)

    def counting_context() -> ssl.SSLContext:
        objects.append(1)
        return context()

    server = serve(counting_context)
    for sent in (b"", HELLO[:1], HELLO[:5], HELLO[:-1]):
        server.connect().sendall(sent)
    assert server.get(context=client(certificates)) == b"ok"
    assert len(objects) == 1


@pytest.mark.parametrize("sent", [b"", HELLO[:1], HELLO[:100]])
def test_client_that_leaves_during_its_hello_is_closed_at_once(serve, certificates, sent):
    server = serve(tls(certificates))
    line = server.connect()
    line.sendall(sent)
    line.shutdown(socket.SHUT_WR)
    assert closed(line)


@pytest.mark.parametrize("before", [HELLO[:3], HELLO[:50]], ids=["in the head", "in the record"])
def test_urgent_data_in_a_hello_causes_no_busy_loop(serve, certificates, before):
    """The kernel counts bytes beyond the urgent mark, but a read ends there."""
    objects, context = [], tls(certificates)

    def counting_context() -> ssl.SSLContext:
        objects.append(1)
        return context()

    server = serve(counting_context)
    line = server.connect()
    line.sendall(before)
    line.send(b"x", socket.MSG_OOB)
    with contextlib.suppress(ConnectionError):
        line.sendall(HELLO + HELLO)
    assert server.get(context=client(certificates)) == b"ok"
    server.get(context=client(certificates))
    assert len(objects) == 3, "OpenSSL has had what there is, and waits for the rest as for any other's"


@pytest.mark.parametrize("text", [HEAD, BODY])
def test_call_is_limited_to_ten_seconds(serve, text):
    server = serve()
    line = server.connect()
    line.sendall(text[:60])
    server.get()
    for _ in range(98):
        line.sendall(b"x")
        server.clock.advance(0.1)
        server.get()
    assert still_open(line)
    server.clock.advance(0.3)
    line.setblocking(True)
    assert closed(line)


def test_incomplete_calls_occupy_no_thread(serve):
    server = serve(threads=1)
    lines = [server.connect() for _ in range(20)]
    for line, text in zip(lines, [HEAD, BODY, b"P", b""] * 5, strict=True):
        line.sendall(text[:60])
    assert server.get() == b"ok"
    for line in lines[1::4]:  # and are answered when they end
        line.sendall(b"y" * 100_000)
    for line in lines[1::4]:
        assert answer(line) == b"y" * 100_000


def test_client_that_reads_no_response_occupies_no_thread(serve):
    server = serve(threads=1, held=10 * BIG)
    lines = [server.connect() for _ in range(4)]
    for line in lines:
        send_get(line, "/big")
    assert server.get() == b"ok"
    assert len(answer(lines[0])) == BIG  # a client that reads gets the complete response
    send_get(lines[0])
    assert answer(lines[0]) == b"ok"
    server.clock.advance(10.1)
    server.get()  # by now its deadline was checked; reading earlier would have been in time
    assert closed(lines[1])


def test_limit_of_one_address_does_not_affect_others(serve):
    server = serve(source=3)
    lines = [server.connect("127.0.0.2") for _ in range(3)]
    assert closed(server.connect("127.0.0.2"))
    assert server.get(source="127.0.0.3") == b"ok"
    assert all(still_open(line) for line in lines)
    lines[0].close()
    server.get(source="127.0.0.3")
    assert server.get(source="127.0.0.2") == b"ok"


def test_ipv6_addresses_of_one_network_count_as_one_client(serve, monkeypatch):
    """A host may have all addresses of its /64 network. Here the clients of loopback addresses seem to have others."""
    addresses = {"127.0.0.2": "2001:db8::1", "127.0.0.3": "2001:db8::9:8:7:6", "127.0.0.4": "2001:db8:0:1::1"}
    accept = socket.socket.accept

    def accept_ipv6(listening: socket.socket):
        sock, address = accept(listening)
        return sock, (addresses[address[0]], address[1], 0, 0)

    monkeypatch.setattr(socket.socket, "accept", accept_ipv6)
    server = serve(source=2)
    lines = [server.connect("127.0.0.2"), server.connect("127.0.0.3")]
    assert closed(server.connect("127.0.0.2"))
    assert closed(server.connect("127.0.0.3"))
    assert server.get(source="127.0.0.4") == b"ok"
    assert all(still_open(line) for line in lines)


def test_clients_with_a_certificate_are_not_limited(serve, certificates):
    server = serve(tls(certificates), source=1, idle=PhaseLimits(100.0, 1))
    lines = []
    for _ in range(5):
        lines.append(server.connect(context=client(certificates)))
        for line in lines:
            send_get(line)
            assert answer(line) == b"ok"


@pytest.mark.parametrize(
    ("phase", "text"),
    [("handshake", HELLO[:5]), ("reading", HEAD[:60]), ("idle", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")],
)
def test_oldest_of_too_many_connections_is_closed(serve, certificates, phase, text):
    context = tls(certificates, client_ca=False) if phase == "handshake" else None
    # With one thread, each connection is returned before the next call is answered, so they begin to wait in this
    # order.
    server = serve(context, threads=1, **{phase: PhaseLimits(100.0, 3)})
    lines = []
    for _ in range(6):
        lines.append(server.connect())
        lines[-1].sendall(text)
        if phase == "idle":
            answer(lines[-1])
        else:
            server.get(context=client(certificates, show=False) if phase == "handshake" else None)
    for line in lines[:3]:
        assert closed(line)
    assert still_open(lines[-1])


def test_bodies_without_a_certificate_have_a_common_limit(serve):
    server = serve(held=250_000)
    lines = [server.connect() for _ in range(4)]
    # sizes so different that the first call is the largest, in whatever pieces it arrives it arrives
    sizes = (95_000, 80_000, 70_000, 20_000)
    for calls, (line, sent) in enumerate(zip(lines, sizes, strict=True), 1):
        line.sendall(BODY + b"x" * sent)
        if calls < 3:
            until(
                lambda read=sum(sizes[:calls]) + calls * 12_000: server.server._held_bytes > read,
                "that it has been read",
            )
        elif calls == 3:
            assert closed(lines[0])
    lines[-1].sendall(b"x" * 80_000)
    assert len(answer(lines[-1])) == 100_000


def post(path: str, size: int, sent: int | None = None) -> bytes:
    """A POST with a body of `size` bytes, of which the first bytes are sent."""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * (
        size if sent is None else sent
    )


def test_largest_call_of_the_largest_address_is_refused(serve):
    """No other address loses a call, however large its complete calls are."""
    server = serve(held=400_000)
    others = [server.connect(source="127.0.0.3") for _ in range(2)]
    mine = [server.connect(source="127.0.0.2") for _ in range(3)]
    sizes = (90_000, 10_000, 60_000, 95_000, 5_000)
    for calls, (line, sent) in enumerate(zip([*others, *mine], sizes, strict=True), 1):
        line.sendall(post("/echo", 100_000, sent))
        until(
            lambda read=sum(sizes[:calls]) + calls * 12_000: server.server._held_bytes > read, "that it has been read"
        )
    late = server.connect(source="127.0.0.2")
    late.sendall(post("/echo", 100_000, 90_000))
    assert closed(mine[1])
    del mine[1]
    for line, sent in zip([*others, *mine, late], (90_000, 10_000, 60_000, 5_000, 90_000), strict=True):
        before = server.server._held_bytes
        line.sendall(b"x" * (100_000 - sent))
        assert len(answer(line)) == 100_000
        until(
            lambda before=before: server.server._held_bytes < before, "that what was answered is not counted any more"
        )


def test_waiting_calls_are_refused_and_running_ones_are_not(serve):
    """A small call of another address in two pieces is answered, whatever memory the complete calls hold."""
    server = serve(threads=1, held=320_000)
    has_thread, waits = server.connect(source="127.0.0.2"), server.connect(source="127.0.0.2")
    has_thread.sendall(post("/wait", 100_000))
    assert server.waiting.acquire(timeout=PATIENCE)
    small = server.connect()
    small.sendall(post("/echo", 1_000, 500))
    waits.sendall(post("/echo", 90_000))
    until(lambda: server.pool._waiting == 1, "that the second waits")
    late = server.connect(source="127.0.0.3")
    late.sendall(post("/echo", 100_000, 99_000))
    assert waits.recv(100).startswith(b"HTTP/1.1 503")
    small.sendall(b"x" * 500)
    late.sendall(b"x" * 1_000)
    server.released.set()
    assert [len(answer(line)) for line in (has_thread, small, late)] == [100_000, 1_000, 100_000]


def test_large_calls_of_an_address_do_not_block_its_small_ones(serve):
    """The calls of all tenants come from the API server's address: large objects of one tenant must not block small
    ones of others.
    """
    server = serve(held=250_000)
    small, big = server.connect(), [server.connect() for _ in range(3)]
    small.sendall(post("/echo", 20_000, 19_000))
    for line, sent in zip(big, (95_000, 80_000, 70_000), strict=True):  # the first is the largest, in whatever pieces
        line.sendall(post("/echo", 100_000, sent))
        server.get(source="127.0.0.2")
    assert closed(big[0])
    small.sendall(b"x" * 1_000)
    assert len(answer(small)) == 20_000


def test_all_memory_of_a_call_is_counted(serve, certificates):
    """Headers, Python objects and TLS take more memory than the body of most reviews."""
    server = serve(tls(certificates, client_ca=False))
    line = server.connect(context=client(certificates, show=False))
    line.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: x\r\n" % i for i in range(90)))
    server.get(context=client(certificates, show=False), source="127.0.0.2")
    until(lambda: server.server._held_bytes > 65_536 + 90 * 256, "that it is counted")
    line.close()
    until(lambda: server.server._held_bytes < 65_536 * 2, "that it is not counted any more")


def test_address_with_most_calls_loses_a_waiting_one(serve, monkeypatch):
    monkeypatch.setattr(httpserver, "_MAX_BUSY", 7)
    server = serve(threads=1)
    lines = [server.connect(source=f"127.0.0.{2 + i % 2}") for i in range(7)]  # the first has four, the other three
    for number, line in enumerate(lines):
        send_get(line, "/wait")
        until(
            lambda count=number + 1: len(server.server._queues[ConnectionPhase.BUSY, False]) == count, "that all wait"
        )
    third = server.connect(source="127.0.0.9")
    send_get(third)
    assert lines[6].recv(100).startswith(b"HTTP/1.1 503"), "the last of the address that has most"
    one_more = server.connect(source="127.0.0.3")
    send_get(one_more)
    assert one_more.recv(100).startswith(b"HTTP/1.1 503"), "it has as many as the largest"
    server.released.set()
    assert answer(third) == b"ok"


def busy_calls(server) -> int:
    """Calls without a certificate that wait for a thread or have one."""
    return len(server.server._queues[ConnectionPhase.BUSY, False])


def ask_in_order(server, calls: list[tuple[str, str]]) -> list[socket.socket]:
    """Send one call for each (namespace, client address), each after the previous one waits; returns the
    connections.
    """
    lines = []
    for namespace, source in calls:
        lines.append(server.connect(source=source))
        send_get(lines[-1], f"/wait?{namespace}")
        until(lambda: busy_calls(server) == len(lines), "that it waits")
    return lines


def is_refused(line: socket.socket) -> bool:
    return line.recv(100).startswith(b"HTTP/1.1 503")


def test_largest_call_of_the_largest_namespace_is_refused(serve):
    """Not the largest call of all, which may be another namespace's: many calls of medium size fill the memory too."""
    server = serve(threads=1, held=400_000, call_owner=lambda environ: environ["QUERY_STRING"])
    lines = [server.connect() for _ in range(5)]
    calls = [("many", 90_000), ("fair", 100_000), ("many", 80_000), ("many", 60_000), ("many", 70_000)]
    for number, (line, (namespace, size)) in enumerate(zip(lines, calls, strict=True), 1):
        line.sendall(post(f"/wait?{namespace}", size))
        if number < len(calls):
            until(lambda number=number: busy_calls(server) == number, "that it waits")
    assert is_refused(lines[2])  # a thread answers the largest call
    server.released.set()
    assert [len(answer(line)) for line in (lines[0], lines[1], *lines[3:])] == [90_000, 100_000, 60_000, 70_000]


def test_idle_connections_displace_no_call(serve):
    """Each address has few idle connections, but together they fill the memory; an API server that opens more then
    holds the most.
    """
    server = serve(threads=1, held=16 * 8_192)
    idle = [server.connect(source=f"127.0.0.{2 + number}") for number in range(15)]
    until(lambda: len(server.server._connections) == 15, "that all are there")
    lines = ask_in_order(server, [("fair", "127.0.0.1")] * 4)
    server.released.set()
    assert [answer(line) for line in lines] == [b"ok"] * 4
    assert closed(idle[0]), "those that have been idle for longest go"
    assert still_open(idle[-1])
    for line in server.lines:
        line.close()
    until(lambda: not server.server._connections, "that all are gone")
    assert server.server._held_bytes == server.server._idle_held == 0


def test_large_calls_displace_no_idle_connection(serve):
    """The address that holds the most memory loses calls; idle connections of others stay."""
    server = serve(threads=1, held=16 * 8_192)
    idle = [server.connect() for _ in range(3)]
    until(lambda: len(server.server._connections) == 3, "that all are there")
    large = [server.connect(source="127.0.0.2") for _ in range(2)]
    for number, line in enumerate(large, 1):
        line.sendall(post("/wait", 50_000))
        if number == 1:
            until(lambda: busy_calls(server) == 1, "that it waits")
    assert is_refused(large[1])
    server.released.set()
    assert all(map(still_open, idle))


def test_namespace_with_most_calls_loses_its_last_at_the_limit(serve):
    """The API server calls for all namespaces: a namespace that creates pods in parallel must not occupy all its
    calls.
    """
    server = serve(threads=1, busy=4, call_owner=lambda environ: environ["QUERY_STRING"])
    lines = ask_in_order(server, [("many", "127.0.0.2")] * 4)
    fair = [server.connect(source="127.0.0.2") for _ in range(3)]
    send_get(fair[0], "/one?fair")
    assert is_refused(lines[3])
    send_get(fair[1], "/two?fair")
    assert is_refused(lines[2])
    send_get(fair[2], "/three?fair")
    assert is_refused(fair[2]), "it would have more than the other"
    late = server.connect(source="127.0.0.2")
    send_get(late, "/four?many")
    assert is_refused(late)
    server.released.set()
    assert [answer(line) for line in (*lines[:2], *fair[:2])] == [b"ok"] * 4


class ServingByTurns(Serving):
    """Each call waits for a turn that the test gives, and takes 10 ms of the test's clock."""

    def __init__(self, *settings) -> None:
        self.turns = threading.Semaphore(0)
        super().__init__(*settings)

    def app(self, environ, start_response):
        assert self.turns.acquire(timeout=PATIENCE)
        self.clock.advance(0.01)
        return super().app(environ, start_response)

    def stop(self) -> None:
        self.turns.release(10_000)
        super().stop()


class Flood:
    """Floods the server with calls of at least as many namespaces as it has places. Each has one waiting call, and
    sends the next one at once after it.
    """

    def __init__(self, server: ServingByTurns, namespaces: list[tuple[str, str]]) -> None:
        self.server = server
        self.lines = {namespace_and_source: self._connect(*namespace_and_source) for namespace_and_source in namespaces}

    def _connect(self, namespace: str, source: str, line: socket.socket | None = None) -> socket.socket:
        line = line or self.server.connect(source)
        send_get(line, f"/?{namespace}")
        return line

    def come_again(self) -> int:
        """Clients whose calls were answered or refused call again. Returns how many were answered."""
        answered = 0
        for (namespace, source), line in list(self.lines.items()):
            line.setblocking(False)
            try:
                is_answered = line.recv(65_536).startswith(b"HTTP/1.1 200")
            except BlockingIOError:
                continue
            finally:
                line.setblocking(True)
            answered += is_answered
            if not is_answered:
                self.server.lines.remove(line)
                line.close()
            self.lines[namespace, source] = self._connect(namespace, source, line if is_answered else None)
        return answered

    def give_turns(self, count: int) -> None:
        self.server.turns.release(count)
        answered = 0

        def are_answered() -> bool:
            nonlocal answered
            answered += self.come_again()
            return answered >= count

        until(are_answered, "that so many are answered")


@pytest.mark.parametrize("namespaces", [20, 30], ids=["one for each place", "more than places"])
@pytest.mark.parametrize("of", ["an address", "all addresses"])
def test_occasional_namespace_is_answered_during_a_flood(serve, monkeypatch, namespaces, of):
    """No namespace of the flood has more places than the occasional one, but all have used more time."""
    if of == "all addresses":
        monkeypatch.setattr(httpserver, "_MAX_BUSY", 20)
        flooding, limits = [("", f"127.0.1.{number}") for number in range(namespaces)], {}
    else:
        flooding, limits = [(f"flood-{number}", "127.0.0.2") for number in range(namespaces)], {"busy": 20}
    call_owner = lambda environ: environ["QUERY_STRING"]  # noqa: E731
    server = serve(threads=1, kind=ServingByTurns, call_owner=call_owner, **limits)
    flood = Flood(server, flooding)
    until(lambda: busy_calls(server) == 20, "that all places are taken")
    flood.give_turns(2 * namespaces)
    for number in range(10):
        # afterwards each flooding namespace has used more time than the occasional one
        flood.give_turns(2 * namespaces)
        until(lambda: (flood.come_again(), busy_calls(server) == 20)[1], "that all places are taken again")
        fair = server.connect(source="127.0.0.2" if of == "an address" else "127.0.0.9")
        send_get(fair, f"/fair-{number}?fair")

        def has_answer(fair: socket.socket = fair) -> bool:
            server.turns.release()
            flood.come_again()
            return bool(select.select([fair], [], [], 0.005)[0])

        until(has_answer, "that the fair call is answered or refused")
        assert fair.recv(100).startswith(b"HTTP/1.1 200")


def test_equal_namespaces_lose_places_by_used_time(serve):
    server = serve(threads=1, busy=4, kind=ServingByTurns, call_owner=lambda environ: environ["QUERY_STRING"])
    used = server.connect(source="127.0.0.2")
    for namespace, calls in (("b", 3), ("a", 1), ("c", 2), ("d", 2)):
        for _ in range(calls):
            send_get(used, f"/?{namespace}")
            server.turns.release()
            assert answer(used) == b"ok"
    lines = {}
    for number, namespace in enumerate("dcba", 1):  # a thread answers the first call
        lines[namespace] = server.connect(source="127.0.0.2")
        send_get(lines[namespace], f"/?{namespace}")
        until(lambda number=number: busy_calls(server) == number, "that it waits")
    fair = server.connect(source="127.0.0.2")
    send_get(fair, "/?fair")
    assert is_refused(lines["b"]), "not the one that came last"
    server.turns.release(10)
    assert [answer(line) for line in (lines["d"], lines["c"], lines["a"], fair)] == [b"ok"] * 4


def test_equal_addresses_lose_the_oldest_connection(serve):
    """Not the address that connected first, which is usually the API server."""
    server = serve(reading=PhaseLimits(100.0, 3))
    first = server.connect()
    until(lambda: len(server.server._connections) == 1, "that it is there")
    others = [server.connect(source=f"127.0.0.{2 + number}") for number in range(3)]
    lines = [others[0], first, *others[1:]]
    for number, line in enumerate(lines, 1):
        line.sendall(HEAD[:60])
        until(
            lambda number=number: (
                sum(
                    connection.phase is ConnectionPhase.READING
                    for connection in list(server.server._connections.values())
                )
                == min(number, 3)
            ),
            "that it is read",
        )
    assert closed(others[0])
    assert still_open(first)


def test_calls_on_one_connection_count_for_their_own_namespaces(serve):
    server = serve(threads=1, call_owner=lambda environ: environ["QUERY_STRING"])
    line = server.connect()
    for name in ("a", "b", "a"):
        send_get(line, f"/{name}?{name}")
        assert answer(line) == b"ok"
    assert server.get() == b"ok"
    (client,) = server.server._clients.values()
    until(lambda: not client.flows, "that no flow is remembered")


def test_largest_namespace_of_the_largest_address_loses_at_the_total_limit(serve, monkeypatch):
    monkeypatch.setattr(httpserver, "_MAX_BUSY", 6)
    server = serve(threads=1, call_owner=lambda environ: environ["QUERY_STRING"])
    first = [("many", "127.0.0.2")] * 3 + [("few", "127.0.0.2")]
    lines = ask_in_order(server, [*first, ("stranger", "127.0.0.3"), ("stranger", "127.0.0.3")])
    other = server.connect(source="127.0.0.9")
    send_get(other)
    assert is_refused(lines[2]), "not the last of that address, which is another namespace's"
    fair = server.connect(source="127.0.0.2")
    send_get(fair, "/one?fair")
    assert is_refused(lines[1]), "no address has more, but a namespace of this one has"
    server.released.set()
    assert [answer(line) for line in (lines[0], *lines[3:], other, fair)] == [b"ok"] * 6


@pytest.mark.parametrize("secure", [False, True])
def test_waiting_call_is_dropped_when_its_client_leaves(serve, certificates, secure):
    """As the API server does after its timeout: no client reads the response, and the place is free for another
    call.
    """
    shown = client(certificates, show=False) if secure else None
    server = serve(tls(certificates, client_ca=False) if secure else None, threads=1, busy=3)
    lines = [server.connect(context=shown) for _ in range(3)]
    for number, line in enumerate(lines, 1):
        send_get(line, "/wait")
        until(lambda number=number: busy_calls(server) == number, "that it waits")
    assert server.waiting.acquire(timeout=PATIENCE)
    lines[1].close()
    until(lambda: busy_calls(server) == 2, "that the second is forgotten")
    late = server.connect(context=shown)
    send_get(late, "/late")
    until(lambda: busy_calls(server) == 3, "that it may wait")
    server.released.set()
    assert [answer(line) for line in (lines[0], lines[2], late)] == [b"ok"] * 3
    assert server.paths == ["/wait", "/wait", "/late"], "the one that was dropped is not worked on"


def test_client_that_leaves_during_its_call_is_polled_once(serve):
    """Its call continues, and the reading thread does not loop meanwhile."""
    server = serve(threads=1)
    line = server.connect()
    send_get(line, "/wait")
    assert server.waiting.acquire(timeout=PATIENCE)
    (connection,) = server.server._connections.values()
    assert connection.poller is not None
    line.close()
    until(lambda: connection.poller is None, "that it is polled no more")
    assert connection.phase is ConnectionPhase.BUSY
    server.released.set()
    until(lambda: not server.server._connections, "that it ends with its answer")
    assert server.get() == b"ok"


def test_oldest_connection_of_the_largest_address_is_closed(serve):
    server = serve(idle=PhaseLimits(100.0, 4))
    alone, crowd = server.connect(), [server.connect(source="127.0.0.2") for _ in range(3)]
    until(lambda: len(server.server._connections) == 4, "that all are there")
    crowd.append(server.connect(source="127.0.0.2"))
    assert closed(crowd[0])
    send_get(alone)
    assert answer(alone) == b"ok"


def test_reading_thread_gives_each_address_the_same_time(serve):
    """Costly calls of one address delay its own next calls; a probe in the same round is read first."""
    server = serve()
    read, cost = [], {"heavy": 0.008, "light": 0.0001}
    connections = [
        SimpleNamespace(source=name, number=i, sock=SimpleNamespace(fileno=lambda: 1))
        for name, count in (("heavy", 30), ("light", 3))
        for i in range(count)
    ]

    def step(connection) -> None:
        read.append(connection.source)
        server.clock.advance(cost[connection.source])

    turns = FairQueueing(min_charge=0.00005)
    server.server._run_fairly(turns, connections, step, 0.02)
    assert read == ["heavy", "light", "light", "light", "heavy", "heavy"], "and the round is over after 20 ms"
    read.clear()
    server.server._run_fairly(turns, [*connections[3:30], *connections[30:]], step, 0.02)
    assert read[:3] == ["light"] * 3, "the next one begins with the address that has used least"


def test_addresses_take_turns(serve):
    server = serve(threads=1)
    lines = [server.connect(source="127.0.0.2") for _ in range(20)]
    for line in lines:
        send_get(line, "/wait")
    assert server.waiting.acquire(timeout=PATIENCE)
    other_line = server.connect()
    send_get(other_line, "/one")
    while server.pool._waiting < 20:  # all calls except the running one
        pass
    server.released.set()
    assert answer(other_line) == b"ok"
    assert server.paths.index("/one") <= 2, "after one more of the other address, not after twenty"


def test_owners_of_one_client_take_turns(serve):
    """The calls of all tenants come from the few addresses of the API servers."""
    server = serve(threads=1, call_owner=lambda environ: environ["QUERY_STRING"])
    lines = [server.connect() for _ in range(20)]
    for line in lines:
        send_get(line, "/wait?many")
    assert server.waiting.acquire(timeout=PATIENCE)
    until(lambda: server.pool._waiting == 19, "that all wait but the one that the thread has")
    other_line = server.connect()
    send_get(other_line, "/one?one")
    until(lambda: server.pool._waiting == 20, "that this one waits too")
    server.released.set()
    assert answer(other_line) == b"ok"
    assert server.paths.index("/one") <= 2, "after one more of the other, not after twenty"


def test_threads_are_busy_if_a_new_call_would_wait():
    pool, begun, go_on, done = CallThreads("x", 1), threading.Event(), threading.Event(), threading.Event()
    assert not pool.is_busy(), "one can be started"
    pool.submit(lambda: (begun.set(), go_on.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    assert pool.is_busy()
    pool.submit(done.set)
    go_on.set()
    assert done.wait(PATIENCE)
    until(lambda: not pool.is_busy(), "that the thread has come back")


@pytest.mark.parametrize("threads", [3, 4])
def test_no_thread_stays_with_a_connection_while_a_call_waits_for_a_place_of_its_owner(serve, monkeypatch, threads):
    """Threads are free, but not for this owner. A thread that stays keeps its place as long as calls follow."""
    staying, end = [], threading.Event()

    def stay_until_the_end(_server, _connection):
        staying.append("x")
        end.wait(PATIENCE)
        return False

    monkeypatch.setattr(httpserver.HttpServer, "_await_next_call", stay_until_the_end)
    server = serve(threads=threads, call_owner=lambda environ: environ["QUERY_STRING"])
    places = threads - 2
    for _ in range(places):
        send_get(server.connect(), "/wait?x")
        assert server.waiting.acquire(timeout=PATIENCE)
    send_get(server.connect(), "/third?x")
    until(lambda: server.pool._waiting == 1, "that a call waits for one of the places")
    server.released.set()
    until(lambda: "/third" in server.paths or len(staying) == places, "that the call begins, or all places are taken")
    end.set()
    assert "/third" in server.paths


def test_slow_calls_of_one_address_leave_a_thread_for_the_first_call_of_another(serve):
    server = serve(threads=4)
    for _ in range(8):
        send_get(server.connect(), "/wait")
    for _ in range(3):
        assert server.waiting.acquire(timeout=PATIENCE)
    assert server.get(source="127.0.0.2") == b"ok"
    assert not server.waiting.acquire(blocking=False)


def test_complete_calls_beyond_the_limit_are_refused_at_once(serve):
    """The refused calls are those of the flooding address."""
    server = serve(threads=1, busy=2)
    lines = [server.connect() for _ in range(3)]
    for line in lines[:2]:
        send_get(line, "/wait")
    assert server.waiting.acquire(timeout=PATIENCE)
    until(lambda: server.pool._waiting == 1, "that the second waits")
    send_get(lines[2])
    assert lines[2].recv(100).startswith(b"HTTP/1.1 503")
    other = server.connect(source="127.0.0.2")
    send_get(other)
    server.released.set()
    assert answer(other) == b"ok"
    assert [answer(line) for line in lines[:2]] == [b"ok", b"ok"]


def test_handshake_in_pieces_is_completed(serve, certificates):
    server = serve(tls(certificates), threads=1)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secure = client(certificates).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with server.connect() as line:
        while True:
            try:
                secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                for byte in outgoing.read():
                    line.sendall(bytes([byte]))
                incoming.write(line.recv(65_536))
        secure.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for byte in outgoing.read():
            line.sendall(bytes([byte]))
        received = b""
        while not received.endswith(b"ok"):
            with contextlib.suppress(ssl.SSLWantReadError):
                received += secure.read()
                continue
            incoming.write(line.recv(65_536))


def test_arrival_time_of_a_slow_call_is_known(serve):
    server = serve(threads=1)
    slow, waiting = server.connect(), server.connect()
    slow.sendall(b"GET / HTTP/1.1\r\n")
    server.get()
    began = server.clock.now()
    server.clock.advance(3)
    send_get(waiting, "/wait")
    assert server.waiting.acquire(timeout=PATIENCE)
    slow.sendall(b"Host: x\r\n\r\n")
    server.clock.advance(2)
    server.released.set()
    assert answer(slow) == b"ok"
    assert server.arrived[1:] == [began + 3, began]


def test_invalid_call_is_refused_and_ends_its_connection(serve):
    server = serve()
    with server.connect() as line:
        line.sendall(b"no call\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 400")
        assert closed(line)


def test_stopping_ends_idle_connections_and_answers_calls_under_way(serve):
    server = serve(threads=3)
    idle, busy = server.connect(), server.connect()
    send_get(idle)
    assert answer(idle) == b"ok"
    send_get(busy, "/wait")
    assert server.waiting.acquire(timeout=PATIENCE)
    server.server.stop()
    until_refused(server.port)
    send_get(idle)  # the call was under way when the stop began
    response = http.client.HTTPResponse(idle)
    response.begin()
    assert response.getheader("Connection") == "close"
    assert response.read() == b"ok"
    server.released.set()
    assert answer(busy) == b"ok"
    assert closed(busy)
    busy.close()
    idle.close()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()


class FloodedSocket:
    """A listening socket with endless waiting connections while the server stops."""

    def __init__(self, sock: socket.socket, clock) -> None:
        self._sock = sock
        self._clock = clock
        self.is_flooded = False
        self.accepted = 0

    def __getattr__(self, name: str):
        return getattr(self._sock, name)

    def accept(self):
        if not self.is_flooded:
            return self._sock.accept()
        self.accepted += 1
        if self.accepted > 2000:  # so that a server without a limit fails the test instead of hanging it
            raise BlockingIOError(errno.EAGAIN, "none waits")
        self._clock.advance(0.001)
        socket.create_connection(self._sock.getsockname(), PATIENCE).close()
        return self._sock.accept()


def test_endless_new_connections_do_not_delay_the_stop(serve):
    server = serve()
    (number,) = server.server._listeners
    listener = server.server._listeners[number]
    flooded = FloodedSocket(listener.sock, server.clock)
    server.server._listeners[number] = listener._replace(sock=flooded)
    assert server.get() == b"ok"
    began, flooded.is_flooded = server.clock.now(), True
    server.server.stop()
    until(lambda: not server.server._listeners, "that it listens no more")
    assert server.clock.now() - began <= 1.0
    assert flooded.accepted > 100, "those that wait are still accepted"


def test_as_many_threads_as_allowed_work_at_once():
    threads, at_once = CallThreads("some", 8), threading.Barrier(8)
    done = threading.Semaphore(0)
    for _ in range(16):
        threads.submit(lambda: (at_once.wait(PATIENCE), done.release()))
    for _ in range(16):
        assert done.acquire(timeout=PATIENCE)


def descriptors() -> dict[int, str]:
    targets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets[int(entry.name)] = str(entry.readlink())
    return targets


def test_ended_server_leaves_no_descriptor_open(serve):
    before = descriptors()
    server = serve()
    line = server.connect()
    send_get(line)
    assert answer(line) == b"ok"
    send_get(line, "/wait")
    server.waiting.acquire()
    server.stop()
    until(lambda: descriptors().keys() <= before.keys(), "that all descriptors are closed")


def test_stop_of_an_ended_server_writes_to_no_descriptor(serve):
    server = serve()
    wake = server.server._wake
    server.stop()
    reader, writer = os.pipe()
    os.dup2(writer, wake)
    try:
        server.server.stop()
        assert not select.select([reader], [], [], 0)[0], "the number belongs to another file"
    finally:
        for descriptor in {reader, writer, wake}:
            os.close(descriptor)


def test_failure_outside_the_application_ends_the_connection(serve, monkeypatch):
    """For example when a logger fails in the answering thread: otherwise the client waits, and its place is lost."""
    server = serve()
    monkeypatch.setattr(server.server, "_answer_next", lambda _: 1 / 0)
    line = server.connect()
    send_get(line)
    assert closed(line)
    line.close()
    until(lambda: not server.server._connections, "that its place is free")
