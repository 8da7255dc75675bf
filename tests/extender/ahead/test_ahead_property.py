"""Whatever comes in whatever order: nothing is given twice, no quota exceeded, and what is held ahead ends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import quotas
from tests.examples import examples
from tests.extender.aheadworlds import REFUSED, World
from tests.extender.worlds import P100, as_pod, as_quota, begin, bound, free, mark

NODES = ("n1", "n2", "n3")
PODS = tuple(f"p{i}" for i in range(8))
MOST_SHARES = 6

pods, nodes = st.sampled_from(PODS), st.sampled_from(NODES)
STEPS = st.one_of(
    st.tuples(st.just("create"), pods, st.sampled_from([100, P100 // 2, P100 * 3 // 4, P100]), st.integers(0, 2)),
    st.tuples(st.just("decide")),
    st.tuples(st.just("filter"), pods, st.lists(nodes, min_size=1, unique=True)),
    st.tuples(st.just("bind"), pods),
    st.tuples(st.just("refused"), pods),
    st.tuples(st.just("unwritten"), pods),
    st.tuples(st.just("delete"), pods),
    st.tuples(st.just("passes"), st.sampled_from([1.0, 31.0])),
    st.tuples(st.just("forget")),
    st.tuples(st.just("cordon"), nodes, st.booleans()),
)


class Walk:
    def __init__(self) -> None:
        self.world = World(*NODES)
        self.world.state.set_quota(*as_quota({"shares": MOST_SHARES}))
        self.mem: dict[str, int] = {}
        self.bound: set[str] = set()
        self.planned: dict[str, str] = {}  # what filter has answered last

    def create(self, name: str, mem: int, hour: int) -> None:
        if name not in self.mem:
            self.mem[name] = mem
            self.world.create(name, mem, created=f"2026-11-21T1{hour}:00:00Z", cpu="1")

    def decide(self) -> None:
        for name, node in self.world.ahead().items():
            assert name in self.mem.keys() - self.bound
            assert mark(self.world.state, f"uid-{name}") == "plan"
            assert node in NODES

    def filter(self, name: str, offered: list[str]) -> None:
        if name in self.mem and name not in self.bound:
            found = self.world.filter(name, *offered)
            assert set(found) <= set(offered)
            self.planned.pop(name, None)
            if found:
                self.planned[name] = found[0]

    def bind(self, name: str) -> None:
        node = self.planned.pop(name, None)
        if name not in self.mem or name in self.bound or node is None:
            return
        begun = begin(self.world.state, name, self.mem[name], node=node)
        if hasattr(begun, "unsure"):
            self.bound.add(name)
            self.world.tell(bound(name, self.mem[name], 0, node=node))
            self.world.state.finish_bind(f"uid-{name}", None)

    def refused(self, name: str) -> None:
        if name in self.mem and name not in self.bound:
            self.world.tell(self.world.pods[name] | {"status": {"conditions": REFUSED}})

    def unwritten(self, name: str) -> None:
        self.world.state.ahead.unwritten(f"uid-{name}")

    def delete(self, name: str) -> None:
        if name in self.mem and name not in self.bound:
            self.world.state.remove_pod(as_pod(self.world.pods[name]))
            del self.mem[name]
            self.planned.pop(name, None)

    def passes(self, seconds: float) -> None:
        self.world.passes(seconds)

    def forget(self) -> None:
        self.world.state.forget_plans()

    def cordon(self, name: str, closed: bool) -> None:
        self.world.node(name, unschedulable=closed)

    def check(self) -> None:
        with self.world.state.view() as ledger:
            assert ledger.violations() == []
            charges = [quotas.charge(share) for one in ledger.holdings() for share in one.assignment.shares()]
            assert quotas.total(charges).shares <= MOST_SHARES


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_nothing_is_given_twice_and_all_that_is_held_ends(steps):
    walk = Walk()
    for what, *how in steps:
        getattr(walk, what)(*how)
        walk.check()
    walk.world.passes(31)
    held = {node: P100 - free(walk.world.state, node)[0] for node in NODES}
    taken = dict.fromkeys(NODES, 0)
    for name in walk.bound:
        taken[walk.world.pods[name]["spec"]["nodeName"]] += walk.mem[name]
    assert held == taken, "what no pod is bound to is free"
