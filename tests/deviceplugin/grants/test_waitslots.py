"""Which starts wait when more have to than there are slots."""

from collections import Counter
from contextlib import ExitStack

import pytest

from deviceplugin.grants import waitslots
from deviceplugin.grants.waitslots import WAIT_SLOTS, WaitSlots
from tests.fakes.clock import FakeClock
from tests.theory import theory_of


class Starts:
    """Starts that wait until the end of the test, in the order in which they came."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.slots = WaitSlots(self.clock)
        self.waits: list[tuple[str, ExitStack, object]] = []

    def begin(self, namespace: str, card: str = "gpu-0") -> bool:
        """Returns whether the start got a place."""
        stack = ExitStack()
        has_slot = stack.enter_context(self.slots.reserve(namespace, (card,)))
        self.waits.append((f"{namespace} {card}", stack, has_slot))
        return has_slot()

    def waiting(self) -> Counter[str]:
        return Counter(owner for owner, _, has_slot in self.waits if has_slot())

    def end_lost(self) -> None:
        """Starts that have lost their place, or got none, notice it."""
        for wait in [wait for wait in self.waits if not wait[2]()]:
            wait[1].close()
            self.waits.remove(wait)


@pytest.fixture
def starts() -> Starts:
    return Starts()


def test_a_namespace_alone_has_all_slots_and_no_more(starts):
    assert [starts.begin("a") for _ in range(WAIT_SLOTS + 1)] == [True] * WAIT_SLOTS + [False]


def test_the_longest_wait_of_the_largest_namespace_loses_its_slot(starts):
    theory = theory_of("deviceplugin.grants.waitslots")
    assert f"namespace A has all {WAIT_SLOTS} wait slots" in theory
    assert f"The next start of A on its card does not wait: A has {WAIT_SLOTS - 1} slots" in theory
    for _ in range(WAIT_SLOTS):
        starts.begin("A")
    assert starts.begin("B", "gpu-1")
    assert [has_slot() for _, _, has_slot in starts.waits] == [False] + [True] * WAIT_SLOTS
    assert not starts.begin("A")


def test_namespaces_get_equally_many_slots(starts):
    assert "Starts of B, C and D may go on to take slots until each of the four has 4" in theory_of(
        "deviceplugin.grants.waitslots"
    )
    for namespace in "ABCD":
        for _ in range(WAIT_SLOTS):
            starts.begin(namespace)
            starts.end_lost()
    assert starts.waiting() == dict.fromkeys([f"{namespace} gpu-0" for namespace in "ABCD"], 4)


def test_the_cards_of_a_namespace_get_equally_many_slots(starts):
    for card in ("gpu-0", "gpu-1"):
        for _ in range(WAIT_SLOTS):
            starts.begin("a", card)
            starts.end_lost()
    assert starts.waiting() == {"a gpu-0": WAIT_SLOTS // 2, "a gpu-1": WAIT_SLOTS // 2}


def test_a_namespace_that_has_waited_little_gets_a_slot_among_as_many_as_there_are_slots(starts):
    for number in range(WAIT_SLOTS):
        starts.begin(f"n{number}")
    starts.clock.advance(10.0)
    for _, stack, _ in starts.waits:
        stack.close()
    for number in range(WAIT_SLOTS):
        assert starts.begin(f"n{number}")
    assert starts.begin("new")


def test_starts_that_have_not_noticed_their_loss_yet_count(starts):
    owners = [f"n{number}" for number in range(2 * WAIT_SLOTS) for _ in range(WAIT_SLOTS)]
    for owner in owners:
        starts.begin(owner)
    assert starts.slots._threads == waitslots._MAX_THREADS
    starts.end_lost()
    assert starts.slots._threads == sum(starts.waiting().values()) == WAIT_SLOTS
    for _, stack, _ in starts.waits:
        stack.close()
    assert not starts.slots._slots
    assert not starts.slots._threads
