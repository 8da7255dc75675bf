"""The figures of Alibaba's articles, types of cards, and devices that are no GPUs."""

from dataclasses import replace

import pytest

from cardwise.core.api import quotas, request
from cardwise.core.api.assignment import AssignedDevice
from cardwise.core.api.mpsprofile import CardMps
from cardwise.core.api.quotas import NO_CHARGE, QuotaEntry
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal
from tests.build import P100, cards, container, holding, ledger_with_free, pod
from tests.core import others
from tests.core.placement.placing import K80, V100, location_of, of_class, place, quota, typed_ledger


def test_the_node_where_one_card_fits_not_where_the_sum_fits():
    ledger = ledger_with_free(n1=[4069, 0], n2=[4069, 4069], n3=[8138, 0])
    assert location_of(place(ledger, gpu_mem=8138)) == ("n3", [0])


def test_the_card_with_the_smallest_free_memory_that_fits():
    assert location_of(place(ledger_with_free(n1=[12207, 8138, 4069, 16276]), gpu_mem=8138)) == ("n1", [1])


ONE, OTHER = container("one", gpu_mem=1), container("other", gpu_mem=1)


@pytest.mark.parametrize(
    ("containers", "several"),
    [
        ([ONE], False),
        ([ONE, OTHER], False),  # they share a card
        ([container(gpu_mem=2, gpu_count=2)], False),
        ([container(gpu_count=8)], False),
        ([ONE, container(gpu_count=1)], True),
        ([ONE, of_class("k80", gpu_mem=1)], True),
        ([container(name, gpu_count=1) for name in "abc"], True),
    ],
)
def test_a_request_with_several_claims(containers, several):
    assert fitting.has_several_card_requests(request.parse(pod(containers=containers))) is several


def test_spread_takes_the_emptiest_card():
    ledger = ledger_with_free(n1=[12207, 8138, 4069, 16276], n2=[16000, 0])
    assert location_of(place(ledger, "spread", gpu_mem=8138)) == ("n1", [3])


def test_three_replicas_of_1024_land_on_one_card():
    ledger = ledger_with_free(n1=[P100, P100], n2=[P100, P100], n3=[P100, P100])
    seen = set()
    for i in range(3):
        node, (index,) = location_of(place(ledger, gpu_mem=1024))
        ledger.set_holding(holding(f"r{i}", 1024, index, node=node))
        seen.add((node, index))
    assert len(seen) == 1


def test_whole_cards_take_empty_ones_only_and_several_containers_stay_together():
    ledger = ledger_with_free(n1=[P100 - 1, P100, P100])
    assert location_of(place(ledger, gpu_count=2)) == ("n1", [1, 2])
    mixed = [container("a", gpu_count=1), container("b", gpu_mem=500), container("c", gpu_mem=600)]
    placed = place(ledger, containers=mixed)
    by_container = {key: [s.index for s in shares] for key, shares in placed.assignment.containers.items()}
    assert by_container == {"0": [1], "1": [0], "2": [0]}


def test_a_single_whole_card_is_an_empty_one_however_little_is_used_of_the_others():
    ledger = ledger_with_free(n1=[1, 100, P100 - 1, P100], n2=[P100 - 1])
    for policy in ("binpack", "spread"):
        assert location_of(place(ledger, policy, gpu_count=1)) == ("n1", [3])


def test_a_split_share_takes_different_cards():
    assert location_of(place(ledger_with_free(n1=[5000, 9000, 4000]), gpu_mem=8000, gpu_count=2)) == ("n1", [0, 2])
    ledger = typed_ledger(n1=[{"mem": 100}, *[{"mem": 100, "classes": frozenset({"x"})}] * 2])
    assert location_of(place(ledger, containers=[of_class("x", gpu_mem=200, gpu_count=2)])) == ("n1", [1, 2])


def test_mixed_cards_in_one_node():
    ledger = Ledger()
    ledger.set_cards("n1", cards(11441, 24576, 11441))
    assert location_of(place(ledger, gpu_mem=12000)) == ("n1", [1])
    assert location_of(place(ledger, gpu_mem=11000)) == ("n1", [0])


def test_classes_are_matched_card_by_card():
    ledger = typed_ledger(n1=[K80, V100], n2=[K80, K80], n3=[V100])
    ledger.set_holding(holding("v", 1, 0, node="n3", total=16160))
    assert location_of(place(ledger, containers=[of_class("v100", gpu_count=1)])) == ("n1", [1])
    assert location_of(place(ledger, containers=[of_class("k80", gpu_count=2)])) == ("n2", [0, 1])
    refused = place(ledger, containers=[of_class("v100", gpu_count=2)]).refusals
    assert refused == {"n1": Refusal.TOO_FEW_CARDS, "n2": Refusal.NO_SUCH_TYPE, "n3": Refusal.TOO_FEW_CARDS}
    refused = place(ledger, containers=[of_class("k80", gpu_count=3)]).refusals
    assert refused == {"n1": Refusal.TOO_FEW_CARDS, "n2": Refusal.TOO_FEW_CARDS, "n3": Refusal.NO_SUCH_TYPE}
    ledger.set_cards("n3", [])
    ledger.release("v")
    assert location_of(place(ledger, containers=[of_class("v100", gpu_mem=100)])) == ("n1", [1])
    refused = place(ledger, containers=[of_class("k80", gpu_mem=12000)]).refusals
    assert refused == {"n1": Refusal.CARD_TOO_SMALL, "n2": Refusal.CARD_TOO_SMALL}
    assert set(place(ledger, containers=[of_class("a100", gpu_mem=1)]).refusals.values()) == {Refusal.NO_SUCH_TYPE}


def test_containers_of_a_pod_share_a_card_per_class():
    several = [of_class("k80", gpu_mem=10), of_class("v100", gpu_mem=10), of_class("k80", gpu_mem=20)]
    placed = place(typed_ledger(n1=[V100, K80, K80]), containers=[*several, container("any", gpu_count=1)])
    by_container = [[s.index for s in placed.assignment.containers[key]] for key in "0123"]
    assert by_container == [[1], [0], [1], [2]]


def test_scarce_cards_stay_free_for_requests_that_name_them():
    ledger = typed_ledger(n1=[V100, K80], n2=[V100])
    ledger.set_holding(holding("v", 16000, 0, node="n2", total=16160))
    for policy in ("binpack", "spread"):
        assert location_of(place(ledger, policy, gpu_mem=100)) == ("n1", [1])
        assert location_of(place(ledger, policy, gpu_mem=12000)) == ("n1", [0])
        assert location_of(place(ledger, policy, gpu_count=1)) == ("n1", [1])
        assert place(ledger, policy, containers=[of_class("fast", gpu_mem=100)]).assignment.shares()[0].total == 16160


def ledger_with_devices(**nodes):
    """A ledger of nodes with these numbers of RDMA devices."""
    ledger = Ledger()
    for node, count in nodes.items():
        ledger.set_other_devices(node, others.devices(count, node=node))
    return ledger


def place_wanting(ledger, *containers, policy="binpack", nodes=None):
    nodes = nodes or [node.name for node in ledger.nodes()]
    return placement.place(ledger, nodes, others.parse_request(*containers), policy)


@pytest.mark.parametrize(("policy", "node"), [("binpack", "n2"), ("spread", "n3")])
def test_devices_alone_go_where_the_fewest_or_the_most_are_free(policy, node):
    ledger = ledger_with_devices(n1=4, n2=4, n3=8, n4=1)
    ledger.set_holding(others.holding("u", 0, 2, node="n2"))
    ledger.set_other_devices("n1", [*others.devices(4), *others.devices(9, kind="nic")])
    placed = place_wanting(ledger, others.wanting(rdma=2), policy=policy)
    assert placed.node == node
    assert placed.assignment.containers == {}
    first = 1 if node == "n2" else 0
    uuids = [others.uuid(i, node=node) for i in (first, 3 if node == "n2" else 1)]
    assert placed.assignment.devices == {"0": tuple(AssignedDevice("rdma", uuid) for uuid in uuids)}
    same = placement.place_on(ledger.kinds, ledger.node(node), others.parse_request(others.wanting(rdma=2)), policy)
    assert same == placed
    scorer = placement.Scorer(ledger.kinds, others.parse_request(others.wanting(rdma=2)), policy)
    assert scorer.score(ledger.node(node)) == placed.score


@pytest.mark.parametrize(("policy", "node"), [("binpack", "n3"), ("spread", "n4")])
def test_cards_are_looked_for_where_the_devices_are(policy, node):
    ledger = ledger_with_free(n1=[100], n2=[16000], n3=[200], n4=[3000])
    for name in ("n2", "n3", "n4"):
        ledger.set_other_devices(name, others.devices(1, node=name))
    ledger.set_holding(others.holding("u", 0, node="n2"))
    placed = place_wanting(ledger, others.wanting(container(gpu_mem=100), rdma=1), policy=policy)
    assert location_of(placed) == (node, [0])
    assert placed.assignment.devices == {"0": (AssignedDevice("rdma", others.uuid(0, node=node)),)}


def test_each_refusal_names_what_the_node_lacks_devices_first():
    ledger = ledger_with_free(n1=[16000], n2=[16000], n3=[50], n4=[])
    for name in ("n2", "n3", "n4"):
        ledger.set_other_devices(name, others.devices(1, node=name))
    ledger.set_holding(others.holding("u", 0, node="n2"))
    nodes = ["n1", "n2", "n3", "n4", "unknown"]
    answer = place_wanting(ledger, others.wanting(container(gpu_mem=100), rdma=1), nodes=nodes)
    assert answer.refusals == {
        "n1": Refusal.NO_SUCH_DEVICE,
        "n2": Refusal.NO_DEVICE,
        "n3": Refusal.NO_MEMORY,
        "n4": Refusal.NOT_OURS,
        "unknown": Refusal.NO_SUCH_DEVICE,
    }
    pod_request = others.parse_request(others.wanting(container(gpu_mem=100), rdma=1))
    for node, refusal in answer.refusals.items():
        assert placement.place_on(ledger.kinds, ledger.node(node), pod_request, "binpack") is refusal


def test_a_share_goes_to_another_card_where_the_pods_other_shares_need_the_first():
    ledger = Ledger()
    ledger.set_cards("n1", cards(6000, 10000))
    several = [container("a", gpu_mem=6000), container("b", gpu_mem=8000, gpu_count=2)]
    placed = place(ledger, containers=several)
    shares_by_container = {
        key: [(share.index, share.mem) for share in of] for key, of in placed.assignment.containers.items()
    }
    assert shares_by_container == {"0": [(1, 6000)], "1": [(0, 4000), (1, 4000)]}


def test_the_best_card_of_a_node_that_was_not_named_is_never_taken():
    """This holds however many cards the index has before the cards of the named node."""
    ledger = ledger_with_free(**{f"n{i}": [1000 + i] for i in range(9)})
    for named in (["n8"], ["unknown", "n8"]):
        pod_request = request.parse(pod(gpu_mem=1000))
        assert placement.place(ledger, named, pod_request, "binpack").node == "n8"
        assert placement.place(ledger, ["unknown"], pod_request, "binpack").refusals == {"unknown": Refusal.NOT_OURS}


def test_a_card_that_mps_closes_is_passed_over_on_its_node():
    ledger = Ledger()
    ledger.set_cards("n1", [replace(card, mps=CardMps(ready=card.mem > 51)) for card in cards(101, 51)])
    pod_request = request.parse(pod(gpu_mem=40))
    assert placement.Scorer(ledger.kinds, pod_request, "binpack").score(ledger.node("n1")) == -101
    assert placement.place_on(ledger.kinds, ledger.node("n1"), pod_request, "binpack").assignment.indices() == [0]


def test_a_node_that_has_only_scarce_cards_is_the_worse_one():
    ledger = typed_ledger(n1=[V100], n2=[K80])
    for policy in ("binpack", "spread"):
        scorer = placement.Scorer(ledger.kinds, request.parse(pod(gpu_mem=100)), policy)
        assert scorer.score(ledger.node("n1")) < scorer.score(ledger.node("n2"))


def test_a_missing_type_is_the_reason_even_if_the_cards_are_too_small():
    ledger = typed_ledger(n1=[V100], n2=[K80])
    refused = place(ledger, containers=[of_class("k80", gpu_mem=20000)]).refusals
    assert refused == {"n1": Refusal.NO_SUCH_TYPE, "n2": Refusal.CARD_TOO_SMALL}


def test_a_type_is_refused_by_the_state_of_its_own_cards():
    ledger = typed_ledger(n1=[K80 | {"cordoned": True}, V100], n2=[K80, V100])
    ledger.set_holding(holding("u", 1, 0, node="n2", total=11441))
    refused = place(ledger, containers=[of_class("k80", gpu_count=1)]).refusals
    assert refused == {"n1": Refusal.CORDONED, "n2": Refusal.NO_WHOLE_CARD}
    refused = place(ledger, containers=[of_class("k80", gpu_mem=11441)]).refusals
    assert refused == {"n1": Refusal.CORDONED, "n2": Refusal.NO_MEMORY}


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("amounts", [{"gpu_mem": 30}, {"gpu_count": 1}])
@pytest.mark.parametrize("entry", [None, QuotaEntry(memory=60)])
def test_all_nodes_are_scored_as_each_alone_where_all_cards_are_of_one_kind(policy, amounts, entry):
    ledger = Ledger()
    for name, mem in (("n1", 100), ("n2", 50), ("n3", 40)):
        ledger.set_cards(name, cards(mem, mem, node=name))
    ledger.set_cards("n4", [replace(card, mps=CardMps(ready=False)) for card in cards(45, node="n4")])
    for index in (0, 1):
        ledger.set_holding(holding(f"u{index}", 5, index, node="n3", total=40))
    headroom = [quotas.headroom(entry, NO_CHARGE)] if entry else []
    scorer = placement.Scorer(ledger.kinds, request.parse(pod(**amounts)), policy, headroom)
    score_by_node = {node.name: scorer.score(node) for node in ledger.nodes()}
    fit, not_fit = scorer.score_all(ledger, score_by_node)
    assert fit | not_fit == score_by_node
    assert not_fit["n4"] is Refusal.MPS_DOWN
    assert not_fit.keys() == {
        "n4",
        *(["n3"] if "gpu_count" in amounts else []),
        *(["n1"] if entry and "gpu_count" in amounts else []),
    }


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize(
    "amounts", [{"gpu_mem": 100}, {"gpu_count": 1}, {"gpu_count": 2}, {"gpu_mem": 9, "gpu_core": 9}]
)
@pytest.mark.parametrize("entry", [None, QuotaEntry(resource_class="k80", memory=11441), QuotaEntry(shares=1)])
def test_all_nodes_are_scored_as_each_alone(policy, amounts, entry):
    ledger = typed_ledger(n1=[V100, K80], n2=[K80, K80], n3=[K80], n4=[V100, V100])
    ledger.set_holding(holding("u", 100, 0, node="n3", total=11441))
    headroom = quota(ledger, entry) if entry else []
    names = ["unknown", "n1", "n2", "n3", "n4"]
    scorer = placement.Scorer(ledger.kinds, request.parse(pod(**amounts)), policy, headroom)
    score_by_node = {name: scorer.score(ledger.node(name)) for name in names}
    fit, not_fit = scorer.score_all(ledger, names)
    assert fit | not_fit == score_by_node
    for name in names:
        placed = placement.place_on(ledger.kinds, ledger.node(name), request.parse(pod(**amounts)), policy, headroom)
        assert (placed if isinstance(placed, Refusal) else placed.score) == score_by_node[name]


def test_the_smallest_card_that_is_empty_is_given_whole():
    ledger = typed_ledger(n1=[{"mem": 200}], n2=[{"mem": 100}, {"mem": 300}], n3=[{"mem": 150}])
    names = ["unknown", "n1", "n2", "n3"]
    assert location_of(placement.place(ledger, names, request.parse(pod(gpu_count=1)), "binpack")) == ("n2", [0])


BOTH, ONE = frozenset({"x"}), frozenset({"x", "y"})


def of_classes(*classes, mem=100):
    """A node with a card of `mem` MiB of each of these classes."""
    return typed_ledger(n1=[{"mem": mem, "classes": class_names} for class_names in classes])


def indices_by_container(placed):
    return {key: [share.index for share in of] for key, of in placed.assignment.containers.items()}


def test_shares_that_fill_their_cards_to_the_last_mib_give_way_to_each_other():
    several = [of_class("x", gpu_mem=100), of_class("y", gpu_mem=100)]
    placed = place(of_classes(ONE, BOTH), containers=several)
    assert indices_by_container(placed) == {"0": [1], "1": [0]}
    assert placed.score == -200, "of all cards that are taken"
    assert place(of_classes(BOTH, ONE), containers=several).score == -200, "nor where none gives way"


@pytest.mark.parametrize("mem", [100, 101])
def test_all_cards_of_a_split_share_give_way(mem):
    several = [of_class("x", gpu_mem=2 * mem, gpu_count=2), of_class("y", gpu_mem=mem)]
    placed = place(of_classes(ONE, BOTH, BOTH, mem=mem), containers=several)
    assert indices_by_container(placed) == {"0": [1, 2], "1": [0]}
    assert placed.score == -3 * mem


def test_shares_of_half_a_card_give_way_though_three_of_them_are_on_two_cards():
    several = [of_class("x", gpu_mem=50), of_class("y", gpu_mem=50), container("any", gpu_mem=50)]
    ledger = typed_ledger(n1=[{"mem": 50, "classes": ONE}, {"mem": 100, "classes": BOTH}])
    assert indices_by_container(place(ledger, containers=several)) == {"0": [1], "1": [0], "2": [1]}


def test_the_last_mib_of_a_card_counts_where_several_shares_fill_a_node():
    several = [container("a", gpu_mem=2, gpu_count=2), container("b", gpu_mem=99)]
    assert location_of(place(ledger_with_free(n1=[1, 100]), containers=several)) == ("n1", [0, 1])


TWO_SINGLE = [of_class("x", gpu_mem=100), of_class("y", gpu_mem=100)]
ONE_SPLIT = [of_class("x", gpu_mem=200, gpu_count=2), of_class("y", gpu_mem=100)]


@pytest.mark.parametrize(
    ("asking", "cards", "least"), [(TWO_SINGLE, [ONE, BOTH], 2), (ONE_SPLIT, [ONE, BOTH, BOTH], 4)]
)
def test_each_card_that_is_tried_beyond_the_first_choices_is_a_step(asking, cards, least):
    for steps in (least - 1, least):
        effort = SearchEffort(steps)
        ledger = of_classes(*cards)
        scorer = placement.Scorer(ledger.kinds, request.parse(pod(containers=asking)), "binpack")
        placed = scorer.place_on(ledger.node("n1"), effort)
        assert (placed is not Refusal.TOGETHER) == (steps == least)
        assert effort.remaining == 0
