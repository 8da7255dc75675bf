"""Limits for the size of objects that the webhook processes.

The API server accepts objects of 3 MiB and waits five seconds for the webhook. A pod of 30,000 containers would occupy
one of the webhook's few threads for longer than that. Real objects are far smaller. So objects above these limits are
refused before they are processed. Objects that are slow to decode are refused even before decoding.

The limits are for what users write. The API server calls the webhook again with the pod that the webhook has rewritten.
Such a pod has an internal resource (`names.SHARE` or a marker) or the gate of claims, and its limits are higher by what
the webhook adds at most. Users who write these themselves gain nothing but these higher limits.
"""

from collections import Counter
from typing import Final

from cardwise.core.api import names, request
from cardwise.core.api.request import Container
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube.pods.nodeconstraints import MAX_AFFINITY_CONDITIONS, count_affinity_conditions
from webhook.templates import containers

MAX_BYTES: Final = 512 * 1024  # maximum number of bytes of an object as JSON; its annotations alone may have 256 KiB
# Maximum number of entries of an object, counted by commas and brackets. msgspec decodes JSON in one call, during which
# no other thread runs; 290,000 keys took a quarter of a second. Real pods have some hundred entries.
MAX_PARTS: Final = 30_000
MAX_CONTAINERS: Final = 128
MAX_RESOURCE_NAMES: Final = 64  # maximum number of different resource names
# Maximum number of annotations of a pod, since Cardwise's annotations are removed one by one.
MAX_ANNOTATIONS: Final = 512
# Maximum number of bytes of keys and values of annotations. The API server refuses every change of a pod with more than
# 256 KiB, but not its Binding: such a pod could be bound, but could not be changed afterwards. The other 128 KiB are
# for Cardwise's annotations.
MAX_ANNOTATION_BYTES: Final = 128 * 1024
# Maximum number of entries in a pod's metadata: the API server takes seconds to change a pod with thousands of entries.
# The chart's annotations policy has the same limit at UPDATE.
MAX_METADATA_ENTRIES: Final = 512
_METADATA_FIELDS: Final = ("labels", "finalizers", "ownerReferences")
MAX_ENTRIES: Final = 512  # entries of a list or map of the pod: schedulingGates, volumes, nodeSelector, …
MAX_CONTAINER_ENTRIES: Final = 2048  # entries of a list in all containers together: env, envFrom, volumeMounts, …
# What the webhook adds to a pod at most.
_ADDED_BYTES: Final = 256 * 1024
_ADDED_PARTS: Final = 10_000
_ADDED_CONTAINERS: Final = 1  # the share agent
_ADDED_RESOURCE_NAMES: Final = 8
_ADDED_ANNOTATION_BYTES: Final = 16 * 1024
_ADDED_ENTRIES: Final = 32  # entries of a list or map of the pod, and of a list of each container
_INTERNAL_RESOURCES: Final = (names.SHARE, names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)
_INTERNAL_KEYS: Final = tuple(f'"{name}"'.encode() for name in (*_INTERNAL_RESOURCES, names.ALLOCATION_GATE))
MAX_SPEC_ENTRIES: Final = 1024  # entries of each field of other objects: a ResourceQuota's hard, a LimitRange's limits


def check_text(text: bytes) -> None:
    """Check the JSON of an object before it is decoded. Raises InvalidRequest."""
    is_rewritten = any(key in text for key in _INTERNAL_KEYS)
    if len(text) > MAX_BYTES + is_rewritten * _ADDED_BYTES:
        problem = f"the object has {len(text) >> 10} KiB, too much to check for GPU requests"
        raise InvalidRequest("metadata", problem, f"reduce it below {MAX_BYTES >> 10} KiB")
    parts = sum(map(text.count, (b",", b"{", b"[")))
    if parts > MAX_PARTS + is_rewritten * _ADDED_PARTS:
        problem = f"the object has too many entries ({parts}) to check for GPU requests"
        raise InvalidRequest(
            "metadata", problem, f"write at most {MAX_PARTS} entries in all its lists and maps together"
        )


def check_template(template: Json, path: str = "", *, update: bool = False) -> None:
    """Check a pod template. `path`: its path in the object, with a dot at the end. Raises InvalidRequest.

    update: the object exists already. Then placement annotations, which the extender has written, do not count.
    """
    pod_containers = list(request.containers(template))
    resources = [container.spec.get("resources") or {} for container in pod_containers]
    resource_names = {
        name for requirements in resources for _, amounts in containers.amount_lists(requirements) for name in amounts
    }
    gates = (template.get("spec") or {}).get("schedulingGates") or ()
    is_rewritten = not resource_names.isdisjoint(_INTERNAL_RESOURCES) or any(
        gate.get("name") == names.ALLOCATION_GATE for gate in gates
    )
    added_entries = is_rewritten * _ADDED_ENTRIES
    annotations = annotations_of(template)
    if update:
        annotations = {key: text for key, text in annotations.items() if not names.is_placement_annotation(key)}
    _refuse_too_many_entries(f"{path}metadata.annotations", len(annotations), MAX_ANNOTATIONS, added_entries)
    written = sum(len(text.encode()) for pair in annotations.items() for text in pair if isinstance(text, str))
    if written > MAX_ANNOTATION_BYTES + is_rewritten * _ADDED_ANNOTATION_BYTES:
        problem = f"the annotations have {written >> 10} KiB, which is too much for a pod that requests GPUs"
        raise InvalidRequest(f"{path}metadata.annotations", problem, f"write at most {MAX_ANNOTATION_BYTES >> 10} KiB")
    if len(pod_containers) > MAX_CONTAINERS + is_rewritten * _ADDED_CONTAINERS:
        problem = f"{len(pod_containers)} containers are too many for a pod that requests GPUs"
        raise InvalidRequest(f"{path}spec.containers", problem, f"write at most {MAX_CONTAINERS}")
    if len(resource_names) > MAX_RESOURCE_NAMES + is_rewritten * _ADDED_RESOURCE_NAMES:
        problem = f"the containers name {len(resource_names)} different resources, which is too many for a pod"
        raise InvalidRequest(
            f"{path}spec.containers", problem, f"name at most {MAX_RESOURCE_NAMES} in limits and requests"
        )
    if not update:  # an object that was created before this limit must stay changeable
        _check_lists(template, pod_containers, path, added_entries)


def check_object(manifest: Json) -> None:
    """Check the size of an object without containers. Raises InvalidRequest."""
    for field, content in (manifest.get("spec") or {}).items():
        if isinstance(content, list | dict) and len(content) > MAX_SPEC_ENTRIES:
            problem = f"{len(content)} entries are too many"
            raise InvalidRequest(f"spec.{field}", problem, f"write at most {MAX_SPEC_ENTRIES}")


def _check_lists(template: Json, pod_containers: list[Container], path: str, added: int) -> None:
    """Check the lists of all fields: a newer Kubernetes may have more of them.

    added: entries that the webhook may have added to each list of the pod and of each container.
    """
    for field in _METADATA_FIELDS:
        entries = (template.get("metadata") or {}).get(field) or ()
        _refuse_too_many_entries(f"{path}metadata.{field}", len(entries), MAX_METADATA_ENTRIES, added)
    for field, content in (template.get("spec") or {}).items():
        if isinstance(content, list | dict):
            _refuse_too_many_entries(f"{path}spec.{field}", len(content), MAX_ENTRIES, added)
    conditions = count_affinity_conditions(template.get("spec") or {})
    if conditions > MAX_AFFINITY_CONDITIONS + added:
        problem = f"{conditions} conditions are too many for a pod that requests GPUs"
        remedy = f"write at most {MAX_AFFINITY_CONDITIONS}, each with as many values as it needs"
        raise InvalidRequest(f"{path}spec.affinity.nodeAffinity", problem, remedy)
    total_by_field: Counter[str] = Counter()
    for container in pod_containers:
        for field, content in container.spec.items():
            if not isinstance(content, list):
                continue
            total_by_field[field] += len(content)
            if total_by_field[field] > MAX_CONTAINER_ENTRIES + added * len(pod_containers):
                problem = (
                    f"more than {MAX_CONTAINER_ENTRIES} in all containers are too many for a pod that requests GPUs"
                )
                remedy = f"write at most {MAX_CONTAINER_ENTRIES} in all"
                if field == "env":
                    remedy += ", and take the others from a ConfigMap by envFrom"
                raise InvalidRequest(f"{path}{container.path}.{field}", problem, remedy)


def _refuse_too_many_entries(field: str, count: int, maximum: int, added: int) -> None:
    if count > maximum + added:
        raise InvalidRequest(field, f"{count} are too many for a pod that requests GPUs", f"write at most {maximum}")
