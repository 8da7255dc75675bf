import contextlib
import http.client
import select
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from cardwise.runtime.http.health import _LIMITS, HealthServer
from cardwise.runtime.settings import HostPort
from tests.cluster import ports
from tests.fakes.clock import FakeClock
from tests.runtime.http.attacking import HEAD, trickling


@pytest.fixture
def healthy():
    started: list[HealthServer] = []

    def start(**kwargs) -> HealthServer:
        server = HealthServer(kwargs.pop("bind", HostPort("127.0.0.1", 0)), **kwargs)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def get_all(server: HealthServer, *paths: str, method: str = "GET", host: str = "127.0.0.1") -> list[tuple[int, str]]:
    """Request all paths over one connection."""
    connection = http.client.HTTPConnection(host, server.port, timeout=60)
    answers = []
    for path in paths:
        connection.request(method, path)
        response = connection.getresponse()
        answers.append((response.status, response.read().decode()))
    connection.close()
    return answers


def test_readyz_lists_the_problems(healthy):
    problems = ["pods: not synced", "not the leader"]
    server = healthy(ready=lambda: problems)
    assert get_all(server, "/readyz", "/healthz") == [(503, "pods: not synced\nnot the leader\n"), (200, "ok\n")]
    problems.clear()
    assert get_all(server, "/readyz?verbose", "/nothing")[0] == (200, "ok\n")
    assert get_all(server, "/readyz", method="HEAD") == [(200, "")]
    assert get_all(server, "/nothing")[0][0] == 404


def test_failing_check_is_reported_as_a_problem(healthy, capsys):
    def broken():
        raise RuntimeError("no idea")

    server = healthy(ready=broken)
    status, text = get_all(server, "/readyz")[0]
    assert status == 503
    assert "no idea" in text
    assert "health check failed" in capsys.readouterr().out


def test_metrics(healthy):
    registry = CollectorRegistry()
    Counter("cardwise_test_things", "Things.", registry=registry).inc()
    server = healthy(registry=registry)
    status, text = get_all(server, "/metrics")[0]
    assert status == 200
    assert "cardwise_test_things_total 1.0" in text


@pytest.mark.parametrize("version", ["x", "1.x", "..", "1" * 5000])
def test_invalid_version_in_the_accept_header_is_not_logged(healthy, capsys, version):
    """Prometheus' parser of the header fails on it, and each request would log a traceback."""
    server = healthy(registry=CollectorRegistry())
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics")
    request.add_header("Accept", f"application/openmetrics-text;version={version}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
    assert "Traceback" not in "".join(capsys.readouterr())


def test_silent_and_slow_clients_occupy_no_thread(healthy):
    server = healthy()
    get_all(server, "/healthz", "/metrics")
    before = threading.active_count()
    with trickling(server.port, 60, HEAD, b"", b"G"):
        assert get_all(server, "/healthz", "/readyz")[0][0] == 200
        assert threading.active_count() - before <= 4


def test_scrapes_do_not_block_probes_of_the_same_address(healthy):
    """Pods of the host's network have the kubelet's address."""
    go_on = threading.Event()

    class Slow:
        def collect(self):
            go_on.wait(60)
            return []

    registry = CollectorRegistry()
    registry.register(Slow())
    server = healthy(registry=registry)
    with contextlib.ExitStack() as lines:
        scrapes = [
            lines.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            for _ in range(_LIMITS.busy + 1)
        ]
        for line in scrapes:
            line.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        refused, _, _ = select.select(scrapes, [], [], 60)
        assert refused[0].recv(100).startswith(b"HTTP/1.1 503"), "as many wait as may"
        assert get_all(server, "/healthz", "/readyz") == [(200, "ok\n"), (200, "ok\n")]
        go_on.set()


def test_probe_does_not_wait_for_earlier_connections():
    """Twelve addresses connect repeatedly, each with a call that is costly to refuse. The test counts rounds of the
    reading thread: each gives all addresses the same time and ends after 40 ms.
    """
    server = HealthServer(HostPort("127.0.0.1", 0), clock=FakeClock())
    hostile = b"GET /" + b"%" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as lines:

        def connect(source: str) -> socket.socket:
            line = socket.create_connection(("127.0.0.1", server.port), 60, source_address=(source, 0))
            return lines.enter_context(line)

        for _ in range(3):
            for number in range(12 * 30):
                connect(f"127.0.1.{1 + number % 12}").sendall(hostile)
            probe = connect("127.0.0.1")
            probe.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            for _ in range(3):  # the rounds: accept, read, and take over from the answering thread
                server._server._poll_once()
            assert probe.recv(100).startswith(b"HTTP/1.1 200")
    server._server.stop()
    server._server.run()


def test_all_addresses_by_default_and_port_free_after_stop(healthy):
    (port,) = ports.free(1)  # the kernel assigns the port to no other process meanwhile
    server = healthy(bind=HostPort("", port))
    assert get_all(server, "/healthz")[0][0] == 200
    if socket.has_dualstack_ipv6():
        assert get_all(server, "/healthz", host="::1")[0][0] == 200
    server.stop()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)
    healthy(bind=HostPort("127.0.0.1", port))


def test_server_stopped_before_its_start_leaves_nothing_open():
    descriptors = Path("/proc/self/fd")
    opened = len(list(descriptors.iterdir()))
    server = HealthServer(HostPort("127.0.0.1", 0))
    waiting = socket.create_connection(("127.0.0.1", server.port), 1)  # from the kernel's backlog
    server.stop()
    server.stop()
    waiting.close()
    assert len(list(descriptors.iterdir())) == opened
    server.start()
    assert not server._thread.is_alive()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 1)


def test_taken_port_is_an_error_at_once(healthy):
    server = healthy()
    with pytest.raises(OSError, match="in use"):
        HealthServer(HostPort("127.0.0.1", server.port))
