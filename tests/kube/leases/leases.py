"""A world for Lease tests: an API server, a clock that the test moves, and electors that act when they are due."""

import math
from collections.abc import Callable
from datetime import UTC, datetime

from cardwise.kube import paths
from cardwise.kube.leases.election import LeaseCall
from cardwise.kube.leases.lease import LeaderElector
from tests.build import build_released_lease
from tests.fakes.apiserver import ApiServer, Fault, Rule
from tests.fakes.clock import FakeClock

DURATION, MARGIN, EVERY = 15.0, 1.5, 2.0
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PATH = paths.leases("ns", "l")


class World:
    """One Lease that the test can also write."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.client = self.api.client(clock=self.clock)

    @property
    def now(self) -> float:
        return self.clock.now()

    @now.setter
    def now(self, moment: float) -> None:
        self.clock.advance(moment - self.now)

    @property
    def lease(self) -> dict | None:
        return self.api.get(PATH)

    @property
    def spec(self) -> dict:
        return self.lease["spec"]

    def put_lease(self, spec: object, **metadata: object) -> None:
        """Overwrite the Lease."""
        self.api.write_object(paths.leases(), {"metadata": {"name": "l", "namespace": "ns"} | metadata, "spec": spec})

    def remove(self) -> None:
        self.api.remove(PATH)

    def released(self) -> None:
        self.put_lease(build_released_lease(self.clock.wall()) | {"leaseTransitions": 4}, labels={"kept": "yes"})

    def carry_out(self, call: LeaseCall) -> dict:
        if call.kind == "get":
            return self.client.get(PATH)
        if call.kind == "create":
            return self.client.create(paths.leases("ns"), call.body)
        return self.client.update(PATH, call.body)

    def elector(self, name: str, **settings: object) -> LeaderElector:
        return LeaderElector(self.client, "ns", "l", name, clock=self.clock, **settings)

    def run(self, *electors: LeaderElector, seconds: float, step: float = 0.25) -> None:
        """Let each elector act when it is due."""
        due = dict.fromkeys(electors, self.now)
        until = self.now + seconds
        while self.now <= until:
            for elector in electors:
                if due[elector] <= self.now:
                    due[elector] = self.now + elector.step()
            assert sum(elector.is_leader for elector in electors) <= 1
            self.now += step

    def wait_until_leads(self, elector: LeaderElector, *others: LeaderElector, step: float = 0.25) -> float:
        """Let the elector alone act until it leads, beside none of the others. Returns the seconds."""
        began = self.now
        while not elector.is_leader:
            self.now += step
            elector.step()
            assert not (elector.is_leader and any(other.is_leader for other in others))
        return self.now - began

    # The faults from now on, until the rule ends.

    def unheard(self, verb: str = "") -> Rule:
        """Carry out requests and lose their responses."""
        return self.api.fault(Fault(lost=True), verb, times=math.inf)

    def unreachable(self) -> Rule:
        return self.api.fault(Fault(refused=True), times=math.inf)

    def after_requests(self, hook: Callable[[], object]) -> Rule:
        return self.api.after_request(lambda _: hook(), times=math.inf)

    # The recorded calls of the electors.

    @property
    def calls(self) -> list[str]:
        return [request.verb for request in self.api.sent()]


def leading(world: World, name: str = "a", **settings: object) -> LeaderElector:
    elector = world.elector(name, **settings)
    world.run(elector, seconds=1)
    assert elector.is_leader
    return elector
