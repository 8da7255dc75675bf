"""Frees a grant when the API server says that the pod has ended, and the runtime has none of its containers.

A pod that is bound to another node has ended here, too: this machine had that node's name before (docs/design/0031).

Both are needed. The API server alone forgets a force-deleted pod while its containers still use the card; the runtime
alone cannot tell a container between two restarts from one that will never come back. And both together always free:
also a pod whose containers never started. A share whose pod is gone but whose containers run is published as `held`.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat

import msgspec
import structlog

from cardwise.kube import errors
from cardwise.kube.wire import HeldShare
from deviceplugin.grants.access import Delivery
from deviceplugin.grants.grants import Grant, GrantStore, by_pod
from deviceplugin.sources.containers import Containers, RuntimeUnavailable
from deviceplugin.sources.pods import Pods

_log = structlog.get_logger(__name__)


def held_shares(grants: Iterable[Grant]) -> dict[str, list[HeldShare]]:
    """What pods without an object hold, by UUID of card or device; one entry for each container. Pure.

    Not summed by pod: containers count one by one in quotas and on cards, and two halves are no whole card.
    """
    held: dict[str, list[HeldShare]] = defaultdict(list)
    for uid, pod in sorted(by_pod(grants).items()):
        whose = HeldShare(pod_uid=uid, namespace=pod.namespace, name=pod.name)
        for share, key in zip(pod.pod_shares, chain(pod.pod_keys, repeat("")), strict=False):
            theirs = {"memory_mib": share.mem, "core_percent": share.core, "whole": share.whole}
            held[share.uuid].append(msgspec.structs.replace(whose, container=key, **theirs))
        for device, key in zip(pod.pod_devices, pod.pod_device_keys, strict=True):
            held[device.uuid].append(msgspec.structs.replace(whose, container=key, whole=True))
    return dict(held)


class Releaser:
    """`sweep` again and again; `free` may also be called by who needs room now. `on_change`: held shares changed."""

    def __init__(
        self,
        *,
        pods: Pods,
        containers: Containers,
        grants: GrantStore,
        delivery: Delivery,
        on_change: Callable[[], None],
    ) -> None:
        self._pods = pods
        self._containers = containers
        self._grants = grants
        self._delivery = delivery
        self._on_change = on_change
        self._lock = threading.Lock()
        self._held: dict[str, list[HeldShare]] | None = None
        # Written by the threads of PreStart as well.
        self._ended: dict[str, int] = {}  # pod UID -> rounds that it has been ended but not gone
        self._silent = ""

    def held(self) -> Mapping[str, list[HeldShare]] | None:
        """The shares, by UUID, of pods that have ended for the API server and live for the runtime. None until both
        have been asked about all of them: nobody knows then what a former process has found.
        """
        with self._lock:
            return None if self._held is None else dict(self._held)

    @property
    def silent(self) -> str:
        """Why shares cannot be freed at present, "" when they can."""
        return self._silent

    def free(self, pod_uids: set[str]) -> bool:
        """Free what can be freed of these pods' grants. Returns whether API server and runtime have both answered."""
        # The mark comes first: a grant given while we ask is not covered by the answers.
        epoch = self._grants.epoch()
        said = {uid: self._ended_by_api(uid) for uid in pod_uids}
        ended = {uid for uid, has_ended in said.items() if has_ended}
        answered = None not in said.values()
        if not ended:
            return answered
        try:
            alive = self._containers.live_containers(ended)
        except RuntimeUnavailable as error:
            if not self._silent:
                _log.error("shares of ended pods stay held: the container runtime is silent", error=str(error))
            self._silent = str(error)
            return False
        self._silent = ""
        for uid in ended:
            if uid in alive:
                self._keep(uid, alive[uid])
            else:
                self._drop(uid, epoch)
        return answered

    def sweep(self, *, complete: bool = True) -> None:
        """One round over all grants. `complete`: there is one for each container that runs."""
        uids = {grant.pod_uid for grant in self._grants.all()}
        whole = self.free(uids)
        granted = {grant.pod_uid for grant in self._grants.all()}
        with self._lock:
            self._ended = {uid: rounds for uid, rounds in self._ended.items() if uid in granted}
        self._publish(whole=whole and complete)

    def _ended_by_api(self, uid: str) -> bool | None:
        """Whether the pod has finished or is gone, for certain; None where the API server does not say."""
        known = self._pods.known(uid)
        if known is not None:
            return known.finished
        if not self._pods.synced:
            return None
        grants = self._grants.of_pod(uid)
        if not grants:
            return False
        with self._lock:
            if uid in self._ended:
                return True  # an object that is gone never comes back under its UID
        try:
            # Not in the reflector can also mean: not yet. The kubelet may know a pod before we do.
            found = self._pods.fetch_pod(grants[0].namespace, grants[0].name, uid)
        except errors.KubeError as error:
            _log.warning("is the pod gone? the API server does not say", pod=grants[0].pod, uid=uid, error=str(error))
            return None
        return found is None or found.finished or self._pods.has_left(found)

    def _keep(self, uid: str, alive: set[str]) -> None:
        # A ready sandbox without containers is mostly about to end, so it is told of only if it is still there at the
        # second look. At the first look after our start it is told of at once.
        with self._lock:
            rounds = self._ended.get(uid, 0) + 1
            if (any(alive) or self._held is None) and rounds < 2:
                rounds = 2
            self._ended[uid] = rounds
        if rounds == 2:
            pod = next(iter(self._grants.of_pod(uid)), None)
            what = sorted(name or "(sandbox)" for name in alive)
            _log.info("an ended pod still holds its share", pod=pod and pod.pod, uid=uid, alive=what)

    def _drop(self, uid: str, epoch: int) -> None:
        who = next((grant.pod for grant in self._grants.of_pod(uid)), "")
        try:
            dropped = self._grants.drop(uid, epoch)
            for slot in {slot for grant in dropped for slot in grant.slots}:
                # The kubelet may have given the slot to the next container by now.
                self._delivery.withdraw(slot, lambda slot=slot: self._grants.owner(slot) is None)  # type: ignore[misc]
        except OSError as error:
            _log.error("a grant could not be removed; it is tried again", pod=who, uid=uid, error=str(error))
            return
        if dropped:
            with self._lock:
                self._ended.pop(uid, None)
            _log.info("freed", pod=who, uid=uid, containers=[grant.container for grant in dropped])

    def _publish(self, *, whole: bool) -> None:
        with self._lock:
            if self._held is None and not whole:
                return
            ended = {uid for uid, rounds in self._ended.items() if rounds >= 2}
        held = held_shares(grant for grant in self._grants.all() if grant.pod_uid in ended)
        with self._lock:
            changed = held != self._held
            self._held = held
        if changed:
            self._on_change()
