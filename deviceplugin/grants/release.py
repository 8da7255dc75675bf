"""Releases a pod's grants once the API server reports the pod's end and the runtime has none of its containers.

Two more kinds of pods are treated as ended. A pod may be bound to another node, whose name this machine had before
(docs/design/0031). A pod may be pending again, because etcd was restored from a backup. Either pod may be bound here
later under the same UID, and a restored API server may have a deleted pod again. So a grant is dropped only if it is
older than the pass in which the API server reports the end (`GrantStore.drop_grants_of_pod`).

Both reports are needed. The API server forgets a force-deleted pod while its containers still use the card. The runtime
cannot distinguish a container between two restarts from a container that has ended for good. Both reports together
always suffice, also for a pod whose containers never started. The shares of a terminating pod, whose object is deleted
but whose containers run, are published as `reported`.

A pod that is bound here again with other cards has two bindings on this node. The pod's grants belong to the former
binding until the containers of that binding have ended. Until then the pod holds for each card the larger amount of the
two bindings. If the grants hold more of a card than the assignment, `reported` is the amount of the grants. The pod's
grants are dropped once the runtime has no sandbox and no container of the pod. They are also dropped when the next
container starts while no container with a share runs.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api.assignment import Assignment
from cardwise.kube import errors
from cardwise.kube.objects.extendedresources import ContainerShare
from deviceplugin.grants.access import Delivery
from deviceplugin.grants.grants import Grant, GrantStore, merge_by_pod
from deviceplugin.sources.containers import RuntimeContainers, RuntimeUnavailable
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)

_MAX_CONCURRENT_READS = 8
_READ_BUDGET_SECONDS = 3.0  # time in a pass after which no further read of a pod begins


def reported_shares(grants: Iterable[Grant]) -> dict[str, list[ContainerShare]]:
    """The shares of these grants, by UUID of the card or device; one entry for each container. Pure.

    The entries are not summed per pod, since quotas and cards count containers.
    """
    reported: dict[str, list[ContainerShare]] = defaultdict(list)
    for pod in sorted(merge_by_pod(grants), key=lambda grant: grant.pod_uid):
        holder = ContainerShare(uid=pod.pod_uid, namespace=pod.namespace, name=pod.name)
        for share, key in zip(pod.pod_shares, pod.pod_keys, strict=True):
            reported[share.uuid].append(
                msgspec.structs.replace(holder, container=key, mem=share.mem, core=share.core, whole=share.whole)
            )
        for device, key in zip(pod.pod_devices, pod.pod_device_keys, strict=True):
            reported[device.uuid].append(msgspec.structs.replace(holder, container=key, whole=True))
    return dict(reported)


def find_former_cards(pod: NodePod, grants: Iterable[Grant]) -> set[str]:
    """The UUIDs of the cards and devices whose granted amounts exceed the assignment. Pure.

    The grants have these cards and devices from a former binding.
    """
    try:
        assignment = codec.decode(pod.annotations)
    except codec.InvalidAssignment:
        return set()
    excesses = [grant.pod_assignment.excess_over(assignment or Assignment({})) for grant in grants]
    return {uuid for excess in excesses if excess is not None for uuid in excess.uuids()}


class Releaser:
    """Releases grants: a loop calls `sweep_grants`, and a start that needs space calls `release_ended`.

    on_change: called when the reported shares have changed.
    """

    def __init__(
        self,
        *,
        pods: Pods,
        containers: RuntimeContainers,
        grants: GrantStore,
        delivery: Delivery,
        on_change: Callable[[], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._pods = pods
        self._containers = containers
        self._grants = grants
        self._delivery = delivery
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._reported: dict[str, list[ContainerShare]] | None = None
        # The threads of PreStart write this dictionary too.
        self._ended_passes: dict[
            str, int
        ] = {}  # pod UID -> number of passes in which the ended pod still had live containers
        self._runtime_problem: str | None = None

    def reported_shares(self) -> Mapping[str, list[ContainerShare]] | None:
        """The shares that are published as `reported`, by UUID of the card or device.

        Some belong to pods that have live containers although the API server reports their end. The others belong to
        former bindings of pods that are bound here. None until API server and runtime have answered for all pods.
        """
        with self._lock:
            return None if self._reported is None else dict(self._reported)

    @property
    def problem(self) -> str | None:
        """The obstacle to releasing shares at present; None if there is no obstacle."""
        return self._runtime_problem

    def release_ended(self, pod_uids: set[str]) -> bool:
        """Release the grants of ended pods; returns whether API server and runtime answered for all of these pods."""
        # Read the epoch first: the responses do not cover grants that are added meanwhile.
        epoch = self._grants.epoch()
        with self._lock:
            known_ended = pod_uids & self._ended_passes.keys()
        ended_by_uid = self._ended_by_uid(pod_uids, known_ended)
        ended = {uid for uid, has_ended in ended_by_uid.items() if has_ended}
        self._unmark_ended(uid for uid, has_ended in ended_by_uid.items() if has_ended is False)
        all_answered = None not in ended_by_uid.values()
        bound_again = {
            uid for uid, has_ended in ended_by_uid.items() if has_ended is False and self._find_former_cards(uid)
        }
        if not ended and not bound_again:
            return all_answered
        try:
            live_containers = self._containers.live_containers(ended | bound_again)
        except RuntimeUnavailable as error:
            if not self._runtime_problem:
                _log.error(
                    "failed to free the shares of ended pods: the container runtime does not answer", error=str(error)
                )
            self._runtime_problem = str(error)
            return False
        self._runtime_problem = None
        for uid in ended & live_containers.keys():
            self._mark_ended(uid, live_containers[uid])
        stopped = ended - live_containers.keys()
        for uid, has_ended in (
            dict.fromkeys(stopped, True) | self._answers_by_uid(self._read_has_ended, stopped & known_ended)
        ).items():
            if has_ended:
                self._drop_grants(uid, epoch)
            elif has_ended is None:
                all_answered = False
            else:
                self._unmark_ended((uid,))
        for uid, is_bound_again in self._answers_by_uid(
            self._read_former_binding, bound_again - live_containers.keys()
        ).items():
            if is_bound_again:
                self._drop_grants(uid, epoch)
            elif is_bound_again is None:
                all_answered = False
        return all_answered

    def release_former_binding(self, uid: str) -> None:
        """Release all grants of a pod if none of its containers with a share runs.

        Call this only while the pod's next container starts: then no other container of the pod is about to start. A
        running share agent also prevents the release, since the agent still publishes the former shares to the
        containers.
        """
        epoch = self._grants.epoch()
        try:
            live_containers = self._containers.live_containers({uid})
        except RuntimeUnavailable as error:
            pod_name = next((grant.pod for grant in self._grants.grants_of_pod(uid)), "")
            _log.warning("failed to check for containers of a former binding", pod=pod_name, uid=uid, error=str(error))
            return
        if not any(name and self._may_have_share(uid, name) for name in live_containers.get(uid, ())):
            self._drop_grants(uid, epoch)

    def sweep_grants(self, *, complete: bool = True) -> None:
        """Release the grants of all ended pods, and remove unused CDI specs.

        complete: whether each running container has a grant.
        """
        uids = {grant.pod_uid for grant in self._grants.list_grants()}
        all_answered = self.release_ended(uids)
        granted = {grant.pod_uid for grant in self._grants.list_grants()}
        with self._lock:
            self._ended_passes = {uid: passes for uid, passes in self._ended_passes.items() if uid in granted}
        self._publish_reported_shares(complete=all_answered and complete)
        self._delivery.remove_unused_specs(self._grants)

    def _ended_by_uid(self, uids: Collection[str], known_ended: Collection[str]) -> dict[str, bool | None]:
        """Whether each pod has certainly ended or is not bound here, by UID; None if the API server does not answer.

        known_ended: UIDs of pods whose end an earlier pass has observed. Only a consistent read can show that such a
            pod is bound here again, since the watch may show an older state.
        """
        ended_by_uid: dict[str, bool | None] = {}
        uncertain: list[str] = []
        for uid in uids:
            pod = self._pods.find_pod(uid)
            if pod is None and not self._pods.synced:
                ended_by_uid[uid] = None
            elif pod is None and uid in known_ended:
                ended_by_uid[uid] = True
            elif pod is not None and (pod.finished or uid not in known_ended):
                ended_by_uid[uid] = pod.finished
            else:
                uncertain.append(uid)
        return ended_by_uid | self._answers_by_uid(self._read_has_ended, uncertain)

    def _answers_by_uid(self, read_pod: Callable[[str], bool | None], uids: Collection[str]) -> dict[str, bool | None]:
        """Call `read_pod` for each of these pods, for several at once; returns its answers by UID.

        No read begins after `_READ_BUDGET_SECONDS`; the remaining pods get None. If the API server hangs, each read
        takes its whole timeout, and a container may be waiting to start.
        """
        deadline = self._clock.now() + _READ_BUDGET_SECONDS

        def read_in_time(uid: str) -> bool | None:
            return read_pod(uid) if self._clock.now() < deadline else None

        if len(uids) <= 1:
            return {uid: read_in_time(uid) for uid in uids}
        with ThreadPoolExecutor(min(_MAX_CONCURRENT_READS, len(uids)), thread_name_prefix="ends") as pool:
            return dict(zip(uids, pool.map(read_in_time, uids), strict=True))

    def _read_has_ended(self, uid: str) -> bool | None:
        """Whether one pod has ended, according to a consistent read; None if the API server does not answer.

        The read shows each Binding that the kubelet has acted on, even if the reflector has not seen it yet.
        """
        grants = self._grants.grants_of_pod(uid)
        if not grants:
            return False
        try:
            pod = self._fetch_pod(grants[0])
        except errors.KubeError:
            return None
        return pod is None or pod.finished or not self._pods.is_bound_here(pod)

    def _read_former_binding(self, uid: str) -> bool | None:
        """Whether the pod is bound here with other cards than its grants have; None if the API server does not answer.

        Uses a consistent read, since the reflector may not have seen the pod's latest Binding yet.
        """
        grants = self._grants.grants_of_pod(uid)
        if not grants:
            return False
        try:
            pod = self._fetch_pod(grants[0])
        except errors.KubeError:
            return None
        return pod is not None and bool(find_former_cards(pod, grants))

    def _fetch_pod(self, grant: Grant) -> NodePod | None:
        try:
            return self._pods.fetch_pod(grant.namespace, grant.name, grant.pod_uid)
        except errors.KubeError as error:
            _log.warning("failed to check whether a pod is gone", pod=grant.pod, uid=grant.pod_uid, error=str(error))
            raise

    def _find_former_cards(self, uid: str) -> set[str]:
        pod = self._pods.find_pod(uid)
        return set() if pod is None or pod.finished else find_former_cards(pod, self._grants.grants_of_pod(uid))

    def _may_have_share(self, uid: str, container: str) -> bool:
        """Whether the container may have a share, according to its pod's grants."""
        grants = self._grants.grants_of_pod(uid)
        if any(grant.container == container and grant.has_container_shares for grant in grants):
            return True
        pod = self._pods.find_pod(uid)
        key = None if pod is None else pod.keys.get(container)
        return key is None or any(key in grant.keys for grant in grants)

    def _unmark_ended(self, uids: Iterable[str]) -> None:
        """Treat these pods as not ended, so that their shares are not reported: the pods are bound here (again)."""
        with self._lock:
            for uid in uids:
                self._ended_passes.pop(uid, None)

    def _mark_ended(self, uid: str, live_names: set[str]) -> None:
        # A ready sandbox without containers usually ends soon, so its pod's shares are published only if the second
        # pass still finds the sandbox. In the first pass after the start, such shares are published at once.
        with self._lock:
            passes = self._ended_passes.get(uid, 0) + 1
            if (any(live_names) or self._reported is None) and passes < 2:
                passes = 2
            self._ended_passes[uid] = passes
        if passes == 2:
            pod = next(iter(self._grants.grants_of_pod(uid)), None)
            container_names = sorted(name or "(sandbox)" for name in live_names)
            _log.info("an ended pod still holds its share", pod=pod and pod.pod, uid=uid, alive=container_names)

    def _drop_grants(self, uid: str, epoch: int) -> None:
        pod_name = next((grant.pod for grant in self._grants.grants_of_pod(uid)), "")
        try:
            dropped = self._grants.drop_grants_of_pod(uid, epoch)
        except OSError as error:
            _log.error("failed to remove a grant; trying again", pod=pod_name, uid=uid, error=str(error))
            return
        if dropped:
            self._delivery.remove_unused_specs(self._grants)
            with self._lock:
                self._ended_passes.pop(uid, None)
            _log.info("freed", pod=pod_name, uid=uid, containers=[grant.container for grant in dropped])

    def _publish_reported_shares(self, *, complete: bool) -> None:
        with self._lock:
            if self._reported is None and not complete:
                return
            ended = {uid for uid, passes in self._ended_passes.items() if passes >= 2}
        grants = self._grants.list_grants()
        former_uuids = {uid: self._find_former_cards(uid) for uid in {grant.pod_uid for grant in grants} - ended}
        reported = reported_shares(
            grant if grant.pod_uid in ended else grant.restrict_to_cards(former_uuids[grant.pod_uid])
            for grant in grants
        )
        with self._lock:
            changed = reported != self._reported
            self._reported = reported
        if changed:
            self._on_change()
