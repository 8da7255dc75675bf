"""`spread-by=KEY`: pods of one controller are spread over the domains of a node label."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Self

import pytest

from cardwise.core.api import assignment, names, policies
from cardwise.core.api.policies import NodeFacts, spreadby
from cardwise.core.values.decoded import Json
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.cache.nominated import NominatedPods
from extender.cache.reservations import Assumed
from extender.nomination.nominator import NominationSettings
from extender.placing import nodesearch
from extender.placing.placing import PlacementRequest
from extender.queue.searchpauses import SearchPauses
from extender.records.pod import Pod
from extender.records.wire import FilterArgs
from tests.build import P100, asking, container
from tests.extender.nominationcluster import World as Ahead

ZONE = "topology.kubernetes.io/zone"
ZONES = {"a1": "a", "a2": "a", "b1": "b", "c1": "c", "x1": ""}  # "": without the label
SMALL = P100 // 8


class World(Ahead):
    """Nodes in zones, and pods of controllers."""

    def __init__(
        self,
        zones: Mapping[str, str] = ZONES,
        *,
        policy: str = "binpack",
        all_nodes: bool = False,
        cards: int = 1,
    ) -> None:
        super().__init__("unused", settings=NominationSettings(above_nodes=0, policy=policy))
        self.state.remove_node("unused")
        self.zones: dict[str, str] = {}
        self.settings = AnswerSettings(policy=policy, one_best_node=not all_nodes)
        for node, zone in zones.items():
            self.set_zone(node, zone, cards=cards)

    def set_zone(self, node: str, zone: str, *, cards: int = 1) -> Self:
        self.zones[node] = zone
        self.node(node, cards=cards, labels={ZONE: zone} if zone else {})
        return self

    def make(
        self,
        name: str,
        mem: int = SMALL,
        *,
        owner: str = "rs",
        policy: str = f"spread-by={ZONE}",
        containers: list[Json] | None = None,
    ) -> Json:
        """Create a pending pod."""
        pod = asking(name, gpu_mem=mem, annotations={names.POLICY: policy})
        pod["spec"]["containers"] = containers or pod["spec"]["containers"]
        pod["metadata"] |= {"resourceVersion": "7", "creationTimestamp": "2026-11-21T10:00:00Z"}
        pod["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
        return self.show_pod(pod)

    def call(self, pod: Json, *nodes: str) -> list[str]:
        answer = verbs.filter_nodes(
            self.state, self.settings, FilterArgs(pod=pod, node_names=list(nodes or self.zones))
        )
        assert not answer.error
        return answer.node_names or []

    def place(self, name: str, mem: int = SMALL, **fields: Any) -> str:
        """Let filter choose the node of a new pod."""
        nodes = self.call(self.make(name, mem, **fields))
        return nodes[0] if nodes else ""

    def bind(self, name: str, node: str, *, watched: bool = True) -> None:
        """Bind the pod.

        watched: whether the watch event is delivered.
        """
        pod = self.pods[name]
        assumed = self.state.assume(Pod(pod).ref, Pod(pod).request, node, "binpack", epoch=0)
        assert isinstance(assumed, Assumed)
        assert assumed.assignment is not None
        if watched:
            pod["spec"]["nodeName"] = node
            pod["metadata"]["annotations"] |= assignment.encode(assumed.assignment, assume_time_ns=1)
            self.show_pod(pod)

    def order(self, name: str) -> list[str]:
        """All nodes by their scores for the pod, the best first."""
        pod = Pod(self.pods[name])
        assert pod.request is not None
        scores = self.state.score_nodes(PlacementRequest(pod.ref, pod.request, list(self.zones), self.settings.policy))
        return sorted(scores, key=lambda node: -scores[node])

    def zone(self, node: str) -> str:
        return self.zones[node]


def test_replicas_are_spread_over_the_domains():
    world = World()
    zones = [world.zone(world.place(f"p{i}")) for i in range(9)]
    assert [sorted(zones[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_within_the_domains_with_the_fewest_peers_the_policy_of_the_extender_decides():
    world = World(policy="spread")
    world.place("filler", P100 // 2, owner="other", policy="binpack")  # on a1, the first by name
    assert world.place("p") == "a2"
    packed = World(policy="binpack")
    packed.place("filler", P100 // 2, owner="other", policy="binpack")
    assert packed.place("p") == "a1"


def test_pods_of_other_controllers_and_policies_do_not_count():
    world = World()
    for i in range(3):
        world.place(f"other{i}", owner="other")
        world.place(f"plain{i}", policy="binpack")
    assert world.place("p") == "a1"


def test_a_full_domain_is_followed_by_the_next_and_nodes_without_the_label_come_last():
    world = World()
    assert [world.place(f"p{i}", P100) for i in range(6)] == ["a1", "b1", "c1", "a2", "x1", ""]


def test_a_pod_that_fits_nowhere_gets_the_reason_of_every_node():
    world = World()
    pod = world.make("big", P100 + 1)
    answer = verbs.filter_nodes(world.state, world.settings, FilterArgs(pod=pod, node_names=list(world.zones)))
    assert answer.failed_and_unresolvable_nodes.keys() == world.zones.keys()


def make_ranks(fitting: Collection[int], *, all_nodes: bool = False) -> World:
    """A cluster of 12 zones with 0 to 11 peers; all are full except `fitting`."""
    world = World({f"n{i:02}": f"z{i:02}" for i in range(12)}, all_nodes=all_nodes)
    for i, node in enumerate(world.zones):
        for k in range(i):
            world.make(f"peer{i}-{k}", 100)
            world.bind(f"peer{i}-{k}", node)
        if i not in fitting:
            world.make(f"full{i}", P100 // 2, owner="other", policy="binpack")
            world.bind(f"full{i}", node)
    return world


@pytest.fixture
def searched_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each search, the UID of the pod."""
    uids: list[str] = []
    count_reserved = NominatedPods.count_reserved

    def count(self: NominatedPods, excluded: Collection[str], *arguments: Any, **limits: Any) -> Any:
        uids.extend(excluded)
        return count_reserved(self, excluded, *arguments, **limits)

    monkeypatch.setattr(NominatedPods, "count_reserved", count)
    return uids


def test_a_pod_that_fits_nowhere_is_not_searched_for_once_for_each_rank(searched_for):
    world = make_ranks(fitting=())
    pod = world.make("p", P100 // 2 + 1)
    answer = verbs.filter_nodes(world.state, world.settings, FilterArgs(pod=pod, node_names=list(world.zones)))
    assert answer.failed_nodes.keys() == world.zones.keys()
    assert searched_for.count("uid-p") == 2


@pytest.mark.parametrize("lowest", range(12))
def test_the_lowest_of_many_ranks_with_a_node_that_fits_is_found_in_few_searches(searched_for, lowest):
    world = make_ranks(fitting={lowest, *range(lowest + 2, 12, 3)})
    assert world.place("p", P100 // 2 + 1) == f"n{lowest:02}"
    assert searched_for.count("uid-p") <= 7


def test_the_nodes_of_all_ranks_are_scored_in_one_search(searched_for):
    world = make_ranks(fitting=(1, 4, 5, 11), all_nodes=True)
    assert sorted(world.call(world.make("p", P100 // 2 + 1))) == ["n01", "n04", "n05", "n11"]
    assert world.order("p") == ["n01", "n04", "n05", "n11"]
    assert searched_for.count("uid-p") == 1


def test_bound_pods_count_until_they_are_deleted():
    world = World()
    for name in ("p0", "p1", "p2"):
        world.bind(name, world.place(name))
    world.pods["p2"]["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    world.show_pod(world.pods["p2"])
    assert world.place("p3") == "c1"


def test_a_pod_counts_from_bind_on_if_filter_has_reserved_nothing():
    world = World(all_nodes=True)
    assert len(world.call(world.make("p0"))) == len(ZONES)
    world.bind("p0", "a2", watched=False)
    world.make("p1")
    assert world.order("p1")[0] == "b1"
    args = FilterArgs(pod=world.pods["p1"], node_names=list(world.zones))
    assert [
        score.host for score in verbs.prioritize(world.state, world.settings, args) if score.score == verbs.MAX_SCORE
    ] == ["b1"]


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_all_nodes_of_a_domain_with_fewer_peers_have_higher_scores(policy):
    world = World(policy=policy, all_nodes=True)
    for name, node in (("p0", "a1"), ("p1", "a1"), ("p2", "b1")):
        world.make(name)
        world.bind(name, node)
    world.make("p3")
    assert [world.zone(node) for node in world.order("p3")] == ["c", "b", "a", "a", ""]


def test_the_pods_own_reservation_does_not_count():
    world = World()
    node = world.place("p0")
    assert [world.place("p0") for _ in range(3)] == [node] * 3


def test_pods_whose_policy_ranks_nodes_are_not_nominated():
    world = World()
    world.make("p0")
    world.make("plain", policy="binpack")
    assert world.nominate_all().keys() == {"plain"}


def test_the_nodes_are_ranked_once_for_a_decision(monkeypatch):
    """Also where pods that come later in the queue must give up their nominations for the pod."""
    world = World({"a1": "a", "b1": "b"})
    for i in range(2):
        pod = world.make(f"later{i}", P100, owner="other", policy="binpack")
        pod["metadata"]["creationTimestamp"] = "2026-11-21T11:00:00Z"
        world.show_pod(pod)
    assert len(world.nominate_all()) == 2
    ranked = []

    def count(label: str, facts: NodeFacts) -> Callable[[str], int]:
        ranked.append(label)
        return spreadby.rank_nodes(label, facts)

    monkeypatch.setitem(policies.POLICIES, "spread-by", replace(spreadby.SPREAD_BY, rank_nodes=count))
    policies._with_label.cache_clear()
    assert world.place("p") == "a1"
    policies._with_label.cache_clear()
    assert ranked == [ZONE]


def test_a_changed_label_counts_at_once():
    world = World({"a1": "a", "b1": "b"})
    world.bind("p0", world.place("p0"))
    world.set_zone("b1", "a").set_zone("c1", "c")
    assert world.place("p1") == "c1"


def one_card_and_a_share() -> list[Json]:
    return [container("a", gpu_mem=SMALL, share=1), container("b", whole_gpu=1, share=1)]


@pytest.fixture
def racks(monkeypatch: pytest.MonkeyPatch) -> World:
    """Three nodes in each zone; pods with several card requests are searched for without the lock."""
    monkeypatch.setattr(nodesearch, "SMALL_SEARCH_NODES", 2)
    return World({f"{zone}{i}": zone for zone in "abc" for i in range(3)}, cards=3)


def test_a_short_search_begins_in_the_domains_with_the_fewest_peers(racks, monkeypatch):
    monkeypatch.setattr(SearchPauses, "is_paused", lambda *_: True)
    for name, node in (("p0", "a0"), ("p1", "b0")):
        racks.make(name)
        racks.bind(name, node)
    assert racks.place("p", containers=one_card_and_a_share())[0] == "c"


def test_of_the_nodes_that_are_reserved_for_later_pods_those_with_the_fewest_peers_are_first(monkeypatch):
    monkeypatch.setattr(nodesearch, "SMALL_SEARCH_NODES", 2)
    world = World({"a1": "a", "b1": "b", "c1": "c"}, cards=3)
    world.make("p0")
    world.bind("p0", "a1")
    for i, whole in enumerate((2, 3, 3)):
        requests = [container("a", whole_gpu=whole, share=1)]
        pod = world.make(f"later{i}", owner=f"o{i}", policy="binpack", containers=requests)
        pod["metadata"]["creationTimestamp"] = "2026-11-21T11:00:00Z"
        world.show_pod(pod)
    assert sorted(world.nominate_all().values()) == ["a1", "b1", "c1"]
    assert world.place("p", containers=one_card_and_a_share()) == "b1"


@pytest.mark.parametrize("all_nodes", [False, True])
def test_pods_with_several_card_requests_are_spread(monkeypatch, all_nodes):
    monkeypatch.setattr(nodesearch, "SMALL_SEARCH_NODES", 2)
    world = World({f"{zone}{i}": zone for zone in "abc" for i in range(3)}, cards=3, all_nodes=all_nodes)
    zones = []
    for i in range(6):
        nodes = world.call(world.make(f"p{i}", containers=one_card_and_a_share()))
        if all_nodes:
            assert len(nodes) > 3
            nodes = world.order(f"p{i}")
            world.bind(f"p{i}", nodes[0], watched=False)
        zones.append(world.zone(nodes[0]))
    assert [sorted(zones[i : i + 3]) for i in (0, 3)] == [["a", "b", "c"]] * 2
