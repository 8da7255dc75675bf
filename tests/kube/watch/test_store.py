"""A list and its events give the present objects, and the diffs rebuild them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cardwise.kube.watch.store import Diff, Store


class Mirror:
    """Applies diffs; raises for changes that a handler must never see."""

    def __init__(self) -> None:
        self.records: dict[str, int] = {}

    def play(self, diff: Diff[int]) -> None:
        for key, old in diff.deleted:
            assert self.records.pop(key) == old
        for key, old, new in diff.updated:
            assert old != new
            assert self.records[key] == old
            self.records[key] = new
        for key, new in diff.added:
            assert key not in self.records
            self.records[key] = new


@dataclass(frozen=True)
class Put:
    name: str
    size: int
    again: bool  # deleted and created meanwhile: another uid


@dataclass(frozen=True)
class Remove:
    name: str


@dataclass(frozen=True)
class Relist:
    """List again after the watch missed the last `missed` steps."""

    missed: int


NAMES = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.lists(
    st.one_of(
        st.builds(Put, NAMES, st.integers(0, 3), st.booleans()),
        st.builds(Remove, NAMES),
        st.builds(Relist, st.integers(0, 5)),
    ),
    max_size=40,
)


def project(uid_keys: bool, name: str, uid: int, size: int) -> tuple[str, int] | None:
    """The projection ignores the value 0, like a finished pod."""
    if size == 0:
        return None
    return (f"{name}-{uid}" if uid_keys else f"ns/{name}"), size


@given(STEPS, st.booleans())
def test_store_equals_the_true_state_after_any_history(steps, uid_keys):
    store: Store[int] = Store()
    mirror = Mirror()
    truth: dict[str, tuple[int, int]] = {}
    uids = 0
    down = 0

    def expected() -> dict[str, int]:
        shown = [project(uid_keys, name, uid, size) for name, (uid, size) in truth.items()]
        return dict(record for record in shown if record is not None)

    for step in steps:
        match step:
            case Relist(missed):
                if missed:
                    down = missed
                    continue
                listed = []
                for name, (uid, size) in truth.items():
                    shown = project(uid_keys, name, uid, size)
                    if shown is not None:
                        listed.append((f"ns/{name}", *shown))
                mirror.play(store.replace_records(listed))
                assert store.snapshot() == expected()
                down = 0
            case Put(name, size, again):
                if again or name not in truth:
                    uids += 1
                    if name in truth and not down:
                        mirror.play(store.apply_event(f"ns/{name}", None))
                    truth[name] = (uids, size)
                else:
                    truth[name] = (truth[name][0], size)
                if not down:
                    mirror.play(store.apply_event(f"ns/{name}", project(uid_keys, name, *truth[name])))
            case Remove(name):
                truth.pop(name, None)
                if not down:
                    mirror.play(store.apply_event(f"ns/{name}", None))
        assert mirror.records == store.snapshot()
        if not down:
            assert store.snapshot() == expected()
    listed = [
        (f"ns/{name}", *shown)
        for name, (uid, size) in truth.items()
        if (shown := project(uid_keys, name, uid, size)) is not None
    ]
    mirror.play(store.replace_records(listed))
    assert mirror.records == store.snapshot() == expected()
    # No entry remains that would affect a later object of the same name.
    assert len(store._aliases) == (len(store) if uid_keys else 0)


def test_event_that_leaves_the_value_equal_is_no_change():
    store: Store[int] = Store()
    store.apply_event("ns/a", ("a", 1))
    assert store.apply_event("ns/a", ("a", 1)) == Diff()


def test_event_of_a_recreated_object_without_its_deletion_frees_the_former_key():
    store: Store[int] = Store()
    store.apply_event("ns/a", ("uid-1", 1))
    diff = store.apply_event("ns/a", ("uid-2", 1))
    assert diff.deleted == [("uid-1", 1)]
    assert diff.added == [("uid-2", 1)]


def test_page_of_a_list_deletes_nothing():
    store: Store[int] = Store()
    store.apply_event("ns/a", ("a", 1))
    store.apply_event("ns/b", ("b", 2))
    diff = store.add_records([("ns/b", "b", 3), ("ns/c", "c", 4), ("ns/c", "c", 5)])
    assert diff == Diff(added=[("c", 5)], updated=[("b", 2, 3)])
    assert store.snapshot() == {"a": 1, "b": 3, "c": 5}


def test_equal_value_is_the_known_object():
    store: Store[tuple[int, ...]] = Store()
    known = tuple(range(2))
    store.apply_event("ns/a", ("a", known))
    assert store.reuse_known("a", tuple(range(2))) is known
    assert store.reuse_known("a", (3,)) == (3,)
    assert store.reuse_known("b", (0, 1)) == (0, 1)


def test_unreadable_objects_keep_their_records():
    store: Store[int] = Store()
    store.apply_event("ns/a", ("uid-1", 1))
    store.apply_event("ns/b", ("uid-2", 2))
    diff = store.replace_records([], keep=["ns/a"])
    assert diff.deleted == [("uid-2", 2)]
    assert store.snapshot() == {"uid-1": 1}
