"""The unit that one daemon serves: its cards, its folder and its environment."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope
from cardwise.gpus.protocol import CardControl, CardError, GpuCard

_DROPPED_PREFIXES = ("CUDA_", "NVIDIA_VISIBLE_DEVICES")
_MPS_PREFIX = "CUDA_MPS_"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonUnit:
    """The cards and folder of one daemon.

    name: the card's UUID, or "node"; used in logs and metrics.
    """

    name: str
    home: Path
    scope: DaemonScope
    cards: tuple[GpuCard, ...]

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(card.uuid for card in self.cards)

    @property
    def pipe(self) -> Path:
        return self.home / mps.PIPE_FOLDER

    def processes(self, card_control: CardControl) -> set[tuple[str, int]]:
        """Card and PID of each process on the unit's cards. Cards that cannot list their processes are skipped."""
        processes: set[tuple[str, int]] = set()
        for uuid in self.uuids:
            with suppress(CardError):
                processes |= {(uuid, process.pid) for process in card_control.processes(uuid)}
        return processes


def daemon_environment(unit: DaemonUnit) -> dict[str, str]:
    """The environment of the daemon, which sees the unit's cards only, in their order.

    This is the manager's environment, since daemons need PATH and LD_LIBRARY_PATH, but without variables that would
    change the behaviour of MPS.
    """
    inherited = {name: setting for name, setting in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
    return (
        inherited
        | {"CUDA_VISIBLE_DEVICES": ",".join(unit.uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        | {mps.PIPE_ENV: str(unit.pipe), mps.LOG_ENV: str(unit.home / mps.LOG_FOLDER)}
    )


def list_ignored_settings(environment: Mapping[str, str]) -> list[str]:
    """List the names of MPS variables that are in the manager's environment and are not passed to its daemons.

    The manager sets these variables itself. Raises InvalidRequest for a memory limit that MPS would misread.
    """
    if mps.LIMIT_ENV in environment:
        mps.check_limits(environment[mps.LIMIT_ENV])
    return sorted(name for name in environment if name.startswith(_MPS_PREFIX))
