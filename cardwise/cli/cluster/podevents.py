"""Recent events about pods, nodes and controllers. The API server keeps events for an hour.

Every user with the role `edit` can write Events into a namespace, with any text and any author. So the text of an Event
is quoted where it is shown, and all Events are read through `parse_event`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cardwise.cli.cluster import installation
from cardwise.core.api import names
from cardwise.core.values import objectnames, wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.timestamps import EARLIEST, format_timestamp, parse_timestamp
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

CREATION_REFUSED: Final = "FailedCreate"  # the reason of a controller's Event when it could not create a pod
_CREATION_ERROR_PREFIX: Final = re.compile(
    r'(?:\(combined from similar events\): )?(?:Error creating: )?pods? "[^"]*" (?:is forbidden: )?'
)
_KIND_PATTERN: Final = re.compile("[A-Za-z][A-Za-z0-9]{0,62}")
_MAX_WORD_BYTES: Final = 128  # maximum length of a reason and of a reporter, as in the API group events.k8s.io
_CLUSTER_OBJECT_NAMESPACE: Final = "default"
_OUTDATED_REASONS: Final = ("FailedScheduling", "Failed", "BackOff")
_POD_DELETED: Final = "SuccessfulDelete"  # the reason of a controller's Event when it has deleted a pod


@dataclass(frozen=True, slots=True)
class Event:
    """An Event of Kubernetes.

    last_timestamp: when the Event was last repeated, in Kubernetes' format.
    reason, message: one line each, at most 128 and 1024 bytes.
    kind, namespace, name, uid: the object that it concerns; the namespace is "" for cluster-scoped objects.
    is_warning: whether its type is Warning.
    reporter: the name of the component that reported the Event; "" if unknown.
    """

    last_timestamp: str
    reason: str
    message: str
    kind: str
    name: str
    uid: str
    is_warning: bool = False
    namespace: str = ""
    reporter: str = ""

    @property
    def time(self) -> datetime:
        """When the Event was last repeated, in UTC."""
        return parse_timestamp(self.last_timestamp) or EARLIEST


def parse_event(manifest: Json) -> Event | None:
    """Parse an Event; None if the Event lacks a time, or if its object has an invalid name or another namespace.

    Events about cluster-scoped objects, such as nodes, are in the namespace `default`.
    """
    involved_object, metadata, source = (
        manifest.get("involvedObject") or {},
        manifest.get("metadata") or {},
        manifest.get("source") or {},
    )
    kind, name, namespace = (str(involved_object.get(key) or "") for key in ("kind", "name", "namespace"))
    if metadata.get("namespace") != (namespace or _CLUSTER_OBJECT_NAMESPACE):
        return None
    if (
        not _KIND_PATTERN.fullmatch(kind)
        or not objectnames.is_subdomain(name)
        or (last_timestamp := last_time(manifest)) is None
        or parse_timestamp(last_timestamp) is None
    ):
        return None
    return Event(
        last_timestamp=last_timestamp,
        reason=wording.sanitize_message(str(manifest.get("reason") or ""), _MAX_WORD_BYTES),
        message=wording.sanitize_message(str(manifest.get("message") or "")),
        kind=kind,
        name=name,
        uid=str(involved_object.get("uid") or ""),
        is_warning=manifest.get("type") == "Warning",
        namespace=namespace,
        reporter=wording.sanitize_message(
            str(manifest.get("reportingComponent") or source.get("component") or ""), _MAX_WORD_BYTES
        ),
    )


def events_of_pod(client: KubeClient, namespace: str, name: str) -> list[Event]:
    """Read all Events about the pod, and Events of controllers that deleted it, the oldest first."""
    pod_events = (
        event for event in _read_events(client, namespace, "involvedObject.name", name) if event.kind == "Pod"
    )
    deletions = _read_events(client, namespace, "reason", _POD_DELETED)
    return sorted(
        {*pod_events, *(event for event in deletions if name in event.message.split())},
        key=lambda event: event.last_timestamp,
    )


def last_warning(client: KubeClient, pod: Json) -> Event | None:
    """The newest warning about a bound pod whose containers do not start, such as a failed mount.

    Leaves out two kinds of messages: those of kube-scheduler, which no longer apply, and the kubelet's messages about
    images, which the pod's status contains.
    """
    metadata = pod["metadata"]
    events = _read_events(client, metadata["namespace"], "involvedObject.name", metadata["name"])
    own_warnings = (event for event in events if event.is_warning and event.uid == metadata.get("uid"))
    return max(
        (event for event in own_warnings if event.reason not in _OUTDATED_REASONS),
        key=lambda event: event.last_timestamp,
        default=None,
    )


def direct_bind_events(client: KubeClient, namespace: str) -> list[Event]:
    """Events about pods that the extender deleted because another scheduler had bound them without the extender."""
    events = _read_events(client, namespace, "reason", names.BOUND_WITHOUT_EXTENDER)
    return [event for event in events if event.kind == "Pod"]


def refused_creations(client: KubeClient, namespace: str) -> list[Event]:
    """Events of controllers that could not create a pod, the oldest first."""
    return sorted(_read_events(client, namespace, "reason", CREATION_REFUSED), key=lambda event: event.last_timestamp)


def _read_events(client: KubeClient, namespace: str, field: str, text: str) -> Iterator[Event]:
    """The events with the field; empty if they may not be read."""
    try:
        events = map(parse_event, client.list_objects(paths.events(namespace), paths.field_query(field, text)))
        yield from (event for event in events if event is not None)
    except errors.Forbidden:
        return


def last_time(event: Json) -> str | None:
    """When the Event was last repeated, in Kubernetes' format; None if unknown.

    Uses the API server's record of the last write, if there is one, since the clock of the Event's reporter may be
    wrong. Without this record, uses the reporter's time. The field with this time depends on the reporter's client, and
    on whether the Event was repeated.
    """
    if written_at := installation.last_write(event):
        return format_timestamp(written_at)
    times = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return max((str(time) for time in times if time), default=None)


def refusal_cause(refusal: str) -> str:
    """Why a controller failed to create a pod. The pod's name is removed from the message, because it differs at each
    attempt.
    """
    return _CREATION_ERROR_PREFIX.sub("", refusal, count=1)
