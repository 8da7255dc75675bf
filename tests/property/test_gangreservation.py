"""The gang reservation: no more than its gang asks for and its quota leaves, and no later pod takes of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from extender.cache.gangcards import comes_after
from tests.build import P100
from tests.examples import examples
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_quota

NODES = ("n1", "n2")
SIZES = st.sampled_from([1, P100 // 4, P100 // 2, P100])
TEAMS = ("team-a", "team-b")
ASKS = st.one_of(
    st.builds(lambda mem: {"gpu_mem": mem}, SIZES),
    st.sampled_from([{"whole_gpu": 1}, {"whole_gpu": 2}, {"gpu_mem": 100, "gpu_core": 60}]),
)
GANG = st.tuples(st.just("gang"), ASKS, st.sampled_from(TEAMS), st.integers(1, 3), st.integers(0, 99))
STEPS = st.one_of(
    st.tuples(st.just("single"), ASKS, st.sampled_from(TEAMS), st.sampled_from([0, 0, 1]), st.integers(0, 99)),
    GANG,
    st.tuples(st.just("delete"), st.integers(0, 30)),
    st.tuples(st.just("delete"), st.integers(0, 7)),
    st.tuples(st.just("wait"), st.sampled_from([1, 31, 61])),
    st.tuples(st.just("quota"), st.sampled_from(TEAMS), st.sampled_from([P100 // 2, P100, 3 * P100])),
)


class Judged(World):
    """Judges each single pod that is placed, by what was reserved and free before."""

    def schedule(self, name: str) -> str:
        pod = self.pods[name]
        before = self.cards()
        reserved = self.reserved_from(name)
        reason = super().schedule(name)
        after = self.cards()
        for card, mib in reserved.items():
            used_mib = before[card] - after[card]
            assert used_mib <= max(0, before[card] - mib), (
                f"{name} takes {used_mib} MiB of {before[card]}, {mib} are reserved"
            )
        assert pod is self.pods[name]
        return reason

    def cards(self) -> dict[str, int]:
        with self.state.view() as ledger:
            return {card.uuid: node.free[i] for node in ledger.nodes() for i, card in enumerate(node.cards)}

    def reservation(self):
        """The gang, and its holdings."""
        cards = self.state._cache.gang_cards
        return cards._gang, [holding for some in cards._by_node.values() for holding in some]

    def reserved_from(self, name: str) -> dict[str, int]:
        """MiB by card that are reserved from this pod."""
        gang, holdings = self.reservation()
        meta, spec = self.pods[name]["metadata"], self.pods[name]["spec"]
        reserved: dict[str, int] = {}
        rank = (-spec["priority"], 0, meta["creationTimestamp"], "")
        if (
            gang is None
            or gang.plan
            or meta["labels"]
            or not comes_after(rank, meta["namespace"], gang.rank(), gang.namespace)
        ):
            return reserved
        for holding in holdings:
            for share in holding.assignment.shares():
                reserved[share.uuid] = reserved.get(share.uuid, 0) + share.mem
        return reserved


def is_no_more_than_asked(world: Judged) -> None:
    gang, holdings = world.reservation()
    if gang is None:
        assert not holdings
        return
    requests = {wanted.name: wanted.request for wanted in gang.members.values()}
    assert len({holding.name for holding in holdings}) == len(holdings) <= gang.minimum
    for holding in holdings:
        for share, of in zip(holding.assignment.shares(), requests[holding.name].containers, strict=False):
            assert share.whole == of.whole
            assert of.whole or (share.mem, share.core) == (of.mem_per_card, of.core_per_card)
        assert len(holding.assignment.shares()) == sum(of.cards for of in requests[holding.name].containers)
    mib = sum(share.mem for holding in holdings for share in holding.assignment.shares())
    assert all(mib <= room.memory for room in world.state._cache.headroom(gang.namespace) if room.memory is not None)


@settings(max_examples=examples(15, soak=2000), deadline=None)
@given(GANG, st.lists(STEPS, min_size=5, max_size=20))
def test_a_reservation_is_what_its_gang_asks_for_and_no_later_pod_takes_of_it(gang, steps):
    world = Judged({name: NodeSpec(2) for name in NODES}, refusals=2)
    world.create(*(single(f"full{i}", gpu_mem=P100 // 2) for i in range(8)))
    world.run(1)
    for at, step in enumerate([gang, ("wait", 3), ("wait", 3), *steps]):
        match step:
            case "single", asks, team, priority, created:
                pod = single(f"s{at}", created=created, priority=priority, **asks)
                pod["metadata"]["namespace"] = team
                world.create(pod)
            case "gang", asks, team, size, created:
                name = f"g{at}"
                world.create(
                    *(member(f"{name}-{i}", name, size, namespace=team, created=created, **asks) for i in range(size))
                )
            case "delete", index:
                names = sorted(world.pods)
                if names:
                    world.delete(names[index % len(names)])
            case "wait", seconds:
                world.clock.advance(seconds)
            case "quota", team, mib:
                world.state.set_quota(*as_quota({"memoryMiB": mib}, namespace=team))
        world.run(1)
        world.keep()
        is_no_more_than_asked(world)
        assert not world.over_full()
