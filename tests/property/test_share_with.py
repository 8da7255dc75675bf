"""Whatever places a pod, a pod that shares cards within its namespace only is never beside a pod of another namespace:
filter and bind, gangs and their reservation, preemption of pods and of gangs by kube-scheduler and by the extender,
and on the same cluster defragmentation and simulation.
"""

import json
from collections.abc import Mapping

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cardwise.core.api import names, request, sharing
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.api.sharing import Tenant
from cardwise.core.defrag.defrag import plan
from cardwise.core.defrag.moving import DefragGoal, MovablePod, WhatIfCluster
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedPod
from extender.api import verbs
from extender.cache.gangcards import comes_after
from extender.records import wire
from tests.build import P100
from tests.core.defrag.test_defrag import Placer
from tests.examples import examples
from tests.extender.gangcluster import PREFERENCES, NodeSpec, World, member, single

NODES = ("n1", "n2")
TEAMS = ("team-a", "team-b")
PRIORITIES = (0, 0, 1000)
LOAD = Load(0, 0, 1)

asks = st.sampled_from([{"gpu_mem": P100 // 8}, {"gpu_mem": P100 // 2}, {"gpu_mem": P100 // 2}, {"whole_gpu": 1}])
tenants = st.tuples(st.sampled_from(TEAMS), st.booleans())
arrivals = st.tuples(asks, tenants, st.sampled_from(PRIORITIES), st.integers(0, 99))
singles = st.tuples(st.just("single"), arrivals)
gangs = st.tuples(st.just("gang"), arrivals, st.integers(2, 4))
steps = st.lists(
    st.one_of(
        singles,
        singles,
        gangs,
        st.tuples(st.just("delete"), st.integers(0, 30)),
        st.tuples(st.just("delete"), st.integers(0, 7)),
        st.tuples(st.just("wait"), st.sampled_from([1, 31, 61])),
        st.tuples(st.just("preempt")),
        st.tuples(st.just("evict")),
        st.tuples(st.just("restart")),
    ),
    min_size=5,
    max_size=20,
)


class Shared(World):
    """Remembers each pod as a tenant, by UID, and judges each pod that is placed by what was reserved from it."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        super().__init__({name: NodeSpec(2) for name in NODES}, refusals=2)

    def create(self, *pods: dict) -> None:
        for pod in pods:
            meta = pod["metadata"]
            self.tenants[meta["uid"]] = sharing.tenant_of(meta["annotations"], meta["namespace"])
        super().create(*pods)

    def schedule(self, name: str) -> str:
        reserved = self.reserved_from(name)
        refusal = super().schedule(name)
        tenant = self.tenants[f"uid-{name}"]
        with self.state.view() as ledger:
            holding = ledger.holding(f"uid-{name}")
            for share in holding.assignment.shares() if holding is not None and not refusal else ():
                for other in reserved.get(share.uuid, ()):
                    event("placed on a card with a reservation")
                    assert tenant.can_share_with(other), f"{name} closes a card that is reserved for a gang"
        return refusal

    def reserved_from(self, name: str) -> dict[str, list[Tenant]]:
        """By card, the tenants for which it is reserved and not to be used by the pod."""
        cards = self.state._cache.gang_cards
        gang, by_node = cards._gang, cards._by_node
        meta, spec = self.pods[name]["metadata"], self.pods[name]["spec"]
        rank = (-spec["priority"], 0, meta["creationTimestamp"], "")
        reserved: dict[str, list[Tenant]] = {}
        if gang is None or gang.plan or meta["labels"]:
            return reserved
        if by_node:
            event("cards are reserved for a gang")
        if comes_after(rank, meta["namespace"], gang.rank(), gang.namespace):
            for holding in (holding for holdings in by_node.values() for holding in holdings):
                for share in holding.assignment.shares():
                    reserved.setdefault(share.uuid, []).append(holding.mps_client.tenant)
        return reserved

    def preempt(self) -> None:
        """kube-scheduler preempts for the first pod that waits."""
        waiting = [name for name in self.schedulable() if self.pods[name]["spec"]["priority"]]
        if waiting and not self.filter(waiting[0])[0]:
            pod = self.pods[waiting[0]]
            lower = {
                node: {"Pods": [{"UID": f"uid-{name}"} for name in sorted(there)[:1]]}
                for node in NODES
                if (there := [name for name in self.lower() if self.bound()[name] == node])
            }
            args = wire.decode_preempt_args(json.dumps({"Pod": pod, "NodeNameToMetaVictims": lower}).encode())
            answer = verbs.preempt(self.state, PREFERENCES, args).node_name_to_meta_victims if lower else {}
            for node, victims in sorted(answer.items())[:1]:
                event("preempted by kube-scheduler")
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                pod["status"] |= {"nominatedNodeName": node, "conditions": [refused]}
                self.show_pod(pod)
                self.delete(*(victim.uid.removeprefix("uid-") for victim in victims.pods))

    def evict(self) -> None:
        """The extender preempts for all pods that wait."""
        self.clock.advance(4)
        for eviction in self.state.preemption.next_evictions():
            event("preempted by the extender")
            self.delete(*(victim.name for victim in eviction.victims if victim.name in self.pods))

    def lower(self) -> list[str]:
        return [name for name in self.bound() if not self.pods[name]["spec"]["priority"]]

    def snapshot(self) -> Ledger:
        with self.state.view() as ledger:
            return ledger.snapshot()

    def requests(self) -> dict[str, PodRequest]:
        """Of the bound pods, by UID."""
        return {f"uid-{name}": request.parse(self.pods[name]) for name in self.bound()}


def check_rule(ledger: Ledger, tenants: Mapping[str, Tenant]) -> None:
    """`tenants`: by UID, as the manifests say, since a holding may have been counted as another tenant's."""
    for node in ledger.nodes():
        on_card: dict[int | None, list[Tenant]] = {}
        for holding in ledger.holdings(node.name):
            for share in holding.assignment.shares():
                on_card.setdefault(node.position(share), []).append(tenants[holding.uid])
        for together in on_card.values():
            assert all(tenant.can_share_with(other) for tenant in together for other in together), together


def check_defrag(world: Shared, tenant: Tenant) -> None:
    """The moves that would make space for pods of this tenant."""
    ledger, requests = world.snapshot(), world.requests()
    movables = [
        MovablePod(uid=uid, request=pod_request, load=LOAD, policy="binpack", mem=pod_request.mem)
        for uid, pod_request in requests.items()
        if (holding := ledger.holding(uid)) is not None and not holding.phase_name
    ]
    container = ContainerRequest(key="0", name="c", cards=1, mem=P100 * 3 // 4)
    goal = DefragGoal(request=PodRequest(containers=(container,), tenant=tenant), load=LOAD, count=2, policy="binpack")
    moves = plan(WhatIfCluster(ledger, Placer(ledger), lambda _: ()), goal, movables, effort=50).moves
    for move in moves:
        event("moved by a defragmentation")
        ledger.set_holding(move.after)
        check_rule(ledger, world.tenants)
    with WhatIfCluster(ledger, Placer(ledger), lambda _: ()).fill_with(goal) as placements:
        check_rule(ledger, world.tenants | {f"defrag-goal-{i}": tenant for i in range(len(placements))})


def check_simulation(world: Shared, policy: str) -> None:
    """Twice as many pods of the same kinds, on the cluster as it is and on an empty one."""
    ledger, requests = world.snapshot(), world.requests()
    nodes = [SimulatedNode(node.name, tuple(node.cards)) for node in ledger.nodes()]
    for holdings in (ledger.holdings(), list[Holding]()):
        simulated = SimulatedCluster(nodes, policy)
        simulated.set_workload(PodShape(pod_request, LOAD) for pod_request in requests.values())
        for holding in holdings:
            simulated.add_assigned_pod(holding)
        tenants = dict(world.tenants)
        for i, pod_request in enumerate([*requests.values()] * 2):
            tenants[f"more-{i}"] = pod_request.tenant
            if simulated.place_pod(f"more-{i}", SimulatedPod(f"more-{i}", PodShape(pod_request, LOAD))) is not None:
                event("placed by a simulation")
            check_rule(simulated.ledger, tenants)


def annotations_of(exclusive: bool) -> dict[str, str]:
    return {names.SHARE_WITH: "namespace"} if exclusive else {}


def follow(world: Shared, at: int, step: tuple) -> None:
    """One step; `at` names its pods."""
    match step:
        case "single", (amounts, (team, exclusive), priority, created):
            pod = single(f"s{at}", created=created, priority=priority, **amounts)
            pod["metadata"] |= {"namespace": team, "annotations": annotations_of(exclusive)}
            world.create(pod)
        case "gang", (amounts, (team, exclusive), priority, created), size:
            settings_of = {"namespace": team, "priority": priority, "annotations": annotations_of(exclusive)}
            world.create(
                *(member(f"g{at}-{i}", f"g{at}", size, created=created, **settings_of, **amounts) for i in range(size))
            )
        case "delete", index:
            there = sorted(world.pods)
            if there:
                world.delete(there[index % len(there)])
        case "wait", seconds:
            world.clock.advance(seconds)
        case ("preempt",):
            world.preempt()
        case ("evict",):
            world.evict()
        case ("restart",):
            world.restart()


@settings(max_examples=examples(25, soak=2000), deadline=None)
@given(
    st.lists(singles, min_size=6, max_size=10), gangs, steps, tenants, st.sampled_from(["binpack", "spread", "priced"])
)
def test_no_way_to_place_a_pod_puts_it_beside_one_with_which_it_must_not_share(there, gang, todo, goal, policy):
    world = Shared()
    for at, step in enumerate([*there, gang, ("wait", 3), ("wait", 3), *todo]):
        follow(world, at, step)
        world.run(1)
        world.keep()
        check_rule(world.snapshot(), world.tenants)
        assert not world.over_full()
    check_defrag(world, Tenant(*goal))
    check_simulation(world, policy)
