"""Which extender leads when one cannot watch a kind of object: whole extenders, from outside (`blackbox`)."""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest

from cardwise.kube import paths
from tests.build import P100
from tests.fakes.apiserver import Request
from tests.property import blackbox
from tests.property.blackbox import World

# One whose watch forbids placements, and the one that tells which pods there are.
NEEDED = [paths.resourceclasses(), paths.pods()]


class Scene:
    """Two extenders.

    leader: the extender that leads.
    blind: the extenders that cannot list or watch `kind`."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.blind: set[str] = set()
        world.do("starts", extender=1)
        world.do("passes", seconds=10.0, stride=0.25)
        self.leader = self.leading[0]
        world.api.before_request(self._refuse, times=math.inf)

    @property
    def leading(self) -> list[str]:
        processes = enumerate(self.world.processes)
        return [f"extender-{index}" for index, process in processes if process is not None and process.whole._leads()]

    @property
    def holder(self) -> str:
        return self.world.api.get(blackbox.LEASE)["spec"]["holderIdentity"]

    def _refuse(self, request: Request) -> None:
        blind = request.headers["User-Agent"] in self.blind
        if blind and request.path == self.kind and request.verb in ("list", "watch"):
            raise ConnectionRefusedError("by the test")

    def make_blind(self, *extenders: str) -> None:
        self.blind = set(extenders)
        self.world.api.end_watches("cut", self.kind)

    def run(self, seconds: float) -> None:
        self.world.errors.clear()
        self.world.clock.run(seconds, stride=0.5)

    def is_placed(self, pod: str) -> bool:
        """Whether the pod is placed within a while: the scheduler tries it at both extenders; the follower closes
        connections.
        """
        for to in (0, 1) * 4:
            self.world.tries(pod, to)
            self.run(5.0)
        return bool(self.world.api.get(paths.pods("default", pod))["spec"].get("nodeName"))


@pytest.fixture
def world() -> Iterator[World]:
    world = World(3, {"n1": [P100]}, settings={"bind_deadline": 60.0})
    with world.open():
        yield world


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.rsplit("/", 1)[-1])
def test_a_leader_that_cannot_follow_a_kind_leaves_the_lease_to_one_that_can(world: World, kind: str) -> None:
    scene = Scene(world, kind)
    scene.make_blind(scene.leader)
    world.do("creates", gpu_mem=1000)
    scene.run(12.0)
    assert scene.leading == [scene.leader], "the watch may come back"
    scene.run(150.0 if kind == paths.pods() else 30.0)
    assert scene.leading == [name for name in ("extender-0", "extender-1") if name != scene.leader]
    assert scene.is_placed("p1")


def test_where_no_extender_can_follow_a_kind_the_lease_does_not_go_to_and_fro(world: World) -> None:
    scene = Scene(world, paths.resourceclasses())
    world.do("creates", gpu_mem=1000)
    scene.make_blind("extender-0", "extender-1")
    holders = [scene.holder]
    for _ in range(60):
        scene.run(2.0)
        holders.append(scene.holder)
    assert len(set(holders)) == 1
    assert not scene.leading
    assert not scene.is_placed("p1")
    scene.make_blind(scene.leader)
    scene.run(15.0)
    assert len(scene.leading) == 1
    assert scene.leading != [scene.leader]
    assert scene.is_placed("p1")


def test_extenders_that_see_for_moments_by_turns_do_not_change_the_leader_each_time(world: World) -> None:
    """Each extender can watch for 8 s of 40 s, in turns."""
    scene = Scene(world, paths.resourceclasses())
    sees = {0: "extender-0", 8: "", 20: "extender-1", 28: ""}
    holders = []
    for second in range(160):
        if second % 40 in sees:
            scene.make_blind(*{"extender-0", "extender-1"} - {sees[second % 40]})
        scene.run(1.0)
        holders.append(scene.holder)
    changes = [second for second, (before, after) in enumerate(pairwise(holders)) if before != after]
    assert all(after - before >= 15 for before, after in pairwise(changes)), changes
