"""Whether MPS can run on a card, and what an administrator has to change if it cannot.

A card that lacks MPS for one of these reasons accepts only pods that do not require MPS. So a reason must last until an
administrator acts, and tenants must not be able to cause one. For example, a process of a pod is never treated as
another MPS daemon.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from cardwise.clock import Clock
from cardwise.core.api import gpunodes, mps
from cardwise.core.values.shellcommand import command
from cardwise.gpus.protocol import IN_MIG_MODE, GpuCard
from mps.host import drivers
from mps.host.processes import ControlDaemon, Host

_CHECK_INTERVAL_SECONDS = 60.0  # between two searches for the control program and for other MPS daemons


class Cause(StrEnum):
    """Why MPS is unavailable on a card, for metrics."""

    PROGRAM = "program"  # the control program is missing
    DRIVER = "driver"  # the driver is too old
    MIG = "mig"  # the card is in MIG mode
    PLUGIN = "plugin"  # NVIDIA's device plugin serves the node
    DAEMON = "daemon"  # an MPS daemon serves the card that this manager has not started
    PODS = "pods"  # MPS can run again, and pods that started without it have not ended yet


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why MPS cannot run on a card: `reason` with the remedy, for people."""

    cause: Cause
    reason: str


def describe_pods_without_mps(uuids: Sequence[str]) -> Obstacle:
    """The obstacle of cards on which MPS can run again, while pods are there that started without it.

    Pods that come meanwhile start without MPS, too. Where pods overlap, only an administrator can end that: to close
    the cards would leave pods pending for as long as the others run.
    """
    commands = " and ".join(command("cardwise cordon {uuid:text}", uuid=uuid) for uuid in uuids)
    return Obstacle(
        Cause.PODS,
        "MPS can run on the GPU again, and starts when the pods that started there without MPS have ended. Pods that "
        f"come meanwhile start without MPS, too: if there is always one, run {commands} until MPS is Ready",
    )


class Availability:
    """The obstacles to MPS on the cards of a node. Not thread-safe.

    control: a path of the program nvidia-cuda-mps-control, or its name, which is searched in PATH.
    root: the folder of the manager's own daemons.
    nvidia_gpus: returns the number of GPUs that NVIDIA's device plugin offers on the node; 0 if `--gpus` divides the
        cards between that plugin and Cardwise.
    is_mig: returns whether a card is in MIG mode, by UUID.
    """

    def __init__(
        self,
        control: Path,
        root: Path,
        *,
        nvidia_gpus: Callable[[], int],
        is_mig: Callable[[str], bool],
        host: Host,
        clock: Clock,
    ) -> None:
        self._control = control
        self._root = root
        self._nvidia_gpus = nvidia_gpus
        self._is_mig = is_mig
        self._host = host
        self._clock = clock
        self._looked_at = -math.inf
        self._has_control = False
        self._other_daemons: list[ControlDaemon] = []

    def refresh(self) -> None:
        """Search for the control program and for other MPS daemons, if the last search was a minute ago."""
        if self._clock.now() - self._looked_at < _CHECK_INTERVAL_SECONDS:
            return
        self._looked_at = self._clock.now()
        self._has_control = shutil.which(self._control) is not None
        self._other_daemons = self._host.other_daemons(self._root)

    def find_obstacle(self, cards: Sequence[GpuCard]) -> Obstacle | None:
        """The first obstacle to an MPS daemon of these cards; None if the daemon can run."""
        if any(self._is_mig(card.uuid) for card in cards):
            return Obstacle(Cause.MIG, IN_MIG_MODE)
        if problem := gpunodes.nvidia_plugin_problem(self._nvidia_gpus()):
            return Obstacle(Cause.PLUGIN, problem)
        if not self._has_control:
            return Obstacle(Cause.PROGRAM, _describe_missing_control(self._control))
        driver = cards[0].properties.get("driver", "")
        if drivers.is_too_old(driver):
            reason = (
                f"MPS needs driver {drivers.MIN_MAJOR} or newer, and this node has {driver}: upgrade NVIDIA's driver"
            )
            return Obstacle(Cause.DRIVER, reason)
        for daemon in self._other_daemons:
            if any(_serves(daemon.environment, card) for card in cards):
                return Obstacle(Cause.DAEMON, _describe_other_daemon(daemon, self._root))
        return None


def _describe_missing_control(control: Path) -> str:
    return (
        f"{control.name} is not installed or cannot be run; it belongs to NVIDIA's driver: install the package "
        "nvidia-compute-utils or nvidia-cuda-mps on the node, and let NVIDIA's container toolkit mount it into the "
        "manager's container (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    )


def _describe_other_daemon(daemon: ControlDaemon, root: Path) -> str:
    end_it = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={daemon.pipe} nvidia-cuda-mps-control"
    process = f"process {daemon.pid}, folder {daemon.pipe}"
    if (other_root := _root_of_cardwise(daemon.environment)) is not None:
        return (
            f"an MPS daemon of another MPS manager of Cardwise, with --mps-root {other_root}, serves the GPU "
            f"({process}): set nodes.mpsRoot (--mps-root), which is {root}, to {other_root} again, or end the daemon "
            f"when its pods have ended ({end_it})"
        )
    return (
        f"an MPS daemon that is not Cardwise's serves the GPU ({process}): end it ({end_it}), or leave the GPU to it "
        "by nodes.gpus (--gpus)"
    )


def _root_of_cardwise(environment: Mapping[str, str]) -> str | None:
    """The --mps-root of the MPS manager that started a daemon with this environment; None if none did."""
    pipe = PurePosixPath(environment.get(mps.PIPE_ENV, ""))
    folder = pipe.parent
    uuids = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    has_our_name = folder.name in {mps.NODE_FOLDER, *map(mps.folder_name, uuids)}
    has_our_files = pipe.name == mps.PIPE_FOLDER and environment.get(mps.LOG_ENV) == str(folder / mps.LOG_FOLDER)
    return str(folder.parent) if has_our_name and has_our_files else None


def _serves(environment: Mapping[str, str], card: GpuCard) -> bool:
    """Whether a daemon with this environment serves the card.

    A UUID may be shortened. Without CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA may number the cards in another order. Then an
    index proves nothing, and the daemon may serve any card.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    devices = [device.strip().lower() for device in visible.split(",") if device.strip()]
    has_indices = any(device.isdigit() for device in devices)
    if has_indices and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return True
    return any(device == str(card.index) or _is_uuid_of(device, card) for device in devices)


def _is_uuid_of(device: str, card: GpuCard) -> bool:
    return device.startswith("gpu-") and card.uuid.lower().startswith(device)
