"""The extender's state and binder before an API server that lies low: answers are lost, and posts land late.

The truth is what the simulated API server has bound, what it may still carry out of posts whose answer was lost, and
what runs on in containers whose pod object is gone. The state hears of it late, in bits, or by a list.
"""

import contextlib

from hypothesis import strategies as st

from cardwise.core import assignment, quotas
from cardwise.kube import errors
from extender.binder import Binder
from extender.decisions import Begun
from extender.requests import Requests
from tests.extender.worlds import (
    RUNNING,
    as_card,
    as_pod,
    held,
    resource,
    state,
    with_cards,
)
from tests.fakes.clock import FakeClock

CARDS = {"n1": 1, "n2": 1}
NODES = sorted(CARDS)
SLOTS = 5


class LateWorld:
    """It says when a card is given that is not of the class, or past a quota."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.state = with_cards(state(self.clock), **CARDS)
        self.requests = Requests()
        self.binder = Binder(
            self, self.state, self.requests, policy="binpack", seconds=4.0,
            clock=self.clock,
        )  # fmt: skip
        self.pods = {}  # name -> JSON, as the API server has it
        self.slots = [""] * SLOTS  # names
        self.asked = {}  # name -> request, of all pods ever
        self.told = {}  # name -> record that the state was told last
        self.events = []  # (name, record or None), not told yet
        self.running = {}  # uid -> (node, assignment) of containers
        self.late = []  # (since, name, body) of posts that may land yet
        self.posting = {}  # name -> (node, assignment, unsure): a thread between begin_bind and finish_bind
        self.health = dict.fromkeys(((node, i) for node, n in CARDS.items() for i in range(n)), "Healthy")
        self.absent = set()  # cards without an ExtendedResource
        self.nodes = set(NODES)
        self.script = []
        self.refused = {}  # name -> (when, nodes)
        self.quotas = {}  # by key
        self.first = set()  # nodes of the class
        self._begin_bind, self.state.begin_bind = self.state.begin_bind, self._begin

    # The API server, at the seam of KubeClient.

    def request(self, method, path, *, body, timeout):
        name = path.split("/")[-2]
        answer = self.script.pop(0) if self.script else "429"
        self.clock.advance(0.1)
        if answer == "vanish":
            self._delete(name)
            self._tell_all()
            answer = "land"
        if answer == "429":
            raise errors.TooManyRequests(429, "TooManyRequests", "busy", retry_after=1.0)
        if answer == "403":
            raise errors.Forbidden(403, "Forbidden", "denied")
        if answer in ("late", "blind"):
            self.late.append((self.clock.now(), name, body))
        if answer in ("late", "blind", "never"):
            raise errors.Unreachable("timed out")
        self._land(name, body)
        if answer == "lose":
            raise errors.Unreachable("timed out")
        return b"{}"

    def get(self, path, *, timeout):
        if self.script[:1] == ["blind"]:
            raise errors.Unreachable("timed out")
        name = path.split("/")[-1]
        if name not in self.pods:
            raise errors.NotFound(404, "NotFound", name)
        return self.pods[name]

    def _land(self, name, body):
        made = self.pods.get(name)
        if made is None:
            raise errors.NotFound(404, "NotFound", name)
        if made["spec"].get("nodeName"):
            raise errors.Conflict(409, "Conflict", "already assigned")
        node, annotations = body["target"]["name"], body["metadata"]["annotations"]
        metadata = made["metadata"] | {"annotations": annotations}
        made = made | {"metadata": metadata, "spec": made["spec"] | {"nodeName": node}, "status": status(RUNNING)}
        self.running[metadata["uid"]] = (node, assignment.decode(annotations))
        self._put(name, made)

    def _put(self, name, made):
        self.pods[name] = made
        self.events.append((name, as_pod(made)))

    def _delete(self, name):
        if self.pods.pop(name, None) is not None:
            self.events.append((name, None))
            self.refused.clear()  # the scheduler sees it and tries all again

    def _tell(self, name, record):
        if record is not None:
            self.state.set_pod(record)
            self.told[name] = record
        elif name in self.told:
            self.state.remove_pod(self.told.pop(name))

    def _tell_all(self):
        while self.events:
            self._tell(*self.events.pop(0))

    def _report(self, node, i):
        """The node publishes what containers hold whose pod object is gone."""
        if (node, i) in self.absent:
            return
        alive = {made["metadata"]["uid"] for made in self.pods.values()}
        shares = [
            held(uid, share.mem)
            for uid, (where, made) in self.running.items()
            for share in made.shares()
            if where == node and share.index == i and uid not in alive
        ]
        self.state.set_card(*as_card(resource(i, node=node, health=self.health[node, i], held=shares)))

    def _report_all(self):
        for node, i in self.health:
            self._report(node, i)

    def _resolve_late(self, data, until):
        for at, name, body in list(self.late):
            if at <= until:
                self.late.remove((at, name, body))
                if data.draw(st.booleans()):
                    self._try_land(name, body)

    def _try_land(self, name, body):
        with contextlib.suppress(errors.KubeError):
            self._land(name, body)

    def _begin(self, uid, who, asked, node, policy, *, term=0):
        begun = self._begin_bind(uid, who, asked, node, policy, term=term)
        if isinstance(begun, Begun) and not begun.unsure:
            # Decided now, so now it is of the class, and within the quotas with all that may run or come to run.
            assert not asked.containers[0].device_class or node in self.first
            others = self._may_be_held()
            others.pop(uid, None)
            for quota in self.quotas.values():
                for entry in quota.entries:
                    most = quotas.total(self._charge(choices, entry) for choices in others.values())
                    more = self._charge([(node, begun.assignment)], entry)
                    assert quotas.room(entry, most).takes(more), (entry, most, more)
        return begun

    def _may_be_held(self):
        """By UID, nodes and assignments of which one holds or may come to hold."""
        may = {uid: [at] for uid, at in self.running.items()}
        posts = [(name, body["target"]["name"], assignment.decode(body["metadata"]["annotations"]))
                 for _, name, body in self.late]  # fmt: skip
        posts += [(name, node, begun.assignment) for name, (node, begun) in self.posting.items()]
        for name, node, made in posts:
            if name in self.pods and not self.pods[name]["spec"].get("nodeName"):
                may.setdefault(f"uid-{name}", []).append((node, made))
        return may

    def _charge(self, choices, entry):
        """The most that one of them charges the entry, of cards that their nodes report."""
        return max(
            quotas.total(
                quotas.charge(share)
                for share in made.shares()
                if (node, share.index) not in self.absent
                and node in self.nodes
                and (not entry.device_class or node in self.first)
            )
            for node, made in choices
        )


def status(containers, phase="Running"):
    return {"phase": phase, "containerStatuses": [{"name": "main", "state": {containers: {}}}]}
