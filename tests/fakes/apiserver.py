"""An API server in memory: what tests hand to a part instead of a cluster.

It stores objects of the kinds in `apiobjects.KINDS` and answers the requests that Cardwise sends as kube-apiserver
does; test_contract.py runs the same tests against both. It has every namespace and validates no object. Faults are
ordered by `fault`; `before_request` and `after_request` run what others do at that moment. Time is that of the `Clock`.

Two ways in: `client()` is a real KubeClient on a transport without sockets and threads, `serve()` is HTTP on loopback.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import format_datetime
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.decoded import Json
from cardwise.kube.client import KubeClient
from tests.fakes.apiobjects import KINDS, Refused, Target, copied, decoded, encoded, merged, status
from tests.fakes.apistore import Store
from tests.fakes.apiverbs import Call, Verbs
from tests.fakes.apiwatch import Watch, Watches

_PATIENCE = 60.0  # real seconds after which `until` is a bug of the test


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
        body = encoded(status(self.status, self.message, self.reason)) if self.body is None else self.body
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
    def parse(
        cls, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout: float | None = None
    ) -> "Request":
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method, "get")
        path = unquote(parts.path)  # as kube-apiserver does, before it looks for segments
        target = Target.parse(path)
        if verb == "get" and not target.name and target.collection in KINDS:
            verb = "watch" if "watch" in query else "list"
        document = None
        with suppress(msgspec.DecodeError):
            document = decoded(body) if body else None
        return cls(verb, path, query, document, headers, timeout, body or b"")


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stream: Watch | None = None


@dataclass(slots=True)
class Rule:
    """A fault or a hook, and for which requests; `remaining` is how often yet."""

    action: Any
    verb: str
    path: str
    remaining: float

    def takes(self, request: Request) -> bool:
        if self.remaining <= 0 or self.verb not in ("", request.verb) or not fnmatchcase(request.path, self.path):
            return False
        self.remaining -= 1
        return True

    def end(self) -> None:
        self.remaining = 0


class ApiServer:
    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.time_behind = timedelta(0)  # its time of day, behind that of the clock
        self.requests: list[Request] = []
        self.missing: set[str] = set()  # collections whose kind is not installed
        self.admission: list[Callable[[Request], object]] = []  # asked of all that is carried out; raise Refused
        # What else there is, by path: a JSON value, bytes, an Answer, or what makes one of the request.
        self.answers: dict[str, Any] = {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "/readyz": b"ok",
            "/apis/authentication.k8s.io/v1/selfsubjectreviews": {"status": {"userInfo": {"username": "jane"}}},
        }
        self._store = Store(clock)
        self._verbs = Verbs(self._store)
        self._watches = Watches(self._store)
        self.changed = self._store.changed  # notified of whatever happens here
        self._rules: dict[str, list[Rule]] = {"fault": [], "before": [], "after": []}
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

    def write_object(self, collection: str, manifest: Json) -> Json:
        """Somebody else writes the whole object, status and all. A uid is kept or made; a namespace is "default"."""
        with self.changed:
            return copied(self._store.write_object(collection, manifest))

    def edit(self, path: str, **change: Any) -> Json:
        """Somebody else changes an object, by a merge patch of any of its parts."""
        with self.changed:
            target = Target.parse(path)
            return self.write_object(target.collection, merged(self._store.get_object(target), change))

    def remove(self, path: str) -> None:
        """The object is gone, whatever had been asked to keep it."""
        with self.changed:
            self._store.remove(Target.parse(path).key)

    def restore(self, path: str, manifest: Json) -> None:
        """The object is as it was in this version, resourceVersion and all: etcd was restored from a backup, by
        `--bump-revision`.
        """
        with self.changed:
            self._store.objects[Target.parse(path).key] = copied(manifest)

    def get(self, path: str) -> Json | None:
        """As it is stored."""
        with self.changed:
            return copied(self._store.objects.get(Target.parse(path).key))

    def all(self, path: str) -> list[Json]:
        """The objects of a collection, of a namespace or of all."""
        with self.changed:
            return copied(self._store.all(Target.parse(path)))

    def follow(self, collection: str, *, lags: bool = True) -> Callable[[], list[Json]]:
        """Of all events from now on, those that a watch would have told since the last call. `lags`: as watches do."""
        watch = Watch(self._watches, KINDS[collection], Target.parse(collection), {}, lags=lags)

        def fresh() -> list[Json]:
            with self.changed:
                return [decoded(line) for line in watch.fresh()]

        return fresh

    def compact(self) -> None:
        """The history is forgotten: watches and lists that would go on from before the last write are Gone."""
        with self.changed:
            self._store.compact()

    # Faults to order.

    def fault(self, fault: Fault, verb: str = "", path: str = "*", times: float = 1) -> Rule:
        """For the next `times` requests of this verb ("" for all) whose path matches the pattern."""
        return self._rule("fault", fault, verb, path, times)

    def before_request(
        self, hook: Callable[[Request], object], verb: str = "", path: str = "*", times: float = 1
    ) -> Rule:
        """`hook` runs when a request has arrived and is not carried out yet."""
        return self._rule("before", hook, verb, path, times)

    def after_request(
        self, hook: Callable[[Request], object], verb: str = "", path: str = "*", times: float = 1
    ) -> Rule:
        """`hook` runs when a request has been carried out and is not answered yet."""
        return self._rule("after", hook, verb, path, times)

    def hold(self, *collections: str) -> None:
        """Watches of these collections lag: they tell of nothing that happens from now on, until `let_through`."""
        with self.changed:
            for collection in collections:
                self._watches.held.setdefault(collection, self.revision)

    def let_through(self, *collections: str) -> None:
        with self.changed:
            for collection in collections:
                self._watches.held.pop(collection, None)
            self.changed.notify_all()

    def end_watches(self, ending: str, collection: str = "") -> None:
        """As `Fault.then`, to all watches that run (of the collection)."""
        with self.changed:
            self._watches.end(ending, collection)

    @property
    def down(self) -> bool:
        """Whether nobody listens: connections are refused, and watches were cut."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        with self.changed:
            self._down = down
            if down:
                self._watches.end("cut")

    # What has happened.

    def sent(self, verb: str = "", path: str = "*") -> list[Request]:
        """The requests so far of this verb whose path matches the pattern."""
        with self.changed:
            return [call for call in self.requests if verb in ("", call.verb) and fnmatchcase(call.path, path)]

    def watches(self, collection: str = "") -> int:
        """How many run."""
        with self.changed:
            return len(self._watches.open_watches(collection))

    @property
    def revision(self) -> int:
        """It grows by one with each write."""
        return self._store.revision

    def until(self, ready: Callable[[], object], condition: str = "") -> None:
        """Returns when `ready` holds; it is asked again after each request, write, and begin or end of a watch."""
        with self.changed:
            if not self.changed.wait_for(ready, _PATIENCE):
                raise AssertionError(condition or "it did not come true")

    # Requests.

    def handle(self, request: Request) -> Answer:
        """Raises OSError where the client is to hear nothing."""
        if self._down:
            raise ConnectionRefusedError("connection refused")
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
            fault = next((rule.action for rule in self._rules["fault"] if rule.takes(request)), Fault())
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
        answer.headers.setdefault("Date", format_datetime(self.clock.wall() - self.time_behind, usegmt=True))
        return answer

    def _answer(self, request: Request, fault: Fault) -> Answer:
        with self.changed:
            if self._down:
                raise ConnectionResetError("connection reset by peer")
            try:
                for admit in self.admission:
                    admit(request)
                return self._carry_out(request, fault)
            except Refused as refused:
                return Answer(refused.code, encoded(refused.body))

    def _carry_out(self, request: Request, fault: Fault) -> Answer:
        if request.path in self.answers:
            answer = self.answers[request.path]
            answer = answer(request) if callable(answer) else answer
            if isinstance(answer, Answer):
                return answer
            return Answer(200, answer if isinstance(answer, bytes) else encoded(answer))
        target = Target.parse(request.path)
        kind = None if target.collection in self.missing else KINDS.get(target.collection)
        if kind is None or (target.name and kind.namespaced != bool(target.namespace)):
            raise Refused(404, "the server could not find the requested resource")
        if request.raw and request.body is None:
            raise Refused(400, "the object provided is unrecognized: it is not JSON")
        if request.verb == "watch":
            watch = self._watches.start(kind, target, request.query, then=fault.then, events=fault.events)
            return Answer(200, stream=watch)
        done = self._verbs.carry_out(Call(kind, target, request.verb, request.body, request.query, request.headers))
        return Answer(201 if request.verb == "create" else 200, encoded(done))

    # Faults and hooks.

    def _rule(self, of: str, action: Any, verb: str, path: str, times: float) -> Rule:
        with self.changed:
            rule = Rule(action, verb, path, times)
            self._rules[of].append(rule)
            return rule

    def _hooks(self, of: str, request: Request) -> None:
        with self.changed:
            due = [rule.action for rule in self._rules[of] if rule.takes(request)]
        for hook in due:
            hook(request)
