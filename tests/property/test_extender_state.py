"""Rules 1, 3 and 5 of docs/architecture.md on the extender's state and binder, whatever the API server does."""

import contextlib
import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cardwise.core.api import assignment, quotas, request
from cardwise.core.placement import placement
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.kube import errors, paths
from extender.binding import binder
from extender.binding.binder import Failed
from extender.cache.placing import Ask
from extender.cache.reservations import Begun, Phase
from extender.leadership.fence import Fence
from extender.leadership.leadership import Alone
from extender.records.podref import PodRef
from extender.records.wire import BindArgs
from tests.examples import examples
from tests.extender.worlds import (
    ENDED,
    P100,
    RUNNING,
    as_card,
    as_class,
    as_pod,
    as_quota,
    asking,
    comes,
    resource,
    resource_class,
)
from tests.fakes.apiserver import Fault
from tests.property.lateworld import CARDS, NODES, SLOTS, LateWorld, status

AGAIN = 300.0  # seconds after which kube-scheduler asks for a waiting pod by itself
slots = st.integers(0, SLOTS - 1)
sizes = st.sampled_from([P100 // 2, P100 // 2 + 1, P100])
wanted = st.sampled_from(["", "", "first"])  # classes
entries = st.sampled_from([
    {"shares": 1}, {"shares": 2}, {"memoryMiB": P100}, {"memoryMiB": P100 - 1}, {"class": "first", "shares": 0},
    {"class": "first", "shares": 1, "memoryMiB": P100 // 2},
])  # fmt: skip
nodes_asked = st.lists(st.sampled_from(NODES), min_size=1, max_size=2, unique=True)
# land: done and heard. lose: done, unheard. late: unheard, and it may be done yet. never: unheard, never done.
outcomes = st.lists(
    st.sampled_from(["land", "land", "land", "lose", "late", "never", "429", "403", "blind", "vanish"]),
    min_size=1,
    max_size=4,
)


class Machine(LateWorld, RuleBasedStateMachine):
    # What happens.

    @initialize(mems=st.lists(sizes, min_size=SLOTS, max_size=SLOTS))
    def pods_are_created(self, mems):
        for slot, mem in enumerate(mems):
            self.pod_is_created(slot, mem, "")

    @rule(nodes=st.sets(st.sampled_from(NODES)))
    def the_class_changes(self, nodes):
        self.first = nodes
        if nodes:
            self.state.set_class(as_class(resource_class("first", node=sorted(nodes))))
        else:
            self.state.remove_class("first")

    @rule(name=st.sampled_from(["one", "two"]), entry=st.none() | entries)
    def a_quota_changes(self, name, entry):
        key, quota = as_quota(entry or {"shares": 9}, name=name)
        if entry is None:
            self.quotas.pop(key, None)
            self.state.remove_quota(key)
        else:
            self.quotas[key] = quota
            self.state.set_quota(key, quota)

    @rule(slot=slots, mem=sizes, device_class=wanted)
    def pod_is_created(self, slot, mem, device_class):
        if self.slots[slot] in self.pods:
            return
        name = self.slots[slot] = f"p{len(self.asked)}"
        made = asking(name, gpu_mem=mem, device_class=device_class)
        self.asked[name] = request.parse(made)
        self._put(made)

    # A slot is a live pod or one that is gone: kube-scheduler knows no better.

    @rule(slot=slots, nodes=nodes_asked, one=st.booleans())
    def filter_is_asked(self, slot, nodes, one):
        name = self.slots[slot]
        uid, asked = f"uid-{name}", self.asked[name]
        if one:
            found = self.state.plan(Ask(PodRef(uid, "default", name), asked, nodes, "binpack"))
        else:
            found = self.state.fitting(Ask(PodRef(uid, "default", name), asked, nodes, "binpack"))
        if isinstance(found, Unplaceable) and name in self.pods:
            self.refused[name] = (self.clock.now(), nodes)
        else:
            self.refused.pop(name, None)

    @rule(slot=slots, script=outcomes)
    def the_scheduler_tries(self, slot, script):
        name = self.slots[slot]
        found = self.state.plan(Ask(PodRef(f"uid-{name}", "default", name), self.asked[name], NODES, "binpack"))
        if isinstance(found, Unplaceable):
            self.filter_is_asked(slot, NODES, one=True)
        else:
            self.bind_is_asked(slot, found.node, script)

    @rule(slot=slots, node=st.sampled_from(NODES), script=outcomes)
    def bind_is_asked(self, slot, node, script):
        name = self.slots[slot]
        if name in self.pods:
            comes(self.state, name, self.asked[name], self.version(name))
        self.script = list(script)
        args = BindArgs(pod_name=name, pod_namespace="default", pod_uid=f"uid-{name}", node=node)
        with contextlib.suppress(Failed):
            self.binder.bind(args)
        self.script = []
        self.refused.pop(name, None)

    @rule(slot=slots, node=st.sampled_from(NODES))
    def a_thread_begins_to_post(self, slot, node):
        name = self.slots[slot]
        begun = self.state.begin_bind(PodRef(f"uid-{name}", "default", name), self.asked[name], node, "binpack")
        if isinstance(begun, Begun):
            self.posting[name] = (node, begun)
            self.refused.pop(name, None)

    @rule(data=st.data(), outcome=st.sampled_from(["heard", "unheard", "late", "refused"]))
    def the_thread_ends(self, data, outcome):
        if not self.posting:
            return
        name = data.draw(st.sampled_from(sorted(self.posting)))
        node, begun = self.posting.pop(name)
        annotations = assignment.encode(begun.assignment, assume_time_ns=1)
        body = {
            "metadata": {"annotations": annotations, "resourceVersion": self.version(name)},
            "target": {"name": node},
        }
        stage = Phase.UNCONFIRMED if begun.unsure else None
        if outcome == "late":
            self.late.append((name, body))
            stage = Phase.UNCONFIRMED
        elif outcome != "refused":
            try:
                self._land(name, body)
                stage = Phase.ASSUMED if outcome == "heard" else Phase.UNCONFIRMED
            except errors.KubeError:
                pass
        self.state.finish_bind(f"uid-{name}", stage)

    @rule(data=st.data())
    def a_late_post_lands(self, data):
        if self.late:
            self._try_land(*self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    @rule(slot=slots)
    def somebody_changes_the_pod(self, slot):
        made = self.pods.get(self.slots[slot])
        if made is not None:
            labels = {"changed": str(self.clock.wall_ns())}
            self.api.edit(paths.pods("default", self.slots[slot]), metadata={"labels": labels})

    @rule(slot=slots, other=slots, node=st.sampled_from(NODES))
    def a_post_stands_still_past_all_patience(self, slot, other, node):
        self.bind_is_asked(slot, node, ["late"])
        self._tell_all()
        self._report_all()
        self.clock.advance(80.0)
        self._upkeep()
        self.the_scheduler_tries(other, ["land"])

    @rule(count=st.integers(1, 6))
    def the_watch_tells(self, count):
        if count > 5:
            return self.a_list_comes_instead_of_events()
        for _ in range(min(count, len(self.events()))):
            self._tell(*self._untold.pop(0))
        return None

    def a_list_comes_instead_of_events(self):
        self.events().clear()
        pods = self.pods
        for name in set(self.told) - set(pods):
            self._tell(name, None)
        for name, made in pods.items():
            self._tell(name, as_pod(made))

    @rule(slot=slots, how=st.sampled_from(["force", "force", "proof", "finished", "late proof"]), at_once=st.booleans())
    def pod_is_deleted(self, slot, how, at_once):
        name = self.slots[slot]
        made = self.pods.get(name)
        if made is None:
            return
        if made["spec"].get("nodeName"):
            if how == "late proof":
                self._put(made | {"status": status(RUNNING, "Failed")})
            if how != "force":
                self.running.pop(f"uid-{name}")
                phase = "Running" if how == "proof" else "Failed"
                metadata = made["metadata"] | {"deletionTimestamp": "2026-11-21T10:00:00Z"}
                self._put(made | {"metadata": metadata, "status": status(ENDED, phase)})
        self._delete(name)
        if at_once:
            self._tell_all()

    @rule(data=st.data())
    def containers_of_a_vanished_pod_end(self, data):
        gone = sorted(set(self.running) - {made["metadata"]["uid"] for made in self.pods.values()})
        if gone:
            del self.running[data.draw(st.sampled_from(gone))]

    @rule(
        card=st.sampled_from(sorted((node, i) for node, n in CARDS.items() for i in range(n))),
        what=st.sampled_from(["report", "Healthy", "Unhealthy", "no card", "no node", "node"]),
    )
    def a_node_changes(self, card, what):
        node, i = card
        if what == "no card":
            self.absent.add(card)
            self.state.remove_card(as_card(resource(i, node=node))[0])
        elif what == "no node" and node != "n2":  # one is left to be touched
            self.nodes.discard(node)
            self.state.remove_node(node)
        elif what == "node":
            self.nodes.add(node)
            self.state.set_node(node)
        else:
            if what.endswith("ealthy"):
                self.health[card] = what
                self.absent.discard(card)
            self._report(node, i)

    @rule(data=st.data(), seconds=st.sampled_from([0.5, 5.0, 31.0, 80.0]), refused=st.sampled_from([0, 0, 422, 503]))
    def time_passes(self, data, seconds, refused):
        """`refused`: somebody's policy, or the API server, lets nobody change the pods that are looked up."""
        # Watches lag and nodes report, but within the grace times.
        self._tell_all()
        self._report_all()
        self._resolve_late(data)
        self._tell_all()
        self.clock.advance(seconds)
        self._upkeep(refused)

    @rule(slot=slots, others=st.sets(slots), refused=st.sampled_from([422, 503]))
    def a_late_one_cannot_be_changed_and_others_come(self, slot, others, refused):
        self.the_scheduler_tries(slot, ["late"])
        self._tell_all()
        self._report_all()
        self.clock.advance(80.0)
        self._upkeep(refused)
        for other in others - {slot}:
            self.the_scheduler_tries(other, ["land"])

    def _upkeep(self, refused=0):
        fault = self.api.fault(Fault(status=refused), "patch", "*/status", times=math.inf if refused else 0)
        binder.look_up(Fence(self.client, self.clock), self.state, Alone(), clock=self.clock)
        fault.end()
        if self.state.touch_due() is not None:
            self.refused.clear()

    # What always holds.

    @invariant()
    def no_card_ever_gets_more_than_it_has(self):
        """Whatever of the late posts lands."""
        most = {}
        for choices in self._may_be_held().values():
            worst = {}
            for node, made in choices:
                for share in made.shares():
                    worst[node, share.index] = max(worst.get((node, share.index), 0), share.mem)
            for card, mem in worst.items():
                most[card] = most.get(card, 0) + mem
        assert all(mem <= P100 for mem in most.values()), most

    @invariant()
    def who_was_refused_and_has_room_now_is_going_to_be_woken(self):
        have_room = []
        pods = self.pods
        with self.state.view() as ledger:
            for name, (at, nodes) in self.refused.items():
                if name not in pods or self.clock.now() - at > AGAIN:
                    continue
                headroom = [
                    quotas.headroom(entry, ledger.used("default", entry))
                    for quota in self.quotas.values()
                    for entry in quota.entries
                ]
                if isinstance(placement.place(ledger, nodes, self.asked[name], "binpack", headroom), Placement):
                    have_room.append(name)
        with self.state.queue() as queue:
            assert not have_room or queue.moving, have_room

    def teardown(self):
        for name in sorted(self.posting):
            self.state.finish_bind(f"uid-{name}", Phase.UNCONFIRMED)
        self.late.clear()
        for name in sorted(self.pods):
            self._delete(name)
        self._tell_all()
        self.running.clear()
        self._report_all()
        for _ in range(3):
            self.clock.advance(100.0)
            self._upkeep()
        with self.state.view() as ledger:
            assert ledger.holdings() == []


TestState = Machine.TestCase
TestState.settings = settings(max_examples=examples(24, soak=2000), stateful_step_count=40, deadline=None)
