"""A pod to be placed, read from its JSON, for filter, preempt, bind, gangs, and nominations.

All code that places a pod uses this class, whether the pod's JSON comes from kube-scheduler or from the watch. Each
property is computed at its first use. `podinfo` decodes all pods of the watch, faster and with fewer fields.
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
from cardwise.kube.objects import pods
from cardwise.kube.pods import eligible, loads
from extender.records import feasiblenodes
from extender.records.podref import PodRef

DEFAULT_SCHEDULER: Final = "default-scheduler"
# The reason of the condition PodScheduled if kube-scheduler has found no node. kube-scheduler nominates a node only
# afterwards.
UNSCHEDULABLE_REASON: Final = "Unschedulable"
# Maximum number of bytes of a pod's constraints on its node (some thirty conditions) with which the pod may be
# nominated: all nodes are compared with the constraints under the state's lock. The API server allows ten thousand
# conditions.
MAX_CONSTRAINTS: Final = 1024

# Labels that contain the pod's number, so they differ between pods of the same workload.
_FIELDS_OF_ONE_POD = (
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
_SHAPE_FIELDS = (
    "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "overhead", "priority", "schedulerName",
    "runtimeClassName", "resources", "hostNetwork", "preemptionPolicy",
)  # fmt: skip
_CONTAINER_SHAPE_FIELDS = ("resources", "ports", "restartPolicy")
_PREFERRED_AFFINITY_FIELD = "preferredDuringSchedulingIgnoredDuringExecution"
# kube-scheduler calls an extender's bind only for pods with a resource that begins so.
_OWN_RESOURCE_PREFIXES = (names.CLASS_PREFIX, "aliyun.com/gpu-")

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pending pod: its request for cards, its cpu and memory (`load`), and its constraints on nodes (as a key).

    version: the resourceVersion, as last seen.
    nominated_node: the node where kube-scheduler preempts for the pod; None for none.
    created: the creationTimestamp.
    rank: the pod's position in the order, as a gang of one.
    wants_one_node: whether the pod's annotation says that filter returns only one node.
    """

    ref: PodRef
    request: PodRequest
    load: Load = Load()
    version: str = ""
    nominated_node: str | None = None
    created: str = ""
    scheduler: str = ""
    rank: Rank = (0, 0, "", "")
    constraints: bytes = b""
    wants_one_node: bool = False

    @property
    def uid(self) -> str:
        return self.ref.uid


class Pod:
    """A pod, read from JSON that comes from the API server or that `wire` has checked."""

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
        """The pod's creationTimestamp. Comparing the texts compares the times."""
        return self._metadata.get("creationTimestamp") or ""

    @property
    def scheduler(self) -> str:
        return self._spec.get("schedulerName") or DEFAULT_SCHEDULER

    @property
    def priority(self) -> int:
        return self._spec.get("priority") or 0

    @property
    def node(self) -> str | None:
        """The node that the pod is bound to, or None."""
        return self._spec.get("nodeName") or None

    @property
    def terminating(self) -> bool:
        """Whether the pod is being deleted."""
        return bool(self._metadata.get("deletionTimestamp"))

    @property
    def ended(self) -> bool:
        """Whether the pod's phase is final, and the kubelet reports no running container.

        `podinfo` also detects a terminating pod whose containers end before its phase is final.
        """
        running = any((status.get("state") or {}).get("running") is not None for status in statuses_of(self._manifest))
        return (self._manifest.get("status") or {}).get("phase") in names.FINISHED_PHASES and not running

    @property
    def gang(self) -> str | None:
        """The name of the pod's gang, or None."""
        return self._labels.get(names.GANG) or None

    @property
    def grouped(self) -> bool:
        """Whether the pod names a PodGroup of Kubernetes.

        kube-scheduler filters all members of a PodGroup before it binds any member. When it gives up, extenders are not
        informed. After a refused bind, it tries the member again at once.
        """
        return bool(self._spec.get("schedulingGroup"))

    # Its requests.

    @cached_property
    def request(self) -> PodRequest | None:
        """The pod's request for cards and devices; None if it requests none. Raises InvalidRequest."""
        return request.parse_mutated(self._manifest)

    @cached_property
    def load(self) -> Load:
        """The cpu, memory and pod slots that the pod uses on its node."""
        return loads.load_of_pod(pods.spec_of(self._spec))

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
    def unscheduled_reason(self) -> str | None:
        """Why kube-scheduler has not placed the pod, from the pod's condition; None if the pod was not tried yet."""
        conditions = (self._manifest.get("status") or {}).get("conditions") or ()
        reasons = (condition.get("reason") for condition in conditions if condition.get("type") == "PodScheduled")
        return next(reasons, None) or None

    @property
    def nominated_node(self) -> str | None:
        """The node where kube-scheduler preempts for the pod, or None.

        Also None if the pod may not preempt, or if the status had the node before kube-scheduler first tried the pod.
        In these cases no pods are preempted on that node.
        """
        return self.status_node if self.unscheduled_reason == UNSCHEDULABLE_REASON and self.may_preempt else None

    @property
    def status_node(self) -> str | None:
        """The node in the pod's status, for any reason, or None. kube-scheduler tries this node first."""
        return (self._manifest.get("status") or {}).get("nominatedNodeName") or None

    @property
    def slots(self) -> frozenset[str]:
        """The names of the containers with a slot: the webhook adds one to each container that requests cards or
        devices.
        """
        return frozenset(
            str(container.get("name"))
            for container in self._containers()
            if names.SHARE in ((container.get("resources") or {}).get("limits") or ())
        )

    # How kube-scheduler handles it.

    @property
    def is_bound_by_extender(self) -> bool:
        """Whether kube-scheduler may call an extender to bind the pod.

        Such a pod has no gate, and it requests a resource of Cardwise or is in a gang. With a claim, kube-scheduler
        binds the pod by itself.
        """
        return not (self._spec.get("schedulingGates") or self._spec.get("resourceClaims")) and (
            bool(self.gang)
            or any(resource.startswith(_OWN_RESOURCE_PREFIXES) for resource in self._requested_resources)
        )

    @property
    def may_preempt(self) -> bool:
        """Whether the pod's PriorityClass allows that other pods are evicted for it."""
        return bool(self._spec.get("preemptionPolicy") != "Never")

    def one_best_node(self, *, default: bool) -> bool:
        """Whether filter returns one node for the pod.

        default: the result for pods that have neither soft preferences nor the annotation.

        False for a pod with soft preferences, unless the annotation says otherwise: only kube-scheduler can weigh soft
        preferences. Always True for a member of a PodGroup of Kubernetes. kube-scheduler filters the next member before
            it binds the present one, and filter must not offer the same capacity to both.
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
        """The pod's position in the order of gangs; a single pod is treated as a gang of one."""
        single_member = Member(
            uid=self.uid,
            name=self.ref.name,
            created=self.created,
            priority=self.priority,
            queue_priority=self._queue_priority(),
        )
        return gangs.gang_rank(single_member, single_member.priority, None, "")

    def member(self) -> Member:
        """The pod as a member of its gang."""
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
            is_counted=not self.terminating and status.get("phase") != "Failed",
            gated=gangs.is_gated(self._manifest),
            foreign_gate=gangs.foreign_gate(self._manifest),
            node=self.node or "",
            minimum=membership.minimum if membership is not None else None,
            foreign_podgroup=membership.foreign_podgroup if membership is not None else None,
            priority=self.priority,
            queue_priority=self._queue_priority(),
            shape=self._shape() if not self.node else "",
            request=card_request,
            load=self.load,
            problem=problem if not self.node else "",
        )

    def waiting(self) -> WaitingPod:
        """The pod as a WaitingPod. The pod must have no node. Raises InvalidRequest."""
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
        """Whether the pod may be nominated before kube-scheduler calls filter for it."""
        return not (
            not self.version
            or self.terminating
            or self._spec.get("schedulingGates")
            or self.gang
            or self.grouped
            or not self.one_best_node(default=True)
            # Not with volumes: a claim may wait for its first consumer. Then kube-scheduler itself nominates the node
            # while the volume is created, which may take longer than a nomination lasts.
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
        return any(
            (affinity.get(kind) or {}).get(_PREFERRED_AFFINITY_FIELD)
            for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")
        )

    def _queue_priority(self) -> int | None:
        """The queue priority in the pod's annotation, which may change at any time; None if it is malformed."""
        try:
            return gangs.queue_priority(self.annotations)
        except InvalidRequest:
            return None

    def _shape(self) -> str:
        """A key that is equal for pods for which the same nodes are feasible for kube-scheduler."""
        shape = {
            "labels": {key: label_value for key, label_value in self._labels.items() if key not in _FIELDS_OF_ONE_POD},
            "spec": {key: self._spec[key] for key in _SHAPE_FIELDS if key in self._spec},
            "containers": [
                {key: entry[key] for key in _CONTAINER_SHAPE_FIELDS if key in entry} for entry in self._containers()
            ],
            "claims": [entry.get("persistentVolumeClaim") for entry in self._spec.get("volumes") or ()],
        }
        return blake2b(_encode(shape), digest_size=12).hexdigest()
