"""Writes the statuses of Cardwise's objects that differ from the desired statuses.

`statuses` computes the desired statuses from the ledger.

Level-triggered: at each write the desired status of that moment is compared with the status that the watch shows. So
lost writes, edits by other programs and missed changes are corrected, and only the newest status is written. The state
is locked for a few nodes or namespaces at a time.

A node can make its cards so large that each write takes seconds. So all nodes get equal time for their cards, and all
namespaces get equal time for their quotas. A single write that times out does not delay other objects. But if the
writes of several nodes or namespaces in a row time out, all writes pause.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api.quotas import Charge
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.extendedresources import ExtenderStatus
from cardwise.kube.objects.gpuquotas import QuotaRecord
from extender.cache.pacing import Pace
from extender.reporting import statuses
from extender.reporting.ledgercheck import LedgerCheck
from extender.reporting.listers import Listers
from extender.reporting.schedule import Key, WriteRate, WriteSchedule
from extender.reporting.statuses import NOTHING_ALLOCATED, ClassSums, Disagreement
from extender.state import State

_log = structlog.get_logger(__name__)

CARD, CLASS, QUOTA = "card", "class", "quota"

_MIN_SECONDS_BETWEEN_WRITES = {QUOTA: 1.0, CLASS: 1.0, CARD: 2.0}  # minimum seconds between two writes to one object
_BUSY_WRITES_PER_SECOND, _CALM_WRITES_PER_SECOND = (
    20.0,
    100.0,
)  # writes a second: while the ledger changes, and after `_CALM_AFTER_SECONDS`
_CALM_AFTER_SECONDS = 1.0  # seconds without a change in the ledger
# Storm: while many pods are bound, each written status is outdated at once, and costs the API server more than a bind.
_STORM_WRITES_PER_SECOND = 4.0  # writes a second during a storm
_STORM_NODES = 5  # changed nodes in one step with which a storm begins (there are four steps a second)
_STORM_SECONDS = 1.0  # seconds without such a step after which the storm is over
_MAX_STORM_SECONDS = (
    30.0  # seconds after which a storm is normal load: then each pending status is written within this time
)
_MAX_NODES_PER_STEP = 1000  # maximum number of nodes that one step counts
_AUDIT_SECONDS = 30.0  # seconds in which each node is counted again, in case a change was missed
_QUOTA_USAGE_CHECK_SECONDS = 1.0
_WRITE_TIMEOUT = 2.0
_MAX_STEP_SECONDS = 1.0  # seconds of writing after which a step ends, so that a slow API server does not delay a stop
_REFUSED_SECONDS = 60.0  # seconds until a refused write is tried again
_SLOW_SECONDS = 30.0  # seconds until a write without a response in time is tried again
_MAX_SLOW_OWNERS_IN_A_ROW = (
    3  # so many nodes or namespaces in a row without a response: the API server may be unreachable
)
_UNREACHABLE_PAUSE_SECONDS = 2.0  # seconds without any write after that; short, since these owners may be hostile
_CONFLICT_SECONDS = 2.0  # seconds until a write is tried again after a conflict, or after its object was deleted
_LOG_REPEAT_SECONDS = 60.0  # seconds between two log lines about the same failure


class _Write(NamedTuple):
    """A status to write: its path, its content for the comparison with the last write, the patch, and a callback."""

    path: str
    content: object
    status: Json
    on_written: Callable[[], None] = lambda: None


class StatusWriter:
    """Writes statuses. All methods belong to one thread.

    active: returns whether this extender may write, because it leads and all lists of pods, nodes and cards are
        complete.
    no_class: called with a quota and a text when the quota's status first reports a class that does not exist.

    `ledger_check` collects the disagreements that are found when a node's totals are computed. A standby computes the
    totals as well.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        listers: Listers,
        *,
        active: Callable[[], bool],
        no_class: Callable[[QuotaRecord, str], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._state = state
        self._listers = listers
        self._active = active
        self._no_class = no_class
        self._clock = clock
        self.ledger_check = LedgerCheck()
        self._class_sums = ClassSums()
        self._schedule = WriteSchedule(_MIN_SECONDS_BETWEEN_WRITES)
        self._write_rate = WriteRate()
        self._storm_since = self._storm_until = float("-inf")
        self._nodes: dict[str, None] = {}  # the nodes to count, in this order
        self._audit: Iterator[str] = iter(())
        self._audited = clock.now()
        self._changed_at = float("-inf")
        self._usage: dict[str, Mapping[int, Charge]] = {}  # by namespace with a quota
        self._usage_at = float("-inf")
        self._problems: dict[str, str | None] = {}  # by class, why it could not be read in the last step
        self._automatic: set[str] = set()  # the automatic classes of the last step
        self._backoff = Backoff(initial=0.5, cap=30.0)
        self._paused_until = float("-inf")
        self._slow: set[tuple[str, str]] = set()  # kind and owner of writes without a response since the last success
        self._complained: dict[tuple[str, int], float] = {}

    def step(self) -> None:
        """Compute the totals of changed nodes, and write as many of the changed statuses as the time allows."""
        self._update_node_totals()
        self._enqueue_changed_classes()
        self._enqueue_changed_quotas()
        # Write only after all changed nodes are counted: before that, the sums of classes mix old and new counts.
        if not self._nodes and self._active():
            self._write_due_statuses()

    def _update_node_totals(self) -> None:
        now = self._clock.now()
        changed = self._state.take_changed_nodes()
        if changed:
            self._changed_at = now
        if len(changed) >= _STORM_NODES:
            if now >= self._storm_until:
                self._storm_since = now
            self._storm_until = now + _STORM_SECONDS
        for nodes in (changed, self._listers.cards.take_changed(), self._nodes_to_audit(now)):
            self._nodes.update(dict.fromkeys(nodes))
        counted_nodes = list(islice(self._nodes, _MAX_NODES_PER_STEP))
        if counted_nodes:
            ledger, pace = self._state.snapshot().ledger, Pace(self._clock)
            for node in counted_nodes:
                self._compare_cards(node, statuses.compute_node_totals(ledger, node), now)
                del self._nodes[node]
                pace.pause()
        self.ledger_check.update_counts(now)

    def _compare_cards(self, node: str, node_totals: statuses.NodeTotals, now: float) -> None:
        for name in self._class_sums.set_node(node, node_totals.sums):
            self._schedule.enqueue(Key(CLASS, name), now)
        wrong = dict.fromkeys(node_totals.wrong, 0)
        for name in self._listers.cards.cards_on(node):
            card = self._listers.cards.objects.get(name)
            allocation = node_totals.cards.get(name, NOTHING_ALLOCATED)
            if card is None or card.status == allocation:
                continue
            self._schedule.enqueue(Key(CARD, f"{node}/{name}"), now)
            written_mib, counted_mib = _allocated_mib(card.status), _allocated_mib(allocation)
            if written_mib is not None and written_mib != counted_mib:
                wrong[name, Disagreement.STATUS] = written_mib
        self.ledger_check.set_differences(node, wrong, now)

    def _nodes_to_audit(self, now: float) -> list[str]:
        """The nodes to check in this step, so that each node is checked once in `_AUDIT_SECONDS`."""
        if now - self._audited < 1.0:
            return []
        all_nodes = self._listers.cards.nodes() | self._class_sums.nodes() | self.ledger_check.nodes()
        with self._state.view() as ledger:
            all_nodes.update(ledger.nodes_by_name())
        due_count = int(len(all_nodes) * (now - self._audited) / _AUDIT_SECONDS)
        if not due_count:
            return []
        self._audited = now
        audited_nodes = list(islice(self._audit, due_count))
        if len(audited_nodes) < due_count:
            self._audit = iter(all_nodes)
            audited_nodes += islice(self._audit, due_count - len(audited_nodes))
            self._schedule.enqueue_all([Key(CLASS, name) for name in self._listers.classes.snapshot()], now)
            self._schedule.enqueue_all([Key(QUOTA, key) for key in self._listers.quotas.snapshot()], now)
        return audited_nodes

    def _enqueue_changed_classes(self) -> None:
        now = self._clock.now()
        self._schedule.enqueue_all([Key(CLASS, name) for name in self._listers.classes.take_changed()], now)
        before = self._problems, self._automatic
        self._problems = {name: record.problem for name, record in self._listers.classes.snapshot().items()}
        self._automatic = self._listers.cards.automatic_classes()
        if (self._problems, self._automatic) != before:  # the statuses of quotas report missing classes
            self._schedule.enqueue_all([Key(QUOTA, key) for key in self._listers.quotas.snapshot()], now)

    def _enqueue_changed_quotas(self) -> None:
        now = self._clock.now()
        self._schedule.enqueue_all([Key(QUOTA, key) for key in self._listers.quotas.take_changed()], now)
        if now - self._usage_at < _QUOTA_USAGE_CHECK_SECONDS:
            return
        self._usage_at = now
        keys: dict[str, list[Key]] = {}
        for key, quota in self._listers.quotas.snapshot().items():
            keys.setdefault(quota.namespace, []).append(Key(QUOTA, key))
        ledger = self._state.snapshot().ledger
        usage = {namespace: ledger.usage_by_kind(namespace) for namespace in keys}
        for namespace, its_keys in keys.items():
            if usage[namespace] != self._usage.get(namespace):
                self._schedule.enqueue_all(its_keys, now)
        self._usage = usage

    def _write_due_statuses(self) -> None:
        began = now = self._clock.now()
        while now >= self._paused_until and now - began <= _MAX_STEP_SECONDS:
            if not self._write_rate.allows_write(now, self._allowed_rate(now)):
                return
            key = self._schedule.next_key(now)
            if key is None:
                return
            self._write_if_changed(key)
            now = self._clock.now()

    def _allowed_rate(self, now: float) -> float:
        """The number of writes per second that is allowed now."""
        if now < self._storm_until:
            lasts = now - self._storm_since >= _MAX_STORM_SECONDS
            return (
                min(_BUSY_WRITES_PER_SECOND, max(_STORM_WRITES_PER_SECOND, len(self._schedule) / _MAX_STORM_SECONDS))
                if lasts
                else _STORM_WRITES_PER_SECOND
            )
        return _CALM_WRITES_PER_SECOND if now - self._changed_at > _CALM_AFTER_SECONDS else _BUSY_WRITES_PER_SECOND

    def _write_if_changed(self, key: Key) -> None:
        """Write the status of one object if it differs from the desired status."""
        write = {CARD: self._card_write, CLASS: self._class_write, QUOTA: self._quota_write}[key.kind](key.key)
        if write is None:
            self._schedule.mark_settled(key)
            return
        self._write_rate.record_write()
        try:
            self._client.patch(write.path, {"status": write.status}, "merge", timeout=_WRITE_TIMEOUT)
        except (errors.NotFound, errors.Conflict):
            self._schedule.mark_failed(key, self._clock.now(), _CONFLICT_SECONDS)  # the watch will show the new state
        except (errors.Invalid, errors.BadRequest, errors.Forbidden) as error:
            self._log_failure(key, error)
            self._schedule.mark_failed(key, self._clock.now(), _REFUSED_SECONDS)
        except errors.KubeError as error:
            self._log_failure(key, error)
            self._schedule.mark_failed(key, self._clock.now(), self._retry_seconds(key, error))
        else:
            self._backoff.reset()
            self._slow.clear()
            self._schedule.mark_written(key, write.content, self._clock.now())
            write.on_written()

    def _retry_seconds(self, key: Key, error: errors.KubeError) -> float:
        """The seconds until the object is tried again. After an error of the API server itself, all writes pause."""
        now = self._clock.now()
        if errors.would_fail_other_writes(error):
            pause = self._backoff.next_delay(error.retry_after)
            self._paused_until = now + pause
            return pause
        self._slow.add((key.kind, key.key.partition("/")[0]))
        if len(self._slow) >= _MAX_SLOW_OWNERS_IN_A_ROW:
            self._slow.clear()
            self._paused_until = now + _UNREACHABLE_PAUSE_SECONDS
        return _SLOW_SECONDS

    def _log_failure(self, key: Key, error: errors.KubeError) -> None:
        """Log why statuses of this kind cannot be written, once in `_LOG_REPEAT_SECONDS` for the same failure."""
        failure_key, now = (key.kind, error.status), self._clock.now()
        if now - self._complained.get(failure_key, float("-inf")) >= _LOG_REPEAT_SECONDS:
            self._complained[failure_key] = now
            _log.warning("failed to write a status; trying again", kind=key.kind, name=key.key, error=str(error))

    # The write that an object needs now; None if it needs no write.

    def _card_write(self, key: str) -> _Write | None:
        """The write for a card; None if no write is needed. `key`: "node/name" of the card."""
        node, _, name = key.partition("/")
        record = self._listers.cards.objects.get(name)
        if record is None or record.node != node:
            return None
        with self._state.view() as ledger:
            allocation = statuses.compute_node_totals(ledger, record.node).cards.get(name, NOTHING_ALLOCATED)
        if allocation == record.status:
            return None
        return _Write(paths.extendedresources(name, "status"), allocation, statuses.card_status(allocation))

    def _class_write(self, name: str) -> _Write | None:
        record = self._listers.classes.objects.get(name)
        if record is None:
            return None
        cards, nodes = self._class_sums.sums_of(name)
        new_status = statuses.class_status(record, cards, nodes)
        return self._status_write(paths.resourceclasses(name, "status"), new_status, record.status)

    def _quota_write(self, key: str) -> _Write | None:
        record = self._listers.quotas.objects.get(key)
        if record is None:
            return None
        used: Sequence[Charge] = ()
        if record.quota is not None:
            with self._state.view() as ledger:
                used = [ledger.used_amounts(record.namespace, entry) for entry in record.quota.entries]
        new_status = statuses.quota_status(
            record, used, self._listers.classes.snapshot(), self._listers.cards.automatic_classes()
        )
        write = self._status_write(paths.gpuquotas(record.namespace, record.name, "status"), new_status, record.status)
        missing = statuses.new_missing_class_text(new_status, record.status)
        if write is None or missing is None:
            return write
        return write._replace(on_written=lambda: self._no_class(record, missing))

    def _status_write(self, path: str, new_status: Json, current: Json) -> _Write | None:
        if statuses.is_same_status(new_status, current):
            return None
        return _Write(
            path,
            new_status,
            statuses.make_status_patch(new_status, current, self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")),
        )


def _allocated_mib(status: ExtenderStatus) -> int | None:
    """The allocated MiB in a card's status; None if the status has no such number yet."""
    return status.allocated.memory_mib if status.allocated is not None else None
