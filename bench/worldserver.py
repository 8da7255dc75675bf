"""An API server that lists a made-up cluster, as a process of its own: its work is not counted as the extender's.

Not a Kubernetes: lists in pages, bindings that are accepted, statuses and classes that are kept, and watches that tell
of what was written here: of pods that were created, and of their bindings. `python -m bench.worldserver NODES PODS
CLASSES PORT-FILE [--fresh]`
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from bench.world import RUNNING, Scale, World


class Kind:
    """The objects of one kind, and what its watches tell: each watch gets what comes while it runs."""

    def __init__(self, items: Sequence[bytes] = ()) -> None:
        self._items: dict[str, bytes] = {}
        self._on_node: dict[str, list[bytes]] = {}  # as they were at the start
        for item in items:
            read = json.loads(item)
            spec = read.get("spec", {})
            self._items[read["metadata"]["name"]] = item
            self._on_node.setdefault(spec.get("nodeName") or spec.get("node", ""), []).append(item)
        self._came = threading.Condition()
        self._lines: list[bytes] = []

    def page(self, start: int, limit: int) -> tuple[list[bytes], bool]:
        """Items from `start` on, and whether there are more."""
        with self._came:
            items = list(self._items.values())
        end = start + (limit or len(items))
        return items[start:end], end < len(items)

    def on_nodes(self, selector: str) -> list[bytes]:
        """Those of `spec.nodeName=x`, as a fieldSelector has it, or of `… in (x,y)`, as a labelSelector."""
        names = selector.partition("(")[2].rstrip(")") or selector.partition("=")[2]
        return [item for name in names.split(",") for item in self._on_node.get(name, ())]

    def seen(self) -> int:
        return len(self._lines)

    def after(self, seen: int, seconds: float) -> list[bytes]:
        """The events behind the first `seen`, none if none comes in time."""
        with self._came:
            self._came.wait_for(lambda: len(self._lines) > seen, seconds)
            return self._lines[seen:]

    def get(self, name: str) -> dict | None:
        with self._came:
            item = self._items.get(name)
        return json.loads(item) if item else None

    def put(self, changed: dict) -> dict:
        """Created or changed; as it is then."""
        with self._came:
            metadata = {"uid": changed["metadata"]["name"]} | changed["metadata"]
            metadata["resourceVersion"] = str(len(self._lines) + 10)
            now = changed | {"metadata": metadata}
            kind = "MODIFIED" if metadata["name"] in self._items else "ADDED"
            self._items[metadata["name"]] = json.dumps(now).encode()
            event = {"type": kind, "object": now}
            self._lines.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
            self._came.notify_all()
            return now


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    kinds: dict[str, Kind]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        kind = self.kinds.get(parts.path.rsplit("/", 1)[-1])
        if kind is None:
            self._answer(404, b'{"kind":"Status","status":"Failure","reason":"NotFound","code":404}')
        elif "watch" in query:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._watch(kind, float(query.get("timeoutSeconds", "60")))
        else:
            start, limit = int(query.get("continue", 0)), int(query.get("limit", 0))
            selector = query.get("fieldSelector") or query.get("labelSelector")
            items, more = (kind.on_nodes(selector), False) if selector else kind.page(start, limit)
            token = json.dumps(str(start + limit) if more else "").encode()
            self._answer(
                200, b'{"metadata":{"resourceVersion":"5","continue":%s},"items":[%s]}' % (token, b",".join(items))
            )

    def _watch(self, kind: Kind, seconds: float) -> None:
        seen, until = kind.seen(), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for line in kind.after(seen, left):
                seen += 1
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def do_POST(self) -> None:
        body = self._body()
        *_, name, last = self.path.partition("?")[0].split("/")
        if last == "binding":
            pods = self.kinds["pods"]
            pod = pods.get(name)
            if pod is not None:  # what was never created is bound all the same: bind alone is measured so
                metadata = pod["metadata"] | {"annotations": body["metadata"]["annotations"]}
                bound = pod | {"metadata": metadata, "spec": pod["spec"] | {"nodeName": body["target"]["name"]}}
                pods.put(bound)
                pods.put(bound | {"status": RUNNING})
        elif last in self.kinds:
            self._answer(201, json.dumps(self.kinds[last].put(body)).encode())
            return
        self._answer(201, b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}')

    def do_PATCH(self) -> None:
        patch = self._body()
        *_, kind, name, last = self.path.partition("?")[0].split("/")
        found = self.kinds[kind].get(name) if last == "status" and kind in self.kinds else None
        if found is None:
            self._answer(200, b"{}")
            return
        status = found.get("status", {}) | patch["status"]
        status = {key: value for key, value in status.items() if value is not None}
        self._answer(200, json.dumps(self.kinds[kind].put(found | {"status": status})).encode())

    def _body(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(nodes: str, pods: str, classes: str, port_file: str, *options: str) -> None:
    world = World(Scale(int(nodes), int(pods), int(classes), fresh="--fresh" in options))
    _Handler.kinds = {
        "pods": Kind(world.pods),
        "nodes": Kind(world.nodes),
        "extendedresources": Kind(world.cards),
        "resourceclasses": Kind(world.classes),
        "gpuquotas": Kind(world.quotas),
        "podgroups": Kind(),
        "poddisruptionbudgets": Kind(),
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    path = Path(port_file)
    path.with_suffix(".new").write_text(str(server.server_address[1]))
    path.with_suffix(".new").rename(path)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    server.serve_forever()


def _leave_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
