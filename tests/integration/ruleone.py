"""What the API server itself tells, followed while a test goes on; and rule 1 by it: what is held on each GPU."""

import threading
from collections import defaultdict
from typing import Self

import msgspec

from cardwise.core.api import assignment
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE

FINISHED = ("Succeeded", "Failed")


class Follower:
    """Hands all objects below a path, and every event of them, to `on_event`, in a thread of its own."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        self.violations: list[str] = []
        self.events = 0
        self.failed = ""
        self._cluster = cluster
        self._path = path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE)

    def on_event(self, kind: str, manifest: Json) -> None:
        """One event."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            version = ""
            for page in self._cluster.api.list_pages(self._path, limit=0):
                listed = msgspec.json.decode(page)
                version = listed["metadata"]["resourceVersion"]
                for listed_object in listed["items"]:
                    self._count("ADDED", listed_object)
            while not self._stopping.is_set():
                for line in self._cluster.api.watch(
                    self._path, resource_version=version, timeout_seconds=2, read_timeout=PATIENCE
                ):
                    event = msgspec.json.decode(line)
                    assert event["type"] != "ERROR", event
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._count(event["type"], event["object"])
        except Exception as error:  # noqa: BLE001 - told by the test, which runs in another thread
            self.failed = repr(error)

    def _count(self, kind: str, manifest: Json) -> None:
        self.events += 1
        self.on_event(kind, manifest)


class RuleOne(Follower):
    """Sums up what is held on each GPU after every event of a pod."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, paths.pods())
        self.held: dict[str, dict[tuple[str, str], int]] = {}  # MiB by pod and card
        self.totals: dict[tuple[str, str], int] = {}
        self.names: dict[str, str] = {}  # by UID
        self._over: set[str] = set()

    def on_event(self, kind: str, manifest: Json) -> None:
        """The pod is so now."""
        uid, node = manifest["metadata"]["uid"], manifest["spec"].get("nodeName")
        self.held.pop(uid, None)
        self.names[uid] = manifest["metadata"]["name"]
        over = kind == "DELETED" or manifest["status"].get("phase") in FINISHED
        if over:
            self._over.add(uid)
        elif uid in self._over:
            self.violations.append(
                f"{manifest['metadata']['name']} runs again, though it was over: no kubelet does that"
            )
        assigned = assignment.decode(manifest["metadata"].get("annotations") or {}) if node and not over else None
        if assigned is None:
            return
        held: dict[tuple[str, str], int] = defaultdict(int)
        for share in assigned.shares():
            held[node, share.uuid] += share.mem
            self.totals[node, share.uuid] = share.total
        self.held[uid] = held
        for card in held:
            total = sum(shares.get(card, 0) for shares in self.held.values())
            if total > self.totals[card]:
                holders = {self.names[other]: shares[card] for other, shares in self.held.items() if card in shares}
                self.violations.append(
                    f"{total} of {self.totals[card]} MiB on {card} with {manifest['metadata']['name']}: {holders}"
                )
