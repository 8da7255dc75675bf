"""PodGroups: the gang settings in their specs, and the statuses to write.

Users write the spec. The extender writes the status, which records the gang's progress for the next leader.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cardwise.core.api import names
from cardwise.core.gangs.gangs import GangPhase, PodGroupSpec
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.kube import wire
from extender.gangs.gangviews import GangView

_MAX_NAMED_MEMBERS = 20  # maximum number of members that a status names
_decode = msgspec.json.Decoder(Json).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A PodGroup.

    auto: whether the extender created it, for a gang that had no PodGroup.
    terminating: whether it is deleted already, and a finalizer keeps it.
    """

    namespace: str
    name: str
    group: PodGroupSpec
    minimum: int = 0
    auto: bool = False
    terminating: bool = False
    uid: str = ""
    generation: int = 0
    status: Json = field(default_factory=dict)


def decode_group(raw: bytes) -> tuple[str, GroupRecord] | None:
    """Decode a PodGroup; returns its key "namespace/name" and its record."""
    manifest = _decode(wire.trim_object(raw))
    metadata, spec, status = manifest["metadata"], manifest.get("spec") or {}, manifest.get("status") or {}
    # Check the label's value, as the admission policy does: it refuses writes of the extender to other PodGroups.
    auto = (metadata.get("labels") or {}).get(names.AUTO_LABEL) == "true"
    running = status.get("phase") == GangPhase.RUNNING
    partly_bound_since = (
        _parse_time(status.get("lastTransitionTime"))
        if status.get("phase") in (GangPhase.BINDING, GangPhase.PARTLY_BOUND)
        else None
    )
    minimum = _integer_field(spec, "minMember") or 0
    seconds = _integer_field(spec, "timeoutSeconds")
    group = PodGroupSpec(
        minimum=minimum,
        permit=float(seconds) if seconds is not None else None,
        priority=_integer_field(spec, "priority"),
        running=running,
        partly_bound_since=partly_bound_since,
    )
    return f"{metadata['namespace']}/{metadata['name']}", GroupRecord(
        namespace=metadata["namespace"],
        name=metadata["name"],
        # The extender wrote the spec of an automatic PodGroup from the pods, which may have changed since.
        group=PodGroupSpec(running=running, partly_bound_since=partly_bound_since) if auto else group,
        minimum=minimum,
        auto=auto,
        terminating=metadata.get("deletionTimestamp") is not None,
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        status=status,
    )


def automatic_group(view: GangView) -> Json:
    """The PodGroup to create for a gang without a PodGroup."""
    metadata = {"name": view.name, "namespace": view.namespace, "labels": {names.AUTO_LABEL: "true"}}
    spec = {"minMember": view.minimum}
    return {"apiVersion": names.API_VERSION, "kind": "PodGroup", "metadata": metadata, "spec": spec}


def group_status(group_record: GroupRecord, view: GangView | None, now: str) -> Json:
    """The status as JSON, without times of conditions. `view`: None if the gang has no pod."""
    phase = view.phase if view is not None else GangPhase.PENDING
    changed = group_record.status.get("lastTransitionTime") if group_record.status.get("phase") == phase else None
    reason = wording.sanitize_message(view.reason if view is not None else "the gang has no pods")
    document: Json = {
        "phase": str(phase),
        "reason": reason,
        "minMember": view.minimum if view is not None else group_record.minimum,
        "members": view.member_count if view is not None else 0,
        "bound": view.bound if view is not None else 0,
        "lastTransitionTime": changed or now,
        "waitingFor": list(view.waiting_for[:_MAX_NAMED_MEMBERS]) if view is not None else [],
        "reserved": [
            {"node": node, "members": members, "gpus": cards}
            for node, members, cards in (view.reserved if view is not None else ())
        ],
    }
    running = phase is GangPhase.RUNNING
    condition = {
        "type": "Running",
        "status": "True" if running else "False",
        "reason": str(phase),
        "message": reason or ("all required pods have a node" if running else "not all required pods have a node"),
        "observedGeneration": group_record.generation,
    }
    return document | {"conditions": [condition]}


def _parse_time(text: object) -> float | None:
    time = parse_timestamp(text)
    return None if time is None else time.timestamp()


def _integer_field(spec: Mapping[str, Any], name: str) -> int | None:
    number = spec.get(name)
    return number if type(number) is int else None
