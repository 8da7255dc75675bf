"""The order of waiting gangs: those bound in part first, then by rank, namespaces in turns."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.gangs.gangs import Group, Member
from cardwise.core.gangs.gangstate import Gang
from extender.gangs import gangqueue
from extender.gangs.gangqueue import GangQueue
from tests.examples import examples
from tests.extender.gangworlds import NoPlan

AT_A_TIME = 2


def gang(key):
    namespace, _, name = key.partition("/")
    made = Gang(namespace, name, NoPlan())
    made.set_member(Member(uid=f"u-{key}", name="p", created=name, minimum=5), 0.0)
    return made


def walked(walk):
    found = []
    while walk.gang is not None:
        found.append(walk.gang.key)
        walk.advance()
    return found


def expected(gangs):
    """By brute force."""
    of = {}
    for each in sorted(gangs, key=lambda one: (not one.forward, one.rank())):
        of.setdefault(each.namespace, []).append(each)
    places = [(at // AT_A_TIME, each) for some in of.values() for at, each in enumerate(some)]
    return [each.key for _, each in sorted(places, key=lambda one: (one[0], not one[1].forward, one[1].rank()))]


keys = st.sampled_from([f"{namespace}/{name}" for namespace in "abc" for name in "123456"])
changes = st.lists(st.tuples(keys, st.sampled_from(["forward", "back", "runs", "gone", 0, 7, 9])), max_size=40)


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(changes)
def test_it_is_what_sorting_anew_says(changes):
    order, gangs, most = GangQueue(), {}, gangqueue.AT_A_TIME
    gangqueue.AT_A_TIME = AT_A_TIME
    try:
        for key, change in changes:
            made = gangs.setdefault(key, gang(key))
            if change == "gone":
                order.drop(key)
                del gangs[key]
                continue
            if isinstance(change, int):
                made.regroup(Group(priority=change), 0.0)
            else:
                made.forward, made.ran = change == "forward", change == "runs"
            order.update_gang(made)
            waiting = [each for each in gangs.values() if not each.ran]
            wanted = expected(waiting)
            assert walked(order.in_order()) == wanted
            for each in waiting:
                assert walked(order.gangs_before(each)) == wanted[: wanted.index(each.key)]
    finally:
        gangqueue.AT_A_TIME = most
