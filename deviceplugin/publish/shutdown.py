"""Drains the device plugin before it shuts down, as in a rolling update: waits until all bound pods are admitted.

The kubelet allocates a pod's slots when it admits the pod. A pod that is admitted while no plugin runs fails
permanently (UnexpectedAdmissionError), and only a controller recreates it. So the plugin first withdraws the node's
slots, and then serves until the pods that are already bound to the node have been admitted. If the start of a container
fails meanwhile, the kubelet retries it.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment
from deviceplugin.sources.kubelet import Kubelet, KubeletUnavailable
from deviceplugin.sources.pods import NodePod

_log = structlog.get_logger(__name__)

# How long the node offers no slots: in this time the extender observes the change, and bound pods reach the kubelet.
MIN_SECONDS = 2.0
# Maximum time of the drain, shorter than the plugin's own grace period. A pod that is not admitted by then has another
# problem.
_MAX_SECONDS = 10.0
_POLL_SECONDS = 0.25
_REPEAT_SECONDS = 1.0  # pause before the slots are withdrawn again if the node does not show the change


def list_unadmitted_pods(pods: Iterable[NodePod], kubelet: Kubelet) -> list[str]:
    """List the names of pods that are bound here and still lack slots; [] if the kubelet's checkpoint is unreadable.

    Leaves out pods with a ResourceClaim, which the kubelet admits without this plugin.
    """
    try:
        slots_by_uid = Counter(holder.pod_uid for holders in kubelet.checkpoint().values() for holder in holders)
    except KubeletUnavailable:
        return []
    pending = (pod for pod in pods if pod.phase == "Pending" and not pod.claim)
    return [pod.pod for pod in pending if slots_by_uid[pod.uid] < _count_requested_slots(pod)]


def _count_requested_slots(pod: NodePod) -> int:
    """The number of slots that the pod needs: one for each container with a card or device."""
    try:
        decoded_assignment = assignment.decode(pod.annotations)
    except assignment.InvalidAssignment:
        return 0
    return (
        len(decoded_assignment.containers.keys() | decoded_assignment.devices.keys())
        if decoded_assignment is not None
        else 0
    )


def wait_drained(
    withdraw_slots: Callable[[], None],
    are_slots_offered: Callable[[], bool],
    pending_pods: Callable[[], list[str]],
    clock: Clock = SYSTEM,
) -> None:
    """Wait until the plugin may stop.

    withdraw_slots: sets the node's allocatable slots to 0.
    are_slots_offered: returns whether the observed node offers slots; a report of the kubelet restores them.
    pending_pods: returns the names of the pods that still need slots.
    """
    started = withdrawn_since = clock.now()
    is_offered, last_withdrawn = True, float("-inf")
    while (now := clock.now()) - started < _MAX_SECONDS:
        was_offered, is_offered = is_offered, are_slots_offered()
        is_offered_again = is_offered and not was_offered
        if is_offered_again:
            withdrawn_since = now
        if is_offered_again or now - last_withdrawn >= _REPEAT_SECONDS:
            withdraw_slots()
            last_withdrawn = now
        if now - withdrawn_since >= MIN_SECONDS and not pending_pods():
            return
        clock.sleep(_POLL_SECONDS)
    unadmitted = pending_pods()
    if unadmitted:
        _log.warning("stopping before these pods were admitted; they may fail", pods=unadmitted)
