"""A scrape of the extender's metrics with a big cluster in its ledger."""

import http.client
import time

from bench import serving, timing
from bench.timing import Row

_COUNTED = 60.0  # seconds within which fragments have been counted once


def run(nodes: int, pods: int, calls: int) -> list[Row]:
    """Time, size and lines of a scrape, and the CPU that it costs; once fragments are counted, which scrapes begin."""
    seconds = []
    with serving.big(nodes, pods) as extender:
        connection = http.client.HTTPConnection("127.0.0.1", extender.metrics_port)

        def scrape() -> bytes:
            connection.request("GET", "/metrics")
            return connection.getresponse().read()

        until = time.monotonic() + _COUNTED
        while b"cardwise_cluster_memory_mib{" not in (body := scrape()):
            if time.monotonic() > until:
                raise RuntimeError("fragments were not counted")
            time.sleep(0.5)
        time.sleep(serving.STATUSES)
        before = extender.cpu_seconds()
        for _ in range(calls):
            began = time.perf_counter()
            body = scrape()
            seconds.append(time.perf_counter() - began)
        cpu = extender.cpu_seconds() - before
    row = timing.latency(f"scrape of the extender, {nodes} nodes x 8 cards, {pods} pods", seconds)
    row.values["size"] = f"{len(body) / 1024:.1f} KiB"
    row.values["samples"] = str(sum(not line.startswith(b"#") for line in body.splitlines()))
    row.values["CPU/call"] = f"{cpu / calls * 1000:.2f} ms"
    return [row]
