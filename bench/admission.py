"""The webhook: latency of mutate and validate over TLS at a fixed rate, and what it costs the creation of pods.

On the real apiserver of tests/cluster with the chart's webhook configurations; pods are created by one client on one
keep-alive connection, so that the ratio is that of a single user's waiting time.
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
    """`rate` requests a second on each verb for `seconds`; then `creations` pods of each kind."""
    with _cluster() as cluster:
        rows = []
        rewritten = cluster.api.create(paths.pods("default"), pod(gpu_mem="8Gi"), query={"dryRun": "All"})
        for verb, request_pod in (("mutate", pod(gpu_mem="8Gi")), ("validate", rewritten)):
            took = _at_rate(cluster.parts.url("webhook"), f"/{verb}", request_pod, rate, seconds)
            rows.append(timing.latency(f"{verb} over TLS, keep-alive, {rate} requests/s", took))
        cluster.api.create(paths.gpuquotas("default"), _quota())
        time.sleep(2)  # until the webhook has seen it
        took = _at_rate(cluster.parts.url("webhook"), "/validate", rewritten, rate, seconds)
        rows.append(timing.latency(f"the same, with a GPUQuota of {_QUOTA_ENTRIES} entries", took))
        cluster.api.delete(paths.gpuquotas("default", "bench"))
        return rows + _creation(cluster, creations)


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
    """One entry counts every card and leaves room, the others are for models."""
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


def _at_rate(url: str, path: str, request_pod: dict[str, Any], rate: int, seconds: int) -> list[float]:
    """Latencies from the time a request was due, so that a stall is charged to every request that it delays."""
    body = _review(request_pod)
    due = iter([time.perf_counter() + 0.2 + i / rate for i in range(rate * seconds)])
    lock = threading.Lock()
    took: list[float] = []
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def work() -> None:
        address = urlsplit(url)
        connection = http.client.HTTPSConnection(address.hostname or "", address.port, context=context)
        while True:
            with lock:
                when = next(due, None)
            if when is None:
                connection.close()
                return
            time.sleep(max(0.0, when - time.perf_counter()))
            connection.request("POST", path, body=body, headers={"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            if answer["response"]["allowed"] is not True:
                raise RuntimeError(answer)
            took.append(time.perf_counter() - when)

    threads = [threading.Thread(target=work) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def _creation(cluster: Cluster, count: int) -> list[Row]:
    """The same GPU pod with the webhooks, and already rewritten without them."""
    rewritten = cluster.api.create(paths.pods("default"), pod("template", gpu_mem=1024), query={"dryRun": "All"})
    plain = {"apiVersion": "v1", "kind": "Pod", "spec": rewritten["spec"]}

    def created(label: str, what: dict[str, Any]) -> list[float]:
        took = []
        for i in range(count):
            made = what | {"metadata": {"name": f"{label}-{i}", "namespace": "default"}}
            began = time.perf_counter()
            cluster.api.create(paths.pods("default"), made)
            took.append(time.perf_counter() - began)
        return took

    with_webhooks = created("with", pod(gpu_mem=1024))
    no_gpu = created("nogpu", pod(containers=[{"name": "main", "image": "x"}]))
    for path in webhook_configurations():
        cluster.api.delete(path)
    time.sleep(2)  # the apiserver drops deleted configurations from its cache within a second
    without = created("without", plain)
    ratio = timing.percentile(with_webhooks, 50) / timing.percentile(without, 50)
    return [
        timing.latency("create a GPU pod, with webhooks", with_webhooks),
        timing.latency("create the same pod as rewritten, without webhooks", without),
        timing.latency("create a pod without GPU, webhooks in place", no_gpu),
        Row("creation with / without webhooks, p50", {"ratio": f"{ratio:.2f}"}),
    ]
