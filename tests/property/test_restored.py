"""Rule 1 when etcd is restored from a backup: bound pods wait again, and an earlier Binding may still land."""

from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cardwise.core.api import assignment as codec
from cardwise.core.api.assignment import Assignment
from extender.cache.reservations import Assumed, Phase
from extender.state import State
from tests.build import P100, asking
from tests.extender.states import as_pod, begin, free, make_state, with_cards
from tests.fakes.clock import FakeClock

PODS = "abc"
MEMORY = P100 // 2 + 1  # two pods never fit one card
NODE = "n1"


@dataclass
class Stored:
    """A pod in etcd, and what it was before its Binding: the backup."""

    version: int = 1
    assignment: Assignment | None = None
    backup: int = 1


class World:
    """One card, an extender, and an API server that compares the resourceVersion of each Binding."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.state: State = with_cards(make_state(self.clock), **{NODE: 1})
        self.stored = {name: Stored() for name in PODS}
        self.version = 1
        self.flying: list[tuple[str, int, Assignment]] = []
        for name in PODS:
            self.show(name)

    def bind(self, name: str, outcome: str) -> None:
        """`outcome`: the Binding lands; or it lands and flies once more; or only flies, its answer lost."""
        shown = self.stored[name].version
        begun = begin(self.state, name, MEMORY, node=NODE, epoch=1)
        if not isinstance(begun, Assumed):
            return
        assert begun.assignment is not None
        posted = name, shown, begun.assignment
        landed = outcome != "lost" and self._land(*posted)
        if outcome != "landed":
            self.flying.append(posted)
        if landed:
            self.state.record_binding_outcome(f"uid-{name}", Phase.ACCEPTED)
        else:
            self.state.record_binding_outcome(f"uid-{name}", Phase.UNCONFIRMED if outcome == "lost" else None)

    def land(self, name: str) -> None:
        for posted in [flight for flight in self.flying if flight[0] == name]:
            self.flying.remove(posted)
            self._land(*posted)

    def _land(self, name: str, version: int, assignment: Assignment) -> bool:
        stored = self.stored[name]
        if stored.version != version or stored.assignment is not None:
            return False
        stored.backup = stored.version
        self.version += 1
        stored.version, stored.assignment = self.version, assignment
        return True

    def restore(self, name: str) -> None:
        """Restore the pod in the API server to its state and version before it was bound."""
        stored = self.stored[name]
        if stored.assignment is not None:
            stored.version, stored.assignment = stored.backup, None

    def show(self, name: str) -> None:
        """The watch, or a list, shows the pod."""
        pod = asking(name, gpu_mem=MEMORY)
        assigned = self.stored[name].assignment
        if assigned is not None:
            pod["spec"]["nodeName"] = NODE
            pod["metadata"]["annotations"] = codec.encode(assigned, assume_time_ns=1)
        self.state.set_pod(as_pod(pod))

    def look_up(self, seconds: float) -> None:
        """Time passes, and the due look-ups are made: a read, and a write where the pod waits."""
        self.clock.advance(seconds)
        self.state.expire_reservations()
        for pod in self.state.overdue_bindings():
            stored = self.stored[pod.name]
            if stored.assignment is None:
                self.version += 1
                stored.version = self.version
            self.state.on_lookup(pod.uid, bound=stored.assignment is not None, exists=True)

    def check(self) -> None:
        held = sum(MEMORY for stored in self.stored.values() if stored.assignment is not None)
        assert held <= P100, "the card is given away twice"


NAMES = st.sampled_from(PODS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), NAMES, st.sampled_from(["landed", "twice", "lost"])),
        st.tuples(st.sampled_from(["land", "restore", "show"]), NAMES),
        st.tuples(st.just("look_up"), st.sampled_from([1.0, 80.0])),
    ),
    min_size=4,
    max_size=30,
)


RESTORED = [("bind", "a", "twice"), ("show", "a"), ("restore", "a"), ("show", "a")]


@settings(max_examples=300, deadline=None)
@example([*RESTORED, ("bind", "b", "landed"), ("land", "a")])
@example([*RESTORED, ("look_up", 80.0), ("bind", "b", "landed"), ("land", "a")])
@given(STEPS)
def test_a_card_is_not_given_away_twice_and_not_lost_when_bound_pods_wait_again(steps: list[tuple]) -> None:
    world = World()
    for verb, *args in steps:
        getattr(world, verb)(*args)
        world.check()
    for name in PODS:
        world.land(name)
        world.show(name)
    for _ in range(3):
        world.look_up(80.0)
    held = sum(MEMORY for stored in world.stored.values() if stored.assignment is not None)
    assert free(world.state, NODE) == [P100 - held], "the card is lost"
