"""The next of many times, by key."""

from hypothesis import given
from hypothesis import strategies as st

from extender.cache.deadlines import Deadlines

KEYS = st.sampled_from("abcde")


@given(st.lists(st.tuples(KEYS, st.none() | st.integers(0, 9))), st.integers(0, 9))
def test_the_due_keys_come_by_time_and_a_later_time_replaces_an_earlier_one(steps, now):
    deadlines, expected = Deadlines(), dict[str, int]()
    for key, time in steps:
        if time is None:
            deadlines.discard(key)
            expected.pop(key, None)
        else:
            deadlines.set(key, time)
            expected[key] = time
    assert deadlines.next() == min(expected.values(), default=float("inf"))
    popped = []
    while (key := deadlines.pop_due(now)) is not None:
        popped.append(key)
    assert popped == sorted(
        (key for key, time in expected.items() if time <= now), key=lambda key: (expected[key], key)
    )
    assert all((key in deadlines) == (expected[key] > now) for key in expected)


def test_the_times_of_one_key_take_no_memory():
    deadlines = Deadlines()
    for time in range(10_000):
        deadlines.set("a", time)
    assert len(deadlines._heap) <= 64
    assert deadlines.next() == 9_999
