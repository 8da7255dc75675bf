"""A simulated cluster around whole extenders; it observes only their calls with kube-scheduler and the API server.

A `World` has the API server of the tests, a kube-scheduler, kubelets and one or two extenders, each with all its
threads, on one clock (`fakes/turnclock.py`). What happens in it is a list of steps with plain arguments, a *history*: a
machine that draws steps writes one (`test_blackbox.py`), and `replay` executes it again, with any extender that `Build`
can make, and returns the bound pods with their nodes. A step that finds no object does nothing.

The `Judge` sees the objects of the API server and the containers on the nodes. It asserts the rules of the
architecture.
"""

import contextlib
import io
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import structlog
from prometheus_client import CollectorRegistry

from cardwise.clock import Clock
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.http import httpcalls
from extender.process import Extender, ExtenderSettings
from tests.build import (
    asking,
    budget,
    build_released_lease,
    extended_resource,
    gpu_quota,
    node,
    pod_group,
    reported_share,
    resource_class,
)
from tests.fakes.apiobjects import Refused, copied
from tests.fakes.apiserver import ApiServer, Fault, Request
from tests.fakes.turnclock import Program, TurnClock
from tests.property.judge import Given, Judge, asks, gang_of, is_over, labels_of, node_of, path_of, read_binding

History = list[Json]

GUARDED = {"guarded": "yes"}  # labels of pods that disruption budgets protect
TAKING = ("Ready", "Off")  # states of MPS in which a card takes pods
LEASE = paths.leases(names.NAMESPACE, names.LEASE)
DURATION = 5.0  # of the Lease
FILTER_SECONDS = 1.0  # for which kube-scheduler waits
LAG_SECONDS = 20.0  # the maximum lag of a watch of other objects than pods; less than `terminating_seconds`
TROUBLES = {
    "arrives", "away", "fails", "forget", "is_cut_off", "is_interrupted", "is_killed", "lag", "scheduler_restarts",
    "stands", "stands_still", "starts", "stops", "watches_end",
}  # fmt: skip
QUIET_ROUNDS = 150  # of ten seconds each, in which all pods that fit must be placed: a gang may keep cards for long

SETTINGS = ExtenderSettings(
    policy="binpack", one_best_node=True, headroom=0, max_clients=None, core_overcommit=100, bind_deadline=4.0,
    max_gang_permit_seconds=300.0, gang_reserve_seconds=60.0,
    namespace=names.NAMESPACE, lease_duration=DURATION, no_lease=False,
)  # fmt: skip


class Whole(Protocol):
    """An extender with the same parts as in its process."""

    def app(self, registry: CollectorRegistry) -> httpcalls.WsgiApp: ...
    def start(self) -> None: ...
    def stopping(self) -> None: ...
    def stop(self) -> None: ...


Build = Callable[[KubeClient, Clock, ExtenderSettings], Whole]


def today(client: KubeClient, clock: Clock, settings: ExtenderSettings) -> Whole:
    return Extender(client, settings, max_waiting=64, clock=clock, lease_clock=clock)


@dataclass(eq=False)
class Process:
    """An extender that runs."""

    program: Program
    whole: Whole
    app: httpcalls.WsgiApp


@dataclass
class Card:
    """A card of a node.

    there: whether it has an ExtendedResource.
    mps: its state; "" if the node has no MPS manager."""

    mem: int
    model: str = "P100"
    mps: str = ""
    healthy: bool = True
    cordoned: bool = False
    there: bool = True

    @property
    def usable(self) -> bool:
        """Whether it takes new shares."""
        return self.healthy and self.there and not self.cordoned and self.mps in ("", *TAKING)


@dataclass
class Machine:
    """A node.

    known: whether it has a Node object."""

    cards: list[Card]
    known: bool = True
    cordoned: bool = False


@dataclass
class World:
    """Steps are its public methods up to `quiet`; each is called by its name, by `do`."""

    seed: int
    nodes: dict[str, list[int | Json]]  # of each card the MiB, or the fields of `Card`
    quotas: dict[str, Json] = field(default_factory=dict)  # by namespace, the one entry of its GPUQuota
    settings: Json = field(default_factory=dict)  # other than in `SETTINGS`
    classes: dict[str, list[str]] = field(default_factory=dict)  # models of each ResourceClass
    build: Build = today
    judges: ClassVar[type[Judge]] = Judge

    def __post_init__(self) -> None:
        world = {"seed": self.seed, "nodes": self.nodes, "quotas": self.quotas, "settings": self.settings}
        self.history: History = [copied(world | {"classes": self.classes})]
        self.clock = TurnClock(self.seed)
        self.api = ApiServer(self.clock)
        self.machines = {
            name: Machine([Card(**card) if isinstance(card, dict) else Card(card) for card in cards])
            for name, cards in self.nodes.items()
        }
        self.running: dict[str, tuple[str, Given]] = {}  # by UID: node, and what its containers use
        self.ghosts: dict[str, str] = {}  # name by UID, of what runs without a pod
        self.late: list[Request] = []  # Bindings that are delayed on their way
        self.standing = 0  # how many of the next Bindings will be delayed
        self.behind = False  # whether the admission policy does not see the new epoch yet
        self.numbers = 0
        self.calls: dict[str, Json] = {}  # the last bind call of each pod
        self.connected = 0  # the extender to which the scheduler is connected
        self.cut: set[str] = set()  # programs that do not reach the API server
        self.lags: dict[str, float] = {}  # collections, and since when
        self.under_way: set[str] = set()  # pods that the scheduler works on
        self.in_cycle: set[str] = set()  # of these, pods that have no node yet: the scheduler looks at one at a time
        self.processes: list[Process | None] = []
        self.errors: list[Any] = []
        self.troubled = -math.inf  # when the last fault ended
        self.broken: Exception | None = None  # the rule that the last step has broken

    def do(self, do: str, **arguments: Any) -> None:
        """Execute the step and its immediate consequences; then all rules must hold."""
        self.history.append({"do": do, **arguments})
        if do in TROUBLES:
            self.troubled = math.inf
        try:
            getattr(self, do)(**arguments)
            self.clock.run()
            self.judge.check()
        except Exception as error:
            self.broken = error
            raise

    @contextlib.contextmanager
    def open(self) -> Iterator["World"]:
        chance = random.getstate()
        random.seed(self.seed)
        structlog.configure(
            processors=[self._log],
            wrapper_class=structlog.make_filtering_bound_logger(40),
            logger_factory=structlog.ReturnLoggerFactory(),
        )
        try:
            with self.clock.threads():
                self._begin()
                yield self
        finally:
            random.setstate(chance)
        assert not self.clock.failed, self.clock.failed

    def _log(self, _logger: object, _method: str, event: Json) -> str:
        """An error in an extender's log is a fault."""
        self.errors.append(event)
        return ""

    def _begin(self) -> None:
        metadata = {"name": names.LEASE, "namespace": names.NAMESPACE}
        self.api.write_object(paths.leases(), {"metadata": metadata, "spec": build_released_lease(self.clock.wall())})
        for name in self.machines:
            self._put_node(name)
            self._put_cards(name)
        for name, models in self.classes.items():
            self.api.write_object(paths.resourceclasses(), resource_class(name, model=models))
        for namespace in ("default", "team"):
            guard = budget("guard", allowed=0, selector={"matchLabels": GUARDED}, namespace=namespace)
            self.api.write_object(paths.poddisruptionbudgets(), guard)
        for namespace, hard in self.quotas.items():
            self.api.write_object(paths.gpuquotas(), gpu_quota(hard, namespace=namespace))
        self.judge = self.judges(self)
        self.api.admission.append(self._check_fencing)
        self.api.before_request(self._reach, times=math.inf)
        self.api.before_request(self._stand, "create", "*/binding", times=math.inf)
        self.api.after_request(lambda _: self.clock.pause(), times=math.inf)
        self.scheduler = Program("kube-scheduler")
        self._cycle = threading.Condition()  # of the scheduler, which looks at one pod at a time
        self._busy = False
        self.processes = [None, None]
        self._start(0)
        self.clock.run(1, stride=0.25)

    # The API server.

    def _check_fencing(self, call: Request) -> None:
        """The admission policy of the chart: it refuses Bindings of an ended epoch."""
        if call.path.endswith("/binding") and not self.behind:
            epoch = call.body["metadata"]["annotations"].get(names.LEADER_EPOCH, "")
            lease = self.api.get(LEASE)
            if epoch and lease is not None and int(epoch.split("/")[3]) < lease["spec"]["leaseTransitions"]:
                raise Refused(422, f"{names.LEADER_EPOCH}: the leader epoch is over")

    def _reach(self, call: Request) -> None:
        self.clock.pause()
        if call.headers["User-Agent"] in self.cut:
            raise ConnectionRefusedError("cut")

    def _stand(self, call: Request) -> None:
        if self.standing:
            self.standing -= 1
            self.late.append(call)
            self.clock.sleep(min(call.timeout or 1.0, 1.0))
            raise TimeoutError("it stands somewhere")

    def fails(self, verb: str, path: str, times: int, **fault: Any) -> None:
        """Let the next requests of this kind fail."""
        self.api.fault(Fault(**fault), verb, path, times)

    def stands(self, times: int) -> None:
        """Delay the next Bindings so long that their senders time out."""
        self.standing = times

    def arrives(self, choice: int, behind: bool) -> None:
        """Let a delayed Binding arrive."""
        if self.late:
            call = self.late.pop(choice % len(self.late))
            self.behind, standing, self.standing = behind, self.standing, 0
            with contextlib.suppress(errors.KubeError):
                self.api.client(user_agent="late").request("POST", call.path, body=call.body)
            self.behind, self.standing = False, standing

    def lag(self, collection: str) -> None:
        self.api.hold(collection)
        self.lags.setdefault(collection, self.clock.now())

    def catch_up(self) -> None:
        self.api.let_through(*self.lags)
        self.lags.clear()

    def watches_end(self, ending: str, collection: str) -> None:
        self.api.end_watches(ending, collection)

    def forget(self) -> None:
        """Compact the history: earlier resourceVersions are too old."""
        self.api.compact()

    def away(self, seconds: float) -> None:
        """Let the API server be unreachable for this time."""
        self.api.down = True
        self.clock.run(seconds, stride=0.5)
        self.api.down = False

    def passes(self, seconds: float, stride: float) -> None:
        """Let time pass. Changes by nodes and administrators reach the extenders in time."""
        for collection, since in list(self.lags.items()):
            if self.clock.now() + seconds > since + LAG_SECONDS and collection != paths.pods():
                self.api.let_through(collection)
                del self.lags[collection]
        self.clock.run(seconds, stride)

    # Users.

    def creates(self, **pod: Any) -> None:
        """Create a pod with this request; see `_asking`."""
        self.numbers += 1
        self.api.write_object(paths.pods(), self._asking(f"p{self.numbers}", **pod))

    def _asking(
        self,
        name: str,
        *,
        namespace: str = "default",
        priority: int = 0,
        split: int = 1,
        gang: str = "",
        minimum: int = 0,
        resource_class: str = "",
        mps: str = "",
        exclusive: bool = False,
        guarded: bool = False,
        **amounts: int,
    ) -> Json:
        """A pod's manifest after the webhook.

        split: over how many cards the share is split.
        minimum: members of the gang; 0 if a PodGroup sets it.
        exclusive: whether the pod shares cards within its namespace only.
        guarded: whether a disruption budget protects the pod.
        """
        uid = f"uid-{name}"
        if amounts or gang:
            pod = asking(name, uid=uid, namespace=namespace, resource_class=resource_class, **amounts)
        else:
            pod = _plain(name)
        metadata, spec = pod["metadata"], pod["spec"]
        limits = spec["containers"][0]["resources"]
        if resource_class and "whole_gpu" in amounts:
            limits["limits"][names.CLASS_PREFIX + resource_class] = str(amounts["whole_gpu"])
        if gang:
            metadata["labels"] = {names.GANG: gang}
            metadata["annotations"][names.GROUP_NAME] = gang
            if minimum:
                metadata["annotations"][names.GROUP_NUM] = str(minimum)
            spec["schedulingGates"] = [{"name": names.GANG}]
            if not amounts:
                limits["limits"] = {names.FILTER_CALL_RESOURCE: "1", names.BIND_CALL_RESOURCE: "1"}
        if split > 1:
            metadata["annotations"][names.GPU_COUNTS] = f"main={split}"
        if mps:
            metadata["annotations"][names.ISOLATION] = mps
        if exclusive:
            metadata["annotations"][names.SHARE_WITH] = "namespace"
        if guarded:
            metadata["labels"] = metadata.get("labels", {}) | GUARDED
        limits["requests"] = {"cpu": "1", "memory": "1Gi"}
        metadata["creationTimestamp"] = self.clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")
        spec["priority"] = priority
        pod["status"] = {"phase": "Pending"}
        return pod

    def deletes(self, choice: int | str) -> None:
        pod = self._pick(self.pods(), choice)
        if pod is not None:
            with contextlib.suppress(errors.KubeError):
                self.api.client(user_agent="user").delete(path_of(pod))

    def deletes_by_force(self, choice: int | str) -> None:
        """Delete by force a pod whose containers run, if there is one. They continue to run, and their node reports
        them.
        """
        pods = self.pods()
        pod = self._pick([other for other in pods if other["metadata"]["uid"] in self.running] or pods, choice)
        if pod is not None:
            uid = pod["metadata"]["uid"]
            if uid in self.running:
                self.ghosts[uid] = pod["metadata"]["name"]
                self._put_cards(self.running[uid][0])
            self.api.remove(path_of(pod))

    def touches(self, choice: int | str) -> None:
        """Change a label of a pod."""
        pod = self._pick(self.pods(), choice)
        if pod is not None:
            self.api.edit(path_of(pod), metadata={"labels": {"changed": str(self.api.revision)}})

    def groups(self, gang: str, minimum: int, namespace: str = "default") -> None:
        """Create a PodGroup."""
        self.api.write_object(paths.podgroups(), pod_group(gang, minimum, namespace=namespace))
        self.judge.minimums[namespace, gang] = minimum

    def quota_changes(self, namespace: str, hard: Json) -> None:
        self.api.write_object(paths.gpuquotas(), gpu_quota(hard, namespace=namespace))
        self.judge.quota(namespace, hard)

    # Nodes.

    def node_comes_or_goes(self, node: str) -> None:
        machine = self.machines[node]
        machine.known = not machine.known
        self.judge.cards_change(node)
        if machine.known:
            self._put_node(node)
        else:
            self.api.remove(paths.nodes(node))

    def node_is_cordoned(self, node: str) -> None:
        machine = self.machines[node]
        machine.cordoned = not machine.cordoned
        if machine.known:
            self._put_node(node)

    def card_changes(self, node: str, index: int, change: str) -> None:
        """Toggle a property of the card: "healthy", "cordoned", "there" or "mps"."""
        card = self._pick(self.machines[node].cards, index)
        if change != "mps":
            setattr(card, change, not getattr(card, change))
        elif card.mps:
            card.mps = "Ready" if card.mps == "Fault" else "Fault"
        self.judge.cards_change(node)
        self._put_cards(node)

    def runs(self, choice: int | str) -> None:
        """Let the kubelet start a pod."""
        waiting = [pod for pod in self.pods() if node_of(pod) and pod["status"]["phase"] == "Pending"]
        pod = self._pick([other for other in waiting if not other["metadata"].get("deletionTimestamp")], choice)
        if pod is not None:
            status = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
            self.running[pod["metadata"]["uid"]] = node_of(pod), read_binding(pod)
            self.api.edit(path_of(pod), status=status)

    def ends(self, choice: int | str) -> None:
        """Let the containers of a pod end: of a terminating, completed or deleted pod."""
        bound = [pod for pod in self.pods() if node_of(pod) and not is_over(pod)]
        ended = self._pick([*bound, *self.ghosts], choice)
        if isinstance(ended, str):
            self._end(ended)
        elif ended is not None:
            uid = ended["metadata"]["uid"]
            leaving = ended["metadata"].get("deletionTimestamp")
            if leaving or uid in self.running:
                self._finish_containers(ended)

    def _finish_containers(self, pod: Json) -> None:
        """End the pod's containers, and let the kubelet report it."""
        self.running.pop(pod["metadata"]["uid"], None)
        state = {"name": "main", "state": {"terminated": {}}}
        self.api.edit(path_of(pod), status={"phase": "Succeeded", "containerStatuses": [state]})
        if pod["metadata"].get("deletionTimestamp"):
            self.api.remove(path_of(pod))

    def clears(self) -> None:
        """Delete all pods, until their objects are deleted."""
        for pod in self.pods():
            self.deletes(pod["metadata"]["name"])
        self.ends_deleted()

    def ends_deleted(self) -> None:
        """End the containers of all terminating and deleted pods."""
        for pod in self.pods():
            if node_of(pod) and pod["metadata"].get("deletionTimestamp"):
                self._finish_containers(pod)
        for ghost in list(self.ghosts):
            self._end(ghost)

    def _end(self, ghost: str) -> None:
        node, _ = self.running.pop(ghost)
        del self.ghosts[ghost]
        self._put_cards(node)

    def _put_node(self, name: str) -> None:
        spec = {"unschedulable": True} if self.machines[name].cordoned else {}
        has = {"cpu": "64", "memory": "512Gi", "pods": "110"}
        self.api.write_object(paths.nodes(), node(name, status={"allocatable": has}, **spec))

    def _put_cards(self, node: str) -> None:
        for index, card in enumerate(self.machines[node].cards):
            shares = [
                reported_share(uid, share.mem) | {"corePercent": share.core, "whole": share.whole}
                for uid in self.ghosts
                for node_name, binding in [self.running[uid]]
                for share in binding.shares
                if node_name == node and share.index == index
            ]
            health = "Healthy" if card.healthy else "Unhealthy"
            report = extended_resource(
                index,
                node=node,
                mem=card.mem,
                model=card.model,
                health=health,
                reported=shares,
                unschedulable=card.cordoned,
            )
            if card.mps:
                report["status"]["mps"] = {"mode": "card", "state": card.mps, "multiUser": True, "maxClients": 48}
            path = paths.extendedresources(report["metadata"]["name"])
            before = self.api.get(path)
            if not card.there:
                self.api.remove(path)
            else:
                if before is not None:  # fields of other writers in its status stay
                    report["status"] = before["status"] | report["status"]
                self.api.write_object(paths.extendedresources(), report)

    # Extenders.

    def starts(self, extender: int) -> None:
        if self.processes[extender] is None:
            self._start(extender)

    def _start(self, extender: int) -> None:
        program = Program(f"extender-{extender}")
        with self.clock.running_as(program):
            client = self.api.client(user_agent=program.name, clock=self.clock)
            whole = self.build(client, self.clock, replace(SETTINGS, **self.settings))
            self.processes[extender] = Process(program, whole, whole.app(CollectorRegistry()))
            whole.start()

    def is_killed(self, extender: int) -> None:
        process = self.processes[extender]
        if process is not None:
            self.processes[extender] = None
            self.clock.kill(process.program)

    def stops(self, extender: int) -> None:
        """Stop an extender with SIGTERM."""
        process = self.processes[extender]
        if process is not None:
            process.program.still = False

            def end() -> None:
                process.whole.begin_stop()
                process.whole.stop()

            self.clock.start(process.program, end)
            self.clock.run(8, stride=0.25)
            self.is_killed(extender)

    def is_cut_off(self, extender: int, cut: bool) -> None:
        """Block the extender's requests to the API server; open watches continue."""
        name = f"extender-{extender}"
        self.cut = self.cut | {name} if cut else self.cut - {name}

    def stands_still(self, extender: int, still: bool) -> None:
        """Pause the extender, as SIGSTOP does, and let it continue."""
        process = self.processes[extender]
        if process is not None:
            process.program.still = still

    # kube-scheduler.

    def tries(self, choice: int | str, to: int, whole: bool = False) -> None:
        """Let kube-scheduler try a pod.

        to: the extender that it calls.
        whole: whether it sends whole Nodes."""
        waiting = [pod for pod in self.pods() if self.waits(pod)]
        pod = self._pick(waiting, choice)
        if pod is not None:
            self._try(pod, to, whole=whole)

    def is_interrupted(self, choice: int, to: int, turns: int, kill: bool) -> None:
        """Pause or kill the extender in the middle of a try."""
        self.tries(choice, to)
        self.clock.take_turns(turns)
        reached = (self.connected + to) % 2
        if kill:
            self.is_killed(reached)
        else:
            self.stands_still(reached, still=True)

    def binds_again(self, choice: int, to: int) -> None:
        """Send a bind call a second time."""
        call = self._pick(sorted(self.calls), choice)
        if call is not None:
            self.clock.start(self.scheduler, lambda: self._call(to, "bind", self.calls[call]))

    def scheduler_restarts(self) -> None:
        self.clock.kill(self.scheduler)
        self.scheduler = Program("kube-scheduler")
        self.under_way.clear()
        self.in_cycle.clear()
        self._busy = False

    def waits(self, pod: Json) -> bool:
        """Whether the pod is in the scheduler's queues and requests GPUs."""
        meta, spec = pod["metadata"], pod["spec"]
        ready = not (spec.get("nodeName") or spec.get("schedulingGates") or meta.get("deletionTimestamp"))
        ours = asks(pod) or gang_of(pod)
        return bool(ready and not is_over(pod) and ours and meta["uid"] not in self.under_way)

    def _try(self, pod: Json, to: int, *, whole: bool = False) -> None:
        uid = pod["metadata"]["uid"]
        self.under_way.add(uid)
        self.in_cycle.add(uid)

        def try_pod() -> None:
            try:
                self._schedule(path_of(pod), uid, to, whole=whole)
            finally:
                self.under_way.discard(uid)

        self.clock.start(self.scheduler, try_pod)

    def _schedule(self, path: str, uid: str, to: int, *, whole: bool) -> None:
        with self._cycle:
            self.clock.wait_for(self._cycle, lambda: not self._busy, None)
            self._busy = True
        try:
            pod = self.api.get(path)
            node = self._choose(pod, to, whole=whole) if pod is not None and pod["metadata"]["uid"] == uid else ""
        finally:
            self._busy = False
            self.in_cycle.discard(uid)
        if node:
            meta = pod["metadata"]
            call = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": uid, "Node": node}
            self.calls[meta["name"]] = call
            self._call(to, "bind", call)

    def _choose(self, pod: Json, to: int, *, whole: bool) -> str:
        nodes = [entry for entry in self.api.all(paths.nodes()) if not entry["spec"].get("unschedulable")]
        there = [entry["metadata"]["name"] for entry in nodes]
        node_args = {"Nodes": {"items": nodes}, "NodeNames": None} if whole else {"Nodes": None, "NodeNames": there}
        if not nodes:
            return ""
        answer = self._call(to, "filter", {"Pod": pod, **node_args})
        if answer is None or answer["Error"]:
            return ""
        fitting = answer["NodeNames"] or []
        assert set(fitting) <= set(there)
        if not fitting:
            self._preempt(pod, to, {**answer["FailedNodes"]})
            return ""
        if len(fitting) > 1:
            args = {"Pod": pod, "Nodes": None, "NodeNames": fitting}
            scores = self._call(to, "prioritize", args) or []
            return max(fitting, key=lambda name: next((entry["Score"] for entry in scores if entry["Host"] == name), 0))
        return fitting[0]

    def _preempt(self, pod: Json, to: int, failed: dict[str, str]) -> None:
        """Let kube-scheduler preempt: it offers the pods of lower priority on each node that could help, and deletes
        the victims that the extender returns.
        """
        mine = pod["spec"]["priority"]
        lower = {
            other["metadata"]["uid"]: other
            for other in self.pods()
            if node_of(other) in failed and other["spec"].get("priority", 0) < mine and not is_over(other)
        }
        offer = {
            node: {
                "Pods": [{"UID": uid} for uid, other in lower.items() if node_of(other) == node],
                "NumPDBViolations": 0,
            }
            for node in failed
        }
        offer = {node: victims for node, victims in offer.items() if victims["Pods"]}
        if not offer:
            return
        args = {"Pod": pod, "NodeNameToMetaVictims": offer}
        answer = self._call(to, "preempt", args)
        chosen = (answer or {}).get("NodeNameToMetaVictims") or {}
        if not chosen:
            return
        stay = {
            other["metadata"]["uid"]
            for other in self.pods()
            if "guarded" in labels_of(other) and not other["metadata"].get("deletionTimestamp")
        }
        for victims in chosen.values():
            guarded = [other["UID"] for other in victims["Pods"] if other["UID"] in stay]
            assert victims["NumPDBViolations"] >= len(guarded), ("no word of disruption budgets", victims, guarded)
        node = min(chosen)
        if not all(other["UID"] in lower for other in chosen[node]["Pods"]):
            return  # a victim was deleted since, and the scheduler gives up
        client = self.api.client(user_agent="kube-scheduler")
        for other in chosen[node]["Pods"]:
            with contextlib.suppress(errors.KubeError):
                client.delete(path_of(lower[other["UID"]]))
        with contextlib.suppress(errors.KubeError):
            refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status = {"nominatedNodeName": node, "conditions": [refused]}
            client.patch(path_of(pod) + "/status", {"status": status}, "merge")

    def _call(self, to: int, verb: str, args: Json) -> Any:
        """The response; None if it does not arrive in time. The extender continues with a call that timed out.

        to: 0 for the connected extender. After an error the next connection is to the other one.
        """
        at = self.connected
        answer = self._post((at + to) % 2, verb, args)
        failed = answer is None or (isinstance(answer, dict) and answer.get("Error"))
        if failed and not to and self.connected == at:
            self.connected = 1 - at
        return answer

    def _post(self, to: int, verb: str, args: Json) -> Any:
        process = self.processes[to]
        if process is None:
            return None
        answers: list[tuple[str, bytes]] = []
        done = threading.Event()
        body = json.dumps(args).encode()
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": f"{names.EXTENDER_PREFIX}/{verb}",
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            httpcalls.ARRIVED_KEY: self.clock.now(),
            httpcalls.SLOW_KEY: verb == "bind",
        }

        def answer() -> None:
            try:
                statuses: list[str] = []
                parts = process.app(environ, lambda status, _: statuses.append(status))
                answers.append((statuses[0], b"".join(parts)))
            finally:
                done.set()

        self.clock.start(process.program, answer, verb)
        alone = self.settings.get("bind_deadline") is not None  # bind has its own stanza
        self.clock.wait(done, FILTER_SECONDS if verb != "bind" else 300.0 if alone else 5.0)
        if not answers or not answers[0][0].startswith("200"):
            return None
        return json.loads(answers[0][1])

    # The end.

    def calm(self, seconds: float) -> None:
        """Whether faults stopped long enough ago."""
        for rule in self.api._rules["fault"]:
            rule.end()
        self.standing = 0
        self.cut = set()
        self.catch_up()
        while self.late:
            self.arrives(0, behind=False)
        for extender, process in enumerate(self.processes):
            if process is not None:
                process.program.still = False
            elif not any(self.processes):
                self._start(extender)
        self.clock.run(seconds, stride=1.0)
        self.troubled = self.clock.now()

    def goes_first(self, high: str, low: str) -> None:
        """Pods were evicted for the pod `high`, so `low` must not get their cards."""
        pods = {pod["metadata"]["name"]: pod for pod in self.pods()}
        if high in pods and low in pods and pods[high]["status"].get("nominatedNodeName"):
            is_taken = not node_of(pods[high]) and node_of(pods[low]) and not self.judge.fit([pods[high]])
            assert not is_taken, f"{low} has the place for which others had gone for {high}"

    def quiet(self) -> None:
        """Stop all faults, and let all programs work: every pod that fits must be placed."""
        self.calm(0.0)
        for round_ in range(QUIET_ROUNDS):
            self.clock.run(10, stride=1.0 if round_ < 15 else 2.5)
            self._work()
            self.judge.check()
            if not self.judge.unplaced_pods():
                return
        raise AssertionError(f"it fits, and was not placed: {self.judge.unplaced_pods()}")

    def _work(self) -> None:
        """Let kubelets start and end containers, and the scheduler try every pod once."""
        self.ends_deleted()
        self.clock.run(0.5, stride=0.25)
        for pod in sorted(self.pods(), key=lambda other: -other["spec"].get("priority", 0)):
            if self.waits(pod):
                self._try(pod, 0)
                self.clock.run()
        # Without strides: a call that gives way for milliseconds would last as long as a stride. Its answer would come
        # too late, and so would the pods after it: members of a gang would not come to bind within the same seconds.
        while self.in_cycle:
            self.clock.run(0.1)

    # What there is.

    def pods(self) -> list[Json]:
        return self.api.all(paths.pods())

    def _pick(self, of: Sequence[Any], choice: int | str) -> Any:
        """Of pods also by the name."""
        if isinstance(choice, str):
            return next((pod for pod in of if isinstance(pod, dict) and pod["metadata"]["name"] == choice), None)
        return of[choice % len(of)] if of else None

    @property
    def bound_pods(self) -> list[Given]:
        """The bound pods, in the order of their Bindings."""
        return list(self.judge.bound_pods.values())


def replay(history: History, build: Build = today) -> list[Given]:
    """Execute the history again. Returns the bound pods."""
    first, *steps = history
    world = World(**first, build=build)
    with world.open():
        for step in steps:
            world.do(**step)
        return world.bound_pods


def _plain(name: str) -> Json:
    """A pod that requests no card."""
    name = name.replace("p", "plain", 1)
    container = {"name": "main", "resources": {}}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": {}},
        "spec": {"containers": [container]},
    }
