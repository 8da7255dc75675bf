"""Pauses of namespaces after long searches."""

from extender.queue.searchpauses import MAX_PAUSE_SECONDS, PAUSE_FACTOR, SHORT_SECONDS, SearchPauses
from tests.fakes.clock import FakeClock
from tests.theory import theory_of


def test_the_example_is_as_the_theory_of_operation_says():
    theory, clock = theory_of("extender.queue.searchpauses"), FakeClock()
    pauses = SearchPauses(clock)

    def pause_after(namespace: str, seconds: float) -> float:
        pauses.charge_search(namespace, seconds)
        return pauses._paused_until[namespace] - clock.now()

    assert f"A takes 5 s, so A pauses {pause_after('A', 5.0):.0f} s." in theory
    assert not pauses.is_paused("B")
    assert f"its search takes 1 s, so B pauses {pause_after('B', 1.0):.0f} s." in theory
    for i in range(7):
        pauses.charge_search(f"other-{i}", 10.0)
    assert f"each search of 1 s is followed by a pause of {pause_after('last', 1.0):.0f} s" in theory


def test_the_tenth_is_shared_equally_as_the_theory_of_operation_says():
    def use_in_an_hour(seconds_by_namespace: dict[str, float]) -> dict[str, float]:
        """Each namespace searches in each second in which it may. Returns the seconds of searches by namespace."""
        clock, used = FakeClock(), dict.fromkeys(seconds_by_namespace, 0.0)
        pauses = SearchPauses(clock)
        for _ in range(3600):
            for namespace, seconds in seconds_by_namespace.items():
                if not pauses.is_paused(namespace):
                    pauses.charge_search(namespace, seconds)
                    used[namespace] += seconds
            clock.advance(1.0)
        return used

    theory, others = theory_of("extender.queue.searchpauses"), {f"other-{i}": 0.05 for i in range(50)}
    alone, beside = use_in_an_hour({"A": 0.5}), use_in_an_hour(others | {"A": 0.5})
    assert max(beside.values()) - min(beside.values()) < 1
    assert f"A makes {alone['A'] / 0.5:.0f} searches of 0.5 s in an hour, {alone['A']:.0f} s in total" in theory
    assert f"Beside {len(others)} namespaces with searches of 0.05 s, A makes {beside['A'] / 0.5:.0f}" in theory
    assert f"each of the {len(beside)} namespaces uses about {beside['other-0']:.0f} s" in theory


def test_the_pause_is_ten_times_as_long_as_the_search_and_of_its_namespace_only(clock):
    pauses = SearchPauses(clock)
    pauses.charge_search("evil", 5.0)
    assert (pauses.is_paused("evil"), pauses.is_paused("fair")) == (True, False)
    clock.advance(PAUSE_FACTOR * 5.0 - 0.1)
    assert pauses.is_paused("evil")
    clock.advance(0.1)
    assert not pauses.is_paused("evil")


def test_there_is_no_pause_after_a_short_search():
    pauses = SearchPauses(FakeClock())
    pauses.charge_search("fair", SHORT_SECONDS / 2)
    assert not pauses.is_paused("fair")


def test_many_namespaces_take_a_tenth_of_the_time_together():
    """Each namespace searches as soon as it may. Each search takes a second, in which no other runs."""
    clock, namespaces = FakeClock(), [f"ns{i}" for i in range(30)]
    pauses = SearchPauses(clock)
    searches = list[str]()
    for second in range(4000):
        namespace = next((name for name in namespaces if not pauses.is_paused(name)), None)
        if second == 1000:
            searches.clear()  # before, each has searched for the first time
        clock.advance(1.0)
        if namespace is not None:
            searches.append(namespace)
            pauses.charge_search(namespace, 1.0)
    assert 270 <= len(searches) <= 330
    assert set(searches) == set(namespaces)


def test_pauses_that_are_over_are_forgotten_and_do_not_extend_others(clock):
    pauses = SearchPauses(clock)
    for i in range(3):
        pauses.charge_search(f"ns{i}", 0.1)
    clock.advance(10.0)
    pauses.charge_search("fair", 1.0)
    assert pauses._paused_until.keys() == {"fair"}
    clock.advance(10.0)
    assert not pauses.is_paused("fair")


def test_a_shorter_search_ends_no_pause(clock):
    pauses = SearchPauses(clock)
    pauses.charge_search("a", 5.0)
    pauses.charge_search("a", SHORT_SECONDS)
    clock.advance(PAUSE_FACTOR * 5.0 - 1)
    assert pauses.is_paused("a")


def test_a_pause_is_limited_however_many_namespaces_pause(clock):
    pauses = SearchPauses(clock)
    for number in range(99):
        pauses.charge_search(f"n{number}", 0.06)
    pauses.charge_search("a", 5.0)
    clock.advance(MAX_PAUSE_SECONDS)
    assert not pauses.is_paused("a")
