"""Grants and pods as values, for tests of decisions that need no node."""

from deviceplugin.grants.grants import Grant, Share
from deviceplugin.sources.pods import PodView, view
from tests import build


def grant(uid: str = "u1", *shares: Share, **changes: object) -> Grant:
    fields = {
        "pod_uid": uid,
        "namespace": "default",
        "name": "a",
        "container": "main",
        "key": "0",
        "slots": ("s001",),
        "shares": shares or (Share(1, "GPU-1", 8138, 0, 16276),),
        "pod_shares": shares or (Share(1, "GPU-1", 8138, 0, 16276),),
    }
    return Grant(**fields | changes)


def pod_view(**changes: object) -> PodView:
    pod = view(build.pod("a", uid="u1", gpu_mem=8138, share=1))
    fields = {name: getattr(pod, name) for name in PodView.__slots__}
    return PodView(**fields | changes)
