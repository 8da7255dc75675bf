"""PreStartContainer: identifies the container that has a share slot and is about to start, and grants it its cards.

This module chooses no cards. The kubelet's records name the container that has the slot. The annotations that the
extender wrote at bind name the container's cards. The kubelet calls PreStartContainer at every start, and retries after
an error. The further steps are those of `granting`.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from deviceplugin.grants.access import NO_CDI_FOR_DEVICES_TEXT, Access
from deviceplugin.grants.granting import Granting, IsActive, StartRefused
from deviceplugin.grants.grants import Grant
from deviceplugin.sources.containers import RuntimeUnavailable, Sandbox
from deviceplugin.sources.kubelet import (
    CheckpointContainer,
    Holders,
    Kubelet,
    KubeletUnavailable,
    PodResourcesContainer,
)
from deviceplugin.sources.pods import NodePod, Pods


def identify_container(
    slots: Sequence[str], holders: Holders, name_of_uid: Callable[[str], str | None]
) -> tuple[PodResourcesContainer, str]:
    """The container that has all these slots, with its pod's UID. Pure. Raises StartRefused.

    name_of_uid: returns "namespace/name" of a pod UID; None if unknown. This name selects the right entry if the
        checkpoint still has entries of former pods.
    """
    if not slots:
        raise StartRefused("the kubelet named no device")
    pod_resources_holders: dict[PodResourcesContainer, None] = {}
    checkpoint_holders: dict[CheckpointContainer, None] = {}
    for slot in slots:
        pod_resources_holders |= dict.fromkeys(holders.pod_resources.get(slot, ()))
        checkpoint_holders |= dict.fromkeys(holders.checkpoint.get(slot, ()))
    slots_text = f"share slot {', '.join(slots)}"
    if not pod_resources_holders:
        raise StartRefused(f"the kubelet does not list a container with {slots_text} yet")
    if len(pod_resources_holders) > 1:
        containers = " and ".join(
            f"{holder.namespace}/{holder.pod} (container {holder.container})" for holder in pod_resources_holders
        )
        raise StartRefused(f"the kubelet gave {slots_text} to {containers}; delete one of these pods")
    container = next(iter(pod_resources_holders))
    pod_name = f"{container.namespace}/{container.pod}"
    uids = [holder.pod_uid for holder in checkpoint_holders if holder.container == container.container]
    if len(uids) > 1:
        uids = [uid for uid in uids if name_of_uid(uid) in (pod_name, None)]
    if len(uids) != 1:
        entries = ", ".join(f"{holder.pod_uid}/{holder.container}" for holder in checkpoint_holders) or "no container"
        raise StartRefused(
            f"the kubelet's two records disagree on {slots_text}: PodResources lists {pod_name} "
            f"(container {container.container}), its checkpoint {entries}"
        )
    return container, uids[0]


def check_sandboxes(grant: Grant, sandboxes: Iterable[Sandbox]) -> None:
    """Check that the pod's ready sandbox was made for the binding of the grant. Pure. Raises StartRefused.

    Only nodes without CDI need this check. There the kubelet sets the container's cards from its own copy of the pod's
    annotations. After a restore of etcd that copy may still have the annotations of a former binding. The annotations
    of the sandbox are never newer than the annotations in the kubelet's copy.
    """
    ready = [sandbox for sandbox in sandboxes if sandbox.pod_uid == grant.pod_uid and sandbox.ready]
    if not ready:
        raise StartRefused(f"pod {grant.pod}: the container runtime has no ready sandbox of it yet")
    for sandbox in ready:
        with contextlib.suppress(codec.InvalidAssignment):
            assignment = codec.decode(sandbox.annotations)
            if assignment is not None and grant.has_same_binding(
                Grant.for_pod(grant.pod_uid, grant.namespace, grant.name, grant.container, assignment)
            ):
                continue
        raise StartRefused(
            f"pod {grant.pod} was bound to this node again with other GPUs, and the kubelet may give its containers "
            "the GPUs of the former binding; delete the pod, so that it is placed again"
        )


def _has_no_visible_card(pod: NodePod, grant: Grant) -> bool:
    """Whether the container has a card but its environment names no card. Pure."""
    visible_uuids = pod.annotations.get(names.DEVICES_OF + pod.keys[grant.container])
    return bool(grant.shares) and visible_uuids == names.NO_CARDS


class PreStart:
    """Handles PreStartContainer.

    sandboxes: returns the sandboxes of a pod. Raises RuntimeUnavailable.
    """

    def __init__(
        self,
        *,
        granting: Granting,
        kubelet: Kubelet,
        pods: Pods,
        access: Callable[[], Access | None],
        sandboxes: Callable[[str], Sequence[Sandbox]],
        clock: Clock = SYSTEM,
    ) -> None:
        self._granting = granting
        self._kubelet = kubelet
        self._pods = pods
        self._access = access
        self._sandboxes = sandboxes
        self._clock = clock

    def __call__(self, slots: Sequence[str], is_active: IsActive) -> Grant:
        """Add the grant of the container that has these slots, and write its CDI spec. Raises StartRefused."""
        started = self._clock.now()
        try:
            container, uid = identify_container(slots, self._kubelet.holders(), self._find_pod_name)
        except KubeletUnavailable as error:
            raise StartRefused(str(error)) from error
        structlog.contextvars.bind_contextvars(
            pod=f"{container.namespace}/{container.pod}", uid=uid
        )  # fields of each log line of this call
        grant, pod = self._granting.desired_grant(container, uid, slots)
        if self._access() is Access.ENV:
            self._check_env_access(grant, pod)
        return self._granting.add(grant, pod, is_active, started)

    def _find_pod_name(self, uid: str) -> str | None:
        pod = self._pods.find_pod(uid)
        return None if pod is None else pod.pod

    def _check_env_access(self, grant: Grant, pod: NodePod | None) -> None:
        """Check that the container can get its grant by its environment, without CDI. Raises StartRefused."""
        if grant.devices:
            raise StartRefused(f"pod {grant.pod}: {NO_CDI_FOR_DEVICES_TEXT}")
        if pod is not None and _has_no_visible_card(pod, grant):
            raise StartRefused(
                f"pod {grant.pod} was bound while this node had CDI, so its environment names no GPU; create it again"
            )
        try:
            sandboxes = self._sandboxes(grant.pod_uid)
        except RuntimeUnavailable as error:
            raise StartRefused(f"pod {grant.pod}: {error}") from error
        check_sandboxes(grant, sandboxes)
