"""Reads workloads by the names that users type, their pods, and the reasons why pods are missing."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cardwise.cli.cluster import podevents
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.shellcommand import command
from cardwise.core.values.timestamps import format_timestamp, parse_timestamp, subtract_seconds
from cardwise.core.values.wording import quote_unless_name
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

POD: Final = "pod"
_APPS, _BATCH = "/apis/apps/v1", "/apis/batch/v1"
_PATH_BY_KIND: Final[Mapping[str, tuple[str, str]]] = {
    "deployment": (_APPS, "deployments"),
    "statefulset": (_APPS, "statefulsets"),
    "job": (_BATCH, "jobs"),
    "cronjob": (_BATCH, "cronjobs"),
    "replicaset": (_APPS, "replicasets"),
    "daemonset": (_APPS, "daemonsets"),
}
_KIND_BY_ABBREVIATION: Final[Mapping[str, str]] = {
    "po": POD, "deploy": "deployment", "sts": "statefulset", "cj": "cronjob", "rs": "replicaset", "ds": "daemonset",
}  # fmt: skip
KINDS: Final = (POD, *_PATH_BY_KIND)
_REPLACING_KINDS: Final = ("ReplicaSet", "StatefulSet", "ReplicationController")
_CERTAINLY_REPLACING_KINDS: Final = (*_REPLACING_KINDS, "DaemonSet")
_POD_NAME_SUFFIX: Final = re.compile(
    "([0-9]+-)?[a-z0-9]+"
)  # the part that a controller appends to a pod's name: an index, a random suffix, or both
_GATED_REASON: Final = "SchedulingGated"  # the reason of a condition that the API server writes
_MAX_LISTED: Final = 5  # maximum number of finalizers that a sentence names
_POD_CREATOR_KINDS: Final[Mapping[str, str]] = {
    "deployment": "replicaset",
    "cronjob": "job",
}  # the kinds of objects that create the pods of a workload


@dataclass(frozen=True, slots=True)
class CreationRefusal:
    """The API server refused a new pod.

    message: the API server's message.
    creator: kind and name, as arguments of kubectl, of the object whose pod was refused.
    """

    message: str
    creator: str


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """A workload and its pods.

    pod_creators: the ReplicaSets or Jobs that create its pods; else the workload itself.
    refusal: the last refusal of a new pod; None without a refusal.
    directly_bound: names of pods of the workload that another scheduler had bound, and that the extender has therefore
        deleted recently.
    """

    kind: str
    manifest: Json
    pod_creators: tuple[Json, ...] = ()
    pods: tuple[Json, ...] = ()
    refusal: CreationRefusal | None = None
    directly_bound: tuple[str, ...] = ()


def parse_kind(word: str) -> str | None:
    """The kind of workload that a word such as `deploy` means; None if it is unknown."""
    singular_or_plural = word.lower().partition(".")[0]
    for name in (singular_or_plural, singular_or_plural.removesuffix("s")):
        kind = _KIND_BY_ABBREVIATION.get(name, name)
        if kind in KINDS:
            return kind
    return None


def read_workload(client: KubeClient, kind: str, namespace: str, name: str) -> Json | None:
    """Read a workload or a pod; None if it does not exist. Raises KubeError."""
    path = paths.pods(namespace, name) if kind == POD else paths.namespaced(*_PATH_BY_KIND[kind], namespace, name)
    try:
        return client.get(path)
    except errors.NotFound:
        return None


def read_state(client: KubeClient, kind: str, manifest: Json) -> WorkloadState:
    """Read the pods of the workload, and why its controller has not created more. Raises KubeError."""
    namespace = manifest["metadata"]["namespace"]
    pod_creators: tuple[Json, ...] = (manifest,)
    if kind in _POD_CREATOR_KINDS:
        api, plural = _PATH_BY_KIND[_POD_CREATOR_KINDS[kind]]
        pod_creators = tuple(_filter_owned(client.list_objects(paths.namespaced(api, plural, namespace)), pod_creators))
    pods = tuple(_filter_owned(client.list_objects(paths.pods(namespace)), pod_creators))
    present_names = {pod["metadata"]["name"] for pod in pods}
    creator_names = [creator["metadata"]["name"] for creator in pod_creators]
    deleted_names = dict.fromkeys(creator.name for creator in podevents.direct_bind_events(client, namespace))
    directly_bound = tuple(
        name
        for name in deleted_names
        if name not in present_names and any(_has_name_of_creator(name, creator) for creator in creator_names)
    )
    refusal = _last_refusal(client, namespace, kind, (manifest, *pod_creators))
    return WorkloadState(kind, manifest, pod_creators, pods, refusal, directly_bound)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Names of other pods of a pod's workload.

    from_former_template: pods of the same Deployment, but of another ReplicaSet.
    of_same_controller: pods of the same controller, if this controller replaces pods that end.
    """

    from_former_template: frozenset[str] = frozenset()
    of_same_controller: frozenset[str] = frozenset()


def other_replicas(client: KubeClient, pod: Json) -> Replicas:
    """Read the other pods of the pod's workload. Raises KubeError."""
    namespace, deployment, controller = (
        pod["metadata"].get("namespace", ""),
        _deployment_name(pod),
        _recreating_controller(pod),
    )
    if not controller:
        return Replicas()
    name = pod["metadata"]["name"]
    pods = [other for other in client.list_objects(paths.pods(namespace)) if other["metadata"]["name"] != name]
    deployment_pods = [other for other in pods if deployment and _deployment_name(other) == deployment]
    return Replicas(
        frozenset(
            other["metadata"]["name"] for other in deployment_pods if _recreating_controller(other) != controller
        ),
        frozenset(other["metadata"]["name"] for other in pods if _recreating_controller(other) == controller),
    )


def _deployment_name(pod: Json) -> str | None:
    """The name of the pod's Deployment, from the name of its ReplicaSet; None if the pod has no Deployment."""
    digest = labels_of(pod).get("pod-template-hash")
    owner = _recreating_controller(pod)[1:2]
    return owner[0].removesuffix(f"-{digest}") if digest and owner and owner[0].endswith(f"-{digest}") else None


def controller_of(manifest: Json) -> Json:
    """The owner reference of the controller that created the object; {} without a controller."""
    owners: Iterable[Json] = manifest["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def _recreating_controller(pod: Json) -> tuple[str, ...]:
    """Kind and name of the pod's controller, if it replaces each pod that ends; else ()."""
    owner = controller_of(pod)
    return (owner["kind"], owner["name"]) if owner.get("kind") in _REPLACING_KINDS else ()


def is_bare(pod: Json) -> bool:
    """Whether no controller recreates the pod once it is deleted."""
    return not controller_of(pod) and names.MIRROR not in annotations_of(pod)


def recreate_command(namespace: str, pods: Sequence[str], *, dropped_fields: Sequence[str] = ()) -> str:
    """A shell command that saves pods of a namespace to a file, deletes them and creates them again.

    dropped_fields: fields of the spec that the new pod must not have, such as the node. Possible for a single pod only,
        since kubectl indents the pods of a list.
    """
    file = pods[0] if len(pods) == 1 else f"pods-of-{namespace}"
    fields = "|".join(dropped_fields)
    drop_filter = f" | grep -vE '^  ({fields}):'" if fields else ""
    save_command = f"kubectl get pod -n {{namespace}} {{pods}} -o yaml{drop_filter} > {{file}}.yaml"
    replace_command = f"{save_command} && kubectl replace --force -f {{file}}.yaml"
    return command(replace_command, namespace=namespace, pods=pods, file=file)


def describe_recreation(pod: Json, *, dropped_fields: Sequence[str] = ()) -> str:
    """How to recreate the pod: a command and its effect, as the end of a sentence.

    dropped_fields: fields of the spec that prevent the pod from running; a new pod must not have them.
    """
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    if not is_bare(pod):
        delete = command("kubectl delete pod -n {namespace} {pod}", namespace=namespace, pod=name)
        return f"`{delete}` deletes it; {describe_replacement(pod)}"
    if (pod.get("spec") or {}).get("nodeName"):
        dropped_fields = ("nodeName", *dropped_fields)
    recreate = recreate_command(namespace, [name], dropped_fields=dropped_fields)
    return f"no controller recreates it: `{recreate}` saves it to {name}.yaml, deletes it and creates it again"


def retry_command(namespace: str, creator: str) -> str:
    """The command that changes a controller's object, so that the controller retries at once to create its pods.

    creator: kind and name of the object, as arguments of kubectl.
    """
    kind, _, name = creator.partition(" ")
    retry = "kubectl annotate -n {namespace} {kind} {name} retried-at=$(date +%s) --overwrite"
    return command(retry, namespace=namespace, kind=kind, name=name)


def describe_replacement(pod: Json) -> str:
    """The end of a sentence about the pod that replaces this pod after a deletion."""
    if is_bare(pod):
        return describe_recreation(pod)
    kind = str(controller_of(pod).get("kind") or "")
    if names.MIRROR in annotations_of(pod):
        return "the kubelet recreates it while its manifest exists"
    if kind == "Job":
        return "its Job recreates it while its backoffLimit allows"
    return f"its {quote_unless_name(kind)} {'makes' if kind in _CERTAINLY_REPLACING_KINDS else 'may make'} another"


def _filter_owned(objects: Iterable[Json], owners: Iterable[Json]) -> Iterable[Json]:
    uids = {owner["metadata"].get("uid") for owner in owners}
    return (candidate for candidate in objects if controller_of(candidate).get("uid") in uids)


def _has_name_of_creator(pod: str, creator: str) -> bool:
    """Whether a pod has a name that a ReplicaSet, StatefulSet, DaemonSet or Job of this name gives its pods."""
    return pod.startswith(f"{creator}-") and _POD_NAME_SUFFIX.fullmatch(pod.removeprefix(f"{creator}-")) is not None


def _last_refusal(client: KubeClient, namespace: str, kind: str, owners: Sequence[Json]) -> CreationRefusal | None:
    """Return the last refusal of a new pod; None without a refusal.

    Events are kept for an hour; the condition ReplicaFailure of a ReplicaSet stays longer.

    kind: the kind of the workload.
    owners: the workload first, then the objects that create its pods.
    """
    kinds = {owner["metadata"].get("uid"): _POD_CREATOR_KINDS.get(kind, kind) for owner in owners}
    kinds[owners[0]["metadata"].get("uid")] = kind
    names_by_uid = {owner["metadata"].get("uid"): owner["metadata"]["name"] for owner in owners}
    events = [event for event in podevents.refused_creations(client, namespace) if event.uid in kinds]
    if events:
        return CreationRefusal(events[-1].message, f"{kinds[events[-1].uid]} {names_by_uid[events[-1].uid]}")
    for owner in owners:
        for condition in (owner.get("status") or {}).get("conditions") or ():
            if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
                creator = f"{kinds[owner['metadata'].get('uid')]} {owner['metadata']['name']}"
                message = str(condition.get("message") or "")
                return CreationRefusal(message, creator) if message else None
    return None


def scheduler_message(pod: Json) -> str | None:
    """Why kube-scheduler has not placed the pod; None until the first message after the removal of the pod's gates."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    condition: Json = next(
        (listed for listed in conditions if listed.get("type") == "PodScheduled" and listed.get("message")), {}
    )
    was_gated = condition.get("reason") == _GATED_REASON and not (pod.get("spec") or {}).get("schedulingGates")
    return None if was_gated or not condition else str(condition["message"])


def deletion_time(metadata: Json) -> str:
    """The time of the request to delete the object: deletionTimestamp minus grace period."""
    end, grace = metadata["deletionTimestamp"], int(metadata.get("deletionGracePeriodSeconds") or 0)
    grace_end = parse_timestamp(end)
    return str(end) if grace_end is None else format_timestamp(subtract_seconds(grace_end, _wrap_seconds(grace)))


def _wrap_seconds(seconds: int) -> int:
    """The seconds that the API server adds to a time when `seconds` are requested; they differ after an overflow.

    The API server converts seconds to nanoseconds in 64 bits, which overflow after 292 years.
    """
    nanoseconds = (seconds * 10**9 + 2**63) % 2**64 - 2**63
    return round(nanoseconds / 10**9)


def finalizers_suffix(metadata: Json) -> str:
    """Why a deleted object still exists, as the end of a sentence; empty without finalizers."""
    finalizers = metadata.get("finalizers") or ()
    finalizer_names = wording.enumerate_first([*map(quote_unless_name, finalizers)], _MAX_LISTED)
    return f", and exists as long as it has the finalizers {finalizer_names}" if finalizers else ""


def pod_state(pod: Json) -> str:
    """The pod's state in one word: waiting, starting, running, ending or ended."""
    status = pod.get("status") or {}
    if status.get("phase") in names.FINISHED_PHASES:
        return "ended"
    if pod["metadata"].get("deletionTimestamp"):
        return "ending"
    if not (pod.get("spec") or {}).get("nodeName"):
        return "waiting"
    return "running" if status.get("phase") == "Running" else "starting"
