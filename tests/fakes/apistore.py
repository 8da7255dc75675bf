"""The objects of the API server of the tests, and the log of all writes that its watches read."""

import itertools
import threading
from dataclasses import dataclass

from cardwise.clock import Clock
from cardwise.core.values.decoded import Json
from tests.fakes.apiobjects import KINDS, Key, Refused, Target, copied, without_metadata_and_status

TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Entry:
    """One write. `now` is None for a deletion."""

    revision: int
    key: Key
    before: Json | None
    now: Json | None


class Store:
    """Stored objects are never changed, only replaced. Hold `changed` while you call; it is notified of each write.

    `revision` is that of the last write, and `compacted` the first that is still remembered.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.revision = 100
        self.compacted = 0
        self.objects: dict[Key, Json] = {}
        self.log: list[Entry] = []
        self.written: set[str] = set()  # collections that have had an event
        self.numbers = itertools.count(1)
        self._snapshots: dict[str, tuple[int, list[Json]]] = {}

    def get_object(self, target: Target) -> Json:
        stored = self.objects.get(target.key)
        if stored is None:
            raise Refused(404, f'{target.collection.rpartition("/")[2]} "{target.name}" not found')
        return stored

    def all(self, target: Target) -> list[Json]:
        """Of a collection, or of a namespace of it, in the order of their names."""
        keys = sorted(key for key in self.objects if key[0] == target.collection)
        return [self.objects[key] for key in keys if target.namespace in ("", key[1])]

    def write_object(self, collection: str, manifest: Json) -> Json:
        """Writes the whole object, status and all. A uid is kept or made; a namespace is "default"."""
        manifest = copied(manifest)
        metadata = manifest["metadata"]
        if KINDS[collection].namespaced:
            metadata.setdefault("namespace", "default")
        key = (collection, metadata.get("namespace", ""), metadata["name"])
        before = self.objects.get(key)
        for name, part in (before["metadata"] if before is not None else self.born()).items():
            if name in ("uid", "creationTimestamp"):
                metadata.setdefault(name, part)
        return self.write(key, manifest)

    def write(self, key: Key, manifest: Json) -> Json:
        metadata = manifest["metadata"] | self._generation(key, manifest) | {"resourceVersion": str(self.revision + 1)}
        manifest = manifest | {"metadata": metadata}
        self._append(key, manifest)
        self.objects[key] = manifest
        return manifest

    def remove(self, key: Key) -> None:
        if key in self.objects:
            self._append(key, None)
            del self.objects[key]

    def born(self) -> Json:
        """What a new object gets."""
        return {"uid": f"00000000-0000-0000-0000-{next(self.numbers):012}", "creationTimestamp": self.now()}

    def now(self) -> str:
        return self.clock.wall().strftime(TIME)

    def snapshot(self, objects: list[Json]) -> str:
        """A token by which these are had again."""
        token = f"t{next(self.numbers)}"
        self._snapshots[token] = self.revision, objects
        return token

    def snapshotted(self, token: str) -> tuple[int, list[Json]]:
        if token not in self._snapshots:
            raise Refused(410, "The provided continue parameter is too old to display a consistent list result.")
        return self._snapshots[token]

    def compact(self) -> None:
        """What was before the last write is forgotten."""
        self.compacted = self.revision
        self._snapshots = {
            token: snapshot for token, snapshot in self._snapshots.items() if snapshot[0] >= self.compacted
        }

    def _generation(self, key: Key, manifest: Json) -> Json:
        """It counts what changes of an object of our kinds beside metadata and status."""
        if not KINDS[key[0]].custom:
            return {}
        before = self.objects.get(key)
        if before is None:
            return {"generation": manifest["metadata"].get("generation", 1)}
        changed = without_metadata_and_status(before) != without_metadata_and_status(manifest)
        return {"generation": before["metadata"]["generation"] + changed}

    def _append(self, key: Key, now: Json | None) -> None:
        self.revision += 1
        self.log.append(Entry(self.revision, key, self.objects.get(key), now))
        self.written.add(key[0])
        self.changed.notify_all()
