"""A unit is what one daemon serves: its cards, its directory and its environment."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cardwise.core.api import mps
from cardwise.core.api.mps import Scope
from cardwise.gpus.protocol import CardError, CardUse, GpuCard
from mps.host.drivers import Capabilities

_DROPPED = ("CUDA_", "NVIDIA_VISIBLE_DEVICES")
_OF_MPS = "CUDA_MPS_"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonUnit:
    """What one daemon serves. `name` is for people and metrics: the card's UUID, or "node"."""

    name: str
    home: Path
    scope: Scope
    cards: tuple[GpuCard, ...]

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(card.uuid for card in self.cards)

    @property
    def pipe(self) -> Path:
        return self.home / mps.PIPE

    def users(self, use: CardUse) -> set[tuple[str, int]]:
        """Card and PID of each process on the cards; none of a card of which the driver does not tell."""
        found: set[tuple[str, int]] = set()
        for uuid in self.uuids:
            with suppress(CardError):
                found |= {(uuid, one.pid) for one in use.processes(uuid)}
        return found


def environment(unit: DaemonUnit, capabilities: Capabilities) -> dict[str, str]:
    """Whole, since daemons need PATH and LD_LIBRARY_PATH; but for what would change what MPS does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return (
        kept
        | capabilities.visible(list(unit.cards))
        | {mps.PIPE_ENV: str(unit.pipe), mps.LOG_ENV: str(unit.home / mps.LOG)}
    )


def passed_over(environment: Mapping[str, str]) -> list[str]:
    """Names of MPS' own settings in the manager's environment: no daemon gets them, since the manager sets what they
    say. Raises InvalidRequest for a limit that MPS would misread: who wrote it counts on it, here and elsewhere.
    """
    if mps.LIMIT_ENV in environment:
        mps.check_limits(environment[mps.LIMIT_ENV])
    return sorted(name for name in environment if name.startswith(_OF_MPS))
