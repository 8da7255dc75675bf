"""filter, prioritize, bind and start of the real extender process, with a big cluster in its ledger, over HTTP."""

import http.client
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import parts, timing
from bench.timing import Row
from bench.world import P100, class_name, node_name, pod

SIZES = range(512, P100 + 1, 64)


class Caller:
    """One keep-alive connection, as kube-scheduler has it."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(self, verb: str, body: bytes) -> tuple[float, bytes]:
        """Seconds and answer."""
        began = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/gpushare-scheduler/{verb}", body=body, headers=headers)
        answer = self._connection.getresponse().read()
        return time.perf_counter() - began, answer


@contextmanager
def big(nodes: int, pods: int, classes: int = 0) -> Iterator[parts.Extender]:
    with parts.world(nodes, pods, classes) as kubeconfig, parts.extender(kubeconfig) as extender:
        yield extender


def filter_(nodes: int, pods: int, classes: int, calls: int) -> list[Row]:
    """filter (one best node, all nodes, nothing fits, whole cards, a class) and prioritize with all the names."""
    names = json.dumps([node_name(i) for i in range(nodes)]).encode()
    draw = random.Random(7)
    rows = []
    with big(nodes, pods, classes) as extender:
        caller = Caller(extender.port)

        def measured(what: str, verb: str, count: int, **pod_options: object) -> None:
            seconds = []
            cpu = extender.cpu_seconds()
            for i in range(count):
                mem = pod_options.get("mem") or draw.choice(SIZES)
                annotations = pod_options.get("annotations")
                made = pod(f"p{i}", f"{what}-{i}", mem, annotations=annotations)
                if pod_options.get("whole"):
                    limits = made["spec"]["containers"][0]["resources"]["limits"]
                    del made["spec"]["containers"][0]["resources"]["requests"], limits["aliyun.com/gpu-mem"]
                    limits["cardwise.dev/gpu"] = str(pod_options["whole"])
                if pod_options.get("typed"):
                    resources = made["spec"]["containers"][0]["resources"]
                    for amounts in resources.values():
                        amounts[f"cardwise.dev/{class_name(i % classes)}"] = "1"
                body = b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (json.dumps(made).encode(), names)
                if verb == "prioritize":  # the scheduler asks it right after filter; that call is not counted
                    before = extender.cpu_seconds()
                    caller.post("filter", body)
                    cpu += extender.cpu_seconds() - before
                took, _ = caller.post(verb, body)
                seconds.append(took)
            with_classes = f", {classes} classes" if classes else ""
            row = timing.latency(f"{what}, {nodes} names, {pods} pods{with_classes}", seconds)
            row.values["CPU/call"] = f"{(extender.cpu_seconds() - cpu) / count * 1000:.2f} ms"
            rows.append(row)

        measured("filter, warming up", "filter", 50)
        rows.clear()
        measured("filter, one best node", "filter", calls)
        if classes:
            measured("filter, one class", "filter", calls, typed=True)
        measured("filter, no node fits", "filter", calls // 4, mem=P100 + 1)
        measured("filter, all nodes", "filter", calls // 4, annotations={"cardwise.dev/one-best-node": "false"})
        measured("filter, one whole card", "filter", calls // 10, whole=1)
        measured("filter, four whole cards", "filter", calls // 10, whole=4)
        measured("prioritize", "prioritize", calls // 4, annotations={"cardwise.dev/one-best-node": "false"})
    return rows


def bind(nodes: int, pods: int, calls: int) -> list[Row]:
    """bind against an API server that answers at once; what it costs the extender's process."""
    draw = random.Random(8)
    names = json.dumps([node_name(i) for i in range(nodes)]).encode()
    with big(nodes, pods) as extender:
        caller = Caller(extender.port)
        seconds, cpu = [], 0.0
        for i in range(calls):
            uid = f"bind-{i}"
            body = b'{"Pod":%s,"Nodes":null,"NodeNames":%s}'
            _, answer = caller.post(
                "filter", body % (json.dumps(pod(uid, uid, draw.choice(SIZES[:20]))).encode(), names)
            )
            chosen = json.loads(answer)["NodeNames"]
            call = {"PodName": uid, "PodNamespace": "default", "PodUID": uid, "Node": chosen[0]}
            before = extender.cpu_seconds()
            took, answer = caller.post("bind", json.dumps(call).encode())
            cpu += extender.cpu_seconds() - before
            if json.loads(answer)["Error"]:
                raise RuntimeError(answer)
            seconds.append(took)
    row = timing.latency(f"bind, API server of {nodes} nodes that answers at once", seconds)
    row.values["CPU/call"] = f"{cpu / calls * 1000:.2f} ms"
    return [row]


def memory(nodes: int, pods: int) -> list[Row]:
    """Memory when ready, and the time from the start of the process to ready."""
    with big(nodes, pods) as extender:
        now, peak = extender.rss_mib()
        values = {"ready after": f"{extender.ready_seconds:.2f} s", "RSS": f"{now:.0f} MiB", "peak": f"{peak:.0f} MiB"}
    return [Row(f"start and memory, {nodes} nodes x 8 cards, {pods} pods", values)]
