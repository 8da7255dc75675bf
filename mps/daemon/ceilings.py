"""The memory limits that a daemon sets its clients on each card: wanted, set, and read back.

Settings of MPS are set in silence, lost at a restart, and kept twice: by the daemon for its next server, and by each
server for its next clients.
"""

from collections.abc import Mapping

import structlog

from cardwise.core.api import mps
from cardwise.core.values.quantity import MiB
from mps import metrics
from mps.daemon.units import DaemonUnit
from mps.host.control import CommandRefused, Control

_log = structlog.get_logger(__name__)

_BYTES = 1024 * 1024


class Ceilings:
    """The limits of one daemon. `wanted` is replaced by other threads; the rest is for the daemon's own."""

    def __init__(self, unit: DaemonUnit, control: Control) -> None:
        self.wanted: Mapping[str, MiB] | None = None  # by UUID; None while nobody knows
        self.confirmed: dict[str, MiB] = {}  # of all clients to come: the lowest of the daemon's and its servers'
        self._given: dict[str, MiB] = {}  # of the daemon's next server, as read back
        self._unit = unit
        self._control = control

    @property
    def behind(self) -> bool:
        """Whether they are not what they should be."""
        return self._target() != self.confirmed

    def forget(self) -> None:
        """A new daemon knows nothing of what the one before was told."""
        self.confirmed = {}

    def adopt(self) -> None:
        """Takes those that the daemon has for the truth, where nobody knows better. Raises ControlError."""
        if self.wanted is None and not self.confirmed:
            self.confirmed = self._read()

    def changed(self) -> str:
        """What somebody else has made of them, "" if nothing. Raises ControlError."""
        found = self._read()
        return "" if found == self._given else f"the daemon's ceilings are {found}: somebody has changed them"

    def apply(self) -> None:
        """For the next server, and for the future clients of those that run. Raises ControlError for the first."""
        target = self._target()
        for ordinal, uuid in enumerate(self._unit.uuids):
            self._control.set_ceiling(ordinal, target[uuid])
        self._given = dict(target)
        confirmed = dict(target)
        for server in self._control.servers():
            for ordinal, uuid in enumerate(self._unit.uuids):
                try:
                    self._control.set_server_ceiling(server, ordinal, target[uuid])
                except CommandRefused as error:
                    # Its clients still meet the old one; containers of larger shares wait, and we try again.
                    confirmed[uuid] = min(confirmed[uuid], self.confirmed.get(uuid, MiB(0)))
                    _log.warning("a server kept its ceiling", card=self._unit.name, error=str(error))
        self.confirmed = confirmed
        for uuid, mib in confirmed.items():
            metrics.CEILING.labels(uuid).set(mib * _BYTES)

    def _target(self) -> dict[str, MiB]:
        """As they should be: what is wanted, else what the daemon has, else the whole cards."""
        wanted, cards = self.wanted, self._unit.cards
        if wanted is None:
            return {card.uuid: self.confirmed.get(card.uuid) or mps.ceiling([card.memory]) for card in cards}
        return {card.uuid: wanted.get(card.uuid, mps.ceiling([])) for card in cards}

    def _read(self) -> dict[str, MiB]:
        found = {uuid: self._control.ceiling(ordinal) for ordinal, uuid in enumerate(self._unit.uuids)}
        return {uuid: mib for uuid, mib in found.items() if mib is not None}
