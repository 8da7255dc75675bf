"""What is looked at when, and how much is written."""

from extender.controllers.schedule import Key, Pace, Schedule


def test_kinds_take_turns_and_marks_within_the_gap_wait_for_it():
    schedule = Schedule({"a": 1.0, "b": 2.0})
    for i in range(3):
        schedule.mark(Key("a", str(i)), 0.0)
    schedule.mark(Key("b", "x"), 0.0)
    assert [schedule.next(0.0).kind for _ in range(3)] == ["a", "b", "a"]
    schedule.wrote(Key("b", "x"), "what", 0.0)
    assert schedule.next(0.0) == Key("a", "2")
    schedule.mark(Key("b", "x"), 0.5)
    assert schedule.next(1.9) is None
    assert schedule.next(2.0) == Key("b", "x")
    assert schedule.next(9.0) is None


def test_the_same_write_without_effect_is_repeated_later_and_later_a_new_one_at_once():
    schedule, key, now = Schedule({"a": 1.0}), Key("a", "x"), 0.0
    for gap in (1, 2, 4, 8):
        schedule.wrote(key, "same", now)
        assert schedule.next(now + gap - 0.1) is None
        now += gap
        assert schedule.next(now) == key
    schedule.wrote(key, "same", now)
    schedule.mark(key, now + 1.0)
    assert schedule.next(now + 1.0) == key, "news need not wait for it"


def test_pace_saves_up_half_a_second():
    pace = Pace(20.0, 100.0)
    assert pace.ready(0.0, calm=False)
    written = 0
    while pace.ready(100.0, calm=False):
        pace.spend()
        written += 1
    assert written == 10
