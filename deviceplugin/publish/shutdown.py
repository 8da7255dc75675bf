"""Shutdown of the device plugin, as in a rolling update: it ends when no pod is on its way to this node.

The kubelet asks for a pod's slots when it admits the pod. A pod that is admitted while no plugin runs fails for good
(UnexpectedAdmissionError), and only a controller makes another. So the node offers no slots first, and the agent serves
on until the pods that are bound here have been admitted. A container start that finds no plugin is tried again.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment
from deviceplugin.sources.kubelet import Kubelet, KubeletSilent
from deviceplugin.sources.pods import NodePod

_log = structlog.get_logger(__name__)

LEAST = 2.0  # seconds without slots: until the extender has heard of it, and what is bound has come to the kubelet
_MOST = 10.0  # the pod of a DaemonSet has more; who is not admitted by then waits for something else
_PAUSE = 0.25
_AGAIN = 1.0  # seconds after which the slots are withdrawn again, where nobody says how the node is now


def not_admitted(pods: Iterable[NodePod], kubelet: Kubelet) -> list[str]:
    """The pods bound here that the kubelet has given no slots yet; nobody where it does not say. By name."""
    try:
        slots = Counter(holder.pod_uid for holders in kubelet.checkpoint().values() for holder in holders)
    except KubeletSilent:
        return []
    return [pod.pod for pod in pods if pod.phase == "Pending" and slots[pod.uid] < _asked(pod)]


def _asked(pod: NodePod) -> int:
    """How many slots: one for each container that was given something."""
    try:
        assigned = assignment.decode(pod.annotations)
    except assignment.InvalidAssignment:
        return 0
    return len(assigned.containers.keys() | assigned.devices.keys()) if assigned is not None else 0


def leave(
    withdraw: Callable[[], None],
    offered: Callable[[], bool],
    coming: Callable[[], list[str]],
    clock: Clock = SYSTEM,
) -> None:
    """Returns when the agent may end. `withdraw`: the node offers no slots; `offered`: whether it does, as far as is
    known, since the kubelet's own report brings them back; `coming`: who may still ask for one.
    """
    began = without = clock.now()
    offers, withdrawn = True, float("-inf")
    while (now := clock.now()) - began < _MOST:
        before, offers = offers, offered()
        back = offers and not before
        if back:
            without = now
        if back or now - withdrawn >= _AGAIN:
            withdraw()
            withdrawn = now
        if now - without >= LEAST and not coming():
            return
        clock.sleep(_PAUSE)
    left = coming()
    if left:
        _log.warning("ends before these pods were admitted; they may fail", pods=left)
