"""Rule 4 of docs/architecture.md: gangs that each fit alone never block each other, in any order.

That they are bound whole or not at all, whatever goes wrong, is in test_blackbox.py.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.build import P100
from tests.examples import examples
from tests.extender.gangcluster import World, member


@settings(max_examples=examples(25, soak=400), deadline=None)
@given(
    order=st.permutations([f"{gang}{i}" for gang in "abcd" for i in range(3)]),
    data=st.data(),
    size=st.sampled_from([P100, P100 // 2 + 1]),
)
def test_gangs_that_each_fit_alone_never_block_each_other(order, data, size):
    """Whatever order they come and are asked in; who has run for a while ends."""
    world = World({"n1": 2, "n2": 2})
    for i, name in enumerate(order):
        world.create(member(name, name[0], 3, created=i, gpu_mem=size))
        if data.draw(st.booleans()):
            for pod_name in data.draw(st.permutations(world.schedulable())):
                world.schedule(pod_name)
            if data.draw(st.booleans()):
                world.settle()
        if data.draw(st.integers(0, 5)) == 0:
            world.restart()
    done = set()
    for _ in range(60):
        world.state.expire_reservations()
        world.run(3)
        for gang in "abcd":
            names = [f"{gang}{i}" for i in range(3)]
            bound = [name for name in names if name in world.bound()]
            assert len(bound) in (0, 3) or world.phase(gang) in ("Binding", "PartlyBound")
            if len(bound) == 3:
                done.add(gang)
                world.delete(*names)
        if len(done) == 4:
            return
    raise AssertionError(f"only {done} ran")
