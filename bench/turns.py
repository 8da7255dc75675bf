"""How long one turn at the extender's state is, in a big cluster in which many gangs wait; in this process.

Between the calls pods end, so that whoever waits may have a chance each time.
"""

import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import msgspec

from bench import timing
from bench.timing import Row
from bench.world import Scale, World, node_name, pod
from cardwise.clock import SystemClock
from cardwise.core.api import names, request
from cardwise.core.api.quotas import Entry, GPUQuota
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import GangPatience
from cardwise.core.values.decoded import Json
from extender.api import verbs
from extender.api.verbs import Preferences
from extender.cache.placing import PlacementRequest
from extender.cache.statelock import StateLock
from extender.gangs import gangtypes
from extender.records import nodeinfo, objects, podinfo, wire
from extender.records.podref import PodRef
from extender.state import State

SIZE = 8  # of a gang
PREEMPTED = 500  # nodes on which kube-scheduler would preempt: a tenth of all at most


def full_state(scale: Scale) -> tuple[State, list[podinfo.PodRecord]]:
    world = World(scale)
    state = State(
        clock=_OwnTime(), of_gangs=gangtypes.GangSettings(patience=GangPatience(reserve=1.0), max_waiting=10_000)
    )
    for name, record in map(nodeinfo.node, world.nodes):
        state.set_node(name, record)
    for key, card in map(objects.card, world.cards):
        state.set_card(key, card)
    bound = [podinfo.pod(raw)[1] for raw in world.pods]
    for each in bound:
        state.set_pod(each)
    with state.view():
        pass  # the first count of all cards, which happens before the extender is ready
    gc.set_threshold(20_000, 20, 50)  # as there
    gc.freeze()
    return state, bound


def _member(gang: int, i: int, *, fits: bool = False) -> dict:
    """Six to eight cards of one node: nowhere are so many free. Or shares in a namespace whose quota is too small."""
    made = pod(f"gang-{gang}-{i}", f"{gang:08x}-2222-4222-8222-{i:012x}", 0)
    made["metadata"]["labels"][names.GANG] = f"gang-{gang}"
    made["metadata"]["annotations"] = {names.GROUP_NAME: f"gang-{gang}", names.GROUP_NUM: str(SIZE)}
    made["metadata"]["creationTimestamp"] = f"2026-11-21T09:{gang // 60:02}:{gang % 60:02}Z"
    if fits:
        asked = {names.WHOLE_GPU: "1"} if gang % 40 else {names.GPU_MEM: "1024"}
    else:
        asked = {names.GPU_MEM: "4069"} if gang % 4 == 3 else {names.WHOLE_GPU: str(6 + gang % 3)}
    made["metadata"]["namespace"] = "limited" if gang % 4 == 3 and not fits else "default"
    wanted = asked | {names.SHARE: "1", "cpu": str(1 + gang % 5)}
    made["spec"]["containers"][0]["resources"] = {"limits": wanted, "requests": wanted}
    return made


def _preempts(state: State, gang: int, everywhere: list[str]) -> None:
    """kube-scheduler asks who is to go for the first member of a new gang, which is deleted then."""
    made = [_member(gang, i, fits=gang % 2 == 0) for i in range(SIZE)]
    for each in made:
        each["spec"]["priority"] = 1000
    records = [podinfo.pod(json.dumps(each).encode())[1] for each in made]
    for record in records:
        state.set_pod(record)
    ask_preempt(state, made[0], everywhere, gang)
    for record in records:
        state.remove_pod(record)


def ask_preempt(state: State, first: Json, everywhere: list[str], run: int) -> None:
    """kube-scheduler asks filter and then preempt for the first member of a gang, with other nodes in each run."""
    state.gangs.filter(first["metadata"]["uid"], everywhere)
    chosen = {node: {"Pods": []} for node in everywhere[run % 7 :: max(1, len(everywhere) // PREEMPTED)]}
    args = wire.preempt_args(json.dumps({"Pod": first, "NodeNameToMetaVictims": chosen}).encode())
    verbs.preempt(state, Preferences(policy="binpack", one_best_node=True), args)


def _ask(name: str, asked: PodRequest, nodes: list[str]) -> PlacementRequest:
    return PlacementRequest(PodRef(f"u-{name}", "default", f"single-{name}"), asked, nodes, "binpack")


class _OwnTime(SystemClock):
    """Time that stands still while other processes have the machine: limits of seconds are met as if it were alone."""

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        return time.process_time() + self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


class Turns:
    """CPU of each turn, by who took it."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def counted(self) -> Iterator[None]:
        enter, leave = StateLock.__enter__, StateLock.__exit__
        began, who = 0.0, ""

        def entered(lock: StateLock) -> None:
            nonlocal began, who
            enter(lock)
            code = sys._getframe(1).f_code  # noqa: SLF001 - whose turn it is
            who, began = f"{code.co_filename.rsplit('/', 1)[1]}:{code.co_name}", time.thread_time()

        def left(lock: StateLock, *how: object) -> None:
            self.seconds[who].append(time.thread_time() - began)
            leave(lock, *how)

        StateLock.__enter__, StateLock.__exit__ = entered, left  # type: ignore[method-assign]
        try:
            yield
        finally:
            StateLock.__enter__, StateLock.__exit__ = enter, leave  # type: ignore[method-assign]


def run(nodes: int, pods: int, gangs: int, rounds: int) -> list[Row]:
    state, bound = full_state(Scale(nodes=nodes, pods=pods, fresh=True))
    everywhere = [node_name(i) for i in range(nodes)]
    members = [_member(gang, i) for gang in range(gangs) for i in range(SIZE)]
    for made in members:
        _, record = podinfo.pod(json.dumps(made).encode())
        state.set_pod(record)
    state.set_quota("limited/small", GPUQuota(namespace="limited", name="small", entries=(Entry(shares=4),)))
    for made in members[::SIZE]:
        state.gangs.filter(made["metadata"]["uid"], everywhere)  # each has been asked for once
    single = request.parse_mutated(pod("single", "u-single", 1024))
    turns = Turns()
    state.plan(_ask("warm", single, everywhere))
    gc.freeze()  # the pods' JSON is none of the extender's
    with turns.counted():
        asking = cycle(made["metadata"]["uid"] for made in members)
        for i in range(rounds):
            ended = bound.pop()
            state.remove_pod(msgspec.structs.replace(ended, ended=True))
            state.gangs.filter(next(asking), everywhere)
            state.plan(_ask(str(i), single, everywhere))
            if i % 20 == 0:
                # One that fits: whole cards or shares of thousands of nodes.
                for made in [_member(gangs + i, j, fits=True) for j in range(SIZE)]:
                    state.set_pod(podinfo.pod(json.dumps(made).encode())[1])
                    state.gangs.filter(made["metadata"]["uid"], everywhere)
            if i % 20 == 10:
                _preempts(state, 10 * gangs + i // 20, everywhere)
            if i % 5 == 0:
                state.gangs.step()
                state.tick()
            if i % 10 == 0:
                state.gangs.views()
    whole = [each for some in turns.seconds.values() for each in some]
    rows = [timing.latency(f"all turns; {nodes} nodes, {pods} pods, {gangs} gangs of {SIZE}", whole)]
    longest = sorted(turns.seconds.items(), key=lambda item: -max(item[1]))
    return rows + [timing.latency(who, seconds) for who, seconds in longest[:8]]
