"""Does the timed work of gangs: removes gates, ends holds, plans waiting gangs, evicts gangs that are bound in part.

The state says what is due; the leader writes it here, several writes at a time. It has a thread of its own, since the
look-ups of `loops` are slow.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.gangs.gangs import Foreign, Group
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.fairqueueing import round_robin
from cardwise.kube.pods.eviction import evict
from extender.records.podref import PodRef
from extender.reporting.podgroupwriter import rolled_back
from extender.state import State

_log = structlog.get_logger(__name__)

_AT_ONCE = 8  # writes
_MOST = 200  # writes in one step
_SHOWN_SECONDS = 3.0  # if the watch does not show by then that a gate is gone, it is removed again
_EVICT_SECONDS = 5.0  # between two tries to evict a pod
_TIMEOUT = 5.0
_SLOW = 2.0  # seconds that make a write slow
_REST_SECONDS = 10.0  # in which nothing is written to a namespace after `_AT_ONCE` slow writes there
_FOREIGN_SECONDS = 5.0  # between two looks at a PodGroup that is not ours
_FOREIGN_MOST = 50  # such looks in one step
_FOREIGN_STEP = 0.5  # seconds, after which a step takes no further look
_FOREIGN: Final[Mapping[Foreign, str]] = {
    Foreign.COSCHEDULING: f"/apis/{Foreign.COSCHEDULING}/v1alpha1",
    Foreign.KUBERNETES: f"/apis/{Foreign.KUBERNETES}/v1beta1",
}


class GangController:
    """`active`: whether this extender leads and all lists are complete. All methods belong to one thread."""

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
        self._not_before: dict[str, float] = {}  # by pod
        self._rests: dict[str, float] = {}  # namespaces, until when
        self._foreign: dict[tuple[Foreign, str], float] = {}  # when such a PodGroup is looked at again
        self._looked_at: dict[str, float] = {}  # when one of the namespace was
        self._pool: ThreadPoolExecutor | None = None

    def step(self) -> None:
        """One round."""
        if not self._active():
            return
        self._look_at_foreign()
        work = self._state.gangs.step()
        self._write([(pod, partial(self._free, pod)) for pod in work.free], _SHOWN_SECONDS)
        self._write([(pod, partial(self._evict, pod, why)) for pod, why in work.evict], _EVICT_SECONDS)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _write(self, writes: Iterable[tuple[PodRef, Callable[[], None]]], again: float) -> None:
        """Does the writes that are due, namespaces in turn, and of each the oldest members first. No pod is written
        again within `again` seconds.

        A tenant can have gangs of thousands of pods, and can make each write to his pods take seconds
        (`metadata.managedFields`); others do not wait for that.
        """
        now = self._clock.now()
        self._rests = {namespace: until for namespace, until in self._rests.items() if until > now}
        if len(self._not_before) > _MOST:
            self._not_before = {uid: at for uid, at in self._not_before.items() if at > now}
        due = [
            (pod, write)
            for pod, write in writes
            if self._not_before.get(pod.uid, now) <= now and pod.namespace not in self._rests
        ]
        due = round_robin(due, lambda write: write[0].namespace)[:_MOST]
        if not due:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="gangs")
        for pod, _ in due:
            self._not_before[pod.uid] = now + again
        slow = Counter[str]()
        for done in [self._pool.submit(self._in_time, pod, write, slow) for pod, write in due]:
            done.result()

    def _in_time(self, pod: PodRef, write: Callable[[], None], slow: Counter[str]) -> None:
        """Writes, unless too many writes of the namespace have been `slow` in this step."""
        if slow[pod.namespace] >= _AT_ONCE:
            self._rests[pod.namespace] = self._clock.now() + _REST_SECONDS
            return
        began = self._clock.now()
        write()
        slow[pod.namespace] += self._clock.now() - began >= _SLOW

    def _free(self, pod: PodRef) -> None:
        """Removes the gate. Idempotent. A pod that was made again under this name is left alone: a patch that would
        change its UID is Invalid.
        """
        gates = [{"name": names.GANG, "$patch": "delete"}]
        patch = {"metadata": {"uid": pod.uid}, "spec": {"schedulingGates": gates}}
        try:
            self._client.patch(paths.pods(pod.namespace, pod.name), patch, "strategic", timeout=_TIMEOUT)
        except (errors.NotFound, errors.Conflict, errors.Invalid):
            pass  # the watch will say what became of it
        except errors.KubeError as error:
            _log.warning("cannot take a gate away; it is tried again", pod=pod.pod, uid=pod.uid, error=str(error))

    def _evict(self, pod: PodRef, why: str) -> None:
        if not self._active() or not self._state.gangs.evicts(pod.uid):
            return  # the writes before it took a while, and its gang may run by now
        try:
            evict(self._client, pod.namespace, pod.name, pod.uid)
        except (errors.NotFound, errors.Conflict):
            return
        except errors.KubeError as error:
            _log.warning("cannot evict a pod of a gang; it is tried again", pod=pod.pod, uid=pod.uid, error=str(error))
            return
        about, reason, text = rolled_back(pod, why)
        self._events.record(about, reason, text, "Warning")

    def _look_at_foreign(self) -> None:
        """Reads PodGroups of others. There is no watch, since their kinds may not be served. Namespaces take turns,
        each with the PodGroup that was not read for longest.
        """
        began = self._clock.now()
        wanted = set(self._state.gangs.foreign())
        for kind, key in self._foreign.keys() - wanted:
            del self._foreign[kind, key]
            self._state.gangs.set_foreign(kind, key, None)
        due = sorted((at, each) for each in wanted if (at := self._foreign.get(each, 0.0)) <= began)
        turns = Counter[str]()
        in_turn = []
        for at, (kind, key) in due:
            namespace, _, _ = key.partition("/")
            in_turn.append((turns[namespace], self._looked_at.get(namespace, 0.0), at, namespace, kind, key))
            turns[namespace] += 1
        self._looked_at = {namespace: at for namespace, at in self._looked_at.items() if namespace in turns}
        for _, _, _, namespace, kind, key in sorted(in_turn)[:_FOREIGN_MOST]:
            self._looked_at[namespace] = self._clock.now()
            self._foreign[kind, key] = began + _FOREIGN_SECONDS
            self._read_foreign(kind, key)
            if self._clock.now() - began > _FOREIGN_STEP:
                break

    def _read_foreign(self, kind: Foreign, key: str) -> None:
        namespace, _, name = key.partition("/")
        try:
            path = paths.namespaced(_FOREIGN[kind], "podgroups", namespace, name)
            spec = self._client.get(path, timeout=_TIMEOUT).get("spec") or {}
        except errors.NotFound:
            self._state.gangs.set_foreign(kind, key, None)
        except errors.KubeError as error:
            _log.warning("cannot read somebody else's PodGroup", group=kind, name=key, error=str(error))
        else:
            self._state.gangs.set_foreign(kind, key, _of_kubernetes(spec) if kind is Foreign.KUBERNETES else _of(spec))


def _of_kubernetes(spec: Mapping[str, Any]) -> Group:
    gang = (spec.get("schedulingPolicy") or {}).get("gang")
    return Group(basic=True) if gang is None else Group(minimum=gang.get("minCount"))


def _of(spec: Mapping[str, Any]) -> Group:
    """A PodGroup of coscheduling."""
    minimum, seconds = spec.get("minMember"), spec.get("scheduleTimeoutSeconds")
    return Group(
        minimum=minimum if type(minimum) is int else None,
        hold=float(seconds) if type(seconds) is int and seconds > 0 else None,
    )
