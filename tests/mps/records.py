"""Pods of a node as values, for tests of decisions that need no node."""

from cardwise.core.api.assignment import Assignment, CardShare
from mps.host.pods import PodView


def pod(uid: str = "u", containers_hold: dict[str, tuple[CardShare, ...]] | None = None, **changes: object) -> PodView:
    fields = {"uid": uid, "namespace": "d", "name": uid, "finished": False, "without_mps": False, "cgroup_uid": uid}
    return PodView(**fields | {"assignment": Assignment(containers_hold or {})} | changes)


def share(card: int, mem: int, uuid: str | None = None) -> CardShare:
    return CardShare(card, f"GPU-{card}" if uuid is None else uuid, mem, 0, 16276)
