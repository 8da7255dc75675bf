"""filter, prioritize, bind and start of the real extender process, with a big cluster in its ledger, over HTTP."""

import http.client
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import yaml

from bench import parts, timing
from bench.timing import Row
from bench.world import P100, class_name, node_name, pod

SIZES = range(512, P100 + 1, 64)
STATUSES = 2.0  # seconds, in which what is left of the first statuses is written
TOGETHER = 50  # binds between two looks at the CPU time, so that what filter does after its answer is not counted


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
def big(
    nodes: int, pods: int, classes: int = 0, *, fresh: bool = False, options: Sequence[str] = ()
) -> Iterator[parts.Extender]:
    with parts.world(nodes, pods, classes, fresh=fresh) as kubeconfig, parts.extender(kubeconfig, *options) as extender:
        time.sleep(STATUSES)
        yield extender


def filter_(
    nodes: int, pods: int, classes: int, calls: int, *, fresh: bool = False, options: Sequence[str] = ()
) -> list[Row]:
    """filter (one best node, all nodes, nothing fits, whole cards, a class) and prioritize with all the names."""
    names = json.dumps([node_name(i) for i in range(nodes)]).encode()
    draw = random.Random(7)
    rows = []
    with big(nodes, pods, classes, fresh=fresh, options=options) as extender:
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
        for start in range(0, calls, TOGETHER):
            bodies = []
            for i in range(start, min(start + TOGETHER, calls)):
                uid = f"bind-{i}"
                made = json.dumps(pod(uid, uid, draw.choice(SIZES[:20]))).encode()
                _, answer = caller.post("filter", b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (made, names))
                chosen = json.loads(answer)["NodeNames"]
                call = {"PodName": uid, "PodNamespace": "default", "PodUID": uid, "Node": chosen[0]}
                bodies.append(json.dumps(call).encode())
            before = extender.cpu_seconds()
            for body in bodies:
                took, answer = caller.post("bind", body)
                if json.loads(answer)["Error"]:
                    raise RuntimeError(answer)
                seconds.append(took)
            cpu += extender.cpu_seconds() - before
    row = timing.latency(f"bind, API server of {nodes} nodes that answers at once", seconds)
    row.values["CPU/call"] = f"{cpu / calls * 1000:.2f} ms"
    return [row]


def pod_cost(nodes: int, calls: int) -> list[Row]:
    """What a pod costs the extender's process: filter, bind, and the watch events from its creation to Running."""
    draw = random.Random(9)
    names = json.dumps([node_name(i) for i in range(nodes)]).encode()
    with parts.world(nodes, 0) as kubeconfig, parts.extender(kubeconfig) as extender:
        server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        caller, api = Caller(extender.port), http.client.HTTPConnection(urlsplit(server).netloc)
        time.sleep(STATUSES)
        took: dict[str, list[float]] = {"filter": [], "bind": []}
        before = extender.cpu_seconds()
        for i in range(calls):
            made = json.dumps(pod(f"pod-{i}", f"uid-{i}", draw.choice(SIZES))).encode()
            api.request("POST", "/api/v1/namespaces/default/pods", body=made)
            api.getresponse().read()
            seconds, answer = caller.post("filter", b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (made, names))
            took["filter"].append(seconds)
            call = {"PodName": f"pod-{i}", "PodNamespace": "default", "PodUID": f"uid-{i}"}
            call["Node"] = json.loads(answer)["NodeNames"][0]
            seconds, answer = caller.post("bind", json.dumps(call).encode())
            if json.loads(answer)["Error"]:
                raise RuntimeError(answer)
            took["bind"].append(seconds)
        time.sleep(0.5)  # for the last events
        cpu = extender.cpu_seconds() - before
    rows = [timing.latency(f"{verb}, {nodes} names", seconds) for verb, seconds in took.items()]
    return [*rows, Row(f"a pod of {calls}, from its creation to Running", {"CPU": f"{cpu / calls * 1000:.2f} ms"})]


def memory(nodes: int, pods: int) -> list[Row]:
    """Memory when ready, and the time from the start of the process to ready."""
    with (
        parts.compiled() as env,
        parts.world(nodes, pods) as kubeconfig,
        parts.extender(kubeconfig, env=env) as extender,
    ):
        cpu = extender.cpu_seconds()  # of the serving process, without the imports of the one that it was forked from
        now, peak = extender.rss_mib()
        values = {"ready after": f"{extender.ready_seconds:.2f} s", "CPU of the lists": f"{cpu:.2f} s"}
        values |= {"RSS": f"{now:.0f} MiB", "peak": f"{peak:.0f} MiB"}
    return [Row(f"start and memory, {nodes} nodes x 8 cards, {pods} pods", values)]
