"""The periodic work of gangs: removes gates, cancels permits, plans waiting gangs, evicts gangs that are bound in part.

The state decides which writes are due. This controller runs in the leader and makes several writes in parallel. The
controller has its own thread, because the look-ups in the thread of `loops` are slow.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.gangs.gangs import ForeignPodGroup, PodGroupSpec
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.pods.eviction import evict
from cardwise.runtime.http.threads import CallThreads
from extender.records.podref import PodRef
from extender.reporting.podgroupwriter import rollback_event
from extender.state import State

_log = structlog.get_logger(__name__)

_MAX_PARALLEL_WRITES = 8  # parallel writes
# Maximum number of queued writes of a namespace and kind, so that none comes long after its decision.
_MAX_QUEUED_WRITES = 64
_MAX_REMEMBERED_RETRIES = 200  # retry times of pods; above this number, past times are removed
_SHOWN_SECONDS = 3.0  # seconds after which the removal of a gate is repeated if the watch still shows the gate
_EVICT_SECONDS = 5.0  # seconds between two attempts to evict a pod
_TIMEOUT = 5.0
_FOREIGN_SECONDS = 5.0  # seconds between two reads of another project's PodGroup
_MAX_FOREIGN_READS = 50  # reads of other projects' PodGroups per step
_FOREIGN_STEP_SECONDS = 0.5  # seconds, after which a step reads no further PodGroup
_PATH_BY_FOREIGN_API: Final[Mapping[ForeignPodGroup, str]] = {
    ForeignPodGroup.COSCHEDULING: f"/apis/{ForeignPodGroup.COSCHEDULING}/v1alpha1",
    ForeignPodGroup.KUBERNETES: f"/apis/{ForeignPodGroup.KUBERNETES}/v1beta1",
}


class GangController:
    """Makes the writes that `Gangs.step` returns. All methods belong to one thread.

    active: returns whether this extender leads and all lists are complete.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        events: Recorder,
        *,
        active: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._state = state
        self._events = events
        self._active = active
        self._clock = clock
        self._not_before: dict[str, float] = {}  # by pod UID, the earliest time of the next write
        # By UID of each pod with a queued or running write: the namespace, and the kind of the write.
        self._writing: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()  # guards `_writing`
        self._podgroup_read_at: dict[tuple[ForeignPodGroup, str], float] = {}  # by PodGroup, when it is read again
        self._read_at: dict[str, float] = {}  # by namespace, when one of its PodGroups was last read
        self._threads: CallThreads | None = None
        self._stopping = False

    def step(self) -> None:
        """Read foreign PodGroups, do the periodic work of the gangs, begin the due writes, and plan gangs."""
        if not self._active():
            return
        self._read_foreign_groups()
        work = self._state.gangs.step()
        self._submit_writes(
            "evict", [(pod, partial(self._evict, pod, cause)) for pod, cause in work.evict], _EVICT_SECONDS
        )
        self._submit_writes("free", [(pod, partial(self._remove_gate, pod)) for pod in work.ungate], _SHOWN_SECONDS)
        self._state.gangs.plan_waiting()

    def stop(self) -> None:
        """Drop the writes that have not begun."""
        self._stopping = True

    def _submit_writes(
        self, kind: str, writes: Iterable[tuple[PodRef, Callable[[], None]]], retry_seconds: float
    ) -> None:
        """Begin the due writes. Within a namespace the writes to the oldest members come first.

        kind: "evict" or "free".
        retry_seconds: the minimum seconds between two writes to the same pod.

        A tenant can have gangs of thousands of pods, and can make each write to these pods take seconds
        (`metadata.managedFields`). So the time of the threads is shared equally among namespaces, and within a
        namespace among kinds of writes. A step also plans gangs, so it never waits for a write.
        """
        now = self._clock.now()
        if len(self._not_before) > _MAX_REMEMBERED_RETRIES:
            self._not_before = {uid: at for uid, at in self._not_before.items() if at > now}
        with self._lock:
            writing = dict(self._writing)
        queued = Counter(writing.values())
        for pod, write in writes:
            flow = pod.namespace, kind
            if self._not_before.get(pod.uid, now) > now or pod.uid in writing or queued[flow] >= _MAX_QUEUED_WRITES:
                continue
            queued[flow] += 1
            self._not_before[pod.uid] = now + retry_seconds
            with self._lock:
                self._writing[pod.uid] = flow
            if self._threads is None:  # created after the fork, in the serving process
                self._threads = CallThreads("gangs", _MAX_PARALLEL_WRITES, self._clock)
            self._threads.submit(partial(self._run_write, pod, write), *flow)

    def _run_write(self, pod: PodRef, write: Callable[[], None]) -> None:
        try:
            if self._active() and not self._stopping:
                write()
        except Exception:  # noqa: BLE001 - the outermost frame of a thread's work
            _log.exception("failed to write a pod of a gang", pod=pod.pod, uid=pod.uid)
        finally:
            with self._lock:
                del self._writing[pod.uid]

    def _remove_gate(self, pod: PodRef) -> None:
        """Remove the pod's gate. Idempotent.

        A different pod that was created with the same name is not changed: a patch with another UID is Invalid.
        """
        if not self._state.gangs.must_ungate(pod.uid):
            return  # the write was queued for a while, and the gang may have lost a member since
        gates = [{"name": names.GANG, "$patch": "delete"}]
        patch = {"metadata": {"uid": pod.uid}, "spec": {"schedulingGates": gates}}
        try:
            self._client.patch(paths.pods(pod.namespace, pod.name), patch, "strategic", timeout=_TIMEOUT)
        except (errors.NotFound, errors.Conflict, errors.Invalid):
            pass  # the pod has changed; the watch will show the new state
        except errors.KubeError as error:
            _log.warning("failed to remove a scheduling gate; trying again", pod=pod.pod, uid=pod.uid, error=str(error))

    def _evict(self, pod: PodRef, cause: str) -> None:
        if not self._active() or not self._state.gangs.must_evict(pod.uid):
            return  # the write was queued for a while, and the gang may run by now
        try:
            evict(self._client, pod.namespace, pod.name, pod.uid)
        except (errors.NotFound, errors.Conflict):
            return
        except errors.KubeError as error:
            _log.warning("failed to evict a pod of a gang; trying again", pod=pod.pod, uid=pod.uid, error=str(error))
            return
        pod_object, reason, text = rollback_event(pod, cause)
        self._events.record(pod_object, reason, text, "Warning")

    def _read_foreign_groups(self) -> None:
        """Read the PodGroups of other API groups that gangs name.

        These PodGroups are not watched, since the cluster may not have their CustomResourceDefinitions. Namespaces take
        turns; in each turn, the PodGroup with the oldest read is read.
        """
        began = self._clock.now()
        foreign_groups = set(self._state.gangs.foreign_groups())
        for kind, key in self._podgroup_read_at.keys() - foreign_groups:
            del self._podgroup_read_at[kind, key]
            self._state.gangs.set_foreign_group(kind, key, None)
        due = sorted(
            (at, podgroup) for podgroup in foreign_groups if (at := self._podgroup_read_at.get(podgroup, 0.0)) <= began
        )
        reads_by_namespace = Counter[str]()
        in_turn = []
        for at, (kind, key) in due:
            namespace, _, _ = key.partition("/")
            in_turn.append((reads_by_namespace[namespace], self._read_at.get(namespace, 0.0), at, namespace, kind, key))
            reads_by_namespace[namespace] += 1
        self._read_at = {namespace: at for namespace, at in self._read_at.items() if namespace in reads_by_namespace}
        for _, _, _, namespace, kind, key in sorted(in_turn)[:_MAX_FOREIGN_READS]:
            self._read_at[namespace] = self._clock.now()
            self._podgroup_read_at[kind, key] = began + _FOREIGN_SECONDS
            self._read_foreign_group(kind, key)
            if self._clock.now() - began > _FOREIGN_STEP_SECONDS:
                break

    def _read_foreign_group(self, kind: ForeignPodGroup, key: str) -> None:
        namespace, _, name = key.partition("/")
        try:
            path = paths.namespaced(_PATH_BY_FOREIGN_API[kind], "podgroups", namespace, name)
            spec = self._client.get(path, timeout=_TIMEOUT).get("spec") or {}
        except errors.NotFound:
            self._state.gangs.set_foreign_group(kind, key, None)
        except errors.KubeError as error:
            _log.warning("failed to read a PodGroup of another controller", group=kind, name=key, error=str(error))
        else:
            self._state.gangs.set_foreign_group(
                kind, key, _kubernetes_group(spec) if kind is ForeignPodGroup.KUBERNETES else _coscheduling_group(spec)
            )


def _kubernetes_group(spec: Mapping[str, Any]) -> PodGroupSpec:
    gang = (spec.get("schedulingPolicy") or {}).get("gang")
    return PodGroupSpec(basic=True) if gang is None else PodGroupSpec(minimum=gang.get("minCount"))


def _coscheduling_group(spec: Mapping[str, Any]) -> PodGroupSpec:
    """The gang settings of a PodGroup of coscheduling: the minimum number of pods, and the permit in seconds."""
    minimum, seconds = spec.get("minMember"), spec.get("scheduleTimeoutSeconds")
    return PodGroupSpec(
        minimum=minimum if type(minimum) is int else None,
        permit=float(seconds) if type(seconds) is int and seconds > 0 else None,
    )
