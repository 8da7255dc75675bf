"""The counts of a gang's members after changes equal a new count."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.request import Load
from cardwise.core.gangs.gangs import ForeignPodGroup, Member
from cardwise.core.gangs.roster import Roster
from tests.examples import examples

some = st.sampled_from
members = st.builds(
    Member,
    uid=some("abcdefgh"),
    name=some("xyz"),
    created=some(["1", "2"]),
    is_counted=some([True, True, False]),
    gated=st.booleans(),
    foreign_gate=some([None, None, "a.example/gate"]),
    node=some(["", "", "n1"]),
    minimum=some([None, 2, 3]),
    foreign_podgroup=some([None, *ForeignPodGroup]),
    priority=some([0, 5]),
    load=some([Load(1, 1, 1), Load(2, 1, 1)]),
    problem=some(["", "", "it is wrong"]),
)


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(st.lists(st.one_of(members, some("abcdefgh")), max_size=30))
def test_counts_after_changes_equal_a_new_count(changes):
    """changes: members that are added or updated, and UIDs of members that are deleted."""
    roster, known = Roster(), {}
    for change in changes:
        uid = change if isinstance(change, str) else change.uid
        before, now = known.pop(uid, None), None if isinstance(change, str) else change
        if now is not None:
            known[uid] = now
        roster.update_member(before, now)
        counted = sorted((m for m in known.values() if m.is_counted), key=lambda m: (m.created, m.name, m.uid))
        assert roster.counted == counted
        assert roster.ready == [m for m in counted if not m.foreign_gate]
        assert roster.free == [m for m in counted if not m.foreign_gate and not m.node]
        assert roster.bound == [m for m in counted if m.node]
        assert roster.gated == [m for m in counted if m.gated]
        assert roster.with_foreign_gate == [m for m in counted if m.foreign_gate]
        assert roster.with_problem == [m for m in counted if m.problem]
        assert roster.minimums == Counter(m.minimum for m in counted if m.minimum is not None)
        assert roster.podgroup_origins == Counter(m.foreign_podgroup for m in counted)
        assert roster.priorities == Counter(m.priority for m in counted)
        assert roster.kinds == Counter((m.request, m.load) for m in counted if not m.node)
