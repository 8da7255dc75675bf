"""Limits of a node or a card: clients, SMs, memory that is kept back, and cards that accept no shares."""

from dataclasses import replace

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import CardMps, mps_client
from cardwise.core.api.policies import binpack
from cardwise.core.placement import fitting, placement, searching
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import MAX_CLIENTS
from cardwise.core.preemption import explanation
from cardwise.core.values.refusals import Refusal
from tests.build import P100, cards, container, holding, ledger_with_free, pod, shares
from tests.core.placement.placing import of_class, place
from tests.theory import theory_of


def out_of_use(*mems, **state):
    return [Card(index=i, uuid=f"g{i}", mem=mem, **state) for i, mem in enumerate(mems)]


def sick(*mems):
    return out_of_use(*mems, healthy=False)


def cordoned(*mems):
    return out_of_use(*mems, cordoned=True)


@pytest.mark.parametrize(
    ("node_cards", "amounts", "refusal"),
    [
        ([], {"gpu_mem": 1}, Refusal.NOT_OURS),
        (cards(100, 100), {"gpu_mem": 150}, Refusal.CARD_TOO_SMALL),
        (cards(100, 100), {"gpu_count": 3}, Refusal.TOO_FEW_CARDS),
        (cards(100), {"gpu_mem": 300, "gpu_count": 2, "annotations": {names.ISOLATION: "none"}}, Refusal.TOO_FEW_CARDS),
        (sick(100), {"gpu_mem": 50}, Refusal.UNHEALTHY),
        (sick(100), {"gpu_count": 1}, Refusal.UNHEALTHY),
        (cordoned(100), {"gpu_mem": 50}, Refusal.CORDONED),
        (cordoned(100), {"gpu_count": 1}, Refusal.CORDONED),
        (cordoned(100, 100), {"gpu_mem": 100, "gpu_count": 2}, Refusal.CORDONED),
        ([*sick(100), *cordoned(100, 100)[1:]], {"gpu_count": 2}, Refusal.UNHEALTHY),
        (cordoned(100), {"gpu_mem": 150}, Refusal.CARD_TOO_SMALL),
        (out_of_use(100, mps=CardMps(ready=False)), {"gpu_mem": 50}, Refusal.MPS_DOWN),
        (out_of_use(100, mps=CardMps(ready=False)), {"gpu_count": 1}, Refusal.MPS_DOWN),
    ],
)
def test_refusals(node_cards, amounts, refusal):
    ledger = Ledger()
    ledger.set_cards("n1", node_cards)
    placed = placement.place(ledger, ["n1"], request.parse(pod(**amounts)), "binpack")
    assert placed.refusals == {"n1": refusal}


def test_fragmented_memory_is_refused_with_gpushares_text():
    for mem in (8138, P100):
        assert place(ledger_with_free(n1=[4069, 4069]), gpu_mem=mem).refusals["n1"] is Refusal.NO_MEMORY
    refused = Refusal.NO_MEMORY
    assert refused.text == "Insufficient GPU Memory in one device"
    assert refused.resolvable


def test_clients_and_cores_are_counted_per_card():
    ledger = Ledger(max_clients=1)
    ledger.set_cards("n1", cards(100))
    ledger.set_holding(holding("u", 10, 0, total=100))
    for mem in (10, 90):
        assert place(ledger, gpu_mem=mem).refusals["n1"] is Refusal.TOO_MANY_CLIENTS
    ledger = Ledger()
    ledger.set_cards("n1", cards(100))
    placed = place(ledger, gpu_mem=10, gpu_core=60)
    ledger.set_holding(Holding("u", "d", "u", "n1", placed.assignment))
    assert place(ledger, gpu_mem=10, gpu_core=41).refusals["n1"] is Refusal.NO_CORE
    assert place(ledger, gpu_mem=10, gpu_core=40).node == "n1"


def test_cores_are_overcommitted_up_to_the_setting():
    ledger = Ledger(core=150)
    ledger.set_cards("n1", cards(100, 100))
    whole = place(ledger, whole_gpu=1)
    ledger.set_holding(Holding("w", "d", "w", "n1", whole.assignment))
    for uid, core, fits in (("a", 60, True), ("b", 60, True), ("c", 31, False), ("d", 30, True), ("e", 1, False)):
        placed = place(ledger, gpu_mem=10, gpu_core=core)
        if fits:
            ledger.set_holding(Holding(uid, "d", uid, "n1", placed.assignment))
        else:
            assert placed.refusals["n1"] is Refusal.NO_CORE
    assert ledger.node("n1").copy().free_core == [50, 0]
    assert ledger.node("n1").copy_without_pods().free_core == [150, 150]


def test_a_request_without_cores_may_use_a_card_with_overcommitted_cores():
    """The setting was lowered since."""
    ledger = Ledger(core=50)
    ledger.set_cards("n1", cards(100))
    ledger.set_holding(Holding("u", "d", "u", "n1", Assignment({"0": shares(10, 0, total=100, core=60)})))
    several = [container(name, gpu_mem=10) for name in "ab"]
    for amounts in ({"gpu_mem": 90}, {"containers": several}):
        assert place(ledger, **amounts).node == "n1"
        assert placement.place_on(ledger.kinds, ledger.node("n1"), request.parse(pod(**amounts)), "binpack") == place(
            ledger, **amounts
        )
    assert place(ledger, gpu_mem=10, gpu_core=1).refusals["n1"] is Refusal.NO_CORE


@pytest.mark.parametrize("amounts", [{"gpu_mem": 1}, {"gpu_mem": 2, "gpu_count": 2}])
def test_a_pod_that_demands_mps_needs_a_node_with_a_manager(amounts):
    ledger = Ledger()
    ledger.set_cards("n1", cards(100, 100))
    demanding = amounts | {"annotations": {names.ISOLATION: "mps"}}
    assert place(ledger, **demanding).refusals == {"n1": Refusal.MPS_MISSING}
    card_mps = CardMps(ready=True, serves_several=True)
    ledger.set_cards("n2", [replace(card, uuid=f"m{card.index}", mps=card_mps) for card in cards(100, 100)])
    assert place(ledger, **demanding).node == "n2"


@pytest.mark.parametrize("card_mps", [None, CardMps(ready=True), CardMps(ready=True, serves_several=True)])
def test_only_the_drivers_limit_meets_the_demand_of_it(card_mps):
    ledger = Ledger()
    demanding = {"gpu_mem": 10, "annotations": {names.ISOLATION: "kernel"}}
    ledger.set_cards("n1", out_of_use(100, 100, mps=card_mps))
    assert place(ledger, **demanding).refusals == {"n1": Refusal.KERNEL_MISSING}
    ledger.set_cards("n1", out_of_use(100, 100, mps=card_mps, has_kernel_limit=True))
    assert place(ledger, **demanding).node == "n1"
    split = demanding | {"gpu_count": 2}
    assert place(ledger, **split).refusals == {"n1": Refusal.KERNEL_MISSING}, "it limits shares of one GPU only"


def test_the_drivers_limit_meets_the_demand_of_mps_for_one_card():
    ledger = Ledger()
    ledger.set_cards("n1", out_of_use(100, 100, has_kernel_limit=True))
    demanding = {"gpu_mem": 10, "annotations": {names.ISOLATION: "mps"}}
    assert place(ledger, **demanding).node == "n1"
    assert place(ledger, **demanding, gpu_count=2).refusals == {"n1": Refusal.MPS_MISSING}


@pytest.mark.parametrize("demand", ["none", "advisory", "mps", "kernel"])
@pytest.mark.parametrize("card_mps", [None, CardMps(ready=True), CardMps(ready=True, serves_several=True)])
@pytest.mark.parametrize("count", [1, 2])
def test_whole_cards_meet_each_demand(demand, card_mps, count):
    ledger = Ledger()
    ledger.set_cards("n1", out_of_use(100, 100, mps=card_mps))
    assert place(ledger, gpu_count=count, annotations={names.ISOLATION: demand}).node == "n1"


def hold_share(ledger, uid, node, index, demand):
    """Let a pod with this demand hold 10 MiB of the card."""
    client = mps_client(Isolation(demand), 0)
    ledger.set_holding(
        Holding(uid, "d", uid, node, Assignment({"0": shares(10, index, node=node, total=100)}), mps_client=client)
    )


def managed_nodes(*names, count=2):
    ledger = Ledger()
    for name in names:
        served = [replace(card, mps=CardMps(ready=True)) for card in cards(*[100] * count, node=name)]
        ledger.set_cards(name, served)
    return ledger


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("amounts", [{"gpu_mem": 10}, {"gpu_mem": 10, "gpu_count": 2}], ids=["share", "split share"])
def test_a_share_without_mps_goes_to_cards_of_such_pods_before_it_closes_others(policy, amounts):
    ledger = managed_nodes("n1", "n2")
    without = amounts | {"annotations": {names.ISOLATION: "none"}}
    for index in range(2):
        hold_share(ledger, f"u{index}", "n2", index, "none")
    assert place(ledger, policy=policy, **without).node == "n2"
    rest = Assignment({"0": shares(86, 0, 1, node="n2", total=100)})
    ledger.set_holding(Holding("rest", "d", "rest", "n2", rest, mps_client=mps_client(Isolation.NONE, 0)))
    assert place(ledger, policy=policy, **without).node == "n1", "there is no other space"


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_a_share_with_mps_leaves_the_last_empty_card_of_its_node_while_another_has_space(policy):
    ledger = managed_nodes("n1")
    hold_share(ledger, "a", "n1", 1, "advisory")
    assert place(ledger, policy=policy, gpu_mem=90).assignment.indices() == [1]
    assert place(ledger, policy=policy, gpu_mem=91).assignment.indices() == [0], "it has no other space"
    hold_share(ledger, "b", "n1", 0, "none")
    assert place(ledger, policy=policy, gpu_mem=10).assignment.indices() == [1]


@pytest.mark.parametrize("demand", ["none", "advisory"])
def test_without_mps_the_policy_alone_decides(demand):
    ledger = Ledger()
    ledger.set_cards("n1", cards(100, 100))
    hold_share(ledger, "a", "n1", 1, demand)
    asks = {"gpu_mem": 10, "annotations": {names.ISOLATION: demand}}
    assert place(ledger, policy="spread", **asks).assignment.indices() == [0]
    assert place(ledger, policy="binpack", **asks).assignment.indices() == [1]


def test_a_daemon_for_each_card_serves_one_card_of_a_container_and_no_more():
    ledger = Ledger()
    ledger.set_cards("n1", out_of_use(100, 100, mps=CardMps(ready=True)))
    for amounts in ({"gpu_count": 1}, {"gpu_count": 2}, {"gpu_mem": 10}):
        assert place(ledger, **amounts).node == "n1", "whole cards do without MPS"
    mixed = [container("a", gpu_count=2), container("b", gpu_mem=10)]
    for amounts in ({"gpu_mem": 20, "gpu_count": 2}, {"containers": mixed}):
        assert set(place(ledger, **amounts).refusals) == {"n1"}
    assert place(ledger, gpu_mem=20, gpu_count=2).refusals == {"n1": Refusal.MPS_SEVERAL}


@pytest.mark.parametrize("count", [1, 2], ids=["of a card", "of all cards, with several cards"])
def test_a_daemon_for_one_user_serves_no_other(count):
    ledger = Ledger()
    daemon = CardMps(ready=True, serves_several=count > 1, multi_user=False)
    ledger.set_cards("n1", out_of_use(*[100] * count, mps=daemon))

    def of_user(user):
        manifest = pod(gpu_mem=10 * count, gpu_count=count)
        manifest["spec"]["securityContext"] = {"runAsUser": user}
        return placement.place(ledger, ["n1"], request.parse(manifest), "binpack")

    ledger.set_holding(
        Holding("u", "d", "u", "n1", of_user(1000).assignment, mps_client=mps_client(Isolation.ADVISORY, 1000))
    )
    assert of_user(1000).node == "n1"
    assert of_user(1001).refusals == {"n1": Refusal.MPS_USER}


def of_two_users(**resources):
    """A pod with two containers that run as different users."""
    manifest = pod(containers=[container("a", **resources), container("b", gpu_count=1)])
    manifest["spec"]["containers"][0]["securityContext"] = {"runAsUser": 1000}
    return manifest


def in_user_namespace(**resources):
    manifest = pod(**resources)
    manifest["spec"]["hostUsers"] = False
    return manifest


@pytest.mark.parametrize("manifest", [of_two_users(gpu_count=1), in_user_namespace(gpu_count=2)])
def test_whole_cards_serve_several_users_where_they_do_without_mps(manifest):
    """Before driver 580 a daemon serves one user at a time."""
    ledger = Ledger()
    pod_request = request.parse(manifest)
    ledger.set_cards("n1", out_of_use(100, 100, mps=CardMps(ready=True, multi_user=False)))
    placed = placement.place(ledger, ["n1"], pod_request, "binpack")
    assert placed.assignment.indices() == [0, 1]
    ledger.set_cards("n1", out_of_use(100, 100, mps=CardMps(ready=True, multi_user=False, serves_several=True)))
    assert placement.place(ledger, ["n1"], pod_request, "binpack").refusals == {"n1": Refusal.MPS_USER}


@pytest.mark.parametrize("manifest", [of_two_users(gpu_mem=10), in_user_namespace(gpu_mem=10)])
def test_a_pod_of_several_users_with_a_share_has_no_daemon_that_serves_one(manifest):
    """Also if its other card is a whole one, since it uses MPS on all its cards."""
    ledger = Ledger()
    for multi_user, refusals in ((True, None), (False, {"n1": Refusal.MPS_USER})):
        ledger.set_cards("n1", out_of_use(100, 100, mps=CardMps(ready=True, multi_user=multi_user)))
        placed = placement.place(ledger, ["n1"], request.parse(manifest), "binpack")
        assert getattr(placed, "refusals", None) == refusals


def test_too_few_cards_are_a_reason_before_the_users_of_cards():
    ledger = Ledger()
    ledger.set_cards("n1", out_of_use(100, 100, mps=CardMps(ready=True, multi_user=False, max_clients=1)))
    for uid, user in (("a", 1000), ("b", 1001)):
        share = Assignment({"0": (CardShare(user - 1000, f"g{user - 1000}", 10, 0, 100),)})
        ledger.set_holding(Holding(uid, "d", uid, "n1", share, mps_client=mps_client(Isolation.ADVISORY, user)))

    def refused(user, **amounts):
        manifest = pod(**amounts)
        manifest["spec"]["securityContext"] = {"runAsUser": user}
        return placement.place(ledger, ["n1"], request.parse(manifest), "binpack").refusals["n1"]

    assert refused(1002, gpu_count=1) is Refusal.NO_WHOLE_CARD
    assert refused(1001, gpu_mem=10) is Refusal.TOO_MANY_CLIENTS


def test_a_card_without_a_manager_is_not_why_where_another_card_has_one():
    ledger = Ledger()
    managed, small = cards(100, 10)
    ledger.set_cards("n1", [replace(managed, mps=CardMps(ready=True)), small])
    requires = {"gpu_mem": 50, "annotations": {names.ISOLATION: "mps"}}
    ledger.set_holding(Holding("u", "d", "u", "n1", place(ledger, **requires | {"gpu_mem": 60}).assignment))
    assert place(ledger, **requires).refusals == {"n1": Refusal.NO_MEMORY}


@pytest.mark.parametrize(("max_clients", "limit"), [(0, [4]), (2, [2]), (9, [4])])
def test_a_card_has_as_many_clients_as_are_set_and_no_more_than_mps_takes(max_clients, limit):
    ledger, unset = Ledger(max_clients=4), Ledger()
    for any_ledger in (ledger, unset):
        any_ledger.set_cards("n1", out_of_use(100, mps=CardMps(ready=True, max_clients=max_clients)))
    assert ledger.node("n1").max_card_clients == ledger.node("n1").copy_without_pods().max_card_clients == limit
    assert unset.node("n1").max_card_clients == [max_clients or MAX_CLIENTS]


def test_the_last_client_is_let_in_and_two_containers_are_two():
    ledger = Ledger(max_clients=1)
    ledger.set_cards("n1", cards(100))
    assert place(ledger, gpu_mem=1).node == "n1"
    two = request.parse(pod(containers=[container(name, gpu_mem=1) for name in "ab"]))
    for scorer in (placement.Scorer(ledger.kinds, two, policy) for policy in ("binpack", "spread")):
        assert scorer.score_all(ledger, ["n1"]) == ({}, {"n1": Refusal.TOO_MANY_CONTAINERS})


@pytest.mark.parametrize(
    ("count", "held", "refusal"),
    [
        (3, 0, Refusal.TOO_MANY_CONTAINERS),  # of an empty card it would be false that it has its maximum
        (3, 1, Refusal.TOO_MANY_CONTAINERS),
        (2, 1, Refusal.TOO_MANY_CLIENTS),
    ],
)
def test_more_containers_than_clients_of_a_card_are_a_reason_of_their_own(count, held, refusal):
    ledger = Ledger(max_clients=2)
    ledger.set_cards("n1", cards(100))
    for i in range(held):
        ledger.set_holding(holding(f"h{i}", 1, 0))
    placed = place(ledger, containers=[container(f"c{i}", gpu_mem=1) for i in range(count)])
    assert placed.refusals == {"n1": refusal}
    assert refusal.resolvable == (refusal is Refusal.TOO_MANY_CLIENTS), "nobody's end would help"


def test_the_hardest_of_a_pod_is_looked_for_first():
    containers = [
        container("0", gpu_mem=500),
        container("1", gpu_mem=1500, gpu_count=3),
        container("2", gpu_count=1),
        container("3", gpu_mem=1800, gpu_count=3),
        of_class("k80", gpu_mem=10),
        of_class("v100", gpu_count=1),
    ]
    order = [card_request.keys for card_request in fitting.card_requests(request.parse(pod(containers=containers)))]
    assert order == [("5",), ("4",), ("2",), ("3",), ("1",), ("0",)]


def test_pods_with_and_without_mps_share_no_card():
    ledger = Ledger()
    ledger.set_cards("n1", out_of_use(100, mps=CardMps(ready=True)))
    without = {"gpu_mem": 10, "annotations": {names.ISOLATION: "none"}}
    assert place(ledger, **without).node == "n1"
    ledger.set_holding(Holding("u", "d", "u", "n1", place(ledger, gpu_mem=10).assignment))
    assert place(ledger, **without).refusals == {"n1": Refusal.MPS_MIXED}
    assert place(ledger, gpu_mem=10).node == "n1"
    ledger.release("u")
    assert place(ledger, **without).node == "n1"


def test_auto_headroom_is_that_of_each_card():
    ledger = Ledger(kept_back=None)
    first, second = cards(1000, 1000)
    ledger.set_cards("n1", [replace(first, headroom=100), replace(second, headroom=300)])
    assert ledger.node("n1").free == [900, 700]
    assert place(ledger, gpu_mem=700).assignment.shares()[0].index == 1
    assert place(ledger, gpu_mem=800).assignment.shares()[0].index == 0
    assert place(ledger, gpu_mem=901).refusals == {"n1": Refusal.CARD_TOO_SMALL}
    (whole,) = place(ledger, gpu_count=1).assignment.shares()
    assert (whole.mem, whole.total) == ((700, 1000) if whole.index else (900, 1000))


def test_a_smaller_headroom_of_a_card_frees_the_difference():
    ledger = Ledger(kept_back=None)
    ledger.set_cards("n1", [replace(card, headroom=300) for card in cards(1000)])
    assert place(ledger, gpu_mem=800).refusals == {"n1": Refusal.CARD_TOO_SMALL}
    ledger.set_cards("n1", [replace(card, headroom=100) for card in cards(1000)])
    assert place(ledger, gpu_mem=800).node == "n1"


def test_headroom_is_kept_back():
    ledger = Ledger(kept_back=100)
    ledger.set_cards("n1", cards(1000))
    assert place(ledger, gpu_mem=901).refusals["n1"] is Refusal.CARD_TOO_SMALL
    assert place(ledger, gpu_mem=2000, gpu_count=2).refusals["n1"] is Refusal.TOO_FEW_CARDS
    assert place(ledger, gpu_mem=901, gpu_core=10).refusals["n1"] is Refusal.CARD_TOO_SMALL
    assert place(ledger, gpu_mem=900).node == "n1"


def test_a_whole_card_is_what_the_headroom_leaves_of_it():
    ledger = Ledger(kept_back=100)
    ledger.set_cards("n1", cards(1000))
    (share,) = place(ledger, gpu_count=1).assignment.shares()
    assert (share.mem, share.total) == (900, 1000)
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_count=2)), "binpack")
    assert [card.missing_mib for card in view.cards] == [0]


def test_a_card_of_which_the_headroom_leaves_nothing_is_not_given_away_whole():
    ledger = Ledger(kept_back=100)
    ledger.set_cards("n1", cards(100, 100))
    assert place(ledger, gpu_count=1).refusals["n1"] is Refusal.NO_WHOLE_CARD
    ledger.set_cards("n1", cards(101))
    assert [share.mem for share in place(ledger, gpu_count=1).assignment.shares()] == [1]


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("core", [{}, {"gpu_core": 10}])
def test_every_container_is_a_client_of_the_card(policy, core):
    ledger = Ledger(max_clients=4)
    ledger.set_cards("n1", cards(1000))
    for i in range(2):
        ledger.set_holding(holding(f"h{i}", 1, 0, total=1000))
    two = [container(name, gpu_mem=1, **core) for name in "ab"]
    assert place(ledger, policy, containers=[*two, container("c", gpu_mem=1)]).refusals == {
        "n1": Refusal.TOO_MANY_CLIENTS
    }
    placed = place(ledger, policy, containers=two)
    ledger.set_holding(Holding("two", "d", "two", "n1", placed.assignment))
    assert ledger.node("n1").clients == [4]


def test_containers_that_an_earlier_claim_brought_are_clients_too():
    ledger = Ledger(max_clients=2)
    ledger.set_cards("n1", cards(100, 100))
    together = [container("a", gpu_mem=20), container("b", gpu_mem=20)]
    placed = place(ledger, containers=[*together, container("c", gpu_mem=20, gpu_count=2)])
    assert isinstance(placed, placement.Unplaceable)


def test_containers_that_an_earlier_claim_brought_are_clients_once():
    ledger = Ledger(max_clients=3)
    ledger.set_cards("n1", out_of_use(100, classes=frozenset({"x"})))
    placed = place(ledger, containers=[of_class("x", gpu_mem=10), *(container(name, gpu_mem=10) for name in "ab")])
    assert placed.node == "n1"


def test_a_cordoned_card_gets_nothing_new_and_what_is_on_it_stays_counted():
    ledger = Ledger()
    free, busy = cards(100, 100)
    ledger.set_cards("n1", [free, busy])
    ledger.set_holding(holding("u", 60, 1, total=100))
    ledger.set_cards("n1", [free, replace(busy, cordoned=True)])
    node = ledger.node("n1")
    assert (node.used, node.free) == ([0, 60], [100, 40])
    (share,) = place(ledger, gpu_mem=40).assignment.shares()
    assert share.index == 0, "binpack would have taken the other one"
    assert place(ledger, gpu_count=2).refusals["n1"] is Refusal.CORDONED
    assert place(ledger, gpu_mem=80, gpu_count=2).refusals["n1"] is Refusal.CORDONED
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_count=2)), "binpack")
    assert [card.cordoned for card in view.cards] == [False, True]
    ledger.set_cards("n1", [free, busy])
    (share,) = place(ledger, gpu_mem=40).assignment.shares()
    assert share.index == 1


@pytest.mark.parametrize(
    ("frees", "amounts", "refusal"),
    [
        ([16276, 16276], [{"gpu_count": 2}, {"gpu_mem": 1024}], Refusal.NEVER_TOGETHER),
        ([16276, 16276], [{"gpu_count": 1}, {"gpu_mem": 8192, "gpu_count": 2}], Refusal.NEVER_TOGETHER),
        ([16276, 4096], [{"gpu_count": 1}, {"gpu_mem": 8138}], Refusal.TOGETHER),
        ([16276, 4096], [{"gpu_count": 1}, {"gpu_mem": 4096}], None),
        ([16276, 4096], [{"gpu_count": 1}, {"gpu_mem": 4096, "gpu_count": 4}], Refusal.TOO_FEW_CARDS),
        ([16276, 100], [{"gpu_count": 1}, {"gpu_mem": 16000, "gpu_count": 2}], Refusal.NO_MEMORY),
    ],
)
def test_requests_that_would_fit_alone_are_refused_for_being_together(frees, amounts, refusal):
    several = [container(f"c{i}", **container_amounts) for i, container_amounts in enumerate(amounts)]
    ledger = ledger_with_free(n1=frees)
    placed = placement.place_on(ledger.kinds, ledger.node("n1"), request.parse(pod(containers=several)), "spread")
    assert (placed if isinstance(placed, Refusal) else None) is refusal


def test_other_pods_could_make_room_only_where_all_requests_fit_the_empty_cards():
    assert Refusal.TOGETHER.resolvable
    assert not Refusal.NEVER_TOGETHER.resolvable


@pytest.mark.parametrize(("steps", "looked_at"), [(16, 2), (17, 3)])
def test_checking_whether_an_empty_node_would_fit_costs_eight_steps(monkeypatch, steps, looked_at):
    monkeypatch.setattr(searching, "_MAX_STEPS", steps)
    several = request.parse(pod(containers=[container("a", gpu_count=2), container("b", gpu_mem=9000)]))
    nodes = [f"n{i}" for i in range(5)]
    answer = placement.place(ledger_with_free(**{name: [P100, P100] for name in nodes}), nodes, several, "binpack")
    never = [name for name in nodes if answer.refusals[name] is Refusal.NEVER_TOGETHER]
    assert never == nodes[:looked_at]
    assert [answer.refusals[name] for name in nodes[looked_at:]] == [Refusal.TOGETHER] * (5 - looked_at)


def test_the_effort_of_one_request_over_all_nodes_is_limited(monkeypatch):
    """The lock is held during the search. Once the effort is spent, only the policy's first choices are tried."""
    monkeypatch.setattr(searching, "_MAX_STEPS", 2)
    several = request.parse(pod(containers=[container("a", gpu_mem=6000), container("b", gpu_mem=8000, gpu_count=2)]))
    fits_nowhere, fits = [9000, 9500, 100], [6000, 10000]
    ledger = ledger_with_free(n1=fits_nowhere, n2=fits)
    answer = placement.place(ledger, ["n1", "n2"], several, "binpack")
    assert isinstance(answer, placement.Unplaceable)
    assert set(answer.refusals.values()) == {Refusal.TOGETHER}
    assert placement.place(ledger, ["n2"], several, "binpack").node == "n2"


def test_the_example_of_the_docstring_of_the_search():
    theory, gib, free, single, pair = theory_of("cardwise.core.placement.searching"), 1024, (9, 8), 5, 4
    ledger = Ledger()
    ledger.set_cards("n1", cards(*(size * gib for size in free)))

    def search(*containers: dict) -> tuple[list[int], int]:
        """The GiB of each card that the pod gets, and the steps of the search."""
        effort, several = searching.SearchEffort(), request.parse(pod(containers=list(containers)))
        plan = fitting.make_search_plan(fitting.card_requests(several), ledger.kinds, ())
        choice = searching.fit_request(ledger.node("n1"), plan, binpack.pick_card, effort)
        used = [0] * len(free)
        for typed_request, positions in zip(plan.typed_requests, choice[1], strict=True):
            for i in positions:
                used[i] += typed_request.card_request.mem // gib
        return used, searching._MAX_STEPS - effort.remaining

    assert f"requests {single} GiB of one card and {pair} GiB of each of two cards" in theory
    assert f"Card 0 has {free[0]} GiB free, and card 1 has {free[1]} GiB" in theory
    of_single, of_pair = container("a", gpu_mem=single * gib), container("b", gpu_mem=2 * pair * gib, gpu_count=2)
    first_choice, _ = search(of_single)
    card = first_choice.index(single)
    rest = free[card] - single
    assert f"The first choice for {single} GiB is the fuller card {card}, which then has {rest} GiB free" in theory
    assert rest < pair
    used, steps = search(of_single, of_pair)
    other = 1 - card
    assert (other, used[other]) == (0, single + pair)
    assert f"with the {single} GiB on card 0, the cards have {free[0] - single} and {free[1]} GiB free" in theory
    assert f"gets {used[0]} GiB of card 0 and {used[1]} GiB of card 1, after {steps} steps" in theory, steps
