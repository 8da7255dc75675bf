"""PID to pod, as each kind of node writes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cardwise.core.values.invalid import InvalidRequest
from mps.host import cgroups
from mps.host.cgroups import CgroupMembership

UID = "0b7a1c52-3f0e-4c53-9a6e-5a2f1d9f8f11"
UNDER = UID.replace("-", "_")
STATIC = "5ad0cb1d2a2e6f2f6c1f0d2c3b4a5968"
CID = "4f1c" * 16
OUTER = "ab12" * 16

BURSTABLE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice"
BEST_EFFORT = f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDER}.slice"
GUARANTEED = f"kubepods.slice/kubepods-pod{UNDER}.slice"
PLAIN = f"kubepods/burstable/pod{UID}"

FIXTURES = {
    "v2, systemd, containerd": f"0::/{BURSTABLE}/cri-containerd-{CID}.scope\n",
    "v2, systemd, containerd, guaranteed": f"0::/{GUARANTEED}/cri-containerd-{CID}.scope\n",
    "v2, systemd, CRI-O": f"0::/{BEST_EFFORT}/crio-{CID}.scope\n",
    "v2, systemd, CRI-O, with a group inside": f"0::/{GUARANTEED}/crio-{CID}.scope/container\n",
    "v2, cgroupfs, containerd": f"0::/{PLAIN}/{CID}\n",
    "v2, cgroupfs, CRI-O": f"0::/kubepods/besteffort/pod{UID}/crio-{CID}\n",
    "v2, seen from another cgroup namespace": f"0::/../../kubepods-pod{UNDER}.slice/cri-containerd-{CID}.scope\n",
    "v1, cgroupfs, containerd": f"3:pids:/{PLAIN}/{CID}\n2:cpu,cpuacct:/{PLAIN}/{CID}\n1:memory:/{PLAIN}/{CID}\n",
    "v1, systemd, containerd": (
        f"11:memory:/{BURSTABLE}/cri-containerd-{CID}.scope\n1:name=systemd:/{BURSTABLE}/cri-containerd-{CID}.scope\n"
    ),
    "v1, systemd, CRI-O": f"8:devices:/{GUARANTEED}/crio-{CID}.scope\n0::/\n",
    "v1, systemd cgroups under a cgroupfs kubelet": (
        f"9:cpu:/system.slice/containerd.service/kubepods-burstable-pod{UNDER}.slice:cri-containerd:{CID}\n"
    ),
    "v1, Docker": f"4:memory:/kubepods/besteffort/pod{UID}/{CID}\n0::/system.slice/docker.service\n",
    "v2, Docker by systemd": f"0::/{GUARANTEED}/docker-{CID}.scope\n",
    "a cluster in a container (kind)": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDER}.slice/cri-containerd-{CID}.scope\n"
    ),
    "a cluster in a pod": f"0::/kubepods/pod11111111-2222-3333-4444-555555555555/{OUTER}/{PLAIN}/{CID}\n",
    "groups of its own in the container": f"0::/{PLAIN}/{CID}/init.scope\n",
}


@pytest.mark.parametrize("kind", FIXTURES)
def test_pod_and_container_are_found(kind):
    assert cgroups.parse_memberships(FIXTURES[kind])[-1] == CgroupMembership(UID, CID)


def test_a_static_pod_has_a_uid_without_dashes():
    path = (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{CID}.scope"
    )
    assert cgroups.parse_memberships(path) == (CgroupMembership(STATIC, CID),)


def test_a_process_in_the_pods_own_group():
    assert cgroups.parse_memberships(f"0::/kubepods/burstable/pod{UID}\n") == (CgroupMembership(UID, ""),)


def test_of_a_pod_in_a_pod_both_are_told_the_outermost_first():
    outer = "11111111-2222-3333-4444-555555555555"
    path = f"0::/kubepods/pod{outer}/{OUTER}/{PLAIN}/{CID}\n"
    assert cgroups.parse_memberships(path) == (CgroupMembership(outer, OUTER), CgroupMembership(UID, CID))
    assert cgroups.parse_memberships(f"0::/kubepods/pod{outer}/{PLAIN}/{CID}\n")[0] == CgroupMembership(outer, ""), (
        "not the inner one's"
    )


@pytest.mark.parametrize(
    "content",
    [
        f"0::/k8s.io/{CID}\n",
        f"8:pids:/k8s.io/{CID}\n1:cpu:/\n0::/\n",
        f"0::/system.slice/cri-containerd-{CID}.scope\n",
        f"0::/docker/{CID}\n",
    ],
)
def test_a_node_without_cgroups_of_pods_names_the_container(content):
    assert cgroups.parse_memberships(content) == (CgroupMembership("", CID),)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "0::/\n",
        "0::/system.slice/sshd.service\n",
        "0::/user.slice/user-1000.slice/pod-of-mine/x\n",
        "0::/podman/pod1234\n",
    ],
)
def test_what_is_no_pod(content):
    assert cgroups.parse_memberships(content) == ()


def test_a_process_that_has_ended_is_of_no_pod():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert cgroups.read_memberships(ended.pid) == ()


def test_a_tenants_is_what_is_in_another_pod_or_container_than_we_are(monkeypatch):
    of_container, other = CgroupMembership("", "a" * 64), CgroupMembership("", "b" * 64)
    pod, beside, below = CgroupMembership("u1", "x"), CgroupMembership("u1", "y"), CgroupMembership("u2", "z")
    memberships = {}
    monkeypatch.setattr(cgroups, "read_memberships", lambda pid: memberships[pid])
    for own, its, tenants in [
        ((), (), False),
        ((), (pod,), True),
        ((), (other,), True),
        ((pod,), (), False),  # a group of its own, or of the node
        ((pod,), (pod,), False),
        ((pod,), (beside,), False),  # the manager's container has been restarted
        ((pod,), (below,), True),
        ((pod,), (pod, below), True),  # the node is a pod, as in tests
        ((of_container,), (of_container,), False),
        ((of_container,), (other,), True),
    ]:
        memberships.update({os.getpid(): own, 1: its})
        assert cgroups.is_tenant_process(1) is tenants, (own, its)


def fake_hierarchy(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        (folder / name).write_text("0-3\n" if name.startswith("cpuset") else "")
    return folder


def test_a_daemon_is_put_into_a_group_of_its_own_in_version_2(tmp_path):
    root = fake_hierarchy(tmp_path / "cgroup", "cgroup.controllers", "cgroup.procs")
    cgroups.move_process(4711, root, "cardwise-mps")
    assert (root / "cardwise-mps" / "cgroup.procs").read_text() == "4711"


def test_a_folder_without_any_hierarchy_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(InvalidRequest, match=r"is not a cgroup file system.*mount the node's /sys/fs/cgroup there"):
        cgroups.check_root(tmp_path)
    fake_hierarchy(tmp_path / "memory", "cgroup.procs")
    cgroups.check_root(tmp_path)
    cgroups.check_root(fake_hierarchy(tmp_path / "unified", "cgroup.controllers"))


def test_and_in_each_hierarchy_of_version_1(tmp_path):
    root = tmp_path / "cgroup"
    root.mkdir()
    for name in ("memory", "devices"):
        fake_hierarchy(root / name, "cgroup.procs")
    (root / "mem").symlink_to(root / "memory")
    cgroups.move_process(4711, root, "cardwise-mps")
    cgroups.move_process(4712, root, "cardwise-mps")
    for name in ("memory", "devices"):
        assert (root / name / "cardwise-mps" / "cgroup.procs").read_text() == "4712"
