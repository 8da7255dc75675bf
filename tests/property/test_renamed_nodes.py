"""Rules 1, 3 and 5 of docs/architecture.md, for the extender's state, while machines come back under other names.

A card has one ExtendedResource, named by its UUID. It goes with its Node, is deleted by a person, or is written anew in
place; the pods of the machine's former name are in any phase meanwhile.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardwise.core.api import assignment, quotas, request
from cardwise.core.placement.placement import Placement
from extender.cache.reservations import Assumed, Phase
from extender.placing.placing import PlacementRequest
from extender.records.podref import PodRef
from extender.reporting import statuses
from tests.build import asking, extended_resource
from tests.examples import examples
from tests.extender.states import as_card, as_pod, make_state
from tests.fakes.clock import FakeClock

NODES = ["n1", "n2", "n3"]
CARDS = ["GPU-a", "GPU-b"]
SIZE = 100
NAMESPACES = ["d", "e"]
GONE_AFTER, PLANS_END_AFTER = 21, 31

cards = st.sampled_from(CARDS)
nodes = st.sampled_from(NODES)
some_phases = st.sampled_from([Phase.RESERVED, Phase.BINDING, Phase.ACCEPTED, Phase.BOUND, Phase.BOUND, Phase.BOUND])


class Pod:
    """What must count of a pod."""

    def __init__(self, name, namespace, node, assigned, *, phase, since):
        self.name, self.namespace, self.node, self.assigned = name, namespace, node, assigned
        self.phase, self.since = phase, since
        (self.share,) = assigned.shares()
        self.uid = f"uid-{name}"

    def as_bound(self):
        pod = asking(self.name, namespace=self.namespace, gpu_mem=self.share.mem)
        pod["spec"]["nodeName"] = self.node
        pod["metadata"]["annotations"] = assignment.encode(self.assigned, assume_time_ns=1)
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
        return as_pod(pod)


class RenamedNodes(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.state = make_state(self.clock)
        self.pods = {}  # by UID
        self.node_of_card = dict.fromkeys(CARDS, "")  # the node in each card's ExtendedResource; "": there is none
        self.reports = {card: set() for card in CARDS}  # the UIDs in its status.reported
        self.created_count = 0

    @initialize()
    def start(self):
        for node in NODES:
            self.state.set_node(node)
        for card in CARDS:
            self.write(card, "n1")

    def write(self, card, node, reported=()):
        self.node_of_card[card], self.reports[card] = node, set(reported)
        manifest = extended_resource(CARDS.index(card), node=node, mem=SIZE)
        manifest["metadata"]["name"], manifest["spec"]["uuid"] = card.lower(), card
        manifest["status"]["reported"] = [
            {"podUID": pod.uid, "namespace": pod.namespace, "name": pod.name, "memoryMiB": pod.share.mem}
            for pod in (self.pods[uid] for uid in sorted(reported))
        ]
        self.state.set_card(*as_card(manifest))

    def delete(self, card):
        if self.node_of_card[card]:
            self.state.remove_card(card.lower())
            self.node_of_card[card], self.reports[card] = "", set()

    @rule(mem=st.integers(1, SIZE), namespace=st.sampled_from(NAMESPACES), phase=some_phases)
    def pod_is_placed(self, mem, namespace, phase):
        self.created_count += 1
        name = f"p{self.created_count}"
        ref, pod_request = PodRef(f"uid-{name}", namespace, name), request.parse(asking(name, gpu_mem=mem))
        placed = self.state.plan_pod(PlacementRequest(ref, pod_request, NODES, "binpack"))
        fits = [card for card in CARDS if self.node_of_card[card] and self.used(card) + mem <= SIZE]
        assert isinstance(placed, Placement) == bool(fits)
        if not fits:
            return
        self.pods[ref.uid] = pod = Pod(
            name, namespace, placed.node, placed.assignment, phase=phase, since=self.clock.now()
        )
        if phase is Phase.RESERVED:
            return
        begun = self.state.assume(ref, pod_request, placed.node, "binpack", epoch=0)
        assert isinstance(begun, Assumed)
        assert begun.assignment == placed.assignment
        if phase is not Phase.BINDING:
            self.state.record_binding_outcome(ref.uid, Phase.ACCEPTED)
        if phase is Phase.BOUND:
            self.state.set_pod(pod.as_bound())

    @rule(data=st.data())
    @precondition(lambda self: any(pod.phase is Phase.BOUND for pod in self.pods.values()))
    def pod_is_deleted(self, data):
        uid = data.draw(st.sampled_from(sorted(uid for uid, pod in self.pods.items() if pod.phase is Phase.BOUND)))
        pod = self.pods[uid]
        self.state.remove_pod(pod.as_bound())
        pod.phase, pod.since = Phase.TERMINATING, self.clock.now()

    @rule(seconds=st.sampled_from([1, GONE_AFTER, PLANS_END_AFTER]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self.state.expire_reservations()
        for uid, pod in list(self.pods.items()):
            age = self.clock.now() - pod.since
            if pod.phase is Phase.TERMINATING and age > GONE_AFTER - 1 and not self.is_reported_at_home(pod):
                pod.phase = Phase.ORPHANED
            if pod.phase is Phase.RESERVED and age > PLANS_END_AFTER - 1:
                del self.pods[uid]

    @rule(card=cards, data=st.data())
    def node_reports(self, card, data):
        """A node is honest: it reports pods whose object is gone, before their time is over, or again."""
        if not self.node_of_card[card]:
            return
        may = {
            uid
            for uid, pod in self.pods.items()
            if pod.share.uuid == card and (pod.phase is Phase.TERMINATING or uid in self.reports[card])
        }
        reported = data.draw(st.sets(st.sampled_from(sorted(may)))) if may else set()
        silent = self.reports[card] - reported
        self.write(card, self.node_of_card[card], reported)
        for uid in silent:
            if self.pods[uid].node == self.node_of_card[card]:
                del self.pods[uid]  # its containers are gone, by the node where it was

    @rule(card=cards, new=nodes, change=st.sampled_from(["deleted", "in place", "without report"]))
    def card_moves(self, card, new, change):
        if new == self.node_of_card[card]:
            return
        reported = self.reports[card] & self.pods.keys()
        if change == "deleted":
            self.delete(card)
        self.write(card, new, reported if change == "in place" else ())

    @rule(card=cards)
    def card_is_deleted(self, card):
        self.delete(card)

    @rule(node=nodes)
    def node_is_deleted(self, node):
        """The garbage collector deletes its ExtendedResources; which the watch shows first is by chance."""
        self.state.remove_node(node)
        for card in CARDS:
            if self.node_of_card[card] == node:
                self.delete(card)
        self.state.set_node(node)

    def is_reported_at_home(self, pod):
        return any(self.node_of_card[card] == pod.node and pod.uid in self.reports[card] for card in CARDS)

    def counts(self, pod):
        return pod.phase is not Phase.ORPHANED or self.is_reported_at_home(pod)

    def used(self, card):
        """MiB of all that holds the card, whatever its node is called; and what its node reports beyond."""
        held = [
            pod
            for uid, pod in self.pods.items()
            if pod.share.uuid == card and (self.counts(pod) or uid in self.reports[card])
        ]
        return sum(pod.share.mem for pod in held)

    @invariant()
    def each_card_counts_all_its_holders_and_is_never_over_full(self):
        with self.state.view() as ledger:
            for card in CARDS:
                if self.node_of_card[card]:
                    node = ledger.node(self.node_of_card[card])
                    used = node.used[[other.uuid for other in node.cards].index(card)]
                    assert used == self.used(card)
                    assert used <= SIZE
            assert not ledger.violations()
            assert not ledger.shared_uuids()

    @invariant()
    def each_pod_is_charged_once(self):
        with self.state.view() as ledger:
            for namespace in NAMESPACES:
                charged = quotas.sum_charges(ledger.usage_by_kind(namespace).values())
                of_pods = [pod for pod in self.pods.values() if pod.namespace == namespace and self.counts(pod)]
                assert (charged.memory, charged.shares) == (sum(holder.share.mem for holder in of_pods), len(of_pods))

    @invariant()
    def statuses_say_the_same(self):
        with self.state.view() as ledger:
            for card in CARDS:
                if self.node_of_card[card]:
                    counted = statuses.compute_node_totals(ledger, self.node_of_card[card])
                    assert counted.cards[card.lower()].allocated.memory_mib == self.used(card)
            for node in NODES:
                missing = [uuid for uuid, _ in statuses.compute_node_totals(ledger, node).wrong]
                assert not {card.lower() for card in CARDS if self.node_of_card[card]}.intersection(missing)

    @invariant()
    def marks_count_what_is_held(self):
        with self.state.view() as ledger:
            held = sum(1 for holding in ledger.holdings())
        assert sum(self.state.reservation_counts().values()) == held


TestRenamedNodes = RenamedNodes.TestCase
TestRenamedNodes.settings = settings(max_examples=examples(60, soak=2000), stateful_step_count=25, deadline=None)
