"""Rule 1 in any order of events: two extenders bind pods while calls to the API server fail, get lost, arrive late or
are executed twice, watches are interrupted, the Lease moves, and pods are deleted and recreated with the same names.
"""

import contextlib
import json
import random
import threading
from collections import defaultdict
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cardwise.core.api import assignment, request
from cardwise.core.placement.placement import Placement
from cardwise.kube import paths
from cardwise.kube.watch.store import Diff, Store
from extender.binding.binder import Binder, BindFailed
from extender.informers import _Pods
from extender.placing.placing import PlacementRequest
from extender.records import podinfo
from extender.records.podref import PodRef
from extender.records.wire import BindArgs
from tests.build import P100, asking, extended_resource
from tests.examples import examples
from tests.extender.leaders import Cluster, Extender
from tests.extender.states import ENDED, as_card
from tests.fakes.apiserver import Answer, Fault, Request
from tests.fakes.clock import FakeClock

NAMES = [f"p{number}" for number in range(7)]
SIZES = [P100 // 4, P100 // 2, P100]
ERRORS = (500, 503, 429, 0)  # 0: the connection is cut
KINDS = ("before", "after", "before", "after", "twice", "late", "refused")  # of failed writes
FINISHED = ("Succeeded", "Failed")


class NoEvents:
    def record(self, *_: object) -> None:
        """Discard events: no test reads them."""


class StormyCluster(Cluster):
    """A cluster in which calls of the extenders fail during a storm; some of them are executed nevertheless, twice, or
    later.
    """

    def __init__(self, clock: FakeClock, machine: "RuleOneMachine") -> None:
        super().__init__(clock)
        self.machine = machine
        self.raging = False
        self.share = 0.4  # the fraction of calls that fail
        self.errors: tuple[int, ...] = ERRORS
        self.random = random.Random(0)
        self.late: list[Request] = []
        self.behind = True  # no admission policy: fencing alone must be enough

    def handle(self, request: Request) -> Answer:
        if not self.raging:
            return super().handle(request)
        if request.path.endswith("/binding") or request.verb == "get":
            self.machine.interrupt()
        if self.random.random() > self.share:
            return super().handle(request)
        kind = "before" if request.verb in ("get", "list") else self.random.choice(KINDS)
        if kind == "late" and request.path.endswith("/binding"):
            self.late.append(request)
            self.clock.sleep(request.timeout or 1.0)
            raise TimeoutError("timed out")
        if kind != "before":
            self.carry_out(request)
        if kind == "twice":  # a proxy has sent it twice
            return super().handle(request)
        if kind == "refused":  # as before, and a policy has refused the second
            return Fault(status=self.random.choice((403, 422))).answer()
        status = self.random.choice(self.errors)
        if not status:
            raise ConnectionResetError("connection reset by peer")
        return Fault(status=status, retry_after=1).answer()

    def carry_out(self, request: Request) -> None:
        super().handle(request)

    def assigned_mib(self) -> dict[tuple[str, int], dict[str, int]]:
        """By card and pod, the MiB of bound pods that have not finished."""
        held: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for pod in self.all(paths.pods()):
            if pod["spec"].get("nodeName") and (pod.get("status") or {}).get("phase") not in FINISHED:
                for share in assignment.decode(pod["metadata"]["annotations"]).shares():
                    held[pod["spec"]["nodeName"], share.index][pod["metadata"]["name"]] = share.mem
        return held


class WatchingExtender(Extender):
    """An extender with the store and the handler of its pod reflector."""

    def __init__(self, api: StormyCluster, name: str, clock: FakeClock) -> None:
        super().__init__(api, name, clock, cards={"n1": 2})
        self.store: Store[Any] = Store()
        self.handler = _Pods(self.state, NoEvents(), lambda: None)
        self.untold: list[dict] = []
        self.history = [{"type": "ADDED", "object": pod} for pod in api.all(paths.pods())]  # and all events since
        self.binder = Binder(
            self.client, self.state, policy="binpack", seconds=4.0, leadership=self.leadership, clock=clock
        )

    def hear_events(self, count: int) -> None:
        """Deliver the next events of the watch."""
        self.take_fresh()
        events, self.untold = self.untold[:count], self.untold[count:]
        for event in events:
            pod = event["object"]
            projected = None if event["type"] == "DELETED" else podinfo.decode_pod(json.dumps(pod).encode())
            self._deliver(self.store.apply_event(f"default/{pod['metadata']['name']}", projected))

    def take_fresh(self) -> None:
        fresh = self._fresh()
        self.untold += fresh
        self.history += fresh

    def relist(self, behind: int = 0) -> None:
        """List the state before this number of events, and watch from there on."""
        self.take_fresh()
        known = len(self.history) - behind
        self.untold = self.history[known:]
        listed: dict[str, tuple[str, Any]] = {}
        for event in self.history[:known]:
            pod = event["object"]
            listed.pop(pod["metadata"]["name"], None)
            if event["type"] != "DELETED":
                projected = podinfo.decode_pod(json.dumps(pod).encode())
                assert projected is not None
                listed[pod["metadata"]["name"]] = projected
        self._deliver(self.store.replace_records((f"default/{name}", *of) for name, of in listed.items()))

    def catch_up(self, still: Any) -> bool:
        if not still() or (self.api.raging and self.api.random.random() < self.api.share):
            return False
        self.relist()
        return True

    def _deliver(self, diff: Diff[Any]) -> None:
        for key, old in diff.deleted:
            self.handler.on_delete(key, old)
        for key, old, new in diff.updated:
            self.handler.on_change(key, old, new)
        for key, new in diff.added:
            self.handler.on_change(key, None, new)

    def filter_pod(self, pod: dict) -> object:
        pod_request, uid, name = request.parse(pod), pod["metadata"]["uid"], pod["metadata"]["name"]
        self.state.begin_attempt(uid, (pod_request, pod["metadata"]["resourceVersion"]), grouped=False)
        return self.state.plan_pod(PlacementRequest(PodRef(uid, "default", name), pod_request, ["n1"], "binpack"))


class RuleOneMachine(RuleBasedStateMachine):
    names = st.sampled_from(NAMES)
    shares = st.sampled_from([0.3, 0.6, 0.9])
    errors = st.sampled_from([ERRORS, (500, 503), (429,)])

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.api = StormyCluster(self.clock, self)
        self.extenders = [WatchingExtender(self.api, name, self.clock) for name in ("a", "b")]
        self.count = 0
        self.placed: list[tuple[WatchingExtender, str, str]] = []  # pods that filter has placed: extender, name, UID
        self.depth = 0
        self.thread = threading.get_ident()  # which turns the clock
        for extender in self.extenders:
            extender.exchange_lease()
            extender.exchange_lease()

    @initialize(seed=st.integers(0, 10**6), share=shares, errors=errors)
    def begins(self, seed: int, share: float, errors: tuple[int, ...]) -> None:
        self.api.random = random.Random(seed)
        self.weather(True, share, errors)

    @rule(raging=st.booleans(), share=shares, errors=errors)
    def weather(self, raging: bool, share: float, errors: tuple[int, ...]) -> None:
        self.api.raging, self.api.share, self.api.errors = raging, share, errors

    def leaders(self) -> list[WatchingExtender]:
        return [extender for extender in self.extenders if extender.leadership.epoch() is not None]

    def interrupt(self) -> None:
        """Make changes while a call is in progress."""
        rng = self.api.random
        if self.depth >= 2 or threading.get_ident() != self.thread or rng.random() < 0.5:
            return
        self.depth += 1
        try:
            name = rng.choice(NAMES)
            rng.choice(
                (
                    lambda: rng.choice(self.extenders).hear_events(rng.randint(1, 4)),
                    lambda: self.schedule(name),
                    lambda: self.bind(rng.randint(0, 9)),
                    lambda: self.delete(name),
                    lambda: self.create(name, rng.choice(SIZES)),
                    lambda: self.time_passes(rng.choice((0.5, 3.0))),
                )
            )()
        finally:
            self.depth -= 1

    @rule(name=names, size=st.sampled_from(SIZES))
    def create(self, name: str, size: int) -> None:
        if self.api.get(paths.pods("default", name)) is None:
            self.count += 1
            self.api.write_object(paths.pods(), asking(name, uid=f"uid-{self.count}", gpu_mem=size))

    @rule(name=names)
    def schedule(self, name: str) -> None:
        """Call filter for a pod."""
        pod = self.api.get(paths.pods("default", name))
        for extender in self.leaders()[:1]:
            if pod is not None and not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp"):
                placed = extender.filter_pod(pod)
                if isinstance(placed, Placement):
                    self.placed.append((extender, name, pod["metadata"]["uid"]))

    @rule(number=st.integers(0, 9))
    def bind(self, number: int) -> None:
        """Call bind for a placed pod."""
        if self.placed:
            extender, name, uid = self.placed.pop(number % len(self.placed))
            with contextlib.suppress(BindFailed):
                extender.binder.bind(BindArgs(pod_name=name, pod_namespace="default", pod_uid=uid, node="n1"))

    @rule(names=st.permutations(NAMES), size=st.sampled_from(SIZES), hears=st.integers(0, 3))
    def pods_come(self, names: list[str], size: int, hears: int) -> None:
        """Create pods. The Lease is renewed; the watch may be interrupted."""
        for name in names:
            self.create(name, size)
            for extender in self.leaders() or self.extenders:
                extender.exchange_lease()
                extender.hear_events(hears)
            self.schedule(name)
            self.bind(len(self.placed) - 1)

    @rule(number=st.integers(0, 1), count=st.integers(1, 9))
    def hear(self, number: int, count: int) -> None:
        self.extenders[number].hear_events(count)

    @rule(number=st.integers(0, 1), behind=st.integers(0, 12))
    def lists_again(self, number: int, behind: int) -> None:
        """List again, perhaps from an API server that lags; its watch delivers the rest before a row's timeout."""
        extender = self.extenders[number]
        extender.relist(min(behind, len(extender.history) - len(extender.untold)))
        if behind:
            extender.hear_events(len(extender.history))

    @rule(number=st.integers(0, 1), gracefully=st.booleans())
    def starts_again(self, number: int, gracefully: bool) -> None:
        """Restart the process after a stop or a kill."""
        former = self.extenders[number]
        if gracefully:
            former.elector._stopping.set()
            former.leadership._stopping.set()
            former.elector._report_changes()
            former.elector.release()
        self.placed = [placed for placed in self.placed if placed[0] is not former]
        self.count += 1
        self.extenders[number] = WatchingExtender(self.api, f"{former.name.split('-')[0]}-{self.count}", self.clock)
        self.extenders[number].relist()

    @rule(number=st.integers(0, 1), index=st.integers(0, 1), comes=st.booleans())
    def a_card_goes_or_comes(self, number: int, index: int, comes: bool) -> None:
        """Delete or recreate the object of a card."""
        name, card = as_card(extended_resource(index))
        state = self.extenders[number].state
        if comes:
            state.set_card(name, card)
        else:
            state.remove_card(name)

    @rule(number=st.integers(0, 1), count=st.integers(1, 3))
    def exchange_lease(self, number: int, count: int) -> None:
        for _ in range(count):
            self.extenders[number].exchange_lease()

    @rule(number=st.integers(0, 1))
    def upkeep(self, number: int) -> None:
        self.extenders[number].look_up()

    @rule(seconds=st.sampled_from([0.5, 3.0, 16.0, 40.0, 80.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(name=names)
    def delete(self, name: str) -> None:
        """Delete a pod at once, or let it terminate."""
        path = paths.pods("default", name)
        pod = self.api.get(path)
        if pod is not None and (self.api.random.random() < 0.5 or pod["metadata"].get("deletionTimestamp")):
            self.api.remove(path)
        elif pod is not None:
            self.api.edit(path, metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"})

    @rule(name=names)
    def containers_end(self, name: str) -> None:
        path = paths.pods("default", name)
        pod = self.api.get(path)
        if pod is not None and pod["spec"].get("nodeName") and (pod.get("status") or {}).get("phase") not in FINISHED:
            phase = "Running" if pod["metadata"].get("deletionTimestamp") else "Failed"
            self.api.edit(path, status={"phase": phase, "containerStatuses": [{"name": "main", "state": {ENDED: {}}}]})

    @rule(number=st.integers(0, 9))
    def late_binding_arrives(self, number: int) -> None:
        if self.api.late:
            call = self.api.late.pop(number % len(self.api.late))
            unfenced = {uid for extender in self.extenders for uid in extender.leadership._unfenced}
            if call.body["metadata"]["uid"] not in unfenced:
                self.api.carry_out(call)

    @invariant()
    def no_card_is_given_beyond_what_it_has(self) -> None:
        for card, held in self.api.assigned_mib().items():
            assert sum(held.values()) <= P100, (card, held)


TestRuleOne = RuleOneMachine.TestCase
TestRuleOne.settings = settings(max_examples=examples(15, soak=3000), stateful_step_count=60, deadline=None)
