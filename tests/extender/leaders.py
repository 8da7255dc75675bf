"""Extenders of one cluster by hand: each with its own state, Lease and binder, over one API server, on one clock.

Nothing runs by itself: a Lease is renewed, a watch tells and a term begins when the test says so.
"""

from collections.abc import Callable

from cardwise.core import assignment, names, request
from cardwise.core.assignment import Assignment
from cardwise.kube import errors
from cardwise.kube.lease import LeaderElector
from extender.binder import Binder
from extender.leadership import ByLease
from extender.placing import Ask
from extender.projection import PodRecord
from extender.requests import Requests
from extender.wire import BindArgs
from tests.extender.worlds import RUNNING, as_pod, as_quota, asking, state, with_cards
from tests.fakes.clock import FakeClock
from tests.kube.leases import Leases

DURATION = 15.0


class Api(Leases):
    """Pods, one Lease, and what each extender has been told of the pods."""

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, dict] = {}
        self.extenders: list[Extender] = []
        self.posts: list[tuple[str, str]] = []  # who, pod

    def create_pod(self, name: str, mem: int, *, namespace: str = "default", device_class: str = "") -> dict:
        self.pods[name] = asking(name, gpu_mem=mem, namespace=namespace, device_class=device_class)
        return self.pods[name]

    def bind(self, who: str, name: str, body: dict) -> None:
        self.posts.append((who, name))
        pod, spec = self.pods[name], self.lease["spec"]
        if int(body["metadata"]["annotations"][names.TERM].split("/")[3]) < spec["leaseTransitions"]:
            raise errors.Invalid(422, "Invalid", f"{names.TERM}: the term is over")  # as the chart's policy has it
        if pod["spec"].get("nodeName"):
            raise errors.Conflict(409, "Conflict", "already assigned to a node")
        metadata = pod["metadata"] | {"annotations": body["metadata"]["annotations"]}
        status = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {RUNNING: {}}}]}
        spec = pod["spec"] | {"nodeName": body["target"]["name"]}
        self.pods[name] = pod | {"metadata": metadata, "spec": spec, "status": status}
        for each in self.extenders:
            each.events.append(as_pod(self.pods[name]))

    def holder(self) -> str:
        """Who holds the Lease, "" for nobody."""
        return self.lease["spec"]["holderIdentity"]

    def given(self) -> dict[str, tuple[str, Assignment]]:
        """Node and cards of the bound pods."""
        found = {}
        for name, pod in self.pods.items():
            if pod["spec"].get("nodeName"):
                found[name] = pod["spec"]["nodeName"], assignment.decode(pod["metadata"]["annotations"])
        return found

    def over_full(self, mem: int) -> list[tuple[str, int]]:
        """Cards of `mem` MiB that were given away more than whole."""
        used: dict[tuple[str, int], int] = {}
        for node, made in self.given().values():
            for share in made.shares():
                used[node, share.index] = used.get((node, share.index), 0) + share.mem
        return [card for card, held in used.items() if held > mem]


class Extender:
    """One process. It is its own KubeClient; `cut`: its calls do not reach the API server."""

    def __init__(
        self, api: Api, name: str, clock: FakeClock, *, cards: dict[str, int], quota: dict | None = None
    ) -> None:
        self.api, self.name, self.clock = api, name, clock
        self.cut = False
        self.events: list[PodRecord] = []  # not told yet
        self.reads: Callable[[], bool] = lambda: True  # before it catches up; whether it can
        self.state = with_cards(state(clock), **cards)
        if quota is not None:
            self.state.set_quota(*as_quota(quota))
        self.leadership = ByLease("ns/l", self._elect, self.state, self.catch_up, clock)
        self.elector = self.leadership._elector = self._elect(self.leadership._on_change)
        self.requests = Requests()
        self.binder = Binder(
            self, self.state, self.requests, policy="binpack", seconds=600.0, leadership=self.leadership,
            clock=clock,
        )  # fmt: skip
        api.extenders.append(self)

    def _elect(self, on_change: Callable[[bool], None]) -> LeaderElector:
        return LeaderElector(
            self,
            "ns",
            "l",
            self.name,
            duration=DURATION,
            renew_every=2.0,
            clock=self.clock,
            on_change=on_change,
        )

    # As KubeClient.

    def _reach(self) -> None:
        if self.cut:
            raise errors.Unreachable("cut")

    def get(self, path: str, *, timeout: float) -> dict:
        self._reach()
        return self.api.get(timeout=timeout) if "/leases/" in path else self.api.pods[path.rsplit("/", maxsplit=1)[-1]]

    def create(self, path: str, body: dict, *, timeout: float) -> dict:
        self._reach()
        return self.api.create(path, body, timeout=timeout)

    def update(self, path: str, body: dict, *, timeout: float) -> dict:
        self._reach()
        return self.api.update(path, body, timeout=timeout)

    def request(self, method: str, path: str, *, body: dict, timeout: float) -> bytes:
        self._reach()
        self.api.bind(self.name, path.split("/")[-2], body)
        return b"{}"

    # What happens to it.

    def look(self) -> None:
        """One exchange about the Lease, and the term begins if it can."""
        self.elector.step()
        self.leadership.step()

    def catch_up(self, still: Callable[[], bool]) -> bool:
        if self.cut or not still() or not self.reads():
            return False
        self.events.clear()
        for pod in self.api.pods.values():
            self.state.set_pod(as_pod(pod))
        return True

    def hear(self) -> None:
        """The watch tells one thing."""
        if self.events:
            self.state.set_pod(self.events.pop(0))

    def filter(self, name: str, *nodes: str) -> object:
        pod = self.api.pods[name]
        asked = request.parse(pod)
        self.requests.put(f"uid-{name}", asked)
        return self.state.plan(Ask(f"uid-{name}", (pod["metadata"]["namespace"], name), asked, nodes, "binpack"))

    def bind(self, name: str, node: str) -> str:
        namespace = self.api.pods[name]["metadata"]["namespace"]
        args = BindArgs(pod_name=name, pod_namespace=namespace, pod_uid=f"uid-{name}", node=node)
        return self.binder.bind(args)
