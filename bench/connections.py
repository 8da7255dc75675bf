"""Measures the extender during an attack: many connections without a client certificate, idle or very slow."""

import contextlib
import http.client
import itertools
import random
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import processes, timing
from bench.synthetic import encode_node_names, filter_body, pod
from bench.timing import Row

_CLIENT_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"0" * 16_000
_SIZES = range(512, 16_000, 64)


def run(
    code: list[Path], *, nodes: int, pods: int, attackers: int, silent: int, calls: int, handshakes: int
) -> list[Row]:
    """Measure the extender of each checkout in turn, without and with the attack.

    attackers: number of connections to the extender's port that never finish a TLS handshake.
    silent: number of idle connections to the metrics port.
    calls: number of filter calls.
    handshakes: number of new connections of a client with a certificate.
    """
    rows = []
    with processes.synthetic_api_server(nodes, pods) as kubeconfig:
        for root in code:
            with (
                tempfile.TemporaryDirectory(prefix="cardwise-bench-") as folder,
                processes.run_extender(kubeconfig, tls=Path(folder), code=root) as extender,
            ):
                time.sleep(2)
                caller = _Caller(extender, processes.client_context(Path(folder)), nodes)
                rows += caller.measure(f"{root.name}, quiet", calls, handshakes)
                with run_attacker(extender.port, attackers):
                    rows += caller.measure(f"{root.name}, {attackers} connections", calls, handshakes)
                rows.append(_measure_silent(root.name, extender, silent))
    return rows


class _Caller:
    """A client with a certificate, like kube-scheduler."""

    def __init__(self, extender: processes.ExtenderProcess, context: ssl.SSLContext, nodes: int) -> None:
        self._extender = extender
        self._context = context
        self._names = encode_node_names(nodes)

    def measure(self, label: str, calls: int, handshakes: int) -> list[Row]:
        """Measure `calls` filter calls on one connection, and `handshakes` new connections."""
        return [self._measure_filter(label, calls), self._measure_handshakes(label, handshakes)]

    def _measure_filter(self, label: str, calls: int) -> Row:
        rng, cpu = random.Random(7), 0.0
        seconds: list[float] = []
        with contextlib.closing(self._new_connection()) as connection:
            for i in range(-50, calls):  # the first 50 calls are warm-up
                if i == 0:
                    seconds.clear()
                    cpu = self._extender.cpu_seconds()
                body = filter_body(pod(f"p{i}", f"{label}-{i}", rng.choice(_SIZES)), self._names)
                start = time.perf_counter()
                connection.request("POST", "/gpushare-scheduler/filter", body, {"Content-Type": "application/json"})
                connection.getresponse().read()
                seconds.append(time.perf_counter() - start)
        row = timing.latency(f"filter on one connection, {label}", seconds)
        row.cells["CPU/call"] = f"{(self._extender.cpu_seconds() - cpu) / calls * 1000:.2f} ms"
        return row

    def _measure_handshakes(self, label: str, count: int) -> Row:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            with contextlib.closing(self._new_connection()) as connection:
                connection.request("GET", "/version")
                connection.getresponse().read()
            seconds.append(time.perf_counter() - start)
        return timing.latency(f"a new connection and its first answer, {label}", seconds)

    def _new_connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self._extender.port, timeout=300, context=self._context)


def _measure_silent(label: str, extender: processes.ExtenderProcess, silent: int) -> Row:
    """Measure the metrics port with `silent` connections that send nothing."""
    threads, memory = extender.threads(), extender.rss_mib()[0]
    with contextlib.ExitStack() as stack:
        refused = 0
        for source in itertools.islice(_source_addresses(), silent):
            address = ("127.0.0.1", extender.metrics_port)
            idle = stack.enter_context(socket.create_connection(address, 60, (source, 0)))
            idle.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                refused += not idle.recv(1)
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", extender.metrics_port, timeout=60)
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        seconds = time.perf_counter() - start
        cells = {"threads": f"+{extender.threads() - threads}", "RSS": f"+{extender.rss_mib()[0] - memory:.1f} MiB"}
        connection.close()
    return Row(
        f"{silent} silent connections to the metrics port, {label}", cells | {"/healthz": f"{seconds * 1000:.1f} ms"}
    )


@contextlib.contextmanager
def run_attacker(port: int, connections: int) -> Iterator[None]:
    """Run the attack in its own process until the block ends. All connections are open when the block starts."""
    command = [sys.executable, "-m", "bench.connections", str(port), str(connections)]
    with subprocess.Popen(command, cwd=processes.ROOT, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"all\n":
                raise RuntimeError("the attack did not start")
            yield
        finally:
            process.kill()


def _source_addresses() -> Iterator[str]:
    return (f"127.{a}.{b}.{c}" for a in itertools.cycle(range(1, 250)) for b in range(250) for c in range(1, 250))


def attack(port: int, connections: int) -> None:
    """Keep `connections` open, each from its own address: idle, idle after one byte, or sending one byte per second.

    Prints `all` when all connections are open, and reopens connections that the server closes. Never returns.
    """
    poll, opened, sources = select.epoll(), {}, _source_addresses()
    kinds_to_open = [number % 3 for number in range(connections)]
    reported, next_send = False, time.monotonic()
    while True:
        while kinds_to_open:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 60, (next(sources), 0))
                connection.setblocking(False)
                kind = kinds_to_open.pop()
                opened[connection.fileno()] = connection, kind, iter(_CLIENT_HELLO)
                poll.register(connection, select.EPOLLIN)
                if kind:
                    connection.send(_CLIENT_HELLO[:1])
        if not reported:
            sys.stdout.write("all\n")
            sys.stdout.flush()
            reported = True
        for number, _ in poll.poll(max(0.0, next_send - time.monotonic())):
            connection, kind, _ = opened.pop(number)  # readable: the server sends nothing, so it closed the connection
            connection.close()
            kinds_to_open.append(kind)
        if time.monotonic() >= next_send:
            next_send += 1.0
            for connection, kind, unsent in list(opened.values()):
                if kind == 2:
                    with contextlib.suppress(OSError):
                        connection.send(bytes([next(unsent)]))


if __name__ == "__main__":
    attack(int(sys.argv[1]), int(sys.argv[2]))
