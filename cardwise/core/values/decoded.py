"""Objects of the API as decoded JSON, where nobody needs a record of their own for them."""

from typing import Any

Json = dict[str, Any]


def annotations_of(obj: Json) -> Json:
    """Empty where it has none."""
    found: Json = (obj.get("metadata") or {}).get("annotations") or {}
    return found


def labels_of(obj: Json) -> Json:
    """Empty where it has none."""
    found: Json = (obj.get("metadata") or {}).get("labels") or {}
    return found


def statuses_of(pod: Json) -> list[Json]:
    """What the kubelet says of the pod's containers, those that run before the others included."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def annotated(obj: Json, annotations: Json) -> Json:
    """The object with these annotations and no others."""
    return obj | {"metadata": (obj.get("metadata") or {}) | {"annotations": annotations}}
