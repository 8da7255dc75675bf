"""No wake-up is lost: kube-scheduler tries a refused pod again only when a node is touched, and what fits is placed."""

from contextlib import suppress
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cardwise.core.gangs import gangplan
from tests.build import P100, extended_resource
from tests.examples import examples
from tests.extender.gangcluster import World, member, single
from tests.extender.states import as_card, as_quota

NODES = {"n1": 2, "n2": 1}
SETTLED = 30  # rounds of a second
MEMORY = st.sampled_from([P100 // 4, P100 // 2, P100])


class Fault(Exception):
    """The planner fails."""


class Waking(World):
    """A kube-scheduler that tries pods when they are new, when their bind has failed, and when a node is touched."""

    def __init__(self) -> None:
        super().__init__(dict(NODES), max_waiting=6, permit=1e6, max_permit=1e6)  # no plan ends, which wakes all
        self.active: set[str] = set()
        self.refused: set[str] = set()
        self.cordoned: set[tuple[str, int]] = set()
        self.quota = 0

    def second(self) -> None:
        self.keep()
        self.look_up()
        if self.state.next_requeue_node() is not None:
            self.active |= self.refused
        self.try_pods()
        self.clock.advance(1.0)

    def try_pods(self) -> None:
        failures = len(self.errors)
        for name in [
            pod_name for pod_name in self.schedulable() if pod_name in self.active or pod_name not in self.refused
        ]:
            self.active.discard(name)
            self.refused.discard(name)
            if self.schedule(name):
                self.refused.add(name)
            self.settle()
        self.active |= {name for name, _ in self.errors[failures:]}

    def take_over(self) -> None:
        self.restart()
        self.set_quota(self.quota)
        for node, index in self.cordoned:
            self.set_cordon(node, index, cordoned=True)
        with self.state.queue() as queue:
            queue.requeue_all_after_takeover()

    def set_quota(self, memory: int) -> None:
        """MiB that the namespace may hold; 0: it has no quota."""
        self.quota = memory
        if memory:
            self.state.set_quota(*as_quota({"memoryMiB": memory}, namespace="default"))
        else:
            self.state.remove_quota("default/team")

    def set_cordon(self, node: str, index: int, *, cordoned: bool) -> None:
        (self.cordoned.add if cordoned else self.cordoned.discard)((node, index))
        self.state.set_card(*as_card(extended_resource(index, node=node, mem=P100, unschedulable=cordoned)))

    def settle_all(self) -> None:
        for _ in range(SETTLED):
            self.second()


CARDS = [("n1", 0), ("n1", 1), ("n2", 0)]
some = st.sampled_from
steps = st.lists(
    st.one_of(
        st.tuples(st.just("gang"), st.integers(1, 3), MEMORY),
        st.tuples(st.just("single"), MEMORY, st.none()),
        *[st.tuples(st.just("delete"), st.integers(0, 6), st.none())] * 3,
        st.tuples(st.just("cordon"), some(CARDS), st.booleans()),
        st.tuples(st.just("quota"), some([0, P100, 2 * P100]), st.none()),
        st.tuples(st.just("new leader"), st.none(), st.none()),
        st.tuples(st.just("planner fails"), st.none(), st.none()),
    ),
    max_size=10,
)


def do(world: Waking, count: int, kind: str, number: Any, other: Any) -> None:
    if kind == "gang":
        pods = [member(f"g{count}-{i}", f"g{count}", number, created=count, gpu_mem=other) for i in range(number)]
        world.create(*pods)
    elif kind == "single":
        world.create(single(f"s{count}", created=count, gpu_mem=number))
    elif kind == "delete" and world.pods:
        # kube-scheduler has seen it before the node says that the containers have ended: it tries no pod again.
        world.delete(sorted(world.pods)[number % len(world.pods)])
    elif kind == "cordon":
        world.set_cordon(*number, cordoned=other)
    elif kind == "quota":
        world.set_quota(number)
    elif kind == "new leader":
        world.take_over()
    elif kind == "planner fails":
        with patch.object(gangplan, "plan", side_effect=Fault), suppress(Fault):
            world.second()


@settings(max_examples=examples(20, soak=2000), deadline=None)
@example([("gang", 2, P100), ("delete", 0, None), ("delete", 0, None)])
@example([("gang", 2, P100), ("delete", 0, None), ("planner fails", None, None), ("delete", 0, None)])
@example([("quota", P100, None), *[("delete", 0, None)] * 2, ("gang", 2, P100), ("quota", 0, None)])
@example([("cordon", CARDS[0], True), *[("delete", 0, None)] * 2, ("gang", 2, P100), ("cordon", CARDS[0], False)])
@given(steps=steps)
def test_what_fits_is_placed_though_kube_scheduler_tries_again_only_what_is_woken(
    steps: list[tuple[str, Any, Any]],
) -> None:
    world = Waking()
    world.create(*(single(f"a{i}", gpu_mem=P100) for i in range(len(CARDS))))
    world.second()
    for count, step in enumerate(steps):
        do(world, count, *step)
        world.second()
    world.settle_all()
    bound = world.bound()
    for _ in range(3):
        world.active |= world.refused  # as kube-scheduler does every five minutes
        world.second()
    assert world.bound() == bound
    assert not world.over_full()
