"""After any changes and lost events, every status finally equals a recount of everything."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import quotas
from tests.build import gpu_quota, resource_class
from tests.examples import examples
from tests.extender.statuscluster import (
    CARDS,
    CLASSES,
    K80,
    KINDS,
    QUOTAS,
    World,
    card,
    class_path,
    conditions,
    er_object,
    er_path,
    quota_path,
)
from tests.fakes.apiserver import Fault

NODES, NAMED = ["n1", "n2"], ["k80", "slow"]
NAMESPACES = ["team", "others"]
FAULTS = [Fault(lost=True), Fault(), Fault(refused=True), Fault(status=409)]
HARD = [
    [{"class": "k80", "shares": 1}],
    [{"class": "slow", "memoryMiB": 100}, {"model": "Tesla K80", "gpus": 1}],
    [{"shares": 2, "memoryMiB": 8000}],
    [{"shares": -1}],
]
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("cards"),
            st.sampled_from(NODES),
            st.lists(st.sets(st.sampled_from(NAMED)), max_size=2),
            st.booleans(),
        ),
        st.tuples(
            st.just("hold"),
            st.integers(0, 5),
            st.sampled_from(NODES),
            st.integers(0, 2),
            st.sampled_from([10, 4000, K80]),
            st.sampled_from(NAMESPACES),
        ),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("resource"), st.integers(0, 1), st.sampled_from(NODES), st.booleans()),
        st.tuples(st.just("class"), st.sampled_from(NAMED), st.booleans()),
        st.tuples(st.just("quota"), st.sampled_from(NAMESPACES), st.integers(-1, len(HARD) - 1)),
        st.tuples(st.just("scribble"), st.integers(0, 20)),
        st.tuples(st.just("fault"), st.sampled_from(FAULTS)),
        st.tuples(st.just("lead"), st.booleans()),
        st.tuples(st.just("run"), st.sampled_from([0.25, 1, 5]), st.booleans()),
    ),
    max_size=40,
)


class Story:
    """Executes steps, and computes the expected statuses from the objects and the holdings alone."""

    def __init__(self):
        self.world = World()
        self.faults = []
        self.world.writer._audited = float("inf")  # changes must be found without the audit

    def play(self, step):
        kind, *arguments = step
        getattr(self, f"_{kind}")(*arguments)

    def _cards(self, node, classes_of, healthy):
        node_cards = [card(f"GPU-{node}-{i}", i, healthy=healthy, classes=some) for i, some in enumerate(classes_of)]
        self.world.state.ledger.set_cards(node, node_cards)
        self.world.state.changed.add(node)

    def _resource(self, index, node, there):
        uuid = f"GPU-{node}-{index}"
        if there:
            self.world.api.write_object(CARDS, er_object(uuid, node, index=index))
        else:
            self.world.api.remove(er_path(uuid))

    def _hold(self, pod, node, index, mem, namespace):
        core = 100 if mem == K80 else 0
        if f"p{pod}" in {holding.uid for holding in self.world.state.ledger.holdings()}:
            self.world.release(f"p{pod}")
        self.world.hold(f"p{pod}", node, ("0", f"GPU-{node}-{index}", mem, core), namespace=namespace)

    def _release(self, pod):
        if self.world.state.ledger.holding(f"p{pod}") is not None:
            self.world.release(f"p{pod}")

    def _class(self, name, there):
        if there:
            self.world.api.write_object(CLASSES, resource_class(name))
        else:
            self.world.api.remove(class_path(name))

    def _quota(self, namespace, index):
        path = quota_path("gpus", namespace)
        if index < 0:
            self.world.api.remove(path)
            return
        status = (self.world.api.get(path) or {}).get("status", {})
        self.world.api.write_object(
            QUOTAS, gpu_quota(*HARD[index], name="gpus", namespace=namespace) | {"status": status}
        )

    def _scribble(self, index):
        objects = self.world.all()
        if objects:
            manifest = objects[index % len(objects)]
            lies = {"freeMiB": 7, "allocated": {"shares": 3}, "devices": 99, "summary": "lies", "problem": "lies"}
            self.world.api.write_object(KINDS[manifest["kind"]], manifest | {"status": lies})

    def _fault(self, fault):
        self.faults.append(self.world.api.fault(fault))

    def _lead(self, leads):
        self.world.active = leads

    def _run(self, seconds, watch):
        self.world.run(seconds, watch=watch)

    def check(self):
        world = self.world
        world.active = True
        for fault in self.faults:
            fault.remaining = 0
        world.run(75)
        for manifest in world.api.all(CARDS):
            self._check_card(manifest["spec"], manifest["status"])
        for manifest in world.api.all(CLASSES):
            self._check_class(manifest["metadata"]["name"], manifest["status"])
        for manifest in world.api.all(QUOTAS):
            self._check_quota(manifest)

    def _shares(self, uuid):
        return [
            (holding, share)
            for holding in self.world.state.ledger.holdings()
            for share in holding.assignment.shares()
            if share.uuid == uuid
        ]

    def _node_of(self, node):
        state = self.world.state.ledger.node(node)
        return state.cards if state is not None else []

    def _check_card(self, spec, status):
        held = self._shares(spec["uuid"])
        known = next((entry for entry in self._node_of(spec["node"]) if entry.uuid == spec["uuid"]), None)
        used = sum(share.mem for _, share in held)
        takes = known is not None and known.healthy and len(held) < 48
        assert status["allocated"] == {
            "memoryMiB": used,
            "corePercent": sum(share.core for _, share in held),
            "shares": len(held),
            "whole": any(share.whole for _, share in held),
            "pods": len({entry.uid for entry, _ in held}),
        }
        assert status["freeMiB"] == (max(0, K80 - used) if takes else 0)
        assert status["classes"] == (sorted(known.classes) if known is not None else [])

    def _check_class(self, name, status):
        cards = [(node, card) for node in NODES for card in self._node_of(node) if name in card.classes]
        used = {card.uuid: sum(share.mem for _, share in self._shares(card.uuid)) for _, card in cards}
        assert status | {"conditions": []} == {
            "devices": len(cards),
            "healthyDevices": sum(card.healthy for _, card in cards),
            "nodes": len({node for node, _ in cards}),
            "memoryMiB": K80 * len(cards),
            "usedMiB": sum(used.values()),
            "freeMiB": sum(max(0, K80 - used[card.uuid]) for _, card in cards if card.healthy),
            "conditions": [],
        }
        assert conditions(status) == {"Valid": "True"}

    def _check_quota(self, manifest):
        status, hard = manifest["status"], manifest["spec"]["hard"]
        if hard == HARD[3]:
            assert status.keys() == {"conditions"}
            assert conditions(status) == {"Exceeded": "Unknown", "Valid": "False"}
            return
        known = {record.uuid: record for node in NODES for record in self._node_of(node)}
        ledger, over = self.world.state.ledger, False
        for line, entry in zip(status["used"], quotas.parse(manifest).entries, strict=True):
            held = [
                share
                for record in ledger.holdings()
                if record.namespace == manifest["metadata"]["namespace"]
                for share in record.assignment.shares()
                if (
                    entry.covers(known[share.uuid].classes, known[share.uuid].model)
                    if share.uuid in known
                    else ledger.kinds.is_covered(ledger.kind_of_share(record.node, share), entry)
                )
            ]
            amounts = {
                "shares": len(held),
                "memoryMiB": sum(share.mem for share in held),
                "gpus": sum(share.whole for share in held),
            }
            assert {key: line[key] for key in amounts} == amounts
            limits = zip(amounts.values(), (entry.shares, entry.memory, entry.cards), strict=True)
            over |= any(limit is not None and amount > limit for amount, limit in limits)
        there = {manifest["metadata"]["name"] for manifest in self.world.api.all(CLASSES)}
        missing = any("class" in line and line["class"] not in there for line in hard)
        assert conditions(status) == {"Exceeded": str(over), "Valid": str(not missing)}


@settings(max_examples=examples(100, soak=2000), deadline=None)
@given(steps)
def test_in_the_end_every_status_equals_a_recount(played):
    story = Story()
    for step in played:
        story.play(step)
    story.check()
