"""The amounts that a namespace holds while cards are added, removed and added again."""

from dataclasses import replace

import pytest

from cardwise.core.api import quotas, request
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import NO_CHARGE, Charge, QuotaEntry
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import UNKNOWN_KIND
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState
from tests.build import P100, cards, holding, pod, shares
from tests.core import others

OF_A, OF_B, P100S, EVERY_CARD = (
    QuotaEntry(resource_class="a"),
    QuotaEntry(resource_class="b"),
    QuotaEntry(model="P100"),
    QuotaEntry(),
)
GPUSHARE = Holding("u", "default", "u", "n1", Assignment({"pod": (CardShare(0, "", 100, 0, P100),)}))


def card(*classes, index=0, model="P100"):
    return Card(index=index, uuid=f"GPU-n1-{index}", mem=P100, model=model, classes=frozenset(classes))


def used(ledger, *entries):
    return [ledger.used_amounts("default", entry).memory for entry in entries]


@pytest.fixture
def ledger():
    """One card of class a on n1."""
    ledger_n1 = Ledger()
    ledger_n1.set_cards("n1", [card("a")])
    return ledger_n1


@pytest.mark.parametrize("held", [holding("u", 100, 0), GPUSHARE], ids=["ours", "gpushare's"])
def test_what_is_held_counts_as_before_while_its_card_is_away(ledger, held):
    ledger.set_holding(held)
    ledger.set_cards("n1", [])
    assert used(ledger, OF_A, P100S, EVERY_CARD, OF_B) == [100, 100, 100, 0]
    ledger.set_cards("n1", [card("a", index=1)])
    assert used(ledger, OF_A, P100S, EVERY_CARD, OF_B) == [100, 100, 100, 0], "another card came"
    ledger.set_cards("n1", [card("b", model="V100")])
    assert used(ledger, OF_A, P100S, EVERY_CARD, OF_B) == [0, 0, 100, 100], "it is back as what it is now"


def test_a_card_that_was_never_seen_counts_everywhere_until_it_is(ledger):
    ledger.set_holding(holding("u", 100, 7))
    assert used(ledger, OF_A, OF_B, P100S, EVERY_CARD) == [100, 100, 100, 100]
    assert ledger.kind_of_share("n1", holding("u", 100, 7).assignment.shares()[0]) == UNKNOWN_KIND
    ledger.set_cards("n1", [card("a"), card("b", index=7)])
    assert used(ledger, OF_A, OF_B, P100S, EVERY_CARD) == [0, 100, 100, 100]


def test_the_kind_of_a_removed_card_is_kept_until_its_last_holder_ends(ledger):
    ledger.set_holding(holding("u", 100, 0))
    ledger.set_cards("n1", [])
    ledger.set_holding(holding("v", 10, 0))
    ledger.release("u")
    assert used(ledger, OF_A) == [10], "one pod that came while it was away holds it yet"
    ledger.release("v")
    ledger.set_holding(holding("w", 1, 0))
    assert used(ledger, OF_A, OF_B, EVERY_CARD) == [1, 1, 1], "it is forgotten with the last"


def test_a_card_is_remembered_by_its_uuid_also_when_another_had_its_index(ledger):
    ledger.set_holding(holding("u", 100, 0))
    ledger.set_cards("n1", [replace(card("b"), uuid="GPU-other")])
    ledger.set_holding(Holding("v", "default", "v", "n1", Assignment({"0": (CardShare(0, "GPU-other", 10, 0, P100),)})))
    ledger.set_cards("n1", [])
    assert used(ledger, OF_A, OF_B) == [100, 10]


def test_releasing_a_present_card_keeps_the_kinds_of_removed_cards(ledger):
    ledger.set_cards("n1", [card("a"), card("b", index=1)])
    ledger.set_holding(holding("u", 100, 0))
    ledger.set_holding(holding("v", 10, 1))
    ledger.set_cards("n1", [card("b", index=1)])
    ledger.release("v")
    assert used(ledger, OF_A, OF_B) == [100, 0]


def test_a_kind_is_gone_with_the_last_card_that_is_remembered(ledger):
    ledger.set_cards("n2", [Card(index=0, uuid="GPU-n2-0", mem=P100, classes=frozenset({"b"}))])
    ledger.set_holding(holding("u", 100, 0))
    ledger.set_cards("n1", [])
    kind = ledger.kind_of_share("n1", holding("u", 100, 0).assignment.shares()[0])
    assert ledger.kinds.get(kind).classes == {"a"}
    ledger.release("u")
    with pytest.raises(KeyError):
        ledger.kinds.get(kind)
    assert ledger.kinds.allowed("b") is None, "all that there are"


def test_a_kind_is_gone_when_the_card_is_back_as_another(ledger):
    ledger.set_holding(holding("u", 100, 0))
    was = ledger.node("n1").kinds[0]
    ledger.set_cards("n1", [])
    ledger.set_cards("n1", [card("b")])
    with pytest.raises(KeyError):
        ledger.kinds.get(was)


def test_the_end_of_a_what_if_knows_what_the_card_was(ledger):
    ledger.set_holding(holding("u", 100, 0))
    ledger.set_cards("n1", [])
    with ledger.what_if(released=["u"]):
        assert used(ledger, OF_A, EVERY_CARD) == [0, 0]
    assert used(ledger, OF_A, EVERY_CARD) == [100, 100]
    with ledger.what_if(added=[holding("u", 50, 0)]):
        assert used(ledger, OF_A) == [50], "the pod holds the card without a break"
    assert used(ledger, OF_A) == [100]
    with ledger.what_if(added=[holding("u", 50, 0, node="n2")]):
        assert used(ledger, OF_A, OF_B, EVERY_CARD) == [50, 50, 50], "of that one nothing is known"
    assert used(ledger, OF_A, OF_B) == [100, 0]


def test_the_end_of_a_what_if_knows_what_the_card_became_since(ledger):
    ledger.set_holding(holding("u", 100, 0))
    with ledger.what_if(added=[holding("u", 50, 0)]):
        ledger.set_cards("n1", [card("b")])
        ledger.set_cards("n1", [])
    assert used(ledger, OF_A, OF_B) == [0, 100]


def test_a_bind_to_a_card_that_went_is_compared_with_the_quota_of_its_class(ledger):
    placed = placement.place(ledger, ["n1"], request.parse(pod(gpu_mem=100)), "binpack")
    ledger.set_holding(Holding("u", "default", "u", "n1", placed.assignment))
    ledger.set_cards("n1", [])
    full = quotas.headroom(QuotaEntry(resource_class="a", shares=0), NO_CHARGE)
    assert placement.entries_exceeded_together(ledger, [(placed.node, placed.assignment)], [full]) == [full.entry]


def test_a_whole_card_counts_as_one_whatever_the_headroom_is_today():
    before, now, nobody = Ledger(kept_back=1000), Ledger(kept_back=10), Ledger()
    before.set_cards("n1", [card()])
    placed = placement.place(before, ["n1"], request.parse(pod(gpu_count=1)), "binpack")
    for ledger in (before, now, nobody):
        ledger.set_holding(Holding("u", "default", "u", "n1", placed.assignment))
        assert ledger.used_amounts("default", EVERY_CARD) == Charge(1, P100 - 1000, 1)


def test_the_whole_cards_of_others_stay_counted_when_one_goes(ledger):
    ledger.set_cards("n1", [card("a"), card("a", index=1)])
    for uid in ("u", "v"):
        placed = placement.place(ledger, ["n1"], request.parse(pod(gpu_count=1)), "binpack")
        ledger.set_holding(Holding(uid, "default", uid, "n1", placed.assignment))
    assert ledger.used_amounts("default", OF_A) == Charge(2, 2 * P100, 2)
    ledger.release("u")
    assert ledger.used_amounts("default", OF_A) == Charge(1, P100, 1)


def test_all_of_a_card_in_a_share_is_no_whole_card(ledger):
    placed = placement.place(ledger, ["n1"], request.parse(pod(gpu_mem=P100, gpu_core=100)), "binpack")
    ledger.set_holding(Holding("u", "default", "u", "n1", placed.assignment))
    assert ledger.used_amounts("default", EVERY_CARD) == Charge(1, P100, 0)


def test_a_full_card_is_no_violation_and_a_mib_more_is(ledger):
    ledger.set_holding(holding("u", P100 - 1, 0))
    ledger.set_holding(holding("v", 1, 0))
    assert ledger.violations() == []
    ledger.set_holding(holding("v", 2, 0))
    (violation,) = ledger.violations()
    assert violation.endswith(f"is overcommitted: more than its {P100} is assigned")


def test_what_no_quota_counts_fills_all_its_cards(ledger):
    ledger.set_cards("n1", [card("a"), card("a", index=1)])
    stray = Holding("u", "default", "u", "n1", Assignment({"0": shares(10, 0, 1)}), charged=False)
    ledger.set_holding(stray)
    assert (ledger.node("n1").used, used(ledger, EVERY_CARD)) == ([10, 10], [0])
    ledger.set_holding(replace(stray, charged=True))
    assert (ledger.node("n1").used, used(ledger, EVERY_CARD)) == ([10, 10], [20])


def test_a_new_mark_is_no_change_of_the_node(ledger):
    ledger.set_holding(holding("u", 100, 0))
    changed = ledger.watch()
    changed.clear()
    planned = replace(holding("u", 100, 0), phase_name="planned")
    ledger.set_holding(planned)
    assert (changed, ledger.holdings("n1"), ledger.holdings("n2")) == (set(), [planned], [])
    ledger.set_holding(holding("u", 101, 0))
    assert changed == {"n1"}


def taken(ledger, node="n1"):
    return ledger.node(node).device_holds


def test_a_device_is_taken_while_a_pod_holds_it():
    ledger = Ledger()
    ledger.set_other_devices("n1", others.devices(2))
    with ledger.what_if(added=[others.holding("u", 1)]):
        assert taken(ledger) == {"rdma-n1-1": 1}
    assert taken(ledger) == {}
    ledger.set_holding(others.holding("u", 1))
    ledger.set_holding(others.holding("u", 0))
    assert taken(ledger) == {"rdma-n1-0": 1}, "what the pod held before is free"
    with ledger.what_if(released=["u"]):
        assert taken(ledger) == {}
    assert taken(ledger) == {"rdma-n1-0": 1}


def test_a_hold_on_a_device_that_is_not_known_counts_when_it_appears():
    ledger = Ledger()
    ledger.set_holding(others.holding("u", 0))
    ledger.set_other_devices("n1", others.devices(2))
    assert placement.place(
        ledger, ["n1"], others.parse_request(others.wanting(rdma=1)), "binpack"
    ).assignment.devices == {"0": (AssignedDevice("rdma", "rdma-n1-1"),)}
    ledger.set_other_devices("n1", [])
    ledger.set_other_devices("n1", others.devices(1))
    assert taken(ledger) == {"rdma-n1-0": 1}
    ledger.release("u")
    assert taken(ledger) == {}


def test_cards_and_devices_come_and_go_without_each_other(ledger):
    held_pod = others.holding("u", 0, containers=holding("u", 100, 0).assignment.containers)
    ledger.set_holding(held_pod)
    ledger.set_other_devices("n1", others.devices(1))
    ledger.set_cards("n1", [])
    assert (taken(ledger), used(ledger, OF_A)) == ({"rdma-n1-0": 1}, [100])
    ledger.set_other_devices("n1", [])
    ledger.set_cards("n1", [card("a")])
    assert (taken(ledger), ledger.node("n1").free) == ({"rdma-n1-0": 1}, [P100 - 100])


def test_a_node_is_forgotten_with_the_last_that_is_on_it():
    ledger = Ledger()
    ledger.set_other_devices("n1", others.devices(1))
    ledger.set_cards("n1", cards(P100))
    ledger.set_holding(others.holding("u", 0))
    ledger.set_cards("n1", [])
    ledger.set_other_devices("n1", [])
    assert ledger.node("n1") is not None
    ledger.release("u")
    assert ledger.node("n1") is None
    ledger.set_other_devices("n1", others.devices(1))
    ledger.set_cards("n1", [])
    assert ledger.node("n1") is not None


def test_a_device_with_two_holders_is_a_violation():
    ledger = Ledger()
    ledger.set_holding(others.holding("u", 0, 1))
    assert ledger.violations() == []
    ledger.set_holding(others.holding("v", 1, 2))
    assert ledger.violations() == ["n1: rdma-n1-1 is overcommitted: more than its 1 is assigned"]
    ledger.release("u")
    assert ledger.violations() == []


def test_a_copy_has_counts_of_its_own():
    ledger = Ledger()
    ledger.set_other_devices("n1", others.devices(1))
    duplicate = ledger.node("n1").copy()
    duplicate.apply_device_hold("rdma-n1-0", 1)
    assert (duplicate.devices, duplicate.device_holds, taken(ledger)) == (others.devices(1), {"rdma-n1-0": 1}, {})


def test_devices_are_nothing_that_quotas_of_cards_count():
    ledger = Ledger()
    ledger.set_holding(others.holding("u", 0))
    assert ledger.used_amounts("default", EVERY_CARD) == NO_CHARGE
    assert list(ledger.namespaces()) == []


def test_a_ledger_like_another_has_its_settings_and_none_of_its_pods():
    ledger = Ledger(kept_back=100, max_clients=7, core=150)
    ledger.set_cards("n1", cards(P100))
    ledger.set_holding(holding("u", 100, 0))
    equal_cards = ledger.empty_copy()
    assert (len(equal_cards), list(equal_cards.nodes())) == (0, [])
    equal_cards.set_cards("n1", cards(P100))
    node = equal_cards.node("n1")
    assert (node.free, node.max_card_clients, node.free_core) == ([P100 - 100], [7], [150])


def test_what_a_pod_holds_is_found_by_its_uid(ledger):
    ledger.set_holding(holding("u", 100, 0))
    assert ledger.holding("u") == holding("u", 100, 0)
    assert ledger.holding("v") is None


def test_a_pod_with_a_share_in_each_of_many_containers_is_counted_once_for_each_card(monkeypatch):
    """500 such pods of a gang are counted under the lock of the extender."""
    ledger = Ledger()
    ledger.set_cards("n1", [card("a"), card("b", index=1)])
    counted = []
    apply_card_use = NodeState.apply_card_use
    monkeypatch.setattr(NodeState, "apply_card_use", lambda *use: counted.append(use) or apply_card_use(*use))
    containers = {f"c{i}": (CardShare(i % 2, f"GPU-n1-{i % 2}", 10, 1, P100),) for i in range(48)}
    ledger.set_holding(Holding("u", "default", "u", "n1", Assignment(containers)))
    assert len(counted) == 2
    node = ledger.node("n1")
    assert (node.clients, node.used, node.free_core) == ([24, 24], [240, 240], [76, 76])
    assert ledger.used_amounts("default", EVERY_CARD) == Charge(48, 480, 0)
    ledger.release("u")
    assert len(counted) == 4
    assert ledger.used_amounts("default", EVERY_CARD) == NO_CHARGE


@pytest.mark.parametrize("hard", [{"shares": 1}, {"shares": 2}, {"memory": 149}, {"memory": 150}, {"cards": 0}, {}])
@pytest.mark.parametrize("resource_class", ["a", "b", ""])
def test_a_counted_holding_exceeds_a_quota_if_it_would_exceed_what_is_left_without_it(ledger, hard, resource_class):
    entry = QuotaEntry(resource_class=resource_class, **hard)
    ledger.set_holding(holding("u", 100, 0))
    ledger.set_holding(holding("other", 50, 0))
    planned = ledger.holding("u")
    counted = placement.entries_exceeded_by_holdings(
        ledger, [planned], [quotas.headroom(entry, ledger.used_amounts("default", entry))]
    )
    ledger.release("u")
    headroom = [quotas.headroom(entry, ledger.used_amounts("default", entry))]
    assert counted == placement.entries_exceeded_together(ledger, [(planned.node, planned.assignment)], headroom)
