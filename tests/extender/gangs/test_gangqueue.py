"""The order of waiting gangs: those bound in part first, then by rank, namespaces in turns."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.gangs.gangs import Member, PodGroupSpec
from cardwise.core.gangs.gangstate import Gang
from extender.gangs import gangqueue
from extender.gangs.gangqueue import GangQueue
from tests.examples import examples
from tests.extender.gangcluster import NoPlan

AT_A_TIME = 2


def gang(key):
    namespace, _, name = key.partition("/")
    new_gang = Gang(namespace, name, NoPlan())
    new_gang.set_member(Member(uid=f"u-{key}", name="p", created=name, minimum=5), 0.0)
    return new_gang


def walked(walk):
    keys = []
    while walk.gang is not None:
        keys.append(walk.gang.key)
        walk.advance()
    return keys


def expected(gangs):
    """By brute force."""
    of = {}
    for listed in sorted(gangs, key=lambda key: (not key.forward, key.rank())):
        of.setdefault(listed.namespace, []).append(listed)
    places = [(at // AT_A_TIME, listed) for some in of.values() for at, listed in enumerate(some)]
    return [listed.key for _, listed in sorted(places, key=lambda key: (key[0], not key[1].forward, key[1].rank()))]


keys = st.sampled_from([f"{namespace}/{name}" for namespace in "abc" for name in "123456"])
changes = st.lists(st.tuples(keys, st.sampled_from(["forward", "back", "runs", "gone", 0, 7, 9])), max_size=40)


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(changes)
def test_it_is_what_sorting_anew_says(changes):
    order, gangs, original = GangQueue(), {}, gangqueue.GANGS_BEFORE_NEXT_NAMESPACE
    gangqueue.GANGS_BEFORE_NEXT_NAMESPACE = AT_A_TIME
    try:
        for key, change in changes:
            changed = gangs.setdefault(key, gang(key))
            if change == "gone":
                order.remove_gang(key)
                del gangs[key]
                continue
            if isinstance(change, int):
                changed.set_group(PodGroupSpec(priority=change), 0.0)
            else:
                changed.forward, changed.ran = change == "forward", change == "runs"
            order.update_gang(changed)
            waiting = [listed for listed in gangs.values() if not listed.ran]
            wanted = expected(waiting)
            assert walked(order.gangs_in_order()) == wanted
            for listed in waiting:
                assert walked(order.gangs_before(listed)) == wanted[: wanted.index(listed.key)]
    finally:
        gangqueue.GANGS_BEFORE_NEXT_NAMESPACE = original
