"""Objects of the API as decoded JSON, for code that needs no record of its own."""

from typing import Any

Json = dict[str, Any]


def annotations_of(manifest: Json) -> Json:
    """The annotations; empty without any."""
    annotations: Json = (manifest.get("metadata") or {}).get("annotations") or {}
    return annotations


def labels_of(manifest: Json) -> Json:
    """The labels; empty without any."""
    labels: Json = (manifest.get("metadata") or {}).get("labels") or {}
    return labels


def statuses_of(pod: Json) -> list[Json]:
    """The statuses of the pod's containers, including init containers."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def with_annotations(manifest: Json, annotations: Json) -> Json:
    """The object with these annotations and no others."""
    return manifest | {"metadata": (manifest.get("metadata") or {}) | {"annotations": annotations}}
