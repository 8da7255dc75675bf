"""The end of an elector: it announces the end of its leadership and releases its own Lease."""

from tests.kube.leases.leases import EVERY, World, leading


def test_stop_calls_back_before_the_release(world: World):
    changes: list[tuple[bool, bool, str]] = []
    a = world.elector("a", on_change=lambda leads: changes.append((leads, a.is_leader, world.spec["holderIdentity"])))
    world.run(a, seconds=1)
    b = world.elector("b")
    b.step()
    a.start()
    world.clock.until_waiting()  # not during a step, which would announce it as well
    a.stop()
    assert changes == [(True, True, "a"), (False, False, "a")]
    assert not a.is_leader
    assert a.remaining_seconds() == 0
    assert (world.spec["holderIdentity"], world.spec["leaseDurationSeconds"]) == ("", 1)
    assert world.spec["leaseTransitions"] == 5
    before = world.now
    world.run(b, seconds=EVERY)
    assert b.is_leader
    assert world.now - before <= EVERY + 0.25
    assert world.spec["leaseTransitions"] == 6


def test_stop_calls_back_even_if_leadership_was_never_announced(world: World):
    """A caller of `holds_lease` may have begun writes before the thread announced the leadership."""
    changes: list[bool] = []
    a = leading(world, on_change=changes.append)
    changes.clear()
    a._announced_epoch = 0
    a.start()
    a.stop()
    assert changes[-1:] == [False]
    assert world.spec["holderIdentity"] == ""


def test_release_detects_a_lost_renewal(world: World):
    a = leading(world)
    unheard = world.unheard("update")
    world.now += 2
    a.step()
    unheard.end()
    a.release()
    assert world.spec["holderIdentity"] == ""


def test_lease_of_another_holder_is_not_released(world: World):
    leading(world)
    b = world.elector("b")
    b.step()
    b.release()
    assert world.spec["holderIdentity"] == "a"


def test_creator_that_still_waits_does_not_release(world: World):
    world.remove()
    b = world.elector("b")
    world.run(b, seconds=5)
    b.release()
    assert world.spec["holderIdentity"] == "b"
