"""A pod that is to be placed, read from its JSON, for filter, preempt, bind, gangs, and nominating ahead.

All code that places a pod reads it here, whether kube-scheduler sends it or the watch shows it. Each property is
computed when it is first used. `podinfo` reads all pods of the watch faster, and keeps less of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final

import msgspec

from cardwise.core.api import names, request
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.values.decoded import Json, statuses_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube.pods import eligible, loads
from extender.records import feasiblenodes
from extender.records.podref import PodRef

DEFAULT_SCHEDULER: Final = "default-scheduler"
# The reason of the condition PodScheduled when kube-scheduler has found no node; it does so before it nominates one.
REFUSED: Final = "Unschedulable"
# Bytes of a pod's constraints on its node (some thirty conditions) up to which it is nominated ahead. All nodes are
# compared with them under the state's lock; the API server allows ten thousand.
MAX_CONSTRAINTS: Final = 1024

# Labels that differ between pods of one workload only by the pod's number.
_OF_ONE_POD = (
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
_SHAPE = (
    "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "overhead", "priority", "schedulerName",
    "runtimeClassName", "resources", "hostNetwork", "preemptionPolicy",
)  # fmt: skip
_CONTAINER_SHAPE = ("resources", "ports", "restartPolicy")
_SOFT = "preferredDuringSchedulingIgnoredDuringExecution"
# kube-scheduler asks no extender to bind a pod that names none of these.
_BOUND_BY_US = (names.CLASS_PREFIX, "aliyun.com/gpu-")

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pending pod and its request: cards, cpu and memory (`load`), and constraints on its node (a key).

    version: the resourceVersion, as last seen.
    nominated_node: the node where kube-scheduler preempts for it, or "".
    created: the creationTimestamp.
    rank: its place in the order, as a gang of one.
    wants_one_node: its annotation says that the extender chooses the node.
    """

    ref: PodRef
    request: PodRequest
    load: Load = Load()
    version: str = ""
    nominated_node: str = ""
    created: str = ""
    scheduler: str = ""
    rank: Rank = (0, 0, "", "")
    constraints: bytes = b""
    wants_one_node: bool = False

    @property
    def uid(self) -> str:
        return self.ref.uid


class Pod:
    """A pod by its JSON, which comes from the API server or was checked by `wire`."""

    def __init__(self, manifest: Json) -> None:
        self._manifest = manifest
        self._metadata: Json = manifest.get("metadata") or {}
        self._spec: Json = manifest.get("spec") or {}
        self.annotations: Mapping[str, str] = self._metadata.get("annotations") or {}
        self._labels: Mapping[str, str] = self._metadata.get("labels") or {}
        self.ref = PodRef(
            self._metadata.get("uid") or "", self._metadata.get("namespace") or "", self._metadata.get("name") or ""
        )

    # The pod itself.

    @property
    def uid(self) -> str:
        return self.ref.uid

    @property
    def version(self) -> str:
        """The pod's resourceVersion."""
        return self._metadata.get("resourceVersion") or ""

    @property
    def created(self) -> str:
        """The pod's creationTimestamp. These sort as text."""
        return self._metadata.get("creationTimestamp") or ""

    @property
    def scheduler(self) -> str:
        return self._spec.get("schedulerName") or DEFAULT_SCHEDULER

    @property
    def priority(self) -> int:
        return self._spec.get("priority") or 0

    @property
    def node(self) -> str:
        """The node that the pod is bound to, or ""."""
        return self._spec.get("nodeName") or ""

    @property
    def terminating(self) -> bool:
        """Whether the pod is being deleted."""
        return bool(self._metadata.get("deletionTimestamp"))

    @property
    def ended(self) -> bool:
        """Whether the pod's phase is final, and the kubelet reports no running container.

        `podinfo` also detects a pod that is being deleted, and whose containers have ended before its phase is final.
        """
        running = any((status.get("state") or {}).get("running") is not None for status in statuses_of(self._manifest))
        return (self._manifest.get("status") or {}).get("phase") in names.FINISHED_PHASES and not running

    @property
    def gang(self) -> str:
        """The name of the pod's gang, or ""."""
        return str(self._labels.get(names.GANG) or "")

    @property
    def grouped(self) -> bool:
        """Whether the pod names a PodGroup of Kubernetes.

        kube-scheduler filters all members of a PodGroup before it binds any, tells no extender when it gives up, and
        tries a member again at once when its bind was refused.
        """
        return bool(self._spec.get("schedulingGroup"))

    # Its requests.

    @cached_property
    def request(self) -> PodRequest | None:
        """The pod's request for cards and devices; None if it requests none. Raises InvalidRequest."""
        return request.parse_mutated(self._manifest)

    @cached_property
    def load(self) -> Load:
        """The cpu, memory and pods that the pod takes of its node."""
        return loads.load_of_pod(msgspec.convert(self._spec, loads.PodSpec))

    @cached_property
    def _requested_resources(self) -> frozenset[str]:
        """The resources in the limits of the pod's containers."""
        limits = ((container.get("resources") or {}).get("limits") or () for container in self._containers())
        return frozenset(name for amounts in limits for name in amounts)

    @property
    def classes(self) -> frozenset[str]:
        """The classes that the pod requests."""
        return frozenset(
            resource_class for resource in self._requested_resources if (resource_class := names.class_of(resource))
        )

    @property
    def unscheduled(self) -> str:
        """Why kube-scheduler has not placed the pod, by its condition; "" if it was not tried yet."""
        conditions = (self._manifest.get("status") or {}).get("conditions") or ()
        return next(
            (condition.get("reason") or "" for condition in conditions if condition.get("type") == "PodScheduled"), ""
        )

    @property
    def nominated_node(self) -> str:
        """The node where kube-scheduler preempts for the pod, or "".

        A node that was named before kube-scheduler tried the pod does not count, nor does the node of a pod that may
        not preempt.
        """
        return self.status_node if self.unscheduled == REFUSED and self.may_preempt else ""

    @property
    def status_node(self) -> str:
        """The node that the pod's status names, for whatever reason, or "": kube-scheduler tries it first."""
        return str((self._manifest.get("status") or {}).get("nominatedNodeName") or "")

    @property
    def slots(self) -> frozenset[str]:
        """The names of the containers with a slot: the webhook gives one to each that requests cards or devices."""
        return frozenset(
            str(container.get("name"))
            for container in self._containers()
            if names.SHARE in ((container.get("resources") or {}).get("limits") or ())
        )

    # How kube-scheduler handles it.

    @property
    def bindable(self) -> bool:
        """Whether an extender may be called to bind the pod: it has no gate, and requests a resource of ours or is in a
        gang.
        """
        return not self._spec.get("schedulingGates") and (
            bool(self.gang) or any(resource.startswith(_BOUND_BY_US) for resource in self._requested_resources)
        )

    @property
    def may_preempt(self) -> bool:
        """Whether the pod's PriorityClass allows that other pods are evicted for it."""
        return bool(self._spec.get("preemptionPolicy") != "Never")

    def one_best_node(self, *, default: bool) -> bool:
        """Whether filter returns one node for the pod.

        default: for pods without preferences and annotation.

        It does not for a pod with soft preferences, which only kube-scheduler can weigh; the annotation decides in any
        case. A member of a PodGroup of Kubernetes always gets one node: the next member is filtered before this one is
        bound, and must not be offered the same capacity.
        """
        if self.grouped:
            return True
        requested_setting = self.annotations.get(names.ONE_NODE)
        if requested_setting in ("true", "false"):
            return requested_setting == "true"
        if not default or self._prefers():
            return False
        spreads = self._spec.get("topologySpreadConstraints") or ()
        return all(spread.get("whenUnsatisfiable") != "ScheduleAnyway" for spread in spreads)

    # The order of pods.

    @cached_property
    def rank(self) -> Rank:
        """The pod's place in the order of gangs: a single pod is a gang of one."""
        single_member = Member(
            uid=self.uid,
            name=self.ref.name,
            created=self.created,
            priority=self.priority,
            queue_priority=self._queue_priority(),
        )
        return gangs.gang_rank(single_member, single_member.priority, None, "")

    def member(self) -> Member:
        """The pod as a member of its gang, with a node or without."""
        status = self._manifest.get("status") or {}
        membership, card_request, problem = None, None, ""
        try:
            membership = gangs.gang_of(self._manifest)
            card_request = self.request if not self.node else None
        except InvalidRequest as error:
            problem = str(error)
        return Member(
            uid=self.uid,
            name=self.ref.name,
            created=self.created,
            there=not self.terminating and status.get("phase") != "Failed",
            gated=gangs.is_gated(self._manifest),
            foreign_gate=gangs.foreign_gate(self._manifest),
            node=self.node,
            minimum=membership.minimum if membership is not None else None,
            foreign=membership.foreign if membership is not None else None,
            priority=self.priority,
            queue_priority=self._queue_priority(),
            shape=self._shape() if not self.node else "",
            request=card_request,
            load=self.load,
            problem=problem if not self.node else "",
        )

    def waiting(self) -> WaitingPod:
        """The pod, which has no node, as a WaitingPod. Raises InvalidRequest."""
        return WaitingPod(
            self.ref,
            self.request or PodRequest(containers=(), priority=self.priority),
            self.load,
            version=self.version,
            nominated_node=self.nominated_node,
            created=self.created,
            scheduler=self.scheduler,
            rank=self.rank,
            constraints=self._constraints,
            wants_one_node=self.one_best_node(default=False),
        )

    @property
    def predictable(self) -> bool:
        """Whether the pod may be nominated before kube-scheduler asks for it."""
        return not (
            not self.version
            or self.terminating
            or self._spec.get("schedulingGates")
            or self.gang
            or self.grouped
            or not self.one_best_node(default=True)
            # By volumes too: a claim may wait for its first consumer. Then kube-scheduler nominates the node itself
            # while the volume is made, which may take longer than a reservation ahead lasts.
            or eligible.other_constraint(self._manifest)
            or len(self._constraints) > MAX_CONSTRAINTS
        )

    # Parsing.

    @cached_property
    def _constraints(self) -> bytes:
        return feasiblenodes.constraints_key(self._spec)

    def _containers(self) -> Iterator[Json]:
        yield from self._spec.get("initContainers") or ()
        yield from self._spec.get("containers") or ()

    def _prefers(self) -> bool:
        """Whether the pod has soft preferences for nodes or for other pods."""
        affinity = self._spec.get("affinity") or {}
        return any((affinity.get(kind) or {}).get(_SOFT) for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity"))

    def _queue_priority(self) -> int | None:
        """The place in the order from the pod's annotation. It may change at any time; a malformed one is ignored."""
        try:
            return gangs.queue_priority(self.annotations)
        except InvalidRequest:
            return None

    def _shape(self) -> str:
        """A key that is equal for pods that kube-scheduler cannot tell apart when it decides where they may go."""
        shape = {
            "labels": {key: label_value for key, label_value in self._labels.items() if key not in _OF_ONE_POD},
            "spec": {key: self._spec[key] for key in _SHAPE if key in self._spec},
            "containers": [
                {key: entry[key] for key in _CONTAINER_SHAPE if key in entry} for entry in self._containers()
            ],
            "claims": [entry.get("persistentVolumeClaim") for entry in self._spec.get("volumes") or ()],
        }
        return blake2b(_encode(shape), digest_size=12).hexdigest()
