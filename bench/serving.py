"""Measures the extender over HTTP with a big cluster in its ledger: filter, prioritize, bind, start and memory."""

import http.client
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from bench import processes, timing
from bench.synthetic import P100, class_name, encode_node_names, filter_body, pod
from bench.timing import Row

SIZES = range(512, P100 + 1, 64)  # the requests of single pods in MiB
STATUS_WRITES_SECONDS = 2.0  # wait until the extender has written the remaining first statuses
# Binds between two samples of CPU time. The filter calls for these pods come before the first sample, so that filter's
# work after its response does not count as bind's work.
BINDS_PER_CPU_SAMPLE = 50


class Caller:
    """A client with one keep-alive connection, like kube-scheduler."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(self, verb: str, body: bytes) -> tuple[float, bytes]:
        """Call a verb of the extender. Returns the seconds until the response was read, and its body."""
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/gpushare-scheduler/{verb}", body=body, headers=headers)
        response = self._connection.getresponse().read()
        return time.perf_counter() - start, response


@contextmanager
def extender_with_cluster(
    nodes: int, pods: int, classes: int = 0, *, fresh: bool = False, options: Sequence[str] = ()
) -> Iterator[processes.ExtenderProcess]:
    """Run the extender with a synthetic cluster, and wait until it has written its first statuses.

    fresh: whether no card has a status at the start.
    options: options of the extender's command line.
    """
    with (
        processes.synthetic_api_server(nodes, pods, classes, fresh=fresh) as kubeconfig,
        processes.run_extender(kubeconfig, *options) as extender,
    ):
        time.sleep(STATUS_WRITES_SECONDS)
        yield extender


def measure_filter(
    nodes: int, pods: int, classes: int, calls: int, *, fresh: bool = False, options: Sequence[str] = ()
) -> list[Row]:
    """Measure filter (one best node, all nodes, no node fits, whole cards, a class) and prioritize.

    Each call has the names of all nodes. For the parameters see `extender_with_cluster`.
    """
    names = encode_node_names(nodes)
    rng = random.Random(7)
    rows = []
    with extender_with_cluster(nodes, pods, classes, fresh=fresh, options=options) as extender:
        caller = Caller(extender.port)

        def measure(
            label: str,
            verb: str,
            count: int,
            *,
            mem: int = 0,
            annotations: dict[str, str] | None = None,
            whole: int = 0,
            class_request: bool = False,
        ) -> None:
            """mem: MiB that each pod requests; 0: a random amount. whole: whole cards that it requests instead."""
            seconds = []
            cpu = extender.cpu_seconds()
            for i in range(count):
                manifest = pod(f"p{i}", f"{label}-{i}", mem or rng.choice(SIZES), annotations=annotations)
                if whole:
                    limits = manifest["spec"]["containers"][0]["resources"]["limits"]
                    del manifest["spec"]["containers"][0]["resources"]["requests"], limits["aliyun.com/gpu-mem"]
                    limits["cardwise.dev/gpu"] = str(whole)
                if class_request:
                    resources = manifest["spec"]["containers"][0]["resources"]
                    for amounts in resources.values():
                        amounts[f"cardwise.dev/{class_name(i % classes)}"] = "1"
                body = filter_body(manifest, names)
                if verb == "prioritize":  # kube-scheduler calls it after filter; filter's CPU is not counted
                    start_cpu = extender.cpu_seconds()
                    caller.post("filter", body)
                    cpu += extender.cpu_seconds() - start_cpu
                duration, _ = caller.post(verb, body)
                seconds.append(duration)
            with_classes = f", {classes} classes" if classes else ""
            row = timing.latency(f"{label}, {nodes} names, {pods} pods{with_classes}", seconds)
            row.cells["CPU/call"] = f"{(extender.cpu_seconds() - cpu) / count * 1000:.2f} ms"
            rows.append(row)

        measure("filter, warming up", "filter", 50)
        rows.clear()
        measure("filter, one best node", "filter", calls)
        if classes:
            measure("filter, one class", "filter", calls, class_request=True)
        measure("filter, no node fits", "filter", calls // 4, mem=P100 + 1)
        measure("filter, all nodes", "filter", calls // 4, annotations={"cardwise.dev/one-best-node": "false"})
        measure("filter, one whole card", "filter", calls // 10, whole=1)
        measure("filter, four whole cards", "filter", calls // 10, whole=4)
        measure("prioritize", "prioritize", calls // 4, annotations={"cardwise.dev/one-best-node": "false"})
    return rows


def measure_bind(nodes: int, pods: int, calls: int) -> list[Row]:
    """Measure bind with an API server that responds at once, so that only the extender's work counts."""
    rng = random.Random(8)
    names = encode_node_names(nodes)
    with extender_with_cluster(nodes, pods) as extender:
        caller = Caller(extender.port)
        seconds, cpu = [], 0.0
        for start in range(0, calls, BINDS_PER_CPU_SAMPLE):
            bodies = []
            for i in range(start, min(start + BINDS_PER_CPU_SAMPLE, calls)):
                uid = f"bind-{i}"
                manifest = pod(uid, uid, rng.choice(SIZES[:20]))
                _, response = caller.post("filter", filter_body(manifest, names))
                chosen = json.loads(response)["NodeNames"]
                call = {"PodName": uid, "PodNamespace": "default", "PodUID": uid, "Node": chosen[0]}
                bodies.append(json.dumps(call).encode())
            before = extender.cpu_seconds()
            for body in bodies:
                duration, response = caller.post("bind", body)
                if json.loads(response)["Error"]:
                    raise RuntimeError(response)
                seconds.append(duration)
            cpu += extender.cpu_seconds() - before
    row = timing.latency(f"bind, API server of {nodes} nodes that answers at once", seconds)
    row.cells["CPU/call"] = f"{cpu / calls * 1000:.2f} ms"
    return [row]


def measure_pod(nodes: int, calls: int) -> list[Row]:
    """Measure the extender's CPU for one pod: filter, bind, and the watch events from its creation to Running."""
    rng = random.Random(9)
    names = encode_node_names(nodes)
    with processes.synthetic_api_server(nodes, 0) as kubeconfig, processes.run_extender(kubeconfig) as extender:
        server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        caller, api = Caller(extender.port), http.client.HTTPConnection(urlsplit(server).netloc)
        time.sleep(STATUS_WRITES_SECONDS)
        duration: dict[str, list[float]] = {"filter": [], "bind": []}
        before = extender.cpu_seconds()
        for i in range(calls):
            manifest = pod(f"pod-{i}", f"uid-{i}", rng.choice(SIZES))
            api.request("POST", "/api/v1/namespaces/default/pods", body=json.dumps(manifest).encode())
            api.getresponse().read()
            seconds, response = caller.post("filter", filter_body(manifest, names))
            duration["filter"].append(seconds)
            call = {"PodName": f"pod-{i}", "PodNamespace": "default", "PodUID": f"uid-{i}"}
            call["Node"] = json.loads(response)["NodeNames"][0]
            seconds, response = caller.post("bind", json.dumps(call).encode())
            if json.loads(response)["Error"]:
                raise RuntimeError(response)
            duration["bind"].append(seconds)
        time.sleep(0.5)  # wait until the last events are handled
        cpu = extender.cpu_seconds() - before
    rows = [timing.latency(f"{verb}, {nodes} names", seconds) for verb, seconds in duration.items()]
    return [*rows, Row(f"a pod of {calls}, from its creation to Running", {"CPU": f"{cpu / calls * 1000:.2f} ms"})]


def measure_memory(nodes: int, pods: int, *, code: Path = processes.ROOT, label: str = "") -> list[Row]:
    """Measure the time from the start of the extender's process until it is ready, and its memory then.

    code: the checkout of the extender.
    label: added to the row's label.
    """
    with (
        processes.compiled_environment(code) as env,
        processes.synthetic_api_server(nodes, pods) as kubeconfig,
        processes.run_extender(kubeconfig, env=env, code=code) as extender,
    ):
        cpu = extender.cpu_seconds()  # the CPU time of the serving process; its parent process did the imports
        now, peak = extender.rss_mib()
        cells = {"ready after": f"{extender.ready_seconds:.2f} s", "CPU of the lists": f"{cpu:.2f} s"}
        cells |= {"RSS": f"{now:.0f} MiB", "peak": f"{peak:.0f} MiB"}
    return [Row(f"start and memory, {nodes} nodes x 8 cards, {pods} pods{label and f': {label}'}", cells)]
