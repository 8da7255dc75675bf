"""The store of grants on this node's disk: one file for each container that was given a share.

The second truth beside the pods' annotations, and the only one about containers: it restarts containers while the API
server is away, it refuses a card that is still in use by a pod that the API server has forgotten, and it outlives any
crash. A grant is in memory before it is on disk, and on disk before its container may start.
"""

import contextlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import Struct, field

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import shareagent
from cardwise.core.api.assignment import Assignment, CardShare, DeviceShare
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.values.wording import quoted

_log = structlog.get_logger(__name__)

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_SUFFIX = ".json"
_STRIPES = 64
_PROBE_BYTES = 4096  # a full disk has no room for a block
_VERSION = 1
_WITH_DEVICES = 2  # of a grant that a former version, which knows cards only, must not take for one
_KNOWN = (_VERSION, _WITH_DEVICES)


class UnsafeName(ValueError):
    """A pod UID or container name that may not become a file name."""


class GrantedDevice(Struct, frozen=True, rename="camel"):
    """A device that is no GPU, as in the assignment; it is given whole."""

    resource_class: str = field(name="deviceClass")  # as grants on disk have it
    uuid: str

    @classmethod
    def of(cls, share: DeviceShare) -> "GrantedDevice":
        return cls(share.resource_class, share.uuid)


class _Format(Struct):
    """What says how the rest of a grant on disk is to be read."""

    version: Any = _VERSION


class Grant(Struct, frozen=True, kw_only=True, rename="camel"):
    """A container's share and devices. `slots` are its device IDs; `pod_...` are those of all containers of its pod.
    Shares are on the disk as `CardShare` names its fields; `whole` is missing in grants of an older version.

    `pod_keys` says whose each of the `pod_shares` is; it is empty in a grant of an older version. `pod_device_keys`
    says the same of the `pod_devices`.

    The pod holds all of them from its first grant on: else a later pod could take what its second container, or its
    first when it restarts, will need.

    `mps_mode` and `sm_percent` are what the pod says of MPS, `mps` the folders of the daemons that the container is
    given: none where it does without. They are here so that a restart and a new CDI spec need nobody else.
    """

    version: int = _VERSION
    pod_uid: str
    namespace: str
    name: str
    container: str
    slots: tuple[str, ...] = ()
    shares: tuple[CardShare, ...] = ()
    pod_shares: tuple[CardShare, ...]
    pod_keys: tuple[str, ...] = ()
    devices: tuple[GrantedDevice, ...] = ()
    pod_devices: tuple[GrantedDevice, ...] = ()
    pod_device_keys: tuple[str, ...] = ()
    mps_mode: str = ""
    sm_percent: str = ""
    mps: tuple[str, ...] = ()
    granted_ns: int = 0

    @classmethod
    def of(cls, pod_uid: str, namespace: str, name: str, container: str, assignment: Assignment) -> "Grant":
        """What the pod holds; nothing of it is the container's."""
        return cls(
            pod_uid=pod_uid,
            namespace=namespace,
            name=name,
            container=container,
            pod_shares=tuple(assignment.shares()),
            pod_keys=tuple(key for key, theirs in assignment.containers.items() for _ in theirs),
            pod_devices=tuple(GrantedDevice.of(share) for share in assignment.device_shares()),
            pod_device_keys=tuple(key for key, theirs in assignment.devices.items() for _ in theirs),
        )

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def pod_mem(self) -> int:
        """MiB of the whole pod on all cards."""
        return sum(share.mem for share in self.pod_shares)

    @property
    def indices(self) -> list[int]:
        """The pod's card indices, each once, in ascending order."""
        return sorted({share.index for share in self.pod_shares})

    @property
    def is_agent(self) -> bool:
        """Whether it is the share agent's, which has no share and is told of all of its pod's."""
        return self.container == shareagent.CONTAINER and not (self.shares or self.devices)

    def assignment(self) -> Assignment:
        """The assignment of the whole pod, cards only; empty in a grant of an older version."""
        found: dict[str, tuple[CardShare, ...]] = {}
        for key, share in zip(self.pod_keys, self.pod_shares, strict=False):
            found[key] = (*found.get(key, ()), share)
        return Assignment(found)


def by_pod(grants: Iterable[Grant]) -> dict[str, Grant]:
    """The latest grant of each pod, by UID: its `pod_shares` and `pod_devices` are what the pod holds. Pure."""
    latest: dict[str, Grant] = {}
    for grant in grants:
        other = latest.get(grant.pod_uid)
        if other is None or other.granted_ns <= grant.granted_ns:
            latest[grant.pod_uid] = grant
    return latest


def _pods(grants: Iterable[Grant]) -> str:
    return ", ".join(sorted({f"{grant.pod} (uid {grant.pod_uid})" for grant in grants}))


class CardFull(Struct, frozen=True):
    """A card that cannot take a grant beside what others hold there: MiB (or percent of cores, if `cores`)."""

    index: int
    uuid: str
    asked: int
    held: int
    total: int
    cores: bool
    holders: tuple[Grant, ...]

    def __str__(self) -> str:
        unit = "% of cores" if self.cores else "MiB"
        return (
            f"card {self.index} ({self.uuid}): {self.held} of {self.total} {unit} are still held by "
            f"{_pods(self.holders)}; {self.asked} {unit} more do not fit"
        )


class DeviceTaken(Struct, frozen=True):
    """A device that somebody else holds."""

    uuid: str
    holders: tuple[Grant, ...]

    def __str__(self) -> str:
        return f"device {self.uuid} is still held by {_pods(self.holders)}"


GrantConflict = CardFull | DeviceTaken


class Claim(Struct, frozen=True):
    """A grant that was entered, and the container's one before it."""

    grant: Grant
    before: Grant | None


class GrantStore:
    """All grants of this node. Thread-safe; the lock is held for the check and the entry in memory, not for disk."""

    def __init__(self, folder: Path, core: int = FULL_CORE, clock: Clock = SYSTEM) -> None:
        """Reads what is on disk; see `unreadable` for what could not be read. `core`: percent given of each card."""
        self._folder = folder
        self._core = core
        self._clock = clock
        self._aside = folder.with_name(folder.name + "-unreadable")
        self._lock = threading.Lock()
        self._grants: dict[tuple[str, str], Grant] = {}
        self._stamps: dict[tuple[str, str], int] = {}
        self._epoch = 0
        self._disk = [threading.Lock() for _ in range(_STRIPES)]
        self.unreadable: list[str] = []
        self.problem = ""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._load()

    def all(self) -> list[Grant]:
        with self._lock:
            return list(self._grants.values())

    def get(self, pod_uid: str, container: str) -> Grant | None:
        with self._lock:
            return self._grants.get((pod_uid, container))

    def of_pod(self, pod_uid: str) -> list[Grant]:
        with self._lock:
            return [grant for (uid, _), grant in self._grants.items() if uid == pod_uid]

    def owner(self, slot: str) -> Grant | None:
        """The latest grant of a slot: the kubelet hands a slot out again when its pod has ended."""
        with self._lock:
            found = [grant for grant in self._grants.values() if slot in grant.slots]
        return max(found, key=lambda grant: grant.granted_ns, default=None)

    def claim(self, grant: Grant, totals: Mapping[str, int]) -> Claim | GrantConflict:
        """Enter the grant, or say which card is over-full or which device taken; `totals` are the MiB of this node's
        cards by UUID.

        The grant is on disk when this returns a Claim. Raises OSError; it then stays in memory, where the next try and
        `drop` find it.
        """
        return self._enter(grant, lambda: self._overfull(grant, totals) or self._taken(grant), self._latest_ns)

    def adopt(self, grant: Grant) -> None:
        """Enter a grant whose container runs already, whatever the card has. Raises OSError.

        It counts as the oldest of its slots: what is known of it may be older than the slot's next grant.
        """
        self._enter(grant, lambda: None, lambda: 0)

    def mend(self) -> None:
        """Puts back what somebody has removed from the disk. `problem` says afterwards why nothing can be written there
        at present, "" when it can.
        """
        probe = self._folder.with_name(f".{self._folder.name}.probe")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
            for grant in self.all():
                if not self._path(grant).exists():
                    self._put_back(grant)
        except OSError as error:
            self.problem = f"grants cannot be written to {self._folder}: {error.strerror}"
        else:
            self.problem = ""

    def epoch(self) -> int:
        """A mark in time for `drop`: what is granted from now on is later."""
        with self._lock:
            return self._epoch

    def drop(self, pod_uid: str, epoch: int) -> list[Grant]:
        """Forget all grants of a pod, on disk first, unless one was given (again) after `epoch`: then none.

        The proof that a pod's containers are gone must have been sought after `epoch` was taken. Raises OSError.
        """
        with self._disk_of(pod_uid):
            with self._lock:
                found = {key: grant for key, grant in self._grants.items() if key[0] == pod_uid}
                if any(self._stamps[key] > epoch for key in found):
                    return []
            folder = self._folder / pod_uid
            if folder.is_dir():
                for path in list(folder.iterdir()):
                    path.unlink(missing_ok=True)
                folder.rmdir()
                _sync(self._folder)
            with self._lock:
                for key, grant in found.items():
                    if self._grants.get(key) is grant:
                        del self._grants[key], self._stamps[key]
        return list(found.values())

    def take_back(self, claim: Claim) -> None:
        """Undo a claim that nothing was delivered for, unless its container was granted anew since. Raises OSError.

        A container that starts again keeps the grant that it had: it may start without the API server by that.
        """
        grant, before = claim.grant, claim.before
        with self._disk_of(grant.pod_uid):
            if self.get(grant.pod_uid, grant.container) is not grant:
                return
            if before is not None:
                self._write(before)
            else:
                path = self._path(grant)
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other containers of the pod have theirs
                    path.parent.rmdir()
                    _sync(self._folder)
            with self._lock:
                key = (grant.pod_uid, grant.container)
                if self._grants.get(key) is not grant:
                    return
                if before is not None:
                    self._grants[key] = before
                else:
                    del self._grants[key], self._stamps[key]

    def held(self) -> dict[str, int]:
        """MiB held by UUID, for devices that are no GPUs 0."""
        sums: dict[str, int] = defaultdict(int)
        for grant in by_pod(self.all()).values():
            for share in grant.pod_shares:
                sums[share.uuid] += share.mem
            for device in grant.pod_devices:
                sums[device.uuid] += 0
        return dict(sums)

    def _overfull(self, mine: Grant, totals: Mapping[str, int]) -> CardFull | None:
        mem: dict[str, int] = defaultdict(int)
        core: dict[str, int] = defaultdict(int)
        indices: dict[str, int] = {}
        pods = by_pod(self._grants.values())
        for share in mine.pod_shares:
            mem[share.uuid] += share.mem
            core[share.uuid] += share.core
            indices[share.uuid] = share.index
        for uuid, asked in mem.items():
            others = [
                (grant, share)
                for uid, grant in pods.items()
                if uid != mine.pod_uid
                for share in grant.pod_shares
                if share.uuid == uuid
            ]
            holders = tuple(grant for grant, _ in others)
            held, total = sum(share.mem for _, share in others), totals[uuid]
            if held + asked > total:
                return CardFull(indices[uuid], uuid, asked, held, total, cores=False, holders=holders)
            cores = sum(share.core for _, share in others)
            if cores + core[uuid] > self._core and core[uuid]:
                return CardFull(indices[uuid], uuid, core[uuid], cores, self._core, cores=True, holders=holders)
        return None

    def _taken(self, mine: Grant) -> DeviceTaken | None:
        others = [grant for uid, grant in by_pod(self._grants.values()).items() if uid != mine.pod_uid]
        for device in mine.pod_devices:
            holders = [one for one in others if any(theirs.uuid == device.uuid for theirs in one.pod_devices)]
            if holders:
                return DeviceTaken(device.uuid, tuple(holders))
        return None

    def _latest_ns(self) -> int:
        """Later than all grants that there are, also where the time of day was set back."""
        return max(self._clock.wall_ns(), 1 + max((one.granted_ns for one in self._grants.values()), default=0))

    def _enter(
        self, grant: Grant, check: Callable[[], GrantConflict | None], granted_ns: Callable[[], int]
    ) -> Claim | GrantConflict:
        _checked(grant)
        version = _WITH_DEVICES if grant.pod_devices else _VERSION
        key = (grant.pod_uid, grant.container)
        with self._lock:
            conflict = check()
            if conflict is not None:
                return conflict
            grant = msgspec.structs.replace(grant, version=version, granted_ns=granted_ns())
            self._epoch += 1
            claim = Claim(grant, self._grants.get(key))
            self._grants[key], self._stamps[key] = grant, self._epoch
        with self._disk_of(grant.pod_uid):
            if self.get(grant.pod_uid, grant.container) is grant:  # not given anew, and not freed
                self._write(grant)
        return claim

    def _put_back(self, grant: Grant) -> None:
        with self._disk_of(grant.pod_uid):
            if self.get(grant.pod_uid, grant.container) is grant:  # not freed meanwhile
                self._write(grant)
                _log.warning(
                    "a grant had vanished from the disk and was written again", pod=grant.pod, uid=grant.pod_uid
                )

    def _path(self, grant: Grant) -> Path:
        return self._folder / grant.pod_uid / (grant.container + _SUFFIX)

    def _write(self, grant: Grant) -> None:
        path = self._path(grant)
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True)
            _sync(self._folder)
        temporary = path.with_name(f".{grant.container}.tmp")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(grant))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(path.parent)

    def _disk_of(self, pod_uid: str) -> threading.Lock:
        return self._disk[hash(pod_uid) % _STRIPES]

    def _load(self) -> None:
        for folder in sorted(self._folder.iterdir()):
            if not folder.is_dir():
                self._move_aside(folder, "is no folder of a pod")
                continue
            for path in sorted(folder.iterdir()):
                if path.name.startswith("."):
                    path.unlink()  # never finished, so its container never started
                    continue
                try:
                    grant = _read(path)
                except (OSError, ValueError, UnsafeName) as error:
                    self._move_aside(path, str(error))
                    continue
                self._grants[grant.pod_uid, grant.container] = grant
                self._stamps[grant.pod_uid, grant.container] = 0
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _move_aside(self, path: Path, why: str) -> None:
        self._aside.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = self._aside / f"{path.parent.name}.{path.name}.{self._clock.wall_ns()}"
        path.rename(target)
        self.unreadable.append(f"{path}: {why}; moved to {target}")
        _log.error("a grant on disk is unreadable and was moved aside", path=str(path), to=str(target), error=why)


def _read(path: Path) -> Grant:
    text = path.read_bytes()
    version = msgspec.json.decode(text, type=_Format).version  # first: another version may have other fields
    if version not in _KNOWN:
        known = " and ".join(map(str, _KNOWN))
        raise ValueError(
            f"another version of the device plugin wrote it: it has version {quoted(version)}, "
            f"this one reads versions {known}; a container that runs gets its grant anew"
        )
    grant = msgspec.json.decode(text, type=Grant)
    if (grant.pod_uid, grant.container + _SUFFIX) != (path.parent.name, path.name):
        raise ValueError("it does not say what its name says")
    _checked(grant)
    return grant


def _checked(grant: Grant) -> None:
    for name in (grant.pod_uid, grant.container):
        if not _SAFE.fullmatch(name) or ".." in name:
            raise UnsafeName(f"{quoted(name)} is no pod UID or container name")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
