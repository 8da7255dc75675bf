"""Preemption while watches are behind: kube-scheduler, its evictions, the nodes and both watches go on in any order.

Exactly as many pods go as cards are needed, whoever has seen what.
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from cardwise.core.api import assignment, request
from cardwise.core.api.request import Load
from cardwise.core.values.decoded import Json
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.cache.reservations import Assumed, Phase
from extender.placing import placing
from extender.records import wire
from extender.records.nodeinfo import NodeRecord
from extender.records.podref import PodRef
from extender.records.wire import FilterArgs
from extender.state import State
from tests.build import P100, asking, extended_resource
from tests.examples import examples
from tests.extender.states import as_card, as_pod, bound, make_state
from tests.fakes.clock import FakeClock

HALF, CARDS = P100 // 2, 2
LOW, HIGH = 10, 1000
PREFERENCES = AnswerSettings(policy="binpack", one_best_node=True)
SECONDS = 0.01  # that a step takes
FLUSH = 300.0  # seconds after which kube-scheduler tries a pod that still waits

Steps = Iterator[None]  # others may go on after each


class World:
    """Nodes of two cards with two pods of low priority each, and pods of high priority that come, a card for each."""

    def __init__(self, draw: random.Random, nodes: int, coming: int) -> None:
        self.draw = draw
        self.clock = FakeClock()
        self.clock.sleep = self._sleep
        self.state: State = make_state(self.clock)
        self.pods: dict[str, Json] = {}  # as the API server has them
        self.events: list[tuple[bool, Json]] = []  # of its watch: whether it is gone, and the pod
        self.seen = 0  # of these by the extender
        self.evicted: list[str] = []
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.scheduler = Scheduler(self)
        self.going_on: list[Steps] = []
        # How often each comes to its next step, in proportion.
        self._pace = {"watch": draw.choice([0.03, 0.3, 1.0]), "scheduler": draw.choice([1.0, 3.0])}
        uids = draw.sample(range(100), nodes * CARDS * 2)  # they decide between cards that are alike
        for node in self.nodes:
            self.state.set_node(node, NodeRecord(Load(64_000, 1 << 40, 100)))
            for card in range(CARDS):
                self.state.set_card(*as_card(extended_resource(card, node=node)))
        for number, uid in enumerate(uids):
            at, node = divmod(number, nodes)
            low = bound(f"low{number:02}", HALF, at % CARDS, node=self.nodes[node], uid=f"{uid:02}-{number}")
            low["spec"]["priority"] = LOW
            low["metadata"]["labels"] = {}
            self.put_pod(low)
        while self.seen < len(self.events):
            self._see()
        self.scheduler.see_all()
        self.coming = [f"high{i}" for i in range(coming)]
        for name in self.coming:
            pod = asking(name, gpu_mem=P100)
            pod["spec"]["priority"] = HIGH
            pod["status"] = {"phase": "Pending"}
            self.going_on.append(self._created(pod))

    # The API server.

    def put_pod(self, pod: Json) -> None:
        pod = copy.deepcopy(pod)
        pod["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        self.pods[pod["metadata"]["name"]] = pod
        self.events.append((False, pod))

    def edit(self, name: str, *, spec: Json | None = None, status: Json | None = None, **metadata: Any) -> None:
        pod = copy.deepcopy(self.pods[name])
        pod["metadata"] |= metadata
        pod["spec"] |= spec or {}
        pod["status"] |= status or {}
        self.put_pod(pod)

    def _created(self, pod: Json) -> Steps:
        yield
        self.put_pod(pod)

    def evict(self, name: str) -> Steps:
        """As kube-scheduler does it; and then the node ends the pod."""
        if name in self.pods:
            self.edit(name, status={"conditions": [{"type": "DisruptionTarget", "status": "True"}]})
        yield
        if "deletionTimestamp" not in self.pods.get(name, ENDING)["metadata"]:
            self.evicted.append(name)
            self.edit(name, deletionTimestamp="2026-11-23T15:36:00Z")
            self.going_on.append(self._ended(name))

    def _ended(self, name: str) -> Steps:
        yield from [None] * self.draw.choice([1, 3, 10])
        self.edit(name, status={"containerStatuses": [{"name": "main", "state": {"terminated": {}}}]})
        yield
        self.events.append((True, self.pods.pop(name)))

    # The extender.

    def _see(self) -> None:
        gone, pod = self.events[self.seen]
        self.seen += 1
        (self.state.remove_pod if gone else self.state.set_pod)(as_pod(pod))

    def _sleep(self, seconds: float) -> None:
        """It waits; others go on."""
        self.clock.advance(seconds)
        if self.draw.random() < 0.5:
            self.step(scheduler=False)

    # All of them.

    def step(self, *, scheduler: bool = True) -> bool:
        """Somebody goes on. Whether there was anything to do."""
        self.clock.advance(SECONDS)
        ready: dict[str, float] = {}
        if self.seen < len(self.events):
            ready["watch"] = self._pace["watch"]
        if self.scheduler.seen < len(self.events):
            ready["its watch"] = self._pace["scheduler"]
        if self.going_on:
            ready["others"] = 1.0
        if scheduler and self.scheduler.busy:
            ready["scheduler"] = 1.0
        if not ready:
            return False
        (actor,) = self.draw.choices([*ready], [*ready.values()])
        if actor == "watch":
            self._see()
        elif actor == "its watch":
            self.scheduler.see()
        elif actor == "scheduler":
            self.scheduler.step()
        else:
            process = self.draw.choice(self.going_on)
            if next(process, self) is self:
                self.going_on.remove(process)
        return True

    def meanwhile(self) -> None:
        """While a call is on its way."""
        for _ in range(self.draw.choice([0, 0, 1, 2, 4])):
            self.step(scheduler=False)

    def run(self) -> None:
        """Until all who came have a node."""
        idle = 0.0
        while self.step() or not all(self.pods[name]["spec"].get("nodeName") for name in self.coming):
            if self.going_on or self.scheduler.busy:
                idle = 0.0
                continue
            idle += 1.0
            self.clock.advance(1.0)
            self.state.expire_reservations()
            if self.state.next_requeue_node() is not None:
                self.scheduler.wake("a node")
            if idle == FLUSH:
                self.scheduler.wake("a pod is gone")
            assert idle <= FLUSH


class Scheduler:
    """kube-scheduler 1.37, as far as it preempts: a node is full by its sums, a nominated pod counts on its node, the
    node is written into the pod's status before the next pod's turn, and evictions go on beside that.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen = 0
        self._pods: dict[str, Json] = {}
        self._nominated: dict[str, str] = {}
        self._assumed: dict[str, str] = {}
        self._queue: list[str] = []
        self._waiting: dict[str, bool] = {}  # whether the extender was among those who refused
        self._preempting: dict[str, str] = {}  # the last victim, "" before its turn
        self._woken = ""  # by what, while a pod is tried
        self._trying: Steps | None = None

    @property
    def busy(self) -> bool:
        return self._trying is not None or bool(self._queue)

    def step(self) -> None:
        if self._trying is None:
            self._trying = self._try(self._queue.pop(0))
        if next(self._trying, self) is self:
            self._trying = None

    # Its watch and its queue.

    def see_all(self) -> None:
        while self.seen < len(self._world.events):
            self.see()

    def see(self) -> None:
        gone, pod = self._world.events[self.seen]
        self.seen += 1
        name, before = pod["metadata"]["name"], self._pods.get(pod["metadata"]["name"])
        if gone:
            del self._pods[name]
            self.wake("a pod is gone")
            return
        self._pods[name] = pod
        if pod["spec"].get("nodeName"):
            for known in (self._assumed, self._nominated, self._waiting):
                known.pop(name, None)
            self.wake("a pod")
        elif before is None:
            self._queue.append(name)
        elif nominated(pod) or nominated(before):
            self._nominate(name, nominated(pod))

    def wake(self, event: str) -> None:
        """What the sums have refused only waits for pods to go."""
        self._woken = self._woken if self._woken == "a pod is gone" else event
        for name in [name for name, ours in self._waiting.items() if ours or event == "a pod is gone"]:
            self._enqueue(name)

    def _enqueue(self, name: str) -> None:
        last = self._preempting.get(name)
        if last is not None and (not last or "deletionTimestamp" not in self._pods.get(last, ENDING)["metadata"]):
            return
        del self._waiting[name]
        self._queue.append(name)

    def _nominate(self, name: str, node: str) -> None:
        self._nominated.pop(name, None)
        if node:
            self._nominated[name] = node

    # A pod's turn.

    def _try(self, name: str) -> Steps:
        pod = self._pods[name]
        if name in self._assumed or pod["spec"].get("nodeName"):
            return
        self._woken = ""
        there = {
            pod_name: node
            for pod_name, other in self._pods.items()
            if (node := other["spec"].get("nodeName") or self._assumed.get(pod_name))
        }
        calls_extender = False
        for nodes in ([nominated(pod)], self._world.nodes):
            fitting = [node for node in nodes if node and self._fits(there, node, name)]
            if not fitting:
                continue
            calls_extender = True
            answer = self._filter(pod, fitting)
            yield
            if answer:
                self._assumed[name] = answer[0]
                self._nominate(name, "")
                self._world.going_on.append(self._bind(name, answer[0]))
                return
        outcome = self._preempt(name, there)
        yield
        self._nominate(name, nominated(self._pods[name]) if outcome is None else outcome)
        self._waiting[name] = calls_extender
        if self._woken and (calls_extender or self._woken == "a pod is gone"):
            self._enqueue(name)
        yield
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": f"{calls_extender} {outcome}",
        }
        self._world.edit(
            name, status={"conditions": [condition]} | ({} if outcome is None else {"nominatedNodeName": outcome})
        )

    def _fits(self, there: dict[str, str], node: str, name: str, gone: frozenset[str] = frozenset()) -> bool:
        held = [pod_name for pod_name, on in there.items() if on == node and pod_name not in gone]
        held += [pod_name for pod_name, on in self._nominated.items() if on == node and pod_name not in (*there, name)]
        return sum(HALF if pod_name.startswith("low") else P100 for pod_name in held) + P100 <= CARDS * P100

    def _filter(self, pod: Json, nodes: list[str]) -> list[str]:
        self._world.meanwhile()
        args = FilterArgs(pod=copy.deepcopy(pod), node_names=nodes)
        return verbs.filter_nodes(self._world.state, PREFERENCES, args).node_names

    def _bind(self, name: str, node: str) -> Steps:
        yield
        pod = self._pods[name]
        uid = pod["metadata"]["uid"]
        begun = self._world.state.assume(PodRef(uid, "default", name), request.parse(pod), node, "binpack", epoch=0)
        assert isinstance(begun, Assumed), begun
        yield
        assert begun.assignment is not None
        written = assignment.encode(begun.assignment, assume_time_ns=1)
        self._world.edit(name, spec={"nodeName": node}, status={"nominatedNodeName": ""}, annotations=written)
        self._world.state.record_binding_outcome(uid, Phase.ACCEPTED)

    # Its preemption.

    def _preempt(self, name: str, there: dict[str, str]) -> str | None:
        """The node that is nominated, "" for none any more; None: as before."""
        pod = self._pods[name]
        lower = {
            pod_name: on for pod_name, on in there.items() if self._pods.get(pod_name, pod)["spec"]["priority"] < HIGH
        }
        if any(
            on == nominated(pod) and "deletionTimestamp" in self._pods[pod_name]["metadata"]
            for pod_name, on in lower.items()
        ):
            return None
        chosen: dict[str, list[str]] = {}
        failed = False
        for node in self._world.nodes:
            gone = frozenset(pod_name for pod_name, on in lower.items() if on == node)
            if not gone or not self._fits(there, node, name, gone):
                continue
            for pod_name in sorted(gone):  # the oldest stays first
                if self._fits(there, node, name, gone - {pod_name}):
                    gone -= {pod_name}
            if gone:
                chosen[node] = sorted(gone)
            failed = failed or not gone
        if not chosen:
            return None if failed else ""
        uids = {pod_name: self._pods[pod_name]["metadata"]["uid"] for pod_name in lower}
        self._world.meanwhile()
        answer = self._call_preempt(pod, {node: [uids[pod_name] for pod_name in some] for node, some in chosen.items()})
        known = {uid: pod_name for pod_name, uid in uids.items()}
        if not answer or any(uid not in known for some in answer.values() for uid in some):
            return None
        fewest = min(map(len, answer.values()))
        node = self._world.draw.choice(sorted(node for node, some in answer.items() if len(some) == fewest))
        self._preempting[name] = ""
        self._world.going_on.append(self._evict(name, [known[uid] for uid in answer[node]]))
        return node

    def _call_preempt(self, pod: Json, chosen: dict[str, list[str]]) -> dict[str, list[str]]:
        victims = {node: {"Pods": [{"UID": uid} for uid in some]} for node, some in chosen.items()}
        body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": victims}).encode()
        answer = verbs.preempt(self._world.state, PREFERENCES, wire.decode_preempt_args(body)).node_name_to_meta_victims
        return {node: [victim.uid for victim in node_victims.pods] for node, node_victims in answer.items()}

    def _evict(self, name: str, victims: list[str]) -> Steps:
        for victim in victims:
            self._preempting[name] = victim if victim == victims[-1] else ""
            yield
            yield from self._world.evict(victim)
        yield
        del self._preempting[name]


ENDING: Json = {"metadata": {"deletionTimestamp": ""}}


def nominated(pod: Json) -> str:
    return str(pod["status"].get("nominatedNodeName") or "")


@pytest.mark.parametrize("seed", range(examples(20, soak=3000)))
def test_nobody_goes_in_vain_whoever_has_seen_what(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(placing, "MAX_RESERVATIONS", (0, placing.MAX_RESERVATIONS)[seed % 2])
    nodes = draw.choice([2, 2, 3])
    coming = draw.randint(2, nodes * CARDS)
    world = World(draw, nodes, coming)
    world.run()
    assert len(world.evicted) == 2 * coming
