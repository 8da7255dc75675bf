"""The extender's state and binder before an API server that lies low: answers are lost, and posts land late.

The truth is what the simulated API server has bound, what it may still carry out of posts whose answer was lost, and
what runs on in containers whose pod object is gone. The state hears of it late, in bits, or by a list.
"""

import contextlib
import math

from hypothesis import strategies as st

from cardwise.core.api import assignment, quotas
from cardwise.kube import errors, paths
from extender.binding.binder import Binder
from extender.cache.reservations import Begun
from tests.extender.worlds import (
    RUNNING,
    as_card,
    as_pod,
    held,
    resource,
    state,
    with_cards,
)
from tests.fakes.apiobjects import Refused
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

CARDS = {"n1": 1, "n2": 1}
NODES = sorted(CARDS)
SLOTS = 5
BINDER = "binder"  # the program as which its client comes


class LateWorld:
    """It says when a card is given that is not of the class, or past a quota."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.state = with_cards(state(self.clock), **CARDS)
        self.api = ApiServer(self.clock)
        self.api.admission.append(self._admit)
        self.api.after(self._posted, "create", "*/binding", times=math.inf)
        self._fresh = self.api.follow(paths.pods())
        self._untold = []
        self._lost = False
        self.client, self.others = self.api.client(user_agent=BINDER), self.api.client()
        self.binder = Binder(
            self.client, self.state, policy="binpack", seconds=4.0,
            clock=self.clock,
        )  # fmt: skip
        self.slots = [""] * SLOTS  # names
        self.asked = {}  # name -> request, of all pods ever
        self.told = {}  # name -> record that the state was told last
        self.running = {}  # uid -> (node, assignment) of containers
        self.late = []  # (name, body) of posts that may arrive yet
        self.posting = {}  # name -> (node, assignment, unsure): a thread between begin_bind and finish_bind
        self.health = dict.fromkeys(((node, i) for node, n in CARDS.items() for i in range(n)), "Healthy")
        self.absent = set()  # cards without an ExtendedResource
        self.nodes = set(NODES)
        self.script = []
        self.refused = {}  # name -> (when, nodes)
        self.quotas = {}  # by key
        self.first = set()  # nodes of the class
        self._begin_bind, self.state.begin_bind = self.state.begin_bind, self._begin

    # The API server.

    @property
    def pods(self):
        """By name."""
        return {pod["metadata"]["name"]: pod for pod in self.api.all(paths.pods())}

    def version(self, name):
        """The pod's, "" when it is gone."""
        return self.pods[name]["metadata"]["resourceVersion"] if name in self.pods else ""

    def _admit(self, call):
        """What becomes of a call of the binder."""
        if call.headers["User-Agent"] != BINDER:
            return
        if call.verb == "get":
            if self.script[:1] == ["blind"]:
                raise ConnectionResetError("for reading too it is away")
            return
        if call.verb == "patch":
            return
        name = call.path.split("/")[-2]
        answer = self.script.pop(0) if self.script else "429"
        self.clock.advance(0.1)
        self._lost = answer == "lose"
        if answer == "vanish":
            self._delete(name)
            self._tell_all()
        if answer == "429":
            raise Refused(429, "busy", retryAfterSeconds=1)
        if answer == "403":
            raise Refused(403, "denied")
        if answer in ("late", "blind"):
            self.late.append((name, call.body))
        if answer in ("late", "blind", "never"):
            raise ConnectionResetError("nobody knows what becomes of it")

    def _posted(self, call):
        """Containers start, and the answer may be lost."""
        name = call.path.split("/")[-2]
        made = self.api.get(paths.pods("default", name))
        if made is not None and made["spec"].get("nodeName") and not made.get("status"):
            made = self.api.edit(paths.pods("default", name), status=status(RUNNING))
            node, annotations = made["spec"]["nodeName"], made["metadata"]["annotations"]
            self.running[made["metadata"]["uid"]] = (node, assignment.decode(annotations))
        if self._lost and call.headers["User-Agent"] == BINDER:
            raise ConnectionResetError("the answer is lost")

    def _land(self, name, body):
        self.others.create(paths.pods("default", name, "binding"), body)

    def _put(self, made):
        self.api.put(paths.pods(), made)

    def _delete(self, name):
        self.api.remove(paths.pods("default", name))
        self.refused.clear()  # the scheduler sees it and tries all again

    # What the state hears.

    def events(self):
        """Name and record (None: it is gone) of what has happened and was not told yet."""
        for event in self._fresh():
            record = None if event["type"] == "DELETED" else as_pod(event["object"])
            self._untold.append((event["object"]["metadata"]["name"], record))
        return self._untold

    def _tell(self, name, record):
        if record is not None:
            self.state.set_pod(record)
            self.told[name] = record
        elif name in self.told:
            self.state.remove_pod(self.told.pop(name))

    def _tell_all(self):
        while self.events():
            self._tell(*self._untold.pop(0))

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

    def _resolve_late(self, data):
        """Some land now, some never, and some stand still for longer."""
        for late in list(self.late):
            becomes = data.draw(st.sampled_from(["lands", "never lands", "stands"]))
            if becomes != "stands":
                self.late.remove(late)
            if becomes == "lands":
                self._try_land(*late)

    def _try_land(self, name, body):
        with contextlib.suppress(errors.KubeError):
            self._land(name, body)

    def _begin(self, pod, asked, node, policy, *, term=0):
        begun = self._begin_bind(pod, asked, node, policy, term=term)
        if isinstance(begun, Begun) and not begun.unsure:
            # Decided now, so now it is of the class, and within the quotas with all that may run or come to run.
            assert not asked.containers[0].device_class or node in self.first
            others = self._may_be_held()
            others.pop(pod.uid, None)
            for quota in self.quotas.values():
                for entry in quota.entries:
                    most = quotas.total(self._charge(choices, entry) for choices in others.values())
                    more = self._charge([(node, begun.assignment)], entry)
                    assert quotas.headroom(entry, most).takes(more), (entry, most, more)
        return begun

    def _may_be_held(self):
        """By UID, nodes and assignments of which one holds or may come to hold."""
        may = {uid: [at] for uid, at in self.running.items()}
        posts = [
            (name, body["target"]["name"], assignment.decode(body["metadata"]["annotations"]))
            for name, body in self.late
            if body["metadata"]["resourceVersion"] == self.version(name)
        ]
        posts += [(name, node, begun.assignment) for name, (node, begun) in self.posting.items()]
        pods = self.pods if posts else {}
        for name, node, made in posts:
            if name in pods and not pods[name]["spec"].get("nodeName"):
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
