"""Compact records of the pods that the watch shows, with only the fields that the extender needs.

The memory for 60,000 pods depends on these records: a pod of `cardwise.kube.objects` would take six times as much.
"""

from collections.abc import Mapping
from sys import intern
from typing import NamedTuple

import msgspec

from cardwise.core.api import assignment, claims, names, policies
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON_CLIENT, MpsClient
from cardwise.core.api.request import Load
from cardwise.core.gangs.gangs import Member
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import wire
from cardwise.kube.objects import pods
from cardwise.kube.objects.meta import ObjectMeta
from cardwise.kube.objects.pods import Pod, mps_client_of_pod
from cardwise.kube.pods import resizes
from cardwise.kube.pods.budgets import TOO_MANY_LABELS
from extender.records import shared
from extender.records.claim import PendingByClaim
from extender.records.nodeinfo import PlacedPod
from extender.records.pod import UNSCHEDULABLE_REASON, WaitingPod
from extender.records.pod import Pod as PodToPlace

# The JSON of a pod that requests or holds cards contains one of these texts; "/" is never escaped in it.
_SIGNS_OF_GPU_POD = (b"cardwise.dev/", b"ALIYUN_COM_GPU_MEM_", b"gpushare.allocation", b"aliyun.com/gpu-mem")
_SHARE_RESOURCE = names.SHARE.encode()
_NO_LOAD = Load(0, 0, 0)
_FAILED_CALL_REASON = (
    "SchedulerError"  # the reason of the condition after a failed call of kube-scheduler to the extender
)


class PodRecord(PlacedPod, frozen=True, gc=False):
    """A pod that is bound or finished, and that requests or holds cards or is in a gang.

    finished: whether the pod's phase is final; then the pod uses no resources of its node.
    ended: whether the kubelet reports that no container of the pod runs or will run.
    problem: why the pod's annotations could not be read.
    mps_client: how the pod uses MPS.
    bound_directly: whether another program has bound the pod. Then the pod lacks the requested cards or devices.
    has_claim: whether the pod's share is allocated by ResourceClaim.
    peer_key: see `PodRequest.peer_key`; None for a pod that is being deleted.

    It is a Struct, since creating a Struct takes a tenth of the time of a dataclass.
    """

    assignment: Assignment | None = None
    finished: bool = False
    ended: bool = False
    problem: str = ""
    gang: str | None = None
    member: Member | None = None
    mps_client: MpsClient = COMMON_CLIENT
    bound_directly: bool = False
    has_claim: bool = False
    peer_key: str | None = None

    @property
    def holds_cards(self) -> bool:
        return self.assignment is not None


class UnservedPod(NamedTuple):
    """A pod whose call was served by no extender. kube-scheduler will try the pod again."""

    priority: int
    scheduler: str


class WaitingRecord(PodRecord, frozen=True, gc=False):
    """A `PodRecord` of a pod that has no node yet.

    classes: the classes that the pod requests.
    waiting_pod: the pod, if kube-scheduler preempts for it or if the pod may be nominated; else None.
    status_node: the node in the pod's status, if no pods are preempted there. An extender may have written this node.
    turned_away: set if the pod is pending because no extender served its call.
    refused: whether kube-scheduler has tried the pod and found no node.
    is_bound_by_extender: see `Pod.is_bound_by_extender`.
    by_claim: the pod, if the extender allocates its share by ResourceClaim.
    claim_problem: why the extender cannot do so, for the user; "" if it can.
    """

    classes: frozenset[str] = frozenset()
    waiting_pod: WaitingPod | None = None
    status_node: str = ""
    turned_away: UnservedPod | None = None
    refused: bool = False
    is_bound_by_extender: bool = False
    by_claim: PendingByClaim | None = None
    claim_problem: str = ""


_decode_any = msgspec.json.Decoder().decode
_MAX_LABEL_CHARACTERS = (
    8192  # maximum number of characters of a pod's labels that are kept; most pods have some hundred
)


def decode_pod(raw: bytes) -> tuple[str, PlacedPod] | None:
    """Decode a pod; returns its key and its record. None if the extender ignores the pod.

    The record has fewer fields for a pod that requests no resource of Cardwise.
    """
    pod = pods.decode(raw)
    if not any(sign in raw for sign in _SIGNS_OF_GPU_POD):
        return _record_without_request(pod)
    meta = pod.metadata
    if not pod.spec.node_name:
        return meta.uid, _waiting_pod_record(raw, pod)
    if pod.static:
        return _record_without_request(pod)
    gang = meta.labels.get(names.GANG) or None
    member = _decode_whole_pod(raw).member() if gang else None
    assigned, problem = None, ""
    try:
        assigned = assignment.decode(meta.annotations, loads=_decode_any)
    except assignment.InvalidAssignment as error:
        problem = str(error)
    finished = pod.finished
    bound_directly = (
        assigned is None and not problem and not finished and _SHARE_RESOURCE in raw and _decode_whole_pod(raw).slots
    )
    if assigned is None and not problem and member is None and not bound_directly:
        return _record_without_request(pod)
    return meta.uid, PodRecord(
        *_placed_pod_fields(pod, counts=not finished),
        grouped=pod.spec.scheduling_group is not None,
        group=None if gang or finished else _kubernetes_podgroup(pod),
        assignment=assigned,
        finished=finished,
        ended=_has_ended(pod),
        problem=problem,
        gang=gang,
        member=member,
        mps_client=mps_client_of_pod(meta, pod.spec, assigned.containers) if assigned is not None else COMMON_CLIENT,
        bound_directly=bool(bound_directly),
        has_claim=pod.spec.claim_name is not None,
        peer_key=_peer_key(meta, gang),
    )


def _peer_key(meta: ObjectMeta, gang: str | None) -> str | None:
    policy = meta.annotations.get(names.POLICY)
    if policy is None or meta.deletion_timestamp is not None:
        return None
    controller = meta.controller.uid if meta.controller is not None else None
    key = policies.peer_key(policy, namespace=meta.namespace, gang=gang, controller=controller)
    return intern(key) if key is not None else None


def _decode_whole_pod(raw: bytes) -> PodToPlace:
    return PodToPlace(_decode_any(wire.trim_object(raw)))


def reflector_key(key: str, record: PlacedPod) -> str:
    """The key for the reflector of a record from `decode_pod`: the pod's "namespace/name"."""
    return f"{record.namespace}/{record.name}" if isinstance(record, PodRecord) else key


def _waiting_pod_record(raw: bytes, record: Pod) -> PodRecord:
    """The record of a pod without a node."""
    trimmed = wire.trim_object(raw)
    manifest = _decode_any(trimmed)
    pod = PodToPlace(manifest)
    member = pod.member() if pod.gang else None
    if record.finished:  # no kubelet will start the pod
        return PodRecord(**pod.ref._asdict(), finished=True, ended=True, gang=pod.gang, member=member)
    reason, nominated_node = pod.unscheduled_reason, record.status.nominated_node_name
    is_unanswered, refused, is_nominated = (
        reason == _FAILED_CALL_REASON,
        reason == UNSCHEDULABLE_REASON,
        bool(pod.nominated_node),
    )
    is_new = not (refused or is_unanswered or nominated_node)
    by_claim, claim_problem = None, ""
    try:
        by_claim = _pending_by_claim(pod, manifest, trimmed, refused=refused)
    except InvalidRequest as error:
        claim_problem = str(error)
    return WaitingRecord(
        **pod.ref._asdict(),
        group=None if pod.gang else _kubernetes_podgroup(record),
        gang=pod.gang,
        member=member,
        classes=pod.classes,
        waiting_pod=_waiting_pod(pod) if is_nominated or (is_new and pod.predictable) else None,
        status_node="" if is_nominated else nominated_node,
        # kube-scheduler does not try a pod with a gate, even if the condition is in its status.
        turned_away=UnservedPod(pod.priority, intern(pod.scheduler))
        if is_unanswered and pod.is_bound_by_extender
        else None,
        refused=refused or is_unanswered,
        is_bound_by_extender=pod.is_bound_by_extender,
        by_claim=by_claim,
        claim_problem=claim_problem,
    )


def _pending_by_claim(pod: PodToPlace, manifest: Json, raw: bytes, *, refused: bool) -> PendingByClaim | None:
    """The pod without a node, if its share is allocated by claim; else None. Raises InvalidRequest."""
    gates = {str(gate.get("name")) for gate in manifest["spec"].get("schedulingGates") or ()}
    gated = names.ALLOCATION_GATE in gates
    if not (gated or manifest["spec"].get("resourceClaims")):
        return None
    claim = claims.read_pod(manifest)
    if claim is None and not (gated and pod.gang):
        return None
    is_schedulable = gates <= {names.ALLOCATION_GATE} and not pod.terminating
    volumes = manifest["spec"].get("volumes") or ()
    return PendingByClaim(
        waiting=pod.waiting(),
        manifest=raw,
        claim=claim,
        gated=gated,
        is_schedulable=is_schedulable,
        refused=refused,
        gang=pod.gang,
        scheduler=pod.scheduler,
        has_volumes=any("persistentVolumeClaim" in volume or "ephemeral" in volume for volume in volumes),
    )


def _waiting_pod(pod: PodToPlace) -> WaitingPod | None:
    try:
        return pod.waiting() if pod.request is not None else None
    except InvalidRequest:
        return None  # filter returns the error


def _record_without_request(pod: Pod) -> tuple[str, PlacedPod] | None:
    """Key and record of a pod that requests no resource of Cardwise; None if the extender ignores the pod.

    The key is "namespace/name". The reflector stores this text anyway, so the key takes no further memory.
    """
    group = _kubernetes_podgroup(pod)
    if not (pod.spec.node_name or group) or pod.finished:
        return None
    grouped = pod.spec.scheduling_group is not None
    return pod.full_name, PlacedPod(*_placed_pod_fields(pod), fixed=pod.static, grouped=grouped, group=group)


def _kubernetes_podgroup(pod: Pod) -> str | None:
    """The pod's PodGroup of Kubernetes, "namespace/name"; None if the pod names none or is being deleted."""
    if pod.spec.scheduling_group is None or pod.terminating:
        return None
    return intern(f"{pod.metadata.namespace}/{pod.spec.scheduling_group.pod_group_name}")


def _placed_pod_fields(
    pod: Pod, *, counts: bool = True
) -> tuple[str, Load, str, str, str, int, Mapping[str, str], bool]:
    """The first fields of a `PlacedPod`. `counts`: whether the pod uses resources of its node."""
    meta = pod.metadata
    return (
        intern(pod.spec.node_name),
        resizes.load_of_pod(pod) if counts else _NO_LOAD,
        meta.uid,
        intern(meta.namespace),
        meta.name,
        pod.spec.priority or 0,
        _kept_labels(meta.labels),
        pod.terminating,
    )


def _kept_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """The labels, which only the search for disruption budgets reads.

    Any user may bind plain pods with a MiB of labels, and the record of every pod is kept.
    """
    if sum(map(len, labels)) + sum(map(len, labels.values())) > _MAX_LABEL_CHARACTERS:
        return TOO_MANY_LABELS
    return shared.reuse_equal_labels(labels)


def _has_ended(pod: Pod) -> bool:
    """Whether the pod's containers have ended for good, as the kubelet reports.

    A terminated container does not prove this, since it may be restarted. Missing statuses do not prove it either: the
    kubelet may be starting the first container at this moment.
    """
    containers = pod.status.all_containers()
    if pod.finished:
        return all(container.state.running is None for container in containers)
    return (
        pod.terminating and bool(containers) and all(container.state.terminated is not None for container in containers)
    )
