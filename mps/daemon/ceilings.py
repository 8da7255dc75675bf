"""Computes the memory limits (ceilings) of a daemon's clients on each card, sets them, and reads them back.

Theory of operation. The ceiling of a card is its largest share (at least 512 MiB, and in whole GiB from 1 GiB on). A
container's own limit can only be lower than the ceiling. MPS does not confirm a setting, and loses all settings at a
restart. MPS stores each ceiling twice: in the daemon for its next server, and in each server for its next clients. So
both copies are set and read back, and the lower of the two counts as `confirmed`.

Example: the shares on a card are 4096 and 8192 MiB, so the ceiling is 8192 MiB. A share of 12288 MiB is added: the
daemon accepts 12288, a running server refuses. `confirmed` stays 8192 MiB, the new container waits, and the next pass
tries again.
"""

from collections.abc import Mapping

import structlog

from cardwise.core.api import mps
from cardwise.core.values.quantity import MiB
from mps import metrics
from mps.daemon.units import DaemonUnit
from mps.host.control import CommandRefused, Control

_log = structlog.get_logger(__name__)

_BYTES_PER_MIB = 1024 * 1024


class Ceilings:
    """The ceilings of one daemon.

    Other threads replace `desired`; only the daemon's thread uses the other attributes.
    """

    def __init__(self, unit: DaemonUnit, control: Control) -> None:
        self.desired: Mapping[str, MiB] | None = None  # the ceilings to set, by UUID; None while unknown
        self.confirmed: dict[str, MiB] = {}  # by UUID; every future client gets at least this ceiling
        self._daemon_ceilings: dict[str, MiB] = {}  # the ceilings of the daemon's next server
        self._unit = unit
        self._control = control

    @property
    def is_outdated(self) -> bool:
        """Whether the confirmed ceilings differ from the target."""
        return self._target_ceilings_by_card() != self.confirmed

    def forget_confirmed(self) -> None:
        """Forget the confirmed ceilings, since a new daemon has none."""
        self.confirmed = {}

    def adopt_ceilings(self) -> None:
        """If no ceilings are known yet, take the running daemon's ceilings as confirmed. Raises ControlError."""
        if self.desired is None and not self.confirmed:
            self.confirmed = self._read_ceilings_by_card()

    def change_reason(self) -> str | None:
        """A sentence if another program has changed the daemon's ceilings; else None. Raises ControlError."""
        ceilings = self._read_ceilings_by_card()
        if ceilings == self._daemon_ceilings:
            return None
        return f"the daemon's ceilings are {ceilings}: another program has changed them"

    def apply_ceilings(self) -> None:
        """Set the ceilings for the next server, and for future clients of running servers.

        If a server refuses, the lower of the former and the new ceiling counts as confirmed. Raises ControlError on all
        other failures.
        """
        target = self._target_ceilings_by_card()
        for ordinal, uuid in enumerate(self._unit.uuids):
            self._control.set_ceiling(ordinal, target[uuid])
        self._daemon_ceilings = dict(target)
        confirmed = dict(target)
        for server in self._control.servers():
            for ordinal, uuid in enumerate(self._unit.uuids):
                try:
                    self._control.set_server_ceiling(server, ordinal, target[uuid])
                except CommandRefused as error:
                    # New clients of this server still get the old ceiling; larger shares wait, and the next pass tries
                    # again.
                    confirmed[uuid] = min(confirmed[uuid], self.confirmed.get(uuid, MiB(0)))
                    _log.warning("a server did not accept a new ceiling", card=self._unit.name, error=str(error))
        self.confirmed = confirmed
        for uuid, mib in confirmed.items():
            metrics.CEILING_BYTES.labels(uuid).set(mib * _BYTES_PER_MIB)

    def _target_ceilings_by_card(self) -> dict[str, MiB]:
        """The ceilings to set, by UUID: the desired ones if known, else the confirmed ones, else the whole cards."""
        desired, cards = self.desired, self._unit.cards
        if desired is None:
            return {card.uuid: self.confirmed.get(card.uuid) or mps.ceiling_of_shares([card.memory]) for card in cards}
        return {card.uuid: desired.get(card.uuid, mps.ceiling_of_shares([])) for card in cards}

    def _read_ceilings_by_card(self) -> dict[str, MiB]:
        ceilings = {uuid: self._control.ceiling(ordinal) for ordinal, uuid in enumerate(self._unit.uuids)}
        return {uuid: mib for uuid, mib in ceilings.items() if mib is not None}
