"""The order and the rate of writes."""

from extender.reporting.schedule import Key, WriteRate, WriteSchedule


def test_kinds_take_turns_and_marks_within_the_gap_wait_for_it():
    schedule = WriteSchedule({"a": 1.0, "b": 2.0})
    for i in range(3):
        schedule.enqueue(Key("a", str(i)), 0.0)
    schedule.enqueue(Key("b", "x"), 0.0)
    assert [schedule.next_key(0.0).kind for _ in range(3)] == ["a", "b", "a"]
    schedule.mark_written(Key("b", "x"), "what", 0.0)
    assert schedule.next_key(0.0) == Key("a", "2")
    schedule.enqueue(Key("b", "x"), 0.5)
    assert schedule.next_key(1.9) is None
    assert schedule.next_key(2.0) == Key("b", "x")
    assert schedule.next_key(9.0) is None


def test_a_kind_whose_writes_take_long_lets_the_others_go_first():
    schedule, now, order = WriteSchedule({"a": 100.0, "b": 100.0}), 0.0, []
    schedule.enqueue_all([Key("a", f"x/{i}") for i in range(9)], now)
    schedule.enqueue_all([Key("b", f"y/{i}") for i in range(30)], now)
    for _ in range(31):
        key = schedule.next_key(now)
        now += 2.0 if key.kind == "a" else 0.01
        schedule.mark_written(key, "what", now)
        order.append(key.kind)
    assert order.count("a") <= 2


def test_the_same_write_without_effect_is_repeated_later_and_later_a_new_one_at_once():
    schedule, key, now = WriteSchedule({"a": 1.0}), Key("a", "x"), 0.0
    for gap in (1, 2, 4, 8):
        schedule.mark_written(key, "same", now)
        assert schedule.next_key(now + gap - 0.1) is None
        now += gap
        assert schedule.next_key(now) == key
    schedule.mark_written(key, "same", now)
    schedule.enqueue(key, now + 1.0)
    assert schedule.next_key(now + 1.0) == key, "news need not wait for it"


def test_pace_saves_up_half_a_second():
    pace = WriteRate()
    assert pace.allows_write(0.0, 20.0)
    written = 0
    while pace.allows_write(100.0, 20.0):
        pace.record_write()
        written += 1
    assert written == 10


def served(schedule, count, now=0.0, slow=""):
    """The namespaces of the next writes, of which those of `slow` take two seconds each."""
    order = []
    for _ in range(count):
        key = schedule.next_key(now)
        namespace = key.key.split("/")[0]
        now += 2.0 if namespace == slow else 0.0
        schedule.mark_written(key, "what", now)
        order.append(namespace)
    return order


def test_a_namespace_of_many_objects_keeps_no_other_waiting():
    schedule = WriteSchedule({"a": 100.0})
    schedule.enqueue_all([Key("a", f"many/{i}") for i in range(100)], 0.0)
    schedule.enqueue_all([Key("a", f"few/{i}") for i in range(3)], 0.0)
    order = served(schedule, 103)
    assert order[:6].count("few") == 3
    assert order.count("many") == 100


def test_a_namespace_whose_writes_take_long_lets_all_that_are_quick_go_first():
    schedule = WriteSchedule({"a": 100.0})
    schedule.enqueue_all([Key("a", f"fat/{i}") for i in range(20)], 0.0)
    assert served(schedule, 2, slow="fat") == ["fat", "fat"], "while nobody else waits"
    schedule.enqueue_all([Key("a", f"other/{i}") for i in range(30)], 4.0)
    assert served(schedule, 30, 4.0, slow="fat").count("other") >= 29
    assert set(served(schedule, 10, 10.0, slow="fat")) >= {"fat"}, "and has its turn again"


def test_an_owner_that_comes_later_is_not_charged_for_earlier_time():
    schedule = WriteSchedule({"a": 1000.0})
    schedule.enqueue_all([Key("a", f"old/{i}") for i in range(30)], 0.0)
    assert served(schedule, 10, slow="old") == ["old"] * 10
    schedule.enqueue_all([Key("a", f"new/{i}") for i in range(30)], 20.0)
    now, order = 20.0, []
    for _ in range(20):
        key = schedule.next_key(now)
        now += 2.0  # both alike by now
        schedule.mark_written(key, "what", now)
        order.append(key.key.split("/")[0])
    assert order.count("old") >= 9
