"""Calls are parsed alike however their bytes arrive, and ambiguous calls are refused."""

import socket
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.runtime.http import httpcalls
from cardwise.runtime.http.httpcalls import (
    SOCKET_KEY,
    BadHttpCall,
    HttpCall,
    Reader,
    answer_call,
    is_abandoned,
    refusal_response,
    shared_environ,
)

SHARED = shared_environ(("127.0.0.1", 5), ("127.0.0.2", 80), "https")
GOS = (
    b"POST /gpushare-scheduler/filter?timeout=10s HTTP/1.1\r\nHost: extender.kube-system.svc:32766\r\n"
    b"User-Agent: Go-http-client/1.1\r\nContent-Length: 11\r\nContent-Type: application/json\r\n"
    b'Accept-Encoding: gzip\r\n\r\n{"Pod":nul}'
)
CURLS = b"GET /a%20b/%C3%A4 HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n2\r\n, \r\n0\r\n\r\n"


def read(*pieces: bytes, max_body_bytes: int = 1000) -> list[HttpCall]:
    """The calls that a server would answer: it takes each one before it reads the next bytes."""
    reader, calls = Reader(SHARED, max_body_bytes), list[HttpCall]()
    for piece in pieces:
        reader.feed(piece)
        if reader.call is not None:
            calls.append(reader.call)
            if reader.call.last:
                break
            reader.call = None
    return calls


def body(call: HttpCall) -> bytes:
    return call.environ["wsgi.input"].read()


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_clients_count_by_ipv4_address_and_by_ipv6_network(address: str, network: str):
    assert httpcalls.client_network(address) == network


def test_call_of_the_go_client():
    (call,) = read(GOS)
    wanted = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/gpushare-scheduler/filter",
        "QUERY_STRING": "timeout=10s",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": "11",
        "HTTP_USER_AGENT": "Go-http-client/1.1",
        "HTTP_HOST": "extender.kube-system.svc:32766",
        "REMOTE_ADDR": "127.0.0.1",
        "SERVER_NAME": "127.0.0.2",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "https",
    }
    assert wanted.items() <= call.environ.items()
    assert "HTTP_CONTENT_LENGTH" not in call.environ
    assert body(call) == b'{"Pod":nul}'
    assert not call.last


def test_answering_thread_decodes_paths_for_wsgi():
    """The reading thread must not decode them: 64 KB of "%" took it some 30 ms."""
    (call,) = read(CURLS)
    assert call.environ["PATH_INFO"] == "/a%20b/%C3%A4"
    assert call.environ["CONTENT_LENGTH"] == "0"
    seen = []
    answer_call(lambda environ, start: [start("200 OK", []), seen.append(environ["PATH_INFO"])] and [b""], call, bool)
    assert seen == ["/a b/ä".encode().decode("latin-1")]


@pytest.mark.parametrize("target", [b"/" + b"%" * 8192, b"/?" + b"x" * 8191, b"/" + b"x" * 70_000])
def test_too_long_target_is_refused_in_any_pieces(target):
    for step in (1000, len(target)):
        with pytest.raises(BadHttpCall) as refused:
            read(b"GET ", *(target[at : at + step] for at in range(0, len(target), step)))
        assert refused.value.status == HTTPStatus.REQUEST_URI_TOO_LONG
    (call,) = read(b"GET /" + b"x" * 8191 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert len(call.environ["PATH_INFO"]) == 8192


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"identity, chunked", b"chunked, chunked"])
def test_other_transfer_encodings_are_refused(coding):
    """The body would be passed on undecoded."""
    with pytest.raises(BadHttpCall) as refused:
        read(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: " + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert refused.value.status in (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.BAD_REQUEST)


@pytest.mark.parametrize("sent", [CHUNKED, b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\ntwo, "])
def test_a_body_of_the_maximum_size_is_read_and_a_larger_one_is_not(sent):
    (call,) = read(sent, max_body_bytes=5)
    assert (body(call), call.environ["CONTENT_LENGTH"], call.last) == (b"two, ", "5", False)
    (call,) = read(sent, max_body_bytes=4)
    assert (body(call), call.environ["CONTENT_LENGTH"], call.last) == (b"", "5", True)


def test_a_call_is_abandoned_once_its_client_has_closed_the_connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_abandoned({SOCKET_KEY: ours})
        theirs.sendall(b"the next call")
        assert not is_abandoned({SOCKET_KEY: ours})
        theirs.shutdown(socket.SHUT_WR)
        assert is_abandoned({SOCKET_KEY: ours}), "unread bytes do not matter"
    assert not is_abandoned({}), "a test without a server"


def test_awaits_continue_until_the_body_begins():
    reader = Reader(SHARED, 1000)
    reader.feed(b"POST /x HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n")
    assert not reader.awaits_continue
    reader.feed(b"\r\n")
    assert reader.awaits_continue
    reader.feed(b"{")
    assert not reader.awaits_continue
    for head in (b"HTTP/1.0\r\nContent-Length: 2", b"HTTP/1.1\r\nHost: a\r\nContent-Length: 1001"):
        reader = Reader(SHARED, 1000)
        reader.feed(b"POST /x " + head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert not reader.awaits_continue


def test_body_is_in_memory_once():
    (call,) = read(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n", b"x" * 400, b"x" * 500)
    assert call.environ["wsgi.input"].getvalue() is call.environ["wsgi.input"].read()


@given(st.lists(st.sampled_from([GOS, CURLS, CHUNKED]), min_size=1, max_size=4), st.data())
def test_calls_are_parsed_alike_in_any_pieces(calls, data):
    pieces = []
    for text in calls:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=20)))
        pieces += [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = read(*calls), read(*pieces)
    assert len(whole) == len(calls)
    assert [body(call) for call in whole] == [body(call) for call in cut]
    for first, other in zip(whole, cut, strict=True):
        del first.environ["wsgi.input"], other.environ["wsgi.input"]
        assert first == other


def test_has_begun_until_the_call_is_complete():
    reader = Reader(SHARED, 1000)
    for piece in (GOS[:1], GOS[1:60], GOS[60:-1]):
        assert reader.has_begun is (piece != GOS[:1])
        reader.feed(piece)
        assert reader.has_begun
    assert reader.held_bytes >= len(b'{"Pod":nul')
    reader.feed(GOS[-1:])
    assert not reader.has_begun
    assert 4096 + 5 * 256 + 11 < reader.held_bytes < 6000, "its environ, its header lines and its body"
    reader.call = None
    assert reader.held_bytes == 0


HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 2\r\n\r\n{}",
        HEAD + b"content-length: 3\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Host: a\r\n\r\n{}",
        HEAD + b"hOST: b\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n\r\n",  # the host is ambiguous
        b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"X: a\r\n b\r\n\r\n{}",  # a folded line
        HEAD + b"X : a\r\n\r\n{}",
        HEAD + b"X: a\nY: b\r\n\r\n{}",
        HEAD + b"X: a\rY: b\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: +2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 0x2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2, 2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_ambiguous_calls_are_refused(data):
    with pytest.raises(BadHttpCall) as refused:
        read(data)
    assert refused.value.status == HTTPStatus.BAD_REQUEST


def test_header_with_an_underscore_is_ignored():
    (call,) = read(HEAD + b"X_Y: forged\r\nX-Y: true\r\n\r\n{}")
    assert call.environ["HTTP_X_Y"] == "true"


def test_heads_are_limited():
    for long_headers in (b"X: " + b"x" * 70_000, b"".join(b"X%d: x\r\n" % i for i in range(200))):
        with pytest.raises(BadHttpCall) as refused:
            read(b"GET / HTTP/1.1\r\n", *(long_headers[at : at + 1000] for at in range(0, len(long_headers), 1000)))
        assert refused.value.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


@pytest.mark.parametrize("after", [CURLS, CURLS[:1], b"\x16\x03"], ids=["a call", "its first byte", "what is no call"])
def test_bytes_before_the_response_end_the_connection(after):
    """A client may send further calls at once, and a server may close the connection instead of answering them."""
    (call,) = read(GOS + after, CURLS)
    assert (body(call), call.last) == (b'{"Pod":nul}', True)


@pytest.mark.parametrize("pieces", [(GOS + b"\r\n", CURLS), (GOS, b"\r\n" + CURLS), (GOS + b"\r", b"\n", CURLS)])
def test_empty_lines_before_a_call_are_ignored(pieces):
    assert [call.last for call in read(*pieces)] == [False, False]


class CountingReader(Reader):
    """A reader that counts the header lines that it receives."""

    lines = 0

    def on_header(self, name: bytes, content: bytes) -> None:
        self.lines += 1
        super().on_header(name, content)


@pytest.mark.parametrize("line", [b"X:\r\n", b"X_Y:\r\n", b"Accept: " + b"x" * 150 + b"\r\n"])
def test_header_lines_are_limited_also_with_equal_names(line):
    """Lines with equal names count too: joining those of a 64 KiB head one by one took the reading thread 34 ms."""
    begin, end = b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n"
    reader = CountingReader(SHARED, 1000)
    reader.feed(begin + line * 99 + end)
    assert reader.call is not None
    reader = CountingReader(SHARED, 1000)
    with pytest.raises(BadHttpCall) as refused:
        reader.feed((begin + line * 20_000)[:65_536])
    assert refused.value.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    assert reader.lines == 101  # the other lines are not processed


NAMES = st.sampled_from(["Accept", "accept", "X-A", "x-a", "X_A", "User-Agent"])
VALUES = st.text('abc,; "=', max_size=8).map(str.strip)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=99))
def test_repeated_headers_are_joined(lines):
    """RFC 9110, section 5.2: joined in the order of arrival, with commas."""
    head = "".join(f"{name}: {text}\r\n" for name, text in lines)
    (call,) = read(f"GET / HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
    wanted: dict[str, list[str]] = {}
    for name, text in lines:
        if "_" not in name:
            wanted.setdefault("HTTP_" + name.upper().replace("-", "_"), []).append(text)
    headers = {name: text for name, text in call.environ.items() if name.startswith("HTTP_") and name != "HTTP_HOST"}
    assert headers == {name: ",".join(texts) for name, texts in wanted.items()}


@pytest.mark.parametrize(
    ("begin", "extra"),
    [(CHUNKED[: CHUNKED.index(b"3\r\n")], b"1;" + b"x" * 999 + b"\r\na\r\n"), (b"", b"\r\n" * 500)],
    ids=["extensions of chunks", "empty lines"],
)
def test_bytes_outside_the_body_are_limited(begin, extra):
    reader = Reader(SHARED, 1 << 20)
    reader.feed(begin)
    for _ in range(60):
        reader.feed(extra)
        assert reader.has_begun
    with pytest.raises(BadHttpCall) as refused:
        reader.feed(extra * 10)
    assert refused.value.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def test_trailers_are_refused():
    with pytest.raises(BadHttpCall) as refused:
        read(CHUNKED[:-2] + b"Trailer: x\r\n\r\n")
    assert refused.value.status == HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    "data",
    [
        # the client closes the connection itself: the server waits for nothing
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001,
    ],
)
def test_too_large_body_is_not_read_and_ends_the_connection(data):
    (call,) = read(data, b"x" * 5000, GOS)
    assert (call.environ["CONTENT_LENGTH"], body(call), call.last) == ("1001", b"", True)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.0\r\n\r\n",
        b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nmore",
    ],
)
def test_last_call_of_a_connection(head):
    (call,) = read(head)
    assert call.last


def wsgi_app(status, headers, text):
    def app(environ, start_response):
        start_response(status, headers)
        return [text]

    return app


def test_response_bytes():
    app = wsgi_app("200 OK", [("Content-Type", "application/json"), ("Content-Length", "2")], b"{}")
    answer, last = answer_call(app, read(GOS)[0], lambda: False)
    head, _, text = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], text, last) == (b"HTTP/1.1 200 OK", b"{}", False)
    assert lines[1].startswith(b"Date: ")
    assert lines[2:] == [b"Content-Type: application/json", b"Content-Length: 2"]


def test_response_has_length_and_connection_close():
    answer, last = answer_call(wsgi_app("503 Service Unavailable", [], b"abc"), read(CURLS)[0], lambda: True)
    assert last
    lines = answer.split(b"\r\n")
    assert b"Content-Length: 3" in lines
    assert b"Connection: close" in lines
    assert refusal_response(HTTPStatus.BAD_REQUEST).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_response_to_head_has_no_body():
    answer, _ = answer_call(
        wsgi_app("200 OK", [], b"abc"), read(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")[0], lambda: False
    )
    assert answer.endswith(b"Content-Length: 3\r\n\r\n")
