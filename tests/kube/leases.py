"""A Lease by hand: the API server's compare and swap, a clock to turn, and electors that act when they are due."""

import copy
from collections.abc import Callable
from datetime import UTC, datetime

from cardwise.kube import errors
from cardwise.kube.election import Call
from cardwise.kube.lease import LeaderElector
from tests.fakes.clock import FakeClock

DURATION, MARGIN, EVERY = 15.0, 1.5, 2.0
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


class Leases:
    """The API server's one Lease: versions that only grow, compare and swap, no write without a version."""

    def __init__(self) -> None:
        self.version = 100
        self.lease: dict | None = None

    def get(self, path: str = f"{PATH}/l", *, timeout: float = 0) -> dict:
        assert path == f"{PATH}/l"
        if self.lease is None:
            raise errors.NotFound(404, "NotFound")
        return copy.deepcopy(self.lease)

    def create(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        assert path == PATH
        if self.lease is not None:
            raise errors.AlreadyExists(409, "AlreadyExists")
        return self.put(body)

    def update(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        assert path == f"{PATH}/l"
        if self.lease is None:
            raise errors.NotFound(404, "NotFound")
        version = body["metadata"]["resourceVersion"]  # a KeyError is a test that failed
        if version != self.lease["metadata"]["resourceVersion"]:
            raise errors.Conflict(409, "Conflict")
        if body["spec"] == self.lease.get("spec"):
            return copy.deepcopy(self.lease)  # nothing changed: no new version
        return self.put(body)

    def put(self, body: dict) -> dict:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def carry_out(self, call: Call) -> dict:
        if call.kind == "get":
            return self.get()
        if call.kind == "create":
            return self.create(PATH, call.body)
        return self.update(f"{PATH}/l", call.body)


class World(Leases):
    """With a clock, and hooks that run before and after a request is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda verb: None
        self.after: Callable[[str], None] = lambda verb: None

    @property
    def now(self) -> float:
        return self.clock.now()

    @now.setter
    def now(self, moment: float) -> None:
        self.clock.advance(moment - self.now)

    def get(self, path: str = f"{PATH}/l", *, timeout: float = 0) -> dict:
        return self._hooked("get", lambda: super(World, self).get(path))

    def create(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        return self._hooked("create", lambda: super(World, self).create(path, body))

    def update(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        return self._hooked("update", lambda: super(World, self).update(path, body))

    def _hooked(self, verb: str, work: Callable[[], dict]) -> dict:
        self.calls.append(verb)
        self.before(verb)
        answer = work()
        self.after(verb)
        return answer

    def elector(self, name: str, **settings: object) -> LeaderElector:
        return LeaderElector(self, "ns", "l", name, clock=self.clock, **settings)  # type: ignore[arg-type]

    def run(self, *electors: LeaderElector, seconds: float, step: float = 0.25) -> None:
        """Lets each of them act when it is due."""
        due = dict.fromkeys(electors, self.now)
        until = self.now + seconds
        while self.now <= until:
            for each in electors:
                if due[each] <= self.now:
                    due[each] = self.now + each.step()
            assert sum(each.leader for each in electors) <= 1
            self.now += step

    def released(self, transitions: int = 4) -> None:
        self.put(
            {
                "metadata": {"name": "l", "labels": {"kept": "yes"}},
                "spec": {"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": transitions},
            }
        )

    @property
    def spec(self) -> dict:
        return self.lease["spec"]


def unreachable(verb: str) -> None:
    raise errors.Unreachable("cut")


def nothing(verb: str) -> None: ...


def leading(world: World, name: str = "a", **settings: object) -> LeaderElector:
    elector = world.elector(name, **settings)
    world.run(elector, seconds=1)
    assert elector.leader
    return elector
