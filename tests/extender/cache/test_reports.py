"""Reports of nodes about deleted pods: accepted for pods that were bound to the node, and for its own cards."""

import msgspec
import pytest

from cardwise.core.api import quotas
from cardwise.core.placement.ledger import Ledger
from cardwise.kube.objects import extendedresources
from extender.cache import inventory, reservations
from extender.cache.reservations import Reservations
from extender.reporting import statuses
from tests.build import P100, extended_resource, reported_share
from tests.extender.states import as_card, as_pod, as_quota, bound, free, make_state, mark, refuse, with_cards

OURS = as_card(extended_resource(1))[0]
STATIC = "0" * 32  # as the kubelet names a pod of its own manifests


@pytest.fixture
def world(clock):
    """`a`, which had 4069 MiB of n1, was deleted by force."""
    state = with_cards(make_state(clock), n1=2, n2=1)
    state.set_pod(as_pod(bound("a", 4069, 1)))
    state.remove_pod(as_pod(bound("a", 4069, 1)))
    return state


def says(world, node, *reports, index=0):
    world.set_card(*as_card(extended_resource(index, node=node, reported=list(reports))))


def used(world):
    with world.view() as ledger:
        return ledger.used_amounts("default", quotas.QuotaEntry()).memory


def terminating_shares(world, node="n1", index=1):
    """The shares of deleted pods that the leader writes into the card's status."""
    with world.view() as ledger:
        card = statuses.compute_node_totals(ledger, node).cards[as_card(extended_resource(index, node=node))[0]]
    return statuses.card_status(card)["terminating"] or []


def test_a_report_of_an_unknown_pod_counts_in_no_quota(world):
    says(world, "n2", reported_share("stranger", 5000), reported_share("uid-a", 100))
    assert used(world) == 4069
    assert free(world, "n2") == [P100 - 5100], "it may be right about its own card"


def test_a_report_of_a_pod_that_waits_fills_no_quota_and_bars_it_from_nothing(world):
    world.set_quota(*as_quota({"memoryMiB": 4069 + 1000}))
    says(world, "n2", reported_share("uid-b", 1000))
    world.set_pod(as_pod(bound("b", 1000, 0)))
    assert used(world) == 5069
    assert free(world) == [P100 - 1000, P100 - 4069]
    assert free(world, "n2") == [P100 - 1000]


def test_no_report_is_above_the_size_of_the_card(world):
    says(world, "n2", reported_share("one", 10**12), reported_share("two", 1))
    assert free(world, "n2") == [0]
    with world.view() as ledger:
        assert ledger.violations() == []


def test_another_nodes_report_keeps_no_share_alive(world, clock):
    says(world, "n2", reported_share("uid-a", 4069))
    clock.advance(21)
    world.expire_reservations()
    assert mark(world, "uid-a") is None
    assert (free(world), used(world)) == ([P100, P100], 0)
    assert free(world, "n2") == [P100 - 4069]


def test_another_nodes_silence_ends_no_share(world, clock):
    says(world, "n1", reported_share("uid-a", 4069), index=1)
    says(world, "n2", reported_share("uid-a", 4069))
    assert free(world, "n2") == [P100 - 4069]
    says(world, "n2")
    assert free(world, "n2") == [P100]
    clock.advance(1000)
    world.expire_reservations()
    assert mark(world, "uid-a") == "reported"
    says(world, "n1", index=1)
    assert mark(world, "uid-a") is None


def test_the_silence_of_a_node_that_was_never_asked_ends_no_ghost(world):
    says(world, "n2", reported_share("uid-a", 4069))
    says(world, "n2")
    assert mark(world, "uid-a") == "terminating"


def test_a_node_that_was_away_for_longer_is_believed_about_its_own_pods(world, clock):
    clock.advance(21)
    world.expire_reservations()
    assert used(world) == 0
    says(world, "n2", reported_share("uid-a", 4069))
    assert used(world) == 0
    says(world, "n1", reported_share("uid-a", 1), index=1)
    assert (mark(world, "uid-a"), used(world)) == ("reported", 4069)
    clock.advance(1000)
    world.expire_reservations()
    assert used(world) == 4069
    says(world, "n1", index=1)
    assert (mark(world, "uid-a"), used(world)) == (None, 0)
    says(world, "n1", reported_share("uid-a", 4069), index=1)
    assert used(world) == 0, "it has let go of it once"


def test_a_removed_card_removes_the_shares_that_only_its_node_reports(world):
    says(world, "n2", reported_share("stranger", 5000))
    world.remove_card(as_card(extended_resource(0, node="n2"))[0])
    says(world, "n2")
    assert free(world, "n2") == [P100]


def test_what_vanished_is_noted_for_the_next_extender(world, clock):
    share = reported_share("uid-a", 4069) | {"name": "a", "container": "0"}
    assert terminating_shares(world) == [share]
    again = with_cards(make_state(clock), n2=1)
    again.set_node("n1")
    again.set_card(*as_card(extended_resource(1, terminating=terminating_shares(world))))
    assert (mark(again, "uid-a"), used(again)) == ("terminating", 4069), "its node has the grace time to report it"
    again.set_card(*as_card(extended_resource(1, reported=[share], terminating=terminating_shares(world))))
    clock.advance(1000)
    again.expire_reservations()
    assert (mark(again, "uid-a"), used(again), terminating_shares(again)) == ("reported", 4069, [share])
    again.set_card(*as_card(extended_resource(1, terminating=terminating_shares(world))))
    assert (mark(again, "uid-a"), used(again), terminating_shares(again)) == (None, 0, [])


def test_of_several_cards_all_that_was_noted_counts(clock):
    state = make_state(clock)
    state.set_node("n1")
    for index in (0, 1):
        share = reported_share("gone", P100) | {"container": "0", "whole": True}
        state.set_card(*as_card(extended_resource(index, reported=[share], terminating=[share])))
    with state.view() as ledger:
        assert ledger.used_amounts("default", quotas.QuotaEntry()) == quotas.Charge(shares=2, memory=2 * P100, cards=2)
    assert free(state) == [0, 0]


def test_a_note_says_nothing_of_a_pod_that_is_there(clock):
    state = make_state(clock)
    state.set_node("n1")
    state.set_card(*as_card(extended_resource(1, terminating=[reported_share("uid-a", 4069)])))
    state.set_pod(as_pod(bound("a", 4069, 1)))
    assert (mark(state, "uid-a"), used(state)) == ("", 4069)


def test_nor_of_a_pod_that_was_seen_before_its_card(clock):
    """Lists arrive in any order: a running pod would be taken for a deleted one, and its card be reserved for another
    pod.
    """
    state = make_state(clock)
    state.set_node("n1")
    state.set_pod(as_pod(bound("a", 4069, 1)))
    state.set_card(*as_card(extended_resource(1, terminating=[reported_share("uid-a", 4069)])))
    clock.advance(1000)
    state.expire_reservations()
    assert (mark(state, "uid-a"), used(state), free(state)) == ("", 4069, [P100 - 4069])


def test_what_only_its_node_says_is_not_noted(world):
    says(world, "n2", reported_share("stranger", 5000))
    assert terminating_shares(world, "n2", 0) == []


def test_no_node_spells_what_another_one_holds(world):
    says(world, "n2", reported_share("stranger", 16000))
    before = free(world, "n2")
    name, card = as_card(
        extended_resource(
            1,
            reported=[
                reported_share("uid-a", 4069),
                reported_share("n2/stranger", 0),
                reported_share("", 1),
                reported_share("a\n", 1),
            ],
        )
    )
    assert [share.uid for share in card.reported_shares] == ["uid-a"]
    assert "podUID" in card.problem
    world.set_card(name, card)
    assert free(world, "n2") == before
    # Nor where it is believed what it writes.
    world.set_card(
        name,
        card._replace(
            reported_shares=tuple(msgspec.structs.replace(share, uid="n2/stranger") for share in card.reported_shares)
        ),
    )
    assert free(world, "n2") == before
    world.set_card(name, card._replace(reported_shares=()))
    assert free(world, "n2") == before


@pytest.mark.parametrize("uid", ["6f1bd1f5-6f59-4cf8-b5d5-6a3ed8f0f2a4", STATIC])
def test_the_uids_of_pods_are_believed(world, uid):
    says(world, "n2", reported_share(uid, 5000))
    assert free(world, "n2") == [P100 - 5000]
    assert as_card(extended_resource(0, reported=[reported_share(uid, 5000)]))[1].problem is None


def test_an_entry_that_cannot_be_read_is_passed_over_alone(world):
    odd = reported_share("odd", 0) | {"memoryMiB": "a lot"}
    name, card = as_card(
        extended_resource(
            0, node="n2", reported=[odd, "odd", None, reported_share("stranger", 5000)], terminating=[odd]
        )
    )
    assert ([share.uid for share in card.reported_shares], card.status.terminating) == (["stranger"], ())
    assert card.problem
    world.set_card(name, card)
    assert free(world, "n2") == [P100 - 5000]


def test_of_one_card_so_many_entries_are_believed(world):
    shares = [reported_share(f"uid-{i}", 1) for i in range(extendedresources.MAX_REPORTED_PER_CARD + 1)]
    says(world, "n2", *shares)
    assert free(world, "n2") == [P100 - extendedresources.MAX_REPORTED_PER_CARD]
    assert as_card(extended_resource(0, reported=shares))[1].problem
    says(world, "n2")
    assert free(world, "n2") == [P100]


def test_of_one_node_so_many_shares_are_believed(world, monkeypatch):
    monkeypatch.setattr(inventory, "MAX_REPORTED_SHARES", 3)
    says(world, "n1", reported_share("one", 1), reported_share("two", 1), index=0)
    name, card = as_card(extended_resource(1, reported=[reported_share("three", 1), reported_share("four", 1)]))
    assert "3 shares" in world.set_card(name, card)
    assert free(world) == [P100 - 2, P100 - 4069 - 1]
    says(world, "n1", index=0)
    assert world.set_card(name, card) is None
    assert free(world) == [P100, P100 - 4069 - 2]
    says(world, "n1", index=1)
    assert free(world) == [P100, P100 - 4069]


def test_of_one_node_so_many_cards_are_believed(world, monkeypatch):
    monkeypatch.setattr(inventory, "MAX_CARDS_PER_NODE", 2)
    third = as_card(extended_resource(2, reported=[reported_share("one", 1)]))
    assert "2 GPUs" in world.set_card(*third)
    assert len(free(world)) == 2
    world.remove_card(third[0])
    world.remove_card(as_card(extended_resource(0))[0])
    assert world.set_card(*third) is None
    assert free(world) == [P100 - 4069, P100 - 1]


def test_a_card_that_moves_takes_its_words_along(world):
    name, card = as_card(extended_resource(0, node="n2", reported=[reported_share("stranger", 5000)]))
    world.set_card(name, card)
    world.set_card(name, card._replace(node="n1"))
    assert free(world, "n2") == []
    world.set_card(name, card._replace(node="n1", reported_shares=()))
    assert sorted(free(world)) == [P100 - 4069, P100, P100]


def test_a_card_that_moves_does_not_prove_that_containers_have_ended(world, clock):
    """Its machine may have come back under another name, with the containers on it."""
    name, card = as_card(extended_resource(1))
    says(world, "n1", reported_share("uid-a", 4069), index=1)
    world.set_card(name, card._replace(node="n2"))
    assert mark(world, "uid-a") == "terminating"
    assert sorted(free(world, "n2")) == [P100 - 4069, P100], "and it counts where the card is now"
    clock.advance(21)
    world.expire_reservations()
    assert free(world, "n2") == [P100, P100]


def test_what_a_node_reports_under_its_new_name_counts_once(world, clock):
    name, card = as_card(extended_resource(1, reported=[reported_share("uid-a", 4069)]))
    world.set_card(name, card._replace(node="n2"))
    assert sorted(free(world, "n2")) == [P100 - 4069, P100]
    clock.advance(21)
    world.expire_reservations()
    assert sorted(free(world, "n2")) == [P100 - 4069, P100], "its time is over, and the new name still reports it"
    world.set_card(name, card._replace(node="n2", reported_shares=()))
    assert free(world, "n2") == [P100, P100]


@pytest.fixture
def work(monkeypatch):
    """What is asked of reservations and the ledger while the lock is held."""
    calls = []
    for owner, name in (
        (Reservations, "unknown_holding"),
        (Reservations, "holding"),
        (Ledger, "set_holding"),
        (Ledger, "release"),
    ):
        done = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, done=done, name=name: calls.append(name) or done(*args))
    return calls


def test_a_report_costs_what_is_new_of_it(world, work):
    """Every status write of a node is handled under the extender's lock."""
    shares = [reported_share(f"uid-{i}", 1) for i in range(100)]
    says(world, "n2", *shares)
    assert len(work) <= 4 * len(shares), "each once"
    work.clear()
    says(world, "n2", *reversed(shares))
    assert work == [], "nothing is new"
    says(world, "n2", *shares[:-1], reported_share("uid-new", 1))
    assert len(work) <= 8
    assert free(world, "n2") == [P100 - 100]


def test_the_words_of_other_cards_cost_a_report_nothing(clock, monkeypatch):
    state = with_cards(make_state(clock), n1=20)
    for i in range(20):
        says(state, "n1", *(reported_share(f"uid-{i}-{j}", 1) for j in range(50)), index=i)
    looked = []
    share = inventory.CardShare
    monkeypatch.setattr(inventory, "CardShare", lambda *args: looked.append(args) or share(*args))
    says(state, "n1", *(reported_share(f"other-{j}", 1) for j in range(50)), index=0)
    assert len(looked) == 50


def test_what_is_still_reported_is_not_forgotten_for_being_old(world, clock, monkeypatch):
    monkeypatch.setattr(reservations, "_MAX_ORPHANED", 2)
    clock.advance(21)
    world.expire_reservations()
    says(world, "n1", reported_share("uid-a", 4069), index=1)
    for name in "bcd":
        world.set_pod(as_pod(bound(name, 10, 0)))
        world.remove_pod(as_pod(bound(name, 10, 0)))
        clock.advance(21)
        world.expire_reservations()
    assert (mark(world, "uid-a"), used(world)) == ("reported", 4069)
    says(world, "n1", reported_share("uid-a", 4069) | {"container": "0"}, index=1)
    assert (mark(world, "uid-a"), used(world)) == ("reported", 4069), "its quota has it still"
    assert free(world) == [P100, P100 - 4069], "it is counted once"
    says(world, "n1", reported_share("uid-b", 10), reported_share("uid-d", 10), index=0)
    assert (mark(world, "uid-b"), mark(world, "uid-d")) == (None, "reported"), "the oldest that is silent was"
    says(world, "n1", index=1)
    assert (mark(world, "uid-a"), used(world)) == (None, 10)


def wakes(world, clock):
    """Whether a waiting pod is requeued now."""
    clock.advance(30)
    return world.next_requeue_node() is not None


@pytest.mark.parametrize("stranger", [False, True], ids=["a pod that was here", "a pod that nobody knows"])
def test_pods_are_requeued_when_a_node_no_longer_reports_a_deleted_pod(world, clock, stranger):
    """kube-scheduler does not see the cause itself."""
    uid = "stranger" if stranger else "uid-a"
    says(world, "n1", reported_share(uid, 4069), index=1)
    refuse(world)
    wakes(world, clock)
    refuse(world)
    clock.advance(30)  # kube-scheduler has heard by now of whatever it watches itself
    assert not wakes(world, clock)
    says(world, "n1", index=1)
    assert wakes(world, clock)


def test_nodes_are_named_for_the_statuses_when_what_is_held_there_changes_and_only_then(world):
    world.take_changed_nodes()
    world.set_pod(as_pod(bound("b", 1000, 0)))
    assert world.take_changed_nodes() == {"n1"}
    world.set_pod(as_pod(bound("b", 1000, 0)))
    assert world.take_changed_nodes() == set()
    world.set_pod(as_pod(bound("b", 2000, 0)))
    assert world.take_changed_nodes() == {"n1"}
