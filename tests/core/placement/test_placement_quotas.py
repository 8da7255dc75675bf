"""The effect of quotas on placement: they select cards, refuse pods, and count the used amounts."""

from dataclasses import replace

import pytest

from cardwise.core.api import request
from cardwise.core.api.quotas import Charge, QuotaEntry
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal
from tests.build import P100, cards, container, ledger_with_free, pod
from tests.core import others
from tests.core.placement.placing import K80, V100, location_of, of_class, place, quota, typed_ledger
from tests.working import work


def test_a_quota_steers_what_names_no_type_and_refuses_the_rest():
    ledger = typed_ledger(n1=[K80, V100], n2=[K80])
    full = quota(ledger, QuotaEntry(model="Tesla K80", memory=999))

    def place_within(headroom, **amounts):
        pod_request = request.parse(pod(**amounts))
        return placement.place(ledger, ["n1", "n2"], pod_request, "binpack", headroom)

    assert location_of(place_within(full, gpu_mem=999)) == ("n1", [0])
    assert location_of(place_within(full, gpu_mem=1000)) == ("n1", [1])
    assert place_within(full, gpu_mem=17000).refusals["n1"] is Refusal.CARD_TOO_SMALL, "the quota is not why"
    named = place_within(full, containers=[of_class("k80", gpu_mem=1000)])
    assert set(named.refusals.values()) == {Refusal.QUOTA}
    assert not Refusal.QUOTA.resolvable, "nobody else's pods are preempted for it"
    assert place_within(quota(ledger, QuotaEntry(cards=1)), gpu_count=2).refusals == {
        "n1": Refusal.QUOTA,
        "n2": Refusal.TOO_FEW_CARDS,
    }


def test_a_quota_counts_all_cards_of_a_request_together():
    ledger = typed_ledger(n1=[K80, K80, V100])
    headroom = quota(ledger, QuotaEntry(resource_class="k80", shares=1))
    split = request.parse(pod(gpu_mem=200, gpu_count=2))
    assert location_of(placement.place(ledger, ["n1"], split, "binpack", headroom)) == ("n1", [0, 2])
    unlimited = placement.place(ledger, ["n1"], split, "binpack")
    assert location_of(unlimited) == ("n1", [0, 1])
    assert placement.entries_exceeded_together(ledger, [(unlimited.node, unlimited.assignment)], headroom) == [
        headroom[0].entry
    ]
    assert (
        placement.place_on(ledger.kinds, ledger.node("n1"), split, "binpack", quota(ledger, QuotaEntry(shares=1)))
        is Refusal.QUOTA
    )


@pytest.mark.parametrize(
    ("amounts", "k80s"),
    [
        ({"gpu_mem": 400, "gpu_count": 2}, {"memory": 300}),
        ({"gpu_count": 2}, {"shares": 1}),
        ({"gpu_count": 2}, {"memory": 12000}),
        ({"gpu_count": 2}, {"cards": 1}),
    ],
)
def test_each_card_of_a_request_is_charged_to_each_limit(amounts, k80s):
    ledger = typed_ledger(n1=[K80, K80, V100])
    headroom = quota(ledger, QuotaEntry(resource_class="k80", **k80s))
    assert location_of(placement.place(ledger, ["n1"], request.parse(pod(**amounts)), "binpack", headroom)) == (
        "n1",
        [0, 2],
    )


def test_a_whole_card_that_is_larger_than_what_is_left_is_refused_for_the_quota():
    ledger = typed_ledger(n1=[K80])
    less = quota(ledger, QuotaEntry(resource_class="k80", memory=11440))
    refused = placement.place(ledger, ["n1"], request.parse(pod(gpu_count=1)), "binpack", less).refusals
    assert refused == {"n1": Refusal.QUOTA}


@pytest.mark.parametrize(("remaining", "fits"), [(900, True), (899, False)])
@pytest.mark.parametrize(("kept_back", "headroom"), [(100, 0), (100, 300), (None, 100)])
def test_a_whole_card_is_charged_without_what_is_kept_back_of_it(remaining, fits, kept_back, headroom):
    ledger = Ledger(kept_back=kept_back)
    ledger.set_cards("n1", [replace(card, headroom=headroom) for card in cards(1000)])
    placed = placement.place(
        ledger, ["n1"], request.parse(pod(gpu_count=1)), "binpack", quota(ledger, QuotaEntry(memory=remaining))
    )
    assert isinstance(placed, placement.Placement) == fits


def test_a_card_is_charged_to_the_entries_that_cover_it_alone():
    ledger = typed_ledger(n1=[K80, V100])
    one_of_each = quota(ledger, QuotaEntry(resource_class="k80", shares=1), QuotaEntry(resource_class="v100", shares=1))
    split = request.parse(pod(gpu_mem=200, gpu_count=2))
    assert location_of(placement.place(ledger, ["n1"], split, "binpack", one_of_each)) == ("n1", [0, 1])


def test_each_container_is_a_share_also_where_they_have_one_card_in_common():
    ledger = typed_ledger(n1=[K80])
    several = request.parse(pod(containers=[container(name, gpu_mem=100) for name in "ab"]))
    assert placement.place(ledger, ["n1"], several, "binpack", quota(ledger, QuotaEntry(shares=1))).refusals == {
        "n1": Refusal.QUOTA
    }
    assert placement.place(ledger, ["n1"], several, "binpack", quota(ledger, QuotaEntry(shares=2))).node == "n1"


def test_a_quota_that_may_forbid_some_cards_changes_no_choice_among_the_others():
    ledger = typed_ledger(n1=[K80, K80, V100])
    headroom_of_v100 = quota(ledger, QuotaEntry(resource_class="v100", shares=1))
    split = request.parse(pod(gpu_mem=200, gpu_count=2))
    free, bounded = (placement.place(ledger, ["n1"], split, "binpack", headroom) for headroom in ([], headroom_of_v100))
    assert location_of(bounded) == location_of(free) == ("n1", [0, 1]), "each card once"
    assert bounded.score == free.score


def test_a_limit_that_bars_one_claim_is_counted_for_the_others():
    ledger = typed_ledger(n1=[K80, K80, V100, V100])
    several = [container("split", gpu_mem=400, gpu_count=2), *(container(name, gpu_mem=10) for name in "ab")]
    pod_request = request.parse(pod(containers=several))
    headroom = quota(ledger, QuotaEntry(resource_class="k80", shares=1))
    placed = placement.place(ledger, ["n1"], pod_request, "binpack", headroom)
    assert location_of(placed) == ("n1", [0, 2])
    assert placement.entries_exceeded_together(ledger, [(placed.node, placed.assignment)], headroom) == []


def test_a_limit_of_whole_cards_closes_none_to_shares():
    ledger = typed_ledger(n1=[K80, K80, V100])
    headroom = quota(ledger, QuotaEntry(resource_class="k80", shares=1, cards=0))
    split = request.parse(pod(gpu_mem=200, gpu_count=2))
    assert location_of(placement.place(ledger, ["n1"], split, "binpack", headroom)) == ("n1", [0, 2])


def test_what_a_request_charges_an_entry_whichever_cards_it_gets():
    kinds = typed_ledger(n1=[K80, V100]).kinds
    k80, v100, every_card = QuotaEntry(resource_class="k80"), QuotaEntry(resource_class="v100"), QuotaEntry()
    pod_request = request.parse(
        pod(
            containers=[
                of_class("k80", gpu_mem=400, gpu_count=2),
                *(container(name, gpu_mem=mem) for name, mem in (("a", 10), ("b", 20))),
            ]
        )
    )
    assert fitting.min_charge_of_share(pod_request, kinds, k80) == Charge(2, 400, 0), (
        "those of any class may go elsewhere"
    )
    assert fitting.min_charge_of_share(pod_request, kinds, v100) == Charge()
    assert fitting.min_charge_of_share(pod_request, kinds, every_card) == Charge(4, 430, 0)


def test_a_request_of_whole_cards_surely_charges_them():
    ledger = typed_ledger(n1=[K80, K80, V100])
    two = request.parse(pod(containers=[of_class("k80", gpu_count=2)]))
    surely = fitting.min_charge_of_share(two, ledger.kinds, QuotaEntry(model="Tesla K80"))
    assert (surely.shares, surely.cards) == (2, 2)
    assert 0 < surely.memory <= 2 * 11441, "the smallest card is not looked for"


def test_quotas_that_leave_no_cards_for_a_part_of_a_request_exhaust_it():
    ledger = typed_ledger(n1=[K80, V100])
    full = quota(ledger, QuotaEntry(resource_class="k80", shares=0))

    def exhausted(headroom, *containers):
        return placement.Scorer(
            ledger.kinds, request.parse(pod(containers=list(containers))), "binpack", headroom
        ).is_exhausted_by_quotas()

    k80, v100, any_card = of_class("k80", gpu_mem=1), of_class("v100", gpu_mem=1), container("any", gpu_mem=1)
    assert exhausted(full, k80)
    assert exhausted(full, v100, k80), "a part is enough"
    assert not exhausted(full, v100)
    assert not exhausted(full, any_card), "a card that no quota covers is left"
    assert exhausted(quota(ledger, QuotaEntry(shares=0)), any_card), "on every level of priority"
    assert not exhausted([], k80)


def test_what_a_namespace_has_used_of_a_quota():
    ledger = typed_ledger(n1=[K80, V100])
    every, k80 = QuotaEntry(shares=9), QuotaEntry(resource_class="k80", shares=9)
    placed = place(ledger, containers=[of_class("k80", gpu_count=1), of_class("v100", gpu_mem=100)])
    ledger.set_holding(Holding("u", "default", "u", "n1", placed.assignment))
    assert ledger.used_amounts("default", every) == Charge(2, 11541, 1)
    assert ledger.used_amounts("default", k80) == Charge(1, 11441, 1)
    assert ledger.used_amounts("other", every) == Charge()
    ledger.set_cards("n1", [])
    assert ledger.used_amounts("default", every) == Charge(2, 11541, 1), "held on cards that nobody reports now"
    assert ledger.used_amounts("default", k80) == Charge(1, 11441, 1), "it counts as what it was until it is back"
    ledger.release("u")
    assert ledger.used_amounts("default", every) == Charge()


def test_a_full_quota_is_nothing_to_devices_but_to_the_cards_beside_them():
    ledger = ledger_with_free(n1=[P100])
    ledger.set_other_devices("n1", others.devices(1))
    full = quota(ledger, QuotaEntry(shares=0))
    alone, beside = (
        others.parse_request(others.wanting(rdma=1)),
        others.parse_request(others.wanting(container(gpu_mem=1), rdma=1)),
    )
    placed = placement.place(ledger, ["n1"], alone, "binpack", full)
    assert placed.node == "n1"
    assert placement.entries_exceeded_together(ledger, [(placed.node, placed.assignment)], full) == []
    assert placement.place(ledger, ["n1"], beside, "binpack", full).refusals == {"n1": Refusal.QUOTA}


def unlike_cards(count):
    """A node whose cards all differ in size, from 10,000 MiB in steps of 7."""
    return typed_ledger(n1=[{"mem": 10_000 + 7 * i} for i in range(count)])


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("steps", [4096, 3])
def test_cards_that_are_tried_within_a_quota_are_limited(policy, steps):
    """A node that reports a different size for each card has thousands of choices, and the lock is held during the
    search.
    """
    ledger = unlike_cards(20)
    ten = request.parse(pod(gpu_count=10))
    headroom = quota(ledger, QuotaEntry(memory=100_000 + 7 * 44))  # 1 MiB less than the ten smallest have
    effort = SearchEffort(steps)
    with work() as done:
        placed = placement.Scorer(ledger.kinds, ten, policy, headroom).place_on(ledger.node("n1"), effort)
    assert placed is Refusal.QUOTA
    assert effort.remaining == max(0, steps - 256)
    assert done.steps < 100_000


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_cards_of_few_kinds_and_sizes_cost_no_effort_within_a_quota(policy):
    """Thousands of such nodes are searched with one effort."""
    ledger = typed_ledger(n1=[K80] * 8, n2=[K80, V100] * 4)
    headroom = quota(ledger, QuotaEntry(resource_class="v100", cards=3), QuotaEntry(resource_class="k80", cards=5))
    five = placement.Scorer(ledger.kinds, request.parse(pod(gpu_count=5)), policy, headroom)
    effort = SearchEffort()
    for node in ("n1", "n2"):
        assert isinstance(five.place_on(ledger.node(node), effort), placement.Placement)
    none_left = quota(ledger, QuotaEntry(resource_class="k80", cards=4), QuotaEntry(resource_class="v100", cards=0))
    five = placement.Scorer(ledger.kinds, request.parse(pod(gpu_count=5)), policy, none_left)
    for node in ("n1", "n2"):
        assert five.place_on(ledger.node(node), effort) is Refusal.QUOTA
    assert effort.remaining == SearchEffort().remaining


def test_each_choice_of_the_last_request_within_a_quota_is_a_step_where_requests_give_way():
    """Two card requests of a class must leave cards to each other, and quotas may close each card
    that is tried last.
    """
    ledger = typed_ledger(n1=[{"mem": 10_000 + 7 * i, "classes": frozenset({"x"})} for i in range(20)])
    several = [of_class("x", gpu_mem=2 * 9_000, gpu_count=2), of_class("x", gpu_count=10)]
    headroom = quota(ledger, QuotaEntry(memory=2 * 9_000 + 100_000 + 7 * 44))
    effort = SearchEffort()
    scorer = placement.Scorer(ledger.kinds, request.parse(pod(containers=several)), "binpack", headroom)
    with work() as done:
        assert scorer.place_on(ledger.node("n1"), effort) is Refusal.QUOTA
    assert done.steps < 300_000
