"""The extender's limits per card, in the format of the ConfigMap that the command line reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from cardwise.core.api.cards import FULL_CORE
from cardwise.core.values.quantity import MAX_MIB, MiB

AUTO: Final = "auto"  # in place of MiB: the headroom that each card has

# Keys of the ConfigMap: the names of the chart's settings.
_HEADROOM_KEY: Final = "headroomMiB"
_CLIENTS_KEY: Final = "maxClients"
_CORE_KEY: Final = "coreOvercommit"

# Shares on one card; a larger number in the ConfigMap is invalid. The setting's own maximum is far lower.
_MAX_CLIENTS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLimits:
    """The extender's limits per card.

    kept_back: MiB of each card that no share can use; None for the headroom that each card has.
    max_clients: the maximum number of shares on one card; None for MPS's own maximum.
    core: the percent of a card's SMs that its shares may request in total; more than 100 allows overcommitment.
    """

    kept_back: MiB | None = MiB(0)
    max_clients: int | None = None
    core: int = FULL_CORE

    def configmap_data(self) -> dict[str, str]:
        """The entries of the ConfigMap."""
        headroom = AUTO if self.kept_back is None else str(self.kept_back)
        return {_HEADROOM_KEY: headroom, _CLIENTS_KEY: str(self.max_clients or 0), _CORE_KEY: str(self.core)}

    @classmethod
    def read(cls, data: Mapping[str, str]) -> Self | None:
        """The limits in the ConfigMap's entries; None if an entry is invalid or missing."""
        is_auto = data.get(_HEADROOM_KEY) == AUTO
        kept_back = 0 if is_auto else _parse_number(data.get(_HEADROOM_KEY), 0, MAX_MIB)
        clients = _parse_number(data.get(_CLIENTS_KEY), 0, _MAX_CLIENTS)
        core = _parse_number(data.get(_CORE_KEY), FULL_CORE, 10 * FULL_CORE)
        if kept_back is None or clients is None or core is None:
            return None
        return cls(kept_back=None if is_auto else MiB(kept_back), max_clients=clients or None, core=core)


def _parse_number(text: str | None, minimum: int, maximum: int) -> int | None:
    if text is None or not text.isdecimal() or len(text) > len(str(maximum)):
        return None
    number = int(text)
    return number if minimum <= number <= maximum else None
