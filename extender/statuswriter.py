"""Brings the statuses of our objects to what the ledger says: the loop's step around `statuses`.

Level-triggered: what is written is what ought to be at that moment, and what decides is what the watch shows. So a
lost write, somebody's edit or a change that nobody told of is put right; the newest state wins, those between are
never written. The state is locked for a few nodes or namespaces at a time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from itertools import islice
from typing import Protocol

import structlog

from cardwise.core.ledger import Ledger
from cardwise.core.quotas import Charge
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from extender import statuses
from extender.schedule import Key, Pace, Schedule
from extender.sightings import Object, Sightings
from extender.statuses import NOTHING_ALLOCATED, Tally

_log = structlog.get_logger(__name__)

CARD, CLASS, QUOTA = "card", "class", "quota"

_GAPS = {QUOTA: 1.0, CLASS: 1.0, CARD: 2.0}  # least seconds between two writes to one object
_BUSY, _CALM = 20.0, 100.0  # writes a second, while pods come and when they have stopped coming
_CALM_AFTER = 1.0  # seconds without a change in the ledger
_TOGETHER = 16  # nodes counted under one lock: about a millisecond
_NAMESPACES_TOGETHER = 200
_MOST_NODES = 1000  # counted in one step
_AUDIT_SECONDS = 60.0  # in which every node is counted anew, in case a change was not told
_USAGE_SECONDS = 1.0
_WRITE_TIMEOUT = 2.0
_STEP_LIMIT = 1.0  # seconds of writing after which a step ends, so that a slow API server does not delay a stop
_REFUSED_SECONDS = 60.0  # until a status that the API server refused is tried again
_ODD_SECONDS = 2.0  # until one whose object was gone, or changed under the write
_COMPLAIN_SECONDS = 60.0  # between two lines in the log about the same


class Books(Protocol):
    """The state, as far as statuses need it."""

    def view(self) -> AbstractContextManager[Ledger]:
        """The ledger, locked."""

    def changed_nodes(self) -> set[str]:
        """The nodes whose cards or holdings have changed since the last call."""


def _utc() -> datetime:
    return datetime.now(UTC)


class StatusWriter:
    """`active`: whether to write, which one extender does: the leader, once it knows all pods, nodes and cards.

    `clashes`: by class, what is wrong with it though it can be read. All methods belong to one thread.
    """

    def __init__(
        self,
        client: KubeClient,
        books: Books,
        seen: Sightings,
        *,
        active: Callable[[], bool],
        clashes: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = _utc,
    ) -> None:
        self._client = client
        self._books = books
        self._seen = seen
        self._active = active
        self._clashes = clashes
        self._clock = clock
        self._wall = wall
        self._tally = Tally()
        self._schedule = Schedule(_GAPS)
        self._pace = Pace(_BUSY, _CALM)
        self._nodes: dict[str, None] = {}  # to be counted, in this order
        self._audit: Iterator[str] = iter(())
        self._audited = clock()
        self._changed_at = float("-inf")
        self._usage: dict[str, Mapping[int, Charge]] = {}  # by namespaces with a quota
        self._usage_at = float("-inf")
        self._problems: tuple[dict[str, str], dict[str, str]] = ({}, {})  # of classes, as last looked at
        self._backoff = Backoff(initial=0.5, cap=30.0)
        self._paused_until = float("-inf")
        self._complained: dict[tuple[str, int], float] = {}

    def step(self) -> None:
        """One round: looks at what has changed and writes what there is time for."""
        self._look_at_nodes()
        self._look_at_classes()
        self._look_at_quotas()
        # Until every changed node is counted, the numbers of classes are halfway between two truths.
        if not self._nodes and self._active():
            self._write()

    def _look_at_nodes(self) -> None:
        now = self._clock()
        changed = self._books.changed_nodes()
        if changed:
            self._changed_at = now
        for some in (changed, self._seen.cards.changed(), self._to_audit(now)):
            self._nodes.update(dict.fromkeys(some))
        counted = list(islice(self._nodes, _MOST_NODES))
        for at in range(0, len(counted), _TOGETHER):
            some_nodes = counted[at : at + _TOGETHER]
            with self._books.view() as ledger:
                counts = [statuses.count_node(ledger, node) for node in some_nodes]
            for node, count in zip(some_nodes, counts, strict=True):
                self._compare(node, count, now)
        for node in counted:
            del self._nodes[node]

    def _compare(self, node: str, count: statuses.NodeCount, now: float) -> None:
        for name in self._tally.put(node, count.sums):
            self._schedule.mark(Key(CLASS, name), now)
        for name in self._seen.cards.names(node):
            card = self._seen.cards.values.get(name)
            if card is not None and card.status != count.cards.get(name, NOTHING_ALLOCATED):
                self._schedule.mark(Key(CARD, name), now)

    def _to_audit(self, now: float) -> list[str]:
        """A part of all nodes, so many that all come within the time."""
        if now - self._audited < 1.0:
            return []
        every = self._seen.cards.nodes() | self._tally.nodes()
        due = int(len(every) * (now - self._audited) / _AUDIT_SECONDS)
        if not due:
            return []
        self._audited = now
        part = list(islice(self._audit, due))
        if len(part) < due:
            self._audit = iter(every)
            self._schedule.mark_all([Key(CLASS, name) for name in self._seen.classes.snapshot()], now)
            self._schedule.mark_all([Key(QUOTA, key) for key in self._seen.quotas.snapshot()], now)
        return part

    def _look_at_classes(self) -> None:
        now = self._clock()
        self._schedule.mark_all([Key(CLASS, name) for name in self._seen.classes.changed()], now)
        unreadable_before, clashes_before = self._problems
        found = {name: one.problem for name, one in self._seen.classes.snapshot().items()}
        clashes = dict(self._clashes())
        self._problems = found, clashes
        self._schedule.mark_all([Key(CLASS, name) for name, _ in clashes.items() ^ clashes_before.items()], now)
        if found != unreadable_before:  # quotas say whether their classes are there
            self._schedule.mark_all([Key(QUOTA, key) for key in self._seen.quotas.snapshot()], now)

    def _look_at_quotas(self) -> None:
        now = self._clock()
        self._schedule.mark_all([Key(QUOTA, key) for key in self._seen.quotas.changed()], now)
        if now - self._usage_at < _USAGE_SECONDS:
            return
        self._usage_at = now
        keys: dict[str, list[Key]] = {}
        for key, quota in self._seen.quotas.snapshot().items():
            keys.setdefault(quota.namespace, []).append(Key(QUOTA, key))
        namespaces = list(keys)
        usage: dict[str, Mapping[int, Charge]] = {}
        for at in range(0, len(namespaces), _NAMESPACES_TOGETHER):
            with self._books.view() as ledger:
                usage |= {one: dict(ledger.usage(one)) for one in namespaces[at : at + _NAMESPACES_TOGETHER]}
        for namespace in namespaces:
            if usage[namespace] != self._usage.get(namespace):
                self._schedule.mark_all(keys[namespace], now)
        self._usage = usage

    def _write(self) -> None:
        began = now = self._clock()
        while now >= self._paused_until and now - began <= _STEP_LIMIT:
            if not self._pace.ready(now, calm=now - self._changed_at > _CALM_AFTER):
                return
            key = self._schedule.next(now)
            if key is None:
                return
            self._bring(key)
            now = self._clock()

    def _bring(self, key: Key) -> None:
        """Makes one status what it ought to be."""
        found = {CARD: self._card, CLASS: self._class, QUOTA: self._quota}[key.kind](key.key)
        if found is None:
            self._schedule.settled(key)
            return
        path, what, status = found
        self._pace.spend()
        try:
            self._client.patch(path, {"status": status}, "merge", timeout=_WRITE_TIMEOUT)
        except (errors.NotFound, errors.Conflict):
            self._schedule.failed(key, self._clock(), _ODD_SECONDS)  # the watch will say what became of it
        except (errors.Invalid, errors.BadRequest, errors.Forbidden) as error:
            self._complain(key, error)
            self._schedule.failed(key, self._clock(), _REFUSED_SECONDS)
        except errors.KubeError as error:
            # Not about this object: all others wait as well.
            self._complain(key, error)
            pause = self._backoff.next(error.retry_after)
            self._paused_until = self._clock() + pause
            self._schedule.failed(key, self._clock(), pause)
        else:
            self._backoff.reset()
            self._schedule.wrote(key, what, self._clock())

    def _complain(self, key: Key, error: errors.KubeError) -> None:
        """Says what keeps statuses of this kind from being written, once in a while."""
        about, now = (key.kind, error.status), self._clock()
        if now - self._complained.get(about, float("-inf")) >= _COMPLAIN_SECONDS:
            self._complained[about] = now
            _log.warning("cannot write a status; it is tried again", kind=key.kind, name=key.key, error=str(error))

    # What to write where: None where nothing is to be written, else the path, what tells it from others, the patch.

    def _card(self, name: str) -> tuple[str, object, Object] | None:
        seen = self._seen.cards.values.get(name)
        if seen is None:
            return None
        with self._books.view() as ledger:
            wanted = statuses.count_node(ledger, seen.node).cards.get(name, NOTHING_ALLOCATED)
        if wanted == seen.status:
            return None
        return paths.extendedresources(name, "status"), wanted, statuses.card_status(wanted)

    def _class(self, name: str) -> tuple[str, object, Object] | None:
        seen = self._seen.classes.values.get(name)
        if seen is None:
            return None
        cards, nodes = self._tally.of(name)
        wanted = statuses.class_status(seen, cards, nodes, self._clashes().get(name, ""))
        return self._told(paths.resourceclasses(name, "status"), wanted, seen.status)

    def _quota(self, key: str) -> tuple[str, object, Object] | None:
        seen = self._seen.quotas.values.get(key)
        if seen is None:
            return None
        used: Sequence[Charge] = ()
        if seen.quota is not None:
            with self._books.view() as ledger:
                used = [ledger.used(seen.namespace, entry) for entry in seen.quota.entries]
        wanted = statuses.quota_status(seen, used, self._seen.classes.snapshot())
        return self._told(paths.gpuquotas(seen.namespace, seen.name, "status"), wanted, seen.status)

    def _told(self, path: str, wanted: Object, found: Object) -> tuple[str, object, Object] | None:
        if statuses.same(wanted, found):
            return None
        return path, wanted, statuses.patch(wanted, found, self._wall().strftime("%Y-%m-%dT%H:%M:%SZ"))
