"""Measures how long the extender's state lock is held at a time, in a big cluster with many waiting gangs.

The extender's state is in this process. Pods end between the calls, so that waiting gangs are planned again.
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
from bench.synthetic import Scale, SyntheticCluster, node_name, not_none, pod, pod_record
from bench.timing import Row
from cardwise.clock import SystemClock
from cardwise.core.api import names, request
from cardwise.core.api.quotas import GPUQuota, QuotaEntry
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import GangPatience
from cardwise.core.values.decoded import Json
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.cache.statelock import StateLock
from extender.gangs import gangtypes
from extender.nomination.nominator import NominationSettings
from extender.placing.placing import PlacementRequest
from extender.records import cards, nodeinfo, podinfo, wire
from extender.records.podref import PodRef
from extender.state import State

GANG_SIZE = 8
CANDIDATE_NODES = 500  # nodes in a preempt call: kube-scheduler sends at most a tenth of all nodes


def build_state(scale: Scale) -> tuple[State, list[podinfo.PodRecord]]:
    """The extender's state of a synthetic cluster, and the records of its bound pods."""
    cluster = SyntheticCluster(scale)
    state = State(
        clock=ProcessClock(),
        gang_settings=gangtypes.GangSettings(patience=GangPatience(reserve=1.0), max_waiting=10_000),
        nomination_settings=NominationSettings(above_nodes=0, policy="binpack"),
    )
    for raw in cluster.nodes:
        state.set_node(*not_none(nodeinfo.decode_node(raw)))
    for raw in cluster.cards:
        state.set_card(*not_none(cards.decode_card(raw)))
    bound = [pod_record(raw) for raw in cluster.pods]
    for record in bound:
        state.set_pod(record)
    with state.view():
        pass  # counts all cards for the first time, as the extender does before it is ready
    gc.set_threshold(5_000, 10, 400)  # as in the extender
    gc.freeze()
    return state, bound


def _member(gang: int, i: int, *, fits: bool = False) -> Json:
    """The manifest of a gang's member.

    fits: whether the gang fits. Otherwise it requests six to eight cards of a node, while no node has so many free
      cards, or it requests shares in a namespace with a too small GPUQuota.
    """
    manifest = pod(f"gang-{gang}-{i}", f"{gang:08x}-2222-4222-8222-{i:012x}", 0)
    manifest["metadata"]["labels"][names.GANG] = f"gang-{gang}"
    manifest["metadata"]["annotations"] = {names.GROUP_NAME: f"gang-{gang}", names.GROUP_NUM: str(GANG_SIZE)}
    manifest["metadata"]["creationTimestamp"] = f"2026-11-21T09:{gang // 60:02}:{gang % 60:02}Z"
    if fits:
        gpus = {names.WHOLE_GPU: "1"} if gang % 40 else {names.GPU_MEM: "1024"}
    else:
        gpus = {names.GPU_MEM: "4069"} if gang % 4 == 3 else {names.WHOLE_GPU: str(6 + gang % 3)}
    manifest["metadata"]["namespace"] = "limited" if gang % 4 == 3 and not fits else "default"
    resources = gpus | {names.SHARE: "1", "cpu": str(1 + gang % 5)}
    manifest["spec"]["containers"][0]["resources"] = {"limits": resources, "requests": resources}
    return manifest


def _preempt_for_gang(state: State, gang: int, all_nodes: list[str]) -> None:
    """Call preempt for the first member of a new gang, and delete the gang."""
    members = [_member(gang, i, fits=gang % 2 == 0) for i in range(GANG_SIZE)]
    for manifest in members:
        manifest["spec"]["priority"] = 1000
    records = [pod_record(json.dumps(manifest).encode()) for manifest in members]
    for record in records:
        state.set_pod(record)
    call_preempt(state, members[0], all_nodes, gang)
    for record in records:
        state.remove_pod(record)


def call_preempt(state: State, first: Json, all_nodes: list[str], run: int) -> None:
    """Call filter and then preempt for a gang's first member, as kube-scheduler does. `run` varies the candidates."""
    state.gangs.filter_member(first["metadata"]["uid"], all_nodes)
    candidates: Json = {node: {"Pods": []} for node in all_nodes[run % 7 :: max(1, len(all_nodes) // CANDIDATE_NODES)]}
    args = wire.decode_preempt_args(json.dumps({"Pod": first, "NodeNameToMetaVictims": candidates}).encode())
    verbs.preempt(state, AnswerSettings(policy="binpack", one_best_node=True), args)


def _placement(name: str, pod_request: PodRequest, nodes: list[str]) -> PlacementRequest:
    return PlacementRequest(PodRef(f"u-{name}", "default", f"single-{name}"), pod_request, nodes, "binpack")


class ProcessClock(SystemClock):
    """A clock of this process's CPU time, so that timeouts do not depend on other processes of the machine."""

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        return time.process_time() + self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


class LockHolds:
    """Seconds of CPU of each hold of the state lock, by the function that held it."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the holds within the block, by replacing the methods of `StateLock`."""
        acquire, release = StateLock.__enter__, StateLock.__exit__
        start, holder = 0.0, ""

        def timed_acquire(lock: StateLock) -> None:
            nonlocal start, holder
            acquire(lock)
            code = sys._getframe(1).f_code  # noqa: SLF001 - the function that holds the lock
            holder, start = f"{code.co_filename.rsplit('/', 1)[1]}:{code.co_name}", time.thread_time()

        def timed_release(lock: StateLock, *error: object) -> None:
            self.seconds[holder].append(time.thread_time() - start)
            release(lock, *error)

        StateLock.__enter__, StateLock.__exit__ = timed_acquire, timed_release  # type: ignore[method-assign]
        try:
            yield
        finally:
            StateLock.__enter__, StateLock.__exit__ = acquire, release  # type: ignore[method-assign]


def run(nodes: int, pods: int, gangs: int, rounds: int) -> list[Row]:
    """Measure `rounds` calls of each kind, beside `gangs` waiting gangs, with `pods` pods on `nodes` nodes."""
    state, bound = build_state(Scale(nodes=nodes, pods=pods, fresh=True))
    all_nodes = [node_name(i) for i in range(nodes)]
    members = [_member(gang, i) for gang in range(gangs) for i in range(GANG_SIZE)]
    for manifest in members:
        state.set_pod(pod_record(json.dumps(manifest).encode()))
    state.set_quota("limited/small", GPUQuota(namespace="limited", name="small", entries=(QuotaEntry(shares=4),)))
    for manifest in members[::GANG_SIZE]:
        state.gangs.filter_member(manifest["metadata"]["uid"], all_nodes)  # plans each gang once
    single = not_none(request.parse_mutated(pod("single", "u-single", 1024)))
    holds = LockHolds()
    state.plan_pod(_placement("warm", single, all_nodes))
    gc.freeze()  # the pods' JSON is not part of the extender
    with holds.measure():
        waiting = cycle(manifest["metadata"]["uid"] for manifest in members)
        for i in range(rounds):
            ended = bound.pop()
            state.remove_pod(msgspec.structs.replace(ended, ended=True))
            state.gangs.filter_member(next(waiting), all_nodes)
            state.plan_pod(_placement(str(i), single, all_nodes))
            if i % 20 == 0:
                # A gang that fits: its whole cards or shares are free on thousands of nodes.
                for manifest in [_member(gangs + i, j, fits=True) for j in range(GANG_SIZE)]:
                    state.set_pod(pod_record(json.dumps(manifest).encode()))
                    state.gangs.filter_member(manifest["metadata"]["uid"], all_nodes)
            if i % 20 == 10:
                _preempt_for_gang(state, 10 * gangs + i // 20, all_nodes)
            if i % 5 == 0:
                state.gangs.step()
                state.gangs.plan_waiting()
                state.expire_reservations()
            if i % 10 == 0:
                state.gangs.views()
    all_holds = [hold for seconds in holds.seconds.values() for hold in seconds]
    rows = [timing.latency(f"all holds; {nodes} nodes, {pods} pods, {gangs} gangs of {GANG_SIZE}", all_holds)]
    longest = sorted(holds.seconds.items(), key=lambda entry: -max(entry[1]))
    return rows + [timing.latency(holder, seconds) for holder, seconds in longest[:8]]
