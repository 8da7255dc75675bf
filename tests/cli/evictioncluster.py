"""An API server of cards that can be cordoned and pods that can be evicted, for `cordon` and `drain`."""

import math
from typing import Any

from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cli.clusters import Cluster, placed
from tests.fakes.apiserver import Fault, Request


def owned(pod: Json, kind: str = "ReplicaSet") -> Json:
    return pod | {"metadata": pod["metadata"] | {"ownerReferences": [{"kind": kind, "controller": True}]}}


def running(name: str, node: str = "n1", index: int = 0, kind: str = "ReplicaSet") -> Json:
    """A pod of a controller, with 1000 MiB of the card."""
    return owned(placed("team-a", name, node, index, 1000), kind)


class Cards(Cluster):
    """A pod that is evicted is there at the next look, and gone at the one after, unless it is one of `lasting`."""

    def __init__(self, cards: list[Json], pods: list[Json], **objects: list[Json]) -> None:
        super().__init__({"extendedresources": cards, "pods": pods} | objects)
        self.lasting: set[str] = set()
        self.evicted: list[tuple[str, Json]] = []
        self.rehearsed: list[str] = []
        self.after_request(self._record_eviction, "create", "*/eviction", times=math.inf)
        self.after_request(self._ended, "list", paths.pods(), times=math.inf)

    def holds_back(self, pod: str, times: float) -> None:
        """So often a disruption budget refuses its eviction first."""
        text = "the disruption budget web needs 1 healthy pods"
        self.fault(Fault(status=429, message=text), "create", f"*/pods/{pod}/eviction", times)

    def card(self, name: str) -> Json:
        resource = self.get(paths.extendedresources(name))
        assert resource is not None
        return resource

    def _record_eviction(self, request: Request) -> None:
        name, options = request.body["metadata"]["name"], request.body["deleteOptions"]
        if "dryRun" in options:
            self.rehearsed.append(name)
        else:
            self.evicted.append((name, options))

    def _ended(self, _: Request) -> None:
        for pod in self.objects("pods"):
            metadata = pod["metadata"]
            if metadata.get("deletionTimestamp") and metadata["name"] not in self.lasting:
                self.remove(paths.pods(metadata["namespace"], metadata["name"]))


def spec(api: Cards, name: str) -> dict[str, Any]:
    stored_spec: dict[str, Any] = api.card(name)["spec"]
    return stored_spec
