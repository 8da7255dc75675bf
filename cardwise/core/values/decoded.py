"""Objects of the API as decoded JSON, for code that does not decode them into structs."""

from typing import Any

Json = dict[str, Any]


def annotations_of(manifest: Json) -> Json:
    """The object's annotations; empty if it has none."""
    annotations: Json = (manifest.get("metadata") or {}).get("annotations") or {}
    return annotations


def labels_of(manifest: Json) -> Json:
    """The object's labels; empty if it has none."""
    labels: Json = (manifest.get("metadata") or {}).get("labels") or {}
    return labels


def statuses_of(pod: Json) -> list[Json]:
    """The statuses of the pod's containers, including init containers."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def with_annotations(manifest: Json, annotations: Json) -> Json:
    """The object with these annotations and no others."""
    return manifest | {"metadata": (manifest.get("metadata") or {}) | {"annotations": annotations}}
