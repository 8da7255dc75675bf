"""How a container of this node comes to its card: closed (CDI) or open (environment only).

Apart because users must be told which it is: where only the environment says which card is the container's, a user
who sets NVIDIA_VISIBLE_DEVICES in a shell of his own sees the others.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path

import structlog

from cardwise.gpus.protocol import GpuCard
from deviceplugin import cdi
from deviceplugin.containers import Containers, RuntimeFacts, RuntimeSilent, serves_cdi
from deviceplugin.grants import Grant, GrantStore

_log = structlog.get_logger(__name__)


class Access(StrEnum):
    """As in ExtendedResource.status.cardAccess."""

    CDI = "cdi"
    ENV = "env"


def decide(facts: RuntimeFacts) -> tuple[Access, str]:
    """Access and why. The runtime alone decides: a card without device is sick, never a reason to open the others."""
    runtime = f"{facts.name} {facts.version}"
    if not serves_cdi(facts):
        return Access.ENV, f"{runtime} does not serve CDI (containerd before 2.0: set enable_cdi); access is open"
    return Access.CDI, f"{runtime} serves CDI"


def probe(containers: Containers, cdi_dir: Path) -> Access | None:
    """Asks the runtime; None while it is silent."""
    try:
        facts = containers.facts()
    except RuntimeSilent as error:
        _log.warning("the container runtime is silent; see --cri-socket", error=str(error))
        return None
    access, why = decide(facts)
    (_log.info if access is Access.CDI else _log.warning)("card access", access=str(access), why=why)
    if access is Access.CDI and facts.cdi_dirs and str(cdi_dir) not in facts.cdi_dirs:
        _log.error("the runtime does not read --cdi-dir", cdi_dir=str(cdi_dir), it_reads=list(facts.cdi_dirs))
    return access


class Delivery:
    """Turns grants into CDI specs in `folder`. `nvidia` is None for simulated cards."""

    def __init__(self, folder: Path, nvidia: cdi.NvidiaSpecs | None) -> None:
        self._folder = folder
        self._nvidia = nvidia
        self._lock = threading.Lock()

    def edits(self, cards: list[GpuCard]) -> tuple[cdi.Edits, str]:
        """Of all the cards together, and the CDI version. Raises NoDevice."""
        if self._nvidia is None:
            return cdi.merged(cdi.plain_edits(card) for card in cards), cdi.CDI_VERSION
        found = [self._nvidia.edits(card) for card in cards]
        return cdi.merged(edits for edits, _ in found), max(version for _, version in found)

    def undeliverable(self, cards: list[GpuCard]) -> dict[str, str]:
        """By UUID: why cards cannot be given to a container at present."""
        found = {}
        for card in cards:
            try:
                self.edits([card])
            except (cdi.NoDevice, OSError) as error:
                found[card.uuid] = str(error)
        return found

    def deliver(self, grant: Grant, cards: list[GpuCard]) -> None:
        """Writes the spec of each slot of the grant. Raises NoDevice or OSError."""
        edits, version = self.edits(cards)
        with self._lock:
            for slot in grant.slots:
                cdi.write(self._folder, slot, cdi.spec(slot, grant, edits, version))

    def withdraw(self, slot: str, unused: Callable[[], bool]) -> None:
        """Removes the slot's spec if it is still `unused` by then. Raises OSError."""
        with self._lock:
            if unused():
                cdi.remove(self._folder, slot)

    def restore(self, grants: GrantStore, cards: Mapping[str, GpuCard]) -> None:
        """Makes the folder anew from the grants: after a reboot it is empty, after a crash it may be behind."""
        # What is granted after this look is delivered after the lock, over what is written here.
        with self._lock:
            slots = {slot for grant in grants.all() for slot in grant.slots}
            for path in cdi.stale(self._folder, slots):
                path.unlink(missing_ok=True)
            self._rewrite(slots, grants, cards)

    def refresh(self, slots: Iterable[str], grants: GrantStore, cards: Mapping[str, GpuCard]) -> None:
        """As `restore`, for some slots."""
        with self._lock:
            self._rewrite(slots, grants, cards)

    def _rewrite(self, slots: Iterable[str], grants: GrantStore, cards: Mapping[str, GpuCard]) -> None:
        for slot in slots:
            grant = grants.owner(slot)
            if grant is None:
                continue
            try:
                edits, version = self.edits([cards[share.uuid] for share in grant.shares])
                cdi.write(self._folder, slot, cdi.spec(slot, grant, edits, version))
            except (cdi.NoDevice, OSError, KeyError) as error:
                _log.error("no CDI spec for a granted slot", slot=slot, pod=grant.pod, error=repr(error))
