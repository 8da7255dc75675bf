"""Records of the pods that the watch shows."""

import json

from extender.records import podinfo
from tests import build


def test_a_mirror_pod_without_cards_cannot_be_evicted():
    mirror = build.pod("a", uid="u", annotations={"kubernetes.io/config.mirror": "hash"})
    mirror["spec"]["nodeName"] = "n1"
    _, record = podinfo.decode_pod(json.dumps(mirror).encode())
    assert record.fixed
    del mirror["metadata"]["annotations"]
    _, record = podinfo.decode_pod(json.dumps(mirror).encode())
    assert not record.fixed
