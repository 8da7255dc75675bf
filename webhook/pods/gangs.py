"""Pods of gangs: the pod's gang, the gate and label of each member, and errors for groups that can never be complete.

A gang is read from the pod itself, because each member must have its gate before the scheduler sees the pod. Only pods
of schedulers that call the extender belong to gangs of Cardwise, because other projects (Volcano, coscheduling) use the
same annotations.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import ForeignPodGroup, Membership
from cardwise.core.values import objectnames
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods import resources
from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import changed_later_error
from webhook.templates import templates

_SCHEDULING_GROUP: Final = "spec.schedulingGroup"
_GANG_NAME_PATTERN: Final = re.compile(
    r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?"
)  # the names of PodGroups that are also valid label values
_PODGROUPS_NOT_SERVED_TEXT: Final = (
    f"{_SCHEDULING_GROUP}: the pod is not a member of a Cardwise gang, because this cluster does not serve PodGroups "
    "of "
    f"{ForeignPodGroup.KUBERNETES}/v1beta1 (Kubernetes 1.37, feature gate GenericWorkload)"
)
_ORDERED_READY: Final = "OrderedReady"
_GANG_LABEL_FIELD: Final = f"metadata.labels[{names.GANG}]"
_GATE_FIELD: Final = f"spec.schedulingGates[{names.GANG}]"
_GROUP_KEYS: Final = (names.GROUP_NAME, names.GROUP_NUM)
# The fields with the number of pods that a workload creates at a time. Kubernetes' default is one.
_SIZE_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "deployments": ("spec", "replicas"),
    "replicasets": ("spec", "replicas"),
    "replicationcontrollers": ("spec", "replicas"),
    "statefulsets": ("spec", "replicas"),
    "jobs": ("spec", "parallelism"),
    "cronjobs": ("spec", "jobTemplate", "spec", "parallelism"),
}


def mutate_name(pod: PodUnderReview, context: Context) -> None:
    """Read the gang that the pod names by annotation or label, whatever it requests. Raises InvalidRequest."""
    pod.gang = _named_gang(pod, context.settings.gang_schedulers)


def mutate_podgroup(pod: PodUnderReview, context: Context) -> None:
    """Read the request, and find the gang of a pod that requests cards or devices. Raises InvalidRequest, KubeError."""
    if pod.read_request() is not None and pod.gang is None:
        gang = _read_membership(pod, context.settings.gang_schedulers, context.settings.scheduler)
        pod.gang = _served_gang(gang, context)
        pod.names_unserved_podgroup = pod.gang is None and gang is not None


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Give a member of a gang the gate and the label; remove both from any other pod. Raises InvalidRequest.

    With claims all pods with a request have a gate, and members of gangs have no other (`claims.mutate`).
    """
    gates = pod.spec.get("schedulingGates") or []
    is_gated = any(gate.get("name") == names.GANG for gate in gates)
    if is_gated and context.settings.claims:
        pod.spec["schedulingGates"] = [gate for gate in gates if gate.get("name") != names.GANG]
        is_gated = False
    if pod.gang is None:
        if pod.names_unserved_podgroup:
            pod.warnings.append(_PODGROUPS_NOT_SERVED_TEXT)
        if names.GANG in pod.labels:
            pod.labels = {key: text for key, text in pod.labels.items() if key != names.GANG}
            pod.warnings.append(f"{_GANG_LABEL_FIELD}: removed, because the pod is not a member of a gang")
        if is_gated:
            pod.spec["schedulingGates"] = [gate for gate in gates if gate.get("name") != names.GANG]
            pod.warnings.append(f"{_GATE_FIELD}: removed, because the pod is not a member of a gang")
        return
    if pod.spec.get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", "the scheduler must place a pod of a gang", remedy)
    name = pod.gang.name
    if pod.labels.get(names.GANG) != name:
        if names.GANG in pod.labels:
            pod.warnings.append(
                f"{_GANG_LABEL_FIELD}: replaced by {name}, the gang that the pod's annotation or label names"
            )
        pod.labels = pod.labels | {names.GANG: name}
    if not is_gated and not context.settings.claims:
        pod.spec["schedulingGates"] = [*gates, {"name": names.GANG}]


def validate(pod: PodUnderReview, context: Context) -> None:
    """Find the gang, and check that label, gate and markers are as the rules wrote them. Raises InvalidRequest,
    KubeError.
    """
    schedulers = context.settings.gang_schedulers
    pod.gang = (
        _named_gang(pod, schedulers)
        if pod.request is None
        else _served_gang(_read_membership(pod, schedulers), context)
    )
    name = pod.gang.name if pod.gang is not None else None
    needs_gate = pod.gang is not None and not context.settings.claims
    if pod.labels.get(names.GANG) != name or gangs.is_gated(pod.manifest) != needs_gate:
        raise changed_later_error(
            _GANG_LABEL_FIELD, "the label and the scheduling gate do not match the gang that the pod names"
        )
    if pod.gang is None:
        return
    if pod.request is None and not context.settings.claims and not resources.is_marked(pod.containers):
        problem = f"{names.FILTER_CALL_RESOURCE} and {names.BIND_CALL_RESOURCE} are missing"
        raise changed_later_error("spec.containers[0].resources.limits", problem)
    gangs.queue_priority(pod.annotations)
    pod.warnings += (*_warn_differences(pod.manifest), *_warn_missing_number(pod.manifest, pod.gang))


def validate_number(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod if existing members of its gang name another number. Raises InvalidRequest."""
    gang = pod.gang
    if context.is_template or gang is None or gang.minimum is None:
        return
    conflict = context.cluster.conflicting_member(context.namespace, gang.name, gang.minimum)
    if conflict is not None:
        name, number = conflict
        detailed = context.settings.callers_known
        raise InvalidRequest(
            f"metadata.{'annotations' if names.GROUP_NUM in pod.annotations else 'labels'}[{names.GROUP_NUM}]",
            f"{gang.minimum} differs from the number of {f'pod {name}' if detailed else 'another pod'} of the same gang"
            + (f", {number}" if detailed else ""),
            f"write {number if detailed else 'that number'}, or another {names.GROUP_NAME}",
        )


def _named_gang(pod: PodUnderReview, schedulers: Collection[str]) -> Membership | None:
    """The gang that a pod or a template names by annotation or label, whatever it requests. Raises InvalidRequest.

    schedulers: as in `_read_membership`.
    """
    gang = _read_membership(pod, schedulers)
    return gang if gang is not None and gang.foreign_podgroup is not ForeignPodGroup.KUBERNETES else None


def _served_gang(gang: Membership | None, context: Context) -> Membership | None:
    """The gang of a pod that requests cards or devices; None for a PodGroup of Kubernetes that is not served.

    gang: the gang that the pod names.

    Raises InvalidRequest, KubeError.
    """
    if gang is None or gang.foreign_podgroup is not ForeignPodGroup.KUBERNETES:
        return gang
    if not context.cluster.serves_podgroups():
        return None
    if not _GANG_NAME_PATTERN.fullmatch(gang.name):
        fault = "is too long for" if objectnames.is_subdomain(gang.name) else "cannot be"
        problem = f"{quote_text(gang.name)} {fault} the name of a gang"
        raise InvalidRequest(
            f"{_SCHEDULING_GROUP}.podGroupName", problem, "give the PodGroup a name of 63 characters at most"
        )
    return gang


def _read_membership(pod: PodUnderReview, schedulers: Collection[str], scheduler: str = "") -> Membership | None:
    """The gang that a pod or a template names; None if its scheduler does not call the extender. Raises InvalidRequest.

    schedulers: the schedulers that call the extender.
    scheduler: the scheduler of pods that name none; "" for Kubernetes' own.
    """
    named = pod.spec.get("schedulerName") or DEFAULT_SCHEDULER
    if (scheduler if scheduler and named == DEFAULT_SCHEDULER else named) not in schedulers:
        return None
    return gangs.membership({"metadata": {"annotations": pod.annotations, "labels": pod.labels}, "spec": pod.spec})


def check_workload(manifest: Json, old: Json | None, resource: str, schedulers: Collection[str]) -> tuple[str, ...]:
    """Check the gang of a workload's template. Returns warnings. `old`: the stored object at an update.

    Raises InvalidRequest if the gang can never start. If the stored object already has this error, a warning is
    returned instead. So other parts of the object can still be changed.
    """
    if templates.is_controlled(manifest):
        return ()  # the author of the owner has got the warnings
    try:
        return _check_template(manifest, resource, schedulers)
    except InvalidRequest as error:
        if old is None or _template_error(old, resource, schedulers) != str(error):
            raise
        return (str(error),)


def _check_template(manifest: Json, resource: str, schedulers: Collection[str]) -> tuple[str, ...]:
    path, template = templates.template_of(manifest, resource)
    try:
        gang = _named_gang(PodUnderReview(template), schedulers)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}.{error.field}", error.problem, error.remedy) from error
    if gang is None:
        return ()
    warnings = [f"{path}.{text}" for text in (*_warn_differences(template), *_warn_missing_number(template, gang))]
    size = _count_parallel_pods(manifest, resource)
    if size is None:
        return tuple(warnings)
    if resource == "statefulsets" and size != 1 and _starts_in_order(manifest):
        remedy = "write podManagementPolicy: Parallel"
        if gang.minimum is None:
            warnings.append(f"spec.podManagementPolicy: {_describe_order_conflict(gang, 'all its pods')}; {remedy}")
        elif gang.minimum > 1:
            raise InvalidRequest(
                "spec.podManagementPolicy", _describe_order_conflict(gang, f"{gang.minimum} pods"), remedy
            )
    if gang.minimum is not None and 0 < size < gang.minimum:
        warnings.append(
            f"{'.'.join(_SIZE_FIELDS[resource])}: gang {gang.name} needs {gang.minimum} pods to start, and this "
            "workload "
            f"creates {size}; fine if other workloads create the remaining {gang.minimum - size}"
        )
    return tuple(warnings)


def _template_error(manifest: Json, resource: str, schedulers: Collection[str]) -> str | None:
    """Why the template is refused; None if it is not."""
    try:
        _check_template(manifest, resource, schedulers)
    except InvalidRequest as error:
        return str(error)
    return None


def _count_parallel_pods(manifest: Json, resource: str) -> int | None:
    """How many pods the workload creates at a time; None if that depends on the cluster."""
    if resource not in _SIZE_FIELDS:
        return None
    *path, size_field = _SIZE_FIELDS[resource]
    spec: Any = manifest
    for name in path:
        spec = spec.get(name) or {}
    parallel_pods = spec.get(size_field)
    parallel_pods = 1 if parallel_pods is None else parallel_pods
    completions = spec.get("completions")
    return parallel_pods if completions is None else min(parallel_pods, completions)


def _starts_in_order(stateful_set: Json) -> bool:
    return ((stateful_set.get("spec") or {}).get("podManagementPolicy") or _ORDERED_READY) == _ORDERED_READY


def _describe_order_conflict(gang: Membership, pods: str) -> str:
    return (
        f"{_ORDERED_READY} creates a pod only after the previous one runs, and gang {gang.name} starts only with {pods}"
    )


def _warn_differences(pod: Json) -> list[str]:
    """Warnings about settings that the pod has both as label and annotation, with different values."""
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
    """The warning for a pod that names its gang by Cardwise's annotation, but not the gang's size. A PodGroup may have
    the size.
    """
    if gang.minimum is not None or gang.foreign_podgroup is not None:
        return ()
    field = _metadata_field(pod.get("metadata") or {}, names.GROUP_NAME)
    problem = f"gang {gang.name} waits until its number of pods is known"
    return (f"{field}: {problem}; write {names.GROUP_NUM}; fine if a PodGroup {gang.name} has it in spec.minMember",)


def _metadata_field(metadata: Json, key: str) -> str:
    return f"metadata.{'annotations' if key in (metadata.get('annotations') or {}) else 'labels'}[{key}]"
