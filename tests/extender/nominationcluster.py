"""A cluster in which pods are nominated ahead: its events, the decisions of the nominator, and the
results of filter.
"""

import json
from collections.abc import Sequence
from typing import Any

from cardwise.core.api.request import Load
from cardwise.core.values.decoded import Json
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.cache.reservations import Timeouts
from extender.gangs import gangtypes
from extender.nomination.nominator import NominationOutcome, NominationSettings
from extender.records import nodeinfo
from extender.records.nodeinfo import PlacedPod
from extender.records.podinfo import PodRecord
from extender.records.wire import FilterArgs, FilterResult
from extender.state import State
from tests import build
from tests.build import asking, extended_resource
from tests.extender.states import as_card, as_pod
from tests.fakes.clock import FakeClock

PREFERENCES = AnswerSettings(policy="binpack", one_best_node=True)
ALWAYS = NominationSettings(above_nodes=0)
REFUSED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]


class World:
    """A world of nodes with one card each.

    outcomes: the outcomes of nominations."""

    def __init__(
        self, *nodes: str, settings: NominationSettings = ALWAYS, served: Sequence[str] = ("default-scheduler",)
    ) -> None:
        self.clock = FakeClock()
        of_gangs = gangtypes.GangSettings(max_waiting=8)
        self.state = State(clock=self.clock, timeouts=Timeouts(), nomination_settings=settings, gang_settings=of_gangs)
        self.outcomes: list[NominationOutcome] = []
        self.state.nominator.on_outcome = self.outcomes.append
        self.pods: dict[str, Json] = {}
        for node in nodes or ("n1",):
            self.node(node)
        for scheduler in served:
            self.state.nominator.add_scheduler(scheduler)

    def node(self, name: str, *, cards: int = 1, cpu: int = 64, labels: Json | None = None, **spec: object) -> None:
        allocatable = {"cpu": str(cpu), "memory": "512Gi", "pods": "100"}
        manifest = build.node(name, labels=labels, status={"allocatable": allocatable}, **spec)
        record = nodeinfo.decode_node(json.dumps(manifest).encode())
        assert record is not None
        self.state.set_node(*record)
        for i in range(cards):
            self.state.set_card(*as_card(extended_resource(i, node=name)))

    def full(self, node: str) -> None:
        """Let other pods use all CPU of the node."""
        self.state.set_pod_without_request(f"other/{node}", PlacedPod(node, Load(64_000, 0, 1)))

    def create(
        self,
        name: str,
        mem: int,
        *,
        priority: int = 0,
        created: str = "2026-11-21T10:00:00Z",
        cpu: str = "",
        namespace: str = "default",
        **spec: Any,
    ) -> Json:
        """Create a pending pod, and deliver its watch event."""
        pod = asking(name, namespace=namespace, gpu_mem=mem)
        pod["metadata"] |= {"resourceVersion": "7", "creationTimestamp": created}
        if cpu:
            pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}
        pod["spec"] |= {"priority": priority} | spec
        return self.show_pod(pod)

    def show_pod(self, pod: Json) -> Json:
        """Deliver the JSON as a watch event."""
        self.pods[pod["metadata"]["name"]] = pod
        self.state.set_pod(as_pod(pod))
        return pod

    def nominate_all(self) -> dict[str, str]:
        """Nominate all pods. Returns the node by pod, in the order of decisions."""
        nominated = {}
        again = True
        while again:
            again, nominee = self.state.nominator.nominate_next_pod()
            if nominee is not None:
                nominated[nominee.pod.name] = nominee.node
            self.clock.advance(0.6)  # past every pause
        return nominated

    def record(self, name: str) -> PodRecord:
        """The extender's record of the pod."""
        return as_pod(self.pods[name])

    def reserved(self) -> dict[str, str]:
        """The node by pod, for pods with cards."""
        with self.state.view() as ledger:
            holdings = [ledger.holding(pod["metadata"]["uid"]) for pod in self.pods.values()]
            return {holding.name: holding.node for holding in holdings if holding is not None}

    def filter(self, name: str, *nodes: str) -> list[str]:
        return self.answer(name, *nodes).node_names or []

    def answer(self, name: str, *nodes: str) -> FilterResult:
        args = FilterArgs(pod=self.pods[name], node_names=list(nodes or ["n1"]))
        return verbs.filter_nodes(self.state, PREFERENCES, args)

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.state.expire_reservations()
