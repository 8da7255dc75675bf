"""Pods of a node as values, for tests of decisions that need no node."""

from mps.host.pods import ContainerShare, PodView


def pod(uid: str = "u", *holdings: ContainerShare, **changes: object) -> PodView:
    fields = {"uid": uid, "namespace": "d", "name": uid, "finished": False, "off": False, "cgroup_uid": uid}
    return PodView(**fields | {"holdings": holdings} | changes)
