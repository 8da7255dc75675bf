"""Whose a process is, of the pods that the node has."""

import pytest

from mps.audit.owners import Owners
from mps.host.cgroups import CgroupMembership
from mps.host.pods import ContainerView, PodView


def pod(uid: str, cgroup_uid: str = "", runtime_id: str = "") -> PodView:
    containers = (ContainerView("0", "main", runtime_id),)
    return PodView(
        uid=uid,
        namespace="d",
        name=uid,
        finished=False,
        off=False,
        holdings=(),
        cgroup_uid=cgroup_uid or uid,
        containers=containers,
    )


OWNERS = Owners([pod("ours", runtime_id="c1"), pod("victim", runtime_id="c2"), pod("mirror", cgroup_uid="static")])


@pytest.mark.parametrize(
    ("memberships", "owner"),
    [
        ((), None),
        ((CgroupMembership("ours", "any"),), "ours"),
        ((CgroupMembership("ours", ""),), "ours"),
        ((CgroupMembership("static", "x"),), "mirror"),
        ((CgroupMembership("mirror", "x"),), None),
        ((CgroupMembership("ours", "c1"), CgroupMembership("inner", "x")), "ours"),
        ((CgroupMembership("host", "x"), CgroupMembership("ours", "c1")), "ours"),
        ((CgroupMembership("ours", "c1"), CgroupMembership("victim", "c2")), "ours"),
        ((CgroupMembership("", "c1"),), "ours"),
        ((CgroupMembership("", "kind"), CgroupMembership("", "c2")), "victim"),
        ((CgroupMembership("", "unknown"),), None),
        ((CgroupMembership("gone", "x"),), None),
    ],
)
def test_the_outermost_pod_that_is_known_owns_the_process(memberships, owner):
    found = OWNERS.of(memberships)
    assert (found.pod.uid if found else None) == owner
    if found and memberships[0].pod_uid == owner:
        assert found.container == memberships[0].container
