"""Recent events about pods and what makes them. The API server keeps events for an hour."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

REFUSED: Final = "FailedCreate"  # reason by which controllers say that they could not create a pod
_OF_A_TRY: Final = re.compile(
    r'(?:\(combined from similar events\): )?(?:Error creating: )?pods? "[^"]*" (?:is forbidden: )?'
)
_OVER: Final = ("FailedScheduling", "Failed", "BackOff")
_DELETED: Final = "SuccessfulDelete"  # of a controller that has deleted one of its pods


@dataclass(frozen=True, slots=True)
class Event:
    """An event.

    at: its last time, as Kubernetes writes times.
    kind, name, uid: of its object.
    warns: whether its type is Warning.
    """

    at: str
    reason: str
    message: str
    kind: str
    name: str
    uid: str
    warns: bool = False


def about_pod(client: KubeClient, namespace: str, name: str) -> list[Event]:
    """All of the pod, and those by which controllers say that they have deleted it; the oldest first."""
    own = (one for one in _events(client, namespace, "involvedObject.name", name) if one.kind == "Pod")
    deletions = _events(client, namespace, "reason", _DELETED)
    return sorted({*own, *(one for one in deletions if name in one.message.split())}, key=lambda one: one.at)


def last_warning(client: KubeClient, pod: Json) -> Event | None:
    """The newest warning about a pod on a node whose containers do not start: mounts, sandboxes, devices.

    What kube-scheduler said before it was bound is over, and what the kubelet says of images is in the pod's status.
    """
    metadata = pod["metadata"]
    events = _events(client, metadata["namespace"], "involvedObject.name", metadata["name"])
    mine = (event for event in events if event.warns and event.uid == metadata.get("uid"))
    return max((event for event in mine if event.reason not in _OVER), key=lambda event: event.at, default=None)


def bound_past(client: KubeClient, namespace: str) -> list[Event]:
    """The pods that the extender has deleted since a scheduler that does not ask it had bound them."""
    return list(_events(client, namespace, "reason", names.BOUND_PAST_CARDWISE))


def refused(client: KubeClient, namespace: str) -> list[Event]:
    """By which controllers say that they could not create a pod, the oldest first."""
    return sorted(_events(client, namespace, "reason", REFUSED), key=lambda one: one.at)


def _events(client: KubeClient, namespace: str, field: str, value: str) -> Iterator[Event]:
    """None where they may not be read."""
    try:
        yield from map(_event, client.objects(paths.events(namespace), paths.with_field(field, value)))
    except errors.Forbidden:
        return


def last_time(event: Json) -> str:
    """When the event was repeated last, as Kubernetes writes times; "" where it does not tell.

    Which field has it depends on the client that wrote the event, and on whether it was repeated.
    """
    times = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return max((str(time) for time in times if time), default="")


def cause(refusal: str) -> str:
    """What a controller that could not create a pod says, without the name of the pod: each try has another."""
    return _OF_A_TRY.sub("", refusal, count=1)


def _event(obj: Json) -> Event:
    about = obj.get("involvedObject") or {}
    return Event(
        at=last_time(obj),
        reason=str(obj.get("reason") or ""),
        message=str(obj.get("message") or ""),
        kind=str(about.get("kind") or ""),
        name=str(about.get("name") or ""),
        uid=str(about.get("uid") or ""),
        warns=obj.get("type") == "Warning",
    )
