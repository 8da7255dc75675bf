"""The counts of one node."""

from dataclasses import replace

import pytest

from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import CardMps, mps_client
from cardwise.core.placement.ledger import Ledger
from tests.build import IN_USE, OUT_OF_USE, P100, cards, holding
from tests.core import others

WITHOUT_MPS, AS_USER_7 = mps_client(Isolation.NONE, 7), mps_client(Isolation.MPS, 7)


@pytest.mark.parametrize("use", [IN_USE, *OUT_OF_USE])
@pytest.mark.parametrize(("held", "free"), [(0, P100), (276, 16000), (P100 - 1, 1), (P100, 0), (P100 + 1, 0)])
def test_a_card_has_memory_for_others_while_it_takes_new_shares(use, held, free):
    ledger = Ledger()
    ledger.set_cards("n1", [replace(*cards(P100), **use)])
    if held:
        ledger.set_holding(holding("u", held, 0))
    assert ledger.node("n1").free_mib(0) == (free if use is IN_USE else 0)


def test_a_card_with_as_many_clients_as_it_takes_has_no_memory_for_others():
    ledger = Ledger(max_clients=1)
    ledger.set_cards("n1", cards(P100, P100))
    ledger.set_holding(holding("u", 100, 1))
    assert [ledger.node("n1").free_mib(i) for i in (0, 1)] == [P100, 0]


def counts(node):
    of_cards = node.free, node.used, node.free_core, node.clients, node.mps.taints, node.mps.users
    return [list(column) for column in of_cards], dict(node.device_holds), list(node.codes_fullest_first())


@pytest.mark.parametrize("client", [WITHOUT_MPS, AS_USER_7])
def test_a_copy_counts_a_pod_that_comes_and_goes_as_the_ledger_does(client):
    ledger = Ledger()
    card_mps = CardMps(ready=True, multi_user=False)
    ledger.set_cards("n1", [Card(index=i, uuid=f"GPU-n1-{i}", mem=P100, mps=card_mps) for i in range(2)])
    ledger.set_other_devices("n1", others.devices(2))
    node = ledger.node("n1")
    before, copy = counts(node), node.copy()
    pod = replace(others.holding("u", 1, containers=holding("u", 100, 0).assignment.containers), mps_client=client)
    copy.apply_assignment(pod.assignment, client, 1)
    assert counts(node) == before
    ledger.set_holding(pod)
    assert counts(copy) == counts(node) != before
    copy.apply_assignment(pod.assignment, client, -1)
    assert counts(copy) == before
