"""Extenders of one cluster by hand: each with its own state, Lease and binder, over one API server, on one clock.

Nothing runs by itself: a Lease is renewed, a watch tells and an epoch begins when the test says so.
"""

import math
from collections.abc import Callable

from cardwise.core.api import assignment, names, request
from cardwise.core.api.assignment import Assignment
from cardwise.kube import paths
from cardwise.kube.leases.lease import LeaderElector
from extender.binding import binder
from extender.binding.binder import Binder
from extender.leadership.fence import Fence
from extender.leadership.leadership import LeaseLeadership
from extender.placing.placing import PlacementRequest
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef
from extender.records.wire import BindArgs
from tests.build import asking, build_released_lease
from tests.extender.states import as_pod, as_quota, comes, make_state, with_cards
from tests.fakes.apiobjects import Refused
from tests.fakes.apiserver import ApiServer, Request
from tests.fakes.clock import FakeClock

DURATION = 15.0
LEASE = paths.leases("ns", "l")


class Cluster(ApiServer):
    """An API server with pods, one Lease, and the policy of the chart that refuses Bindings of former epochs."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        released = build_released_lease(clock.wall())
        self.write_object(paths.leases(), {"metadata": {"name": "l", "namespace": "ns"}, "spec": released})
        self.behind = False  # the policy: it knows of no epoch that began
        self.admission.append(self._check_fencing)
        self._fresh = self.follow(paths.pods())
        self._pods: dict[str, dict] = {}

    def _check_fencing(self, call: Request) -> None:
        if call.path.endswith("/binding") and not self.behind:
            epoch = call.body["metadata"]["annotations"][names.LEADER_EPOCH]
            if int(epoch.split("/")[3]) < self.get(LEASE)["spec"]["leaseTransitions"]:
                raise Refused(422, f"{names.LEADER_EPOCH}: the leader epoch is over")

    def create_pod(self, name: str, mem: int, *, namespace: str = "default", resource_class: str = "") -> dict:
        return self.write_object(
            paths.pods(), asking(name, gpu_mem=mem, namespace=namespace, resource_class=resource_class)
        )

    def pods(self) -> dict[str, dict]:
        """By name, whatever their namespace."""
        self._pods |= {event["object"]["metadata"]["name"]: event["object"] for event in self._fresh()}
        return self._pods

    def posts(self) -> list[tuple[str, str]]:
        """Who has posted a Binding, and of which pod."""
        return [(call.headers["User-Agent"], call.path.split("/")[-2]) for call in self.sent("create", "*/binding")]

    def holder(self) -> str:
        """Who holds the Lease, "" for nobody."""
        return self.get(LEASE)["spec"]["holderIdentity"]

    def bound_assignments(self) -> dict[str, tuple[str, Assignment]]:
        """Node and cards of the bound pods."""
        return {
            name: (pod["spec"]["nodeName"], assignment.decode(pod["metadata"]["annotations"]))
            for name, pod in self.pods().items()
            if pod["spec"].get("nodeName")
        }

    def over_full(self, mem: int) -> list[tuple[str, int]]:
        """Cards of `mem` MiB that were given away more than whole."""
        used: dict[tuple[str, int], int] = {}
        for node, assigned in self.bound_assignments().values():
            for share in assigned.shares():
                used[node, share.index] = used.get((node, share.index), 0) + share.mem
        return [card for card, held in used.items() if held > mem]


class Extender:
    """One process. `cut`: its calls do not reach the API server."""

    def __init__(
        self, api: Cluster, name: str, clock: FakeClock, *, cards: dict[str, int], quota: dict | None = None
    ) -> None:
        self.api, self.name, self.clock = api, name, clock
        self.client = api.client(user_agent=name, clock=clock)
        self.cut = False
        api.before_request(self._reach, times=math.inf)
        self._fresh = api.follow(paths.pods())
        self._untold: list[PodRecord] = []
        self.reads: Callable[[], bool] = lambda: True  # before it catches up; whether it can
        self.state = with_cards(make_state(clock), **cards)
        if quota is not None:
            self.state.set_quota(*as_quota(quota))
        self._fence = Fence(self.client, clock)
        self.leadership = LeaseLeadership(
            "ns/l", self._elect, self.state, catch_up=self.catch_up, fence=self._fence, clock=clock
        )
        self.elector = self.leadership._elector = self._elect(self.leadership)
        self.binder = Binder(
            self.client, self.state, policy="binpack", seconds=600.0, leadership=self.leadership,
            clock=clock,
        )  # fmt: skip

    def _elect(self, leadership: LeaseLeadership) -> LeaderElector:
        return LeaderElector(
            self.client, "ns", "l", self.name,
            duration=DURATION, renew_every=2.0, clock=self.clock,
            on_change=leadership.on_lease_changed, can_act=leadership.can_lead, settled=leadership.is_settled,
        )  # fmt: skip

    def _reach(self, call: Request) -> None:
        if self.cut and call.headers["User-Agent"] == self.name:
            raise ConnectionRefusedError("cut")

    # Faults of an extender.

    def exchange_lease(self) -> None:
        """One exchange about the Lease, and the epoch begins if it can."""
        self.elector.step()
        self.leadership.step()

    def look_up(self) -> None:
        """A round of its upkeep."""
        self.state.expire_reservations()
        binder.confirm_bindings(
            self.state.overdue_bindings(), self._fence, self.state, self.leadership, clock=self.clock
        )

    def catch_up(self, still: Callable[[], bool]) -> bool:
        if self.cut or not still() or not self.reads():
            return False
        self._fresh()
        self._untold.clear()
        for pod in self.api.pods().values():
            self.state.set_pod(as_pod(pod))
        return True

    def hear(self) -> None:
        """The watch tells one thing."""
        self._untold += [as_pod(event["object"]) for event in self._fresh()]
        if self._untold:
            self.state.set_pod(self._untold.pop(0))

    def filter(self, name: str, *nodes: str) -> object:
        pod = self.api.pods()[name]
        pod_request = request.parse(pod)
        comes(self.state, name, pod_request, pod["metadata"]["resourceVersion"])
        return self.state.plan_pod(
            PlacementRequest(PodRef(f"uid-{name}", pod["metadata"]["namespace"], name), pod_request, nodes, "binpack")
        )

    def bind(self, name: str, node: str) -> str:
        namespace = self.api.pods()[name]["metadata"]["namespace"]
        return self.binder.bind(BindArgs(pod_name=name, pod_namespace=namespace, pod_uid=f"uid-{name}", node=node))
