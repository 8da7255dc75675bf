"""Whose write is next."""

import pytest

from cardwise.kube.fairqueueing import FairQueueing, round_robin

COSTS = {"fat": 2.0, "quick": 0.02, "medium": 0.5}


def test_owners_that_all_wait_get_the_same_time():
    queue, spent = FairQueueing(), dict.fromkeys(COSTS, 0.0)
    for owner in COSTS:
        queue.wait(owner)
    for _ in range(1000):
        owner = queue.next()
        queue.wait(owner)  # it has more
        queue.took(owner, COSTS[owner])
        spent[owner] += COSTS[owner]
        assert max(spent.values()) - min(spent.values()) <= 2.0 + 0.02


@pytest.mark.parametrize("fat", [1, 5])
def test_an_owner_that_was_idle_is_next_and_has_saved_up_nothing(fat):
    queue, busy = FairQueueing(), [f"fat{i}" for i in range(fat)]
    for owner in busy:
        queue.wait(owner)
    for _ in range(20):
        owner = queue.next()
        queue.wait(owner)
        queue.took(owner, 2.0)
    queue.wait("idle")
    order = []
    for _ in range(5 * fat):
        order.append(queue.next())
        queue.wait(order[-1])
        queue.took(order[-1], 2.0)
    assert order[0] == "idle"
    assert order.count("idle") <= 5


def test_an_owner_that_is_passed_over_is_not_charged():
    queue, order = FairQueueing(), []
    for round_number in range(8):
        for owner in ("first", "second", "high"):
            queue.wait(owner)
        owner = (
            queue.next(lambda owner: owner == "high") if round_number % 2 else queue.next(lambda owner: owner != "high")
        )
        queue.took(owner, 0.015)
        order.append(owner)
    assert sorted(order[::2][:2]) == sorted(order[::2][2:]) == ["first", "second"]


def test_owners_in_turn():
    assert round_robin(["a1", "a2", "a3", "b1", "c1", "c2"], lambda item: item[0]) == [
        "a1",
        "b1",
        "c1",
        "a2",
        "c2",
        "a3",
    ]


def test_the_example_of_the_docstring():
    queue, seconds, order = FairQueueing(), {"a": 2.0, "b": 0.02}, list[str]()
    for owner in seconds:
        queue.wait(owner)
    for _ in range(102):
        order.append(queue.next())
        queue.wait(order[-1])
        queue.took(order[-1], seconds[order[-1]])
    assert order == ["a", *["b"] * 100, "a"]
