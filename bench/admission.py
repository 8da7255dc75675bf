"""Measures the webhook: latency of mutate and validate over TLS, and of pod creation with and without the webhook.

Calls of mutate and validate arrive at a fixed rate. Pods are created on the real API server of tests/cluster with the
chart's webhook configurations, by one client on one keep-alive connection: the waiting time of a single user.
"""

import http.client
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import timing
from bench.timing import Row
from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import pod
from tests.cluster import Cluster, ClusterSpec
from tests.cluster.parts import webhook_configurations

_CONNECTIONS = 4
_QUOTA_ENTRIES = 20


def run(rate: int, seconds: int, creations: int) -> list[Row]:
    """Send `rate` requests per second to each verb for `seconds`; then create `creations` pods in each way."""
    with _cluster() as cluster:
        rows = []
        rewritten = cluster.api.create(paths.pods("default"), pod(gpu_mem="8Gi"), query={"dryRun": "All"})
        for verb, request_pod in (("mutate", pod(gpu_mem="8Gi")), ("validate", rewritten)):
            latencies = _latencies_at_rate(cluster.parts.url("webhook"), f"/{verb}", request_pod, rate, seconds)
            rows.append(timing.latency(f"{verb} over TLS, keep-alive, {rate} requests/s", latencies))
        cluster.api.create(paths.gpuquotas("default"), _quota())
        time.sleep(2)  # wait until the webhook's informer has the GPUQuota
        latencies = _latencies_at_rate(cluster.parts.url("webhook"), "/validate", rewritten, rate, seconds)
        rows.append(timing.latency(f"the same, with a GPUQuota of {_QUOTA_ENTRIES} entries", latencies))
        cluster.api.delete(paths.gpuquotas("default", "bench"))
        return rows + _measure_creation(cluster, creations)


@contextmanager
def _cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="cw-bench-") as folder:
        spec = ClusterSpec(state_dir=Path(folder, "c"), sim_nodes=2, keeper=False)
        cluster = Cluster.start(spec, print)
        try:
            cluster.process("kube-scheduler").stop()
            yield cluster
        finally:
            cluster.stop()


def _quota() -> dict[str, Any]:
    """A GPUQuota that refuses nothing: its first entry counts all cards, each other entry a model."""
    models: list[dict[str, Any]] = [{"model": f"Model {i}", "shares": 1} for i in range(_QUOTA_ENTRIES - 1)]
    spec = {"onExceed": "Refuse", "hard": [{"memoryMiB": 1_000_000}, *models]}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "GPUQuota",
        "metadata": {"name": "bench", "namespace": "default"},
        "spec": spec,
    }


def _review(request_pod: dict[str, Any]) -> bytes:
    request = {
        "uid": "bench",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "default",
        "operation": "CREATE",
        "userInfo": {"username": "bench"},
        "object": request_pod,
    }
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    return json.dumps(review).encode()


def _latencies_at_rate(url: str, path: str, request_pod: dict[str, Any], rate: int, seconds: int) -> list[float]:
    """Latencies in seconds from the time when a request was due, so that a stall counts for each delayed request."""
    body = _review(request_pod)
    due = iter([time.perf_counter() + 0.2 + i / rate for i in range(rate * seconds)])
    lock = threading.Lock()
    latencies: list[float] = []
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def send_requests() -> None:
        address = urlsplit(url)
        connection = http.client.HTTPSConnection(address.hostname or "", address.port, context=context)
        while True:
            with lock:
                due_time = next(due, None)
            if due_time is None:
                connection.close()
                return
            time.sleep(max(0.0, due_time - time.perf_counter()))
            connection.request("POST", path, body=body, headers={"Content-Type": "application/json"})
            review = json.loads(connection.getresponse().read())
            if review["response"]["allowed"] is not True:
                raise RuntimeError(review)
            latencies.append(time.perf_counter() - due_time)

    threads = [threading.Thread(target=send_requests) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def _measure_creation(cluster: Cluster, count: int) -> list[Row]:
    """Create `count` pods in each of three ways.

    With the webhooks: GPU pods, and pods without a GPU request. Without the webhooks: the GPU pods as the webhooks
    rewrite them.
    """
    rewritten = cluster.api.create(paths.pods("default"), pod("template", gpu_mem=1024), query={"dryRun": "All"})
    plain = {"apiVersion": "v1", "kind": "Pod", "spec": rewritten["spec"]}

    def create_pods(prefix: str, template: dict[str, Any]) -> list[float]:
        seconds = []
        for i in range(count):
            manifest = template | {"metadata": {"name": f"{prefix}-{i}", "namespace": "default"}}
            start = time.perf_counter()
            cluster.api.create(paths.pods("default"), manifest)
            seconds.append(time.perf_counter() - start)
        return seconds

    with_webhooks = create_pods("with", pod(gpu_mem=1024))
    no_gpu = create_pods("nogpu", pod(containers=[{"name": "main", "image": "x"}]))
    for path in webhook_configurations():
        cluster.api.delete(path)
    time.sleep(2)  # the API server drops deleted configurations from its cache within a second
    without_webhooks = create_pods("without", plain)
    ratio = timing.percentile(with_webhooks, 50) / timing.percentile(without_webhooks, 50)
    return [
        timing.latency("create a GPU pod, with webhooks", with_webhooks),
        timing.latency("create the same pod as rewritten, without webhooks", without_webhooks),
        timing.latency("create a pod without GPU, webhooks in place", no_gpu),
        Row("creation with / without webhooks, p50", {"ratio": f"{ratio:.2f}"}),
    ]
