"""The turns at the extender's state that big gangs and many nominated pods take, in a big cluster; in this process."""

import json
import random
from collections.abc import Callable

from bench import timing
from bench.timing import Row
from bench.turns import Turns, ask_preempt, full_state
from bench.world import CARDS, P100, Scale, bound_pod, card, node_name, pod
from cardwise.core.api import names, request
from cardwise.core.api.quotas import Entry, GPUQuota
from cardwise.core.api.request import Load
from cardwise.kube.pods import budgets
from extender.api import verbs
from extender.api.verbs import Preferences
from extender.cache.placing import PlacementRequest
from extender.records import nodeinfo, objects, podinfo, wire
from extender.records.podref import PodRef
from extender.state import State

LIMITED = "limited"
NOMINATED = 500  # pods for which pods are evicted
FULL, PODS, NEWCOMERS = 100_000, 110, 10  # the first node that is full, the pods there, and who is asked about in turn


def _member(gang: str, i: int, size: int, resources: dict[str, str], *, namespace: str = "default") -> dict:
    made = pod(f"{gang}-{i}", f"u-{gang}-{i}", 0)
    made["metadata"]["namespace"] = namespace
    made["metadata"]["labels"][names.GANG] = gang
    made["metadata"]["annotations"] = {names.GROUP_NAME: gang, names.GROUP_NUM: str(size)}
    made["metadata"]["creationTimestamp"] = "2026-11-21T09:00:00Z"
    wanted = {names.SHARE: "1", "cpu": "1"} | resources
    made["spec"]["containers"][0]["resources"] = {"limits": wanted, "requests": wanted}
    return made


def _record(made: dict) -> podinfo.PodRecord:
    return podinfo.pod(json.dumps(made).encode())[1]


def _come(state: State, members: list[dict]) -> list[podinfo.PodRecord]:
    records = [_record(made) for made in members]
    for record in records:
        state.set_pod(record)
    return records


def _filtered(state: State, members: list[dict], everywhere: list[str]) -> None:
    """kube-scheduler asks for each member until each has its node, or for ten rounds."""
    left = [made["metadata"]["uid"] for made in members]
    for _ in range(10):
        left = [uid for uid in left if not isinstance(state.gangs.filter(uid, everywhere), str)]
        if not left:
            return
        state.gangs.step()
    raise TypeError(f"{len(left)} members have no node")


def _gangs(
    size: int, resources: Callable[[int], dict[str, str]], namespace: str
) -> Callable[[State, list[str], int], None]:
    """A gang that fits comes and is planned, then it is deleted."""

    def one(state: State, everywhere: list[str], run: int) -> None:
        made = [_member(f"gang-{run}", i, size, resources(i), namespace=namespace) for i in range(size)]
        records = _come(state, made)
        _filtered(state, made, everywhere)
        for record in records:
            state.remove_pod(record)

    return one


def _preempting(size: int) -> Callable[[State, list[str], int], None]:
    """kube-scheduler asks who is to go for the first member of a gang whose members each need a node alone."""

    def one(state: State, everywhere: list[str], run: int) -> None:
        made = [_member(f"gang-{run}", i, size, {names.WHOLE_GPU: "8"}) for i in range(size)]
        for each in made:
            each["spec"]["priority"] = 1000
        records = _come(state, made)
        ask_preempt(state, made[0], everywhere, run)
        for record in records:
            state.remove_pod(record)

    return one


def _evicting(size: int) -> Callable[[State, list[str], int], None]:
    """The extender itself finds the victims for a pod, or for a gang, that needs a node for each member: by
    kube-scheduler's sums nothing is short.
    """

    def one(state: State, everywhere: list[str], run: int) -> None:
        made = [_member(f"gang-{run}", i, size, {names.WHOLE_GPU: "8"}) for i in range(size)]
        for each in made:
            each["spec"]["priority"] = 1000
            if size == 1:
                each["metadata"] |= {"labels": {}, "annotations": {}}
        records = _come(state, made)
        for each in made:
            args = wire.FilterArgs(pod=each, node_names=list(everywhere))
            verbs.filter_nodes(state, Preferences(policy="binpack", one_best_node=True), args)
        state._clock.sleep(4.0)  # noqa: SLF001 - it moves time only; a pod waits so long before others go for it
        evictions = state.preemption.next_evictions()
        if len(evictions) != size:
            raise RuntimeError(f"{len(evictions)} evictions, not {size}")
        for record in records:
            state.remove_pod(record)

    return one


def _on_a_full_node(state: State, _everywhere: list[str], run: int) -> None:
    """kube-scheduler asks who is to go from one node of 8 cards and 110 pods: of six priorities, most of them under one
    of many disruption budgets, some under two. What the pods ask is drawn: cards and shares, cpu, memory.
    """
    draw = random.Random(run)
    node, free = node_name(FULL + run), [P100] * CARDS
    for i in range(CARDS):
        state.set_card(*objects.card(json.dumps(card(FULL + run, i, 1)).encode()))
    kinds = draw.choice([1, 3, 20, 60])
    for i in range(2 * kinds):
        made = {"metadata": {"namespace": "default", "name": f"budget-{i}"}}
        made["spec"] = {"selector": {"matchLabels": {f"budget-{i % 2}": str(i // 2)}}}
        made["status"] = {"disruptionsAllowed": draw.randrange(4)}
        state.preemption.set_budget(*budgets.record(json.dumps(made).encode()))
    cpu, memory, records = 0, 0, []
    for i in range(PODS):
        mem, on = draw.choice([512, 1024, 1024, 2048]), i % CARDS
        if free[on] < mem:
            continue
        free[on] -= mem
        made = bound_pod(f"full-{run}-{i}", f"u-full-{run}-{i}", mem, FULL + run, on)
        wants = {"cpu": f"{draw.choice([500, 1000, 1500, 2500])}m", "memory": f"{draw.choice([1, 2, 4, 8, 12])}Gi"}
        made["spec"]["containers"][0]["resources"]["requests"] |= wants
        made["spec"]["priority"] = draw.randrange(6)
        made["metadata"]["labels"] |= {
            f"budget-{of}": str(draw.randrange(kinds)) for of in draw.choice([[], [0], [0, 1]])
        }
        cpu, memory = cpu + int(wants["cpu"][:-1]), memory + (int(wants["memory"][:-2]) << 30)
        records.append(_record(made))
    state.set_node(node, nodeinfo.NodeRecord(Load(cpu, memory, len(records))))
    for record in records:
        state.set_pod(record)
    for i in range(NEWCOMERS):
        asked = draw.choice([{names.GPU_MEM: str(P100 // 2)}, {names.WHOLE_GPU: str(draw.choice([1, 2, 4, 8]))}])
        wants = {"cpu": str(draw.choice([1, 8, 32, 64])), "memory": f"{draw.choice([4, 64, 256])}Gi", names.SHARE: "1"}
        newcomer = pod(f"newcomer-{run}-{i}", f"u-newcomer-{run}-{i}", 0)
        newcomer["spec"]["containers"][0]["resources"] = {"limits": asked | wants, "requests": asked | wants}
        newcomer["spec"]["priority"] = 1000
        args = wire.preempt_args(json.dumps({"Pod": newcomer, "NodeNameToMetaVictims": {node: {"Pods": []}}}).encode())
        answer = verbs.preempt(state, Preferences(policy="binpack", one_best_node=True), args)
        if not answer.node_name_to_meta_victims:
            raise TypeError("nobody would go")
        state.remove_pod(_record(newcomer))
    for record in records:
        state.remove_pod(record)
    for i in range(2 * kinds):
        state.preemption.remove_budget(f"default/budget-{i}")


def _beside_nominated(state: State, everywhere: list[str], run: int) -> None:
    """A single pod is placed, and a gang of eight, beside pods that were nominated by another extender."""
    made = [pod(f"nominated-{run}-{i}", f"u-nominated-{run}-{i}", 8138) for i in range(NOMINATED)]
    for i, each in enumerate(made):
        each["spec"]["priority"] = 1000
        each["status"]["nominatedNodeName"] = everywhere[(i * 7 + run) % len(everywhere)]
        each["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    records = _come(state, made)
    state.warm()  # as before a term
    single = request.parse_mutated(pod("single", "u-single", 1024))
    for i in range(5):
        state.plan(PlacementRequest(PodRef(f"u-{run}-{i}", "default", f"p-{run}-{i}"), single, everywhere, "binpack"))
    _gangs(8, lambda _: {names.GPU_MEM: "2048"}, "default")(state, everywhere, run)
    for record in records:
        state.remove_pod(record)


SITUATIONS: dict[str, Callable[[State, list[str], int], None]] = {
    **{
        f"a gang of {size} equal shares": _gangs(size, lambda _: {names.GPU_MEM: "2048"}, "default")
        for size in (8, 100, 500)
    },
    "a gang of 16 sizes": _gangs(16, lambda i: {names.GPU_MEM: str(1000 + 300 * i)}, "default"),
    "a gang of 16 sizes under a quota": _gangs(16, lambda i: {names.GPU_MEM: str(1000 + 300 * i)}, LIMITED),
    "a gang of 100 equal shares under a quota": _gangs(100, lambda _: {names.GPU_MEM: "2048"}, LIMITED),
    **{f"preemption for a gang of {size}, a node each": _preempting(size) for size in (8, 32, 100)},
    "the extender preempts for a pod": _evicting(1),
    **{f"the extender preempts for a gang of {size}, a node each": _evicting(size) for size in (8, 32)},
    f"beside {NOMINATED} nominated pods": _beside_nominated,
    f"preemption on a node of {CARDS} cards and {PODS} pods": _on_a_full_node,
}


def run(nodes: int, pods: int, runs: int, only: str) -> list[Row]:
    state, bound = full_state(Scale(nodes=nodes, pods=pods, fresh=True))
    state.set_quota(f"{LIMITED}/team", GPUQuota(namespace=LIMITED, name="team", entries=(Entry(shares=600),)))
    everywhere = [node_name(i) for i in range(nodes)]
    single = request.parse_mutated(pod("single", "u-single", 1024))
    state.plan(PlacementRequest(PodRef("u-warm", "default", "warm"), single, everywhere, "binpack"))
    for record in bound[:100]:
        state.remove_pod(record)
    rows = []
    for what, happens in SITUATIONS.items():
        if only not in what:
            continue
        turns, longest = Turns(), []
        with turns.counted():
            for i in range(runs):
                before = {who: len(some) for who, some in turns.seconds.items()}
                happens(state, everywhere, i)
                since = [one for who, some in turns.seconds.items() for one in some[before.get(who, 0) :]]
                longest.append(max(since))
        rows.append(timing.latency(f"longest turn: {what}", longest))
        whose = max(turns.seconds.items(), key=lambda item: max(item[1]))
        rows.append(timing.latency(f"... {whose[0]}", whose[1]))
    return rows
