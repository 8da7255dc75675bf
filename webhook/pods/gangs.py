"""Admission of pods of gangs: the gate and the label of each member, and errors for groups that can never be complete.

A gang is read from the pod itself, so that a member is gated before the scheduler sees it. Pods of schedulers that do
not call the extender belong to no gang of Cardwise, because other projects (Volcano, coscheduling) use the same
annotations.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from cardwise.core.api import names
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import ForeignPodGroup, Membership
from cardwise.core.values import objectnames
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods import mutate
from webhook.pods.order import changed_later_error
from webhook.templates import templates

Warnings = tuple[str, ...]

DEFAULT_SCHEDULER: Final = mutate.DEFAULT_SCHEDULER
_ORDERED: Final = "OrderedReady"
_LABEL: Final = f"metadata.labels[{names.GANG}]"
_GATE: Final = f"spec.schedulingGates[{names.GANG}]"
_NATIVE: Final = "spec.schedulingGroup"
_SHORT: Final = re.compile(r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?")  # of Kubernetes' names those that a label can say
_GROUP_KEYS: Final = (names.GROUP_NAME, names.GROUP_NUM)
_NOT_SERVED: Final = (
    f"{_NATIVE}: the pod is not a member of a Cardwise gang, because this cluster does not serve PodGroups of "
    f"{ForeignPodGroup.KUBERNETES}/v1beta1 (Kubernetes 1.37, feature gate GenericWorkload)"
)
# How many pods a workload makes at a time, where Kubernetes' default is one.
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "deployments": ("spec", "replicas"),
    "replicasets": ("spec", "replicas"),
    "replicationcontrollers": ("spec", "replicas"),
    "statefulsets": ("spec", "replicas"),
    "jobs": ("spec", "parallelism"),
    "cronjobs": ("spec", "jobTemplate", "spec", "parallelism"),
}


def gang_of(pod: Json, schedulers: Collection[str]) -> Membership | None:
    """The gang that a pod or a template names by annotation or label, whatever it requests. Raises InvalidRequest.

    schedulers: the schedulers that call the extender.
    """
    gang = _read_membership(pod, schedulers)
    return gang if gang is not None and gang.foreign is not ForeignPodGroup.KUBERNETES else None


def native_gang_of(
    pod: Json, schedulers: Collection[str], served: Callable[[], bool]
) -> tuple[Membership | None, Warnings]:
    """The gang of a pod with a request that names a PodGroup of Kubernetes; with warnings.

    served: returns whether the API server serves PodGroups.

    Raises InvalidRequest, KubeError.
    """
    gang = _read_membership(pod, schedulers)
    if gang is None or gang.foreign is not ForeignPodGroup.KUBERNETES:
        return None, ()
    if not served():
        return None, (_NOT_SERVED,)
    if not _SHORT.fullmatch(gang.name):
        fault = "is too long for" if objectnames.is_subdomain(gang.name) else "cannot be"
        problem = f"{quote_text(gang.name)} {fault} the name of a gang"
        raise InvalidRequest(f"{_NATIVE}.podGroupName", problem, "give the PodGroup a name of 63 characters at most")
    return gang, ()


def _read_membership(pod: Json, schedulers: Collection[str]) -> Membership | None:
    scheduler = (pod.get("spec") or {}).get("schedulerName") or DEFAULT_SCHEDULER
    return gangs.membership(pod) if scheduler in schedulers else None


def join_gang(pod: Json, gang: Membership | None) -> tuple[Json, tuple[str, ...]]:
    """The pod with gate and label if it is in a gang, and without them if not; with warnings. Raises InvalidRequest."""
    metadata, spec = dict(pod.get("metadata") or {}), dict(pod.get("spec") or {})
    labels, gates = metadata.get("labels") or {}, spec.get("schedulingGates") or []
    gated = gangs.is_gated(pod)
    if gang is None:
        warnings = []
        if names.GANG in labels:
            metadata["labels"] = {key: label_value for key, label_value in labels.items() if key != names.GANG}
            warnings.append(f"{_LABEL}: removed, because the pod is not a member of a gang")
        if gated:
            spec["schedulingGates"] = [gate for gate in gates if gate.get("name") != names.GANG]
            warnings.append(f"{_GATE}: removed, because the pod is not a member of a gang")
        return _replace_parts(pod, metadata, spec) if warnings else pod, tuple(warnings)
    warnings = []
    if spec.get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", "the scheduler must place a pod of a gang", remedy)
    if labels.get(names.GANG) != gang.name:
        metadata["labels"] = labels | {names.GANG: gang.name}
        if names.GANG in labels:
            warnings.append(f"{_LABEL}: replaced by {gang.name}, the gang that the pod's annotation or label names")
    if not gated:
        spec["schedulingGates"] = [*gates, {"name": names.GANG}]
    return _replace_parts(pod, metadata, spec), tuple(warnings)


def check(pod: Json, gang: Membership | None, pod_request: PodRequest | None) -> tuple[str, ...]:
    """Check that the pod is as `join_gang` and `mutate` leave it. Returns warnings. Raises InvalidRequest."""
    label = labels_of(pod).get(names.GANG)
    if label != (gang.name if gang else None) or gangs.is_gated(pod) != (gang is not None):
        raise changed_later_error(_LABEL, "the label and the scheduling gate do not match the gang that the pod names")
    if gang is not None and pod_request is None and not mutate.is_marked(pod):
        problem = f"{names.PLACE_MARKER} and {names.BIND_MARKER} are missing"
        raise changed_later_error("spec.containers[0].resources.limits", problem)
    if gang is None:
        return ()
    gangs.queue_priority(annotations_of(pod))
    return (*_differences(pod), *_warn_missing_number(pod, gang))


def check_number(
    pod: Json,
    gang: Membership,
    namespace: str,
    conflicting_member: Callable[[str, str, int], tuple[str, int] | None],
    *,
    detailed: bool,
) -> None:
    """Refuse a pod if existing members of its gang say another number. Raises InvalidRequest.

    conflicting_member: as in `decisions.Lookups`.
    detailed: whether the caller may learn the member's name.
    """
    if gang.minimum is None:
        return
    other = conflicting_member(namespace, gang.name, gang.minimum)
    if other is not None:
        name, number = other
        raise InvalidRequest(
            _field_of(pod.get("metadata") or {}, names.GROUP_NUM),
            f"{gang.minimum} differs from the number of {f'pod {name}' if detailed else 'another pod'} of the same gang"
            + (f", {number}" if detailed else ""),
            f"write {number if detailed else 'that number'}, or another {names.GROUP_NAME}",
        )


def check_workload(manifest: Json, old: Json | None, resource: str, schedulers: Collection[str]) -> tuple[str, ...]:
    """Check the gang of a workload's template. Returns warnings. `old`: the stored object at an update.

    Raises InvalidRequest if the gang can never start. If the stored object has the same error it is a warning, so that
    other changes of the object are possible.
    """
    if templates.is_controlled(manifest):
        return ()  # whoever wrote its owner has been told
    try:
        return _check_template(manifest, resource, schedulers)
    except InvalidRequest as error:
        if old is None or _find_fault(old, resource, schedulers) != str(error):
            raise
        return (str(error),)


def _check_template(manifest: Json, resource: str, schedulers: Collection[str]) -> tuple[str, ...]:
    path, template = templates.template_of(manifest, resource)
    try:
        gang = gang_of(template, schedulers)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}.{error.field}", error.problem, error.remedy) from error
    if gang is None:
        return ()
    warnings = [f"{path}.{text}" for text in (*_differences(template), *_warn_missing_number(template, gang))]
    size = _count_parallel_pods(manifest, resource)
    if size is None:
        return tuple(warnings)
    if resource == "statefulsets" and size != 1 and _is_ordered(manifest):
        remedy = "write podManagementPolicy: Parallel"
        if gang.minimum is None:
            warnings.append(f"spec.podManagementPolicy: {_describe_ordered(gang, 'all its pods')}; {remedy}")
        elif gang.minimum > 1:
            raise InvalidRequest("spec.podManagementPolicy", _describe_ordered(gang, f"{gang.minimum} pods"), remedy)
    if gang.minimum is not None and 0 < size < gang.minimum:
        warnings.append(
            f"{'.'.join(_SIZES[resource])}: gang {gang.name} needs {gang.minimum} pods to start, and this workload "
            f"creates {size}; fine if other workloads create the remaining {gang.minimum - size}"
        )
    return tuple(warnings)


def _find_fault(manifest: Json, resource: str, schedulers: Collection[str]) -> str:
    try:
        _check_template(manifest, resource, schedulers)
    except InvalidRequest as error:
        return str(error)
    return ""


def _count_parallel_pods(manifest: Json, resource: str) -> int | None:
    """How many pods the workload creates at a time; None if that depends on the cluster."""
    if resource not in _SIZES:
        return None
    *path, size = _SIZES[resource]
    spec: Any = manifest
    for name in path:
        spec = spec.get(name) or {}
    size_set = spec.get(size)
    size_set = 1 if size_set is None else size_set
    completions = spec.get("completions")
    return size_set if completions is None else min(size_set, completions)


def _is_ordered(stateful_set: Json) -> bool:
    return ((stateful_set.get("spec") or {}).get("podManagementPolicy") or _ORDERED) == _ORDERED


def _describe_ordered(gang: Membership, pods: str) -> str:
    return f"{_ORDERED} creates a pod only after the previous one runs, and gang {gang.name} starts only with {pods}"


def _differences(pod: Json) -> list[str]:
    """Warnings about settings that the pod has twice, with different values."""
    annotations, labels = annotations_of(pod), labels_of(pod)
    warnings = [
        f"metadata.labels[{key}]: {labels[key]} differs from the annotation, whose value is used: {annotations[key]}"
        for key in _GROUP_KEYS
        if key in labels and key in annotations and labels[key] != annotations[key]
    ]
    name = annotations.get(names.GROUP_NAME, labels.get(names.GROUP_NAME))
    if name is not None and labels.get(names.COSCHEDULING, name) != name:
        field = f"metadata.labels[{names.COSCHEDULING}]"
        warnings.append(f"{field}: differs from {names.GROUP_NAME}, whose value is used: {name}")
    return warnings


def _warn_missing_number(pod: Json, gang: Membership) -> tuple[str, ...]:
    """The warning about a gang that is named by our key and has no number of pods. A PodGroup may have it."""
    if gang.minimum is not None or gang.foreign is not None:
        return ()
    field = _field_of(pod.get("metadata") or {}, names.GROUP_NAME)
    problem = f"gang {gang.name} waits until its number of pods is known"
    return (f"{field}: {problem}; write {names.GROUP_NUM}; fine if a PodGroup {gang.name} has it in spec.minMember",)


def _field_of(metadata: Json, key: str) -> str:
    return f"metadata.{'annotations' if key in (metadata.get('annotations') or {}) else 'labels'}[{key}]"


def _replace_parts(pod: Json, metadata: Json, spec: Json) -> Json:
    return pod | {"metadata": metadata, "spec": spec}
