"""Gangs that are planned while the cluster changes, and a judge of what is reserved for them.

The judge reads the state when the places of a gang are reserved. It does not know the checks of
`extender.cache.commit`, so it finds out when one of them is left out.
"""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

from cardwise.core.api import names
from cardwise.core.api.request import Load
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints
from extender.cache import commit
from extender.cache.nominations import LOWEST_PRIORITY
from extender.gangs.gangplaces import GangPlaces, PlanRequest
from extender.gangs.gangplanner import GangPlanner
from extender.records.nodeinfo import NodeRecord, PlacedPod
from tests.build import P100, extended_resource
from tests.extender.gangcluster import NodeSpec, World, member, reserve, single
from tests.extender.states import as_card, as_pod, as_quota, bound

GIB = 1 << 30
NODES = ("n1", "n2", "n3")
CPU = 4


def _set_node(world: World, node: str, cpu: int = CPU, **changes: bool) -> None:
    labels = NodeLabelsAndTaints({"zone": node})
    world.state.set_node(node, NodeRecord(Load(cpu * 1000, 512 * GIB, 500), node_labels=labels, **changes))


def _hold_card(world: World, node: str, mem: int = P100, namespace: str = "other") -> None:
    world.state.set_pod(as_pod(bound(f"holder-{node}", mem, 0, node=node, namespace=namespace)))


def _nominate(world: World, node: str) -> None:
    name = f"other-{node}"
    world.create(single(name, priority=10, gpu_mem=P100))
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.pods[name]["status"] |= {"nominatedNodeName": node, "conditions": [refused]}
    world.show_pod(world.pods[name])
    with world.state.view():
        world.state._nominated.reservations_on(
            [node], (), LOWEST_PRIORITY
        )  # which card is reserved is known from now on


def _delete_member(world: World, _node: str) -> None:
    name = next((name for name in world.pods if name.startswith("g")), None)
    if name is not None:
        world.delete(name)


# What happens between a plan and its commit; each gets a node.
CHANGES: dict[str, Callable[[World, str], object]] = {
    "cordon the node": lambda world, node: _set_node(world, node, schedulable=False),
    "take the cpu": lambda world, node: world.state.set_pod_without_request(
        f"big-{node}", PlacedPod(node, Load(3500, 0, 1))
    ),
    "take a little cpu": lambda world, node: world.state.set_pod_without_request(
        f"small-{node}", PlacedPod(node, Load(1, 0, 1))
    ),
    "shrink the node": lambda world, node: _set_node(world, node, cpu=1),
    "take the card": _hold_card,
    "take a part of the card": lambda world, node: _hold_card(world, node, P100 // 4),
    "fail the card": lambda world, node: world.state.set_card(
        *as_card(extended_resource(0, node=node, health="Unhealthy"))
    ),
    "use the quota": lambda world, node: _hold_card(world, node, P100 // 4, namespace="default"),
    "shrink the quota": lambda world, _: world.state.set_quota(*as_quota({"memoryMiB": P100})),
    "nominate a pod": _nominate,
    "reserve for a gang": lambda world, node: reserve(world.state, node, P100),
    "remove the label": lambda world, node: world.state.set_node(node, NodeRecord(Load(CPU * 1000, 512 * GIB, 500))),
    "delete a member": _delete_member,
    "change the leader": lambda world, _: world.state.forget_plans(),
    "nothing": lambda world, _: None,
}


class Judged(World):
    """A cluster with a gang of two. `changes`: what happens after each plan, in order."""

    def __init__(self, changes: list[tuple[str, str]], mem: int) -> None:
        super().__init__({node: NodeSpec(1, cpu=CPU, labels={"zone": node}) for node in NODES})
        self.changes = list(changes)
        self.problems: list[str] = []
        self._epoch = -1
        self._zones: dict[str, str] = {}  # the label of each node when the last plan was made
        self.state.set_quota(*as_quota({"memoryMiB": 3 * P100}))
        by_zone = {names.POLICY: "spread-by=zone"}
        self.create(
            *(member(f"g{i}", "g", 2, created=5 + i, gated=False, annotations=by_zone, gpu_mem=mem) for i in range(2))
        )

    def play(self) -> None:
        """Call filter for both members, and run the controller."""
        plan, place = GangPlanner.plan, GangPlaces._place

        def plan_then_change(planner: GangPlanner, *args: Any, **kwargs: Any) -> Any:
            self._epoch, self._zones = self.state._cache.leader_changes, self._read_zones()
            planned = plan(planner, *args, **kwargs)
            if self.changes and not self.state._lock._lock.locked():
                change, node = self.changes.pop(0)
                CHANGES[change](self, node)
            return planned

        def place_and_judge(places: GangPlaces, request: PlanRequest, pace: Any) -> Any:
            def on_reserved() -> None:
                request.on_reserved()
                self.problems += self.find_problems()

            judged = PlanRequest(gang=request.gang, choose_members=request.choose_members, on_reserved=on_reserved)
            return place(places, judged, pace)

        with (
            mock.patch.object(GangPlanner, "plan", plan_then_change),
            mock.patch.object(GangPlaces, "_place", place_and_judge),
        ):
            for name in ("g0", "g1"):
                if name in self.pods:
                    self.filter(name)
            self.keep()

    def _read_zones(self) -> dict[str, str]:
        loads = self.state._cache.loads
        return {node: loads.labels(node).get("zone", "") for node in NODES}

    def find_problems(self) -> list[str]:
        """What is wrong with the places that are reserved now."""
        state = self.state
        cache, gangs = state._cache, state.gangs
        places = {uid: row.node for uid, row in cache.reservations.gang_plan("default/g").items()}
        problems = [f"{problem} (ledger)" for problem in cache.ledger.violations()]
        if self._epoch != cache.leader_changes:
            problems.append("planned in a former epoch")
        gang = gangs._gangs.get("default/g")
        if gang is None or len(places) != 2 or not set(places) <= set(gang.members):
            problems.append("not the members that wait")
        for uid, node in places.items():
            free, holding = cache.loads.free_load(node), cache.ledger.holding(uid)
            if not cache.loads.is_open(node):
                problems.append(f"{node} takes no pods")
            if self._read_zones()[node] != self._zones[node]:
                problems.append(f"{node} has lost the label by which it was chosen")
            if free is None or min(free) < 0:
                problems.append(f"{node} lacks cpu")
            state_of_node = cache.ledger.node(node)
            if holding is None or state_of_node is None:
                problems.append(f"{uid} has no cards")
            elif not all(state_of_node.cards[share.index].accepts_shares for share in holding.assignment.shares()):
                problems.append(f"a card of {node} takes no shares")
        headroom = cache.headroom("default")
        if any(entry.memory is not None and entry.memory < 0 for entry in headroom):
            problems.append("the quota is exceeded")
        with state._nominated.count_reserved(places.keys(), 0, set(places.values())):
            problems += [f"{problem} (nominated)" for problem in cache.ledger.violations()]
        rank = gang.rank() if gang is not None else (0, 0, "", "")
        with cache.gang_cards.count_reserved(
            set(cache.gang_cards.reserved_nodes(rank, "default")) & set(places.values())
        ):
            problems += [f"{problem} (gang reservation)" for problem in cache.ledger.violations()]
        return problems


def problems_of(changes: list[tuple[str, str]], mem: int, without: str = "") -> list[str]:
    """What is wrong after these changes.

    without: the check of the commit that is left out.
    """
    checks = {name: check for name, check in commit.CHECKS.items() if name != without}
    world = Judged(changes, mem)
    with mock.patch.dict(commit.CHECKS, checks, clear=True):
        try:
            world.play()
        except (AssertionError, KeyError) as error:
            world.problems.append(repr(error))
    return world.problems


def search(without: str, limit: int, seed: int = 0) -> int:
    """The number of random histories after which a check that is left out of the commit is found; 0 if it is not."""
    rng = random.Random(seed)
    for number in range(1, limit + 1):
        changes = [(rng.choice(sorted(CHANGES)), rng.choice(NODES)) for _ in range(rng.randrange(1, 7))]
        if problems_of(changes, rng.choice([P100 // 4, P100 // 2, P100]), without):
            return number
    return 0
