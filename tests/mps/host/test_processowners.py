"""Whose a process is, of the pods that the node has."""

import pytest

from mps.host.cgroups import CgroupMembership
from mps.host.pods import ContainerView, PodView
from mps.host.processowners import ProcessOwners
from tests.mps.records import pod


def pod_of(uid: str, runtime_id: str = "", **changes: str) -> PodView:
    return pod(uid, containers=(ContainerView("0", "main", runtime_id),), **changes)


OWNERS = ProcessOwners([pod_of("ours", "c1"), pod_of("victim", "c2"), pod_of("mirror", cgroup_uid="static")])


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
    actual_owner = OWNERS.find_owner(memberships)
    assert (actual_owner.pod.uid if actual_owner else None) == owner
    if actual_owner and memberships[0].pod_uid == owner:
        assert actual_owner.container == memberships[0].container


@pytest.mark.parametrize("claims_first", [True, False])
def test_a_pod_that_calls_itself_the_mirror_of_another_owns_none_of_its_processes(claims_first):
    pods = [pod_of("forged", cgroup_uid="ours"), pod_of("ours")]
    owner = ProcessOwners(pods if claims_first else pods[::-1]).find_owner([CgroupMembership("ours", "x")])
    assert owner.pod.uid == "ours"
