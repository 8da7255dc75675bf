"""A small API server over real HTTP, for what the real one does too rarely: 410, 429, 500, cuts, silence.

It holds pods, serves paged consistent lists and watches with bookmarks, and plays injected faults, one for each
request of the named kind.
"""

import json
import socket
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, urlsplit

from tests.listening import Listening


@dataclass
class Fault:
    """`status`: answer it. `events`: let so many events through, then `then` ("cut", "silence", "gone", "garbage")."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: int = 0
    then: str = ""


class FakeApi:
    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.version = 100
        self.objects: dict[str, dict] = {}
        self.log: list[tuple[int, str, dict]] = []
        self.compacted = 0
        self.bookmark_every = 0.05
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.closing = False
        self.snapshots: dict[str, tuple[int, list[dict]]] = {}
        self._listening = Listening(_Handler, self)

    @property
    def url(self) -> str:
        return self._listening.url

    def close(self) -> None:
        with self.condition:
            self.closing = True
            self.condition.notify_all()
        self._listening.close()

    def put(self, name: str, *, uid: str = "", **spec: object) -> None:
        with self.condition:
            self.version += 1
            known = self.objects.get(name)
            obj = {
                "metadata": {
                    "name": name,
                    "namespace": "ns",
                    "uid": uid or f"uid-{name}",
                    "resourceVersion": str(self.version),
                },
                "spec": spec,
            }
            self.objects[name] = obj
            self.log.append((self.version, "MODIFIED" if known else "ADDED", obj))
            self.condition.notify_all()

    def remove(self, name: str) -> None:
        with self.condition:
            obj = self.objects.pop(name, None)
            if obj is None:
                return
            self.version += 1
            gone = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
            self.log.append((self.version, "DELETED", gone))
            self.condition.notify_all()

    def compact(self) -> None:
        """All history is forgotten: watches that start below now get 410."""
        with self.condition:
            self.version += 1
            self.compacted = self.version
            self.log.clear()
            self.snapshots.clear()

    def count(self, kind: str) -> int:
        with self.condition:
            return sum(1 for _, _, query, _ in self.requests if ("watch" in query) == (kind == "watch"))


def status_body(code: int, reason: str, message: str = "told by the fake") -> bytes:
    return json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message}).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeApi

    def log_message(self, *args):
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        kind = "watch" if "watch" in query else "list"
        with self.fake.condition:
            self.fake.requests.append(("GET", parts.path, query, b""))
            fault = self.fake.faults[kind].popleft() if self.fake.faults[kind] else Fault()
        if fault.status:
            self.answer(fault.status, fault.body or status_body(fault.status, ""), fault.headers)
        elif kind == "list":
            self.list(query)
        else:
            self.watch(query, fault)

    def other(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        with self.fake.condition:
            self.fake.requests.append((self.command, parts.path, dict(parse_qsl(parts.query)), body))
            self.fake.condition.notify_all()
            queue = self.fake.faults[self.command]
            fault = queue.popleft() if queue else Fault()
        if fault.then == "cut":
            self.cut()
            return
        status = fault.status or 200
        self.answer(status, fault.body or (body if status < 300 else status_body(status, "")), fault.headers)

    do_POST = do_PUT = do_PATCH = do_DELETE = other  # noqa: N815 - the names http.server looks for

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def list(self, query: dict[str, str]) -> None:
        fake = self.fake
        limit = int(query.get("limit", "0"))
        with fake.condition:
            if "continue" in query:
                token, _, offset = query["continue"].partition("/")
                if token not in fake.snapshots:
                    self.answer(410, status_body(410, "Expired"), {})
                    return
                version, items = fake.snapshots[token]
                start = int(offset)
            else:
                version, items, start = fake.version, list(fake.objects.values()), 0
                token = f"t{version}-{time.monotonic_ns()}"
                fake.snapshots[token] = (version, items)
        page = items[start : start + limit] if limit else items
        metadata = {"resourceVersion": str(version)}
        if limit and start + limit < len(items):
            metadata["continue"] = f"{token}/{start + limit}"
        self.answer(200, json.dumps({"kind": "PodList", "metadata": metadata, "items": page}).encode(), {})

    def watch(self, query: dict[str, str], fault: Fault) -> None:
        fake = self.fake
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        seen = int(query["resourceVersion"])
        until = time.monotonic() + float(query["timeoutSeconds"])
        sent = 0
        bookmark = time.monotonic() + fake.bookmark_every
        while True:
            with fake.condition:
                if seen < fake.compacted:
                    self.event("ERROR", json.loads(status_body(410, "Expired")))
                    self.end_stream()
                    return
                fresh = [entry for entry in fake.log if entry[0] > seen]
                now_version = fake.version  # a bookmark at it skips nothing: `fresh` is everything up to it
                if not fresh and not (fault.then and sent >= fault.events):
                    fake.condition.wait(0.02)
                if fake.closing or time.monotonic() > until:
                    self.end_stream()
                    return
            for version, kind, obj in fresh:
                if fault.then and sent >= fault.events:
                    break
                self.event(kind, obj)
                seen = version
                sent += 1
            if fault.then and sent >= fault.events:
                self.end_with(fault.then)
                return
            if not fresh and time.monotonic() > bookmark:
                self.event("BOOKMARK", {"metadata": {"resourceVersion": str(now_version)}})
                seen = now_version
                bookmark = time.monotonic() + fake.bookmark_every

    def event(self, kind: str, obj: dict) -> None:
        line = json.dumps({"type": kind, "object": obj}).encode() + b"\n"
        # In two chunks, as a TCP stream may well deliver it.
        for part in (line[:17], line[17:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    def end_with(self, how: str) -> None:
        if how == "cut":
            self.cut()
        elif how == "gone":
            self.event("ERROR", json.loads(status_body(410, "Expired")))
            self.end_stream()
        elif how == "garbage":
            self.wfile.write(b"3\r\n{x}\r\n1\r\n\n\r\n")
            self.end_stream()
        else:  # silence: half-open, the connection stays and nothing comes
            with self.fake.condition:
                self.fake.condition.wait_for(lambda: self.fake.closing, timeout=20)
            self.close_connection = True

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
