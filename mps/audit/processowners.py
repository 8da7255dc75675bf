"""Finds the pod of a process: by the UID in its cgroup, else by its container's ID.

Not every node has cgroups for pods (`cgroupsPerQOS: false`): there the cgroup names only the container, whose pod is
known from the API server.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mps.host.cgroups import CgroupMembership
from mps.host.pods import PodView


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The pod of a process. `container` is the runtime's ID, "" if the cgroup names none."""

    pod: PodView
    container: str


class ProcessOwners:
    """Finds the pods of a node's processes. Pure."""

    def __init__(self, pods: Iterable[PodView]) -> None:
        pods = list(pods)
        # Any user can write a mirror pod's annotation, with any UID: it never overrides the pod that has this UID. A
        # static pod, whose mirror names its UID, has one that no other pod has.
        pods_by_cgroup_uid = {pod.cgroup_uid: pod for pod in pods}
        self._by_uid = pods_by_cgroup_uid | {pod.uid: pod for pod in pods if pod.uid == pod.cgroup_uid}
        self._by_container = {
            container.runtime_id: pod for pod in pods for container in pod.containers if container.runtime_id
        }

    def find_owner(self, memberships: Sequence[CgroupMembership]) -> ProcessOwner | None:
        """The outermost pod that the cluster knows: tenants may name cgroups within their own like another pod's."""
        for membership in memberships:
            pod = self._by_uid.get(membership.pod_uid) if membership.pod_uid else None
            pod = pod or self._by_container.get(membership.container)
            if pod is not None:
                return ProcessOwner(pod, membership.container)
        return None
