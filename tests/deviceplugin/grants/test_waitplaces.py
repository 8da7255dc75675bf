"""Which starts wait when more have to than there are places."""

from collections import Counter
from contextlib import ExitStack

import pytest

from deviceplugin.grants import waitplaces
from deviceplugin.grants.waitplaces import PLACES, WaitPlaces
from tests.fakes.clock import FakeClock
from tests.theory import theory_of


class Starts:
    """Starts that wait until the end of the test, in the order in which they came."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.places = WaitPlaces(self.clock)
        self.waits: list[tuple[str, ExitStack, object]] = []

    def begin(self, namespace: str, card: str = "gpu-0") -> bool:
        """Returns whether the start got a place."""
        stack = ExitStack()
        has_place = stack.enter_context(self.places.reserve(namespace, (card,)))
        self.waits.append((f"{namespace} {card}", stack, has_place))
        return has_place()

    def waiting(self) -> Counter[str]:
        return Counter(owner for owner, _, has_place in self.waits if has_place())

    def end_lost(self) -> None:
        """Starts that have lost their place, or got none, notice it."""
        for wait in [wait for wait in self.waits if not wait[2]()]:
            wait[1].close()
            self.waits.remove(wait)


@pytest.fixture
def starts() -> Starts:
    return Starts()


def test_a_namespace_alone_has_all_places_and_no_more(starts):
    assert [starts.begin("a") for _ in range(PLACES + 1)] == [True] * PLACES + [False]


def test_the_longest_wait_of_the_largest_namespace_loses_its_place(starts):
    theory = theory_of("deviceplugin.grants.waitplaces")
    assert f"namespace A has all {PLACES} places" in theory
    assert f"The next start of A on its card does not wait: A has {PLACES - 1} places" in theory
    for _ in range(PLACES):
        starts.begin("A")
    assert starts.begin("B", "gpu-1")
    assert [has_place() for _, _, has_place in starts.waits] == [False] + [True] * PLACES
    assert not starts.begin("A")


def test_namespaces_get_equally_many_places(starts):
    assert "Starts of B, C and D may go on to take places until each of the four has 4" in theory_of(
        "deviceplugin.grants.waitplaces"
    )
    for namespace in "ABCD":
        for _ in range(PLACES):
            starts.begin(namespace)
            starts.end_lost()
    assert starts.waiting() == dict.fromkeys([f"{namespace} gpu-0" for namespace in "ABCD"], 4)


def test_the_cards_of_a_namespace_get_equally_many_places(starts):
    for card in ("gpu-0", "gpu-1"):
        for _ in range(PLACES):
            starts.begin("a", card)
            starts.end_lost()
    assert starts.waiting() == {"a gpu-0": PLACES // 2, "a gpu-1": PLACES // 2}


def test_a_namespace_that_has_waited_little_gets_a_place_among_as_many_as_there_are_places(starts):
    for number in range(PLACES):
        starts.begin(f"n{number}")
    starts.clock.advance(10.0)
    for _, stack, _ in starts.waits:
        stack.close()
    for number in range(PLACES):
        assert starts.begin(f"n{number}")
    assert starts.begin("new")


def test_starts_that_have_not_noticed_their_loss_yet_count(starts):
    owners = [f"n{number}" for number in range(2 * PLACES) for _ in range(PLACES)]
    for owner in owners:
        starts.begin(owner)
    assert starts.places._threads == waitplaces._MAX_THREADS
    starts.end_lost()
    assert starts.places._threads == sum(starts.waiting().values()) == PLACES
    for _, stack, _ in starts.waits:
        stack.close()
    assert not starts.places._places
    assert not starts.places._threads
