"""An API server's half of our own objects, and a world in which their statuses are written, for tests."""

import json
from contextlib import contextmanager
from typing import Any

from cardwise.core import names
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.cards import Card
from cardwise.core.ledger import Holding, Ledger
from cardwise.kube import errors
from extender import objects
from extender.sightings import Sightings
from extender.statuswriter import StatusWriter
from tests.fakes.clock import FakeClock

K80 = 11441  # MiB

Json = dict[str, Any]


class Books:
    """A ledger that says what changed, as the state does."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.changed: set[str] = set()
        self.views = 0

    @contextmanager
    def view(self):
        self.views += 1
        yield self.ledger

    def changed_nodes(self) -> set[str]:
        changed, self.changed = self.changed, set()
        return changed


class FakeApi:
    """At the seam of KubeClient. Objects by path; what changes is shown to the sightings at `show`.

    `answers`: for each call an exception, "lose" (done, but nobody hears), or "land".
    """

    def __init__(self, seen: Sightings, *answers: object) -> None:
        self.answers = list(answers)
        self.objects: dict[str, Json] = {}
        self.calls: list[tuple[str, str, Json]] = []
        self._kinds = {
            "extendedresources": (objects.card, seen.cards),
            "resourceclasses": (objects.resource_class, seen.classes),
            "gpuquotas": (objects.quota, seen.quotas),
        }
        self._unshown: dict[str, None] = {}
        self._shown: dict[str, str] = {}
        self._version = 0

    def put(self, path: str, obj: Json) -> Json:
        """As a user or another program does."""
        self._version += 1
        before = self.objects.get(path)
        metadata = {"uid": f"uid-{self._version}"} | (before["metadata"] if before else {}) | obj["metadata"]
        metadata["resourceVersion"] = str(self._version)
        if before is not None and before.get("spec") != obj.get("spec"):
            metadata["generation"] = metadata.get("generation", 1) + 1
        self.objects[path] = obj | {"metadata": metadata}
        self._unshown[path] = None
        return self.objects[path]

    def remove(self, path: str) -> None:
        self.objects.pop(path, None)
        self._unshown[path] = None

    def show(self) -> None:
        """The watch tells what has changed."""
        for path in self._unshown:
            project, seen = next(of for kind, of in self._kinds.items() if f"/{kind}/" in path)
            if path in self.objects:
                key, record = project(json.dumps(self.objects[path]).encode())
                seen.put(key, record)
                self._shown[path] = key
            elif path in self._shown:
                seen.remove(self._shown.pop(path))
        self._unshown.clear()

    def patch(self, path: str, obj: Json, kind: str, *, timeout: float) -> Json:
        assert kind == "merge"
        return self._do("patch", path, obj, lambda: self._patch(path, obj))

    def create(self, path: str, obj: Json, *, timeout: float) -> Json:
        return self._do("create", path, obj, lambda: self._create(f"{path}/{obj['metadata']['name']}", obj))

    def delete(self, path: str, body: Json, *, timeout: float) -> Json:
        return self._do("delete", path, body, lambda: self._delete(path, body))

    def _do(self, what: str, path: str, body: Json, act) -> Json:
        self.calls.append((what, path, json.loads(json.dumps(body))))
        answer = self.answers.pop(0) if self.answers else "land"
        if isinstance(answer, Exception):
            raise answer
        done = act()
        if answer == "lose":
            raise errors.Unreachable("timed out")
        return done

    def _patch(self, path: str, obj: Json) -> Json:
        if path.endswith("/status"):
            assert obj.keys() == {"status"}
        else:
            assert "/resourceclasses/" in path, "of the rest the extender may patch statuses only"
            assert "status" not in obj
        path = path.removesuffix("/status")
        if path not in self.objects:
            raise errors.NotFound(404, "NotFound", path)
        found = self.objects[path]["metadata"]
        if any(obj.get("metadata", {}).get(key, found[key]) != found[key] for key in ("uid", "resourceVersion")):
            raise errors.Conflict(409, "Conflict", path)
        merged = _merged(self.objects[path], obj)
        return self.objects[path] if merged == self.objects[path] else self.put(path, merged)

    def _create(self, path: str, obj: Json) -> Json:
        if path in self.objects:
            raise errors.AlreadyExists(409, "AlreadyExists", path)
        return self.put(path, obj)

    def _delete(self, path: str, body: Json) -> Json:
        if path not in self.objects:
            raise errors.NotFound(404, "NotFound", path)
        found = self.objects[path]["metadata"]
        if any(found[key] != value for key, value in body["preconditions"].items()):
            raise errors.Conflict(409, "Conflict", path)
        self.remove(path)
        return {}


def _merged(found: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def er_object(uuid: str, node: str, *, model: str = "Tesla K80", index: int = 0) -> Json:
    return {
        "metadata": {"name": names.extended_resource_name(uuid)},
        "spec": {"node": node, "index": index, "uuid": uuid, "model": model, "memoryMiB": K80},
        "status": {"health": "Healthy", "cardAccess": "cdi"},
    }


def class_object(name: str, model: str = "Tesla K80", **spec: object) -> Json:
    return {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": {"model": model}}} | spec}


def quota_object(name: str, *hard: Json, namespace: str = "team") -> Json:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"hard": list(hard), "onExceed": "Wait"}}


def er_path(uuid: str) -> str:
    return f"/apis/{names.API_VERSION}/extendedresources/{names.extended_resource_name(uuid)}"


def class_path(name: str) -> str:
    return f"/apis/{names.API_VERSION}/resourceclasses/{name}"


def quota_path(name: str, namespace: str = "team") -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{namespace}/gpuquotas/{name}"


def conditions(status: Json) -> dict[str, str]:
    return {each["type"]: each["status"] for each in status["conditions"]}


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

    def __init__(self, *answers):
        self.clock = FakeClock()
        self.seen = Sightings()
        self.books = Books()
        self.api = FakeApi(self.seen, *answers)
        self.active = True
        self.without_class = []
        self.writer = StatusWriter(
            self.api, self.books, self.seen, active=lambda: self.active, no_class=self._no_class,
            clock=self.clock,
        )  # fmt: skip

    def _no_class(self, quota, text):
        self.without_class.append((quota.name, quota.uid, text))

    def node(self, name, *cards):
        """The cards of the node, as the ledger and the watch show them."""
        self.books.ledger.set_cards(name, cards)
        self.books.changed.add(name)
        for one in cards:
            if er_path(one.uuid) not in self.api.objects:
                self.api.put(er_path(one.uuid), er_object(one.uuid, name))

    def hold(self, uid, node, *shares, namespace="team"):
        self.books.ledger.hold(holding(uid, node, *shares, namespace=namespace))
        self.books.changed.add(node)

    def release(self, uid):
        self.books.changed.add(self.books.ledger.holding(uid).node)
        self.books.ledger.release(uid)

    def run(self, seconds, *, watch=True):
        for _ in range(int(seconds * 4)):
            if watch:
                self.api.show()
            self.writer.step()
            self.clock.advance(0.25)
        if watch:
            self.api.show()

    def status(self, path):
        return self.api.objects[path].get("status", {})

    def writes(self, path=""):
        return [call for call in self.api.calls if call[1].startswith(path)]
