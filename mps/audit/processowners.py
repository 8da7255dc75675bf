"""Finds the pod of a process: by the UID in its cgroup, else by its container's ID.

Not every node has cgroups for pods (`cgroupsPerQOS: false`): there only the container is named, and the API server says
whose it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mps.host.cgroups import CgroupMembership
from mps.host.pods import PodView


@dataclass(frozen=True, slots=True)
class Owner:
    """`container` is the runtime's ID, "" where the cgroup names none."""

    pod: PodView
    container: str


class Owners:
    """The pods of a node's processes. Pure."""

    def __init__(self, pods: Iterable[PodView]) -> None:
        pods = list(pods)
        # Any user can write the mark of a mirror, with any UID: it never counts against the pod that has this UID. A
        # static pod, whose mirror says its UID, has one that is no other pod's.
        claimed = {pod.cgroup_uid: pod for pod in pods}
        self._by_uid = claimed | {pod.uid: pod for pod in pods if pod.uid == pod.cgroup_uid}
        self._by_container = {one.runtime_id: pod for pod in pods for one in pod.containers if one.runtime_id}

    def of(self, memberships: Sequence[CgroupMembership]) -> Owner | None:
        """The outermost pod that the cluster knows: a tenant may name groups within his own like another's."""
        for membership in memberships:
            pod = self._by_uid.get(membership.pod_uid) if membership.pod_uid else None
            pod = pod or self._by_container.get(membership.container)
            if pod is not None:
                return Owner(pod, membership.container)
        return None
