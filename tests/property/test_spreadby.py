"""`spread-by=KEY` after any sequence of events: the peers that the extender counts are those in the table of
reservations, and the chosen domain is one of those with the fewest peers, of the domains that fit.
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import assignment, names
from cardwise.core.values.decoded import Json
from extender.api import verbs
from extender.cache.reservations import Assumed, Phase
from extender.nomination.nominator import NominationSettings
from extender.records.pod import Pod
from extender.records.wire import FilterArgs
from tests.build import P100, asking
from tests.examples import examples
from tests.extender.nominationcluster import PREFERENCES
from tests.extender.nominationcluster import World as Ahead
from tests.extender.states import as_pod

LABEL = "rack"
NODES, ZONES = ["n1", "n2", "n3", "n4", "n5"], ["a", "b", "c", ""]
PODS = [f"p{i}" for i in range(6)]
OWNERS = {name: "rs-1" if i % 3 else "rs-2" for i, name in enumerate(PODS)}
GONE = (Phase.TERMINATING, Phase.ORPHANED)

pods = st.sampled_from(PODS)
events = st.one_of(
    st.tuples(st.just("filter"), pods, st.sampled_from([1000, P100 // 2, P100])),
    st.tuples(st.just("create"), pods, st.sampled_from([1000, P100])),
    st.tuples(st.just("nominate")),
    st.tuples(st.just("bind"), pods, st.sampled_from([Phase.ACCEPTED, Phase.UNCONFIRMED, None, "posting"])),
    st.tuples(st.just("show_bound"), pods),
    st.tuples(st.just("run"), pods),
    st.tuples(st.just("show_deleting"), pods),
    st.tuples(st.just("delete"), pods, st.booleans()),
    st.tuples(st.just("move"), st.sampled_from(NODES), st.sampled_from(ZONES)),
    st.tuples(st.just("pass_time"), st.sampled_from([1.0, 31.0])),
    st.tuples(st.just("change_leader")),
)


class World(Ahead):
    """Nodes of one card in racks, and the pods of two controllers."""

    def __init__(self, zones: list[str]) -> None:
        super().__init__("unused", settings=NominationSettings(above_nodes=0, policy="binpack"))
        self.state.remove_node("unused")
        self.zones: dict[str, str] = {}
        self.deleted: set[str] = set()  # no UID is used again
        for node, zone in zip(NODES, zones, strict=True):
            self.move(node, zone)

    # Events.

    def create(self, name: str, mem: int) -> None:
        if name not in self.pods and name not in self.deleted:
            pod = asking(name, gpu_mem=mem, annotations={names.POLICY: f"spread-by={LABEL}"})
            pod["metadata"] |= {"resourceVersion": "7", "creationTimestamp": "2026-11-21T10:00:00Z"}
            pod["metadata"]["ownerReferences"] = [{"uid": OWNERS[name], "controller": True}]
            self.show_pod(pod)

    def filter(self, name: str, mem: int) -> None:
        self.create(name, mem)
        pod = self.pods.get(name)
        if pod is None or "nodeName" in pod["spec"] or self.state.known_binding(self.uid(name)) is not None:
            return
        answer = verbs.filter_nodes(self.state, PREFERENCES, FilterArgs(pod=pod, node_names=NODES))
        if answer.node_names:
            self.check_choice(name, answer.node_names[0])

    def nominate(self) -> None:
        nominee = self.state.nominator.nominate_next_pod().nominee
        if nominee is not None:
            self.check_choice(nominee.pod.name, nominee.node)
        self.clock.advance(0.6)

    def bind(self, name: str, outcome: Phase | str | None) -> None:
        row = self.row(name)
        if row is None or "nodeName" in self.pods[name]["spec"]:
            return
        pod = Pod(self.pods[name])
        assumed = self.state.assume(pod.ref, pod.request, row.node, "binpack", epoch=0)
        if isinstance(assumed, Assumed) and outcome != "posting":
            self.state.record_binding_outcome(pod.uid, outcome)

    def show_bound(self, name: str) -> None:
        row = self.row(name)
        if row is not None and row.phase in (Phase.BINDING, Phase.UNCONFIRMED, Phase.ACCEPTED):
            pod = self.pods[name]
            pod["spec"]["nodeName"] = row.node
            pod["metadata"]["annotations"] |= assignment.encode(row.assignment, assume_time_ns=1)
            self.show_pod(pod)

    def run(self, name: str) -> None:
        self.filter(name, 1000)
        self.bind(name, Phase.ACCEPTED)
        self.show_bound(name)

    def show_deleting(self, name: str) -> None:
        if name in self.pods and "nodeName" in self.pods[name]["spec"]:
            self.pods[name]["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
            self.show_pod(self.pods[name])

    def delete(self, name: str, ended: bool) -> None:
        if name in self.pods:
            pod: Json = self.pods.pop(name)
            self.deleted.add(name)
            pod["status"] = {"phase": "Succeeded" if ended else "Running"}
            self.state.remove_pod(as_pod(pod))

    def move(self, node: str, zone: str) -> None:
        if node not in self.zones:
            self.node(node, labels={LABEL: zone} if zone else {})
        else:
            self.node(node, cards=0, labels={LABEL: zone} if zone else {})
        self.zones[node] = zone

    def pass_time(self, seconds: float) -> None:
        self.passes(seconds)

    def change_leader(self) -> None:
        self.state.forget_plans()

    # Checks.

    def uid(self, name: str) -> str:
        return f"uid-{name}"

    def row(self, name: str):
        return self.state._reservations.get(self.uid(name)) if name in self.pods else None

    def count_peers(self, owner: str, excluded: str = "") -> Counter[str]:
        """The peers by node, counted row by row."""
        rows = [self.row(name) for name in self.pods if OWNERS[name] == owner and name != excluded]
        deleting = {self.uid(name) for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]}
        return Counter(row.node for row in rows if row and row.phase not in GONE and row.pod.uid not in deleting)

    def check_choice(self, name: str, node: str) -> None:
        by_zone = Counter[str]()
        for peer_node, count in self.count_peers(OWNERS[name], excluded=name).items():
            by_zone[self.zones[peer_node]] += count
        mem = Pod(self.pods[name]).request.mem
        with self.state.view() as ledger:
            fitting = [other for other in NODES if other == node or ledger.node(other).free[0] >= mem]
        ranks = {other: by_zone[self.zones[other]] if self.zones[other] else 1000 for other in fitting}
        assert ranks[node] == min(ranks.values())

    def check_counts(self) -> None:
        table = self.state._reservations
        for owner in ("rs-1", "rs-2"):
            key = f"default/{owner}/spread-by={LABEL}"
            assert Counter(table.peer_nodes(key).values()) == self.count_peers(owner)
        for name in PODS:
            key = f"default/{OWNERS[name]}/spread-by={LABEL}"
            peers = self.count_peers(OWNERS[name], excluded=name)
            assert table.peer_counts_by_node(key, self.uid(name)) == peers
        assert all(table._by_peer_key.values())  # no row is left behind
        assert table._peer_counts.keys() == table._by_peer_key.keys()
        assert all(count for counts in table._peer_counts.values() for count in counts.values())


@settings(max_examples=examples(60, soak=5000))
@given(st.lists(st.sampled_from(ZONES), min_size=5, max_size=5), st.lists(events, min_size=20, max_size=40))
def test_the_table_has_the_peers_and_the_domain_with_the_fewest_is_chosen(zones, steps):
    world = World(zones)
    for method, *arguments in steps:
        getattr(world, method)(*arguments)
        world.check_counts()
