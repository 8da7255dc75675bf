"""Which nodes a plan tries first in a large cluster, and how much it does between two calls of its pace."""

from itertools import pairwise

import pytest

from cardwise.core.api import policies, quotas, request
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import ShapeCapacity
from cardwise.core.gangs.gangplan import PlanConstraints, Planned, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import placement, searching
from cardwise.core.values.quantity import MiB
from tests.build import P100, container, ledger_with_free, pod
from tests.core.placement.placing import K80, V100, typed_ledger
from tests.theory import theory_of

NODES = {"n1": [P100 // 2, 0], "n2": [P100, P100]}


class Nodes:
    def free_load(self, node):
        return Load(64_000, 1 << 40, 100) if node in NODES else None

    def open_nodes(self):
        return list(NODES)


@pytest.mark.parametrize(("of_pod", "others", "chosen"), [("spread", "binpack", "n2"), ("binpack", "spread", "n1")])
def test_of_thousands_of_nodes_those_are_looked_at_that_the_pods_own_policy_likes(monkeypatch, of_pod, others, chosen):
    monkeypatch.setattr(gangplan, "_MAX_SCORED_NODES", 1)
    monkeypatch.setattr(placement.Scorer, "indexed", False)  # not by the ledger's card index
    pod_request = request.parse(
        pod(annotations={"cardwise.dev/policy": of_pod}, containers=[container("a", gpu_mem=1000)])
    )
    constraints = PlanConstraints(policy=others, vacant=lambda _request, _load: ShapeCapacity({"n1": 8, "n2": 32}))
    members = [Member(uid="u", name="p", request=pod_request, load=Load(1, 1, 1))]
    planned = gangplan.plan(ledger_with_free(**NODES), Nodes(), members, constraints)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u": chosen}


def test_where_too_few_of_these_take_a_member_all_are_looked_at(monkeypatch):
    monkeypatch.setattr(gangplan, "_MAX_SCORED_NODES", 1)
    monkeypatch.setattr(placement.Scorer, "indexed", False)
    pod_request = request.parse(pod(containers=[container("a", gpu_mem=P100)]))
    constraints = PlanConstraints(policy="binpack", vacant=lambda _request, _load: ShapeCapacity({"n1": 1, "n2": 2}))
    members = [Member(uid="u", name="p", request=pod_request, load=Load(1, 1, 1))]
    planned = gangplan.plan(ledger_with_free(**NODES), Nodes(), members, constraints)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u": "n2"}


def test_the_cards_of_a_type_that_a_quota_leaves_go_to_as_many_members_and_the_others_get_another_type():
    ledger = typed_ledger(n1=[K80, K80, K80], n2=[V100, V100, V100])
    pod_request = request.parse(pod(gpu_mem=1000))
    members = [Member(uid=f"u{i}", name=f"p{i}", request=pod_request, load=Load(1, 1, 1)) for i in range(3)]
    entry = QuotaEntry(resource_class="k80", shares=1)
    constraints = PlanConstraints(
        policy="binpack", headroom=[quotas.headroom(entry, ledger.used_amounts("default", entry))]
    )
    planned = gangplan.plan(ledger, Nodes(), members, constraints)
    assert isinstance(planned, Planned)
    assert sorted(planned.nodes.values()) == ["n1", "n2", "n2"]


class Many:
    """Nodes with free cpu and memory."""

    def __init__(self, nodes):
        self._nodes = nodes

    def free_load(self, node):
        return Load(64_000, 1 << 40, 100)

    def open_nodes(self):
        return list(self._nodes)


def members_of(*requests, shape=""):
    return [
        Member(uid=f"u{i}", name=f"p{i}", shape=shape and f"{shape}{i}", request=pod_request, load=Load(1, 1, 1))
        for i, pod_request in enumerate(requests)
    ]


@pytest.fixture
def searches(monkeypatch):
    """The nodes of each search, in order."""
    searched = []
    fit = searching.fit_request

    def counted(node, *arguments):
        searched.append(node.name)
        return fit(node, *arguments)

    monkeypatch.setattr(searching, "fit_request", counted)
    return searched


class OfDifferentSize(Nodes):
    """Node n1 has more free cpu than n2."""

    def free_load(self, node):
        return Load(8_000 if node == "n1" else 2_000, 1 << 40, 100)


def test_members_that_differ_by_cpu_only_have_nodes_of_their_own():
    pod_request = request.parse(pod(gpu_mem=P100))
    members = [
        Member(uid=uid, name=uid, request=pod_request, load=Load(cpu, 1, 1))
        for uid, cpu in (("large", 8_000), ("small", 1_000))
    ]
    ledger = ledger_with_free(n1=[P100], n2=[P100])
    planned = gangplan.plan(ledger, OfDifferentSize(), members, PlanConstraints(policy="binpack"))
    assert isinstance(planned, Planned)
    assert planned.nodes == {"large": "n1", "small": "n2"}


def of_two_claims(mem):
    return request.parse(pod(containers=[container("a", gpu_count=1), container("b", gpu_mem=mem)]))


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("known", [True, False])
def test_members_with_several_card_requests_search_a_limited_number_of_nodes(monkeypatch, searches, policy, known):
    """Each node is a separate search under the lock. The emptiest nodes are among the searched ones."""
    monkeypatch.setattr(gangplan, "_MAX_SEARCHED_NODES", 40)
    nodes = {f"n{i:03}": [P100, 100 if i else P100] for i in range(200)}
    members = members_of(*(of_two_claims(mem) for mem in (8000, 8001)))
    vacant = ShapeCapacity(dict.fromkeys(nodes, 1) | {"n000": 2})
    constraints = PlanConstraints(policy=policy, vacant=(lambda _request, _load: vacant) if known else None)
    ledger = ledger_with_free(**nodes)
    planned = gangplan.plan(ledger, Many(nodes), members[:1], constraints)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u0": "n000"}
    searches.clear()
    assert isinstance(gangplan.plan(ledger, Many(nodes), members, constraints), Unplanned)
    assert len(searches) < 60


def test_many_members_of_several_claims_have_nodes_enough(monkeypatch):
    monkeypatch.setattr(gangplan, "_MAX_SEARCHED_NODES", 10)
    nodes = {f"n{i:03}": [P100, P100] for i in range(100)}
    pod_request, constraints = of_two_claims(9000), PlanConstraints(policy="binpack")
    members = members_of(*[pod_request] * 60)
    planned = gangplan.plan(ledger_with_free(**nodes), Many(nodes), members, constraints)
    assert isinstance(planned, Planned)
    assert len(set(planned.nodes.values())) == 60


def test_reasons_are_not_searched_for_members_with_several_card_requests(monkeypatch):
    """Finding the reason would cost more than the search, and use up its effort."""
    calls = []
    monkeypatch.setattr(searching, "refusal_reason", lambda *arguments: calls.append(arguments))
    nodes = {f"n{i:03}": [P100, 100] for i in range(100)}
    members = members_of(of_two_claims(9000))
    constraints = PlanConstraints(policy="binpack")
    assert isinstance(gangplan.plan(ledger_with_free(**nodes), Many(nodes), members, constraints), Unplanned)
    assert calls == []


def of_card_requests(count, mem=100):
    """A request with this number of card requests, also more than a pod may have. Each is for two cards, so that no two
    are merged.
    """
    return PodRequest(
        containers=tuple(
            ContainerRequest(key=f"c{i}", name=f"c{i}", cards=2, mem=MiB(2 * (mem + i))) for i in range(count)
        )
    )


def plan_with_pace(ledger, members, searches, nodes=None, **constraints):
    """Make a plan. Returns the plan, and the number of searches between the calls of its pace."""
    calls = [0]
    planned = gangplan.plan(
        ledger,
        nodes or Many(ledger.nodes_by_name()),
        members,
        PlanConstraints(**constraints),
        lambda: calls.append(len(searches)),
    )
    return planned, [later - earlier for earlier, later in pairwise([*calls, len(searches)])]


MANY_NODES = {f"n{i:03}": [K80, K80] for i in range(150)}
GANGS = {
    "nodes are scored": lambda card_requests: [of_card_requests(card_requests)] * 8,
    "nodes have members of other kinds": lambda card_requests: [
        of_card_requests(card_requests, 100 + i % 2) for i in range(20)
    ],
}


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(gangplan, "_WORK_BETWEEN_PACES", 24)


def expect_short(parts, card_requests):
    assert max(parts) <= max(1, 24 // card_requests) + 2, "a step, and the member that is placed"


@pytest.mark.parametrize("card_requests", [2, 8, 40])
@pytest.mark.parametrize("gang", GANGS)
def test_the_pace_is_called_at_least_once_in_a_step(gang, card_requests, searches, small_steps):
    """Without pauses the thread would delay each call of kube-scheduler."""
    members = members_of(*GANGS[gang](card_requests))
    planned, parts = plan_with_pace(typed_ledger(**MANY_NODES), members, searches, policy="spread")
    assert isinstance(planned, Planned)
    expect_short(parts, card_requests)


@pytest.mark.parametrize("card_requests", [2, 8, 40])
def test_so_it_is_where_a_quota_leaves_too_little_on_all_nodes(card_requests, searches, small_steps):
    ledger = typed_ledger(**MANY_NODES, v100=[V100])
    entry = QuotaEntry(resource_class="k80", shares=4 * 2 * card_requests + 1)
    headroom = [quotas.headroom(entry, ledger.used_amounts("default", entry))]
    members = members_of(*[of_card_requests(card_requests)] * 8)
    planned, parts = plan_with_pace(ledger, members, searches, policy="spread", headroom=headroom)
    assert isinstance(planned, Unplanned)
    expect_short(parts, card_requests)


def test_a_second_order_scores_a_limited_number_of_nodes(monkeypatch, searches, small_steps):
    """In the first order, the ledger's card index found no node for a member."""
    counted, score_all = [], placement.Scorer.score_all

    def recorded(scorer, ledger, nodes):
        counted.append(len(list(nodes)))
        return score_all(scorer, ledger, nodes)

    monkeypatch.setattr(placement.Scorer, "score_all", recorded)
    ledger = ledger_with_free(**{f"n{i:03}": [100, 100] for i in range(150)})
    members = members_of(request.parse(pod(gpu_mem=P100)), request.parse(pod(gpu_mem=P100 - 1)))
    planned, _ = plan_with_pace(ledger, members, searches, policy="binpack")
    assert isinstance(planned, Unplanned)
    assert sum(counted) == 2 * 150
    assert max(counted) <= 24


def test_members_that_are_alike_have_their_nodes_scored_once(searches):
    ledger = ledger_with_free(**{f"n{i:03}": [P100, P100] for i in range(100)})
    offers = frozenset(ledger.nodes_by_name())
    members = members_of(*[of_card_requests(8)] * 40, shape="s")
    constraints = PlanConstraints(policy="binpack", offers={member.shape: offers for member in members})
    assert isinstance(gangplan.plan(ledger, Many(ledger.nodes_by_name()), members, constraints), Planned)
    assert len(searches) <= 80 + 3 * len(members), "twice as many nodes as members, and those that members get again"


@pytest.mark.parametrize(("card_requests", "limit"), [(2, 128), (16, 64), (32, 32), (40, 25)])
def test_the_more_card_requests_a_pod_has_the_fewer_nodes_are_scored(card_requests, limit, searches):
    """At least two nodes are scored for each member."""
    ledger = ledger_with_free(**{f"n{i:03}": [P100, P100] for i in range(200)})
    members = members_of(*[of_card_requests(card_requests)] * 8)
    assert isinstance(
        gangplan.plan(ledger, Many(ledger.nodes_by_name()), members, PlanConstraints(policy="spread")), Planned
    )
    assert len(searches) <= limit + 2 * len(members)


def test_a_node_for_which_too_much_is_counted_gets_no_member():
    """The count of `PlanConstraints.vacant` is an upper bound."""
    ledger = ledger_with_free(n0=[P100, P100], n1=[P100, P100])

    class Full(Many):
        def free_load(self, node):
            return Load(0, 0, 0) if node == "n0" else super().free_load(node)

    constraints = PlanConstraints(policy="binpack", vacant=lambda *_: ShapeCapacity({"n0": 1, "n1": 1}))
    planned = gangplan.plan(ledger, Full(ledger.nodes_by_name()), members_of(of_card_requests(40)), constraints)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u0": "n1"}


# Members whose policy ranks nodes.


class Facts(policies.NodeFacts):
    def __init__(self, labels, peers):
        self._labels, self._peers = labels, peers

    def labels(self, node):
        return {"rack": self._labels[node]}

    def peer_counts_by_node(self):
        return self._peers


def plan_in_racks(racks, peers, count, **constraints):
    """The nodes of members of 1000 MiB that are spread over racks."""
    manifest = pod(annotations={"cardwise.dev/policy": "spread-by=rack"}, containers=[container("a", gpu_mem=1000)])
    manifest["metadata"]["ownerReferences"] = [{"uid": "rs", "controller": True}]
    pod_request = request.parse(manifest)
    members = [Member(uid=f"u{i}", name=f"p{i}", request=pod_request, load=Load(1, 1, 1)) for i in range(count)]
    keys = []

    def facts(key):
        keys.append(key)
        return Facts(racks, peers)

    planned = gangplan.plan(
        ledger_with_free(**NODES), Nodes(), members, PlanConstraints(policy="binpack", facts=facts, **constraints)
    )
    assert isinstance(planned, Planned)
    assert set(keys) == {pod_request.peer_key}
    return sorted(planned.nodes.values())


def test_bound_peers_and_planned_members_count_together():
    racks = {"n1": "a", "n2": "b"}
    assert plan_in_racks(racks, {}, 2) == ["n1", "n2"]
    assert plan_in_racks(racks, {"n1": 2}, 2) == ["n2", "n2"]
    assert plan_in_racks(racks, {"n1": 2}, 4) == ["n1", "n2", "n2", "n2"]


def test_ranked_nodes_that_do_not_take_a_member_are_left_out(monkeypatch):
    free_load = Nodes.free_load
    monkeypatch.setattr(Nodes, "free_load", lambda self, node: free_load(self, node) if node == "n1" else None)
    capacity = ShapeCapacity({"n1": 8, "n2": 8})  # an upper bound: n2 has no cpu
    assert plan_in_racks({"n1": "a", "n2": "b"}, {"n1": 1}, 2, vacant=lambda *_: capacity) == ["n1", "n1"]


def test_the_example_of_the_docstring(monkeypatch):
    theory, gib = theory_of("cardwise.core.gangs.gangplan"), 1024
    free, requested, attempts = {"n1": 8, "n2": 10}, {"a": 6, "b": 5}, []
    place = gangplan._Attempt.place

    def recorded(attempt, order):
        outcome = place(attempt, order)
        attempts.append(([member.name for member in order], dict(attempt._nodes), outcome))
        return outcome

    monkeypatch.setattr(gangplan._Attempt, "place", recorded)
    ledger = ledger_with_free(**{node: [size * gib] for node, size in free.items()})
    members = [
        Member(uid=name, name=name, shape=name, request=request.parse(pod(gpu_mem=size * gib)), load=Load(1, 1, 1))
        for name, size in requested.items()
    ]
    constraints = PlanConstraints(policy="binpack", offers={"b": ["n1"]})
    planned = gangplan.plan(ledger, Many(free), members, constraints)

    assert f"n1 has a card with {free['n1']} GiB free, and n2 one with {free['n2']} GiB" in theory
    assert f"Member a requests {requested['a']} GiB. Member b requests {requested['b']} GiB" in theory
    assert f"kube-scheduler offers only {constraints.offers['b'][0]} for b" in theory
    (first_order, first_nodes, first_outcome), (second_order, second_nodes, second_outcome) = attempts
    assert (first_order, first_nodes) == (["a", "b"], {"a": "n1"})
    assert isinstance(first_outcome, Unplanned)
    assert "In the first order, a comes first and gets n1, the fuller node" in theory
    assert f"The remaining {free['n1'] - requested['a']} GiB are too little for b" in theory
    assert second_order == ["b", "a"]
    possible_nodes = {
        name: sum(size >= requested[name] for node, size in free.items() if node in constraints.offers.get(name, free))
        for name in requested
    }
    assert f"because {possible_nodes['b']} node is possible for b, and {possible_nodes['a']} for a" in theory
    assert planned is second_outcome
    assert f"for a: b gets {second_nodes['b']}, and a gets {second_nodes['a']}." in theory


def test_the_example_of_the_docstring_for_the_effort(monkeypatch):
    theory, size, card_requests = theory_of("cardwise.core.gangs.gangplan"), 8, 128
    scored, score_all = [], placement.Scorer.score_all

    def recorded(scorer, ledger, nodes):
        scored.append(len(nodes))
        return score_all(scorer, ledger, nodes)

    monkeypatch.setattr(placement.Scorer, "score_all", recorded)
    ledger = typed_ledger(**MANY_NODES)
    gangplan.plan(
        ledger,
        Many(ledger.nodes_by_name()),
        members_of(*[of_card_requests(card_requests)] * size),
        PlanConstraints(policy="spread"),
    )
    nodes, steps = sum(scored), len(scored)
    requests = 8
    work = gangplan.count_card_requests(members_of(of_card_requests(requests)))
    assert f"scoring a node for a pod with {requests} card requests is a work of {work}." in theory
    assert f"{size} equal members with {card_requests} card requests each are scored on {nodes} nodes" in theory
    assert f"which is a work of {nodes * card_requests:,} in {steps} steps" in theory
