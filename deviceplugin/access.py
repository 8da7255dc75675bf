"""How a container of this node comes to its card: closed (CDI) or open (environment only).

Apart because users must be told which it is: where only the environment says which card is the container's, a user
who sets NVIDIA_VISIBLE_DEVICES in a shell of his own sees the others.
"""

import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import structlog

from cardwise.gpus.protocol import GpuCard
from deviceplugin import cdi
from deviceplugin.containers import Containers, RuntimeFacts, RuntimeSilent, serves_cdi
from deviceplugin.grants import Grant

_log = structlog.get_logger(__name__)


class Access(StrEnum):
    """As in ExtendedResource.status.cardAccess."""

    CDI = "cdi"
    ENV = "env"


def decide(facts: RuntimeFacts, nvidia_spec_missing: str) -> tuple[Access, str]:
    """Access and why. `nvidia_spec_missing` says why the real cards' CDI spec is not usable, "" when it is."""
    runtime = f"{facts.name} {facts.version}"
    if not serves_cdi(facts):
        return Access.ENV, f"{runtime} does not serve CDI (containerd before 2.0: set enable_cdi); access is open"
    if nvidia_spec_missing:
        return Access.ENV, f"{nvidia_spec_missing}; access is open"
    return Access.CDI, f"{runtime} serves CDI"


def probe(containers: Containers, delivery: "Delivery", cards: list[GpuCard]) -> Access | None:
    """Asks the runtime; None while it is silent."""
    try:
        facts = containers.facts()
    except RuntimeSilent as error:
        _log.warning("the container runtime is silent; see --cri-socket", error=str(error))
        return None
    missing = ""
    try:
        for card in cards:
            delivery.edits([card])
    except cdi.NoDevice as error:
        missing = str(error)
    access, why = decide(facts, missing)
    (_log.info if access is Access.CDI else _log.warning)("card access", access=str(access), why=why)
    if access is Access.CDI and facts.cdi_dirs and str(delivery.folder) not in facts.cdi_dirs:
        _log.error("the runtime does not read --cdi-dir", cdi_dir=str(delivery.folder), it_reads=list(facts.cdi_dirs))
    return access


class Delivery:
    """Turns grants into CDI specs in `folder`. `nvidia` is None for simulated cards."""

    def __init__(self, folder: Path, nvidia: cdi.NvidiaSpecs | None) -> None:
        self.folder = folder
        self._nvidia = nvidia
        self._lock = threading.Lock()

    def edits(self, cards: list[GpuCard]) -> tuple[cdi.Edits, str]:
        """Of all the cards together, and the CDI version. Raises NoDevice."""
        if self._nvidia is None:
            return cdi.merged(cdi.plain_edits(card) for card in cards), cdi.CDI_VERSION
        found = [self._nvidia.edits(card) for card in cards]
        return cdi.merged(edits for edits, _ in found), max(version for _, version in found)

    def deliver(self, grant: Grant, cards: list[GpuCard]) -> None:
        """Writes the spec of each slot of the grant. Raises NoDevice or OSError."""
        edits, version = self.edits(cards)
        with self._lock:
            for slot in grant.slots:
                cdi.write(self.folder, slot, cdi.spec(slot, grant, edits, version))

    def withdraw(self, slot: str, unused: Callable[[], bool]) -> None:
        """Removes the slot's spec if it is still `unused` by then. Raises OSError."""
        with self._lock:
            if unused():
                cdi.remove(self.folder, slot)

    def restore(self, grants: list[Grant], cards: dict[str, GpuCard]) -> None:
        """Makes the folder anew from the grants: after a reboot it is empty, after a crash it may be behind."""
        latest: dict[str, Grant] = {}
        for grant in sorted(grants, key=lambda grant: grant.granted_ns):
            latest |= dict.fromkeys(grant.slots, grant)
        for path in cdi.stale(self.folder, set(latest)):
            path.unlink(missing_ok=True)
        for slot, grant in latest.items():
            try:
                edits, version = self.edits([cards[share.uuid] for share in grant.shares])
                cdi.write(self.folder, slot, cdi.spec(slot, grant, edits, version))
            except (cdi.NoDevice, OSError, KeyError) as error:
                _log.error("no CDI spec for a granted slot", slot=slot, pod=grant.pod, error=repr(error))
