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
        self._by_uid: dict[str, PodView] = {}
        self._by_container: dict[str, PodView] = {}
        for pod in pods:
            self._by_uid[pod.cgroup_uid] = pod
            self._by_container |= {one.runtime_id: pod for one in pod.containers if one.runtime_id}

    def of(self, memberships: Sequence[CgroupMembership]) -> Owner | None:
        """The outermost pod that the cluster knows: a tenant may name groups within his own like another's."""
        for membership in memberships:
            pod = self._by_uid.get(membership.pod_uid) if membership.pod_uid else None
            pod = pod or self._by_container.get(membership.container)
            if pod is not None:
                return Owner(pod, membership.container)
        return None
