"""Cardwise's objects, an API server that serves them, and a world in which their statuses are written."""

import json
import math
from contextlib import contextmanager

from cardwise.clock import Clock
from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from extender import informers
from extender.cache.cache import Cache
from extender.cache.reservations import Timeouts
from extender.records import cards
from extender.reporting.listers import Listers
from extender.reporting.statuswriter import StatusWriter
from tests.build import extended_resource
from tests.fakes.apiserver import ApiServer, Fault, Request
from tests.fakes.clock import FakeClock

K80 = 11441  # MiB
CARDS, CLASSES, QUOTAS = paths.extendedresources(), paths.resourceclasses(), paths.gpuquotas()
KINDS = {"ExtendedResource": CARDS, "ResourceClass": CLASSES, "GPUQuota": QUOTAS}


class FakeState:
    """A ledger that records its changes, as the state does."""

    def __init__(self) -> None:
        self._cache = Cache(Ledger(), Timeouts(), FakeClock())
        self.ledger = self._cache.ledger
        self.changed: set[str] = set()
        self.views = 0

    @contextmanager
    def view(self):
        self.views += 1
        yield self.ledger

    def snapshot(self):
        return self._cache.snapshot()

    def take_changed_nodes(self) -> set[str]:
        changed, self.changed = self.changed, set()
        return changed


class Watched(ApiServer):
    """An API server whose watch events are delivered when the test says so.

    faults: of the first requests."""

    def __init__(self, seen: Listers, clock: Clock, *faults: Fault) -> None:
        super().__init__(clock)
        self._followed = [
            (self.follow(CARDS), cards.decode_card, seen.cards),
            (self.follow(CLASSES), informers.project_class, seen.classes),
            (self.follow(QUOTAS), informers.project_quota, seen.quotas),
        ]
        for fault in faults:
            self.fault(fault)
        self.before_request(_may_write, "patch", times=math.inf)

    def show(self) -> None:
        """Deliver the watch events of all changes."""
        for fresh, project, seen in self._followed:
            for event in fresh():
                key, record = project(json.dumps(event["object"]).encode())
                if event["type"] == "DELETED":
                    seen.remove_object(key)
                else:
                    seen.set_object(key, record)


def _may_write(request: Request) -> None:
    """Check the rights: the extender may patch only the statuses of cards and quotas."""
    assert request.headers["Content-Type"] == "application/merge-patch+json"
    if request.path.endswith("/status"):
        assert request.body.keys() == {"status"}
    else:
        assert request.path.startswith(CLASSES)
        assert "status" not in request.body


def er_object(uuid: str, node: str, *, model: str = "Tesla K80", index: int = 0) -> Json:
    card = extended_resource(index, node=node, uuid=uuid, model=model, mem=K80)
    card["status"]["gpuAccess"] = "cdi"
    return card


def er_path(uuid: str) -> str:
    return paths.extendedresources(names.extended_resource_name(uuid))


def class_path(name: str) -> str:
    return paths.resourceclasses(name)


def quota_path(name: str, namespace: str = "team") -> str:
    return paths.gpuquotas(namespace, name)


def conditions(status: Json) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in status["conditions"]}


def card(uuid, index=0, *, healthy=True, classes=("k80",), mem=K80):
    return Card(index=index, uuid=uuid, mem=mem, model="Tesla K80", healthy=healthy, classes=frozenset(classes))


def holding(uid, node, *shares, namespace="team"):
    """`shares`: (container key, uuid, MiB, percent); with 100 percent a whole card."""
    containers = {}
    for key, uuid, mem, core in shares:
        containers.setdefault(key, []).append(CardShare(0, uuid, mem, core, K80, whole=core == 100))
    return Holding(uid, namespace, uid, node, Assignment({key: tuple(some) for key, some in containers.items()}))


class World:
    """A writer with its ledger, its API server and a clock to turn."""

    def __init__(self, *faults: Fault):
        self.clock = FakeClock()
        self.seen = Listers()
        self.state = FakeState()
        self.api = Watched(self.seen, self.clock, *faults)
        self.active = True
        self.without_class = []
        self.writer = StatusWriter(
            self.api.client(), self.state, self.seen, active=lambda: self.active, no_class=self._no_class,
            clock=self.clock,
        )  # fmt: skip

    def _no_class(self, quota, text):
        self.without_class.append((quota.name, quota.uid, text))

    def node(self, name, *cards):
        """The cards of the node, as the ledger and the watch show them."""
        self.state.ledger.set_cards(name, cards)
        self.state.changed.add(name)
        for card in cards:
            if self.api.get(er_path(card.uuid)) is None:
                self.api.write_object(CARDS, er_object(card.uuid, name))

    def hold(self, uid, node, *shares, namespace="team"):
        self.state.ledger.set_holding(holding(uid, node, *shares, namespace=namespace))
        self.state.changed.add(node)

    def release(self, uid):
        self.state.changed.add(self.state.ledger.holding(uid).node)
        self.state.ledger.release(uid)

    def run(self, seconds, *, watch=True):
        for _ in range(int(seconds * 4)):
            if watch:
                self.api.show()
            self.writer.step()
            self.clock.advance(0.25)
        if watch:
            self.api.show()

    def status(self, path):
        return self.api.get(path).get("status", {})

    def all(self):
        return [manifest for collection in (CARDS, CLASSES, QUOTAS) for manifest in self.api.all(collection)]
