"""Where a plan looks first in a large cluster."""

import pytest

from cardwise.core.api import quotas, request
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import ShapeCapacity
from cardwise.core.gangs.gangplan import Planned, Terms, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import placement, searching
from tests.build import P100, container, pod
from tests.core.placement.placing import K80, V100, typed_ledger
from tests.core.placement.test_placement_limits import ledger_with_free

NODES = {"n1": [P100 // 2, 0], "n2": [P100, P100]}


class Nodes:
    def free_load(self, node):
        return Load(64_000, 1 << 40, 100) if node in NODES else None

    def names(self):
        return list(NODES)


@pytest.mark.parametrize(("of_pod", "others", "chosen"), [("spread", "binpack", "n2"), ("binpack", "spread", "n1")])
def test_of_thousands_of_nodes_those_are_looked_at_that_the_pods_own_policy_likes(monkeypatch, of_pod, others, chosen):
    monkeypatch.setattr(gangplan, "_MOST_SCORED", 1)
    monkeypatch.setattr(placement.Scorer, "indexed", False)  # not by the index of all cards
    pod_request = request.parse(
        pod(annotations={"cardwise.dev/policy": of_pod}, containers=[container("a", gpu_mem=1000)])
    )
    terms = Terms(policy=others, vacant=lambda _request, _load: ShapeCapacity({"n1": 8, "n2": 32}))
    members = [Member(uid="u", name="p", request=pod_request, load=Load(1, 1, 1))]
    planned = gangplan.plan(ledger_with_free(**NODES), Nodes(), members, terms)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u": chosen}


def test_where_too_few_of_these_take_a_member_all_are_looked_at(monkeypatch):
    monkeypatch.setattr(gangplan, "_MOST_SCORED", 1)
    monkeypatch.setattr(placement.Scorer, "indexed", False)
    pod_request = request.parse(pod(containers=[container("a", gpu_mem=P100)]))
    terms = Terms(policy="binpack", vacant=lambda _request, _load: ShapeCapacity({"n1": 1, "n2": 2}))
    members = [Member(uid="u", name="p", request=pod_request, load=Load(1, 1, 1))]
    planned = gangplan.plan(ledger_with_free(**NODES), Nodes(), members, terms)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u": "n2"}


def test_the_cards_of_a_type_that_a_quota_leaves_go_to_as_many_members_and_the_others_get_another_type():
    ledger = typed_ledger(n1=[K80, K80, K80], n2=[V100, V100, V100])
    pod_request = request.parse(pod(gpu_mem=1000))
    members = [Member(uid=f"u{i}", name=f"p{i}", request=pod_request, load=Load(1, 1, 1)) for i in range(3)]
    entry = QuotaEntry(resource_class="k80", shares=1)
    terms = Terms(policy="binpack", headroom=[quotas.headroom(entry, ledger.used("default", entry))])
    planned = gangplan.plan(ledger, Nodes(), members, terms)
    assert isinstance(planned, Planned)
    assert sorted(planned.nodes.values()) == ["n1", "n2", "n2"]


class Many:
    """Nodes with room beside cards."""

    def __init__(self, nodes):
        self._nodes = nodes

    def free_load(self, node):
        return Load(64_000, 1 << 40, 100)

    def names(self):
        return list(self._nodes)


def of_two_claims(mem):
    return request.parse(pod(containers=[container("a", gpu_count=1), container("b", gpu_mem=mem)]))


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("known", [True, False])
def test_for_members_of_several_claims_so_many_nodes_are_searched_and_not_all(monkeypatch, policy, known):
    """Each of thousands is a search of its own, under a lock; those that are emptiest are among them."""
    monkeypatch.setattr(gangplan, "_MOST_SEARCHED", 40)
    nodes = {f"n{i:03}": [P100, 100 if i else P100] for i in range(200)}
    searched = []
    fit = searching.fit_request

    def counted(node, *arguments):
        searched.append(node.name)
        return fit(node, *arguments)

    monkeypatch.setattr(searching, "fit_request", counted)
    some = [of_two_claims(mem) for mem in (8000, 8001)]
    vacant = ShapeCapacity(dict.fromkeys(nodes, 1) | {"n000": 2})
    terms = Terms(policy=policy, vacant=(lambda _request, _load: vacant) if known else None)
    members = [
        Member(uid=f"u{i}", name=f"p{i}", request=pod_request, load=Load(1, 1, 1)) for i, pod_request in enumerate(some)
    ]
    ledger = ledger_with_free(**nodes)
    planned = gangplan.plan(ledger, Many(nodes), members[:1], terms)
    assert isinstance(planned, Planned)
    assert planned.nodes == {"u0": "n000"}
    searched.clear()
    assert isinstance(gangplan.plan(ledger, Many(nodes), members, terms), Unplanned)
    assert len(searched) < 60


def test_many_members_of_several_claims_have_nodes_enough(monkeypatch):
    monkeypatch.setattr(gangplan, "_MOST_SEARCHED", 10)
    nodes = {f"n{i:03}": [P100, P100] for i in range(100)}
    pod_request, terms = of_two_claims(9000), Terms(policy="binpack")
    members = [Member(uid=f"u{i}", name=f"p{i}", request=pod_request, load=Load(1, 1, 1)) for i in range(60)]
    planned = gangplan.plan(ledger_with_free(**nodes), Many(nodes), members, terms)
    assert isinstance(planned, Planned)
    assert len(set(planned.nodes.values())) == 60


def test_nobody_asks_why_a_node_does_not_take_a_member_of_several_claims(monkeypatch):
    """It costs more than the search, and takes of its effort."""
    calls = []
    monkeypatch.setattr(searching, "refusal_reason", lambda *arguments: calls.append(arguments))
    nodes = {f"n{i:03}": [P100, 100] for i in range(100)}
    members = [Member(uid="u", name="p", request=of_two_claims(9000), load=Load(1, 1, 1))]
    terms = Terms(policy="binpack")
    assert isinstance(gangplan.plan(ledger_with_free(**nodes), Many(nodes), members, terms), Unplanned)
    assert calls == []
