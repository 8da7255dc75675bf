"""Finds the pod and container of a process by its cgroup, and creates a cgroup for daemons that outlive their manager.

Each cgroup version, cgroup driver and runtime writes paths in a different form; tests/mps has examples of all.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cardwise.core.values.invalid import InvalidRequest

PROC = Path("/proc")
HOST_ROOT = Path("/host/sys/fs/cgroup")  # where the chart mounts the node's cgroup file system
_POD_UID_PATTERN = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")
_CONTAINER_ID_PATTERN = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=[./]|$)")
_CPUSET_FILES = ("cpuset.cpus", "cpuset.mems")


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """A pod and container to which a process belongs.

    pod_uid: the pod's UID; "" if the node has no cgroups of pods.
    container: the runtime's container ID; "" if the process is in the pod's own cgroup.
    """

    pod_uid: str
    container: str


def parse_memberships(content: str) -> tuple[CgroupMembership, ...]:
    """Parse /proc/<pid>/cgroup; () if the process is in no container. Pure.

    Lines are `<id>:<controllers>:<path>`. All paths of a process name the same pods, so one path is enough. The first
    path that names a container is used, else the first path that names a pod. The memberships start with the outermost
    pod: a node may itself be a pod, and a pod may create inner cgroups with another pod's name. The process belongs to
    the outermost pod that the API server knows.
    """
    memberships: tuple[CgroupMembership, ...] = ()
    for line in content.splitlines():
        path = line.split(":", 2)[-1]
        pods = list(_POD_UID_PATTERN.finditer(path))
        if not pods:
            memberships = memberships or tuple(
                CgroupMembership("", container[1]) for container in _CONTAINER_ID_PATTERN.finditer(path)
            )
            continue
        ends = [*(pod.start() for pod in pods[1:]), len(path)]
        pod_memberships = tuple(_parse_membership(path, pod, end) for pod, end in zip(pods, ends, strict=False))
        if pod_memberships[-1].container:
            return pod_memberships
        memberships = pod_memberships
    return memberships


def _parse_membership(path: str, pod: re.Match[str], end: int) -> CgroupMembership:
    container = _CONTAINER_ID_PATTERN.search(path, pod.end(), end)
    return CgroupMembership(pod[1].replace("_", "-"), container[1] if container else "")


def read_memberships(pid: int) -> tuple[CgroupMembership, ...]:
    """Read the memberships of a process; () if it is in no container, or has ended."""
    try:
        return parse_memberships((PROC / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return ()


def is_tenant_process(pid: int) -> bool:
    """Whether the process is in another pod or container than this one. The name of such a process may be false."""
    own_groups = {membership.pod_uid or membership.container for membership in read_memberships(os.getpid())}
    return any((membership.pod_uid or membership.container) not in own_groups for membership in read_memberships(pid))


def check_root(root: Path) -> None:
    """Check that the folder is a cgroup file system. Raises InvalidRequest."""
    if not _list_hierarchies(root):
        raise InvalidRequest(
            str(root),
            "it is not a cgroup file system, so daemons would end with the manager's container",
            "mount the node's /sys/fs/cgroup there, with all its sub-mounts; or mount nothing there",
        )


def move_process(pid: int, root: Path, name: str) -> None:
    """Move a process into the cgroup `name` below the mounted `root`, in each hierarchy. Raises OSError.

    The process must leave the manager's cgroup, since the container runtime kills all processes of that cgroup together
    with the manager.
    """
    for hierarchy in _list_hierarchies(root):
        _move_into(hierarchy / name, pid)


def _list_hierarchies(root: Path) -> list[Path]:
    """List the cgroup hierarchies: the root itself (version 2), or the folders in it (version 1). Raises OSError."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return [entry for entry in root.iterdir() if (entry / "cgroup.procs").exists() and not entry.is_symlink()]


def _move_into(folder: Path, pid: int) -> None:
    folder.mkdir(exist_ok=True)
    for name in _CPUSET_FILES:
        # Version 1: a new cpuset group accepts no process before these files are set.
        with contextlib.suppress(OSError):
            if (folder / name).exists() and not (folder / name).read_text().strip():
                (folder / name).write_text((folder.parent / name).read_text())
    (folder / "cgroup.procs").write_text(str(pid))
