"""Who is evicted for whom: the verb preempt, what is kept of the freed cards, and evictions by the extender itself."""

import json
import math

import pytest
from msgspec import structs

from cardwise.core.api import names, request
from cardwise.core.api.request import Load
from cardwise.core.placement.ledger import Ledger
from cardwise.core.preemption.preemption import _VictimSearch
from cardwise.core.values.refusals import Refusal
from cardwise.kube import paths
from cardwise.kube.pods import budgets
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints, Taint
from extender.api import verbs
from extender.api.app import create_app
from extender.api.verbs import AnswerSettings
from extender.cache.nominated import MAX_RESERVATIONS, NominatedPods
from extender.cache.pacing import LOCKED_SECONDS
from extender.controllers.evictions import Evictions
from extender.leadership.leadership import Denial
from extender.placing import nodesearch, placing
from extender.records import podinfo, wire
from extender.records.nodeinfo import NodeRecord, PlacedPod
from extender.records.podref import PodRef
from extender.records.wire import FilterArgs
from extender.state import State
from tests.build import P100, asking, budget, extended_resource
from tests.extender import nominationcluster
from tests.extender.api.serverparts import parts
from tests.extender.states import as_card, as_pod, as_quota, bound, looks_slowly, make_state, on_victim_search
from tests.fakes.apiserver import ApiServer, Fault, Request
from tests.fakes.clock import FakeClock

HALF = P100 // 2
LOW, MIDDLE, HIGH = 0, 100, 1000
PREFERENCES = AnswerSettings(policy="binpack", one_best_node=True)


class World:
    """Nodes with two cards, and what happens to their pods."""

    def __init__(self, *nodes: str, cpu: int = 64_000) -> None:
        self.clock = FakeClock()
        self.state: State = make_state(self.clock)
        self.api = ApiServer(self.clock)
        for node in nodes or ("n1",):
            self.state.set_node(node, NodeRecord(Load(cpu, 1 << 40, 100)))
            for i in range(2):
                self.state.set_card(*as_card(extended_resource(i, node=node)))

    def show_pod(self, pod: dict) -> dict:
        self.api.write_object(paths.pods(), pod)
        self.state.set_pod(as_pod(pod))
        return pod

    def runs(
        self,
        name: str,
        mem: int,
        *cards: int,
        node: str = "n1",
        priority: int = LOW,
        app: str = "",
        group: str = "",
        **fields,
    ):
        pod = bound(name, mem, *cards, node=node, **fields)
        if group:
            pod["spec"]["schedulingGroup"] = {"podGroupName": group}
        pod["spec"]["priority"] = priority
        pod["metadata"]["labels"] = {"app": app or name}
        return self.show_pod(pod)

    def ends(self, name: str) -> None:
        """Its deletion begins."""
        pod = self.api.edit(paths.pods("default", name), metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"})
        self.state.set_pod(as_pod(pod))

    def delete_pod(self, name: str) -> None:
        self.ends(name)
        ended = [{"name": "main", "state": {"terminated": {}}}]
        pod = self.api.edit(paths.pods("default", name), status={"containerStatuses": ended})
        self.state.set_pod(as_pod(pod))
        self.api.remove(paths.pods("default", name))
        self.state.remove_pod(as_pod(pod))

    def budget(self, app: str, allowed: int) -> None:
        manifest = budget(f"of-{app}", allowed=allowed, selector={"matchLabels": {"app": app}})
        self.state.preemption.set_budget(*budgets.decode_budget(json.dumps(manifest).encode()))

    def wants(self, name: str, mem: int = P100, *, priority: int = HIGH, **fields) -> dict:
        pod = asking(name, **({"gpu_mem": mem} if mem else {}), **fields)
        pod["spec"]["priority"] = priority
        return pod

    def preempt(self, pod: dict, **chosen: list[str]) -> dict[str, list[str]]:
        """Names of the victims by node; `chosen`: those of the scheduler."""
        return preempt(self.state, pod, chosen)

    def preempts(self, pod: dict, **chosen: list[str]) -> dict[str, list[str]]:
        """As `preempt`, and kube-scheduler takes n1 of the answer."""
        victims = self.preempt(pod, **chosen)
        self.nominate(pod, "n1")
        return victims

    def filter(self, pod: dict, *nodes: str) -> list[str]:
        args = FilterArgs(pod=pod, node_names=list(nodes or ["n1"]))
        return verbs.filter_nodes(self.state, PREFERENCES, args).node_names

    def nominate(self, pod: dict, node: str) -> None:
        refused = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
        self.show_pod(pod | {"status": {"phase": "Pending", "nominatedNodeName": node, "conditions": refused}})


def preempt(state: State, pod: dict, chosen: dict[str, list[str]]) -> dict[str, list[str]]:
    victims = {node: {"Pods": [{"UID": f"uid-{name}"} for name in some]} for node, some in chosen.items()}
    body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": victims}).encode()
    answer = verbs.preempt(state, PREFERENCES, wire.decode_preempt_args(body))
    document = json.loads(wire.encode(answer))["NodeNameToMetaVictims"]
    return {
        node: sorted(victim["UID"][4:] for victim in node_victims["Pods"]) for node, node_victims in document.items()
    }


def with_cpu(pod: dict, cpu: str) -> dict:
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}
    return pod


def other(name: str, cpu: str, *, priority: int = LOW, static: bool = False) -> tuple[str, PlacedPod]:
    """A pod on n1 that asks for no card. `static`: of the kubelet's own manifests."""
    pod = with_cpu(
        {"spec": {"nodeName": "n1", "priority": priority, "containers": [{"name": "c", "resources": {}}]}}, cpu
    )
    annotations = {names.MIRROR: "x", names.IDX: "0"} if static else {}
    pod["metadata"] = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations}
    record = podinfo.decode_pod(json.dumps(pod).encode())
    assert record is not None
    return record


@pytest.fixture
def world():
    return World()


@pytest.fixture
def full(world):
    """Two cards with two small pods each."""
    for name, card in (("a0", 0), ("a1", 1), ("b0", 0), ("b1", 1)):
        world.runs(name, HALF, card)
    return world


def test_pods_of_the_former_name_of_a_node_are_no_victims():
    """kube-scheduler knows them on another node, and nobody there would end them."""
    world = World("n1")
    world.state.set_node("former", NodeRecord(Load(64_000, 1 << 40, 100)))

    def runs_on_former(name: str, card: int) -> None:
        pod = bound(name, P100, card)
        pod["spec"] |= {"nodeName": "former", "priority": LOW}
        world.show_pod(pod)

    runs_on_former("old-0", 0)
    world.runs("here", P100, 1)
    assert world.preempt(world.wants("p"), n1=["here"]) == {"n1": ["here"]}
    world.delete_pod("here")
    runs_on_former("old-1", 1)
    assert world.preempt(world.wants("q"), n1=[]) == {}


def test_those_who_free_one_card_go_and_not_the_schedulers_own(full):
    assert full.preempt(full.wants("p"), n1=["a0", "a1"]) in ({"n1": ["a0", "b0"]}, {"n1": ["a1", "b1"]})


def test_a_node_where_no_card_can_be_freed_is_left_out():
    world = World("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-low{card}", HALF, card, node=node)
            world.runs(f"{node}-other{card}", HALF, card, node=node, priority=HIGH if node == "n1" else LOW)
    answer = world.preempt(world.wants("p"), n1=["n1-low0", "n1-low1"], n2=["n2-low0", "n2-low1"])
    assert list(answer) == ["n2"]
    assert len(answer["n2"]) == 2


def test_a_disruption_budget_counts_before_priorities(world):
    world.runs("big", P100, 0, priority=MIDDLE)
    world.runs("a", HALF, 1, app="web")
    world.runs("b", HALF, 1, app="web")
    world.budget("web", 1)
    assert world.preempt(world.wants("p"), n1=["a"]) == {"n1": ["big"]}
    world.budget("web", 2)
    assert world.preempt(world.wants("p"), n1=["a"]) == {"n1": ["a", "b"]}


def test_how_many_budgets_are_exceeded_is_said(world):
    world.runs("a", P100, 0, app="web")
    world.runs("b", P100, 1, app="web")
    world.budget("web", 0)
    body = {"Pod": world.wants("p"), "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-a"}]}}}
    answer = verbs.preempt(world.state, PREFERENCES, wire.decode_preempt_args(json.dumps(body).encode()))
    assert answer.node_name_to_meta_victims["n1"].num_pdb_violations == 1


def test_a_victim_that_no_sum_explains_stays_one(full):
    """It has a port, perhaps: only the scheduler knows."""
    full.state.set_pod_without_request(*other("ported", "1m"))
    assert "ported" in full.preempt(full.wants("p"), n1=["a0", "a1", "ported"])["n1"]


def test_nodes_are_looked_at_for_half_a_second():
    """kube-scheduler waits for one; what has been found by then is answered."""
    nodes = [f"n{i}" for i in range(9)]
    world = World(*nodes)
    for node in nodes:
        for card in (0, 1):
            world.runs(f"{node}-{card}", P100, card, node=node)
    looks_slowly(world.state, world.clock)
    assert len(world.preempt(world.wants("p"), **{node: [f"{node}-0"] for node in nodes})) == 5


def test_nobody_goes_for_a_pod_that_its_quota_keeps_waiting(world):
    for index in (0, 1):
        world.runs(f"a{index}", P100, index)
    world.state.set_quota(*as_quota({"memoryMiB": 3 * P100 - 1}))
    assert world.preempt(world.wants("p"), n1=["a0"]) == {}


def test_nobody_goes_for_a_pod_that_its_quota_forbids(full):
    wanted = full.wants("p", HALF, namespace="team")
    full.state.set_quota(*as_quota({"memoryMiB": HALF - 1}, namespace="team"))
    assert full.preempt(wanted, n1=["a0"]) == {}
    full.state.set_quota(*as_quota({"memoryMiB": HALF}, namespace="team"))
    assert full.preempt(wanted, n1=["a0"]) == {"n1": ["a0"]}


def test_a_static_pod_stays_since_its_kubelet_would_start_it_again():
    world = World(cpu=1000)
    world.state.set_pod_without_request(*other("static", "500m", static=True))
    world.show_pod(with_cpu(world.runs("a", HALF, 0, priority=MIDDLE), "500m"))
    assert world.preempt(with_cpu(world.wants("p", HALF), "500m"), n1=["a"]) == {"n1": ["a"]}


# Plans are no pods yet.


@pytest.fixture
def planned():
    """n1 has three cards. One is planned for a pod that comes before all others by its name, with its cpu."""
    world = nominationcluster.World("n2")
    world.node("n1", cards=3)
    world.full("n2")
    world.create("0", P100, cpu="1")
    assert world.nominate_all() == {"0": "n1"}
    return world


def holds(world, name, mem, card, priority=LOW):
    pod = bound(name, mem, card)
    pod["spec"]["priority"] = priority
    world.show_pod(pod)


def card_of(world, name):
    with world.state.view() as ledger:
        (index,) = ledger.holding(f"uid-{name}").assignment.indices()
    return index


def test_a_plan_fills_its_card_as_a_pod_does(planned):
    """So the scheduler's own victim, which the sums explain, stays where a less important one is enough."""
    first, second = {0, 1, 2} - {card_of(planned, "0")}
    holds(planned, "a", P100, first, MIDDLE)
    holds(planned, "b", P100, second)
    wanted = planned.create("p", P100, priority=HIGH)
    assert preempt(planned.state, wanted, {"n1": ["a"]}) == {"n1": ["b"]}


def test_nobody_is_evicted_who_is_not_there_yet(planned):
    for card in {0, 1, 2} - {card_of(planned, "0")}:
        holds(planned, f"low{card}", 1000, card)
        holds(planned, f"high{card}", P100 - 1000, card, HIGH)
    wanted = planned.create("p", P100, priority=HIGH)
    assert preempt(planned.state, wanted, {"n1": ["low1"]}) == {}


def test_what_is_planned_for_the_pod_itself_is_not_in_its_way_there():
    """Another pod has come and taken the cpu. Nobody on a card goes for a pod that has its card."""
    world = World(cpu=1000)
    world.runs("a", P100, 0)
    wanted = with_cpu(asking("p", whole_gpu=1), "800m")
    wanted["spec"]["priority"] = HIGH
    assert world.filter(wanted) == ["n1"]
    world.state.set_pod_without_request(*other("c", "900m"))
    assert world.preempt(wanted, n1=["c"]) == {"n1": ["c"]}


def test_nor_is_the_cpu_of_its_plan(planned):
    """It counted twice, and nobody went for the pod until its plan was over. Its card is its own, so only one goes."""
    wanted = planned.create("p", P100, priority=HIGH, cpu="40")
    assert planned.nominate_all() == {"p": "n1"}
    (last,) = {0, 1, 2} - {card_of(planned, "0"), card_of(planned, "p")}
    holds(planned, "a", P100, last)
    planned.state.set_pod_without_request(*other("c", "23", priority=MIDDLE))
    planned.state.set_pod_without_request(*other("d", "23"))
    assert preempt(planned.state, wanted, {"n1": ["c"], "n2": []}) == {"n1": ["d"]}


# Who waits already.


def test_where_a_pod_is_ending_already_nobody_else_goes(full):
    full.ends("a0")
    full.ends("b0")
    assert full.preempt(full.wants("p"), n1=["a1", "b1"]) == {"n1": ["a0", "b0"]}


def test_two_who_wait_for_pods_that_end_wait_for_two_cards(full):
    for name in ("a0", "b0", "a1", "b1"):
        full.ends(name)
    for name in ("p", "q"):
        assert full.preempt(full.wants(name), n1=["a0", "b0"]) == {"n1": ["a0", "a1", "b0", "b1"]}
    for name in ("a0", "b0", "a1", "b1"):
        full.delete_pod(name)
    assert full.filter(full.wants("low", 1000, priority=LOW)) == []


def test_a_pod_that_ends_is_named_only_where_it_could_be_a_victim(world):
    world.runs("equal", HALF, 0, priority=HIGH)
    world.runs("low", HALF, 0)
    world.runs("stays", P100, 1, priority=HIGH)
    world.ends("equal")
    world.ends("low")
    assert world.preempt(world.wants("p"), n1=["low"]) == {"n1": ["low"]}


def test_what_the_pod_holds_elsewhere_is_not_charged_to_its_quota_twice(world):
    world.state.set_node("n2", NodeRecord(Load(64_000, 1 << 40, 100)))
    world.state.set_card(*as_card(extended_resource(0, node="n2")))
    world.state.set_quota(*as_quota({"memoryMiB": 3 * P100}))
    for index in (0, 1):
        world.runs(f"a{index}", P100, index)
    wanted = world.wants("p")
    assert world.filter(wanted, "n2") == ["n2"]
    assert world.preempt(wanted, n1=["a0"]) == {"n1": ["a0"]}


def test_the_second_call_evicts_nobody_more(full):
    wanted = full.wants("p")
    (victims,) = full.preempts(wanted, n1=["a0", "a1"]).values()
    for name in victims:
        full.ends(name)
    assert full.preempt(wanted, n1=["a0", "b0", "a1", "b1"]) == {}


def test_victims_that_nobody_deletes_are_answered_again_and_their_cards_kept_no_longer(full):
    """kube-scheduler's deletions failed, say, or it ended before them."""
    wanted = full.wants("p")
    (victims,) = full.preempts(wanted, n1=["a0", "a1"]).values()
    seen = as_seen(wanted, "7", "n1")
    full.clock.advance(2)
    assert full.preempt(seen, n1=["a0", "a1"]) == {}, "the watch may be behind"
    full.state.next_requeue_node()
    full.clock.advance(3)
    assert full.state.next_requeue_node() == "n1", "it is tried again"
    assert full.preempt(seen, n1=["a0", "a1"]) == {"n1": victims}
    full.clock.advance(61)
    full.state.expire_reservations()
    full.delete_pod(victims[0])
    full.delete_pod(victims[1])
    assert full.filter(full.wants("low", priority=LOW)) == ["n1"]


@pytest.mark.parametrize("lost", ["unreachable", "cordoned", "gone"])
def test_victims_that_end_on_a_lost_node_keep_the_pod_from_no_other_node(two, lost):
    wanted = two.wants("p")
    victims = two.preempts(wanted, **YOUNGEST)
    for name in victims["n1"]:
        two.ends(name)
    seen = as_seen(wanted, "7", "n1")
    for _ in range(10):
        two.clock.advance(20)
        two.state.expire_reservations()
    assert two.preempt(seen, n2=YOUNGEST["n2"]) == {}, "they take their time"
    taints = (Taint("node.kubernetes.io/unreachable", "", "NoSchedule"),)
    if lost == "gone":
        two.state.remove_node("n1")
    else:
        ground = NodeLabelsAndTaints(taints=taints) if lost == "unreachable" else NodeLabelsAndTaints()
        two.state.set_node(
            "n1", NodeRecord(Load(64_000, 1 << 40, 100), schedulable=lost == "unreachable", node_labels=ground)
        )
    assert two.preempt(seen, n2=YOUNGEST["n2"]) == {"n2": victims["n2"]}


def test_a_node_that_the_pod_may_not_use_any_more_is_waited_for_a_minute_and_no_longer(two):
    """By a taint of the pod's own concern, say. One call may leave a node out for many reasons."""
    wanted = two.wants("p")
    victims = two.preempts(wanted, **YOUNGEST)
    for name in victims["n1"]:
        two.ends(name)
    seen = as_seen(wanted, "7", "n1")
    two.clock.advance(300)
    assert two.preempt(seen, n2=YOUNGEST["n2"]) == {}
    two.clock.advance(40)
    assert two.preempt(seen, **YOUNGEST) == {}, "it is offered again"
    two.clock.advance(40)
    assert two.preempt(seen, n2=YOUNGEST["n2"]) == {}
    two.state.next_requeue_node()
    two.clock.advance(60)
    assert two.state.next_requeue_node() is not None
    assert two.preempt(seen, n2=YOUNGEST["n2"]) == {"n2": victims["n2"]}


def test_who_is_answered_again_and_named_the_same_node_has_nothing_kept_elsewhere(two):
    wanted = two.wants("p")
    two.preempt(wanted, **YOUNGEST)
    two.nominate(wanted, "n1")
    two.clock.advance(6)
    assert set(two.preempt(as_seen(wanted, "7", "n1"), **YOUNGEST)) == {"n1", "n2"}
    two.clock.advance(6)
    two.state.expire_reservations()
    assert len(two.preempt(two.wants("q"), n2=YOUNGEST["n2"])["n2"]) == 2
    assert two.state._reservations.nominations.nominated_node("uid-p") == "n1"


def test_a_new_leader_keeps_cards_until_the_victims_of_the_former_one_are_gone(full):
    """It knows the nomination from the pod's status."""
    wanted = full.wants("p")
    full.nominate(wanted, "n1")
    for name in ("a0", "b0"):  # the watch shows one after the other
        full.ends(name)
        full.state.expire_reservations()
    full.clock.advance(1)
    full.state.expire_reservations()
    full.delete_pod("a0")
    for _ in range(10):
        full.clock.advance(20)
        full.state.expire_reservations()
    full.state.forget_plans()
    full.delete_pod("b0")
    assert full.filter(full.wants("low", priority=LOW)) == []
    full.clock.advance(61)
    full.state.expire_reservations()
    assert full.filter(full.wants("low", priority=LOW)) == ["n1"]


def test_who_binds_on_another_card_than_was_kept_for_it_wakes_those_who_could_have_that_one(full):
    wanted = full.wants("p", HALF)
    assert full.preempt(wanted, n1=["a0"]) == {"n1": ["a0"]}
    full.nominate(wanted, "n1")
    for name in ("a0", "b0", "a1"):
        full.delete_pod(name)
    assert full.filter(full.wants("low", priority=LOW)) == []
    full.clock.advance(5)
    full.state.next_requeue_node()
    full.runs("p", HALF, 1, priority=HIGH)
    assert full.state.next_requeue_node() == "n1"


def test_who_binds_where_its_cards_were_kept_wakes_nobody(full):
    wanted = full.wants("p")
    (victims,) = full.preempts(wanted, n1=["a0", "a1"]).values()
    for name in victims:
        full.delete_pod(name)
    assert full.filter(full.wants("low", HALF, priority=LOW)) == []
    full.clock.advance(5)
    full.state.next_requeue_node()
    freed = full.state._cache.capacity.freed_count
    full.runs("p", P100, int(victims[0][1]), priority=HIGH)
    assert full.state._cache.capacity.freed_count == freed


def test_who_was_refused_what_is_kept_for_a_pod_is_tried_again_when_that_pod_is_deleted(full):
    """kube-scheduler has tried it again by then, but saw the deletion before the extender did."""
    wanted = full.wants("p")
    (victims,) = full.preempts(wanted, n1=["a0", "a1"]).values()
    for name in victims:
        full.delete_pod(name)
    full.clock.advance(10)
    full.state.next_requeue_node()
    assert full.filter(full.wants("low", HALF, priority=LOW)) == []
    full.state.remove_pod(as_pod(wanted))
    assert full.state.next_requeue_node() == "n1"


def test_cards_are_kept_while_a_victim_without_cards_ends():
    world = World(cpu=4000)
    key, record = other("plain", "3")
    world.state.set_pod_without_request(key, record)
    wanted = with_cpu(world.wants("p", 1000), "3")
    assert world.preempt(wanted, n1=["plain"]) == {"n1": ["plain"]}
    world.nominate(wanted, "n1")
    world.state.set_pod_without_request(key, structs.replace(record, terminating=True))
    world.clock.advance(61)
    world.state.expire_reservations()
    assert world.state._reservations.nominations.get("uid-p") is not None
    world.state.remove_pod_without_request(key)
    world.clock.advance(61)
    world.state.expire_reservations()
    assert world.state._reservations.nominations.get("uid-p") is None


def test_two_pods_get_two_cards(full):
    first, second = full.preempt(full.wants("p"), n1=["a0", "a1"]), full.preempt(full.wants("q"), n1=["a0", "a1"])
    assert sorted(first["n1"] + second["n1"]) == ["a0", "a1", "b0", "b1"]
    assert full.preempt(full.wants("r"), n1=["a0", "a1", "b0", "b1"]) == {}


# The watch is behind kube-scheduler.


@pytest.fixture
def two():
    """Two nodes of two cards, with two small pods on each card."""
    world = World("n1", "n2")
    for node in ("n1", "n2"):
        for name, card in (("a0", 0), ("a1", 1), ("b0", 0), ("b1", 1)):
            world.runs(f"{node}-{name}", HALF, card, node=node)
    return world


YOUNGEST = {"n1": ["n1-b0", "n1-b1"], "n2": ["n2-b0", "n2-b1"]}


def test_who_comes_next_frees_one_card_whichever_node_the_first_has_taken(two):
    first, second = two.preempt(two.wants("p"), **YOUNGEST), two.preempt(two.wants("q"), **YOUNGEST)
    for node in ("n1", "n2"):
        assert sorted(first[node] + second[node]) == [f"{node}-{name}" for name in ("a0", "a1", "b0", "b1")]
        assert len(second[node]) == 2


def test_which_node_the_first_has_taken_is_waited_for_a_moment(two):
    pods = [two.wants(name) for name in ("p", "q")]
    for pod in pods:
        two.preempt(pod, **YOUNGEST)
    two.clock.sleep = lambda _: [two.nominate(pod, "n1") for pod in pods]
    before = two.clock.now()
    assert len(two.preempt(two.wants("r"), n1=[f"n1-{name}" for name in ("a0", "a1", "b0", "b1")])) == 0
    assert len(two.preempt(two.wants("s"), n2=YOUNGEST["n2"])["n2"]) == 2
    assert two.clock.now() == before


def test_it_is_not_waited_for_long(two):
    two.preempt(two.wants("p"), **YOUNGEST)
    for name, longest in (("q", 0.3), ("r", 0.3)):
        before = two.clock.now()
        two.preempt(two.wants(name), **YOUNGEST)
        assert two.clock.now() - before <= longest
    two.clock.advance(1)
    before = two.clock.now()
    two.preempt(two.wants("s"), **YOUNGEST)
    assert two.clock.now() == before


def as_seen(pod: dict, version: str, node: str = "") -> dict:
    """As kube-scheduler has it after a try in vain."""
    refused = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    return pod | {
        "metadata": pod["metadata"] | {"resourceVersion": version},
        "status": {"phase": "Pending", "nominatedNodeName": node, "conditions": refused},
    }


@pytest.fixture
def again(two):
    """p has been answered both nodes, and kube-scheduler comes for it again: n1 has room in its sums by now."""
    wanted = two.wants("p")
    assert set(two.preempt(as_seen(wanted, "5"), **YOUNGEST)) == {"n1", "n2"}
    return lambda version, node="": two.preempt(as_seen(wanted, version, node), n2=YOUNGEST["n2"])


def test_who_was_nominated_evicts_nobody_more_though_we_have_seen_neither_that_nor_the_victims_end(two, again):
    assert again("6", "n1") == {}
    for name in ("q", "r"):  # nothing of n2 is kept for it any more
        assert len(two.preempt(two.wants(name), n2=YOUNGEST["n2"])["n2"]) == 2


def test_nor_does_who_has_not_seen_its_own_nomination_yet(again):
    assert again("5") == {}


def test_nor_who_has_seen_less_of_itself_than_we_of_its_victims(two, again):
    two.ends("n1-a0")
    two.ends("n1-b0")
    two.ends("n1-a1")
    assert again("6") == {}


def test_but_who_could_take_none_of_the_nodes_is_answered_again(again):
    assert len(again("6")["n2"]) == 2


def test_and_who_is_not_told_of_in_time(two, again):
    two.clock.advance(6)
    two.state.expire_reservations()
    assert len(again("5")["n2"]) == 2


@pytest.fixture(params=[MAX_RESERVATIONS, 0], ids=["beside few", "beside many"])
def freed(full, request, monkeypatch):
    """p was nominated, and its victims are gone."""
    monkeypatch.setattr(placing, "MAX_RESERVATIONS", request.param)
    wanted = full.wants("p")
    (victims,) = full.preempts(wanted, n1=["a0", "a1"]).values()
    for name in victims:
        full.delete_pod(name)
    return full


def test_the_freed_card_is_kept_for_the_pod(freed):
    assert freed.filter(freed.wants("low", 1000, priority=LOW)) == []
    assert freed.filter(freed.wants("equal", 1000, priority=HIGH)) == []
    assert freed.filter(freed.wants("p")) == ["n1"]


def test_it_is_kept_from_the_moment_of_the_answer(full):
    (victims,) = full.preempt(full.wants("p"), n1=["a0", "a1"]).values()
    for name in victims:
        full.delete_pod(name)
    assert full.filter(full.wants("low", 1000, priority=LOW)) == []


def test_the_cpu_of_the_pod_is_kept_as_well():
    world = World(cpu=1000)
    for index in (0, 1):
        world.runs(f"a{index}", P100, index)
    first, second = (world.wants(name) for name in "pq")
    for pod in (first, second):
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "800m"}
    assert world.preempt(first, n1=["a0"]) == {"n1": ["a0"]}
    world.nominate(first, "n1")
    assert world.preempt(second, n1=["a1"]) == {}, "whoever goes, there is cpu for one of them"


@pytest.mark.parametrize(("limit", "node"), [(MAX_RESERVATIONS, "n1"), (1, "n1"), (0, "n2")])
def test_where_it_takes_long_to_count_what_is_kept_other_nodes_come_first(limit, node, monkeypatch):
    monkeypatch.setattr(placing, "MAX_RESERVATIONS", limit)
    world = World("n1", "n2")
    world.runs("a", P100, 0)
    world.runs("b", HALF, 1, priority=HIGH)
    wanted = world.wants("p")
    assert world.preempt(wanted, n1=["a"]) == {"n1": ["a"]}
    world.nominate(wanted, "n1")
    assert world.filter(world.wants("low", 1000, priority=LOW), "n1", "n2") == [node]


def test_many_reservations_on_one_node_are_not_counted_under_the_lock(monkeypatch):
    """A tenant preempts his own small pods: 48 on each of 64 nodes, and each filter call counted all of them."""
    world, nominated = World("n1", "n2", cpu=640_000), MAX_RESERVATIONS + 16
    world.state.set_node("n1", NodeRecord(Load(640_000, 1 << 40, 1000)))
    for card in (0, 1):
        world.runs(f"rest-{card}", P100 - 100 * nominated // 2, card, priority=HIGH)
    for i in range(nominated):
        world.runs(f"v{i}", 100, i % 2)
    for i in range(nominated):
        assert world.preempts(world.wants(f"p{i}", 100), n1=[f"v{i}"]) != {}
    for i in range(nominated):
        world.delete_pod(f"v{i}")
    live, added, what_if = world.state._ledger, list[int](), Ledger.what_if

    def count(ledger, **changes):
        if ledger is live:
            added.append(len(changes.get("added", ())))
        return what_if(ledger, **changes)

    monkeypatch.setattr(Ledger, "what_if", count)
    assert world.filter(world.wants("other", 50), "n1") == []
    assert world.filter(world.wants("low", 50, priority=LOW), "n1", "n2") == ["n2"]
    assert world.filter(world.wants("higher", 50, priority=HIGH + 1), "n1") == ["n1"]
    assert max(added) <= MAX_RESERVATIONS


def test_but_the_cpu_of_one_pod_is_kept_once():
    world = World(cpu=1000)
    for index in (0, 1):
        world.runs(f"a{index}", P100, index)
    first, second = (with_cpu(world.wants(name), "400m") for name in "pq")
    assert world.preempt(first, n1=["a0"]) == {"n1": ["a0"]}
    world.nominate(first, "n1")
    assert world.preempt(second, n1=["a1"]) == {"n1": ["a1"]}


def test_what_victims_leave_beside_who_they_go_for_is_room_for_the_next(world):
    """Else another pod would go in vain."""
    for index in (0, 1):
        world.runs(f"a{index}", P100, index)
    first, second = (world.wants(name, HALF) for name in "pq")
    assert world.preempt(first, n1=["a0"]) == {"n1": ["a0"]}
    world.nominate(first, "n1")
    assert world.preempt(second, n1=["a1"]) == {}
    world.delete_pod("a0")
    assert world.filter(second) == ["n1"]


def test_a_pod_of_higher_priority_may_have_it(freed):
    assert freed.filter(freed.wants("higher", priority=HIGH + 1)) == ["n1"]


def test_it_is_kept_in_bind_as_well(freed):
    low = freed.wants("low", 1000, priority=LOW)
    begun = freed.state.assume(PodRef("uid-low", "default", "low"), request.parse(low), "n1", "binpack", epoch=0)
    assert begun is Refusal.NO_MEMORY


@pytest.mark.parametrize("change", ["bound", "deleted", "elsewhere", "time"])
def test_it_is_kept_no_longer_than_the_pod_waits_there(freed, change):
    wanted = freed.wants("p")
    if change == "bound":
        freed.state.set_node("n2")
        freed.state.set_card(*as_card(extended_resource(0, node="n2")))
        freed.runs("p", P100, 0, node="n2")
    elif change == "deleted":
        freed.state.remove_pod(as_pod(wanted))
    elif change == "elsewhere":
        freed.state.set_node("n2")
        freed.nominate(wanted, "n2")
    else:
        freed.clock.advance(61)
        freed.state.expire_reservations()
    assert freed.filter(freed.wants("low", 1000, priority=LOW)) == ["n1"]


def test_while_victims_end_slowly_it_stays_kept(full):
    wanted = full.wants("p")
    (victims,) = full.preempts(wanted, n1=["a0", "a1"]).values()
    for name in victims:
        full.ends(name)
    for _ in range(10):
        full.clock.advance(50)
        full.state.expire_reservations()
    for name in victims:
        full.delete_pod(name)
    full.clock.advance(50)
    full.state.expire_reservations()
    assert full.filter(full.wants("low", 1000, priority=LOW)) == []


def test_another_extender_learns_it_from_the_pods_status(full):
    for name in ("a0", "b0"):
        full.delete_pod(name)
    full.nominate(full.wants("p"), "n1")
    assert full.filter(full.wants("low", 1000, priority=LOW)) == []
    assert full.filter(full.wants("p")) == ["n1"]


def test_and_of_several_such_pods_one_that_has_no_room_yet_is_no_reason_to_keep_nothing_for_the_others(full):
    full.delete_pod("a0")
    full.nominate(full.wants("big"), "n1")
    full.nominate(full.wants("small", 1000), "n1")
    assert full.filter(full.wants("low", HALF, priority=LOW)) == []
    assert full.filter(full.wants("low", HALF - 1000, priority=LOW)) == ["n1"]


@pytest.mark.parametrize(("policy", "low"), [("spread", []), ("binpack", ["n1"])])
def test_and_keeps_the_card_that_the_pods_own_policy_takes(world, policy, low):
    world.runs("a", 1000, 0)
    world.nominate(world.wants("p", 1000, annotations={names.POLICY: policy}), "n1")
    assert world.filter(world.wants("low", priority=LOW)) == low


def test_a_node_that_is_named_while_the_pod_is_bound_there_is_no_preemption(world):
    """Since 1.35 kube-scheduler names it at the start of a binding that has volumes to wait for."""
    world.runs("a", P100, 0)
    wanted = world.wants("p")
    assert world.filter(wanted) == ["n1"]
    world.nominate(wanted, "n1")
    world.clock.advance(31)
    world.state.expire_reservations()
    assert world.filter(world.wants("low", priority=LOW)) == ["n1"]


def test_a_status_that_names_no_node_any_more_ends_nothing(freed):
    """The scheduler clears it where it finds nobody to evict, as when the victims are gone and their cards not yet."""
    freed.nominate(freed.wants("p"), "")
    assert freed.filter(freed.wants("low", 1000, priority=LOW)) == []


# The wire.


def test_the_call_of_a_scheduler_that_sends_whole_pods(full):
    whole = {"n1": {"Pods": [{"metadata": {"name": "a0", "uid": "uid-a0"}}], "NumPDBViolations": 0}}
    body = json.dumps({"pod": full.wants("p"), "nodenametovictims": whole}).encode()
    answer = verbs.preempt(full.state, PREFERENCES, wire.decode_preempt_args(body))
    assert len(answer.node_name_to_meta_victims["n1"].pods) == 2


def test_answers_in_gos_spelling_and_without_an_answer_503():
    body = json.dumps({"Pod": asking("p", gpu_mem=P100), "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "x"}]}}})
    client = create_app(parts()).test_client()
    answer = client.post("/gpushare-scheduler/preempt", data=body)
    # Somebody whom we have not seen there: kube-scheduler asks again, and one wrong name would spoil its whole answer.
    assert answer.get_json() == {"NodeNameToMetaVictims": {}}
    assert client.post("/gpushare-scheduler/preempt", data=b"{}").status_code == 503

    class Standby:
        def denial(self):
            return Denial("not the leader", served_elsewhere=False)

    client = create_app(parts(leadership=Standby())).test_client()
    assert client.post("/gpushare-scheduler/preempt", data=body).status_code == 503


def test_a_pod_that_came_by_its_marker_only_keeps_the_schedulers_choice(full):
    plain = {"metadata": {"name": "p", "uid": "uid-p", "namespace": "default"}, "spec": {"containers": [{"name": "c"}]}}
    assert full.preempt(plain, n1=["a0"]) == {"n1": ["a0"]}


# With Kubernetes' own PodGroups.


@pytest.fixture
def grouped():
    """Two nodes; pods of one PodGroup on both, and others."""
    world = World("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-g{card}", HALF, card, node=node, group="g")
            world.runs(f"{node}-o{card}", HALF, card, node=node)
    return world


def test_where_a_group_would_break_nobody_goes(grouped):
    """kube-scheduler names all pods of a group that goes whole, on each node; it takes those of the node alone."""
    whole = [f"{node}-g{card}" for node in ("n1", "n2") for card in (0, 1)]
    assert grouped.preempt(grouped.wants("p", HALF), n1=whole, n2=["n2-o0"]) == {"n2": ["n2-o0"]}


def test_nobody_of_a_group_goes_whom_kube_scheduler_has_not_named(grouped):
    assert grouped.preempt(grouped.wants("p"), n1=["n1-o0", "n1-o1"]) == {}


def test_the_pods_of_a_group_go_together(grouped):
    answer = grouped.preempt(grouped.wants("p"), n1=["n1-g0", "n1-g1"])
    assert answer in ({"n1": ["n1-g0", "n1-g1", "n1-o0"]}, {"n1": ["n1-g0", "n1-g1", "n1-o1"]})


def test_a_pod_that_came_by_its_marker_only_breaks_no_group(grouped):
    plain = {"metadata": {"name": "p", "uid": "uid-p", "namespace": "default"}, "spec": {"containers": [{"name": "c"}]}}
    assert grouped.preempt(plain, n1=["n1-g0", "n2-g0"], n2=["n2-o0"]) == {"n2": ["n2-o0"]}


# Fragmented cards.


class Events:
    def __init__(self) -> None:
        self.recorded: list[tuple[str, str]] = []

    def record(self, regarding, reason, message, type="Normal"):  # noqa: A002
        self.recorded.append((regarding.name, reason))


class Scene:
    """Both cards have a small pod of low priority; a pod that needs a whole card was refused."""

    def __init__(self, **fields) -> None:
        self.begin(World(), **fields)
        self.world.runs("a", HALF, 0)
        self.world.runs("b", HALF, 1)

    def begin(self, world: World, **fields) -> None:
        """The pod waits, and nothing runs yet."""
        self.world = world
        self.wanted = self.world.show_pod(self.world.wants("p", **fields))
        self.api, self.events, self.leads = self.world.api, Events(), True
        self.api.before_request(self._only_of_its_uid, "create", times=math.inf)
        self._fresh = self.api.follow(paths.pods())
        self.evictions = Evictions(
            self.api.client(), self.world.state.preemption, self.events, active=lambda: self.leads,
            clock=self.world.clock,
        )  # fmt: skip

    def _only_of_its_uid(self, call: Request) -> None:
        name = call.body["metadata"]["name"]
        assert call.path == paths.pods("default", name, "eviction")
        assert call.body["deleteOptions"]["preconditions"] == {"uid": f"uid-{name}"}

    def evicted(self) -> list[str]:
        pods = self.api.all(paths.pods())
        return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]]

    def rounds(self, count: int = 1, *, seconds: float = 4.0) -> None:
        for _ in range(count):
            assert self.world.filter(self.wanted) == [] or self.evicted()
            self.world.clock.advance(seconds)
            self.world.state.expire_reservations()
            self.evictions.step()
            for event in self._fresh():
                self.world.state.set_pod(as_pod(event["object"]))


@pytest.fixture
def scene():
    return Scene()


def test_one_pod_goes_once_and_both_are_told(scene):
    scene.rounds(5)
    assert len(scene.evicted()) == 1
    assert sorted(scene.events.recorded) == [(scene.evicted()[0], "Preempted"), ("p", "Preempting")]


def test_who_could_have_the_card_is_tried_again_when_the_pod_that_it_was_freed_for_is_deleted(scene):
    """kube-scheduler knows nothing of what is kept for it."""
    scene.rounds(2)
    scene.world.delete_pod(scene.evicted()[0])
    assert scene.world.filter(scene.world.wants("low", HALF + 1, priority=LOW)) == []
    scene.world.clock.advance(15)
    scene.world.state.next_requeue_node()
    scene.world.state.remove_pod(as_pod(scene.wanted))
    scene.world.clock.advance(2)
    assert scene.world.state.next_requeue_node() == "n1"


def test_kube_scheduler_offers_no_node_where_the_extender_evicts_and_that_is_no_reason_to_give_it_up(scene):
    """The sums of that node have room, so it is asked about other nodes."""
    world = scene.world
    world.state.set_node("n2", NodeRecord(Load(64_000, 1 << 40, 100)))
    for card in (0, 1):
        world.state.set_card(*as_card(extended_resource(card, node="n2")))
        world.runs(f"other{card}", P100, card, node="n2")
    scene.rounds(2)
    (going,) = scene.evicted()
    for _ in range(10):
        assert world.preempt(as_seen(scene.wanted, "7"), n2=["other0"]) == {}
        world.clock.advance(20)
        world.state.expire_reservations()
    world.delete_pod(going)
    assert world.filter(scene.wanted) == ["n1"]


def test_nobody_goes_for_a_pod_that_was_deleted_while_filter_answered_for_it(scene):
    scene.world.state.remove_pod(as_pod(scene.wanted))
    scene.rounds(5)
    assert scene.evicted() == []


def test_the_freed_card_goes_to_who_it_was_freed_for(scene):
    scene.rounds(2)
    scene.world.delete_pod(scene.evicted()[0])
    assert scene.world.filter(scene.world.wants("low", HALF + 1, priority=LOW)) == []
    assert scene.world.filter(scene.wanted) == ["n1"]


def test_not_before_the_pod_has_waited_a_while(scene):
    scene.rounds(1, seconds=1)
    assert scene.evicted() == []


class Yielding(Scene):
    """With so many nodes like the first; after eight searches there is a pause, and `meanwhile` happens in each."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        for node in self.nodes[1:]:
            self.world.state.set_node(node, NodeRecord(Load(64_000, 1 << 40, 100)))
            for i in range(2):
                self.world.state.set_card(*as_card(extended_resource(i, node=node)))
                self.world.runs(f"{node}-{i}", HALF, i, node=node)
        self.slept = 0
        self.meanwhile = lambda: None
        sleep = self.world.clock.sleep

        def sleeps(seconds: float) -> None:
            sleep(seconds)
            self.slept += 1
            assert self.world.state.lock_held_seconds() == 0.0
            self.meanwhile()

        self.world.clock.sleep = sleeps

        def costs(_) -> None:
            self.world.clock.worked += LOCKED_SECONDS / 8

        on_victim_search(self.world.state, costs)

    def asks(self) -> None:
        """The scheduler does, and after a while it is time to look for victims."""
        assert self.world.filter(self.wanted, *self.nodes) == []
        self.world.clock.advance(4.0)
        self.evictions.step()
        for event in self._fresh():
            self.world.state.set_pod(as_pod(event["object"]))


def test_a_search_of_many_nodes_pauses_for_other_calls():
    scene = Yielding(20)
    scene.asks()
    assert scene.slept == 2  # after 8 and 16 nodes
    assert len(scene.evicted()) == 1


MEANWHILE = {
    "bound": lambda world, _: world.runs("p", P100, 0, node="n99"),
    "nominated": lambda world, wanted: world.nominate(wanted, "n99"),
    "deleted": lambda world, wanted: world.state.remove_pod(as_pod(wanted)),
}


@pytest.mark.parametrize("change", MEANWHILE)
def test_nobody_goes_for_a_pod_that_needs_nobody_when_all_nodes_have_been_looked_at(change):
    scene = Yielding(20)
    scene.meanwhile = lambda: MEANWHILE[change](scene.world, scene.wanted)
    scene.asks()
    assert scene.evicted() == []


def test_a_node_where_nobody_may_go_does_not_end_the_search():
    scene = Yielding(2)
    for card in (0, 1):
        scene.world.runs(f"stays-{card}", P100 - HALF, card, priority=HIGH)
    scene.asks()
    assert scene.evicted() == ["n2-0"]


def test_who_begins_to_end_since_the_first_look_is_waited_for():
    scene = Yielding(9)
    scene.meanwhile = lambda: scene.world.ends("a")
    assert scene.world.filter(scene.wanted, *scene.nodes) == []
    scene.world.clock.advance(4.0)
    assert scene.world.state.preemption.next_evictions() == [], "an eviction of nobody"


def test_who_has_come_to_the_best_node_since_it_was_looked_at_is_seen():
    scene = Yielding(9)
    scene.meanwhile = lambda: scene.world.budget("a", 0)
    scene.asks()
    assert scene.evicted() == ["b"]


def test_not_while_somebody_goes_for_it_already(scene):
    scene.world.preempt(scene.wanted, n1=["a"])
    scene.world.nominate(scene.wanted, "n1")
    scene.rounds(3)
    assert scene.evicted() == []


def test_not_where_a_pod_ends_whose_object_has_vanished(scene):
    """Its containers may not be gone: its card is awaited."""
    vanished = scene.api.get(paths.pods("default", "b"))
    scene.world.state.remove_pod(as_pod(vanished))
    scene.api.remove(paths.pods("default", "b"))
    scene.rounds(3)
    assert scene.evicted() == []


def test_not_on_a_node_that_takes_no_pods_any_more(scene):
    assert scene.world.filter(scene.wanted) == []
    scene.world.clock.advance(4.0)
    scene.world.state.set_node("n1", NodeRecord(Load(64_000, 1 << 40, 100), schedulable=False))
    scene.evictions.step()
    assert scene.evicted() == []


def test_not_on_a_node_of_a_former_refusal(scene):
    assert scene.world.filter(scene.wanted) == []
    assert scene.world.filter(scene.wanted, "n9") == []
    scene.world.clock.advance(4.0)
    scene.evictions.step()
    assert scene.evicted() == []


def test_not_any_more_once_the_pod_is_nominated_elsewhere(scene):
    assert scene.world.filter(scene.wanted) == []
    scene.world.clock.advance(4.0)
    preemption = scene.world.state.preemption
    (eviction,) = preemption.next_evictions()
    (victim,) = eviction.victims
    assert preemption.is_eviction_needed(eviction, victim.uid)
    scene.world.nominate(scene.wanted, "n2")
    assert not preemption.is_eviction_needed(eviction, victim.uid)


def test_not_for_a_pod_that_got_all_nodes_that_fit_since_it_was_refused(scene):
    """It holds nothing until its bind."""
    scene.world.state.set_node("n2", NodeRecord(Load(64_000, 1 << 40, 100)))
    scene.wanted["metadata"]["annotations"][names.ONE_NODE] = "false"
    assert scene.world.filter(scene.wanted) == []
    with scene.world.state.queue() as queue:
        assert queue.is_unschedulable("uid-p")
    scene.world.state.set_card(*as_card(extended_resource(0, node="n2")))
    assert scene.world.filter(scene.wanted, "n1", "n2") == ["n2"]
    with scene.world.state.queue() as queue:
        assert not queue.is_unschedulable("uid-p")
    scene.world.clock.advance(4.0)
    scene.evictions.step()
    assert scene.evicted() == []


def test_not_for_a_pod_whose_class_preempts_nobody(scene):
    scene.wanted["spec"]["preemptionPolicy"] = "Never"
    scene.rounds(5)
    assert scene.evicted() == []


def test_not_for_a_pod_of_equal_priority(scene):
    scene.wanted["spec"]["priority"] = LOW
    scene.rounds(5)
    assert scene.evicted() == []


def test_who_does_not_lead_evicts_nobody(scene):
    scene.leads = False
    scene.rounds(5)
    assert scene.evicted() == []


def test_where_the_api_server_says_no_to_one_nobody_goes():
    scene = Scene()
    scene.world.runs("a2", P100 - HALF, 0, priority=HIGH)
    scene.world.runs("b2", P100 - HALF, 1)
    unheard_of = budget("unheard-of", allowed=0, selector={"matchLabels": {"app": "b2"}})
    scene.api.write_object(paths.poddisruptionbudgets(), unheard_of)
    scene.rounds(5)
    assert scene.evicted() == []
    assert scene.world.filter(scene.world.wants("low", 1000, priority=LOW)) == [], "it is full as before"


def test_whom_a_budget_protects_stays_where_another_card_can_be_freed(scene):
    scene.world.budget("a", 0)
    scene.rounds(3)
    assert scene.evicted() == ["b"]


def test_nobody_goes_whom_budgets_protect_until_one_is_removed(scene):
    for name in ("a", "b"):
        scene.world.budget(name, 0)
    scene.rounds(3)
    assert scene.evicted() == []
    scene.world.state.preemption.remove_budget("default/of-b")
    scene.rounds(3)
    assert scene.evicted() == ["b"]


def test_two_pods_get_a_card_each_also_before_the_watch_shows_that_a_victim_ends(scene):
    for wanted in (scene.wanted, scene.world.show_pod(scene.world.wants("q"))):
        assert scene.world.filter(wanted) == []
    scene.world.clock.advance(4.0)
    evictions = [eviction for _ in range(2) for eviction in scene.world.state.preemption.next_evictions()]
    assert sorted(victim.name for eviction in evictions for victim in eviction.victims) == ["a", "b"]


def test_whom_somebody_else_has_deleted_meanwhile_is_not_evicted_as_well(scene):
    scene.world.budget("b", 0)
    scene.api.fault(Fault())  # whether it may go
    scene.api.fault(Fault(refused=True))
    scene.rounds(1)
    scene.world.ends("a")
    scene.rounds(2)
    assert scene.events.recorded == []


def test_an_eviction_without_an_answer_is_tried_again(scene):
    scene.api.fault(Fault())  # whether it may go
    scene.api.fault(Fault(refused=True))
    scene.rounds(1)
    assert scene.evicted() == []
    scene.rounds(2)
    assert len(scene.evicted()) == 1


def test_who_may_not_go_any_more_is_given_up_at_last_and_another_card_is_freed(scene):
    scene.api.fault(Fault())  # whether it may go
    scene.api.fault(Fault(status=429), "create", paths.pods("default", "a", "eviction"), times=math.inf)
    scene.rounds(30)
    assert scene.evicted() == ["b"]


def test_whom_the_api_server_refuses_at_first_is_left_alone_for_a_minute_and_another_card_is_freed(scene):
    scene.api.fault(Fault(status=500), "create", paths.pods("default", "a", "eviction"), times=math.inf)
    scene.rounds(8)
    assert scene.evicted() == ["b"]
    assert len(scene.api.sent("create", paths.pods("default", "a", "eviction"))) == 1


def test_whom_two_budgets_cover_is_no_victim_though_both_let_him_go(scene):
    """The Eviction API refuses such pods."""
    for name in ("one", "other"):
        manifest = budget(name, allowed=5, selector={"matchLabels": {"app": "a"}})
        scene.world.state.preemption.set_budget(*budgets.decode_budget(json.dumps(manifest).encode()))
    scene.rounds(3)
    assert scene.evicted() == ["b"]
    assert not scene.api.sent("create", paths.pods("default", "a", "eviction"))


def test_not_on_a_node_that_the_newest_refusal_does_not_name():
    scene = Yielding(9)
    scene.meanwhile = lambda: scene.world.filter(scene.wanted, *scene.nodes[1:])
    scene.asks()
    assert not {"a", "b"} & set(scene.evicted())


def test_where_the_pod_was_nominated_since_stays_kept_when_the_extenders_own_eviction_is_given_up(scene):
    preemption = scene.world.state.preemption
    assert scene.world.filter(scene.wanted) == []
    scene.world.clock.advance(4.0)
    (eviction,) = preemption.next_evictions()
    scene.world.nominate(scene.wanted, "n2")
    preemption.on_eviction_failed(eviction, [], 60.0)
    assert scene.world.state._nominated.nodes_with_unknown_cards() == ["n2"]


def test_an_eviction_without_an_answer_is_not_tried_again_once_the_pod_is_nominated_elsewhere(scene):
    scene.api.fault(Fault())  # whether it may go
    scene.api.fault(Fault(refused=True))
    scene.rounds(1)
    scene.world.nominate(scene.wanted, "n2")
    scene.rounds(2)
    assert scene.evicted() == []


@pytest.fixture
def elsewhere():
    """Another extender has answered a preemption on n1: which card is kept there is found out when it is asked for."""
    world = World("n1", "n2")
    world.nominate(world.wants("p", 1000), "n1")
    return world


def unknown(world: World) -> list[str]:
    return world.state._nominated.nodes_with_unknown_cards()


def test_what_is_kept_elsewhere_costs_an_answer_nothing(elsewhere):
    low = elsewhere.wants("low", 1000, priority=LOW)
    assert elsewhere.filter(low, "n2") == ["n2"]
    verbs.prioritize(elsewhere.state, PREFERENCES, FilterArgs(pod=low, node_names=["n2"]))
    assert unknown(elsewhere) == ["n1"]
    assert elsewhere.filter(low, "n1") == ["n1"]
    assert unknown(elsewhere) == []


def test_the_decision_after_a_search_finds_out_few_kept_cards_under_the_lock(monkeypatch):
    """After a change of the leader the cards of all nominated pods are unknown, and the call's time was over."""
    world, under_lock = World("n1"), list[bool]()
    for i in range(10):
        world.nominate(world.wants(f"p{i}", 1000), "n1")
    search = NominatedPods.place_after_termination

    def record(*args, **kwargs):
        under_lock.append(world.state._lock._lock.locked())
        return search(*args, **kwargs)

    monkeypatch.setattr(NominatedPods, "place_after_termination", record)
    monkeypatch.setattr(nodesearch, "is_needed", lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(nodesearch, "find_unknown_cards", lambda *_: None)
        args = FilterArgs(pod=world.wants("low", 1000, priority=LOW), node_names=["n1"])
        assert verbs.filter_nodes(world.state, PREFERENCES, args).error == verbs.SEARCH_UNFINISHED_TEXT
    assert 0 < under_lock.count(True) <= 4
    assert world.filter(world.wants("low", 1000, priority=LOW)) == ["n1"]
    assert 0 < under_lock.count(True) <= 4
    assert unknown(world) == []


def test_one_search_for_victims_under_the_lock_ends_after_some_ms(monkeypatch):
    """For a pod of 16 requests of two GPUs it took 44 ms, on a node that had changed since the snapshot."""
    world, locked_work = World("n1", "n2", "n3"), list[float]()
    for node in ("n1", "n2", "n3"):
        for i in range(8):
            world.runs(f"{node}-{i}", P100 // 4, i % 2, node=node)
    can_fit = _VictimSearch._can_fit

    def touch(_) -> None:
        if not world.state._lock._lock.locked():
            for node in ("n1", "n2"):
                world.state.set_pod_without_request(f"other/{node}", PlacedPod(node, Load(1, 0, 1)))

    def work(search, node):
        if world.state._lock._lock.locked():
            world.clock.worked += 0.005
            locked_work.append(world.clock.worked)
        return can_fit(search, node)

    on_victim_search(world.state, touch)
    monkeypatch.setattr(_VictimSearch, "_can_fit", work)
    answer = world.preempt(world.wants("p"), n1=[], n2=[], n3=[])
    assert len(locked_work) <= 3
    assert list(answer) == ["n3"]


def test_beside_many_nothing_is_counted_for_a_pod_that_its_quota_keeps_waiting(elsewhere, monkeypatch):
    monkeypatch.setattr(placing, "MAX_RESERVATIONS", 0)
    elsewhere.state.set_quota(*as_quota({"shares": 0}, namespace="team"))
    assert elsewhere.filter(elsewhere.wants("low", 1000, priority=LOW, namespace="team"), "n1") == []
    assert unknown(elsewhere) == ["n1"]


def test_before_an_epoch_it_is_found_out_which_cards_are_kept(full):
    """Another extender has answered the preemption, and its victim is gone."""
    full.nominate(full.wants("p", 1000), "n1")
    full.delete_pod("a0")
    assert full.state._nominated.nodes_with_unknown_cards() == ["n1"]
    full.state.warm_caches()
    assert full.state._nominated.nodes_with_unknown_cards() == []
