"""An API server in memory: what tests hand to a part instead of a cluster.

It stores objects of the kinds in `apiobjects.KINDS` and answers the requests that Cardwise sends as kube-apiserver
does; test_contract.py runs the same tests against both. It has every namespace and validates no object. Faults are
ordered by `fault`; `before` and `after` run what others do at that moment. Time is that of the `Clock`.

Two ways in: `client()` is a real KubeClient on a transport without sockets and threads, `serve()` is HTTP on loopback.
"""

import itertools
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from email.utils import format_datetime
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from cardwise.clock import SYSTEM, Clock
from cardwise.kube.client import KubeClient
from tests.fakes.apiobjects import KINDS, Json, Kind, Refused, Target, managed, merged, patched, selector, status

_encode, _decode = msgspec.json.encode, msgspec.json.decode

_PATIENCE = 60.0  # real seconds after which `until` is a bug of the test
_BOOKMARK_SECONDS = 60.0
_GRACE = 30
# Of the metadata what only the server writes.
_OWN = (
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds", "managedFields",
)  # fmt: skip
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a request instead of being carried out and answered; without anything it is nothing.

    `status`: it is refused so. `refused`: there is no connection. `lost`: it is carried out, and the answer is lost.
    `seconds`: it takes so long; if the client waits less, it is carried out only if `lost`.
    `then`: a watch does this after so many `events`: "end", "cut", "silence", "garbage", "gone".
    """

    status: int = 0
    reason: str = ""
    message: str = "told by the test"
    retry_after: int | None = None
    body: bytes | None = None
    refused: bool = False
    lost: bool = False
    seconds: float = 0.0
    events: int = 0
    then: str = ""

    def answer(self) -> "Answer":
        body = _encode(status(self.status, self.message, self.reason)) if self.body is None else self.body
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return Answer(self.status, body, headers)


@dataclass(frozen=True, slots=True)
class Request:
    """As it arrived. `verb` is that of Kubernetes: get, list, watch, create, update, patch or delete."""

    verb: str
    path: str
    query: dict[str, str]
    body: Any  # decoded, None without
    headers: dict[str, str]
    timeout: float | None  # of the client, where it can be known
    raw: bytes = b""

    @classmethod
    def of(
        cls, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout: float | None = None
    ) -> "Request":
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method, "get")
        target = Target.of(parts.path)
        if verb == "get" and not target.name and target.collection in KINDS:
            verb = "watch" if "watch" in query else "list"
        decoded = None
        with suppress(msgspec.DecodeError):
            decoded = _decode(body) if body else None
        return cls(verb, parts.path, query, decoded, headers, timeout, body or b"")


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stream: "Stream | None" = None


@dataclass(slots=True)
class Rule:
    """A fault or a hook, and for which requests; `left` is how often yet."""

    what: Any
    verb: str
    path: str
    left: float

    def takes(self, request: Request) -> bool:
        if self.left <= 0 or self.verb not in ("", request.verb) or not fnmatchcase(request.path, self.path):
            return False
        self.left -= 1
        return True

    def end(self) -> None:
        self.left = 0


_Key = tuple[str, str, str]  # collection, namespace, name


@dataclass(frozen=True, slots=True)
class _Entry:
    """One write. `now` is None for a deletion."""

    revision: int
    key: _Key
    before: Json | None
    now: Json | None


class ApiServer:
    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.changed = threading.Condition()  # notified of whatever happens here
        self.requests: list[Request] = []
        self.missing: set[str] = set()  # collections whose kind is not installed
        self.admission: list[Callable[[Request], object]] = []  # asked of all that is carried out; raise Refused
        # What else there is, by path: a JSON value, bytes, an Answer, or what makes one of the request.
        self.answers: dict[str, Any] = {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "/readyz": b"ok",
            "/apis/authentication.k8s.io/v1/selfsubjectreviews": lambda _: {
                "status": {"userInfo": {"username": "jane"}}
            },
        }
        self._objects: dict[_Key, Json] = {}
        self._log: list[_Entry] = []
        self._revision = 100
        self._compacted = 0
        self._shown: dict[str, int] = {}  # collection -> revision that its watches may tell of
        self._snapshots: dict[str, tuple[int, list[Json]]] = {}
        self._numbers = itertools.count(1)
        self._rules: dict[str, list[Rule]] = {"fault": [], "before": [], "after": []}
        self._streams: list[Stream] = []
        self._down = False
        self._closing: list[Callable[[], None]] = []

    # For parts.

    def client(self, **settings: Any) -> KubeClient:
        """A KubeClient that reaches this server without sockets."""
        from tests.fakes.apidoors import InMemoryClient

        return InMemoryClient(self, **settings)

    def serve(self) -> str:
        """The URL at which it listens from now on."""
        from tests.fakes.apidoors import Handler
        from tests.listening import Listening

        listening = Listening(Handler, self)
        self._closing.append(listening.close)
        return listening.url

    def close(self) -> None:
        self.end_watches("end")
        for close in self._closing:
            close()

    # What others do.

    def put(self, collection: str, obj: Json) -> Json:
        """Somebody else writes the whole object, status and all. A uid is kept or made; a namespace is "default"."""
        with self.changed:
            obj = _copy(obj)
            metadata = obj["metadata"]
            if KINDS[collection].namespaced:
                metadata.setdefault("namespace", "default")
            key = (collection, metadata.get("namespace", ""), metadata["name"])
            before = self._objects.get(key)
            for name, value in (before["metadata"] if before is not None else self._born()).items():
                if name in ("uid", "creationTimestamp"):
                    metadata.setdefault(name, value)
            self._count_generation(KINDS[collection], before, obj)
            return _copy(self._store(key, obj))

    def edit(self, path: str, **change: Any) -> Json:
        """Somebody else changes an object, by a merge patch of any of its parts."""
        with self.changed:
            target = Target.of(path)
            return self.put(target.collection, merged(self._found(target), change))

    def remove(self, path: str) -> None:
        """The object is gone, whatever had been asked to keep it."""
        with self.changed:
            self._remove(_key(Target.of(path)))

    def get(self, path: str) -> Json | None:
        """As it is stored."""
        with self.changed:
            found = self._objects.get(_key(Target.of(path)))
            return _copy(found) if found is not None else None

    def all(self, path: str) -> list[Json]:
        """The objects of a collection, of a namespace or of all."""
        with self.changed:
            return _copy(self._listed(Target.of(path)))

    def follow(self, collection: str) -> Callable[[], list[Json]]:
        """Of all events from now on, those that a watch would have told since the last call."""
        request = Request.of("GET", f"{collection}?watch=1", None, {})
        stream = Stream(self, KINDS[collection], Target.of(collection), request, Fault())

        def fresh() -> list[Json]:
            with self.changed:
                return [_decode(line) for line in stream._fresh()]

        return fresh

    def compact(self) -> None:
        """The history is forgotten: watches and lists that would go on from before are Gone."""
        with self.changed:
            self._revision += 1
            self._compacted = self._revision
            self._snapshots.clear()

    # Faults to order.

    def fault(self, fault: Fault, verb: str = "", path: str = "*", times: float = 1) -> Rule:
        """For the next `times` requests of this verb ("" for all) whose path matches the pattern."""
        return self._rule("fault", fault, verb, path, times)

    def before(self, hook: Callable[[Request], object], verb: str = "", path: str = "*", times: float = 1) -> Rule:
        """`hook` runs when a request has arrived and is not carried out yet."""
        return self._rule("before", hook, verb, path, times)

    def after(self, hook: Callable[[Request], object], verb: str = "", path: str = "*", times: float = 1) -> Rule:
        """`hook` runs when a request has been carried out and is not answered yet."""
        return self._rule("after", hook, verb, path, times)

    def hold(self, *collections: str) -> None:
        """Watches of these collections lag: they tell of nothing that happens from now on, until `let_through`."""
        with self.changed:
            for collection in collections:
                self._shown.setdefault(collection, self._revision)

    def let_through(self, *collections: str) -> None:
        with self.changed:
            for collection in collections:
                self._shown.pop(collection, None)
            self.changed.notify_all()

    def end_watches(self, how: str, collection: str = "") -> None:
        """As `Fault.then`, to all watches that run (of the collection)."""
        with self.changed:
            for stream in self._streams:
                if collection in ("", stream.collection):
                    stream.fault = Fault(events=0, then=how)
            self.changed.notify_all()

    @property
    def down(self) -> bool:
        """Whether nobody listens: connections are refused, and watches were cut."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        with self.changed:
            self._down = down
            self.changed.notify_all()

    # What has happened.

    def sent(self, verb: str = "", path: str = "*") -> list[Request]:
        """The requests so far of this verb whose path matches the pattern."""
        with self.changed:
            return [one for one in self.requests if verb in ("", one.verb) and fnmatchcase(one.path, path)]

    def watches(self, collection: str = "") -> int:
        """How many run."""
        with self.changed:
            return sum(collection in ("", stream.collection) for stream in self._streams)

    @property
    def revision(self) -> int:
        """It grows by one with each write."""
        return self._revision

    def until(self, ready: Callable[[], object], what: str = "") -> None:
        """Returns when `ready` holds; it is asked again after each request, write, and begin or end of a watch."""
        with self.changed:
            if not self.changed.wait_for(ready, _PATIENCE):
                raise AssertionError(what or "it did not come true")

    # Requests.

    def handle(self, request: Request) -> Answer:
        """Raises OSError where the client is to hear nothing."""
        if self._down:
            raise ConnectionRefusedError("connection refused")
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
            fault = next((rule.what for rule in self._rules["fault"] if rule.takes(request)), Fault())
        self._hooks("before", request)
        if fault.refused:
            raise ConnectionRefusedError("connection refused")
        late = request.timeout is not None and fault.seconds >= request.timeout
        if fault.seconds:
            self.clock.sleep(request.timeout if late else fault.seconds)
        if late and not fault.lost:
            raise TimeoutError("timed out")
        answer = fault.answer() if fault.status else self._answer(request, fault)
        if not fault.status:
            self._hooks("after", request)
        if late:
            raise TimeoutError("timed out")
        if fault.lost:
            raise ConnectionResetError("connection reset by peer")
        answer.headers.setdefault("Date", format_datetime(self.clock.wall(), usegmt=True))
        return answer

    def _answer(self, request: Request, fault: Fault) -> Answer:
        with self.changed:
            try:
                for admit in self.admission:
                    admit(request)
                return self._carry_out(request, fault)
            except Refused as refused:
                return Answer(refused.code, _encode(refused.body))

    def _carry_out(self, request: Request, fault: Fault) -> Answer:
        if request.path in self.answers:
            value = self.answers[request.path]
            value = value(request) if callable(value) else value
            if isinstance(value, Answer):
                return value
            return Answer(200, value if isinstance(value, bytes) else _encode(value))
        target = Target.of(request.path)
        kind = KINDS.get(target.collection)
        if (
            kind is None
            or target.collection in self.missing
            or (target.name and kind.namespaced != bool(target.namespace))
        ):
            raise Refused(404, "the server could not find the requested resource")
        if request.raw and request.body is None:
            raise Refused(400, "the object provided is unrecognized: it is not JSON")
        if request.verb == "watch":
            self._streams.append(Stream(self, kind, target, request, fault))
            return Answer(200, stream=self._streams[-1])
        does = getattr(self, f"_{target.sub or request.verb}", None)
        if does is None or (target.sub == "status" and not kind.status):
            raise Refused(404, "the server could not find the requested resource")
        return Answer(201 if request.verb == "create" else 200, _encode(does(kind, target, request)))

    def _get(self, _: Kind, target: Target, __: Request) -> Json:
        return self._found(target)

    def _list(self, kind: Kind, target: Target, request: Request) -> Json:
        selected = selector(kind, request.query)
        token, _, offset = request.query.get("continue", "").partition("/")
        if not token:
            token = f"t{next(self._numbers)}"
            self._snapshots[token] = (self._revision, [obj for obj in self._listed(target) if selected(obj)])
        if token not in self._snapshots:
            raise Refused(410, "The provided continue parameter is too old to display a consistent list result.")
        revision, items = self._snapshots[token]
        start = int(offset or 0)
        end = start + (int(request.query.get("limit", 0)) or len(items))
        metadata = {"resourceVersion": str(revision)}
        if end < len(items):
            metadata["continue"] = f"{token}/{end}"
        return {"kind": f"{kind.name}List", "apiVersion": "v1", "metadata": metadata, "items": items[start:end]}

    def _create(self, kind: Kind, target: Target, request: Request) -> Json:
        obj = _copy(request.body)
        if kind.custom and obj.get("kind") != kind.name:
            raise Refused(400, f"the kind of the object is not {kind.name}")
        metadata = obj.setdefault("metadata", {})
        if "generateName" in metadata:
            metadata.setdefault("name", f"{metadata['generateName']}{next(self._numbers):05}")
        key = (target.collection, target.namespace, metadata["name"])
        if metadata.setdefault("namespace", target.namespace) != target.namespace:
            raise Refused(400, "the namespace of the object is not that of the request")
        if not target.namespace:
            del metadata["namespace"]
        if key in self._objects:
            raise Refused(409, f'{target.collection} "{key[2]}" already exists', "AlreadyExists")
        if kind.status and kind.name != "Node":
            obj.pop("status", None)
        if kind.name == "Pod":
            obj["status"] = {"phase": "Pending"}
        obj = obj | {"metadata": metadata | self._born()}
        self._count_generation(kind, None, obj)
        return self._written(target, request, key, {}, obj)

    def _update(self, kind: Kind, target: Target, request: Request) -> Json:
        obj = _copy(request.body)
        metadata = obj["metadata"]
        if kind.name == "Lease" and _key(target) not in self._objects:
            if metadata.get("uid"):
                raise Refused(409, f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: ")
            return self._create(kind, target, request)
        now = self._found(target)
        if not metadata.get("resourceVersion"):
            if kind.custom or kind.name == "Lease":
                raise Refused(422, "metadata.resourceVersion: must be specified for an update")
            metadata.pop("resourceVersion", None)
        self._check(now, {"uid": metadata.get("uid")})
        return self._replace(kind, target, request, now, obj)

    def _patch(self, kind: Kind, target: Target, request: Request) -> Json:
        now = self._found(target)
        return self._replace(
            kind, target, request, now, patched(kind, request.headers["Content-Type"], now, request.body)
        )

    def _status(self, kind: Kind, target: Target, request: Request) -> Json:
        does: Any = {"get": self._get, "update": self._update, "patch": self._patch}[request.verb]
        return does(kind, target, request)

    def _replace(self, kind: Kind, target: Target, request: Request, now: Json, obj: Json) -> Json:
        """Of the new object that part which this way of writing may change."""
        kept = now["metadata"]
        metadata = obj["metadata"]
        if metadata.get("resourceVersion", kept["resourceVersion"]) != kept["resourceVersion"]:
            raise Refused(
                409, "the object has been modified; please apply your changes to the latest version and try again"
            )
        of_status = target.sub == "status"
        if kind.custom and of_status:
            metadata = kept
        if metadata.get("uid", kept["uid"]) != kept["uid"]:
            raise Refused(422, f"metadata.uid: Invalid value: {metadata['uid']!r}: field is immutable")
        metadata = {name: value for name, value in metadata.items() if name not in _OWN}
        metadata |= {name: kept[name] for name in _OWN if name in kept}
        spec, status = (now, obj) if of_status else (obj, now if kind.status else obj)
        obj = _without(spec) | {"metadata": metadata} | ({"status": status["status"]} if "status" in status else {})
        if obj == now:
            return now
        self._count_generation(kind, now, obj)
        return self._written(target, request, _key(target), now, obj)

    def _delete(self, kind: Kind, target: Target, request: Request) -> Json:
        now = self._found(target)
        options = request.body or {}
        self._check(now, options.get("preconditions") or {})
        if _is_dry(request, options):
            return now
        grace = options.get("gracePeriodSeconds")
        if kind.name == "Pod" and (ending := self._ending(now, grace)) is not None:
            return self._store(_key(target), ending)
        self._remove(_key(target))
        return now if kind.name == "Pod" else status(200, "", uid=now["metadata"]["uid"])

    def _ending(self, pod: Json, grace: int | None) -> Json | None:
        """The pod that has time to end; None where it is gone at once."""
        spec = pod.get("spec") or {}
        if grace is None:
            grace = spec.get("terminationGracePeriodSeconds", _GRACE)
        finished = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if not grace or not spec.get("nodeName") or finished:
            return None
        before = pod["metadata"].get("deletionGracePeriodSeconds", math.inf)
        if before <= grace:
            return pod
        until = (self.clock.wall() + timedelta(seconds=grace)).strftime(_TIME)
        return merged(pod, {"metadata": {"deletionTimestamp": until, "deletionGracePeriodSeconds": grace}})

    def _binding(self, _: Kind, target: Target, request: Request) -> Json:
        pod = self._found(target)
        metadata = request.body["metadata"]
        self._check(pod, {name: metadata.get(name) for name in ("uid", "resourceVersion")})
        why = ""
        if pod["metadata"].get("deletionTimestamp"):
            why = "is being deleted, cannot be assigned to a host"
        elif pod["spec"].get("schedulingGates"):
            why = "has non-empty .spec.schedulingGates"
        elif pod["spec"].get("nodeName"):
            why = f"is already assigned to node {pod['spec']['nodeName']!r}"
        if why:
            raise Refused(
                409, f'Operation cannot be fulfilled on pods/binding "{target.name}": pod {target.name} {why}'
            )
        change: Json = {"metadata": {"annotations": metadata.get("annotations") or {}}}
        change["spec"] = {"nodeName": request.body["target"]["name"]}
        self._store(_key(target), merged(pod, change))
        return status(201, "")

    def _eviction(self, kind: Kind, target: Target, request: Request) -> Json:
        pod = self._found(target)
        options = request.body.get("deleteOptions") or {}
        self._check(pod, options.get("preconditions") or {})
        running = (pod.get("status") or {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
        budgets = self._budgets(pod) if running else []
        for budget in budgets:
            if budget.get("status", {}).get("disruptionsAllowed", 0) <= 0:
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise Refused(429, text, causes=[{"reason": "DisruptionBudget", "message": budget["metadata"]["name"]}])
        if not _is_dry(request, options):
            for budget in budgets:
                left = budget["status"]["disruptionsAllowed"] - 1
                self.put(
                    "/apis/policy/v1/poddisruptionbudgets", merged(budget, {"status": {"disruptionsAllowed": left}})
                )
            self._delete(kind, target, replace(request, body=options))
        return status(201, "")

    def _budgets(self, pod: Json) -> list[Json]:
        of_pod = Target.of("/apis/policy/v1/namespaces/x/poddisruptionbudgets")
        labels = (pod["metadata"].get("labels") or {}).items()
        return [
            budget
            for budget in self._listed(replace(of_pod, namespace=pod["metadata"]["namespace"]))
            if (budget["spec"].get("selector") or {}).get("matchLabels", {}).items() <= labels
        ]

    # The store.

    def _found(self, target: Target) -> Json:
        found = self._objects.get(_key(target))
        if found is None:
            raise Refused(404, f'{target.collection.rpartition("/")[2]} "{target.name}" not found')
        return found

    def _listed(self, target: Target) -> list[Json]:
        keys = sorted(key for key in self._objects if key[0] == target.collection)
        return [self._objects[key] for key in keys if target.namespace in ("", key[1])]

    def _check(self, obj: Json, preconditions: dict[str, str | None]) -> None:
        for name, wanted in preconditions.items():
            if wanted and obj["metadata"][name] != wanted:
                raise Refused(409, f"Precondition failed: {name} is {obj['metadata'][name]}, not {wanted}")

    def _born(self) -> Json:
        return {"uid": f"00000000-0000-0000-0000-{next(self._numbers):012}", "creationTimestamp": self._now()}

    def _now(self) -> str:
        return self.clock.wall().strftime(_TIME)

    def _count_generation(self, kind: Kind, before: Json | None, obj: Json) -> None:
        if kind.custom:
            metadata = obj["metadata"]
            changed = before is not None and _without(before) != _without(obj)
            last = before["metadata"].get("generation", 1) if before is not None else metadata.get("generation", 1)
            metadata["generation"] = last + changed

    def _written(self, target: Target, request: Request, key: _Key, before: Json, obj: Json) -> Json:
        """`obj` as one who has a name as a field manager writes it; with dryRun it is only shown."""
        manager = request.query.get("fieldManager") or request.headers.get("User-Agent", "").partition("/")[0]
        entry = {
            "manager": manager,
            "operation": "Update",
            "apiVersion": obj.get("apiVersion", "v1"),
            "time": self._now(),
        }
        entry |= {"fieldsType": "FieldsV1"} | ({"subresource": target.sub} if target.sub else {})
        obj = obj | {"metadata": obj["metadata"] | {"managedFields": managed(before, obj, entry)}}
        return obj if _is_dry(request, {}) else self._store(key, obj)

    def _store(self, key: _Key, obj: Json) -> Json:
        obj = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self._revision + 1)}}
        self._append(key, obj)
        self._objects[key] = obj
        return obj

    def _remove(self, key: _Key) -> None:
        if key in self._objects:
            self._append(key, None)
            del self._objects[key]

    def _append(self, key: _Key, now: Json | None) -> None:
        self._revision += 1
        self._log.append(_Entry(self._revision, key, self._objects.get(key), now))
        self.changed.notify_all()

    # Faults and hooks.

    def _rule(self, of: str, what: Any, verb: str, path: str, times: float) -> Rule:
        with self.changed:
            rule = Rule(what, verb, path, times)
            self._rules[of].append(rule)
            return rule

    def _hooks(self, of: str, request: Request) -> None:
        with self.changed:
            due = [rule.what for rule in self._rules[of] if rule.takes(request)]
        for hook in due:
            hook(request)


class Stream:
    """A running watch. Iterate it for the bytes; waits for time are of the server's clock, in the thread of the reader.

    `read_timeout` is the silence in seconds after which the reader gives up. `close` may come from any thread.
    """

    def __init__(self, api: ApiServer, kind: Kind, target: Target, request: Request, fault: Fault) -> None:
        self.collection = target.collection
        self.fault = fault
        self.read_timeout: float | None = None
        self._api = api
        self._namespace = target.namespace
        self._selected = selector(kind, request.query)
        self._seen = int(request.query.get("resourceVersion") or api._revision)
        self._ends = api.clock.now() + float(request.query.get("timeoutSeconds", 3600))
        self._bookmarks = "allowWatchBookmarks" in request.query
        self._told = 0  # events
        self._closed = False

    def close(self) -> None:
        with self._api.changed:
            self._closed = True
            if self in self._api._streams:
                self._api._streams.remove(self)
            self._api.changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        try:
            for line in self._lines():
                yield from (line[:17], line[17:])  # as TCP may well deliver it
        finally:
            self.close()

    def _lines(self) -> Iterator[bytes]:
        api, clock = self._api, self._api.clock
        if self._seen < api._compacted:
            yield _line("ERROR", status(410, f"too old resource version: {self._seen}"))
            return
        heard = bookmarked = clock.now()
        while True:
            with api.changed:
                silent = self._silent()
                limits = [heard + self.read_timeout] if self.read_timeout is not None else []
                limits += [] if silent else [self._ends, bookmarked + _BOOKMARK_SECONDS]
                seconds = min(limits, default=math.inf) - clock.now()
                clock.wait_for(api.changed, self._ready, None if seconds == math.inf else seconds)
                fresh, silent, how = self._fresh(), self._silent(), self._how()
            now = clock.now() + 1e-6  # a sum of seconds may lie just behind the moment that was waited for
            if self._closed:
                return
            for line in fresh:
                yield line
                heard = now
            if how:
                yield from self._end(how)
                return
            if self.read_timeout is not None and now >= heard + self.read_timeout:
                raise TimeoutError("Read timed out.")
            ends = now >= self._ends and not silent
            behind = self._bookmarks and not silent and self._seen <= self._visible()
            if behind and (ends or now >= bookmarked + _BOOKMARK_SECONDS):
                yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(self._seen)}})
                heard = bookmarked = now
            if ends:
                return

    def _ready(self) -> bool:
        return self._closed or bool(self._how()) or (not self._silent() and self._visible() > self._seen)

    def _visible(self) -> int:
        """Up to which revision it may tell of what happened."""
        return self._api._shown.get(self.collection, self._api._revision)

    def _due(self) -> bool:
        return bool(self.fault.then) and self._told >= self.fault.events

    def _silent(self) -> bool:
        return self._due() and self.fault.then == "silence"

    def _how(self) -> str:
        """How it is to end now."""
        if self._api.down:
            return "cut"
        return self.fault.then if self._due() and not self._silent() else ""

    def _fresh(self) -> list[bytes]:
        lines: list[bytes] = []
        log, visible = self._api._log, self._visible()
        for entry in log[bisect_right(log, self._seen, key=lambda each: each.revision) :]:
            if self._due() or entry.revision > visible:
                return lines
            self._seen = entry.revision
            event = self._event(entry)
            if event is not None:
                lines.append(event)
                self._told += 1
        self._seen = max(self._seen, visible)
        return lines

    def _event(self, entry: _Entry) -> bytes | None:
        collection, namespace, _ = entry.key
        if collection != self.collection or self._namespace not in ("", namespace):
            return None
        was = entry.before is not None and self._selected(entry.before)
        if entry.now is not None and self._selected(entry.now):
            return _line("MODIFIED" if was else "ADDED", entry.now)
        if not was:
            return None
        assert entry.before is not None
        return _line("DELETED", merged(entry.before, {"metadata": {"resourceVersion": str(entry.revision)}}))

    def _end(self, how: str) -> Iterator[bytes]:
        if how == "cut":
            raise ConnectionResetError("connection reset by peer")
        if how == "gone":
            yield _line("ERROR", status(410, "too old resource version"))
        if how == "garbage":
            yield b"{x}\n"


def _line(kind: str, obj: Json) -> bytes:
    return _encode({"type": kind, "object": obj}) + b"\n"


def _key(target: Target) -> _Key:
    return target.collection, target.namespace, target.name


def _copy(obj: Any) -> Any:
    return _decode(_encode(obj))


def _without(obj: Json) -> Json:
    """What the generation counts changes of."""
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}


def _is_dry(request: Request, options: Json) -> bool:
    return bool(request.query.get("dryRun") or options.get("dryRun"))
