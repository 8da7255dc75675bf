"""The watches that run at the API server of the tests, and what becomes of them when a test orders it."""

from bisect import bisect_right
from collections.abc import Iterator

from cardwise.core.values.decoded import Json
from tests.fakes.apiobjects import Kind, Target, encoded, merged, selector, status
from tests.fakes.apistore import Entry, Store

_BOOKMARK_SECONDS = 60.0


class Watches:
    """Those that run. Of collections in `held` they tell up to this revision only. Hold the store's `changed`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.held: dict[str, int] = {}
        self.running: list[Watch] = []

    def start(self, kind: Kind, target: Target, query: dict[str, str], *, then: str, events: int) -> "Watch":
        self.running.append(Watch(self, kind, target, query, then=then, events=events))
        self.store.changed.notify_all()
        return self.running[-1]

    def open_watches(self, collection: str) -> list["Watch"]:
        """All, or those of a collection."""
        return [watch for watch in self.running if collection in ("", watch.collection)]

    def end(self, ending: str, collection: str = "") -> None:
        for watch in self.open_watches(collection):
            watch.then, watch.events = ending, 0
        self.store.changed.notify_all()


class Watch:
    """Iterate it for the bytes; waits for time are of the server's clock, in the thread of the reader.

    `then` happens after so many `events`: "end", "cut", "silence", "garbage" or "gone"; "" is never.
    `read_timeout` is the silence in seconds after which the reader gives up. `close` may come from any thread.
    """

    def __init__(
        self,
        watches: Watches,
        kind: Kind,
        target: Target,
        query: dict[str, str],
        *,
        then: str = "",
        events: int = 0,
        lags: bool = True,
    ) -> None:
        self.collection = target.collection
        self.then = then
        self.events = events
        self.lags = lags
        self.read_timeout: float | None = None
        self._watches = watches
        self._store = watches.store
        self._namespace = target.namespace
        self._selected = selector(kind, query)
        self._seen = int(query.get("resourceVersion") or self._store.revision)
        self._ends = self._store.clock.now() + float(query.get("timeoutSeconds", 3600))
        self._bookmarks = "allowWatchBookmarks" in query
        self._sent = 0  # events
        self._closed = False

    def close(self) -> None:
        with self._store.changed:
            self._closed = True
            if self in self._watches.running:
                self._watches.running.remove(self)
            self._store.changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        try:
            for line in self._lines():
                yield from (line[:17], line[17:])  # as TCP may well deliver it
        finally:
            self.close()

    def fresh(self) -> list[bytes]:
        """The events that have not been told yet."""
        lines: list[bytes] = []
        log, visible = self._store.log, self._visible()
        for entry in log[bisect_right(log, self._seen, key=lambda change: change.revision) :]:
            if self._due() or entry.revision > visible:
                return lines
            self._seen = entry.revision
            event = self._event(entry)
            if event is not None:
                lines.append(event)
                self._sent += 1
        self._seen = max(self._seen, visible)
        return lines

    def _lines(self) -> Iterator[bytes]:
        store, clock = self._store, self._store.clock
        if self._seen + 1 < store.compacted:
            yield _line("ERROR", status(410, f"too old resource version: {self._seen}"))
            return
        heard = bookmarked = clock.now()
        while True:
            with store.changed:
                limits = [heard + self.read_timeout] if self.read_timeout is not None else []
                limits += [] if self._is_silent() else [self._ends]
                limits += [bookmarked + _BOOKMARK_SECONDS] if self._tells_where() else []
                seconds = min(limits) - clock.now() if limits else None
                clock.wait_for(store.changed, self._ready, seconds)
                fresh, silent, ending = self.fresh(), self._is_silent(), self._end_reason()
            now = clock.now() + 1e-6  # a sum of seconds may lie just behind the moment that was waited for
            if self._closed:
                return
            for line in fresh:
                yield line
                heard = now
            if ending:
                yield from _end(ending)
                return
            if self.read_timeout is not None and now >= heard + self.read_timeout:
                raise TimeoutError("Read timed out.")
            ends = now >= self._ends and not silent
            if self._tells_where() and (ends or now >= bookmarked + _BOOKMARK_SECONDS):
                yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(self._seen)}})
                heard = bookmarked = now
            if ends:
                return

    def _ready(self) -> bool:
        if self._due():
            return self._closed or self.then != "silence"
        return self._closed or self._visible() > self._seen

    def _visible(self) -> int:
        """Up to which revision it may tell of what happened."""
        revision = self._store.revision
        return self._watches.held.get(self.collection, revision) if self.lags else revision

    def _tells_where(self) -> bool:
        """Whether there may be a bookmark now. There is none of a kind that had no event since the server started."""
        quiet = self.collection not in self._store.written
        return self._bookmarks and not quiet and not self._is_silent() and self._seen <= self._visible()

    def _due(self) -> bool:
        return bool(self.then) and self._sent >= self.events

    def _is_silent(self) -> bool:
        return self._due() and self.then == "silence"

    def _end_reason(self) -> str:
        """How it is to end now."""
        return self.then if self._due() and self.then != "silence" else ""

    def _event(self, entry: Entry) -> bytes | None:
        collection, namespace, _ = entry.key
        if collection != self.collection or self._namespace not in ("", namespace):
            return None
        before = entry.before if entry.before is not None and self._selected(entry.before) else None
        if entry.now is not None and self._selected(entry.now):
            return _line("ADDED" if before is None else "MODIFIED", entry.now)
        if before is None:
            return None
        return _line("DELETED", merged(before, {"metadata": {"resourceVersion": str(entry.revision)}}))


def _end(ending: str) -> Iterator[bytes]:
    if ending == "cut":
        raise ConnectionResetError("connection reset by peer")
    if ending == "gone":
        yield _line("ERROR", status(410, "too old resource version"))
    if ending == "garbage":
        yield b"{x}\n"


def _line(kind: str, manifest: Json) -> bytes:
    return encoded({"type": kind, "object": manifest}) + b"\n"
