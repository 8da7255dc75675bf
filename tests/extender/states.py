"""Builders for the extender's tests: JSON as the API server sends it, and a state with a fake clock."""

import json
from collections.abc import Callable
from typing import Any

from cardwise.core.api import assignment, classes, quotas, request
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.quotas import GPUQuota
from cardwise.core.api.request import PodRequest
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.cache.nominated import NominatedPods
from extender.cache.reservations import Assumed, KnownBinding, Timeouts
from extender.placing.placing import PlacementRequest
from extender.records import cards, podinfo
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef
from extender.state import State
from tests.build import P100, asking, extended_resource, gpu_quota, shares
from tests.fakes.clock import FakeClock

WAITING, RUNNING, ENDED = "waiting", "running", "terminated"


def make_state(clock: FakeClock | None = None, **patience: float) -> State:
    return State(
        clock=clock or FakeClock(),
        timeouts=Timeouts(**{"reservation": 30.0, "terminating": 20.0, "confirmation": 75.0} | patience),
    )


def bound(
    name: str,
    mem: int,
    *indices: int,
    node: str = "n1",
    uid: str | None = None,
    phase: str = "Running",
    containers: str | None = RUNNING,
    deleting: bool = False,
    annotations: dict[str, str] | None = None,
    namespace: str = "default",
) -> dict[str, Any]:
    """A pod that holds `mem` on each of these cards."""
    pod = asking(name, uid=uid, namespace=namespace, gpu_mem=mem)
    pod["spec"]["nodeName"] = node
    assigned = Assignment({"0": shares(mem, *indices, node=node)})
    pod["metadata"]["annotations"] = annotations or assignment.encode(assigned, assume_time_ns=1)
    pod["status"] = {"phase": phase}
    if containers is not None:
        pod["status"]["containerStatuses"] = [{"name": "main", "state": {containers: {}}}]
    if deleting:
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    return pod


def as_class(manifest: dict) -> ResourceClass:
    return classes.parse(manifest)


def as_quota(*hard: dict[str, Any], namespace: str = "default", name: str = "team") -> tuple[str, GPUQuota]:
    """Key and quota, as `State.set_quota` takes them."""
    return f"{namespace}/{name}", quotas.parse(gpu_quota(*hard, namespace=namespace, name=name))


def as_pod(manifest: dict) -> podinfo.PodRecord:
    record = podinfo.decode_pod(json.dumps(manifest).encode())
    assert record is not None, "the projection has no use for this pod"
    return record[1]


def as_card(manifest: dict) -> tuple[str, cards.CardRecord]:
    record = cards.decode_card(json.dumps(manifest).encode())
    assert record is not None
    return record


def with_cards(state: State, **nodes: int) -> State:
    """The state with this many P100 cards on each node."""
    for node, count in nodes.items():
        state.set_node(node)
        for i in range(count):
            state.set_card(*as_card(extended_resource(i, node=node)))
    return state


def free(state: State, node: str = "n1") -> list[int]:
    """MiB left on each card."""
    with state.view() as ledger:
        known = ledger.node(node)
        return list(known.free) if known is not None else []


def mark(state: State, uid: str) -> str | None:
    with state.view() as ledger:
        holding = ledger.holding(uid)
        return holding.phase_name if holding is not None else None


def plan(
    state: State, name: str, mem: int, *nodes: str, namespace: str = "default", resource_class: str = ""
) -> Placement | Unplaceable | KnownBinding:
    """The decision of filter for a pod with one container."""
    pod_request = request.parse(asking(name, gpu_mem=mem, resource_class=resource_class))
    assert pod_request is not None
    return state.plan_pod(
        PlacementRequest(PodRef(f"uid-{name}", namespace, name), pod_request, nodes or ["n1"], "binpack")
    )


def comes(state: State, name: str, pod_request: PodRequest | None, version: str) -> None:
    """Call filter for the pod."""
    state.begin_attempt(f"uid-{name}", (pod_request, version) if pod_request is not None else None, grouped=False)


def begin(
    state: State,
    name: str,
    mem: int,
    *,
    node: str = "n1",
    namespace: str = "default",
    resource_class: str = "",
    epoch: int = 0,
) -> Assumed | KnownBinding | Refusal:
    """Begin a bind of the pod."""
    pod_request = request.parse(asking(name, gpu_mem=mem, resource_class=resource_class))
    assert pod_request is not None
    return state.assume(PodRef(f"uid-{name}", namespace, name), pod_request, node, "binpack", epoch=epoch)


def on_victim_search(state: State, callback: Callable[[WaitingPod], object]) -> None:
    """Call `callback` at each later search for victims on one node, live or on a snapshot."""
    nominated = state._nominated
    with_snapshot = nominated.with_snapshot

    def observed(searching: NominatedPods) -> NominatedPods:
        find_victims = searching.find_victims

        def search(claimant: WaitingPod, *args: Any, **kwargs: Any) -> Any:
            callback(claimant)
            return find_victims(claimant, *args, **kwargs)

        with_pace = searching.with_pace
        searching.find_victims = search
        searching.with_pace = lambda pace: observed(with_pace(pace))
        return searching

    nominated.with_snapshot = lambda snapshot: observed(with_snapshot(snapshot))
    observed(nominated)


def change_at_search(state: State, number: int, change: Callable[[WaitingPod], object]) -> list[WaitingPod]:
    """Call `change` once, at that search for victims on one node; searches under the lock do not count.

    Returns the pods that are searched for, one entry for each search; the list grows.
    """
    claimants: list[WaitingPod] = []

    def on_search(claimant: WaitingPod) -> None:
        if state._lock._lock.locked():
            return
        claimants.append(claimant)
        if len(claimants) == number:
            change(claimant)

    on_victim_search(state, on_search)
    return claimants


def looks_slowly(state: State, clock: FakeClock, seconds: float = 0.12) -> None:
    """Let each later search for victims on one node take this time."""
    on_victim_search(state, lambda _: clock.advance(seconds))


def refuse(state: State, name: str = "w", node: str = "n1") -> None:
    """Let filter refuse a pod that requests more than any card has."""
    pod_request = request.parse(asking(name, gpu_mem=P100 + 1))
    assert pod_request is not None
    refused = state.plan_pod(PlacementRequest(PodRef(f"uid-{name}", "default", name), pod_request, [node], "binpack"))
    assert isinstance(refused, Unplaceable)
