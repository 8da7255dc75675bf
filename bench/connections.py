"""What connections without a certificate cost others: idle, after one byte, and with one byte a second."""

import contextlib
import http.client
import itertools
import json
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

from bench import parts, timing
from bench.timing import Row
from bench.world import node_name, pod

_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"0" * 16_000
_SIZES = range(512, 16_000, 64)


def run(
    code: list[Path], *, nodes: int, pods: int, attackers: int, silent: int, calls: int, handshakes: int
) -> list[Row]:
    """The extender of each checkout in turn, without and with the attack."""
    rows = []
    with parts.world(nodes, pods) as kubeconfig:
        for root in code:
            with (
                tempfile.TemporaryDirectory(prefix="cardwise-bench-") as folder,
                parts.extender(kubeconfig, tls=Path(folder), code=root) as extender,
            ):
                time.sleep(2)
                caller = _Caller(extender, parts.client_context(Path(folder)), nodes)
                rows += [caller.filters(f"{root.name}, quiet", calls), caller.news(f"{root.name}, quiet", handshakes)]
                with attacked(extender.port, attackers):
                    what = f"{root.name}, {attackers} connections"
                    rows += [caller.filters(what, calls), caller.news(what, handshakes)]
                rows.append(_silent(root.name, extender, silent))
    return rows


class _Caller:
    """kube-scheduler, as far as its connections go."""

    def __init__(self, extender: parts.Extender, context: ssl.SSLContext, nodes: int) -> None:
        self._extender = extender
        self._context = context
        self._names = json.dumps([node_name(i) for i in range(nodes)]).encode()

    def filters(self, what: str, calls: int) -> Row:
        draw, seconds, cpu = random.Random(7), [], 0.0
        with contextlib.closing(self._connected()) as line:
            for i in range(-50, calls):  # the first ones are warming up
                if i == 0:
                    seconds.clear()
                    cpu = self._extender.cpu_seconds()
                made = json.dumps(pod(f"p{i}", f"{what}-{i}", draw.choice(_SIZES))).encode()
                body = b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (made, self._names)
                began = time.perf_counter()
                line.request("POST", "/gpushare-scheduler/filter", body, {"Content-Type": "application/json"})
                line.getresponse().read()
                seconds.append(time.perf_counter() - began)
        row = timing.latency(f"filter on one connection, {what}", seconds)
        row.values["CPU/call"] = f"{(self._extender.cpu_seconds() - cpu) / calls * 1000:.2f} ms"
        return row

    def news(self, what: str, count: int) -> Row:
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            with contextlib.closing(self._connected()) as line:
                line.request("GET", "/version")
                line.getresponse().read()
            seconds.append(time.perf_counter() - began)
        return timing.latency(f"a new connection and its first answer, {what}", seconds)

    def _connected(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self._extender.port, timeout=300, context=self._context)


def _silent(what: str, extender: parts.Extender, silent: int) -> Row:
    """The port of metrics with so many connections that say nothing."""
    threads, memory = extender.threads(), extender.rss_mib()[0]
    with contextlib.ExitStack() as lines:
        refused = 0
        for source in itertools.islice(_sources(), silent):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", extender.metrics_port), 60, (source, 0)))
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                refused += not line.recv(1)
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", extender.metrics_port, timeout=60)
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        took = time.perf_counter() - began
        values = {"threads": f"+{extender.threads() - threads}", "RSS": f"+{extender.rss_mib()[0] - memory:.1f} MiB"}
        connection.close()
    return Row(f"{silent} silent connections to the metrics, {what}", values | {"/healthz": f"{took * 1000:.1f} ms"})


@contextlib.contextmanager
def attacked(port: int, connections: int) -> Iterator[None]:
    """By a process of its own, which goes on until the block ends."""
    command = [sys.executable, "-m", "bench.connections", str(port), str(connections)]
    with subprocess.Popen(command, cwd=parts.ROOT, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"all\n":
                raise RuntimeError("the attack did not begin")
            yield
        finally:
            process.kill()


def _sources() -> Iterator[str]:
    return (f"127.{a}.{b}.{c}" for a in itertools.cycle(range(1, 250)) for b in range(250) for c in range(1, 250))


def attack(port: int, connections: int) -> None:
    """Keeps so many open, from as many addresses: a third idle, a third after one byte, a third with one a second."""
    poll, lines, sources = select.epoll(), {}, _sources()
    kinds = [number % 3 for number in range(connections)]
    told, second = False, time.monotonic()
    while True:
        while kinds:
            with contextlib.suppress(OSError):
                line = socket.create_connection(("127.0.0.1", port), 60, (next(sources), 0))
                line.setblocking(False)
                kind = kinds.pop()
                lines[line.fileno()] = line, kind, iter(_HELLO)
                poll.register(line, select.EPOLLIN)
                if kind:
                    line.send(_HELLO[:1])
        if not told:
            sys.stdout.write("all\n")
            sys.stdout.flush()
            told = True
        for number, _ in poll.poll(max(0.0, second - time.monotonic())):
            line, kind, _ = lines.pop(number)  # nothing is ever answered: it was closed
            line.close()
            kinds.append(kind)
        if time.monotonic() >= second:
            second += 1.0
            for line, kind, text in list(lines.values()):
                if kind == 2:
                    with contextlib.suppress(OSError):
                        line.send(bytes([next(text)]))


if __name__ == "__main__":
    attack(int(sys.argv[1]), int(sys.argv[2]))
