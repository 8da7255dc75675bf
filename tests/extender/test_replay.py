"""Rule 3 and "relist = events": for any history and any order of events, the ledger is the same."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from extender.state import State
from tests.build import P100, extended_resource, reported_share
from tests.examples import examples
from tests.extender.states import ENDED, RUNNING, as_card, as_pod, bound, make_state
from tests.fakes.clock import FakeClock

NODES = ["n1", "n2"]
UIDS = [f"u{i}" for i in range(5)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), st.sampled_from(UIDS), st.sampled_from(NODES), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(st.just("dying"), st.sampled_from(UIDS)),
        st.tuples(st.just("end"), st.sampled_from(UIDS)),
        st.tuples(st.just("finish"), st.sampled_from(UIDS)),
        st.tuples(st.just("delete"), st.sampled_from(UIDS)),
        st.tuples(st.just("report"), st.sampled_from(NODES), st.integers(0, 1), st.sampled_from(UIDS)),
        st.tuples(st.just("unreport"), st.sampled_from(NODES), st.integers(0, 1)),
        st.tuples(
            st.just("card"), st.sampled_from(NODES), st.integers(0, 1), st.sampled_from(["Healthy", "Unhealthy"])
        ),
        st.tuples(st.just("no card"), st.sampled_from(NODES), st.integers(0, 1)),
        st.tuples(st.just("node"), st.sampled_from(NODES)),
        st.tuples(st.just("no node"), st.sampled_from(NODES)),
    ),
    max_size=40,
)


class Truth:
    """The API server's objects, and the events of its changes as (feed, apply) pairs."""

    def __init__(self) -> None:
        self.pods: dict[str, dict] = {}
        self.cards: dict[tuple[str, int], dict] = {}
        self.nodes: set[str] = set()
        self.events: dict[str, list] = {"pods": [], "cards": [], "nodes": []}
        self.generation = 0

    def play(self, step: tuple) -> None:
        kind, *arguments = step
        getattr(self, f"_{kind.replace(' ', '_')}")(*arguments)

    def _put_pod(self, pod: dict) -> None:
        self.pods[pod["metadata"]["name"]] = pod
        record = as_pod(pod)
        self.events["pods"].append(lambda to: to.set_pod(record))

    def _bind(self, name: str, node: str, index: int, tenth: int) -> None:
        if name not in self.pods:
            self.generation += 1
            self._put_pod(bound(name, tenth * P100 // 10, index, node=node, uid=f"{name}-{self.generation}"))

    def _changed(self, name: str, **fields: object) -> None:
        if name not in self.pods:
            return
        old = as_pod(self.pods[name])
        share = old.assignment.shares()[0]
        self._put_pod(bound(name, share.mem, share.index, node=old.node, uid=old.uid, **fields))

    def _dying(self, name: str) -> None:
        self._changed(name, deleting=True)

    def _end(self, name: str) -> None:
        self._changed(name, deleting=True, containers=ENDED)

    def _finish(self, name: str) -> None:
        self._changed(name, phase="Succeeded", containers=ENDED)

    def _delete(self, name: str) -> None:
        if name in self.pods:
            record = as_pod(self.pods.pop(name))
            self.events["pods"].append(lambda to: to.remove_pod(record))

    def _put_card(self, node: str, index: int, card: dict) -> None:
        self.cards[node, index] = card
        name, record = as_card(card)
        self.events["cards"].append(lambda to: to.set_card(name, record))

    def _card(self, node: str, index: int, health: str) -> None:
        before = self.cards.get((node, index), {}).get("status", {}).get("reported", [])
        self._put_card(node, index, extended_resource(index, node=node, health=health, reported=before))

    def _report(self, node: str, index: int, name: str) -> None:
        """Let the node report the shares of a pod that was bound there."""
        if (node, index) in self.cards and name in self.pods:
            record = as_pod(self.pods[name])
            share = record.assignment.shares()[0]
            if record.node == node and share.index == index:
                self._put_card(
                    node, index, extended_resource(index, node=node, reported=[reported_share(record.uid, share.mem)])
                )

    def _unreport(self, node: str, index: int) -> None:
        if (node, index) in self.cards:
            self._put_card(node, index, extended_resource(index, node=node))

    def _no_card(self, node: str, index: int) -> None:
        if (node, index) in self.cards:
            name, _ = as_card(self.cards.pop((node, index)))
            self.events["cards"].append(lambda to: to.remove_card(name))

    def _node(self, node: str) -> None:
        self.nodes.add(node)
        self.events["nodes"].append(lambda to: to.set_node(node))

    def _no_node(self, node: str) -> None:
        self.nodes.discard(node)
        self.events["nodes"].append(lambda to: to.remove_node(node))

    def listed(self) -> list:
        """The events of one list of all objects."""
        pods, cards = (
            [as_pod(manifest) for manifest in self.pods.values()],
            [as_card(manifest) for manifest in self.cards.values()],
        )
        return [
            *[lambda to, record=record: to.set_pod(record) for record in pods],
            *[lambda to, name=name, record=record: to.set_card(name, record) for name, record in cards],
            *[lambda to, node=node: to.set_node(node) for node in self.nodes],
        ]


def interleaved(feeds: dict[str, list], draw: random.Random) -> list:
    """Interleave the feeds: each keeps its order, but there is no order between feeds."""
    queues = [list(events) for events in feeds.values() if events]
    mixed = []
    while queues:
        queue = draw.choice(queues)
        mixed.append(queue.pop(0))
        if not queue:
            queues.remove(queue)
    return mixed


def picture(state: State, clock: FakeClock) -> dict:
    """The free memory of every card after all timeouts."""
    clock.advance(1000)
    state.expire_reservations()
    with state.view() as ledger:
        assert all(set(node.holdings) == {h.uid for h in ledger.holdings(node.name)} for node in ledger.nodes())
        # An extender that has not seen a pod only has its node's report.
        uids = {
            node.name: sorted(uid.removeprefix(f"{node.name}/") for uid in node.holdings) for node in ledger.nodes()
        }
        return {node.name: (node.cards, node.free, node.used, uids[node.name]) for node in ledger.nodes()}


@settings(max_examples=examples(100, soak=2000), deadline=None)
@given(steps, st.randoms(use_true_random=False), st.integers(0, 40))
def test_events_in_any_interleaving_a_relist_and_a_gap_come_to_the_same_ledger(history, draw, gap):
    truth = Truth()
    clock = FakeClock()
    with_gap = make_state(clock)
    for number, step in enumerate(history):
        truth.play(step)
        if number == gap:
            for event in interleaved(truth.events, draw):
                event(with_gap)
            before = set(truth.pods), set(truth.cards), set(truth.nodes), dict(truth.pods), dict(truth.cards)
    by_events = make_state(clock)
    for event in interleaved(truth.events, draw):
        event(by_events)
    by_list = make_state(clock)
    listed = truth.listed()
    draw.shuffle(listed)
    for event in listed:
        event(by_list)
    expected = picture(by_list, clock)
    assert picture(by_events, clock) == expected
    if len(history) > gap:
        _relist(with_gap, truth, before)
        assert picture(with_gap, clock) == expected


def _relist(state: State, truth: Truth, before: tuple) -> None:
    """The events of a reflector after a gap: deleted objects in their last known state, then new and changed ones."""
    _, cards, nodes, old_pods, old_cards = before
    now = {as_pod(pod).uid for pod in truth.pods.values()}
    for pod in old_pods.values():
        if as_pod(pod).uid not in now:
            state.remove_pod(as_pod(pod))
    for key in cards - set(truth.cards):
        state.remove_card(as_card(old_cards[key])[0])
    for node in nodes - truth.nodes:
        state.remove_node(node)
    for event in truth.listed():
        event(state)


@settings(max_examples=examples(80, soak=1000), deadline=None)
@given(steps)
def test_what_exists_and_runs_is_always_held_and_in_the_end_nothing_else_is(history):
    truth = Truth()
    clock = FakeClock()
    state = make_state(clock)
    for step in history:
        for feed in truth.events.values():
            feed.clear()
        truth.play(step)
        for event in interleaved(truth.events, random.Random(0)):
            event(state)
        with state.view() as ledger:
            for pod in truth.pods.values():
                if pod["status"]["phase"] == "Running":
                    assert ledger.holding(pod["metadata"]["uid"]) is not None
    for name in list(truth.pods):
        truth.events["pods"].clear()
        truth.play(("delete", name))
        truth.events["pods"][0](state)
    for key in list(truth.cards):
        truth.events["cards"].clear()
        truth.play(("unreport", *key))
        truth.events["cards"][0](state)
    clock.advance(1000)
    state.expire_reservations()
    with state.view() as ledger:
        assert ledger.holdings() == []


__all__ = ["RUNNING"]
