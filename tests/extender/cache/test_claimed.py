"""Which pods by claim are planned, taken back and freed, by what the watches show."""

import pytest

from cardwise.core.api.request import Load
from extender.cache.reservations import Phase
from extender.records.nodeinfo import PlacedPod
from tests.build import P100
from tests.extender.claimpods import REFUSED, claim_record, claiming
from tests.extender.states import as_pod, begin, bound, free, make_state, with_cards
from tests.fakes.clock import FakeClock
from tests.theory import theory_of

UID = "uid-p"


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.state = with_cards(make_state(self.clock), n1=1, n2=1)

    def show(self, manifest) -> None:
        self.state.set_pod(as_pod(manifest))

    def show_claim(self, claim) -> None:
        self.state.set_claim(claim.key, claim)

    def phase(self):
        row = self.state._reservations.get(UID)
        return row.phase if row is not None else None

    def allocate(self) -> None:
        """As this process does."""
        self.show(claiming())
        begin(self.state, "p", 900)
        self.state._reservations.get(UID).by_claim = True
        self.state.record_binding_outcome(UID, Phase.ALLOCATED)
        self.show_claim(claim_record(claiming(gated=False), None))
        self.show_claim(claim_record(claiming(gated=False)))
        self.show(claiming(gated=False))

    def take_backs(self):
        with self.state.claimed_pods() as claimed:
            return [(entry.pod.name, entry.refusal is not None) for entry in claimed.take_backs()]

    def pending(self):
        with self.state.claimed_pods() as claimed:
            return [pod.ref.name for pod in claimed.pods_in_order()]

    def avoided(self):
        with self.state.claimed_pods() as claimed:
            return claimed.avoided_nodes(UID)


@pytest.fixture
def world():
    return World()


def test_an_allocated_pod_keeps_its_cards_however_long_kube_scheduler_takes(world):
    world.allocate()
    assert (world.phase(), free(world.state)) == (Phase.ALLOCATED, [P100 - 900])
    world.clock.advance(1000)
    world.state.expire_reservations()
    assert (world.phase(), world.take_backs(), world.state.overdue_bindings()) == (Phase.ALLOCATED, [], [])
    world.show(bound("p", 900, 0))
    assert world.phase() is Phase.BOUND


def test_a_deallocated_claim_is_taken_back_and_the_pod_planned_without_the_node(world):
    """The example of the theory of operation."""
    theory = theory_of("extender.cache.claimed")
    assert "A is avoided for P until 30, or until a pod leaves A" in theory
    assert "1, 2, 4, ... seconds before, at most 60" in theory
    world.allocate()
    world.show_claim(claim_record(claiming(gated=False), None))
    assert (world.phase(), world.take_backs()) == (Phase.UNCONFIRMED, [("p", True)])
    assert free(world.state) == [P100 - 900], "the pod may be bound until a read shows that it is not"
    assert world.pending() == []
    world.state.end_take_back(UID, None)
    assert (world.phase(), free(world.state), world.avoided()) == (None, [P100], {"n1"})
    assert world.pending() == ["p"], "at once after the first refusal"
    world.clock.advance(29.9)
    assert world.avoided() == {"n1"}
    world.clock.advance(0.2)
    assert world.avoided() == set()


def test_a_node_that_a_pod_has_left_is_not_avoided_any_more(world):
    world.state.set_pod_without_request("default/other", PlacedPod("n1", Load(100, 0, 1)))
    world.allocate()
    world.show_claim(claim_record(claiming(gated=False), None))
    world.state.end_take_back(UID, None)
    assert world.avoided() == {"n1"}
    world.state.remove_pod_without_request("default/other")
    assert world.avoided() == set()


def test_the_back_off_doubles(world):
    world.show(claiming())
    waits = []
    for _ in range(9):
        with world.state.claimed_pods() as claimed:
            claimed.mark_failed(UID)
            due = claimed.next_due()
        waits.append(0.0 if due == float("inf") else due - world.clock.now())
        world.clock.advance(100)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_a_pod_that_kube_scheduler_cannot_place_is_taken_back_after_a_second(world):
    world.allocate()
    world.show(claiming(gated=False) | {"status": {"phase": "Pending", "conditions": REFUSED}})
    assert world.take_backs() == []
    world.clock.advance(1.1)
    assert world.take_backs() == [("p", True)]


def test_the_status_of_an_earlier_attempt_is_no_refusal_at_first(world):
    refused = claiming(gated=False) | {"status": {"phase": "Pending", "conditions": REFUSED}}
    world.show(refused)
    world.show_claim(claim_record(refused))
    assert world.phase() is Phase.ALLOCATED
    world.clock.advance(9)
    world.show(refused)
    assert world.take_backs() == []
    world.clock.advance(2)
    assert world.take_backs() == [("p", True)]


@pytest.mark.parametrize("claim_first", [True, False])
def test_a_claim_of_a_former_leader_reserves_once_the_gate_is_open(world, claim_first):
    steps = [lambda: world.show_claim(claim_record(claiming())), lambda: world.show(claiming())]
    for step in steps if claim_first else steps[::-1]:
        step()
    assert world.phase() is None, "kube-scheduler cannot bind a gated pod"
    world.show(claiming(gated=False))
    assert (world.phase(), free(world.state)) == (Phase.ALLOCATED, [P100 - 900])


def test_a_new_leader_fences_what_is_unfinished_and_keeps_what_is_whole(world):
    world.show(claiming())
    world.show_claim(claim_record(claiming()))
    other = claiming("q", gated=False, number=2)
    world.show(other)
    world.show_claim(claim_record(other, uid="claim-2"))
    empty = claiming("r", gated=False, number=3)
    world.show(empty)
    world.show_claim(claim_record(empty, None, uid="claim-3"))
    with world.state.claimed_pods() as claimed:
        assert {claim.uid for claim in claimed.claims_to_fence()} == {"claim-1", "claim-3"}


def test_a_claim_that_this_process_has_deleted_is_not_adopted_again(world):
    world.allocate()
    world.show_claim(claim_record(claiming(gated=False), None))
    with world.state.claimed_pods() as claimed:
        claimed.mark_claim_deleted(UID, "claim-1")
    world.state.end_take_back(UID, None)
    world.show_claim(claim_record(claiming(gated=False)))  # a late event
    world.show(claiming(gated=False))
    assert world.phase() is None


def test_a_claim_without_a_pod_is_deleted_once_the_node_has_proved_the_end(world):
    world.allocate()
    world.show(bound("p", 900, 0))
    with world.state.claimed_pods() as claimed:
        assert claimed.unused_claims() == []
    world.show(bound("p", 900, 0, phase="Succeeded", containers="terminated"))
    world.clock.advance(0.1)
    with world.state.claimed_pods() as claimed:
        claimed.unused_claims()
        world.clock.advance(5.1)
        assert [claim.uid for claim in claimed.unused_claims()] == ["claim-1"]


def test_a_pod_with_a_gate_of_another_project_is_not_planned(world):
    manifest = claiming()
    manifest["spec"]["schedulingGates"].append({"name": "example.com/wait"})
    world.show(manifest)
    assert world.pending() == []
    world.show(claiming())
    assert world.pending() == ["p"]


def test_the_order_is_that_of_the_queue(world):
    for name, number, priority in (("a", 3, 0), ("b", 1, 0), ("c", 2, 10)):
        manifest = claiming(name, number=number)
        manifest["spec"]["priority"] = priority
        world.show(manifest)
    assert world.pending() == ["c", "b", "a"]
