"""Responses of the API server are limited in bytes and in time, whatever the server does.

Server and client share one clock: the server lets three seconds pass before each byte.
"""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from cardwise.kube import client as clients
from cardwise.kube import errors, paths, watching
from cardwise.kube.client import KubeClient
from tests.fakes.apiserver import Answer, ApiServer
from tests.fakes.clock import FakeClock

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MAX_BYTES = 100_000
SENT = 3000  # bytes or pieces, if the client takes them

Send = Callable[[bytes], None]


class Server:
    """Answers the first request of each connection with `answer`. `sent`: the number of bytes that the client
    accepted.
    """

    def __init__(self, answer: Callable[[Send], None]) -> None:
        self._answer = answer
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.recv(65_536)
                self.sent = 0
                try:
                    self._answer(self._send(connection))
                except OSError:
                    continue

    def _send(self, connection: socket.socket) -> Send:
        def send(piece: bytes) -> None:
            connection.sendall(piece)
            self.sent += len(piece)

        return send

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def serving(clock: FakeClock) -> Iterator[Callable[[Callable[[Send], None]], tuple[Server, KubeClient]]]:
    pairs: list[tuple[Server, KubeClient]] = []

    def serve(answer: Callable[[Send], None]) -> tuple[Server, KubeClient]:
        server = Server(answer)
        pairs.append((server, KubeClient(server.url, clock=clock)))
        return pairs[-1]

    yield serve
    for server, client in pairs:
        client.close()
        server.close()


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        pytest.param(b"", b"HTTP/1.1 200 O", id="in the status line"),
        pytest.param(OK + b"A: ", b"a", id="in a header"),
        pytest.param(OK + b"Content-Length: 1000000\r\n\r\n", b"x", id="in a body of known length"),
        pytest.param(OK + b"Connection: close\r\n\r\n", b"x", id="in a body that the end of the connection ends"),
        pytest.param(CHUNKED, b"1\r\nx\r\n", id="by chunks"),
        pytest.param(CHUNKED + b"1", b"0", id="in the length of a chunk"),
        pytest.param(b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", id="in an error"),
    ],
)
def test_slow_response_ends_at_its_deadline(serving, clock, head, tail):
    def answer(send: Send) -> None:
        send(head)
        for number in range(SENT):
            clock.advance(3)
            send(tail[number % len(tail) : number % len(tail) + 1])

    _, client = serving(answer)
    for ask in (
        lambda: client.get("/version", timeout=10),
        lambda: client.create("/x", {}, timeout=10),
        lambda: list(client.list_pages(paths.pods(), timeout=10)),
        lambda: list(client.watch(paths.pods(), timeout_seconds=10, read_timeout=10)),
    ):
        with pytest.raises(errors.KubeError, match="imed out"):
            ask()


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(OK + b"Content-Length: 600000000\r\n\r\n", id="of known length"),
        pytest.param(CHUNKED, id="by chunks"),
        pytest.param(OK + b"Connection: close\r\n\r\n", id="to the end of the connection"),
    ],
)
def test_a_larger_answer_is_not_read_to_its_end(serving, head):
    """As in a list of all pods, or in an endless watch."""
    piece = b"x" * 65_536
    piece = b"10000\r\n" + piece + b"\r\n" if head == CHUNKED else piece

    def answer(send: Send) -> None:
        send(head)
        for _ in range(SENT):
            send(piece)

    server, client = serving(answer)
    for _ in range(3):
        with pytest.raises(errors.TooLarge, match=f"GET /version: the response has more than {MAX_BYTES} bytes"):
            client.get("/version", max_bytes=MAX_BYTES)
    assert server.sent < SENT * len(piece) / 4


def test_an_error_without_end_is_an_error_by_its_status(serving):
    def answer(send: Send) -> None:
        send(b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(SENT):
            send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    server, client = serving(answer)
    with pytest.raises(errors.Forbidden):
        client.get("/version")
    assert server.sent < SENT * 65_536 / 4


def test_watch_ends_if_the_server_does_not_end_it(serving, clock):
    line = b'{"type":"BOOKMARK","object":{}}\n'

    def answer(send: Send) -> None:
        send(CHUNKED)
        for _ in range(SENT):
            clock.advance(3)
            send(b"%x\r\n%s\r\n" % (len(line), line))

    _, client = serving(answer)
    watch = client.watch(paths.pods(), timeout_seconds=300, read_timeout=330)
    seen = []
    with pytest.raises(errors.Unreachable, match="imed out"):
        seen.extend(watch)
    assert clock.now() >= 1000 + 300  # not before it should have ended


def test_endless_event_is_an_error(serving, monkeypatch):
    monkeypatch.setattr(watching, "_MAX_BYTES", 1_000_000)

    def answer(send: Send) -> None:
        send(CHUNKED)
        send(b"3\r\na\nb\r\n")
        for _ in range(SENT):
            send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    server, client = serving(answer)
    lines = iter(client.watch(paths.pods()))
    assert next(lines) == b"a"
    with pytest.raises(errors.TooLarge, match="watch of /api/v1/pods: an event has more than 1000000 bytes"):
        next(lines)
    assert server.sent < SENT * 65_536 / 4


def test_split_events_are_reassembled(serving):
    line = b'{"type":"ADDED","object":{"a":"%s"}}' % (b"x" * 200_000)
    two_lines = line + b"\n" + line + b"\n"

    def answer(send: Send) -> None:
        send(CHUNKED)
        for start in range(0, len(two_lines), 30_000):
            piece = two_lines[start : start + 30_000]
            send(b"%x\r\n%s\r\n" % (len(piece), piece))
        send(b"0\r\n\r\n")

    _, client = serving(answer)
    assert list(client.watch(paths.pods())) == [line, line]


def test_too_large_page_is_requested_with_fewer_objects(api: ApiServer, monkeypatch, clock):
    monkeypatch.setattr(clients, "MAX_BYTES", 20_000)
    for number in range(40):
        api.write_object(paths.pods(), {"metadata": {"name": f"p{number:02}"}, "spec": {"x": "y" * 1000}})
    client = api.client(clock=clock)
    listed = [pod["metadata"]["name"] for pod in client.list_objects(paths.pods())]
    assert listed == [f"p{number:02}" for number in range(40)]
    limits = [int(request.query["limit"]) for request in api.sent("list")]
    assert limits == [500, 125, 31, *[7] * 6]
    api.write_object(paths.pods(), {"metadata": {"name": "fat"}, "spec": {"x": "y" * 30_000}})
    with pytest.raises(errors.TooLarge):
        list(client.list_objects(paths.pods()))


def test_a_list_in_one_answer_may_be_larger_and_take_longer(api: ApiServer, monkeypatch, clock):
    monkeypatch.setattr(clients, "MAX_BYTES", 1000)
    api.write_object(paths.pods(), {"metadata": {"name": "p"}, "spec": {"x": "y" * 3000}})
    client = api.client(clock=clock)
    assert len(list(client.list_pages(paths.pods(), limit=0))) == 1
    assert [request.timeout for request in api.sent("list")] == [300.0]
    monkeypatch.setattr(clients, "MAX_UNPAGED_LIST_BYTES", 1000)
    with pytest.raises(errors.TooLarge):
        list(client.list_pages(paths.pods(), limit=0))


def test_compressed_response_is_measured_decompressed(api: ApiServer, clock):
    """The client does not request compression, but a proxy may compress."""
    import gzip

    packed = gzip.compress(b'"' + b" " * 3_000_000 + b'"')
    api.answers["/version"] = Answer(200, packed, {"Content-Encoding": "gzip"})
    client = KubeClient(api.serve(), clock=clock)
    with pytest.raises(errors.TooLarge):
        client.request("GET", "/version", max_bytes=MAX_BYTES)
    assert len(client.request("GET", "/version")) == 3_000_002
    client.close()
