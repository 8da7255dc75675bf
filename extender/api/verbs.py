"""filter, prioritize, preempt and inspect: from a call to its answer, on a view of the state.

There is no HTTP here, so tests call them without a server. Bind is in `binding.binder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cardwise.core.api import policies
from cardwise.core.api.request import Load
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from cardwise.core.values.refusals import Refusal
from extender.ahead.ahead import YOUNGEST
from extender.cache.placing import PlacementRequest
from extender.cache.quotas import FullEntry
from extender.cache.reservations import MARKS, Decided, Phase
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

TOP = 10  # kube-scheduler's MaxExtenderPriority

# Counted as used, but no pod is there yet.
_UNSEEN = (MARKS[Phase.RESERVED], MARKS[Phase.WAITING], MARKS[Phase.BINDING])
UNDECIDED = "the outcome of an earlier bind of this pod is not known yet; it is tried again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Settings of the answers."""

    policy: str
    one_best_node: bool


Notice = Callable[[PodRef, FullEntry], None]


def filter_nodes(
    state: State, preferences: Preferences, args: FilterArgs, notice: Notice | None = None
) -> FilterResult:
    """The nodes that can take the pod: the best one, or all that fit if kube-scheduler is to choose.

    `notice` is called for a pod that a quota keeps waiting; it returns at once.
    """
    pod, offered = args.parsed, args.names() or []
    uid = pod.uid
    try:
        asked = pod.request
    except InvalidRequest as error:
        return FilterResult(error=str(error))
    if not offered:
        return _fits(args, [])
    state.ahead.serves(pod.scheduler)
    if uid:
        for_bind = (asked, pod.version) if asked is not None and pod.version else None
        if not state.tries(uid, for_bind, grouped=pod.grouped, rank=pod.rank):
            return _refused(dict.fromkeys(offered, Refusal.UNSETTLED))
    if uid and pod.gang:
        answer = _member(state, preferences, args, offered)
        if answer is not None:
            return answer
    if asked is None:
        return _fits(args, offered)  # it asks for no card or device; it came for its marker resource only
    if uid and not state.has_turn(uid, asked.priority):
        return _refused(dict.fromkeys(offered, Refusal.NOT_ITS_TURN))
    created = pod.created or YOUNGEST
    policy = asked.policy or preferences.policy
    wanted = PlacementRequest(pod.ref, asked, offered, policy, _load(state, pod, policy), pod.rank)
    found: Placement | Unplaceable | Decided | dict[str, int]
    if uid and pod.one_best_node(default=preferences.one_best_node):
        found = state.plan(wanted, created=created)
    else:
        found = state.fitting(wanted, created=created)
    if isinstance(found, Decided) and found.node not in offered:
        return _undecided(offered, grouped=pod.grouped)
    if isinstance(found, Unplaceable):
        nodes = (name for name, refusal in found.refusals.items() if refusal.resolvable)
        state.preemption.refused(pod, policy, nodes)
        if notice is not None and uid and Refusal.QUOTA in found.refusals.values():
            full = state.full_entry(pod.ref.namespace, asked)
            if full is not None:
                notice(pod.ref, full)
        return _refused(found.refusals)
    if not isinstance(found, dict):
        return _fits(args, [found.node])
    return _fits(args, list(found))


def prioritize(state: State, preferences: Preferences, args: FilterArgs) -> list[HostPriority]:
    """Whole numbers up to TOP. Exactly one node has TOP: kube-scheduler breaks ties at random."""
    pod, candidates = args.parsed, args.names() or []
    try:
        asked = pod.request
    except InvalidRequest:
        asked = None  # filter has answered the error; kube-scheduler ignores errors here
    if asked is None:
        return [HostPriority(name, 0) for name in candidates]
    policy = asked.policy or preferences.policy
    scored = state.scores(PlacementRequest(pod.ref, asked, candidates, policy, _load(state, pod, policy), pod.rank))
    found = list(map(scored.get, candidates))
    known = [score for score in found if score is not None]
    if not known:
        return [HostPriority(name, 0) for name in candidates]
    most, least = max(known), min(known)
    width = most - least + 1
    answer = [
        HostPriority(name, 0 if score is None else (score - least) * TOP // width)
        for name, score in zip(candidates, found, strict=True)
    ]
    best = min([name for name, score in zip(candidates, found, strict=True) if score == most])
    answer[candidates.index(best)].score = TOP
    return answer


def preempt(state: State, preferences: Preferences, args: PreemptArgs) -> PreemptResult:
    """The nodes where evictions make this pod fit on a card, with our victims in place of kube-scheduler's.

    Raises InvalidRequest.
    """
    pod, chosen = args.parsed, args.chosen()
    asked, waits = pod.request, bool(pod.gang)
    if asked is None and not waits:
        # It came for its marker resource only.
        said = args.as_chosen().items()
        return PreemptResult({node: own for node, own in said if state.preemption.are_on(node, chosen[node])})
    policy = (asked.policy if asked is not None else None) or preferences.policy
    found = state.preemption.answer(pod.waiting(), policy, chosen, member=waits)
    return PreemptResult(
        {
            node: MetaVictims([MetaPod(one) for one in victims.uids], victims.violations)
            for node, victims in found.items()
        }
    )


def inspect(state: State, node: str | None = None, unit: Unit = Unit.MIB) -> dict[str, Any]:
    """The cards as gpushare shows them: `/inspect` (gpushare-scheduler-extender `gpushare-inspect.go`)."""
    if node is not None:
        shown = _inspected(state, node, unit)
        if shown is None:
            return {"nodes": [], "error": f"node {node} has no GPU that Cardwise shares"}
        return {"unit": unit, "nodes": [shown]}
    with state.view() as ledger:
        names_of_all = sorted(ledger.by_name())
    nodes = [shown for name in names_of_all if (shown := _inspected(state, name, unit)) is not None]
    return {"unit": unit, "nodes": nodes}


def _member(state: State, preferences: Preferences, args: FilterArgs, candidates: list[str]) -> FilterResult | None:
    """The answer for a member of a gang; None where it is placed alone."""
    pod = args.parsed
    decided = state.decided(pod.uid)
    found = decided.node if decided is not None else state.gangs.filter(pod.uid, candidates, pod.named)
    if found is None:
        return None
    if isinstance(found, Refusal):
        asked = pod.request
        if asked is not None:
            nodes = candidates if found is Refusal.GANG_WAITS else ()
            state.preemption.refused(pod, asked.policy or preferences.policy, nodes)
        return _refused(dict.fromkeys(candidates, found))
    return _fits(args, [found]) if found in candidates else _undecided(candidates, grouped=pod.grouped)


def _load(state: State, pod: Pod, policy: str) -> Load | None:
    """The pod's cpu and memory, if a policy decides or learns by that."""
    return pod.load if policy in policies.SCORED or state.policies.active else None


def _fits(args: FilterArgs, fitting: list[str]) -> FilterResult:
    # Reasons of other nodes are left out: kube-scheduler reads them only if no node is left, and they cost both sides.
    if args.nodes is None:
        return FilterResult(node_names=fitting)
    return FilterResult(nodes=args.nodes.only(set(fitting)), node_names=fitting)


def _refused(refusals: Mapping[str, Refusal]) -> FilterResult:
    failed = {name: refusal.text for name, refusal in refusals.items() if refusal.resolvable}
    hopeless = {name: refusal.text for name, refusal in refusals.items() if not refusal.resolvable}
    return FilterResult(node_names=[], failed_nodes=failed, failed_and_unresolvable_nodes=hopeless)


def _undecided(candidates: list[str], *, grouped: bool) -> FilterResult:
    """The answer while an earlier bind is not settled. For a member of a PodGroup of Kubernetes it is a refusal: an
    error would end the try of all members.
    """
    if grouped:
        return _refused(dict.fromkeys(candidates, Refusal.UNSETTLED))
    return FilterResult(error=UNDECIDED)


def _inspected(state: State, name: str, unit: Unit) -> dict[str, Any] | None:
    # Filter must not wait while thousands of nodes are formatted: the lock is held only to copy one node.
    with state.view() as ledger:
        known = ledger.node(name)
        if known is None or not known.cards:
            return None
        node, holdings = known.copy(), ledger.holdings(name)
    pods: dict[int, list[dict[str, Any]]] = {}
    for holding in holdings:
        if holding.mark in _UNSEEN:
            continue
        on: dict[int, int] = {}
        for share in holding.assignment.shares():
            position = node.position(share)
            if position is not None:
                on[position] = on.get(position, 0) + share.mem
        for position, mem in on.items():
            amount = min(-(-mem // unit.mib), max(node.cards[position].mem // unit.mib, 1))
            shown = {"name": holding.name, "namespace": holding.namespace, "usedGPU": amount}
            pods.setdefault(position, []).append(shown)
    devices = []
    for i, card in enumerate(node.cards):
        # No more is free than whole units of it, as gpushare's plugin counts a card.
        total, free = card.mem // unit.mib, max(card.mem - node.used[i], 0) // unit.mib
        used = total - free if card.mem >= node.used[i] else -(-node.used[i] // unit.mib)
        devices.append({"id": card.index, "totalGPU": total, "usedGPU": used, "pods": pods.get(i, [])})
    return {
        "name": node.name,
        "totalGPU": sum(one["totalGPU"] for one in devices),
        "usedGPU": sum(one["usedGPU"] for one in devices),
        "devs": devices,
    }
