"""The store of grants on this node's disk: one file for each container with a share.

The store is the second source of truth beside the pods' annotations, and the only source about containers. With the
store, containers can restart while the API server is away, and a card that a deleted pod still uses stays protected.
The store survives a crash.

Theory of operation. A grant is added in memory under the lock, after the check that its card has space. Then the grant
is written to disk, and only then its container may start. A pod holds all its shares from its first grant on. Otherwise
another pod could take the share that the second container, or a restarted first container, will need.

Example: pod A has containers with 4096 and 8192 MiB on a card of 16276 MiB. When the first container starts, A holds
12288 MiB of the card. So pod B with 8192 MiB is refused even before A's second container starts.

After a restore of etcd, pod A can be bound here again under its UID, with other cards. The pod holds the cards of its
running containers until these containers have ended. So a grant with other cards is added only after the former grants
were dropped. If the grants of a pod differ, the pod holds the largest granted amount of each card.
"""

import contextlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec import Struct

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import shareagent
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.values.wording import quote_text, sanitize_message
from cardwise.kube.wire import prepare_types

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")
# At most 250 characters: with the suffix at most 255 bytes, the limit of a file name.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,249}")
_SUFFIX = ".json"
_DISK_LOCK_COUNT = 64
_PROBE_BYTES = 4096  # size of the test file: one block, which a full disk cannot store
_MAX_NAME_BYTES = 200  # bytes kept of a moved file's name; with the appended time, the new name has at most 255 bytes
_MAX_NUMBER = 2**63 - 1  # the maximum of each number in a grant
_VERSION = 1


class UnsafeName(ValueError):
    """A pod UID or container name that must not become a file name."""


class GrantedDevice(Struct, frozen=True, rename="camel"):
    """A device other than a GPU, as in the assignment."""

    resource_class: str
    uuid: str

    @classmethod
    def from_share(cls, share: AssignedDevice) -> "GrantedDevice":
        return cls(share.resource_class, share.uuid)


class _Format(Struct):
    """The field of a grant on disk that determines how to read the other fields."""

    version: Any = _VERSION


class Grant(Struct, frozen=True, kw_only=True, rename="camel"):
    """A container's shares and devices. On disk, shares have the field names of `CardShare`.

    slots: the container's device IDs.
    shares, devices: the shares and devices of the container.
    pod_shares, pod_devices: the shares and devices of all containers of the pod. The pod holds all of these from its
    first grant on.
    pod_keys: the container key of each of the `pod_shares`.
    pod_device_keys: the container key of each of the `pod_devices`.
    isolation, sm_percent: the texts of these annotations of the pod.
    mps: the folders of the MPS daemons that the container gets; empty without MPS.
    claim: the name of the pod's ResourceClaim; "" if the kubelet's slots name the container.

    The grant alone suffices to restart the container and to write its CDI spec again.
    """

    version: int = _VERSION
    pod_uid: str
    namespace: str
    name: str
    container: str
    slots: tuple[str, ...] = ()
    shares: tuple[CardShare, ...] = ()
    pod_shares: tuple[CardShare, ...]
    pod_keys: tuple[str, ...]
    devices: tuple[GrantedDevice, ...] = ()
    pod_devices: tuple[GrantedDevice, ...] = ()
    pod_device_keys: tuple[str, ...] = ()
    isolation: str = ""
    sm_percent: str = ""
    mps: tuple[str, ...] = ()
    claim: str = ""
    granted_ns: int = 0

    @classmethod
    def for_pod(cls, pod_uid: str, namespace: str, name: str, container: str, assignment: Assignment) -> "Grant":
        """Build a grant with all shares and devices of the pod, and with none for the container itself."""
        return cls(
            pod_uid=pod_uid,
            namespace=namespace,
            name=name,
            container=container,
            pod_shares=tuple(assignment.shares()),
            pod_keys=tuple(key for key, held in assignment.containers.items() for _ in held),
            pod_devices=tuple(GrantedDevice.from_share(share) for share in assignment.non_gpu_devices()),
            pod_device_keys=tuple(key for key, held in assignment.devices.items() for _ in held),
        )

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def pod_mem(self) -> int:
        """The MiB that the whole pod holds, summed over all cards."""
        return sum(share.mem for share in self.pod_shares)

    @property
    def indices(self) -> list[int]:
        """The pod's card indices, each once, in ascending order."""
        return sorted({share.index for share in self.pod_shares})

    @property
    def is_agent(self) -> bool:
        """Whether the grant belongs to the share agent, which has no share of its own and receives the pod's shares."""
        return self.container == shareagent.CONTAINER_NAME and not (self.shares or self.devices)

    @property
    def has_container_shares(self) -> bool:
        """Whether the grant has the container's shares. A grant that was built from a sandbox has only the pod's
        shares.
        """
        return bool(self.shares or self.devices) or self.is_agent

    @property
    def keys(self) -> set[str]:
        """The container keys with shares or devices."""
        return {*self.pod_keys, *self.pod_device_keys}

    def sorted_amounts(self, *, by_container: bool = False) -> tuple[object, ...]:
        """The amounts that the pod holds of each card and device. The order is fixed, so two grants can be compared.

        by_container: add the container keys.
        """
        cards = zip(self.pod_shares, self.pod_keys, strict=True)
        devices = zip(self.pod_devices, self.pod_device_keys, strict=True)
        return (
            tuple(sorted((share.uuid, share.mem, share.core, key if by_container else "") for share, key in cards)),
            tuple(sorted((device.uuid, key if by_container else "") for device, key in devices)),
        )

    def has_same_binding(self, other: "Grant") -> bool:
        """Whether both grants come from bindings of the pod with the same cards and devices."""
        return self.sorted_amounts(by_container=True) == other.sorted_amounts(by_container=True)

    def uuids(self) -> set[str]:
        """The UUIDs of the pod's cards and devices."""
        return {share.uuid for share in self.pod_shares} | {device.uuid for device in self.pod_devices}

    def restrict_to_cards(self, uuids: Collection[str]) -> "Grant":
        """A copy of the grant with only the pod's cards and devices whose UUID is in `uuids`."""
        cards = list(zip(self.pod_shares, self.pod_keys, strict=True))
        devices = list(zip(self.pod_devices, self.pod_device_keys, strict=True))
        return msgspec.structs.replace(
            self,
            pod_shares=tuple(share for share, _ in cards if share.uuid in uuids),
            pod_keys=tuple(key for share, key in cards if share.uuid in uuids),
            pod_devices=tuple(device for device, _ in devices if device.uuid in uuids),
            pod_device_keys=tuple(key for device, key in devices if device.uuid in uuids),
        )

    def extend_by_assignment(self, assignment: Assignment) -> "Grant":
        """A copy of the grant, increased to the assignment where the assignment is larger."""
        excess = assignment.excess_over(self.pod_assignment)
        if excess is None:
            return self
        excess_grant = Grant.for_pod(self.pod_uid, self.namespace, self.name, self.container, excess)
        return msgspec.structs.replace(
            self,
            pod_shares=self.pod_shares + excess_grant.pod_shares,
            pod_keys=self.pod_keys + excess_grant.pod_keys,
            pod_devices=self.pod_devices + excess_grant.pod_devices,
            pod_device_keys=self.pod_device_keys + excess_grant.pod_device_keys,
        )

    def assignment(self) -> Assignment:
        """The assignment of the whole pod, cards only."""
        return Assignment(_group_by_key(self.pod_keys, self.pod_shares))

    @property
    def pod_assignment(self) -> Assignment:
        """The assignment of the whole pod, cards and devices."""
        devices = (AssignedDevice(device.resource_class, device.uuid) for device in self.pod_devices)
        return Assignment(
            _group_by_key(self.pod_keys, self.pod_shares),
            _group_by_key(self.pod_device_keys, devices),
        )


prepare_types(_Format, Grant)


def _group_by_key(keys: Iterable[str], shares: Iterable[_T]) -> dict[str, tuple[_T, ...]]:
    """Group shares by container key."""
    shares_by_key: dict[str, tuple[_T, ...]] = {}
    for key, share in zip(keys, shares, strict=True):
        shares_by_key[key] = (*shares_by_key.get(key, ()), share)
    return shares_by_key


def merge_by_pod(grants: Iterable[Grant]) -> list[Grant]:
    """Merge the grants of each pod into one grant with all shares and devices that the pod holds. Pure.

    Usually the merged grant equals the pod's latest grant. If the grants differ, because the pod was bound here again
    with other cards, the merged grant has the largest amount of each card.
    """
    grant_by_uid: dict[str, Grant] = {}
    for grant in sorted(grants, key=lambda grant: grant.granted_ns, reverse=True):
        latest = grant_by_uid.get(grant.pod_uid)
        if latest is None:
            grant_by_uid[grant.pod_uid] = grant
        elif grant.sorted_amounts() != latest.sorted_amounts():
            grant_by_uid[grant.pod_uid] = latest.extend_by_assignment(grant.pod_assignment)
    return list(grant_by_uid.values())


def _pod_names(grants: Iterable[Grant]) -> str:
    return ", ".join(sorted({f"{grant.pod} (uid {grant.pod_uid})" for grant in grants}))


class CardFull(Struct, frozen=True):
    """The card has too little space for a grant. Amounts are MiB, or percent of SMs if `cores`."""

    index: int
    uuid: str
    requested: int
    held: int
    total: int
    cores: bool
    holders: tuple[Grant, ...]

    def __str__(self) -> str:
        unit = "% of cores" if self.cores else "MiB"
        return (
            f"card {self.index} ({self.uuid}): {self.held} of {self.total} {unit} are still held by "
            f"{_pod_names(self.holders)}; {self.requested} {unit} more do not fit"
        )


class DeviceTaken(Struct, frozen=True):
    """Another pod holds the device."""

    uuid: str
    holders: tuple[Grant, ...]

    def __str__(self) -> str:
        return f"device {self.uuid} is still held by {_pod_names(self.holders)}"


class FormerBinding(Struct, frozen=True):
    """Containers of the pod may still use the cards of its former binding."""

    holders: tuple[Grant, ...]

    def __str__(self) -> str:
        cards = ", ".join(sorted({uuid for grant in self.holders for uuid in grant.uuids()}))
        containers = ", ".join(sorted({grant.container for grant in self.holders}))
        return (
            f"pod {self.holders[0].pod} was bound to this node again with other GPUs, and its containers of the "
            f"former binding ({containers}) may still use {cards}; this container starts when those have ended. "
            "To place the pod again at once, delete it"
        )


GrantConflict = CardFull | DeviceTaken | FormerBinding


class AddedGrant(Struct, frozen=True):
    """A grant that was added, and the container's previous grant."""

    grant: Grant
    previous: Grant | None


class GrantStore:
    """All grants of this node. Thread-safe: the lock covers the check and the change in memory, not writes to disk."""

    def __init__(self, folder: Path, core: int = FULL_CORE, clock: Clock = SYSTEM) -> None:
        """Read the grants on disk; `unreadable` lists the files that could not be read. Raises OSError.

        core: percent of each card's SMs that may be granted.
        """
        self._folder = folder
        self._core = core
        self._clock = clock
        self._unreadable_folder = folder.with_name(folder.name + "-unreadable")
        self._lock = threading.Lock()
        self._grants: dict[tuple[str, str], Grant] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self._epoch = 0
        self._disk_locks = [threading.Lock() for _ in range(_DISK_LOCK_COUNT)]
        self.unreadable: list[str] = []
        self.problem: str | None = None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._load_grants()

    def list_grants(self) -> list[Grant]:
        with self._lock:
            return list(self._grants.values())

    def get(self, pod_uid: str, container: str) -> Grant | None:
        with self._lock:
            return self._grants.get((pod_uid, container))

    def grants_of_pod(self, pod_uid: str) -> list[Grant]:
        with self._lock:
            return [grant for (uid, _), grant in self._grants.items() if uid == pod_uid]

    def slot_owner(self, slot: str) -> Grant | None:
        """The latest grant of a slot. Several grants can have the same slot, since the kubelet reuses a slot when the
        former pod has ended.
        """
        with self._lock:
            grants = [grant for grant in self._grants.values() if slot in grant.slots]
        return max(grants, key=lambda grant: grant.granted_ns, default=None)

    def add(self, grant: Grant, totals: Mapping[str, int]) -> AddedGrant | GrantConflict:
        """Add the grant unless a card is full, a device is taken, or the pod has grants with other cards.

        totals: the MiB of this node's cards, by UUID.

        When this returns an AddedGrant, the grant is on disk. If the write fails, raises OSError, and the grant stays
        in memory, where the next `add` and `drop_grants_of_pod` find it.
        """
        return self._add_grant(
            grant,
            lambda: self._former_binding(grant) or self._card_conflict(grant, totals) or self._device_conflict(grant),
            self._latest_ns,
        )

    def set_mps(self, grant: Grant, folders: tuple[str, ...]) -> Grant:
        """Change the folders of the MPS daemons that the container gets. Returns the changed grant. Raises OSError.

        Changes nothing in the store if the grant was released or replaced meanwhile.
        """
        changed = msgspec.structs.replace(grant, mps=folders)
        key = (grant.pod_uid, grant.container)
        with self._disk_lock(grant.pod_uid):
            with self._lock:
                if self._grants.get(key) is not grant:
                    return changed
                self._grants[key] = changed
            self._write_grant(changed)
        return changed

    def adopt_grant(self, grant: Grant) -> None:
        """Add the grant of a running container without checking the card. Raises OSError.

        The added grant counts as the oldest grant of its slots, since a slot may have a newer grant already.
        """
        self._add_grant(grant, lambda: None, lambda: 0)

    def restore_files(self) -> None:
        """Write the files of grants again if the files were removed.

        Afterwards `problem` is the obstacle to writing grants; None if there is no obstacle.
        """
        probe = self._folder.with_name(f".{self._folder.name}.probe")
        failures: list[OSError] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
        except OSError as error:
            failures.append(error)
        for grant in () if failures else self.list_grants():
            try:
                if not self._grant_path(grant).exists():
                    self._restore_file(grant)
            except OSError as error:  # continue with the other grants
                failures.append(error)
        self.problem = f"grants cannot be written to {self._folder}: {failures[0].strerror}" if failures else None

    def epoch(self) -> int:
        """The current epoch, for `drop_grants_of_pod`: grants that are added later have a higher epoch."""
        with self._lock:
            return self._epoch

    def drop_grants_of_pod(self, pod_uid: str, epoch: int) -> list[Grant]:
        """Remove all grants of a pod, on disk first, and return them. Raises OSError.

        If a grant was added after `epoch`, removes none. Read `epoch` before you check that the pod's containers have
        ended.
        """
        with self._disk_lock(pod_uid):
            with self._lock:
                grants = {key: grant for key, grant in self._grants.items() if key[0] == pod_uid}
                if any(self._epochs[key] > epoch for key in grants):
                    return []
            folder = self._folder / pod_uid
            if folder.is_dir():
                for path in list(folder.iterdir()):
                    if _is_folder(path):
                        self._move_aside(path, "is a folder, not a grant")
                    else:
                        path.unlink(missing_ok=True)
                folder.rmdir()
                _sync_folder(self._folder)
            with self._lock:
                for key, grant in grants.items():
                    if self._grants.get(key) is grant:
                        del self._grants[key], self._epochs[key]
        return list(grants.values())

    def undo_add(self, added: AddedGrant) -> None:
        """Undo `add` for a grant that was not delivered. Does nothing if the container has a newer grant. Raises
        OSError.

        A restarted container gets its previous grant back, so it can start without the API server.
        """
        grant, previous = added.grant, added.previous
        with self._disk_lock(grant.pod_uid):
            if self.get(grant.pod_uid, grant.container) is not grant:
                return
            if previous is not None:
                self._write_grant(previous)
            else:
                path = self._grant_path(grant)
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other containers of the pod have grants
                    path.parent.rmdir()
                    _sync_folder(self._folder)
            with self._lock:
                key = (grant.pod_uid, grant.container)
                if self._grants.get(key) is not grant:
                    return
                if previous is not None:
                    self._grants[key] = previous
                else:
                    del self._grants[key], self._epochs[key]

    def granted_mib_by_uuid(self) -> dict[str, int]:
        """The granted MiB by UUID; 0 for devices other than GPUs."""
        sums: dict[str, int] = defaultdict(int)
        for grant in merge_by_pod(self.list_grants()):
            for share in grant.pod_shares:
                sums[share.uuid] += share.mem
            for device in grant.pod_devices:
                sums[device.uuid] += 0
        return dict(sums)

    def _former_binding(self, new_grant: Grant) -> FormerBinding | None:
        holders = [
            grant
            for (uid, _), grant in self._grants.items()
            if uid == new_grant.pod_uid and not grant.has_same_binding(new_grant)
        ]
        return FormerBinding(tuple(holders)) if holders else None

    def _card_conflict(self, new_grant: Grant, totals: Mapping[str, int]) -> CardFull | None:
        mem: dict[str, int] = defaultdict(int)
        core: dict[str, int] = defaultdict(int)
        indices: dict[str, int] = {}
        merged_grants = merge_by_pod(self._grants.values())
        for share in new_grant.pod_shares:
            mem[share.uuid] += share.mem
            core[share.uuid] += share.core
            indices[share.uuid] = share.index
        for uuid, requested in mem.items():
            other_shares = [
                (grant, share)
                for grant in merged_grants
                if grant.pod_uid != new_grant.pod_uid
                for share in grant.pod_shares
                if share.uuid == uuid
            ]
            holders = tuple(grant for grant, _ in other_shares)
            held, total = sum(share.mem for _, share in other_shares), totals[uuid]
            if held + requested > total:
                return CardFull(indices[uuid], uuid, requested, held, total, cores=False, holders=holders)
            cores = sum(share.core for _, share in other_shares)
            if cores + core[uuid] > self._core and core[uuid]:
                return CardFull(indices[uuid], uuid, core[uuid], cores, self._core, cores=True, holders=holders)
        return None

    def _device_conflict(self, new_grant: Grant) -> DeviceTaken | None:
        other_grants = [grant for grant in merge_by_pod(self._grants.values()) if grant.pod_uid != new_grant.pod_uid]
        for device in new_grant.pod_devices:
            holders = [
                grant
                for grant in other_grants
                if any(granted_device.uuid == device.uuid for granted_device in grant.pod_devices)
            ]
            if holders:
                return DeviceTaken(device.uuid, tuple(holders))
        return None

    def _latest_ns(self) -> int:
        """A time in nanoseconds later than the times of all grants, even if the clock was set back."""
        return max(self._clock.wall_ns(), 1 + max((grant.granted_ns for grant in self._grants.values()), default=0))

    def _add_grant(
        self, grant: Grant, check: Callable[[], GrantConflict | None], granted_ns: Callable[[], int]
    ) -> AddedGrant | GrantConflict:
        _check_names(grant)
        key = (grant.pod_uid, grant.container)
        with self._lock:
            conflict = check()
            if conflict is not None:
                return conflict
            grant = msgspec.structs.replace(grant, granted_ns=granted_ns())
            self._epoch += 1
            added = AddedGrant(grant, self._grants.get(key))
            self._grants[key], self._epochs[key] = grant, self._epoch
        with self._disk_lock(grant.pod_uid):
            if self.get(grant.pod_uid, grant.container) is grant:  # neither replaced nor removed
                self._write_grant(grant)
        return added

    def _restore_file(self, grant: Grant) -> None:
        with self._disk_lock(grant.pod_uid):
            if self.get(grant.pod_uid, grant.container) is grant:  # not removed meanwhile
                self._write_grant(grant)
                _log.warning("wrote a grant again whose file was removed", pod=grant.pod, uid=grant.pod_uid)

    def _grant_path(self, grant: Grant) -> Path:
        return self._folder / grant.pod_uid / (grant.container + _SUFFIX)

    def _write_grant(self, grant: Grant) -> None:
        path = self._grant_path(grant)
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True)
            _sync_folder(self._folder)
        temporary = path.with_name(f".{grant.container}.tmp")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(grant))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)

    def _disk_lock(self, pod_uid: str) -> threading.Lock:
        return self._disk_locks[hash(pod_uid) % _DISK_LOCK_COUNT]

    def _load_grants(self) -> None:
        for folder in sorted(self._folder.iterdir()):
            if not folder.is_dir():
                self._move_aside(folder, "is not a folder of a pod")
                continue
            for path in sorted(folder.iterdir()):
                if path.name.startswith(".") and not _is_folder(path):
                    path.unlink()  # unfinished, so its container never started
                    continue
                try:
                    grant = _read_grant(path)
                except RecursionError:
                    self._move_aside(path, "is nested too deep")
                    continue
                except (OSError, ValueError, UnsafeName) as error:
                    self._move_aside(path, str(error))
                    continue
                self._grants[grant.pod_uid, grant.container] = grant
                self._epochs[grant.pod_uid, grant.container] = 0
            with contextlib.suppress(OSError):  # the folder is not empty
                folder.rmdir()

    def _move_aside(self, path: Path, reason: str) -> None:
        """Move a file or folder out of the store if it cannot be read as a grant.

        If the move fails, the file stays where it is: an unreadable file must not prevent the start of the plugin, and
        the next grant of the container replaces the file.
        """
        name = os.fsdecode(os.fsencode(f"{path.parent.name}.{path.name}")[:_MAX_NAME_BYTES])
        target = self._unreadable_folder / f"{name}.{self._clock.wall_ns()}.{len(self.unreadable)}"
        try:
            self._unreadable_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.rename(target)
        except OSError as error:
            self.unreadable.append(
                sanitize_message(f"{path}: {reason}; failed to move it to {target}: {error.strerror}")
            )
            _log.error("failed to move an unreadable grant aside", path=str(path), to=str(target), error=str(error))
            return
        self.unreadable.append(sanitize_message(f"{path}: {reason}; moved to {target}"))
        _log.error("moved an unreadable grant aside", path=str(path), to=str(target), error=reason)


def _read_grant(path: Path) -> Grant:
    text = path.read_bytes()
    version = msgspec.json.decode(text, type=_Format).version  # read first: other versions may have other fields
    if version != _VERSION:
        raise ValueError(
            f"another version of the device plugin wrote it: it has version {quote_text(version)}, "
            f"this one reads {_VERSION}; a running container gets a new grant"
        )
    grant = msgspec.json.decode(text, type=Grant)
    if (grant.pod_uid, grant.container + _SUFFIX) != (path.parent.name, path.name):
        raise ValueError("its pod UID or container differs from its path")
    _check_names(grant)
    _check_amounts(grant)
    return grant


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _check_amounts(grant: Grant) -> None:
    """Check the numbers and lengths of a grant that was read from disk. Raises ValueError."""
    if len(grant.pod_device_keys) != len(grant.pod_devices):
        raise ValueError(f"podDeviceKeys has {len(grant.pod_device_keys)} keys for {len(grant.pod_devices)} podDevices")
    if len(grant.pod_keys) != len(grant.pod_shares):
        raise ValueError(f"podKeys has {len(grant.pod_keys)} keys for {len(grant.pod_shares)} podShares")
    named_numbers = [("grantedNs", grant.granted_ns)]
    for share in (*grant.shares, *grant.pod_shares):
        named_numbers += [("index", share.index), ("mem", share.mem), ("core", share.core), ("total", share.total)]
    for name, number in named_numbers:
        if not 0 <= number <= _MAX_NUMBER:
            raise ValueError(f"{name} is {number}, not a number from 0 to {_MAX_NUMBER}")


def _check_names(grant: Grant) -> None:
    for name in (grant.pod_uid, grant.container):
        if not _SAFE_NAME.fullmatch(name) or ".." in name:
            raise UnsafeName(f"{quote_text(name)} is not a pod UID or container name")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
