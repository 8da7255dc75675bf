"""Finds the pod of a process: by the pod UID in the cgroup, else by the container's ID.

A kubelet with `cgroupsPerQOS: false` creates no cgroups for pods. Then the cgroup names only the container, and the pod
of the container is known from the API server.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mps.host.cgroups import CgroupMembership
from mps.host.pods import PodView


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The pod of a process. `container` is the runtime's container ID; "" if the cgroup names no container."""

    pod: PodView
    container: str


class ProcessOwners:
    """Finds the pods of a node's processes. Pure."""

    def __init__(self, pods: Iterable[PodView]) -> None:
        pods = list(pods)
        # The annotation of a mirror pod names the UID of its static pod. Any user can write it with any UID, so it
        # never overrides the pod that really has this UID.
        pods_by_cgroup_uid = {pod.cgroup_uid: pod for pod in pods}
        self._by_uid = pods_by_cgroup_uid | {pod.uid: pod for pod in pods if pod.uid == pod.cgroup_uid}
        self._by_container = {
            container.runtime_id: pod for pod in pods for container in pod.containers if container.runtime_id
        }

    def find_owner(self, memberships: Sequence[CgroupMembership]) -> ProcessOwner | None:
        """Find the outermost known pod. Tenants may create inner cgroups with another pod's name, so these are not
        trusted.
        """
        for membership in memberships:
            pod = self._by_uid.get(membership.pod_uid) if membership.pod_uid else None
            pod = pod or self._by_container.get(membership.container)
            if pod is not None:
                return ProcessOwner(pod, membership.container)
        return None
