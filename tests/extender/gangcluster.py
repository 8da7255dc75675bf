"""A cluster in one thread for tests of gangs: an API server, a kube-scheduler with its cache, and our state between.

Nothing happens by itself: the test calls each step. Waiting binds are kept in `binding` until their permit is decided,
    like the threads of the real server.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from cardwise.core.api import assignment, names, request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.request import Load
from cardwise.core.gangs.gangs import GangPatience, Member
from cardwise.core.gangs.gangstate import Gang, GangPlan
from cardwise.core.placement.holding import Holding
from cardwise.core.values.quantity import MiB, Percent
from cardwise.core.values.refusals import Refusal
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.cache.reservations import KnownBinding, Phase, Timeouts
from extender.gangs import podgroups
from extender.gangs.gangtypes import BindRefused, GangSettings, Permit
from extender.records import podinfo
from extender.records.nodeinfo import NodeRecord
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef
from extender.records.wire import FilterArgs
from extender.state import State
from tests.build import P100, container, extended_resource
from tests.extender.states import as_card
from tests.fakes.clock import FakeClock

GIB = 1 << 30
PREFERENCES = AnswerSettings(policy="binpack", one_best_node=True)


def member(
    name: str,
    gang: str = "g",
    minimum: int | None = 3,
    *,
    namespace: str = "default",
    gated: bool = True,
    created: int = 0,
    priority: int = 0,
    cpu: str = "1",
    node: str = "",
    selector: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    **resources: int,
) -> dict:
    """The manifest of a member after the webhook; without resources it requests no card."""
    main = container(**({"share": 1} | resources if resources else {}))
    if not resources:
        main["resources"]["limits"] = {names.FILTER_CALL_RESOURCE: "1", names.BIND_CALL_RESOURCE: "1"}
    main["resources"]["requests"] = {"cpu": cpu, "memory": "1Gi"}
    group_annotations = {names.GROUP_NAME: gang} | ({names.GROUP_NUM: str(minimum)} if minimum is not None else {})
    spec = {"containers": [main], "priority": priority} | ({"nodeSelector": selector} if selector else {})
    if gated:
        spec["schedulingGates"] = [{"name": names.GANG}]
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "creationTimestamp": f"2026-11-21T10:{created // 60:02}:{created % 60:02}Z",
            "labels": {names.GANG: gang},
            "annotations": group_annotations | (annotations or {}),
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    }


def single(name: str, *, created: int = 0, priority: int = 0, cpu: str = "1", **resources: int) -> dict:
    """The manifest of a pod in no gang."""
    pod = member(name, gated=False, created=created, priority=priority, cpu=cpu, **resources)
    pod["metadata"]["labels"], pod["metadata"]["annotations"] = {}, {}
    return pod


class NoPlan(dict[str, str], GangPlan):
    """An empty plan of a gang."""

    def release(self, uids: Iterable[str]) -> None:
        """Do nothing: the plan is empty."""


def reserve(state: State, node: str, mem: int) -> None:
    """Reserve MiB of the node's first card for a gang that comes before all pods of these tests."""
    gang = Gang("team-a", "g", NoPlan())
    gang.set_member(Member(uid="uid-g0", name="g0", priority=1), 0.0)
    with state.view() as ledger:
        known = ledger.node(node)
        assert known is not None
        share = CardShare(0, known.cards[0].uuid, MiB(mem), Percent(0), known.cards[0].mem)
        holding = Holding("uid-g0@", "", "g0", node, Assignment({"main": (share,)}), "gang reservation")
        state._cache.gang_cards.reserve(gang, [holding])


@dataclass(eq=False)
class Bind:
    """A bind call in progress."""

    pod: dict
    node: str
    hold: Permit | None
    posted: bool = False


@dataclass
class NodeSpec:
    cards: int
    cpu: int = 64
    labels: dict = field(default_factory=dict)
    mem: int = P100


def _node_record(spec: NodeSpec) -> NodeRecord:
    return NodeRecord(Load(spec.cpu * 1000, 512 * GIB, 500), node_labels=NodeLabelsAndTaints(spec.labels))


class World:
    def __init__(
        self,
        nodes: dict[str, int | NodeSpec],
        *,
        max_waiting: int = 100,
        core: int = 100,
        clock: FakeClock | None = None,
        **patience: float,
    ) -> None:
        self.clock = clock or FakeClock()
        self.nodes = {name: NodeSpec(spec) if isinstance(spec, int) else spec for name, spec in nodes.items()}
        self.patience = GangPatience(**patience)
        self.max_waiting = max_waiting
        self.core = core
        self.pods: dict[str, dict] = {}
        self.groups: dict[str, dict] = {}
        self.assumed: dict[str, str] = {}  # the scheduler's: node by pod name
        self.waiting: list[str] = []  # the scheduler's queue of unschedulable pods
        self.binding: list[Bind] = []
        self.errors: list[tuple[str, str]] = []
        self.evicted: list[str] = []
        self.unheard: dict[str, tuple[dict, str, dict]] = {}  # by pod name, Bindings in progress without a response
        self.budget = False  # a PodDisruptionBudget keeps all pods: evictions are refused
        self.partly: list[str] = []
        self.restart()

    # The extender.

    def restart(self) -> None:
        """Let another process take over, with the state of the API server."""
        for bind in getattr(self, "binding", []):
            self.unassume(bind.pod)
        self.binding = []
        self.unheard.clear()  # an epoch begins: none of a former one lands any more (`fence`)
        settings = GangSettings(patience=self.patience, max_waiting=self.max_waiting)
        patience = Timeouts(reservation=30.0, terminating=0.0, confirmation=75.0)
        self.state = State(clock=self.clock, timeouts=patience, gang_settings=settings, core=self.core)
        for name, spec in self.nodes.items():
            self.state.set_node(name, _node_record(spec))
            for i in range(spec.cards):
                self.state.set_card(*as_card(extended_resource(i, node=name, mem=spec.mem)))
        for group in self.groups.values():
            self._tell_group(group)
        for pod in self.pods.values():
            self.show_pod(pod)
        self.state.forget_plans()
        self.state.gangs.plan_partly_bound_gangs()

    def add_node(self, name: str, spec: NodeSpec) -> None:
        self.nodes[name] = spec
        self.state.set_node(name, _node_record(spec))
        for i in range(spec.cards):
            self.state.set_card(*as_card(extended_resource(i, node=name, mem=spec.mem)))

    def show_pod(self, pod: dict) -> None:
        key, record = podinfo.decode_pod(json.dumps(pod).replace(": ", ":").encode())
        assert isinstance(record, PodRecord), key
        self.state.set_pod(record)

    def keep(self) -> None:
        """Run a pass of the controller: gates, timeouts, evictions, and the statuses of PodGroups."""
        work = self.state.gangs.step()
        self.state.gangs.plan_waiting()
        for pod in work.ungate:
            stored = self.pods.get(pod.name)
            if stored is not None and stored["spec"].pop("schedulingGates", None):
                self.show_pod(stored)
        for pod, _ in work.evict:
            if not self.budget:
                self.evicted.append(pod.name)
                self.delete(pod.name)
        self.tell_groups()

    def tell_groups(self) -> None:
        for view in self.state.gangs.views():
            key = f"{view.namespace}/{view.name}"
            if key not in self.groups and view.minimum and view.has_minimum_from_member:
                self.groups[key] = podgroups.automatic_group(view)
            if key in self.groups:
                self.groups[key]["status"] = {"phase": str(view.phase)}
                self._tell_group(self.groups[key])
        for key in [
            key for key, group in self.groups.items() if names.AUTO_LABEL in group["metadata"].get("labels", {})
        ]:
            if key not in {f"{view.namespace}/{view.name}" for view in self.state.gangs.views()}:
                del self.groups[key]
                self.state.gangs.set_group(key, None)

    def put_group(self, name: str, namespace: str = "default", **spec: int) -> None:
        key = f"{namespace}/{name}"
        self.groups[key] = {"metadata": {"namespace": namespace, "name": name}, "spec": spec}
        self._tell_group(self.groups[key])

    def _tell_group(self, group: dict) -> None:
        key, record = podgroups.decode_group(json.dumps(group).encode())
        self.state.gangs.set_group(key, record.group)

    # The API server.

    def create(self, *pods: dict) -> None:
        for pod in pods:
            self.pods[pod["metadata"]["name"]] = pod
            self.show_pod(pod)

    def delete(self, *pods: str) -> None:
        for name in pods:
            pod = self.pods.pop(name)
            if pod["spec"].get("nodeName"):  # its containers have ended, as its last event says
                pod["metadata"]["deletionTimestamp"] = "2026-11-21T11:00:00Z"
                pod["status"]["containerStatuses"] = [{"name": "main", "state": {"terminated": {}}}]
            _, record = podinfo.decode_pod(json.dumps(pod).replace(": ", ":").encode())
            self.state.remove_pod(record)
            self.assumed.pop(name, None)
            if name in self.waiting:
                self.waiting.remove(name)

    def finish(self, name: str, phase: str = "Succeeded") -> None:
        self.pods[name]["status"] = {"phase": phase}
        self.assumed.pop(name, None)
        self.show_pod(self.pods[name])

    def terminate(self, name: str) -> None:
        self.pods[name]["metadata"]["deletionTimestamp"] = "2026-11-21T11:00:00Z"
        self.show_pod(self.pods[name])

    def bound(self) -> dict[str, str]:
        """By name of a bound pod, its node."""
        return {name: pod["spec"]["nodeName"] for name, pod in self.pods.items() if pod["spec"].get("nodeName")}

    def unbound_shares(self) -> int:
        """The shares in the ledger without a bound pod."""
        with self.state.view() as ledger:
            return sum(len(holding.assignment.shares()) for holding in ledger.holdings() if holding.phase_name)

    def over_full(self) -> list[str]:
        with self.state.view() as ledger:
            return ledger.violations()

    # kube-scheduler.

    def schedulable(self) -> list[str]:
        """Pods in its queues, the oldest first."""
        under_way = {bind.pod["metadata"]["name"] for bind in self.binding}
        pods = [
            pod
            for name, pod in self.pods.items()
            if not pod["spec"].get("nodeName")
            and not pod["spec"].get("schedulingGates")
            and name not in under_way
            and not pod["metadata"].get("deletionTimestamp")
            and pod["status"]["phase"] == "Pending"
        ]
        pods.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["creationTimestamp"]))
        return [pod["metadata"]["name"] for pod in pods]

    def offered(self, pod: dict) -> list[str]:
        """The nodes that pass the scheduler's own filters: selector and CPU, with assumed pods."""
        selector = pod["spec"].get("nodeSelector") or {}
        wanted = _cpu(pod)
        return [
            name
            for name, spec in self.nodes.items()
            if selector.items() <= spec.labels.items() and self._cpu_left(name, spec) >= wanted
        ]

    def _cpu_left(self, node: str, spec: NodeSpec) -> float:
        there = {
            name: pod
            for name, pod in self.pods.items()
            if (pod["spec"].get("nodeName") or self.assumed.get(name)) == node
            and pod["status"]["phase"] not in names.FINISHED_PHASES
        }
        return spec.cpu - sum(_cpu(pod) for pod in there.values())

    def filter(self, name: str) -> tuple[list[str], str]:
        """Call filter. Returns the feasible nodes, and the text of the refusal."""
        pod = self.pods[name]
        nodes, nominated = self.offered(pod), pod["status"].get("nominatedNodeName")
        if not nodes:
            return [], "in-tree"
        if nominated in nodes:  # which it tries first, and alone
            nominated_nodes, _ = self._call_filter(pod, [nominated])
            if nominated_nodes:
                return nominated_nodes, ""
        return self._call_filter(pod, nodes)

    def _call_filter(self, pod: dict, nodes: list[str]) -> tuple[list[str], str]:
        answer = verbs.filter_nodes(self.state, PREFERENCES, FilterArgs(pod=pod, node_names=nodes))
        texts = {*answer.failed_nodes.values(), *answer.failed_and_unresolvable_nodes.values(), answer.error} - {""}
        return list(answer.node_names or []), "; ".join(sorted(texts))

    def schedule(self, name: str) -> str:
        """Run a scheduling cycle for the pod: filter, assume, and start bind. Returns why it was refused, or ""."""
        # The scheduler has timed out on an earlier call, whose thread continues.
        self.binding = [
            bind
            for bind in self.binding
            if bind.pod["metadata"]["name"] != name or (bind.hold is not None and bind.hold.allowed)
        ]
        nodes, refusal = self.filter(name)
        if not nodes:
            return refusal
        pod = self.pods[name]
        self.assumed[name] = nodes[0]
        self.begin_bind(pod, nodes[0])
        return ""

    def begin_bind(self, pod: dict, node: str) -> None:
        answer = self.state.gangs.request_permit(pod["metadata"]["uid"], node)
        if isinstance(answer, BindRefused):
            self._fail(pod, answer.reason)
        else:
            self.binding.append(Bind(pod, node, answer if isinstance(answer, Permit) else None))

    def unassume(self, pod: dict) -> None:
        self.assumed.pop(pod["metadata"]["name"], None)

    def _fail(self, pod: dict, message: str) -> None:
        self.unassume(pod)
        self.errors.append((pod["metadata"]["name"], message))

    def settle(self, *, land: bool = True, lost: bool = False, only: str = "") -> None:
        """Let threads whose permits are decided continue: they post, or return an error.

        lost: whether the responses get lost."""
        for bind in list(self.binding):
            name = bind.pod["metadata"]["name"]
            if (only and name != only) or (bind.hold is not None and not bind.hold.done.is_set()):
                continue
            self.binding.remove(bind)
            if bind.hold is not None and not bind.hold.allowed:
                self._fail(bind.pod, bind.hold.reason)
            elif not self.post(bind, land=land, lost=lost):
                self.unassume(bind.pod)

    def post(self, bind: Bind, *, land: bool = True, lost: bool = False) -> bool:
        """Post the Binding of a permitted member, as the binder does. Returns whether it was permitted."""
        meta = bind.pod["metadata"]
        uid, name = meta["uid"], meta["name"]
        pod_request = request.parse(bind.pod)
        begun = self.state.assume(PodRef(uid, meta["namespace"], name), pod_request, bind.node, "binpack", epoch=0)
        if isinstance(begun, Refusal | KnownBinding):
            self.errors.append((name, str(begun)))
            return False
        chosen = begun.assignment
        meta = bind.pod["metadata"]
        written = assignment.encode(chosen, assume_time_ns=1) if chosen is not None else {}
        if lost:
            self.unheard[name] = bind.pod, bind.node, written
            self.state.record_binding_outcome(uid, Phase.UNCONFIRMED)
            return True
        self.unheard.pop(name, None)  # one of the two lands, or the pod is another by now
        gone = self.pods.get(name) is not bind.pod or meta.get("deletionTimestamp") or bind.pod["spec"].get("nodeName")
        if gone or not land:
            self.state.record_binding_outcome(uid, None)
            return False
        self._bind(self.pods[name], bind.node, written)
        self.state.record_binding_outcome(uid, Phase.ACCEPTED)
        self.show_pod(self.pods[name])
        return True

    def _bind(self, pod: dict, node: str, written: dict) -> None:
        pod["metadata"]["annotations"] |= written
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}

    def land(self, name: str) -> None:
        """Execute a Binding whose response was lost."""
        pod, node, written = self.unheard.pop(name)
        if self.pods.get(name) is pod and not pod["metadata"].get("deletionTimestamp") and name not in self.bound():
            self._bind(pod, node, written)
            self.show_pod(pod)

    def look_up(self) -> None:
        """Look up unconfirmed Bindings; a Binding that has not landed by then never will."""
        self.state.expire_reservations()
        for holding in self.state.overdue_bindings():
            self.unheard.pop(holding.name, None)
            pod = self.pods.get(holding.name)
            exists = pod is not None and pod["metadata"]["uid"] == holding.uid
            self.state.on_lookup(holding.uid, bound=exists and holding.name in self.bound(), exists=exists)

    def run(self, rounds: int = 1, *, seconds: float = 1.0) -> dict[str, str]:
        """Run a fair scheduler: every pod once per pass, the controller in between. Returns the refusals of the last
        pass.
        """
        refusals: dict[str, str] = {}
        for _ in range(rounds):
            self.keep()
            refusals = {}
            for name in self.schedulable():
                if name in self.pods and not self.pods[name]["spec"].get("nodeName"):
                    refusal = self.schedule(name)
                    if refusal:
                        refusals[name] = refusal
                    self.settle()
            self.clock.advance(seconds)
        return refusals

    def phase(self, gang: str = "g", namespace: str = "default") -> str:
        views = {(view.namespace, view.name): view for view in self.state.gangs.views()}
        return str(views[namespace, gang].phase) if (namespace, gang) in views else ""

    def reason(self, gang: str = "g") -> str:
        return next(view.reason for view in self.state.gangs.views() if view.name == gang)


def _cpu(pod: dict) -> float:
    return sum(float(part["resources"]["requests"]["cpu"]) for part in pod["spec"]["containers"])
