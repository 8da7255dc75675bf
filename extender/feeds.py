"""From the API server to the state: five reflectors and what is said when a pod's annotations are unreadable.

Apart from the state so that the state knows no thread and no wire.
"""

import gc
from collections.abc import Callable
from typing import Any

import structlog

from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.reflector import Reflector
from extender import projection
from extender.projection import CardRecord, ClassRecord, PodRecord, QuotaRecord
from extender.state import State

_log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.2  # between two looks at whether a list is still wanted


class Feeds:
    """Start it in the process that serves. Ready when all five lists have been taken over: a quota that is not listed
    yet must not be exceeded.
    """

    def __init__(self, client: KubeClient, state: State, events: EventRecorder) -> None:
        # What another extender may have decided, and by which limits.
        self._decisive: tuple[Reflector[Any], ...] = (
            Reflector(client, paths.gpuquotas(), projection.quota, _Quotas(state), name="gpuquotas"),
            Reflector(client, paths.pods(), projection.pod, _Pods(state, events), name="pods"),
        )
        self._reflectors: tuple[Reflector[Any], ...] = (
            Reflector(client, paths.nodes(), projection.node, _Nodes(state), name="nodes"),
            Reflector(
                client, paths.resourceclasses(), projection.resource_class, _Classes(state), name="resourceclasses"
            ),
            Reflector(client, paths.extendedresources(), projection.card, _Cards(state), name="extendedresources"),
            *self._decisive,
        )

    def start(self) -> None:
        for reflector in self._reflectors:
            reflector.start()

    def stop(self) -> None:
        for reflector in self._reflectors:
            reflector.stop()

    def catch_up(self, still: Callable[[], bool]) -> bool:
        """Lists pods and quotas anew. Whether the state has what had been written before; no sooner given up than
        `still` says no.
        """
        for done in [reflector.relist() for reflector in self._decisive]:
            while not done.wait(_LOOK_SECONDS):
                if not still():
                    return False
        return True

    def missing(self) -> list[str]:
        """What has not been listed yet, a line each."""
        return [f"the list of {each.name} is not complete yet" for each in self._reflectors if not each.synced.is_set()]

    def staleness(self) -> dict[str, float]:
        """Seconds since each reflector last heard from the API server."""
        return {each.name: each.staleness_seconds() for each in self._reflectors}


class _Pods:
    def __init__(self, state: State, events: EventRecorder) -> None:
        self._state = state
        self._events = events

    def on_change(self, key: str, old: PodRecord | None, new: PodRecord) -> None:
        if new.problem and (old is None or old.problem != new.problem):
            _log.warning("unreadable assignment", pod=new.name, namespace=new.namespace, uid=key, problem=new.problem)
            about = ObjectRef.pod(new.namespace, new.name, new.uid)
            text = f"{new.problem}; the pod's GPU share is not counted, delete the pod"
            self._events.record(about, "UnreadableAssignment", text, "Warning")
        self._state.set_pod(new)

    def on_delete(self, key: str, old: PodRecord) -> None:
        del key
        self._state.remove_pod(old)

    def on_synced(self) -> None:
        # What was listed stays: without this, each full collection of the garbage collector walks through it.
        gc.collect()
        gc.freeze()


class _Cards:
    def __init__(self, state: State) -> None:
        self._state = state

    def on_change(self, key: str, old: CardRecord | None, new: CardRecord) -> None:
        del old
        self._state.set_card(key, new)

    def on_delete(self, key: str, old: CardRecord) -> None:
        del old
        self._state.remove_card(key)

    def on_synced(self) -> None:
        pass


class _Nodes:
    def __init__(self, state: State) -> None:
        self._state = state

    def on_change(self, key: str, old: bool | None, new: bool) -> None:
        del old, new
        self._state.set_node(key)

    def on_delete(self, key: str, old: bool) -> None:
        del old
        self._state.remove_node(key)

    def on_synced(self) -> None:
        pass


class _Classes:
    def __init__(self, state: State) -> None:
        self._state = state

    def on_change(self, key: str, old: ClassRecord | None, new: ClassRecord) -> None:
        del old
        if new.device_class is None:
            _log.warning("unreadable ResourceClass, no card is of it", name=key, problem=new.problem)
            self._state.remove_class(key)
        else:
            self._state.set_class(new.device_class)

    def on_delete(self, key: str, old: ClassRecord) -> None:
        del old
        self._state.remove_class(key)

    def on_synced(self) -> None:
        pass


class _Quotas:
    def __init__(self, state: State) -> None:
        self._state = state

    def on_change(self, key: str, old: QuotaRecord | None, new: QuotaRecord) -> None:
        del old
        if new.quota is None:
            _log.warning("unreadable GPUQuota, it limits nothing", quota=key, problem=new.problem)
            self._state.remove_quota(key)
        else:
            self._state.set_quota(key, new.quota)

    def on_delete(self, key: str, old: QuotaRecord) -> None:
        del old
        self._state.remove_quota(key)

    def on_synced(self) -> None:
        pass
