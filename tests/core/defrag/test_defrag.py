"""Which pods are moved so that a large request fits again."""

from dataclasses import replace

import pytest

from cardwise.cli.cluster.engine import ClusterEngine
from cardwise.core.api import quotas
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.defrag.defrag import plan
from cardwise.core.defrag.moving import DefragGoal, MovablePod, WhatIfCluster
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.placement.scored.workload import Workload
from tests.build import cards, shares

SIZE = 1000  # MiB of each card
NO_LOAD = Load(0, 0, 0)


class Placer:
    """The placement engine, node by node.

    loads: by node, the free cpu, memory and pods."""

    def __init__(self, ledger: Ledger, **loads: Load) -> None:
        self.ledger = ledger
        self.loads = loads

    def place(self, request, load, policy, nodes=None, headroom=()):
        names = [node.name for node in self.ledger.nodes() if nodes is None or node.name in nodes]
        placed = placement.place(
            self.ledger, [name for name in names if self._roomy(name, load)], request, policy, headroom
        )
        return placed if isinstance(placed, Placement) else None

    def add_load(self, node, load, sign=1):
        if node in self.loads:
            load_before = self.loads[node]
            self.loads[node] = Load(load_before.cpu - sign * load.cpu, load_before.memory, load_before.pods)

    def free_load(self, node):
        return self.loads.get(node, Load(1 << 40, 1 << 40, 100))

    def _roomy(self, node, load):
        return self.free_load(node).cpu >= load.cpu


def share(mem: int, count: int = 1) -> PodRequest:
    return PodRequest(containers=(ContainerRequest(key="0", name="main", cards=count, mem=mem),))


WHOLE = share(0)


def free_cards(count: int) -> DefragGoal:
    return DefragGoal(request=WHOLE, load=NO_LOAD, count=count, policy="binpack")


def fit(mem: int, count: int = 1) -> DefragGoal:
    return DefragGoal(request=share(mem), load=NO_LOAD, count=count, policy="binpack")


def cluster(**nodes: list[list[int]]) -> tuple[Ledger, list[MovablePod]]:
    """A cluster with pods of these sizes on each card, named a, b, c... in this order; all may be moved."""
    ledger = Ledger()
    movables = []
    for node, of_cards in nodes.items():
        ledger.set_cards(node, cards(*[SIZE] * len(of_cards), node=node))
        for index, mems in enumerate(of_cards):
            for mem in mems:
                uid = chr(ord("a") + len(movables))
                held = shares(mem, index, node=node, total=SIZE)
                ledger.set_holding(Holding(uid, "default", uid, node, Assignment({"0": held})))
                movables.append(MovablePod(uid=uid, request=share(mem), load=NO_LOAD, policy="binpack", mem=mem))
    return ledger, movables


def world(ledger: Ledger, **loads: Load) -> WhatIfCluster:
    return WhatIfCluster(ledger, Placer(ledger, **loads), lambda _: ())


def moves(defrag_plan) -> list[str]:
    """Such as "a: n1/0 > n2/1"."""
    routes = [
        (move.before.uid, *(f"{at.node}/{at.assignment.indices()[0]}" for at in (move.before, move.after)))
        for move in defrag_plan.moves
    ]
    return [f"{uid}: {before} > {after}" for uid, before, after in routes]


def test_the_card_with_the_fewest_pods_is_cleared():
    ledger, pods = cluster(n1=[[100, 100], [300]], n2=[[600]])
    defrag_plan = plan(world(ledger), free_cards(1), pods)
    assert moves(defrag_plan) == ["c: n1/1 > n2/0"]
    assert (defrag_plan.fit_counts, defrag_plan.is_minimal) == ((0, 1), True)


def test_nothing_is_moved_where_it_fits_already():
    ledger, pods = cluster(n1=[[], [300]])
    defrag_plan = plan(world(ledger), free_cards(1), pods)
    assert (defrag_plan.moves, defrag_plan.fit_counts) == ((), (1,))


def test_a_share_fits_where_the_holes_are_joined():
    ledger, pods = cluster(n1=[[300, 400]], n2=[[400, 250]])
    assert moves(plan(world(ledger), fit(500), pods)) == ["d: n2/0 > n1/0"]


def test_the_world_is_as_before():
    ledger, pods = cluster(n1=[[100, 100], [300]], n2=[[600]])
    before = {holding.uid: holding for holding in ledger.holdings()}
    plan(world(ledger), free_cards(2), pods)
    assert {holding.uid: holding for holding in ledger.holdings()} == before
    assert [list(node.free) for node in ledger.nodes()] == [[800, 700], [400]]


def test_a_pod_that_would_return_to_its_card_is_not_moved():
    """The policy spread would place the evicted pod on the emptiest card: the card that it has just left."""
    ledger, pods = cluster(n1=[[100], [600]])
    spreading = [replace(pod, policy="spread") for pod in pods]
    assert plan(world(ledger), free_cards(1), spreading, cordon=False).fit_counts[-1] == 0
    assert moves(plan(world(ledger), free_cards(1), pods, cordon=False)) == ["a: n1/0 > n1/1"]


def test_a_pod_that_would_return_to_its_card_is_moved_if_the_card_is_cordoned():
    ledger, pods = cluster(n1=[[100], [600]])
    defrag_plan = plan(world(ledger), free_cards(1), [replace(pod, policy="spread") for pod in pods])
    assert (moves(defrag_plan), defrag_plan.cordons, defrag_plan.is_minimal) == (["a: n1/0 > n1/1"], True, True)
    assert not any(card.cordoned for node in ledger.nodes() for card in node.cards)


def test_nothing_is_cordoned_where_that_saves_no_move():
    ledger, pods = cluster(n1=[[100], [600]])
    assert not plan(world(ledger), free_cards(1), pods).cordons


def test_a_card_that_a_person_has_cordoned_stays_so_and_is_no_free_card():
    ledger, pods = cluster(n1=[[100], [600], [200]])
    closed = [replace(card, cordoned=card.index == 0) for card in cards(SIZE, SIZE, SIZE)]
    ledger.set_cards("n1", closed)
    defrag_plan = plan(world(ledger), free_cards(2), [replace(pod, policy="spread") for pod in pods])
    assert defrag_plan.fit_counts[-1] < 2
    node = ledger.node("n1")
    assert node is not None
    assert node.cards == closed


def test_a_pod_that_would_return_beside_its_old_pod_is_not_moved():
    """While the old pod is on its card, this is the fullest card with capacity, so the new pod would join it there."""
    ledger, pods = cluster(n1=[[200, 400]], n2=[[300]])
    # n1 has 400 MiB free beside the old pod, and the new one takes 200 of them: the same card again.
    only = [pod for pod in pods if pod.uid == "a"]
    assert plan(world(ledger), fit(800), only, cordon=False).fit_counts[-1] == 0


def test_room_is_made_only_where_the_pods_of_the_goal_may_be():
    ledger, pods = cluster(n1=[[], [100]], n2=[[100], [300, 300]])
    goal = replace(free_cards(1), nodes=frozenset({"n2"}))
    defrag_plan = plan(world(ledger), goal, pods)
    assert (moves(defrag_plan), defrag_plan.fit_counts) == (["b: n2/0 > n2/1"], (0, 1))
    unsearched = plan(world(ledger), goal, pods, effort=0)
    assert moves(unsearched) == ["b: n2/0 > n2/1"]


def test_no_more_pods_of_one_owner_move_than_it_can_lose():
    ledger, pods = cluster(n1=[[100, 100], [300]], n2=[[900]])
    one_job = [replace(pod, owner="job", at_most=1) if pod.uid in "ab" else pod for pod in pods if pod.uid != "c"]
    assert plan(world(ledger), free_cards(1), one_job).fit_counts[-1] == 0
    two = [replace(pod, at_most=2) for pod in one_job]
    assert len(plan(world(ledger), free_cards(1), two).moves) == 2
    others = [replace(pod, owner=pod.uid) for pod in one_job]
    assert len(plan(world(ledger), free_cards(1), others).moves) == 2


def test_each_plan_counts_the_moves_of_an_owner_from_zero():
    ledger, pods = cluster(n1=[[100, 100], [300]], n2=[[900]])
    one_job = [replace(pod, owner="job", at_most=1) for pod in pods]
    assert moves(plan(world(ledger), free_cards(1), one_job)) == ["c: n1/1 > n1/0"]


def test_pods_that_may_not_move_stay():
    ledger, pods = cluster(n1=[[100], [300]], n2=[[500]])
    defrag_plan = plan(world(ledger), free_cards(1), [pod for pod in pods if pod.uid != "a"])
    assert moves(defrag_plan) == ["b: n1/1 > n2/0"]
    assert plan(world(ledger), free_cards(1), []).fit_counts[-1] == 0


def test_no_more_moves_than_allowed():
    ledger, pods = cluster(n1=[[100, 100], [300, 300]], n2=[[400]])
    assert moves(plan(world(ledger), free_cards(1), pods, max_moves=1)) == ["e: n2/0 > n1/1"]
    ledger, pods = cluster(n1=[[100, 100], [300, 300]], n2=[[200, 200]])
    assert plan(world(ledger), free_cards(1), pods, max_moves=1).fit_counts[-1] == 0
    assert len(plan(world(ledger), free_cards(1), pods, max_moves=2).moves) == 2


def test_of_equal_plans_the_least_important_pods_go():
    ledger, pods = cluster(n1=[[300], [300], [400]])
    important = [
        MovablePod(
            uid=pod.uid, request=pod.request, load=NO_LOAD, policy="binpack", priority=7 if pod.uid == "a" else 0
        )
        for pod in pods
    ]
    assert moves(plan(world(ledger), free_cards(1), important)) == ["b: n1/1 > n1/2"]


def test_pods_stay_on_the_nodes_that_they_may_be_on_and_need_cpu_there():
    ledger, pods = cluster(n1=[[300], [400]], n2=[[500]])
    (first,) = [pod for pod in pods if pod.uid == "a"]
    to_n2 = MovablePod(uid="a", request=first.request, load=NO_LOAD, policy="binpack", nodes=frozenset({"n2"}))
    assert moves(plan(world(ledger), free_cards(1), [to_n2])) == ["a: n1/0 > n2/0"]
    busy = MovablePod(uid="a", request=first.request, load=Load(500, 0), policy="binpack", nodes=frozenset({"n2"}))
    assert plan(world(ledger, n2=Load(400, 0, 10)), free_cards(1), [busy]).fit_counts[-1] == 0
    assert plan(world(ledger, n2=Load(600, 0, 10)), free_cards(1), [busy]).fit_counts[-1] == 1


def test_a_quota_keeps_a_pod_from_where_it_has_no_room():
    ledger, pods = cluster(n1=[[300], [400]])
    full = [quotas.headroom(QuotaEntry(memory=700), quotas.NO_CHARGE)]
    assert plan(WhatIfCluster(ledger, Placer(ledger), lambda _: full), free_cards(1), pods).fit_counts[-1] == 1
    tight = [quotas.headroom(QuotaEntry(memory=299), quotas.NO_CHARGE)]
    assert plan(WhatIfCluster(ledger, Placer(ledger), lambda _: tight), free_cards(1), pods).fit_counts[-1] == 0


def test_a_large_cluster_is_searched_greedily_and_the_plan_has_a_lower_bound():
    nodes = {f"n{i:02d}": [[300], [250], [200], [100]] for i in range(10)}
    ledger, pods = Ledger(), []
    for node, of_cards in nodes.items():
        ledger.set_cards(node, cards(*[SIZE] * 4, node=node))
        for index, (mem,) in enumerate(of_cards):
            uid = f"{node}-{index}"
            ledger.set_holding(
                Holding(uid, "d", uid, node, Assignment({"0": shares(mem, index, node=node, total=SIZE)}))
            )
            pods.append(MovablePod(uid=uid, request=share(mem), load=NO_LOAD, policy="binpack", mem=mem))
    defrag_plan = plan(world(ledger), free_cards(8), pods, effort=500)
    assert defrag_plan.fit_counts[-1] == 8
    assert 8 <= len(defrag_plan.moves) <= 12
    assert defrag_plan.min_moves < 8
    assert not defrag_plan.is_minimal
    assert ledger.holding("n00-0").node == "n00"


def test_a_move_can_free_the_card_for_another_move():
    """The pod of 250 MiB fits nowhere until the pod of 100 MiB has moved from the second card to the third."""
    ledger, pods = cluster(n1=[[250], [100, 700], [800, 50]])
    may = [pod for pod in pods if pod.mem in (250, 100)]
    defrag_plan = plan(world(ledger), free_cards(1), may)
    assert moves(defrag_plan) == ["b: n1/1 > n1/2", "a: n1/0 > n1/1"]
    assert defrag_plan.fit_counts == (0, 0, 1)


def uniform_cluster(nodes: int, per_node: int, size: int, policy: str) -> tuple[Ledger, list[MovablePod]]:
    """A cluster with one pod of 4000 MiB on each card."""
    ledger, pods = Ledger(), []
    for node in (f"n{i:02d}" for i in range(nodes)):
        ledger.set_cards(node, cards(*[size] * per_node, node=node))
        for i in range(per_node):
            uid = f"{node}-{i}"
            ledger.set_holding(Holding(uid, "d", uid, node, Assignment({"0": shares(4000, i, node=node, total=size)})))
            pods.append(MovablePod(uid=uid, request=share(4000), load=NO_LOAD, policy=policy, mem=4000))
    return ledger, pods


@pytest.mark.parametrize(("nodes", "per_node", "goal"), [(4, 8, 6), (4, 8, 24), (20, 2, 30)])
def test_of_each_node_as_many_cards_are_freed_as_can_be(nodes, per_node, goal):
    """Four of the pods fit on one card."""
    ledger, pods = uniform_cluster(nodes, per_node, 16_276, "binpack")
    defrag_plan = plan(world(ledger), free_cards(goal), pods, effort=500)
    assert (defrag_plan.fit_counts[-1], len(defrag_plan.moves), defrag_plan.cordons) == (goal, goal, False)


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 8), (20, 2)])
def test_of_more_cards_than_can_be_freed_as_many_are_as_can_be(nodes, per_node):
    ledger, pods = uniform_cluster(nodes, per_node, 16_276, "binpack")
    limit = nodes * per_node * 3 // 4
    beyond = plan(world(ledger), free_cards(limit + 1), pods, effort=500)
    assert (beyond.fit_counts[-1], beyond.is_exhaustive) == (limit, False)


@pytest.mark.parametrize(("goal", "moved"), [(1, 1), (3, 3), (26, 26)])
def test_priced_does_not_return_pods_to_cards_that_are_cordoned(goal, moved):
    """Three of the pods fit on one card; the workload consists of half cards."""
    ledger, pods = uniform_cluster(5, 8, 15_360, "priced")
    workload = Workload()
    for mem in (4000, 8138):
        workload.count_arrival(RequestSize(1, mem, 0, "", 0, 0), 50)
    engine = ClusterEngine(ledger, {}, workload.dump())
    wanted_goal = DefragGoal(request=WHOLE, load=NO_LOAD, count=goal, policy="priced")
    assert (
        plan(WhatIfCluster(ledger, engine, lambda _: ()), wanted_goal, pods, cordon=False, effort=100).fit_counts[-1]
        == 0
    )
    defrag_plan = plan(WhatIfCluster(ledger, engine, lambda _: ()), wanted_goal, pods, effort=100)
    assert (defrag_plan.fit_counts[-1], len(defrag_plan.moves), defrag_plan.cordons) == (goal, moved, True)


def test_a_search_of_all_plans_is_marked_exhaustive():
    ledger, pods = cluster(n1=[[300], [800]])
    assert plan(world(ledger), free_cards(1), pods).is_exhaustive
    assert not plan(world(ledger), free_cards(1), pods, effort=1).is_exhaustive
