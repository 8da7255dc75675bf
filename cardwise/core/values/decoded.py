"""Objects of the API as decoded JSON, for code that does not decode them into structs."""

from typing import Any

import msgspec

Json = dict[str, Any]


def prepare_types(*types: type) -> None:
    """Build what msgspec needs of these types for `msgspec.convert`. Call it while the module is imported.

    msgspec builds it at the first use, and two threads that do so at the same time may crash the process. A `Decoder`
    that is made when its module is imported needs no preparation.
    """
    for decoded_type in types:
        msgspec.json.Decoder(decoded_type)


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
