"""Finds the pods that `cardwise defrag` may move: a controller recreates them, and they can run on other nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from cardwise.cli.cluster import liveworkload, published, workloads
from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.core.api import names, request
from cardwise.core.defrag.moving import MovablePod
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.kube.pods import eligible
from cardwise.kube.pods.budgets import Budgets

_JOB_KIND: Final = ("batch", "Job")  # API group and kind: other API groups have a kind Job too
_RECREATING_KINDS: Final = (_JOB_KIND, ("apps", "ReplicaSet"), ("apps", "StatefulSet"), ("", "ReplicationController"))
_KINDS_TIED_TO_NODE: Final = ("DaemonSet", "Node")  # the pods of these owners are recreated on the same node
_DEFAULT_BACKOFF_LIMIT: Final = 6  # the default backoffLimit of a Job in Kubernetes
_JOB_FAILING_ACTIONS: Final = ("FailJob", "FailIndex")  # by these actions, an eviction fails the Job or an index of it
_EVICTION_IGNORING_ACTIONS: Final = ("Ignore",)
_EVICTION_CONDITION: Final = "DisruptionTarget"  # the condition of an evicted pod
_NVIDIA_TOLERATION: Final = {"key": names.NVIDIA_GPU, "operator": "Exists", "effect": "NoSchedule"}
_STATE_TAINT_PREFIX: Final = "node.kubernetes.io/"  # the prefix of Kubernetes' own taints


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The objects that `defrag` reads. `jobs`: the Jobs of the pods, by UID."""

    pods: Sequence[Json]
    nodes: Sequence[Json]
    jobs: Mapping[str, Json]
    budgets: Budgets
    published: PublishedPolicy
    now: datetime


@dataclass(slots=True)
class MovablePods:
    """The pods that may be moved.

    objects: the decoded objects of these pods, by UID.
    unmovable: the number of pods that may not be moved, by the reason.
    """

    pods: list[MovablePod] = field(default_factory=list)
    objects: dict[str, Json] = field(default_factory=dict)
    unmovable: Counter[str] = field(default_factory=Counter)


def find_movable_pods(facts: ClusterFacts, ledger: Ledger, is_candidate: Callable[[Holding], bool]) -> MovablePods:
    """Find the pods that may be moved. Considers only pods whose cards pass `is_candidate`."""
    movable = MovablePods()
    for pod in facts.pods:
        holding = ledger.holding(pod["metadata"].get("uid", ""))
        if holding is None or not holding.assignment.containers or not is_candidate(holding):
            continue
        reason = _unmovable_reason(pod, facts)
        if ledger.nodes_of(holding) != {holding.node}:
            # The machine was renamed: no kubelet would end the pod there.
            reason = reason or "hold GPUs that another node reports now"
        pod_request = None
        try:
            pod_request = request.parse_mutated(pod)
        except InvalidRequest:
            reason = reason or "have an invalid request"
        if reason or pod_request is None:
            movable.unmovable[reason or "no longer request a GPU"] += 1
            continue
        movable.objects[holding.uid] = pod
        owner = workloads.controller_of(pod).get("uid", "")
        movable.pods.append(
            MovablePod(
                uid=holding.uid,
                request=pod_request,
                load=liveworkload.load_of(pod),
                policy=published.policy_of_pod(pod, facts.published),
                nodes=allowed_nodes(pod, facts.nodes, ledger),
                priority=int(pod["spec"].get("priority") or 0),
                mem=holding.assignment.mem,
                age=_age_seconds(pod, facts.now),
                owner=owner,
                at_most=count_remaining_failures(facts.jobs.get(owner)) if is_job_pod(pod) else None,
            )
        )
    return movable


def has_job_pods(pods: Iterable[Json]) -> bool:
    """Whether any of the pods belongs to a Job."""
    return any(map(is_job_pod, pods))


def is_job_pod(pod: Json) -> bool:
    """Whether the pod's controller is a Job of Kubernetes."""
    return _group_and_kind(workloads.controller_of(pod)) == _JOB_KIND


def _group_and_kind(owner: Json) -> tuple[str, str | None]:
    """The API group and the kind of a pod's owner."""
    return owner.get("apiVersion", "").rpartition("/")[0], owner.get("kind")


def _unmovable_reason(pod: Json, facts: ClusterFacts) -> str | None:
    """Why the pod may not be moved, as the end of "3 pods ..."; None if it may."""
    metadata = pod["metadata"]
    annotations, labels = annotations_of(pod), labels_of(pod)
    owner = workloads.controller_of(pod)
    if not owner:
        return "have no controller that would recreate them"
    if owner.get("kind") in _KINDS_TIED_TO_NODE:
        return "belong to a DaemonSet"
    if is_job_pod(pod) and count_remaining_failures(facts.jobs.get(owner.get("uid", ""))) == 0:
        return "belong to Jobs that would fail because of the eviction"
    if _group_and_kind(owner) not in _RECREATING_KINDS and annotations.get(names.SAFE_TO_EVICT) != "true":
        # A workflow or a training operator may fail as a whole if one of its pods is deleted.
        return f"belong to other controllers and lack the annotation {names.SAFE_TO_EVICT}: true"
    if metadata.get("deletionTimestamp"):
        return "are ending"
    if labels.get(names.GANG):
        return "are members of gangs"
    if annotations.get(names.NO_DEFRAG) == "true":
        return f"say {names.NO_DEFRAG}"
    if annotations.get(names.SAFE_TO_EVICT) == "false":
        return f"say {names.SAFE_TO_EVICT}: false"
    if any(
        allowed < 1
        for allowed in facts.budgets.allowed_disruptions(
            facts.budgets.covering_keys(metadata["namespace"], labels)
        ).values()
    ):
        return "are protected by a PodDisruptionBudget"
    constraint = eligible.other_constraint(pod)
    return f"are tied to their node by {constraint}" if constraint else None


def count_remaining_failures(job: Json | None) -> int | None:
    """Count the pods that a Job may lose by eviction before it fails. None: any number; 0 if the Job does not exist.

    An evicted pod counts as a failure, unless the Job's first rule ignores evictions. If each index has its own limit,
    the number is 0, since the Job's status does not show the remaining failures of an index.
    """
    spec = (job or {}).get("spec") or {}
    rules = (spec.get("podFailurePolicy") or {}).get("rules") or ()
    if (
        job is None
        or spec.get("backoffLimitPerIndex") is not None
        or any(_failure_rule_matches_eviction(rule, _JOB_FAILING_ACTIONS) for rule in rules)
    ):
        return 0
    if rules and _failure_rule_matches_eviction(
        rules[0], _EVICTION_IGNORING_ACTIONS
    ):  # only the first rule: an earlier rule may count the exit code as a failure
        return None
    status = job.get("status") or {}
    failed = (status.get("failed") or 0) + len((status.get("uncountedTerminatedPods") or {}).get("failed") or ())
    return max(0, int(spec.get("backoffLimit", _DEFAULT_BACKOFF_LIMIT)) - failed)


def _failure_rule_matches_eviction(rule: Json, actions: Sequence[str]) -> bool:
    """Whether a rule of a podFailurePolicy applies one of these actions to an evicted pod."""
    conditions = rule.get("onPodConditions") or ()
    return rule.get("action") in actions and any(
        condition.get("type") == _EVICTION_CONDITION for condition in conditions
    )


def allowed_nodes(pod: Json, nodes: Sequence[Json], ledger: Ledger) -> frozenset[str] | None:
    """The existing nodes that the pod may use; None if it may use all nodes with cards.

    The ledger may still have cards of deleted nodes.
    """
    allowed = eligible.eligible_nodes(pod, nodes)
    return None if ledger.nodes_by_name().keys() <= allowed else allowed


def common_tolerations(facts: ClusterFacts, ledger: Ledger) -> list[Json]:
    """The tolerations that the webhook adds to every pod with a GPU request.

    By default this is a toleration of NVIDIA's taint. A setting of the webhook may name more taints, which all pods
    with cards then tolerate. So the tolerations that these pods have in common are returned, too. Leaves out
    tolerations for nodes that are down or cordoned.
    """
    gpu_pods = [pod for pod in facts.pods if ledger.holding(pod["metadata"].get("uid", "")) is not None]
    first, *other_tolerations = [pod["spec"].get("tolerations") or [] for pod in gpu_pods] or [[]]
    shared_tolerations = [
        toleration
        for toleration in first
        if _tolerates_single_taint(toleration) and all(toleration in tolerations for tolerations in other_tolerations)
    ]
    return [_NVIDIA_TOLERATION, *shared_tolerations]


def _tolerates_single_taint(toleration: Json) -> bool:
    """Whether a toleration is for a single taint, and not for one of Kubernetes' taints of a node's state."""
    key = toleration.get("key") or ""
    return bool(key) and not key.startswith(_STATE_TAINT_PREFIX)


def _age_seconds(pod: Json, now: datetime) -> float:
    """Seconds since the pod was started."""
    status, metadata = pod.get("status") or {}, pod["metadata"]
    started_at = parse_timestamp(status.get("startTime") or metadata.get("creationTimestamp"))
    return 0.0 if started_at is None else (now - started_at).total_seconds()
