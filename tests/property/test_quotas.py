"""The arithmetic of quotas: what is counted step by step is what a count from nothing gives, in any order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import quotas
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.quotas import NO_CHARGE, Charge, Headroom, QuotaEntry

TOTAL = 100

shares = st.builds(
    lambda mem, core, whole: CardShare(0, "GPU-1", mem, core, TOTAL, whole),
    st.sampled_from([1, 40, TOTAL]),
    st.sampled_from([0, 50, 100]),
    st.booleans(),
)
limits = st.one_of(st.none(), st.integers(0, 400))
entries = st.builds(lambda s, m, c: QuotaEntry(shares=s, memory=m, cards=c), limits, limits, limits)
charges = st.builds(Charge, st.integers(0, 5), st.integers(0, 400), st.integers(0, 5))


def _charge(share):
    return quotas.sum_charges(map(quotas.charge_of_use, Assignment({"c0": (share,)}).card_uses()))


@given(held=st.lists(st.tuples(shares, st.booleans())), order=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_charge_release_and_recount_agree_in_any_order(held, order: random.Random):
    steps = [(i, +1) for i in range(len(held))] + [(i, -1) for i, (_, goes) in enumerate(held) if goes]
    order.shuffle(steps)
    used = NO_CHARGE
    for i, sign in steps:
        charge = _charge(held[i][0])
        used = used.add(charge) if sign > 0 else used.subtract(charge)
    remaining = [share for share, goes in held if not goes]
    assert used == quotas.sum_charges(_charge(share) for share in remaining)
    assert used == (len(remaining), sum(share.mem for share in remaining), sum(share.whole for share in remaining))


@given(entry=entries, added=st.lists(charges, max_size=12))
@settings(deadline=None)
def test_what_headroom_takes_never_exceeds_the_entry(entry, added):
    used = NO_CHARGE
    for charge in added:
        if quotas.headroom(entry, used).has_room_for(charge):
            used = used.add(charge)
        else:
            over = used.add(charge)
            assert any(limit is not None and amount > limit for limit, amount in limited(entry, over))
    assert all(limit is None or amount <= limit for limit, amount in limited(entry, used))


def limited(entry, charge):
    return [(entry.shares, charge.shares), (entry.memory, charge.memory), (entry.cards, charge.cards)]


@given(entry=entries, used=charges, charge=charges, added=charges)
@settings(deadline=None)
def test_less_is_taken_wherever_more_is(entry, used, charge, added):
    assert quotas.headroom(entry, used).has_room_for(NO_CHARGE)
    if quotas.headroom(entry, used).has_room_for(charge.add(added)):
        assert quotas.headroom(entry, used).has_room_for(charge)
    if quotas.headroom(entry, used.add(added)).has_room_for(charge):
        assert quotas.headroom(entry, used).has_room_for(charge)


@given(entry=entries, used=charges)
@settings(deadline=None)
def test_headroom_and_used_make_up_the_entry(entry, used):
    room = quotas.headroom(entry, used)
    assert isinstance(room, Headroom)
    assert room.entry == entry
    for limit, amount, rest in zip(
        (entry.shares, entry.memory, entry.cards), used, (room.shares, room.memory, room.cards), strict=True
    ):
        assert rest == (None if limit is None else limit - amount)
