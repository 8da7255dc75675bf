"""An API server with a synthetic cluster, in its own process, so that its work is not counted as the extender's work.

The server handles only the requests of the extender: lists in pages, creation of objects, patches of statuses,
bindings, and watches of these changes; deletions of pods, and `POST /expire-watches`, which ends all watches with the
status 410, so that their clients list all objects again.

Usage: `python -m bench.apiserver NODES PODS CLASSES PORT-FILE [--fresh]`
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from bench.synthetic import RUNNING, Scale, SyntheticCluster
from cardwise.core.values.decoded import Json

_FIRST_VERSION: Final = 10  # the resourceVersion of the first event
_EXPIRED: Final = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,'
    b'"message":"too old resource version"}}\n'
)


class ObjectStore:
    """The objects of one kind in JSON, and the watch events since the start of the server."""

    def __init__(self, objects: Sequence[bytes] = ()) -> None:
        self._objects: dict[str, bytes] = {}
        self._on_node: dict[str, list[bytes]] = {}  # by node, the objects at the start of the server
        for text in objects:
            decoded = json.loads(text)
            spec = decoded.get("spec", {})
            self._objects[decoded["metadata"]["name"]] = text
            self._on_node.setdefault(spec.get("nodeName") or spec.get("node", ""), []).append(text)
        self._changed = threading.Condition()
        self.expired_count = 0  # how many times the watches have expired
        self._events: list[bytes] = []

    def page(self, start: int, limit: int) -> tuple[list[bytes], bool]:
        """Up to `limit` objects (0: all) from index `start` on, and whether more objects follow."""
        with self._changed:
            objects = list(self._objects.values())
        end = start + (limit or len(objects))
        return objects[start:end], end < len(objects)

    def objects_on_nodes(self, selector: str) -> list[bytes]:
        """The objects on the nodes of a fieldSelector `spec.nodeName=x` or a labelSelector `… in (x,y)`."""
        names = selector.partition("(")[2].rstrip(")") or selector.partition("=")[2]
        return [text for name in names.split(",") for text in self._on_node.get(name, ())]

    def expire_watches(self) -> None:
        """End all watches with the status 410."""
        with self._changed:
            self.expired_count += 1
            self._changed.notify_all()

    def version(self) -> int:
        """The resourceVersion of the last event."""
        return len(self._events) + _FIRST_VERSION - 1

    def wait_for_events(self, version: int, seconds: float) -> list[bytes]:
        """The watch events after this resourceVersion. Waits up to `seconds` for the first event, or until the watches
        expire.
        """
        with self._changed:
            expired, start = self.expired_count, version - _FIRST_VERSION + 1
            self._changed.wait_for(lambda: len(self._events) > start or self.expired_count > expired, seconds)
            return self._events[start:]

    def get(self, name: str) -> Json | None:
        """The object with this name; None if it does not exist."""
        with self._changed:
            text = self._objects.get(name)
        decoded: Json | None = json.loads(text) if text else None
        return decoded

    def delete(self, name: str) -> None:
        """Delete an object, if it exists, and record the watch event."""
        with self._changed:
            text = self._objects.pop(name, None)
            if text is not None:
                deleted = json.loads(text)
                deleted["metadata"]["resourceVersion"] = self._next_version()
                self._events.append(json.dumps({"type": "DELETED", "object": deleted}).encode() + b"\n")
                self._changed.notify_all()

    def _next_version(self) -> str:
        """The resourceVersion of the next event."""
        return str(len(self._events) + _FIRST_VERSION)

    def write(self, desired: Json) -> Json:
        """Create or replace an object, and record the watch event. Returns it with uid and resourceVersion."""
        with self._changed:
            metadata = {"uid": desired["metadata"]["name"]} | desired["metadata"]
            metadata["resourceVersion"] = self._next_version()
            stored = desired | {"metadata": metadata}
            event_type = "MODIFIED" if metadata["name"] in self._objects else "ADDED"
            self._objects[metadata["name"]] = json.dumps(stored).encode()
            event = {"type": event_type, "object": stored}
            self._events.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
            self._changed.notify_all()
            return stored


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    stores: dict[str, ObjectStore]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        store = self.stores.get(parts.path.rsplit("/", 1)[-1])
        if store is None:
            self._respond(404, b'{"kind":"Status","status":"Failure","reason":"NotFound","code":404}')
        elif "watch" in query:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            version = int(query.get("resourceVersion") or store.version())
            self._watch(store, version, float(query.get("timeoutSeconds", "60")))
        else:
            position, _, version_text = query.get("continue", "0").partition(".")
            version = int(version_text or store.version())  # all pages have the version of the first page
            start, limit = int(position), int(query.get("limit", 0))
            selector = query.get("fieldSelector") or query.get("labelSelector")
            objects, has_more = (store.objects_on_nodes(selector), False) if selector else store.page(start, limit)
            token = json.dumps(f"{start + limit}.{version}" if has_more else "").encode()
            listed = b",".join(objects)
            self._respond(
                200, b'{"metadata":{"resourceVersion":"%d","continue":%s},"items":[%s]}' % (version, token, listed)
            )

    def _watch(self, store: ObjectStore, version: int, seconds: float) -> None:
        deadline, expired = time.monotonic() + seconds, store.expired_count
        while (remaining := deadline - time.monotonic()) > 0 and store.expired_count == expired:
            for event in store.wait_for_events(version, remaining):
                version += 1
                self._write_event(event)
        if store.expired_count != expired:
            self._write_event(_EXPIRED)
        self.wfile.write(b"0\r\n\r\n")

    def _write_event(self, event: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def do_DELETE(self) -> None:
        self._body()
        *_, kind, name = self.path.partition("?")[0].split("/")
        self.stores[kind].delete(name)
        self._respond(200, b"{}")

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/expire-watches":
            for store in self.stores.values():
                store.expire_watches()
            self._respond(200, b"{}")
            return
        *_, name, last = self.path.partition("?")[0].split("/")
        if last == "binding":
            pods = self.stores["pods"]
            pod = pods.get(name)
            if pod is not None:  # pods that were never created can be bound too: `bench bind` does so
                metadata = pod["metadata"] | {"annotations": body["metadata"]["annotations"]}
                bound = pod | {"metadata": metadata, "spec": pod["spec"] | {"nodeName": body["target"]["name"]}}
                pods.write(bound)
                pods.write(bound | {"status": RUNNING})
        elif last in self.stores:
            self._respond(201, json.dumps(self.stores[last].write(body)).encode())
            return
        self._respond(201, b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}')

    def do_PATCH(self) -> None:
        patch = self._body()
        *_, kind, name, last = self.path.partition("?")[0].split("/")
        current = self.stores[kind].get(name) if last == "status" and kind in self.stores else None
        if current is None:
            self._respond(200, b"{}")
            return
        status = current.get("status", {}) | patch["status"]
        status = {name: field for name, field in status.items() if field is not None}
        self._respond(200, json.dumps(self.stores[kind].write(current | {"status": status})).encode())

    def _body(self) -> Json:
        body: Json = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(nodes: str, pods: str, classes: str, port_file: str, *options: str) -> None:
    cluster = SyntheticCluster(Scale(int(nodes), int(pods), int(classes), fresh="--fresh" in options))
    _Handler.stores = {
        "pods": ObjectStore(cluster.pods),
        "nodes": ObjectStore(cluster.nodes),
        "extendedresources": ObjectStore(cluster.cards),
        "resourceclasses": ObjectStore(cluster.classes),
        "gpuquotas": ObjectStore(cluster.quotas),
        "podgroups": ObjectStore(),
        "poddisruptionbudgets": ObjectStore(),
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    path = Path(port_file)
    path.with_suffix(".new").write_text(str(server.server_address[1]))
    path.with_suffix(".new").rename(path)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    server.serve_forever()


def _exit_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
