"""Measures a scrape of the extender's metrics, with a big cluster in its ledger."""

import http.client
import time

from bench import serving, timing
from bench.timing import Row

_FRAGMENTS_TIMEOUT = 60.0  # maximum seconds until fragmentation has been computed once


def run(nodes: int, pods: int, calls: int) -> list[Row]:
    """Time, size, samples and CPU of a scrape. The first scrape starts to compute fragmentation, and is not counted."""
    seconds = []
    with serving.extender_with_cluster(nodes, pods) as extender:
        connection = http.client.HTTPConnection("127.0.0.1", extender.metrics_port)

        def scrape() -> bytes:
            connection.request("GET", "/metrics")
            return connection.getresponse().read()

        deadline = time.monotonic() + _FRAGMENTS_TIMEOUT
        while b"cardwise_cluster_memory_mib{" not in (body := scrape()):
            if time.monotonic() > deadline:
                raise RuntimeError("the extender did not compute fragmentation in time")
            time.sleep(0.5)
        time.sleep(serving.STATUS_WRITES_SECONDS)
        start_cpu = extender.cpu_seconds()
        for _ in range(calls):
            start = time.perf_counter()
            body = scrape()
            seconds.append(time.perf_counter() - start)
        cpu = extender.cpu_seconds() - start_cpu
    row = timing.latency(f"scrape of the extender, {nodes} nodes x 8 cards, {pods} pods", seconds)
    row.cells["size"] = f"{len(body) / 1024:.1f} KiB"
    row.cells["samples"] = str(sum(not line.startswith(b"#") for line in body.splitlines()))
    row.cells["CPU/call"] = f"{cpu / calls * 1000:.2f} ms"
    return [row]
