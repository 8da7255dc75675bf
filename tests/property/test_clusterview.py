"""Snapshots of the cluster stay as they were taken, in any order of changes on both sides.

test_ledger_properties.py and test_nodeload.py show the same of cards and of the nodes' loads.
"""

from collections.abc import Iterable
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.quotas import GPUQuota, QuotaEntry
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube.pods.budgets import Budget, LabelCondition
from extender.cache.cache import Cache
from extender.cache.clusterview import ClusterView
from extender.cache.nominations import NominatedPlace
from extender.cache.reservations import Timeouts
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef
from tests.examples import examples
from tests.fakes.clock import FakeClock

NODES, PODS, NAMESPACES, TIMES = ["n1", "n2"], ["u1", "u2"], ["a", "b"], [1.0, 4.0, 90.0]
PLACES = {
    "cards": NominatedPlace(
        Assignment(MappingProxyType({"0": (CardShare(0, "GPU-0", MiB(100), Percent(0), MiB(16000), whole=False),)})),
        victims=("u2",),
    ),
    "unknown": NominatedPlace(),
}

claimants = st.builds(
    lambda uid, node, version: WaitingPod(
        PodRef(uid, "a", uid), PodRequest(containers=(), priority=5), nominated_node=node, version=version
    ),
    st.sampled_from(PODS),
    st.sampled_from(["", *NODES]),
    st.sampled_from(["1", "2"]),
)
places = st.dictionaries(st.sampled_from(NODES), st.sampled_from(sorted(PLACES)).map(PLACES.__getitem__), min_size=1)
quotas = st.builds(
    lambda namespace, name, gpus: (
        f"{namespace}/{name}",
        GPUQuota(namespace=namespace, name=name, entries=(QuotaEntry(shares=gpus),)),
    ),
    st.sampled_from(NAMESPACES),
    st.sampled_from(["q", "r"]),
    st.integers(0, 2),
)
budgets = st.builds(
    lambda namespace, name, allowed, app: (
        f"{namespace}/{name}",
        Budget(namespace, allowed, (LabelCondition("app", "In", frozenset([app])),)),
    ),
    st.sampled_from(NAMESPACES),
    st.sampled_from(["x", "y"]),
    st.integers(0, 2),
    st.sampled_from(["web", "db"]),
)
holdings = st.lists(
    st.builds(
        lambda uid, node: Holding(uid, "", uid, node, PLACES["cards"].assignment, "reserved"),
        st.sampled_from(["m1", "m2"]),
        st.sampled_from(NODES),
    ),
    max_size=2,
)
placed_pods = st.builds(
    lambda node, terminating: PodRecord(node, uid="u2", priority=0, assignment=Assignment({}), terminating=terminating),
    st.sampled_from(NODES),
    st.booleans(),
)


class _Plan(dict[str, str]):
    """The plan of a gang."""

    def release(self, uids: Iterable[str]) -> None:
        for uid in list(uids):
            self.pop(uid, None)


class Gangs:
    """Two gangs. Cards may be reserved for one of them."""

    def __init__(self) -> None:
        self.by_name = {name: Gang("a", name, _Plan()) for name in ("g1", "g2")}

    def set_member(self, name: str, uid: str, priority: int) -> None:
        self.by_name[name].set_member(Member(uid=uid, name=uid, priority=priority, created="2026-11-01T00:00:00Z"), 0.0)

    def remove_member(self, name: str, uid: str) -> None:
        self.by_name[name].remove_member(uid, 0.0)

    def set_plan(self, name: str, planned: bool) -> None:
        self.by_name[name].plan = _Plan({"m1": "n1"} if planned else {})


CHANGES = {
    "nominations": st.one_of(
        st.tuples(st.just("nominations.set_places"), claimants, places, st.sampled_from(TIMES)),
        st.tuples(
            st.just("nominations.set_own_place"),
            claimants,
            st.sampled_from(NODES),
            st.just(PLACES["cards"]),
            st.sampled_from(TIMES),
        ),
        st.tuples(st.just("nominations.set_node_from_status"), claimants, st.sampled_from(TIMES)),
        st.tuples(st.just("nominations.remove"), st.sampled_from(PODS)),
        st.tuples(st.just("nominations.end_expired"), st.sampled_from(TIMES)),
        st.tuples(st.just("nominations.reset_to_statuses")),
        st.tuples(
            st.just("nominations.set_searched_place"),
            st.sampled_from(PODS),
            st.sampled_from(NODES),
            st.just(PLACES["unknown"]),
            st.just(PLACES["cards"]),
        ),
        st.tuples(st.just("loads.set_pod"), st.sampled_from(PODS), placed_pods),
        st.tuples(st.just("loads.remove_pod"), st.sampled_from(PODS)),
    ),
    "quotas": st.one_of(
        quotas.map(lambda quota: ("limits.set_quota", *quota)),
        st.tuples(st.just("limits.remove_quota"), st.sampled_from(["a/q", "a/r", "b/q"])),
    ),
    "budgets": st.one_of(
        budgets.map(lambda budget: ("budgets.set_budget", *budget)),
        st.tuples(st.just("budgets.remove_budget"), st.sampled_from(["a/x", "a/y", "b/x"])),
    ),
    "gangs": st.one_of(
        st.tuples(st.just("gang_cards.reserve"), st.sampled_from(["g1", "g2", ""]), holdings),
        st.tuples(
            st.just("set_member"), st.sampled_from(["g1", "g2"]), st.sampled_from(["m1", "m2"]), st.sampled_from([0, 5])
        ),
        st.tuples(st.just("remove_member"), st.sampled_from(["g1", "g2"]), st.sampled_from(["m1", "m2"])),
        st.tuples(st.just("set_plan"), st.sampled_from(["g1", "g2"]), st.booleans()),
    ),
}


def apply(view: ClusterView, gangs: Gangs, method: str, *arguments: object) -> None:
    """Make one change of the cluster, or of its gangs."""
    part, _, name = method.rpartition(".")
    if not part:
        getattr(gangs, name)(*arguments)
    elif part == "gang_cards":
        gang, reserved = arguments
        view.gang_cards.reserve(gangs.by_name.get(gang), reserved)
    else:
        getattr(getattr(view, part), name)(*arguments)


def picture(view: ClusterView) -> object:
    """All that planners read."""
    nominations = view.nominations
    ranks = [(-priority, 0, created, "a/p") for priority in (0, 5, 9) for created in ("2026-10-01", "2026-12-01")]
    return (
        {uid: nomination.places for uid, nomination in nominations.by_pod().items()},
        [list(nominations.reserved_places((), priority)) for priority in (0, 9)],
        [(nominations.nominated_node(uid), nominations.victims_on("n1", uid)) for uid in PODS],
        nominations.victim_nodes_by_uid(),
        [view.headroom(namespace) for namespace in NAMESPACES],
        [view.budgets.covering_keys(namespace, {"app": app}) for namespace in NAMESPACES for app in ("web", "db")],
        view.budgets.allowed_disruptions(["a/x", "a/y", "b/x"]),
        [
            view.gang_cards.holdings_on(node, rank, namespace, uid)
            for node in NODES
            for rank in ranks
            for namespace in NAMESPACES
            for uid in ("m1", "m2", "p")
        ],
        [list(view.loads.pods_on(node)) for node in NODES],
    )


@pytest.mark.parametrize("part", CHANGES)
@settings(max_examples=examples(60, soak=3000), deadline=None)
@given(st.data())
def test_a_snapshot_and_its_origin_do_not_see_each_others_changes(part, data):
    steps = data.draw(st.lists(st.tuples(st.booleans(), CHANGES[part]), min_size=6, max_size=20))
    cache, other = (Cache(Ledger(), Timeouts(), FakeClock()) for _ in range(2))
    gangs, other_gangs = Gangs(), Gangs()
    snapshots = []
    for of_snapshot, change in steps:
        if of_snapshot and snapshots:
            apply(snapshots.pop(0)[0], Gangs(), *change)
        else:
            apply(cache, gangs, *change)
            apply(other, other_gangs, *change)
        assert picture(cache) == picture(other)
        for snapshot, expected in snapshots:
            assert picture(snapshot) == expected
        snapshots = [*snapshots[-2:], (cache.snapshot(), picture(cache))]
        assert picture(snapshots[-1][0]) == snapshots[-1][1]
