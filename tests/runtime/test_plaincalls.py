"""Plain calls are read as gunicorn reads them, and everything that is not plain is left to gunicorn."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from gunicorn.config import Config
from gunicorn.http.parser import RequestParser
from gunicorn.http.wsgi import default_environ
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cardwise.runtime import plaincalls
from cardwise.runtime.plaincalls import Answer, Call

HEAD = b"POST /verb HTTP/1.1\r\nHost: a:80\r\nContent-Length: 2\r\n"
CLIENT, SERVER = ("127.0.0.1", 5), ("127.0.0.2", 80)


@contextlib.contextmanager
def sent(data: bytes) -> Iterator[socket.socket]:
    """The server's end of a connection whose client sends this and closes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with contextlib.suppress(BrokenPipeError):
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)  # a long body fits in no buffer
    with theirs:
        with ours:
            sender.start()
            yield ours
        sender.join()


def read(data: bytes) -> Call | bytes:
    with sent(data) as sock:
        return plaincalls.read(sock, CLIENT, SERVER, "http")


def by_gunicorn(data: bytes) -> tuple[dict, bytes] | None:
    """Environ and body; None where it refuses the call."""
    config = Config()
    with sent(data) as sock:
        try:
            request = next(RequestParser(config, sock, CLIENT))
        except Exception:  # noqa: BLE001 - whatever it says, it is no call for gunicorn
            return None
        environ = default_environ(request, sock, config)
        environ["PATH_INFO"] = request.path
        environ |= {f"HTTP_{name.replace('-', '_')}": value for name, value in request.headers}
        return environ, request.body.read()


def test_a_call_of_gos_client():
    head = (
        b"POST /gpushare-scheduler/filter?timeout=10s HTTP/1.1\r\nHost: extender.kube-system.svc:32766\r\n"
        b"User-Agent: Go-http-client/1.1\r\nContent-Length: 11\r\nContent-Type: application/json\r\n"
        b"Accept-Encoding: gzip\r\n\r\n"
    )
    call = read(head + b'{"Pod":nul}more')
    assert isinstance(call, Call)
    assert call.rest == b"more"
    assert call.environ["wsgi.input"].read() == b'{"Pod":nul}'
    wanted = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/gpushare-scheduler/filter",
        "QUERY_STRING": "timeout=10s",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": "11",
        "HTTP_USER_AGENT": "Go-http-client/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "SERVER_NAME": "127.0.0.2",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
    }
    assert wanted.items() <= call.environ.items()
    assert "HTTP_CONTENT_LENGTH" not in call.environ


def test_a_body_that_comes_in_pieces_is_read_to_its_end():
    body = bytes(range(256)) * 1000
    call = read(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert isinstance(call, Call)
    assert (call.environ["wsgi.input"].read(), call.rest) == (body, b"")


def test_a_client_that_goes_in_the_middle_of_a_body_is_gone():
    with pytest.raises(ConnectionResetError):
        read(HEAD + b"\r\n{")


def test_nothing_is_a_closed_connection():
    assert read(b"") == b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /x HTTP/1.0\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /x%41 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
        b"POST http://b/x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",  # no Host
        b"POST /x HTTP/1.1\r\nHost: a\r\n\r\n",  # no length
        HEAD + b"Content-Length: 2\r\n\r\n{}",
        HEAD + b"content-length: 3\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Connection: close\r\n\r\n{}",
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n{}",
        HEAD + b"Expect: 100-continue\r\n\r\n{}",
        HEAD + b"X: a\r\n b\r\n\r\n{}",  # a folded line
        HEAD + b"X : a\r\n\r\n{}",
        HEAD + b"X_Y: a\r\n\r\n{}",
        HEAD + b"X: \xc3\xa4\r\n\r\n{}",
        HEAD + b"X: a\nY: b\r\n\r\n{}",
        HEAD + b"X: a\rY: b\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: +2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 0x2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2, 2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        HEAD,  # the rest is still on its way
    ],
)
def test_what_is_not_plain_is_gunicorns_byte_for_byte(data):
    assert read(data) == data


_TOKENS = st.sampled_from(
    [
        b"POST ", b"GET ", b"/x", b"/", b"?a=1", b"%41", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n", b"\r", b" ", b"\t",
        b":", b": ", b"Host: a", b"Content-Length: 2", b"Content-Length:2", b"Content-Length: 02", b"Content-Type: b",
        b"content-length: 4", b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"Expect: 100-continue",
        b"Connection: close", b"X-Y: z", b"X_Y: z", b"\x00", b"\xff", b",", b"{}", b"\r\n\r\n",
    ]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(_TOKENS, max_size=6), st.integers(0, 5), st.integers(0, 5))
@example([b"X-Y: z", b"\r\n"], 4, 0)
def test_what_is_taken_is_what_gunicorn_reads(noise, at, cut):
    parts = [b"POST ", b"/x", b" HTTP/1.1\r\n", b"Host: a\r\n", b"Content-Length: 2\r\n", b"\r\n", b"{}"]
    del parts[cut + 1 : cut + 1 + (cut == at)]
    data = b"".join([*parts[:at], *noise, *parts[at:]])
    try:
        call = read(data)
    except ConnectionResetError:
        return  # a head that is plain, with less of a body than it says
    if isinstance(call, bytes):
        assert call == data
        return
    found = by_gunicorn(data)
    assert found is not None
    environ, body = found
    assert call.environ["wsgi.input"].read() == body
    keys = [key for key in call.environ if key.startswith("HTTP_") or key in {"PATH_INFO", "QUERY_STRING"}]
    assert {key: call.environ[key] for key in keys} == {key: environ[key] for key in keys}
    headers = {key for key in environ if key.startswith("HTTP_")} - {"HTTP_CONTENT_TYPE", "HTTP_CONTENT_LENGTH"}
    assert headers == {key for key in keys if key.startswith("HTTP_")}


def test_an_answer_as_it_is_sent():
    answer = Answer()
    answer.start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", "2")])
    head, _, body = answer.encoded(b"{}").partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], body) == (b"HTTP/1.1 200 OK", b"{}")
    assert lines[1].startswith(b"Date: ")
    assert lines[2:] == [b"Content-Type: application/json", b"Content-Length: 2"]


def test_an_answer_says_its_length_and_that_it_is_the_last_one():
    answer = Answer()
    answer.start_response("503 Service Unavailable", [])
    answer.force_close()
    lines = answer.encoded(b"abc").split(b"\r\n")
    assert b"Content-Length: 3" in lines
    assert b"Connection: close" in lines
