"""The part of a reflector without I/O: the known objects, and the changes that an event or a new list causes.

It is free of I/O, clocks and threads, so property tests can check its contract. After a list and events, the store has
the current objects. Applying all diffs in order leads to the same objects.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Diff(Generic[T]):
    """The changes of one step. Apply `deleted` first, because an added object may use what a deleted one frees."""

    added: list[tuple[str, T]] = field(default_factory=list)
    updated: list[tuple[str, T, T]] = field(default_factory=list)  # key, old, new; old != new
    deleted: list[tuple[str, T]] = field(default_factory=list)

    def __len__(self) -> int:
        """The number of objects that changed."""
        return len(self.added) + len(self.updated) + len(self.deleted)


class Store(Generic[T]):
    """The values that the projection returned, by key. Events update them by the object's identity ("namespace/name").

    The projection chooses the key, often the UID. An object may be deleted and created again with the same name between
    two watches. Then the store shows one deletion and one addition, never an update. Values are compared by `==`; an
    event is not a change if the value stays equal. One thread writes; any thread may read.
    """

    def __init__(self) -> None:
        self._records: dict[str, T] = {}
        # By identity, the key, if it differs from the identity. A complete table would be large with 60,000 pods.
        self._aliases: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> T | None:
        return self._records.get(key)

    def snapshot(self) -> dict[str, T]:
        """An atomic copy of all values, by key."""
        return dict(self._records)

    def apply_event(self, identity: str, projected: tuple[str, T] | None) -> Diff[T]:
        """Apply an event. `projected`: the object's key and value; None if it was deleted or is now ignored."""
        diff: Diff[T] = Diff()
        known_key = self._aliases.get(identity, identity)
        if projected is None:
            self._forget(identity, known_key, diff)
            return diff
        key, record = projected
        if known_key != key:
            self._forget(identity, known_key, diff)
        self._set_record(identity, key, record, diff)
        return diff

    def reuse_known(self, key: str, record: T) -> T:
        """The known value if it equals `record`, else `record`. So a list with unchanged values takes no additional
        memory.
        """
        known_record = self._records.get(key)
        return known_record if known_record is not None and known_record == record else record

    def add_records(self, records: Iterable[tuple[str, str, T]]) -> Diff[T]:
        """Add one page of the first list, as (identity, key, value). Deletes nothing."""
        diff: Diff[T] = Diff()
        for key, (identity, record) in {key: (identity, record) for identity, key, record in records}.items():
            self._set_record(identity, key, record, diff)
        return diff

    def replace_records(self, records: Iterable[tuple[str, str, T]], keep: Collection[str] = ()) -> Diff[T]:
        """Replace all values by a complete list of (identity, key, value). Objects whose identity is in `keep` stay
        unchanged.
        """
        diff: Diff[T] = Diff()
        new_records = {key: (identity, record) for identity, key, record in records}
        kept_keys = {self._aliases.get(identity, identity) for identity in keep}
        deleted_keys = [key for key in self._records if key not in new_records and key not in kept_keys]
        if deleted_keys:
            identities = {key: identity for identity, key in self._aliases.items()}
            for key in deleted_keys:
                self._forget(identities.get(key, key), key, diff)
        for key, (identity, record) in new_records.items():
            self._set_record(identity, key, record, diff)
        return diff

    def _set_record(self, identity: str, key: str, record: T, diff: Diff[T]) -> None:
        if key in self._records:
            old = self._records[key]
            if old is record or old == record:
                return
            diff.updated.append((key, old, record))
        else:
            diff.added.append((key, record))
            if key != identity:
                self._aliases[identity] = key
        self._records[key] = record

    def _forget(self, identity: str, key: str, diff: Diff[T]) -> None:
        self._aliases.pop(identity, None)
        if key in self._records:
            diff.deleted.append((key, self._records.pop(key)))
