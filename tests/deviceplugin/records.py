"""Grants and pods as values, for tests of decisions that need no node."""

from cardwise.core.api.assignment import CardShare
from cardwise.core.values.decoded import Json
from cardwise.kube.objects import pods
from deviceplugin.grants.grants import Grant
from deviceplugin.sources.pods import NodePod, project_pod
from tests import build


def parse_pod(manifest: Json) -> NodePod:
    return project_pod(pods.record_of(manifest))


def grant(uid: str = "u1", *shares: CardShare, **changes: object) -> Grant:
    shares = shares or (CardShare(1, "GPU-1", 8138, 0, 16276),)
    fields = {
        "pod_uid": uid,
        "namespace": "default",
        "name": "a",
        "container": "main",
        "slots": ("s001",),
        "shares": shares,
        "pod_shares": shares,
    }
    fields |= changes
    return Grant(**{"pod_keys": ("0",) * len(fields["pod_shares"])} | fields)


def pod_view(**changes: object) -> NodePod:
    pod = parse_pod(build.pod("a", uid="u1", gpu_mem=8138, share=1))
    fields = {name: getattr(pod, name) for name in NodePod.__slots__}
    return NodePod(**fields | changes)
