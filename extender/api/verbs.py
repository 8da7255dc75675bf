"""The verbs filter, prioritize, preempt and inspect: from the arguments of a call to its result.

The verbs are independent of HTTP, so tests need no server. The verb bind is in `binding.binder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from cardwise.core.api import policies
from cardwise.core.api.request import Load
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from cardwise.core.values.refusals import Refusal
from extender.cache.quotas import FullEntry
from extender.cache.reservations import PHASE_NAMES, KnownBinding, Phase
from extender.gangs.gangtypes import MemberPlace, PlacedAlone, PlannedNode
from extender.nomination.nominator import LATEST_CREATION_TIME
from extender.placing import nodesearch
from extender.placing.placing import Call, LeaderChanged, PlacementRequest, SearchUnfinished
from extender.records.pod import Pod
from extender.records.podref import PodRef
from extender.records.wire import (
    FilterArgs,
    FilterResult,
    HostPriority,
    MetaPod,
    MetaVictims,
    PreemptArgs,
    PreemptResult,
)
from extender.state import State

MAX_SCORE = 10  # kube-scheduler's MaxExtenderPriority

# inspect hides pods in these phases: their shares count as used, but the pods are not bound yet.
_HIDDEN_PHASES = (PHASE_NAMES[Phase.RESERVED], PHASE_NAMES[Phase.WAITING], PHASE_NAMES[Phase.BINDING])
SEARCH_UNFINISHED_TEXT = (
    "the search for a node is not complete yet: none of the nodes searched so far fits the pod. The pod is tried "
    "again, and the search then continues"
)
LEADER_CHANGED_TEXT = "the leader has changed during the search for a node; the pod is tried again"
BIND_UNDECIDED_TEXT = "the outcome of an earlier bind of this pod is not known yet; the pod is tried again"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """Settings of the results.

    policy: the placement policy of pods that name none.
    one_best_node: whether filter returns only the best node, for pods that have neither soft preferences nor the
        annotation.
    """

    policy: str
    one_best_node: bool


NotifyFullQuota = Callable[[PodRef, FullEntry], None]


def filter_nodes(
    state: State,
    preferences: AnswerSettings,
    args: FilterArgs,
    notice: NotifyFullQuota | None = None,
    call: Call = Call(),
    *,
    by_claim: bool = False,
) -> FilterResult:
    """The best node for the pod; all nodes that fit if kube-scheduler should choose among them.

    by_claim: the extender itself chooses the node, and publishes it by a ResourceClaim. Then the result is one node,
        and the reservation counts cpu and memory.
    notice: called if only a quota keeps the pod pending. It must return at once.
    call: limits a search without the lock.
    """
    pod, offered = args.parsed_pod, args.candidate_names() or []
    uid = pod.uid
    try:
        request = pod.request
    except InvalidRequest as error:
        return FilterResult(error=str(error))
    if not offered:
        return _fit_result(args, [])
    if not by_claim:
        state.nominator.add_scheduler(pod.scheduler)
    if uid:
        for_bind = (request, pod.version) if request is not None and pod.version else None
        if not state.begin_attempt(uid, for_bind, grouped=pod.grouped, rank=pod.rank):
            return _refusal_result(dict.fromkeys(offered, Refusal.UNSETTLED))
    if uid and pod.gang:
        answer = _filter_member(state, preferences, args, offered)
        if answer is not None:
            return answer
    if request is None:
        return _fit_result(args, offered)  # no GPU is requested; kube-scheduler called because of the marker resource
    if uid and not state.may_place(uid, request.priority):
        return _refusal_result(dict.fromkeys(offered, Refusal.NOT_ITS_TURN))
    created = pod.created or LATEST_CREATION_TIME
    policy = policies.card_policy(request.policy, preferences.policy)
    placement_request = PlacementRequest(
        pod.ref,
        request,
        offered,
        policy,
        _load_if_scored(state, pod, policy),
        pod.rank,
        call=call,
        reserved_load=pod.load if by_claim else None,
    )
    placement: Placement | Unplaceable | KnownBinding | dict[str, int]
    try:
        if uid and (by_claim or pod.one_best_node(default=preferences.one_best_node)):
            placement = state.plan_pod(placement_request, created=created)
        else:
            placement = state.score_fitting_nodes(placement_request, created=created)
    except SearchUnfinished:
        # After an error kube-scheduler tries the pod again when its back-off ends. After a refusal it would wait for a
        # change in the cluster, and would evict other pods although a node that was not searched may take the pod.
        return FilterResult(error=SEARCH_UNFINISHED_TEXT)
    except LeaderChanged:
        return FilterResult(error=LEADER_CHANGED_TEXT)
    if isinstance(placement, KnownBinding) and placement.node not in offered:
        return _unsettled_bind_result(offered, grouped=pod.grouped)
    if isinstance(placement, Unplaceable):
        nodes = (name for name, refusal in placement.refusals.items() if refusal.resolvable)
        state.preemption.on_refused(pod, policy, nodes)
        if notice is not None and uid and Refusal.QUOTA in placement.refusals.values():
            full_entry = state.full_quota_entry(pod.ref.namespace, request)
            if full_entry is not None:
                notice(pod.ref, full_entry)
        return _refusal_result(placement.refusals)
    if not isinstance(placement, dict):
        return _fit_result(args, [placement.node])
    return _fit_result(args, list(placement))


def takes_long(args: FilterArgs) -> bool:
    """Whether filter or prioritize may take up to a second, because the pod needs a search on each node."""
    try:
        request = args.parsed_pod.request
    except InvalidRequest:
        return False
    return request is not None and nodesearch.is_needed(request, len(args.candidate_names() or ()))


def prioritize(state: State, preferences: AnswerSettings, args: FilterArgs, call: Call = Call()) -> list[HostPriority]:
    """The scores of the nodes: whole numbers from 0 to TOP. `call` limits the search as in `filter_nodes`.

    Exactly one node has TOP, since kube-scheduler chooses at random between equal scores. If the pod requests no GPU,
    or fits on no node, all scores are 0.
    """
    pod, candidates = args.parsed_pod, args.candidate_names() or []
    try:
        request = pod.request
    except InvalidRequest:
        request = None  # filter has returned the error; kube-scheduler ignores errors here
    if request is None:
        return [HostPriority(name, 0) for name in candidates]
    policy = policies.card_policy(request.policy, preferences.policy)
    scored = state.score_nodes(
        PlacementRequest(pod.ref, request, candidates, policy, _load_if_scored(state, pod, policy), pod.rank, call=call)
    )
    node_scores = list(map(scored.get, candidates))
    known_scores = [score for score in node_scores if score is not None]
    if not known_scores:
        return [HostPriority(name, 0) for name in candidates]
    max_score, min_score = max(known_scores), min(known_scores)
    width = max_score - min_score + 1
    answer = [
        HostPriority(name, 0 if score is None else (score - min_score) * MAX_SCORE // width)
        for name, score in zip(candidates, node_scores, strict=True)
    ]
    best = min([name for name, score in zip(candidates, node_scores, strict=True) if score == max_score])
    answer[candidates.index(best)].score = MAX_SCORE
    return answer


def preempt(state: State, preferences: AnswerSettings, args: PreemptArgs) -> PreemptResult:
    """The nodes where evictions make this pod fit on a GPU, with the extender's victims instead of kube-scheduler's.

    Raises InvalidRequest.
    """
    pod, scheduler_victims = args.parsed_pod, args.victim_uids_by_node()
    request, waits = pod.request, bool(pod.gang)
    if request is None and not waits:
        # kube-scheduler called because of the marker resource only.
        proposed = args.as_meta_victims().items()
        return PreemptResult(
            {
                node: proposed_victims
                for node, proposed_victims in proposed
                if state.preemption.are_pods_on(node, scheduler_victims[node])
            }
        )
    policy = policies.card_policy(request.policy if request is not None else None, preferences.policy)
    answers = state.preemption.answer_preempt(pod.waiting(), policy, scheduler_victims, member=waits)
    return PreemptResult(
        {
            node: MetaVictims([MetaPod(uid) for uid in victims.uids], victims.violations)
            for node, victims in answers.items()
        }
    )


def inspect(state: State, node: str | None = None, unit: Unit = Unit.MIB) -> dict[str, Any]:
    """The cards in the format of gpushare's `/inspect` (`gpushare-inspect.go` of gpushare-scheduler-extender).

    node: the name of the node to show; None: all nodes.
    unit: the unit of memory in the result.
    """
    ledger = state.snapshot().ledger
    if node is not None:
        shown = _inspect_node(ledger, node, unit)
        if shown is None:
            return {"nodes": [], "error": f"node {node} has no GPU that Cardwise shares"}
        return {"unit": unit, "nodes": [shown]}
    nodes = [
        shown for name in sorted(ledger.nodes_by_name()) if (shown := _inspect_node(ledger, name, unit)) is not None
    ]
    return {"unit": unit, "nodes": nodes}


def _filter_member(
    state: State, preferences: AnswerSettings, args: FilterArgs, candidates: list[str]
) -> FilterResult | None:
    """The result for a member of a gang; None if the pod is placed alone."""
    pod = args.parsed_pod
    known_binding = state.known_binding(pod.uid)
    place: MemberPlace
    if known_binding is not None:
        place = PlannedNode(known_binding.node)
    else:
        place = state.gangs.filter_member(pod.uid, candidates, pod.status_node)
    match place:
        case PlacedAlone():
            return None
        case PlannedNode(node) if node in candidates:
            return _fit_result(args, [node])
        case PlannedNode():
            return _unsettled_bind_result(candidates, grouped=pod.grouped)
        case Refusal() as refusal:
            if pod.request is not None:
                nodes = candidates if refusal is Refusal.GANG_WAITS else ()
                state.preemption.on_refused(pod, policies.card_policy(pod.request.policy, preferences.policy), nodes)
            return _refusal_result(dict.fromkeys(candidates, refusal))
        case _:
            assert_never(place)


def _load_if_scored(state: State, pod: Pod, policy: str) -> Load | None:
    """The pod's cpu and memory, if a policy needs them to score or to learn; else None."""
    return pod.load if policies.find_policy(policy).is_scored or state.policies.is_active else None


def _fit_result(args: FilterArgs, fitting: list[str]) -> FilterResult:
    # If a node fits, the reasons of the other nodes are left out: kube-scheduler does not read them then, and they
    # would cost CPU time in both processes.
    if args.nodes is None:
        return FilterResult(node_names=fitting)
    return FilterResult(nodes=args.nodes.select_nodes(set(fitting)), node_names=fitting)


def _refusal_result(refusals: Mapping[str, Refusal]) -> FilterResult:
    resolvable = {name: refusal.text for name, refusal in refusals.items() if refusal.resolvable}
    unresolvable = {name: refusal.text for name, refusal in refusals.items() if not refusal.resolvable}
    return FilterResult(node_names=[], failed_nodes=resolvable, failed_and_unresolvable_nodes=unresolvable)


def _unsettled_bind_result(candidates: list[str], *, grouped: bool) -> FilterResult:
    """The result of filter while it is unknown whether an earlier bind call has bound the pod.

    grouped: whether the pod is a member of a PodGroup of Kubernetes. Then the result is a refusal, because after an
        error kube-scheduler would end the attempt for all members.
    """
    if grouped:
        return _refusal_result(dict.fromkeys(candidates, Refusal.UNSETTLED))
    return FilterResult(error=BIND_UNDECIDED_TEXT)


def _inspect_node(ledger: Ledger, name: str, unit: Unit) -> dict[str, Any] | None:
    node = ledger.node(name)
    if node is None or not node.cards:
        return None
    pods: dict[int, list[dict[str, Any]]] = {}
    for holding in ledger.holdings(name):
        if holding.phase_name in _HIDDEN_PHASES:
            continue
        mib_by_position: dict[int, int] = {}
        for share in holding.assignment.shares():
            position = node.position(share)
            if position is not None:
                mib_by_position[position] = mib_by_position.get(position, 0) + share.mem
        for position, mem in mib_by_position.items():
            amount = min(-(-mem // unit.mib), max(node.cards[position].mem // unit.mib, 1))
            shown = {"name": holding.name, "namespace": holding.namespace, "usedGPU": amount}
            pods.setdefault(position, []).append(shown)
    devices = []
    for i, card in enumerate(node.cards):
        # Round down to whole units, as gpushare's device plugin does.
        total, free = card.mem // unit.mib, max(card.mem - node.used[i], 0) // unit.mib
        used_units = total - free if card.mem >= node.used[i] else -(-node.used[i] // unit.mib)
        devices.append({"id": card.index, "totalGPU": total, "usedGPU": used_units, "pods": pods.get(i, [])})
    return {
        "name": node.name,
        "totalGPU": sum(device["totalGPU"] for device in devices),
        "usedGPU": sum(device["usedGPU"] for device in devices),
        "devs": devices,
    }
