"""Finds the pod and container of a process by its cgroup; and makes a cgroup for daemons that outlive their manager.

Reading is pure, since every cgroup version, driver and runtime writes it another way (fixtures in tests/mps).
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cardwise.core.values.invalid import InvalidRequest

PROC = Path("/proc")
_UID = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=[./]|$)")
_CPUSET_FILES = ("cpuset.cpus", "cpuset.mems")


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """`container` is the runtime's ID of it, "" where the process is in the pod's own cgroup. `pod_uid` is "" where the
    node has no cgroups of pods.
    """

    pod_uid: str
    container: str


def parse(content: str) -> tuple[CgroupMembership, ...]:
    """From /proc/<pid>/cgroup; empty for a process of no container. Pure.

    Lines are `<id>:<controllers>:<path>`. All paths of a process name the same pods: the first to name a container
    counts, else the first to name a pod. The outermost pod comes first: a node may itself be a pod, and a pod may hold
    groups that are named like another's. Of these the outermost that the cluster knows is the process's.
    """
    found: tuple[CgroupMembership, ...] = ()
    for line in content.splitlines():
        path = line.split(":", 2)[-1]
        pods = list(_UID.finditer(path))
        if not pods:
            found = found or tuple(CgroupMembership("", container[1]) for container in _CONTAINER.finditer(path))
            continue
        ends = [*(pod.start() for pod in pods[1:]), len(path)]
        here = tuple(_membership(path, pod, end) for pod, end in zip(pods, ends, strict=False))
        if here[-1].container:
            return here
        found = here
    return found


def _membership(path: str, pod: re.Match[str], end: int) -> CgroupMembership:
    container = _CONTAINER.search(path, pod.end(), end)
    return CgroupMembership(pod[1].replace("_", "-"), container[1] if container else "")


def of(pid: int) -> tuple[CgroupMembership, ...]:
    """Empty also when the process has ended."""
    try:
        return parse((PROC / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return ()


def is_tenants(pid: int) -> bool:
    """Whether it is in a pod or container that we are not in: such a process may call itself what it likes."""
    ours = {membership.pod_uid or membership.container for membership in of(os.getpid())}
    return any((membership.pod_uid or membership.container) not in ours for membership in of(pid))


def check_root(root: Path) -> None:
    """Raises InvalidRequest for a folder of which nobody could be moved into a group."""
    if not _hierarchies(root):
        raise InvalidRequest(
            "--daemon-cgroup",
            f"{root} is no cgroup file system, so daemons would end with the manager's container",
            "mount the node's /sys/fs/cgroup there, with all that is below it, or leave the option out",
        )


def move(pid: int, root: Path, name: str) -> None:
    """Puts a process into the cgroup `name` below the mounted `root`, of each hierarchy there is. Raises OSError.

    Out of the manager's own, whose processes the runtime kills with it.
    """
    for hierarchy in _hierarchies(root):
        _enter(hierarchy / name, pid)


def _hierarchies(root: Path) -> list[Path]:
    """The hierarchies: of version 2 the root itself, of version 1 the folders in it. Raises OSError."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return [entry for entry in root.iterdir() if (entry / "cgroup.procs").exists() and not entry.is_symlink()]


def _enter(folder: Path, pid: int) -> None:
    folder.mkdir(exist_ok=True)
    for name in _CPUSET_FILES:
        # Of version 1: a new group of cpuset takes nobody before it has these.
        with contextlib.suppress(OSError):
            if (folder / name).exists() and not (folder / name).read_text().strip():
                (folder / name).write_text((folder.parent / name).read_text())
    (folder / "cgroup.procs").write_text(str(pid))
