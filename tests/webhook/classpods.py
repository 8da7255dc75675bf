"""Pods that request a class, and names of classes."""

from cardwise.core.values.decoded import Json
from tests import build

K80, P100 = "nvidia.tesla.k80", "nvidia.tesla.p100"


def pod(limits: Json, *others: Json, annotations: dict[str, str] | None = None) -> Json:
    """A pod as the API server sends it: missing requests are set to the limits."""
    containers = [
        {"name": f"c{i}", "resources": {"limits": dict(listed), "requests": dict(listed)} if listed else {}}
        for i, listed in enumerate((limits, *others))
    ]
    return build.pod(containers=containers, annotations=annotations)
