"""An API server of cards that can be cordoned and pods that can be evicted, for `cordon` and `drain`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cardwise.core import names
from cardwise.kube import errors
from tests.cli.worlds import Json, Lists, placed


def owned(pod: Json, kind: str = "ReplicaSet") -> Json:
    return pod | {"metadata": pod["metadata"] | {"ownerReferences": [{"kind": kind, "controller": True}]}}


def running(name: str, node: str = "n1", index: int = 0, kind: str = "ReplicaSet") -> Json:
    """A pod of a controller, with 1000 MiB of the card."""
    return owned(placed("team-a", name, node, index, 1000), kind)


class Cards(Lists):
    """`ends` are the pods that go at the next look after their eviction; the others take for ever to end.

    `budget`: how often the eviction of a pod is refused first.
    """

    def __init__(self, cards: list[Json], pods: list[Json]) -> None:
        super().__init__({"extendedresources": cards, "pods": pods})
        for one in cards:
            one["metadata"]["labels"][names.NODE_LABEL] = one["spec"]["node"]
        self.ends = {pod["metadata"]["name"] for pod in pods}
        self.budget: dict[str, int] = {}
        self.evicted: list[tuple[str, Json]] = []
        self.rehearsed: list[str] = []
        self.ending: list[str] = []
        self.unknown: set[str] = set()  # fields that the kind drops

    def card(self, name: str) -> Json:
        for card in self.objects["extendedresources"]:
            if card["metadata"]["name"] == name:
                return card
        raise errors.NotFound(404, "NotFound", name)

    def list_pages(
        self, path: str, query: Mapping[str, str] | None = None, limit: int = 500, *, timeout: float = 60.0
    ) -> Iterator[bytes]:
        selected = (query or {}).get("fieldSelector", "")
        for page in super().list_pages(path, query):
            listed = json.loads(page)
            if selected:
                node = selected.removeprefix("spec.nodeName=")
                listed["items"] = [pod for pod in listed["items"] if pod["spec"].get("nodeName") == node]
            yield json.dumps(listed).encode()
        if path.endswith("pods"):
            self.objects["pods"] = [p for p in self.objects["pods"] if p["metadata"]["name"] not in self.ending]

    def get(self, path: str) -> Json:
        return self.card(path.rpartition("/")[2]) if "extendedresources" in path else super().get(path)

    def patch(self, path: str, obj: Json, query: Mapping[str, str] | None = None) -> Json:
        card = self.card(path.rpartition("/")[2])
        changed = card["spec"] | obj["spec"]
        kept = {key: value for key, value in changed.items() if value is not None and key not in self.unknown}
        if not query:
            card["spec"] = kept
        return card | {"spec": kept}

    def create(self, path: str, obj: Json, timeout: float | None = None) -> Json:
        if path.endswith("selfsubjectreviews"):
            return {"status": {"userInfo": {"username": "jane"}}}
        assert path.endswith("/eviction")
        name, options = obj["metadata"]["name"], obj["deleteOptions"]
        if self.budget.get(name, 0):
            if "dryRun" not in options:
                self.budget[name] -= 1
            raise errors.TooManyRequests(429, "TooManyRequests", "the disruption budget web needs 1 healthy pods")
        if "dryRun" in options:
            self.rehearsed.append(name)
        else:
            self.evicted.append((name, options))
            if name in self.ends:
                self.ending.append(name)
        return {}


def spec(api: Cards, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api.card(name)["spec"]
    return found
