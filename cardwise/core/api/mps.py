"""The MPS contract between the components (docs/design/0005-mps.md): folders, state file, formats of limits.

No I/O. The MPS manager writes the folders and files; the device plugin, the webhook and the share agent read them. MPS
silently misreads most formats of a limit (`1.5G` is 1 MiB), so all limits are written by `limits_value` and checked by
`check_limits`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Final

from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.core.values.wording import quote_text

DEFAULT_ROOT: Final = "/run/cardwise/mps"
CONTAINER_PIPE: Final = "/run/cardwise/mps/pipe"  # where a container has the card's clients folder, read-only
SM_PERCENT: Final = "cardwise.dev/sm-percent"  # annotation of a pod: core, memory
PIPE_ENV: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOG_ENV: Final = "CUDA_MPS_LOG_DIRECTORY"
LIMIT_ENV: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PERCENT_ENV: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

PIPE_FOLDER: Final = "pipe"
CLIENTS_FOLDER: Final = "clients"  # the folder that is mounted into containers: it has a link to the daemon's socket
LOG_FOLDER: Final = "log"
READY_FILE: Final = "ready"
MODES_FILE: Final = "modes"
UNAVAILABLE_FILE: Final = (
    "unavailable"  # the note that containers may have started without MPS (`MpsState.UNAVAILABLE`)
)
LOCK_FILE: Final = "manager.lock"
NODE_FOLDER: Final = "node"
CONTROL_SOCKET: Final = "control"  # the socket in the pipe folder

# Reasons that the device plugin writes into a card's status.
MANAGER_GONE: Final = "the node's MPS manager is gone or hangs"
CLOSED_BY_FORMER_MANAGER: Final = "the GPU is closed to programs without MPS: a former MPS manager left it so"

MAX_PIPE_LENGTH: Final = 87  # bytes of the pipe folder's path; with a longer path MPS fails without a message
MIN_CEILING_MIB: Final = 512  # MiB; the ceiling while no pod on the card has a larger share
# MiB, measured on an H200 and an H100 with driver 580 (docs/measured.md):
MIN_LIMIT_MIB: Final = 544  # the smallest limit of a client: with 512 CUDA does not start, since its context counts
# MiB that a process without MPS may use beyond its share, for its CUDA context and a framework's libraries
MAX_CONTEXT_MIB: Final = 640
# MiB that the MPS server uses on a card, by the start of the model's name, measured; and on other models.
_SERVER_MIB_BY_MODEL: Final = {"NVIDIA H100": MiB(66), "NVIDIA H200": MiB(66)}
_DEFAULT_SERVER_MIB: Final = MiB(128)
_MIB_PER_GIB: Final = 1024
_VERSION = 1  # of the state file's format
_UUID_PREFIX_LENGTH = 12  # characters of the UUID in a folder's name
_DIGEST_LENGTH = 8  # characters of the UUID's digest in a folder's name
# One entry of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, in the formats that drivers were observed to read correctly.
_LIMIT_PATTERN = re.compile(r"(\d+)=[1-9]\d*(?:[GM]B?|g)?")
_LIMIT_REMEDY = "write <ordinal>=<whole number>M, such as 0=8138M; MPS misreads or ignores other forms"


class SmPercent(StrEnum):
    """How the limit on a share's SMs is set if the share requests no percentage.

    CORE: no limit.
    MEMORY: the same percentage as the share has of the card's memory.
    """

    CORE = "core"
    MEMORY = "memory"


def sm_percent(core: int, mem: int, total: int, source: str) -> int | None:
    """The limit on a share's SMs, in percent of the card's SMs; None for no limit.

    core: the percent that the share requests; 0 for none.
    mem, total: MiB of the share and of the card.
    source: a value of `SmPercent`.
    """
    if core or source != SmPercent.MEMORY:
        return core or None
    return max(1, min(100, mem * 100 // total))


class DaemonScope(StrEnum):
    """How many cards one daemon serves."""

    CARD = "card"
    NODE = "node"


class MpsState(StrEnum):
    """The state of MPS on a card, as the manager publishes it, and what it means for a container that starts.

    READY: daemon and server have answered, and the settings were read back. A container that wants MPS starts if its
        share is under the ceiling; one with isolation `none` waits.
    STARTING: the daemon comes up. FAULT: the clients of a fault must end, within 20 s. DRAINING: clients are detached.
        DOWN: no daemon; the next attempt is after 1 to 60 s. In these states every container waits.
    OFF: no pod on the card uses MPS, and the compute mode is DEFAULT. A container with `none` starts; others wait.
    UNAVAILABLE: MPS cannot run. Every container starts without it, unless its pod demands a limit.
    """

    READY = "Ready"
    STARTING = "Starting"
    FAULT = "Fault"
    DRAINING = "Draining"
    DOWN = "Down"
    OFF = "Off"
    UNAVAILABLE = "Unavailable"


class UnreadableState(ValueError):
    """A state file that cannot be parsed, or that has an unsupported version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The content of the state file.

    since: when the state began; wall time in seconds.
    checked: when the manager last checked MPS; CLOCK_BOOTTIME in seconds.
    valid_seconds: the maximum age of `checked`, in seconds. If `checked` is older, containers wait.
    """

    uuids: tuple[str, ...]
    scope: DaemonScope
    state: MpsState
    reason: str = ""
    since: float = 0.0
    checked: float = 0.0
    valid_seconds: float = 0.0
    driver: str = ""
    multi_user: bool = False
    enforced: bool = False  # no process can bypass MPS: the card is EXCLUSIVE_PROCESS
    ceilings: Mapping[str, MiB] = field(default_factory=dict)  # by UUID, the limits that the daemon has confirmed
    daemon_pid: int = 0
    manager_pid: int = 0
    max_clients: int = 0


def server_memory(model: str) -> MiB:
    """The MiB to keep for the MPS server on a card of this model."""
    measured = (mib for start, mib in _SERVER_MIB_BY_MODEL.items() if model.startswith(start))
    return next(measured, _DEFAULT_SERVER_MIB)


def folder_name(uuid: str) -> str:
    """The name of a card's folder: short, readable and unique."""
    lower = uuid.lower()
    start = re.sub(r"[^a-z0-9-]", "-", lower)[:_UUID_PREFIX_LENGTH].strip("-")
    return f"{start}-{hashlib.sha256(lower.encode()).hexdigest()[:_DIGEST_LENGTH]}"


def card_daemon_folder(root: str, uuid: str) -> PurePosixPath:
    """The folder of one card's daemon."""
    return PurePosixPath(root) / folder_name(uuid)


def node_daemon_folder(root: str) -> PurePosixPath:
    """The folder of the daemon that serves all cards of the node."""
    return PurePosixPath(root) / NODE_FOLDER


def check_root(root: str, uuids: Sequence[str], scope: DaemonScope) -> None:
    """Check that MPS can use this root folder for these cards. Raises InvalidRequest."""
    if not PurePosixPath(root).is_absolute():
        raise InvalidRequest(
            "--mps-root", f"{quote_text(root)} is not an absolute path", f"write one, such as {DEFAULT_ROOT}"
        )
    folders = (
        [node_daemon_folder(root)] if scope is DaemonScope.NODE else [card_daemon_folder(root, uuid) for uuid in uuids]
    )
    for daemon_folder in folders:
        pipe = daemon_folder / PIPE_FOLDER
        length = len(str(pipe).encode())
        if length > MAX_PIPE_LENGTH:
            raise InvalidRequest(
                "--mps-root",
                f"{pipe} has {length} bytes, and MPS opens no path of more than {MAX_PIPE_LENGTH}",
                f"take a root that is {length - MAX_PIPE_LENGTH} bytes shorter, such as {DEFAULT_ROOT}",
            )


def ceiling_of_shares(shares: Sequence[MiB]) -> MiB:
    """The memory limit of a daemon, in MiB, that allows each of these shares.

    From 1 GiB on, whole GiB. A limit counts only if the daemon reports it as written, but daemons report `8138M` as
    `7G`.
    """
    largest = max([*shares, MIN_CEILING_MIB])
    return MiB(largest) if largest < _MIB_PER_GIB else MiB(-(-largest // _MIB_PER_GIB) * _MIB_PER_GIB)


def limits_value(limits: Sequence[MiB]) -> str:
    """The value of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT for cards in the order of their ordinals."""
    for mib in limits:
        if mib <= 0:
            raise InvalidRequest(LIMIT_ENV, f"{mib} MiB would lift the limit", "give each GPU at least 1 MiB")
    return ",".join(f"{ordinal}={mib}M" for ordinal, mib in enumerate(limits))


def check_limits(text: str) -> None:
    """Check a value of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT. Raises InvalidRequest if MPS would misread or ignore it."""
    ordinals = []
    for entry in text.split(","):
        match = _LIMIT_PATTERN.fullmatch(entry)
        if match is None:
            raise InvalidRequest(
                LIMIT_ENV, f"{quote_text(entry)} in {quote_text(text)} is misread by MPS", _LIMIT_REMEDY
            )
        ordinals.append(int(match[1]))
    if ordinals != list(range(len(ordinals))):
        raise InvalidRequest(
            LIMIT_ENV,
            f"{quote_text(text)} does not name the GPUs from 0 on, each once; an entry for a GPU that a process "
            "cannot see lifts all limits",
            _LIMIT_REMEDY,
        )


def container_environment(limits: Sequence[MiB], percent: int | None = None) -> dict[str, str]:
    """The environment of a container with MPS.

    limits: MiB, by card ordinal.
    percent: of a card's SMs; None for no limit.

    With several cards there is no memory limit in the environment, and only the daemon's ceilings apply. Otherwise a
    process that uses only some of the cards would have a limit for an invisible card. In that case MPS lifts all
    limits.
    """
    variables = {PIPE_ENV: CONTAINER_PIPE}
    if len(limits) == 1:
        variables[LIMIT_ENV] = limits_value(limits)
    if percent is not None:
        if not 1 <= percent <= 100:
            raise InvalidRequest(PERCENT_ENV, f"{percent} is not from 1 to 100", "write a whole number of percent")
        variables[PERCENT_ENV] = str(percent)
    return variables


def start_problem(
    status: Status, uuid: str, *, now: float, required_state: MpsState = MpsState.READY, required_mib: MiB = MiB(0)
) -> str | None:
    """Why a container may not start on the card yet; None if it may.

    now: CLOCK_BOOTTIME, in seconds.
    required_state: READY, or OFF for a container without MPS, which may also start while the state is UNAVAILABLE.
    required_mib: the container's memory limit on this card.

    The checks that need I/O are in `cardwise.gpus.mpsfiles`: whether the manager runs, and whether the daemon accepts
    connections.
    """
    if uuid not in status.uuids:
        return f"the state file is about {', '.join(status.uuids) or 'no GPU'}, not {uuid}"
    if status.state is MpsState.UNAVAILABLE and required_state is MpsState.OFF:
        return None
    if status.state is not required_state:
        return f"MPS on GPU {uuid} is {status.state}, not {required_state}" + (
            f": {status.reason}" if status.reason else ""
        )
    if is_stale(status, now):
        # The text has no duration, because a text that changes every second would be reported every second.
        return f"the MPS manager has not checked GPU {uuid} for over {status.valid_seconds:.0f} s; it may hang"
    allowed = status.ceilings.get(uuid, 0)
    if required_state is MpsState.READY and allowed < required_mib:
        return (
            f"MPS on GPU {uuid} allows {allowed} MiB, and {required_mib} MiB are needed; the manager raises it at any "
            "moment"
        )
    return None


def is_stale(status: Status, now: float) -> bool:
    """Whether the state is too old for starting containers. `now`: CLOCK_BOOTTIME, in seconds.

    UNAVAILABLE never becomes stale. It ends only when the manager has replaced the state file and has then found the
    card empty of pods.
    """
    return status.state in (MpsState.READY, MpsState.OFF) and now - status.checked > status.valid_seconds


def encode(status: Status) -> str:
    """The text of the state file."""
    return json.dumps(
        {
            "version": _VERSION,
            "uuids": list(status.uuids),
            "scope": status.scope,
            "state": status.state,
            "reason": status.reason,
            "since": status.since,
            "checked": status.checked,
            "validSeconds": status.valid_seconds,
            "driver": status.driver,
            "multiUser": status.multi_user,
            "enforced": status.enforced,
            "ceilingMiB": dict(status.ceilings),
            "daemonPid": status.daemon_pid,
            "managerPid": status.manager_pid,
            "maxClients": status.max_clients,
        }
    )


def decode(text: str) -> Status:
    """The status in the text of a state file. Raises UnreadableState."""
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw["version"] != _VERSION:
            raise UnreadableState(f"the state file has version {raw['version']}, this program reads {_VERSION}")
        return Status(
            uuids=tuple(map(str, raw["uuids"])),
            scope=DaemonScope(raw["scope"]),
            state=MpsState(raw["state"]),
            reason=str(raw["reason"]),
            since=float(raw["since"]),
            checked=float(raw["checked"]),
            valid_seconds=float(raw["validSeconds"]),
            driver=str(raw["driver"]),
            multi_user=raw["multiUser"] is True,
            enforced=raw["enforced"] is True,
            ceilings={str(uuid): MiB(int(mib)) for uuid, mib in raw["ceilingMiB"].items()},
            daemon_pid=int(raw["daemonPid"]),
            manager_pid=int(raw["managerPid"]),
            max_clients=int(raw["maxClients"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, UnreadableState):
            raise
        raise UnreadableState(f"the state file is unreadable: {quote_text(text)}") from error


def status_fields(status: Status, uuid: str) -> dict[str, Any]:
    """The fields of an ExtendedResource's MPS status (`MpsStatus` in `cardwise/kube/objects`), without its time."""
    return {
        "mode": str(status.scope),
        "state": str(status.state),
        "reason": status.reason,
        "multi_user": status.multi_user,
        "ceiling_mib": int(status.ceilings.get(uuid, 0)),
        "max_clients": status.max_clients,
    }
