"""Whose a process is, of the pods that the node has."""

import pytest

from mps.audit.owners import Owners
from mps.host.cgroups import Membership
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
        ((Membership("ours", "any"),), "ours"),
        ((Membership("ours", ""),), "ours"),
        ((Membership("static", "x"),), "mirror"),
        ((Membership("mirror", "x"),), None),
        ((Membership("ours", "c1"), Membership("inner", "x")), "ours"),
        ((Membership("host", "x"), Membership("ours", "c1")), "ours"),
        ((Membership("ours", "c1"), Membership("victim", "c2")), "ours"),
        ((Membership("", "c1"),), "ours"),
        ((Membership("", "kind"), Membership("", "c2")), "victim"),
        ((Membership("", "unknown"),), None),
        ((Membership("gone", "x"),), None),
    ],
)
def test_the_outermost_pod_that_is_known_owns_the_process(memberships, owner):
    found = OWNERS.of(memberships)
    assert (found.pod.uid if found else None) == owner
    if found and memberships[0].pod_uid == owner:
        assert found.container == memberships[0].container
