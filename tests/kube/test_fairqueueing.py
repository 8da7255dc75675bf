"""The order of fair queueing."""

import pytest

from cardwise.kube.fairqueueing import FairQueueing, RecentUse, round_robin
from tests.fakes.clock import FakeClock
from tests.theory import theory_of

COSTS = {"fat": 2.0, "quick": 0.02, "medium": 0.5}


def test_owners_that_all_wait_get_the_same_time():
    queue, spent = FairQueueing(), dict.fromkeys(COSTS, 0.0)
    for owner in COSTS:
        queue.enqueue(owner)
    for _ in range(1000):
        owner = queue.dequeue()
        queue.enqueue(owner)  # it has more
        queue.charge_write(owner, COSTS[owner])
        spent[owner] += COSTS[owner]
        assert max(spent.values()) - min(spent.values()) <= 2.0 + 0.02


@pytest.mark.parametrize("fat", [1, 5])
def test_idle_owner_is_next_without_credit(fat):
    queue, busy = FairQueueing(), [f"fat{i}" for i in range(fat)]
    for owner in busy:
        queue.enqueue(owner)
    for _ in range(20):
        owner = queue.dequeue()
        queue.enqueue(owner)
        queue.charge_write(owner, 2.0)
    queue.enqueue("idle")
    order = []
    for _ in range(5 * fat):
        order.append(queue.dequeue())
        queue.enqueue(order[-1])
        queue.charge_write(order[-1], 2.0)
    assert order[0] == "idle"
    assert order.count("idle") <= 5


def test_ineligible_owner_is_not_charged():
    queue, order = FairQueueing(), []
    for round_number in range(8):
        for owner in ("first", "second", "high"):
            queue.enqueue(owner)
        owner = (
            queue.dequeue(lambda owner: owner == "high")
            if round_number % 2
            else queue.dequeue(lambda owner: owner != "high")
        )
        queue.charge_write(owner, 0.015)
        order.append(owner)
    assert sorted(order[::2][:2]) == sorted(order[::2][2:]) == ["first", "second"]


def test_owners_in_turn():
    assert round_robin(["a1", "a2", "a3", "b1", "c1", "c2"], lambda name: name[0]) == [
        "a1",
        "b1",
        "c1",
        "a2",
        "c2",
        "a3",
    ]


def test_the_example_of_the_docstring():
    theory, queue, seconds = theory_of("cardwise.kube.fairqueueing"), FairQueueing(), {"A": 2.0, "B": 0.02}
    assert f"writes of A take {seconds['A']:g} s each, those of B {seconds['B']:g} s" in theory
    for owner in seconds:
        queue.enqueue(owner)
    order = list[str]()
    while order.count("A") < 2:
        order.append(queue.dequeue())
        queue.enqueue(order[-1])
        queue.charge_write(order[-1], seconds[order[-1]])
    assert f"A is served once, then B {order.count('B')} times, then A again: each gets half of the time" in theory
    assert order == ["A", *["B"] * 100, "A"]


def test_the_example_of_lost_slots():
    theory, use, owners = theory_of("cardwise.kube.fairqueueing"), RecentUse[str](FakeClock()), 250
    assert f"{owners} owners have one slot each" in theory
    names = [f"owner {number}" for number in range(owners)]
    for name in names * 2:  # each owner was served and queued again
        use.add_use(name, 0.02)
    use.add_use("newcomer", 0.02)
    assert f"queues only occasionally has used less time, so one of the {owners} loses its slot" in theory
    assert set(use.larger_owners("newcomer", dict.fromkeys(names, range(1)))) == set(names)


def slots(**counts: int) -> dict[str, range]:
    return {owner: range(count) for owner, count in counts.items()}


def test_owner_with_most_slots_then_most_use_loses_a_slot():
    use = RecentUse[str](FakeClock())
    for owner, seconds in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        use.add_use(owner, seconds)
    assert use.owners_by_size(slots(a=1, b=1, c=1, d=2)) == ["d", "b", "c", "a"]
    assert use.larger_owners("new", slots(a=1, b=1, c=1)) == ["b", "c", "a"]
    assert use.larger_owners("a", slots(b=1, c=1)) == ["b", "c"]
    assert use.larger_owners("new", slots(new=1, b=1, d=3)) == ["d"], "with two places it would have more than b"
    assert use.larger_owners("b", slots(b=1, d=2)) == [], "it has used more than d"


@pytest.mark.parametrize("halvings", [1, 63, 65, 900])
def test_used_time_halves_after_half_a_minute(halvings, clock):
    use = RecentUse[str](clock)
    use.add_use("early", 1.0)
    clock.advance(30.0)
    use.add_use("late", 0.51)
    assert use.larger_owners("new", slots(early=1, late=1)) == ["late", "early"]
    clock.advance(30.0 * halvings)
    use.add_use("now", 1.0)
    assert use.owners_by_size(slots(early=1, late=1, now=1)) == ["now", "late", "early"]


def test_old_use_is_forgotten(clock):
    use = RecentUse[str](clock)
    use.add_use("early", 1.0)
    clock.advance(30.0 * 5000)
    use.add_use("now", 1.0)
    assert use.larger_owners("new", slots(early=1, now=1)) == ["now"]


def test_owners_with_the_least_use_are_forgotten_first():
    use = RecentUse[str](FakeClock())
    for number in range(10_002):
        use.add_use(f"o{number}", 1.0 + number)
    assert use.larger_owners("new", slots(o0=1, o5500=1)) == ["o5500"]
    assert len(use._used) <= 10_001


def test_five_thousand_owners_are_remembered():
    use = RecentUse[str](FakeClock())
    owners = [f"o{number}" for number in range(5000)]
    for owner in owners * 3:
        use.add_use(owner, 0.008)
    assert len(use.larger_owners("new", dict.fromkeys(owners, range(1)))) == 5000
