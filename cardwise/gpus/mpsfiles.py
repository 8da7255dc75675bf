"""Whether a container may start on a card with MPS, read from the files of the node's MPS manager.

No API server is called. `cardwise.core.api.mps` decodes a state file; this module checks the facts that the file cannot
contain: whether the manager that wrote it is running, and whether the MPS daemon that it describes is running.
"""

import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState, Status
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import ComputeMode

_CONNECT_SECONDS = 0.5


def unready_reason(
    root: Path, uuid: str, *, required_state: MpsState = MpsState.READY, memory_limit: MiB = MiB(0), clock: Clock = BOOT
) -> str | None:
    """Why a container may not start on the card yet; None if it may start. Takes milliseconds.

    required_state: the MPS state that the container needs: Ready, or Off for a container without MPS.
    memory_limit: the container's memory limit on the card, in MiB.
    clock: the manager's clock, which all containers of a node share.
    """
    card_state = find_daemon_state(root, uuid)
    return unready_reason_of(
        root, card_state, uuid, required_state=required_state, memory_limit=memory_limit, clock=clock
    )


def unready_reason_of(
    root: Path,
    card_state: "CardState",
    uuid: str,
    *,
    required_state: MpsState,
    memory_limit: MiB = MiB(0),
    clock: Clock = BOOT,
) -> str | None:
    """As `unready_reason`, for a state that was read before (`find_daemon_state`)."""
    readiness = _readiness_of(card_state, uuid, required_state, memory_limit, clock)
    if readiness.state is MpsState.UNAVAILABLE:
        return readiness.reason  # valid without a manager too
    if not is_manager_running(root):
        return f"no MPS manager runs on this node ({root / mps.LOCK_FILE} is not held)"
    return readiness.reason


@dataclass(frozen=True, slots=True)
class CardReadiness:
    """Whether a container may start on a card.

    reason: why the container may not start yet; None if it may start.
    state: the MPS state of the card; None if it cannot be read.
    """

    reason: str | None
    state: MpsState | None


def card_readiness(
    root: Path, uuid: str, *, required_state: MpsState = MpsState.READY, memory_limit: MiB = MiB(0), clock: Clock = BOOT
) -> CardReadiness:
    """As `unready_reason`, but for processes in pods, which cannot check the manager's lock.

    Pods must not open the lock file, since they could then take the lock.
    """
    return _readiness_of(find_daemon_state(root, uuid), uuid, required_state, memory_limit, clock)


def _readiness_of(
    card_state: "CardState", uuid: str, required_state: MpsState, memory_limit: MiB, clock: Clock
) -> CardReadiness:
    folder, status = card_state
    if folder is None or status is None:
        return CardReadiness(f"the MPS manager of the node does not serve {uuid} (yet)", None)
    reason = mps.start_problem(status, uuid, now=clock.now(), required_state=required_state, required_mib=memory_limit)
    if not reason and required_state is MpsState.READY and not is_daemon_listening(folder / mps.CLIENTS_FOLDER):
        reason = f"the MPS daemon of {uuid} takes no connection"
    return CardReadiness(reason, status.state)


CardState = tuple[Path | None, Status | None]
"""The folder and the state of the MPS daemon that serves a card; None if no daemon serves it."""


def find_daemon_state(root: Path, uuid: str) -> CardState:
    """The folder and state of the MPS daemon that serves the card. A daemon for this card alone takes precedence."""
    for folder in (Path(mps.card_daemon_folder(str(root), uuid)), Path(mps.node_daemon_folder(str(root)))):
        status = read_state(folder)
        if status is not None and uuid in status.uuids:
            return folder, status
    return None, None


def read_state(folder: Path) -> Status | None:
    """The decoded state file of a daemon's folder; None if it is missing or unreadable."""
    try:
        return mps.decode((folder / mps.READY_FILE).read_text())
    except (OSError, UnicodeDecodeError, mps.UnreadableState):
        return None


def is_left_exclusive_by_former_manager(root: Path, uuid: str) -> bool:
    """Whether the card is still closed to processes without MPS by a former manager.

    True if the card's former compute mode is saved, or if the file of saved modes was deleted while the daemon had the
    card closed. With `--stop-daemons=idle`, a manager that ends does not reopen cards that pods hold, and leaves their
    daemons running.
    """
    for folder in (Path(mps.card_daemon_folder(str(root), uuid)), Path(mps.node_daemon_folder(str(root)))):
        try:
            former = json.loads((folder / mps.MODES_FILE).read_bytes())
            # A saved mode EXCLUSIVE_PROCESS means that another program had closed the card before the manager started.
            if former.get(uuid, ComputeMode.EXCLUSIVE_PROCESS) != ComputeMode.EXCLUSIVE_PROCESS:
                return True
        except FileNotFoundError:
            state = read_state(folder)
            if state is not None and state.enforced and uuid in state.uuids:
                return True
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return False


def is_manager_running(root: Path) -> bool:
    """Whether a process holds the manager's lock. The kernel releases the lock when the process ends."""
    try:
        descriptor = os.open(root / mps.LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    else:
        return False
    finally:
        os.close(descriptor)


def is_state_stale(root: Path, uuid: str, *, clock: Clock = BOOT) -> bool:
    """Whether the MPS state of the card is stale, because no manager runs or the manager has stopped checking this
    card.

    UNAVAILABLE is never stale. States that keep containers from starting never become stale by age.

    clock: as for `unready_reason`.
    """
    _, status = find_daemon_state(root, uuid)
    if status is not None and status.state is MpsState.UNAVAILABLE:
        return False
    return status is None or not is_manager_running(root) or mps.is_stale(status, clock.now())


def is_daemon_listening(folder: Path) -> bool:
    """Whether an MPS daemon listens in this folder. True also for a frozen daemon.

    Uses the wrong socket type on purpose: MPS listens for packets, so the kernel answers EPROTOTYPE without waking the
    daemon. If the daemon is dead, the kernel refuses the connection at once.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(folder / mps.CONTROL_SOCKET))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True
