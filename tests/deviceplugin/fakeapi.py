"""The few verbs of an API server that the device plugin uses, over real HTTP, for any kind of object.

Only to run the agent in a second without a cluster; what it does on the real API server is in tests/integration.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, urlsplit

from tests.listening import Listening

_COLLECTIONS = (
    "/api/v1/pods",
    "/api/v1/nodes",
    "/apis/cardwise.dev/v1alpha1/extendedresources",
    "/apis/cardwise.dev/v1alpha1/resourceclasses",
    "/api/v1/events",
)


def merge(target, change):
    """RFC 7386."""
    if not isinstance(change, dict):
        return change
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


class FakeApi:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 1
        self.objects: dict[str, dict[str, dict]] = {collection: {} for collection in _COLLECTIONS}
        self.log: list[tuple[int, str, str, dict]] = []
        self.patches: list[tuple[str, dict]] = []
        self.posts: list[tuple[str, dict]] = []
        self.budget = False  # a disruption budget keeps all pods
        self.graceful = False  # evicted pods have time to end
        self.closing = False
        self.down = False  # every request is cut off
        self.missing: set[str] = set()  # collections whose CRD is not installed
        self.before_patch = lambda path, change: None  # what somebody else does just before one is taken
        self._listening = Listening(_Handler, self)

    @property
    def url(self) -> str:
        return self._listening.url

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self._listening.close()

    def stop_answering(self, down: bool = True) -> None:
        with self.changed:
            self.down = down
            self.changed.notify_all()

    def put(self, collection: str, obj: dict) -> dict:
        with self.changed:
            key = _key(obj)
            kind = "MODIFIED" if key in self.objects[collection] else "ADDED"
            return self._store(collection, key, kind, obj)

    def delete(self, collection: str, name: str, namespace: str = "") -> None:
        with self.changed:
            key = f"{namespace}/{name}" if namespace else name
            obj = self.objects[collection].pop(key)
            self._log(collection, "DELETED", obj)

    def get(self, collection: str, name: str, namespace: str = "") -> dict | None:
        with self.changed:
            return self.objects[collection].get(f"{namespace}/{name}" if namespace else name)

    def _store(self, collection: str, key: str, kind: str, obj: dict) -> dict:
        obj = json.loads(json.dumps(obj))
        self.objects[collection][key] = obj
        self._log(collection, kind, obj)
        return obj

    def _log(self, collection: str, kind: str, obj: dict) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.log.append((self.version, collection, kind, json.loads(json.dumps(obj))))
        self.changed.notify_all()


def _key(obj: dict) -> str:
    metadata = obj["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else metadata["name"]


def _selected(obj: dict, query: dict[str, str]) -> bool:
    field, _, wanted = query.get("fieldSelector", "").partition("=")
    value = {
        "": "",
        "metadata.name": obj["metadata"]["name"],
        "spec.nodeName": (obj.get("spec") or {}).get("nodeName", ""),
    }[field]
    label, _, text = query.get("labelSelector", "").partition("=")
    return value == wanted and (not label or (obj["metadata"].get("labels") or {}).get(label) == text)


def _differs(change: dict, metadata: dict) -> bool:
    """Whether the change is meant for another object, or for another version of it."""
    return any(change.get(field, metadata.get(field)) != metadata.get(field) for field in ("uid", "resourceVersion"))


class _Handler(BaseHTTPRequestHandler):
    fake: FakeApi
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.gone():
            return
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        collection, key, _ = self.where(url.path)
        if collection in self.fake.missing:
            self.answer(404, _status(404, "NotFound"))
        elif key:
            with self.fake.changed:
                obj = self.fake.objects[collection].get(key)
            self.answer(200 if obj else 404, obj or _status(404, "NotFound"))
        elif "watch" in query:
            self.watch(collection, query)
        else:
            with self.fake.changed:
                items = [obj for obj in self.fake.objects[collection].values() if _selected(obj, query)]
                self.answer(200, {"metadata": {"resourceVersion": str(self.fake.version)}, "items": items})

    def do_POST(self):
        if self.gone():
            return
        collection, key, sub = self.where(urlsplit(self.path).path)
        obj = self.body()
        with self.fake.changed:
            self.fake.posts.append((self.path, obj))
            if sub == "eviction":
                self.evict(collection, key)
                return
            if _key(obj) in self.fake.objects[collection]:
                self.answer(409, _status(409, "AlreadyExists"))
                return
            self.answer(201, self.fake.put(collection, obj))

    def evict(self, collection, key):
        if self.fake.budget:
            self.answer(429, _status(429, "TooManyRequests"))
            return
        namespace, _, name = key.rpartition("/")
        if self.fake.graceful:
            ending = {"metadata": {"deletionTimestamp": "2100-01-01T00:00:00Z", "deletionGracePeriodSeconds": 600}}
            self.fake.put(collection, merge(self.fake.objects[collection][key], ending))
        else:
            self.fake.delete(collection, name, namespace)
        self.answer(201, _status(201, ""))

    def do_PATCH(self):
        if self.gone():
            return
        collection, key, _ = self.where(urlsplit(self.path).path)
        change = self.body()
        self.fake.before_patch(self.path, change)
        with self.fake.changed:
            self.fake.patches.append((self.path, change))
            obj = self.fake.objects[collection].get(key)
            if obj is None:
                self.answer(404, _status(404, "NotFound"))
            elif _differs(change.get("metadata") or {}, obj["metadata"]):
                self.answer(409, _status(409, "Conflict"))
            else:
                self.answer(200, self.fake.put(collection, merge(obj, change)))

    def do_DELETE(self):
        if self.gone():
            return
        collection, key, _ = self.where(urlsplit(self.path).path)
        self.body()
        namespace, _, name = key.rpartition("/")
        self.fake.delete(collection, name, namespace)
        self.answer(200, {})

    def watch(self, collection, query):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        seen = int(query["resourceVersion"])
        until = time.monotonic() + float(query["timeoutSeconds"])
        while not (self.fake.closing or self.fake.down) and time.monotonic() < until:
            with self.fake.changed:
                fresh = [entry for entry in self.fake.log if entry[0] > seen]
                if not fresh:
                    self.fake.changed.wait(0.2)
                    continue
            for version, where, kind, obj in fresh:
                seen = version
                if where == collection and _selected(obj, query):
                    line = json.dumps({"type": kind, "object": obj}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.close_connection = True
        if not self.fake.down:
            self.wfile.write(b"0\r\n\r\n")

    def gone(self) -> bool:
        if self.fake.down:
            self.close_connection = True
        return self.fake.down

    def where(self, path):
        for collection in _COLLECTIONS:
            if path == collection or path.startswith(collection + "/"):
                name, _, sub = path[len(collection) + 1 :].partition("/")
                return collection, name, sub
        _, _, _, _, namespace, plural, *rest = path.split("/")  # /api/v1/namespaces/NS/pods/NAME
        name, sub = [*rest, "", ""][:2]
        return f"/api/v1/{plural}", f"{namespace}/{name}" if name else "", sub

    def body(self):
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length) or b"{}")

    def answer(self, status, obj):
        content = json.dumps(obj).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _status(code, reason):
    return {"kind": "Status", "code": code, "reason": reason, "message": reason}
