"""A proxy between our programs and the API server that answers calls with errors while there is a storm.

As a load balancer or an API server in trouble: an error may come before a write was carried out, or after it. Watches
are cut. kube-scheduler, controllers and kubelets go on using the API server itself.
"""

import contextlib
import http.client
import json
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.cluster import Cluster, pki
from tests.cluster.processes import PATIENCE
from tests.integration.sharing import flags

ERRORS = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
SHARE = 0.6  # of the calls of a storm that fail
RETRY_AFTER = 1  # seconds, in answers of 429
_CUT_SECONDS = 3.0  # until a watch of a storm is cut, at most
_PIECE = 65_536  # bytes
_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Storm:
    """The proxy. `raging()` makes a storm; `answers` counts what it has answered by itself, by status."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.answers: Counter[str] = Counter()
        self._cluster = cluster
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._errors: Sequence[HTTPStatus] = ()
        self._upstream = urlsplit(cluster.control_plane.url)
        self._trust = ssl.create_default_context(cafile=str(cluster.state_dir / "pki" / "ca.crt"))
        authority = pki.Authority(cluster.state_dir / "pki" / "storm")
        pair = authority.issue("storm", "storm", hosts=("127.0.0.1",))
        self._authority = authority.cert
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.cert, pair.key)
        self._server = _Server(self, context)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def kubeconfig(self, account: str) -> Path:
        """Of this account, by way of the proxy."""
        config = yaml.safe_load((self._cluster.state_dir / "kubeconfig" / account).read_text())
        config["clusters"][0]["cluster"] = {
            "server": f"https://127.0.0.1:{self._server.server_port}",
            "certificate-authority": str(self._authority),
        }
        path = self._cluster.state_dir / "kubeconfig" / f"{account}-storm"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    @contextlib.contextmanager
    def raging(self, errors: Sequence[HTTPStatus] = ERRORS) -> Iterator[None]:
        """Most calls get one of these errors, until the context ends."""
        self._errors = errors
        try:
            yield
        finally:
            self._errors = ()

    def error(self) -> HTTPStatus | None:
        """What the next call gets; None: the API server's answer."""
        with self._lock:
            if not self._errors or self._random.random() > SHARE:
                return None
            return self._random.choice(self._errors)

    def is_carried_out(self) -> bool:
        """Whether a write that gets an error is carried out all the same."""
        with self._lock:
            return self._random.random() < 0.5

    def cut_after(self) -> float | None:
        """Seconds until a watch that sends something is cut; None: it is not."""
        with self._lock:
            return self._random.uniform(0, _CUT_SECONDS) if self._errors else None

    def connect(self) -> http.client.HTTPSConnection:
        """To the API server."""
        host, port = self._upstream.hostname, self._upstream.port
        assert host is not None
        return http.client.HTTPSConnection(host, port, context=self._trust, timeout=PATIENCE)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, storm: Storm, context: ssl.SSLContext) -> None:
        self.storm = storm
        super().__init__(("127.0.0.1", 0), _Handler)
        # The handshake is for the thread of the connection: whoever does not end one would keep the others out.
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *_: object) -> None:
        """A caller that went away in the middle: as always in a storm."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPSConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing: there are thousands of calls."""

    def _pass_on(self) -> None:
        storm = self.server.storm
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        error = storm.error()
        if error is not None:
            writes = self.command != "GET"
            if writes and storm.is_carried_out():
                self._request(body).read()
                storm.answers[f"{int(error)} after the write"] += 1
            else:
                storm.answers[str(int(error))] += 1
            self._refuse(error)
            return
        answer = self._request(body)
        if "watch=true" in self.path:
            self._relay(answer, storm)
            return
        self._head(answer)
        data = answer.read()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815 - names of http.server

    def _request(self, body: bytes) -> http.client.HTTPResponse:
        """Once more where the API server has closed a connection that stood idle."""
        headers = {name: text for name, text in self.headers.items() if name.lower() not in _HOP}
        for last in (False, True):
            fresh = self._upstream is None
            if self._upstream is None:
                self._upstream = self.server.storm.connect()
            try:
                self._upstream.request(self.command, self.path, body or None, headers)
                return self._upstream.getresponse()
            except (http.client.HTTPException, OSError):
                self._upstream.close()
                self._upstream = None
                if fresh or last:
                    raise
        raise AssertionError

    def _head(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        for name, text in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, text)

    def _relay(self, answer: http.client.HTTPResponse, storm: Storm) -> None:
        """A watch, as it comes. In a storm it is cut after a while, in the middle of what it sends."""
        self._head(answer)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        until: float | None = None
        while data := answer.read1(_PIECE):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            remaining = storm.cut_after()
            if remaining is not None:
                until = time.monotonic() + remaining if until is None else until
                if time.monotonic() > until:
                    self._cut()
                    return
        self.wfile.write(b"0\r\n\r\n")

    def _cut(self) -> None:
        self.server.storm.answers["watch cut"] += 1
        self.close_connection = True
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    def _refuse(self, error: HTTPStatus) -> None:
        """As the API server says it, or in half of the cases as a proxy before it."""
        status: dict[str, Any] = {
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": int(error),
            "message": "etcdserver: request timed out", "reason": error.phrase.replace(" ", ""),
        }  # fmt: skip
        by_proxy = self.server.storm.is_carried_out()
        data = b"<html><body>upstream connect error</body></html>" if by_proxy else json.dumps(status).encode()
        self.send_response(error)
        self.send_header("Content-Type", "text/html" if by_proxy else "application/json")
        self.send_header("Content-Length", str(len(data)))
        if error is HTTPStatus.TOO_MANY_REQUESTS:
            self.send_header("Retry-After", str(RETRY_AFTER))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def behind_a_storm(cluster: Cluster, nodes: Sequence[str], seed: int) -> Iterator[Storm]:
    """Extender, webhook, and the device plugins of these nodes reach the API server through the proxy."""
    storm = Storm(cluster, seed)
    try:
        with contextlib.ExitStack() as stack:
            for part in ("extender", "webhook"):
                stack.enter_context(flags(cluster, part, f"--kubeconfig={storm.kubeconfig(f'cardwise-{part}')}"))
            kubeconfig = storm.kubeconfig("cardwise-deviceplugin")
            for node in nodes:
                stack.enter_context(_plugin_by_way_of(cluster, node, kubeconfig))
            yield storm
    finally:
        storm.close()


@contextlib.contextmanager
def _plugin_by_way_of(cluster: Cluster, node: str, kubeconfig: Path) -> Iterator[None]:
    process = cluster.process(f"deviceplugin-{node}")
    start_line = process.recorded
    assert start_line is not None
    try:
        _restart_plugin(cluster, node, [*start_line.command, f"--kubeconfig={kubeconfig}"])
        yield
    finally:
        _restart_plugin(cluster, node, start_line.command)


def _restart_plugin(cluster: Cluster, node: str, command: Sequence[str]) -> None:
    process = cluster.process(f"deviceplugin-{node}")
    start_line = process.recorded
    assert start_line is not None
    process.stop()
    with cluster.node(node).slots_listed():
        process.start(command, start_line.environment)
