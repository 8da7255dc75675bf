"""Measures how long the state lock is held for single expensive operations in a big cluster.

The extender's state is in this process. The operations are big gangs, quotas, nominations, preemption, and calls
beside many nominated pods.
"""

import json
import random
from collections.abc import Callable

from bench import timing
from bench.lockholds import LockHolds, build_state, call_preempt
from bench.synthetic import CARDS, P100, Scale, bound_pod, card, node_name, not_none, pod, pod_record
from bench.timing import Row
from cardwise.core.api import names, policies, request
from cardwise.core.api.quotas import GPUQuota, QuotaEntry
from cardwise.core.api.request import Load
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.values.decoded import Json
from cardwise.kube.pods import budgets
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.gangs.gangtypes import PlannedNode
from extender.placing.placing import PlacementRequest
from extender.records import cards, nodeinfo, podinfo, wire
from extender.records.podref import PodRef
from extender.state import State

LIMITED = "limited"  # the name of a namespace with a GPUQuota
NOMINATED = 500  # number of pods that wait for their victims to end
NOMINEES = 5
RETRY_SECONDS = 1.0  # kube-scheduler's first backoff of a pod
# The index of the first full node, the number of pods on it, and the number of pods that preempt there.
FIRST_FULL_NODE, PODS_ON_FULL_NODE, PREEMPTORS = 100_000, 110, 10


Situation = Callable[[State, list[str], int], None]  # given the state, the names of all nodes, the number of the run


def _member(
    gang: str, i: int, size: int, resources: dict[str, str], *, namespace: str = "default", containers: int = 1
) -> Json:
    """The manifest of a gang's member. `resources`: of each of its containers."""
    manifest = pod(f"{gang}-{i}", f"u-{gang}-{i}", 0)
    manifest["metadata"]["namespace"] = namespace
    manifest["metadata"]["labels"][names.GANG] = gang
    manifest["metadata"]["annotations"] = {names.GROUP_NAME: gang, names.GROUP_NUM: str(size)}
    manifest["metadata"]["creationTimestamp"] = "2026-11-21T09:00:00Z"
    amounts = {names.SHARE: "1", "cpu": "1"} | resources
    first = manifest["spec"]["containers"][0] | {"resources": {"limits": amounts, "requests": amounts}}
    manifest["spec"]["containers"] = [first | {"name": f"c{k}"} for k in range(containers)]
    return manifest


def _record(manifest: Json) -> podinfo.PodRecord:
    return pod_record(json.dumps(manifest).encode())


def _add_pods(state: State, manifests: list[Json]) -> list[podinfo.PodRecord]:
    records = [_record(manifest) for manifest in manifests]
    for record in records:
        state.set_pod(record)
    return records


def _filter_members(state: State, members: list[Json], all_nodes: list[str]) -> None:
    """Call filter for each member until each member has its node, in at most ten passes."""
    pending = [manifest["metadata"]["uid"] for manifest in members]
    for _ in range(10):
        pending = [uid for uid in pending if not isinstance(state.gangs.filter_member(uid, all_nodes), PlannedNode)]
        if not pending:
            return
        # Only sets the fake clock: a failed plan is tried again later.
        state._clock.sleep(RETRY_SECONDS)  # noqa: SLF001
        state.gangs.step()
        state.gangs.plan_waiting()
    raise TypeError(f"{len(pending)} members have no node")


def _plan_gang(
    size: int, resources: Callable[[int], dict[str, str]], namespace: str, *, containers: int = 1
) -> Situation:
    """A gang that fits is added, planned and deleted. Each of its pods has this number of containers."""

    def situation(state: State, all_nodes: list[str], run: int) -> None:
        members = [
            _member(f"gang-{run}", i, size, resources(i), namespace=namespace, containers=containers)
            for i in range(size)
        ]
        records = _add_pods(state, members)
        _filter_members(state, members, all_nodes)
        for record in records:
            state.remove_pod(record)

    return situation


def _whole_node_members(size: int, run: int) -> list[Json]:
    """The members of a gang with priority 1000 that each request all GPUs of a node."""
    members = [_member(f"gang-{run}", i, size, {names.WHOLE_GPU: "8"}) for i in range(size)]
    for manifest in members:
        manifest["spec"]["priority"] = 1000
    return members


def _preempt_by_scheduler(size: int) -> Situation:
    """kube-scheduler calls preempt for the first member of a gang. Each member needs a whole node."""

    def situation(state: State, all_nodes: list[str], run: int) -> None:
        members = _whole_node_members(size, run)
        records = _add_pods(state, members)
        call_preempt(state, members[0], all_nodes, run)
        for record in records:
            state.remove_pod(record)

    return situation


def _preempt_by_extender(size: int) -> Situation:
    """The extender finds the victims for a pod, or for a gang. Each pod needs a whole node.

    kube-scheduler does not call preempt here, since the pods fit by node total.
    """

    def situation(state: State, all_nodes: list[str], run: int) -> None:
        members = _whole_node_members(size, run)
        if size == 1:
            members[0]["metadata"] |= {"labels": {}, "annotations": {}}
        records = _add_pods(state, members)
        for manifest in members:
            args = wire.FilterArgs(pod=manifest, node_names=list(all_nodes))
            verbs.filter_nodes(state, AnswerSettings(policy="binpack", one_best_node=True), args)
        # Only sets the fake clock: a pod waits for this time before the extender preempts other pods for it.
        state._clock.sleep(4.0)  # noqa: SLF001
        evictions = state.preemption.next_evictions()
        if len(evictions) != size:
            raise RuntimeError(f"{len(evictions)} evictions, not {size}")
        for record in records:
            state.remove_pod(record)

    return situation


def _nominate(policy: str = "", *, new_constraints: bool = False, full: bool = False) -> Situation:
    """Pods are nominated, and then deleted.

    policy: of the pods; "": the default of `NominationSettings`.
    new_constraints: whether each pod has constraints on its node that no pod had before.
    full: whether only 100 of the nodes have cpu left.
    """

    def situation(state: State, all_nodes: list[str], run: int) -> None:
        state.nominator.add_scheduler("default-scheduler")
        if policy == policies.DEFAULT_POLICY and not state.policies.is_active:
            state.policies.start_engine(Engine, policy)
        while policy == policies.DEFAULT_POLICY and state.policies.precompute_scores(64):
            pass  # `WorkloadController` does this between two calls
        for node in all_nodes[:-100] if full else ():
            state.set_node(node, nodeinfo.NodeRecord(Load(1, 1 << 40, 110)))
        manifests = [pod(f"nominee-{run}-{i}", f"u-nominee-{run}-{i}", 2048) for i in range(NOMINEES)]
        for i, manifest in enumerate(manifests):
            if policy:
                manifest["metadata"]["annotations"][names.POLICY] = policy
            if new_constraints:
                key = f"label-{run}-{i}"
                expressions = [{"key": key, "operator": "NotIn", "values": ["x"]}]
                terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
                node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
                manifest["spec"]["affinity"] = {"nodeAffinity": node_affinity}
        records = _add_pods(state, manifests)
        for record in records:
            nominee = state.nominator.nominate_next_pod().nominee
            if nominee is None or nominee.pod.uid != record.uid:
                raise RuntimeError(f"nominated {nominee}, not {record.uid}")
            # Only sets the fake clock: there is a pause after an expensive nomination.
            state._clock.sleep(RETRY_SECONDS)  # noqa: SLF001
        for record in records:
            state.remove_pod(record)
        for node in all_nodes[:-100] if full else ():
            state.set_node(node)

    return situation


def _preempt_on_full_node(state: State, _all_nodes: list[str], run: int) -> None:
    """kube-scheduler calls preempt for one node of 8 cards and 110 pods.

    The pods have six priorities; most match one of many PodDisruptionBudgets, some two. Requests of cards, shares, CPU
    and memory are random.
    """
    rng = random.Random(run)
    node, free = node_name(FIRST_FULL_NODE + run), [P100] * CARDS
    for i in range(CARDS):
        state.set_card(*not_none(cards.decode_card(json.dumps(card(FIRST_FULL_NODE + run, i, 1)).encode())))
    kinds = rng.choice([1, 3, 20, 60])
    for i in range(2 * kinds):
        manifest: Json = {"metadata": {"namespace": "default", "name": f"budget-{i}"}}
        manifest["spec"] = {"selector": {"matchLabels": {f"budget-{i % 2}": str(i // 2)}}}
        manifest["status"] = {"disruptionsAllowed": rng.randrange(4)}
        state.preemption.set_budget(*not_none(budgets.decode_budget(json.dumps(manifest).encode())))
    cpu, memory, records = 0, 0, []
    for i in range(PODS_ON_FULL_NODE):
        mem, card_index = rng.choice([512, 1024, 1024, 2048]), i % CARDS
        if free[card_index] < mem:
            continue
        free[card_index] -= mem
        manifest = bound_pod(f"full-{run}-{i}", f"u-full-{run}-{i}", mem, FIRST_FULL_NODE + run, card_index)
        amounts = {"cpu": f"{rng.choice([500, 1000, 1500, 2500])}m", "memory": f"{rng.choice([1, 2, 4, 8, 12])}Gi"}
        manifest["spec"]["containers"][0]["resources"]["requests"] |= amounts
        manifest["spec"]["priority"] = rng.randrange(6)
        manifest["metadata"]["labels"] |= {
            f"budget-{group}": str(rng.randrange(kinds)) for group in rng.choice([[], [0], [0, 1]])
        }
        cpu, memory = cpu + int(amounts["cpu"][:-1]), memory + (int(amounts["memory"][:-2]) << 30)
        records.append(_record(manifest))
    state.set_node(node, nodeinfo.NodeRecord(Load(cpu, memory, len(records))))
    for record in records:
        state.set_pod(record)
    for i in range(PREEMPTORS):
        gpus = rng.choice([{names.GPU_MEM: str(P100 // 2)}, {names.WHOLE_GPU: str(rng.choice([1, 2, 4, 8]))}])
        amounts = {"cpu": str(rng.choice([1, 8, 32, 64])), "memory": f"{rng.choice([4, 64, 256])}Gi", names.SHARE: "1"}
        preemptor = pod(f"preemptor-{run}-{i}", f"u-preemptor-{run}-{i}", 0)
        preemptor["spec"]["containers"][0]["resources"] = {"limits": gpus | amounts, "requests": gpus | amounts}
        preemptor["spec"]["priority"] = 1000
        args = wire.decode_preempt_args(
            json.dumps({"Pod": preemptor, "NodeNameToMetaVictims": {node: {"Pods": []}}}).encode()
        )
        response = verbs.preempt(state, AnswerSettings(policy="binpack", one_best_node=True), args)
        if not response.node_name_to_meta_victims:
            raise TypeError("no victims were found")
        state.remove_pod(_record(preemptor))
    for record in records:
        state.remove_pod(record)
    for i in range(2 * kinds):
        state.preemption.remove_budget(f"default/budget-{i}")


def _place_beside_nominated(state: State, all_nodes: list[str], run: int) -> None:
    """A single pod is placed, and a gang of eight, beside pods that another extender has nominated."""
    nominated = [pod(f"nominated-{run}-{i}", f"u-nominated-{run}-{i}", 8138) for i in range(NOMINATED)]
    for i, manifest in enumerate(nominated):
        manifest["spec"]["priority"] = 1000
        manifest["status"]["nominatedNodeName"] = all_nodes[(i * 7 + run) % len(all_nodes)]
        manifest["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    records = _add_pods(state, nominated)
    state.warm_caches()  # the extender does this before it becomes leader
    single = not_none(request.parse_mutated(pod("single", "u-single", 1024)))
    for i in range(5):
        state.plan_pod(
            PlacementRequest(PodRef(f"u-{run}-{i}", "default", f"p-{run}-{i}"), single, all_nodes, "binpack")
        )
    _plan_gang(8, lambda _: {names.GPU_MEM: "2048"}, "default")(state, all_nodes, run)
    for record in records:
        state.remove_pod(record)


SITUATIONS: dict[str, Situation] = {
    **{
        f"a gang of {size} equal shares": _plan_gang(size, lambda _: {names.GPU_MEM: "2048"}, "default")
        for size in (8, 100, 500)
    },
    "a gang of 500 with 40 shares a pod": _plan_gang(
        500, lambda _: {names.GPU_MEM: "64", "cpu": "10m"}, "default", containers=40
    ),
    "a gang of 16 sizes": _plan_gang(16, lambda i: {names.GPU_MEM: str(1000 + 300 * i)}, "default"),
    "a gang of 16 sizes under a quota": _plan_gang(16, lambda i: {names.GPU_MEM: str(1000 + 300 * i)}, LIMITED),
    "a gang of 100 equal shares under a quota": _plan_gang(100, lambda _: {names.GPU_MEM: "2048"}, LIMITED),
    **{f"preemption for a gang of {size}, a node each": _preempt_by_scheduler(size) for size in (8, 32, 100)},
    "the extender preempts for a pod": _preempt_by_extender(1),
    **{f"the extender preempts for a gang of {size}, a node each": _preempt_by_extender(size) for size in (8, 32)},
    f"beside {NOMINATED} nominated pods": _place_beside_nominated,
    f"{NOMINEES} pods are nominated": _nominate(),
    f"{NOMINEES} pods are nominated by {policies.DEFAULT_POLICY}": _nominate(policies.DEFAULT_POLICY),
    f"{NOMINEES} pods are nominated, each with new constraints": _nominate(new_constraints=True),
    f"{NOMINEES} pods are nominated, 100 nodes have cpu": _nominate(full=True),
    f"preemption on a node of {CARDS} cards and {PODS_ON_FULL_NODE} pods": _preempt_on_full_node,
}


def run(nodes: int, pods: int, runs: int, only: str) -> list[Row]:
    """Run each situation whose label contains `only`, `runs` times, with `pods` pods on `nodes` nodes."""
    state, bound = build_state(Scale(nodes=nodes, pods=pods, fresh=True))
    state.set_quota(f"{LIMITED}/team", GPUQuota(namespace=LIMITED, name="team", entries=(QuotaEntry(shares=600),)))
    all_nodes = [node_name(i) for i in range(nodes)]
    single = not_none(request.parse_mutated(pod("single", "u-single", 1024)))
    state.plan_pod(PlacementRequest(PodRef("u-warm", "default", "warm"), single, all_nodes, "binpack"))
    for record in bound[:100]:
        state.remove_pod(record)
    rows = []
    for label, situation in SITUATIONS.items():
        if only not in label:
            continue
        holds, longest = LockHolds(), []
        with holds.measure():
            for i in range(runs):
                counts = {holder: len(seconds) for holder, seconds in holds.seconds.items()}
                situation(state, all_nodes, i)
                new_holds = [
                    hold for holder, seconds in holds.seconds.items() for hold in seconds[counts.get(holder, 0) :]
                ]
                longest.append(max(new_holds))
        rows.append(timing.latency(f"longest hold: {label}", longest))
        holder, seconds = max(holds.seconds.items(), key=lambda entry: max(entry[1]))
        rows.append(timing.latency(f"... {holder}", seconds))
    return rows
