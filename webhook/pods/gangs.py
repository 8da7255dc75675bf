"""Admission of pods of gangs: the gate and the label of each member, and groups that can never be complete.

A gang is read from the pod itself, so that a member is gated before the scheduler sees it. Pods for schedulers that do
not ask the extender are in no gang, whatever they say: others use the same annotations (Volcano, coscheduling).
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from cardwise.core.api import names
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import Foreign, Membership
from cardwise.core.values import objectnames
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quoted
from webhook.pods import mutate
from webhook.pods.order import changed_later
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
    f"{_NATIVE}: the pod is in no gang of Cardwise, since this cluster serves no PodGroups of "
    f"{Foreign.KUBERNETES}/v1beta1 (Kubernetes 1.37, feature gate GenericWorkload)"
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


def of(pod: Json, schedulers: Collection[str]) -> Membership | None:
    """The gang that a pod or a template names by annotation or label, whatever it asks for; `schedulers` are those that
    ask the extender. Raises InvalidRequest.
    """
    said = _said(pod, schedulers)
    return said if said is not None and said.foreign is not Foreign.KUBERNETES else None


def native(pod: Json, schedulers: Collection[str], served: Callable[[], bool]) -> tuple[Membership | None, Warnings]:
    """The gang of a pod that asks for something, by the PodGroup of Kubernetes that it names. `served`: whether there
    are such. With warnings. Raises InvalidRequest, KubeError.
    """
    said = _said(pod, schedulers)
    if said is None or said.foreign is not Foreign.KUBERNETES:
        return None, ()
    if not served():
        return None, (_NOT_SERVED,)
    if not _SHORT.fullmatch(said.name):
        fault = "is too long for" if objectnames.is_subdomain(said.name) else "cannot be"
        problem = f"{quoted(said.name)} {fault} the name of a gang"
        raise InvalidRequest(f"{_NATIVE}.podGroupName", problem, "give the PodGroup a name of 63 characters at most")
    return said, ()


def _said(pod: Json, schedulers: Collection[str]) -> Membership | None:
    scheduler = (pod.get("spec") or {}).get("schedulerName") or DEFAULT_SCHEDULER
    return gangs.membership(pod) if scheduler in schedulers else None


def joined(pod: Json, said: Membership | None) -> tuple[Json, tuple[str, ...]]:
    """The pod with gate and label if it is in a gang, and without if not. And warnings. Raises InvalidRequest."""
    metadata, spec = dict(pod.get("metadata") or {}), dict(pod.get("spec") or {})
    labels, gates = metadata.get("labels") or {}, spec.get("schedulingGates") or []
    gated = gangs.gated(pod)
    if said is None:
        warnings = []
        if names.GANG in labels:
            metadata["labels"] = {key: value for key, value in labels.items() if key != names.GANG}
            warnings.append(f"{_LABEL}: removed, since the pod is in no gang")
        if gated:
            spec["schedulingGates"] = [gate for gate in gates if gate.get("name") != names.GANG]
            warnings.append(f"{_GATE}: removed, since the pod is in no gang")
        return _with(pod, metadata, spec) if warnings else pod, tuple(warnings)
    warnings = []
    if spec.get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", "a pod of a gang must be placed by the scheduler", remedy)
    if labels.get(names.GANG) != said.name:
        metadata["labels"] = labels | {names.GANG: said.name}
        if names.GANG in labels:
            warnings.append(f"{_LABEL}: replaced by {said.name}, the gang that the pod names")
    if not gated:
        spec["schedulingGates"] = [*gates, {"name": names.GANG}]
    return _with(pod, metadata, spec), tuple(warnings)


def check(pod: Json, said: Membership | None, asked: PodRequest | None) -> tuple[str, ...]:
    """Warnings. Raises InvalidRequest where the pod is not as `joined` and `mutate` leave it, or asks for nonsense."""
    label = labels_of(pod).get(names.GANG)
    if label != (said.name if said else None) or gangs.gated(pod) != (said is not None):
        raise changed_later(_LABEL, "label and scheduling gate are not those of the gang that the pod names")
    if said is not None and asked is None and not mutate.is_marked(pod):
        problem = f"{names.PLACE_MARKER} and {names.BIND_MARKER} are missing"
        raise changed_later("spec.containers[0].resources.limits", problem)
    if said is None:
        return ()
    gangs.queue_priority(annotations_of(pod))
    return tuple(_differences(pod))


def check_number(
    pod: Json,
    said: Membership,
    namespace: str,
    other_number: Callable[[str, str, int], tuple[str, int] | None],
    *,
    told: bool,
) -> None:
    """Raises InvalidRequest where living members of the gang say another number, as `Lookups` has it. `told`: who asks
    may know which.
    """
    if said.minimum is None:
        return
    other = other_number(namespace, said.name, said.minimum)
    if other is not None:
        name, number = other
        raise InvalidRequest(
            _where(pod.get("metadata") or {}, names.GROUP_NUM),
            f"{said.minimum} differs from what {f'pod {name}' if told else 'another pod'} of the same gang says"
            + (f", {number}" if told else ""),
            f"write {number if told else 'that number'}, or another {names.GROUP_NAME}",
        )


def workload(obj: Json, old: Json | None, resource: str, schedulers: Collection[str]) -> tuple[str, ...]:
    """Warnings about the gang that a workload's template makes. `old` is the stored object at an update.

    Raises InvalidRequest for what can never start; where it was stored so before, it is a warning, since other changes
    of the object must go on.
    """
    if templates.is_controlled(obj):
        return ()  # whoever wrote its owner has been told
    try:
        return _judged(obj, resource, schedulers)
    except InvalidRequest as error:
        if old is None or _fault(old, resource, schedulers) != str(error):
            raise
        return (str(error),)


def _judged(obj: Json, resource: str, schedulers: Collection[str]) -> tuple[str, ...]:
    path, template = templates.template_of(obj, resource)
    try:
        said = of(template, schedulers)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}.{error.field}", error.problem, error.remedy) from error
    if said is None:
        return ()
    warnings = [f"{path}.{text}" for text in _differences(template)]
    made = _made(obj, resource)
    if made is None:
        return tuple(warnings)
    if resource == "statefulsets" and made != 1 and _one_by_one(obj):
        remedy = "write podManagementPolicy: Parallel"
        if said.minimum is None:
            warnings.append(f"spec.podManagementPolicy: {_ordered(said, 'all its pods')}; {remedy}")
        elif said.minimum > 1:
            raise InvalidRequest("spec.podManagementPolicy", _ordered(said, f"{said.minimum} pods"), remedy)
    if said.minimum is not None and 0 < made < said.minimum:
        warnings.append(
            f"{'.'.join(_SIZES[resource])}: gang {said.name} needs {said.minimum} pods to start and this makes {made}; "
            f"right where other workloads make the other {said.minimum - made}"
        )
    return tuple(warnings)


def _fault(obj: Json, resource: str, schedulers: Collection[str]) -> str:
    try:
        _judged(obj, resource, schedulers)
    except InvalidRequest as error:
        return str(error)
    return ""


def _made(obj: Json, resource: str) -> int | None:
    """How many pods the workload makes at a time; None where the cluster says it."""
    if resource not in _SIZES:
        return None
    *path, size = _SIZES[resource]
    spec: Any = obj
    for name in path:
        spec = spec.get(name) or {}
    made = spec.get(size)
    made = 1 if made is None else made
    completions = spec.get("completions")
    return made if completions is None else min(made, completions)


def _one_by_one(stateful_set: Json) -> bool:
    return ((stateful_set.get("spec") or {}).get("podManagementPolicy") or _ORDERED) == _ORDERED


def _ordered(said: Membership, pods: str) -> str:
    return f"{_ORDERED} makes a pod only when the one before it runs, and gang {said.name} starts only with {pods}"


def _differences(pod: Json) -> list[str]:
    """Warnings of what is said twice, and differs."""
    annotations, labels = annotations_of(pod), labels_of(pod)
    told = [
        f"metadata.labels[{key}]: {labels[key]} differs from the annotation, which says {annotations[key]} and holds"
        for key in _GROUP_KEYS
        if key in labels and key in annotations and labels[key] != annotations[key]
    ]
    name = annotations.get(names.GROUP_NAME, labels.get(names.GROUP_NAME))
    if name is not None and labels.get(names.COSCHEDULING, name) != name:
        field = f"metadata.labels[{names.COSCHEDULING}]"
        told.append(f"{field}: differs from {names.GROUP_NAME}, which says {name} and holds")
    return told


def _where(metadata: Json, key: str) -> str:
    return f"metadata.{'annotations' if key in (metadata.get('annotations') or {}) else 'labels'}[{key}]"


def _with(pod: Json, metadata: Json, spec: Json) -> Json:
    return pod | {"metadata": metadata, "spec": spec}
