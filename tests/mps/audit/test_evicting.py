"""How many pods an audit that may be wrong can take from a node."""

from hypothesis import given
from hypothesis import strategies as st

from mps.audit import evicting
from mps.audit.evicting import EvictionBudget, Evictor, Violator
from tests.fakes.events import Events
from tests.mps.records import pod

HOUR = 3600.0
steps = st.lists(st.tuples(st.floats(0.0, HOUR), st.booleans()), max_size=60)


def test_the_next_one_goes_when_the_former_has_ended():
    subject = EvictionBudget(10)
    subject.record_eviction("a", "team", 0.0)
    assert subject.withheld_reason({"a", "b"}, 1.0) == "the pod that was evicted last has not ended yet"
    assert subject.withheld_reason({"b"}, 1.0) is None


def test_one_that_takes_its_time_to_end_shields_no_other_for_long():
    subject = EvictionBudget(10)
    subject.record_eviction("a", "team", 0.0)
    assert subject.withheld_reason({"a", "b"}, 599.0)
    assert subject.withheld_reason({"a", "b"}, 600.0) is None


def test_an_hour_has_so_many():
    subject = EvictionBudget(2)
    for now in (0.0, 60.0):
        assert subject.withheld_reason((), now) is None
        subject.record_eviction(str(now), "team", now)
    assert "has used its 2 evictions per hour" in subject.withheld_reason((), HOUR - 1)
    assert subject.withheld_reason((), HOUR) is None
    subject.record_eviction("c", "team", HOUR)
    assert subject.withheld_reason((), HOUR + 59.0)
    assert subject.withheld_reason((), HOUR + 60.0) is None


def test_one_that_goes_is_no_obstacle_to_itself():
    subject = Evictor(None, None, 1)
    subject._budget.record_eviction("a", "team", 0.0)
    # It would ask, or tell, somebody who is not there.
    subject.evict([Violator(pod("a"), 0.0, "it uses too much")], {"a"}, 1.0)


def test_many_violators_of_a_namespace_do_not_shield_the_one_of_another(monkeypatch):
    evicted = []
    monkeypatch.setattr(evicting, "evict", lambda _client, namespace, name, _uid: evicted.append(f"{namespace}/{name}"))
    evictor, now = Evictor(None, Events(), 10), 100.0
    remaining = [Violator(pod(f"a{number}", namespace="team-a"), float(number), "") for number in range(9)]
    remaining += [Violator(pod("b", namespace="team-b"), 50.0, "")]
    while remaining:
        uids = {violator.pod.uid for violator in remaining}
        evictor.evict(remaining, uids, now)
        remaining = [violator for violator in remaining if violator.pod.pod not in evicted]
        now += 1.0
    assert evicted[:3] == ["team-a/a0", "team-b/b", "team-a/a1"]


@given(st.integers(1, 5), steps)
def test_whatever_happens_no_hour_has_more(per_hour, happened):
    subject, now, gone, last = EvictionBudget(per_hour), 0.0, [], ""
    for index, (step, ended) in enumerate(happened):
        now += step
        if subject.withheld_reason({last} if last and not ended else set(), now):
            continue
        assert not last or ended or now - gone[-1] >= 600, "one at a time"
        gone.append(now)
        last = str(index)
        subject.record_eviction(last, "team", now)
    for first in gone:
        assert sum(first <= moment < first + HOUR for moment in gone) <= per_hour
