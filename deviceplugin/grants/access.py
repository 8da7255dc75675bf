"""The ways in which a container of this node gets its card: closed (CDI) or open (environment only).

Users must be told which it is: where only the environment says which card is the container's, a user who sets
NVIDIA_VISIBLE_DEVICES in a shell of his own sees the others.
"""

import threading
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

import structlog

from cardwise.core.api import mps
from cardwise.core.api.cdiruntimes import CDI_SINCE
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard
from deviceplugin.grants import cdi
from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.hardware import Hardware
from deviceplugin.sources.containers import Containers, RuntimeFacts, RuntimeUnavailable, serves_cdi

_log = structlog.get_logger(__name__)

NO_CDI = (
    "devices other than GPUs are given by CDI only, which the container runtime of this node does not serve, or which "
    f"--card-access=env forbids; {CDI_SINCE}"
)
NO_CDI_NO_MPS = (
    "the way to its card's MPS daemon is given by CDI only, which the container runtime of this node does not serve, "
    f'or which --card-access=env forbids; annotate it {mps.MODE}: "off", or run no MPS manager on such nodes'
)


class Access(StrEnum):
    """As in ExtendedResource.status.cardAccess."""

    CDI = "cdi"
    ENV = "env"


def decide(facts: RuntimeFacts) -> tuple[Access, str]:
    """Access and why. The runtime alone decides: a card without device is sick, never a reason to open the others."""
    runtime = f"{facts.name} {facts.version}"
    if not serves_cdi(facts):
        return Access.ENV, f"{runtime} does not serve CDI ({CDI_SINCE}); access is open"
    return Access.CDI, f"{runtime} serves CDI"


def probe(containers: Containers, cdi_dir: Path) -> Access | None:
    """Asks the runtime; None while it is silent."""
    try:
        facts = containers.facts()
    except RuntimeUnavailable as error:
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
        """The CDI edits of all the cards together, and the CDI version. Raises NoDevice."""
        if self._nvidia is None:
            return cdi.merged(cdi.plain_edits(card) for card in cards), cdi.CDI_VERSION
        found = [self._nvidia.edits(card) for card in cards]
        return cdi.merged(edits for edits, _ in found), max((version for _, version in found), default=cdi.CDI_VERSION)

    def undeliverable(self, cards: list[GpuCard]) -> dict[str, str]:
        """Why cards cannot be given to a container at present, by UUID."""
        found = {}
        for card in cards:
            try:
                self.edits([card])
            except (cdi.NoDevice, OSError) as error:
                found[card.uuid] = str(error)
        return found

    def trouble(self) -> str:
        """Why nothing can be delivered at present, "" when it can."""
        return cdi.trouble(self._folder)

    def deliver(self, grant: Grant, hardware: Hardware) -> None:
        """Writes the spec of each slot of the grant. Raises NoDevice, OSError, or KeyError for what is not here."""
        with self._lock:
            for slot in grant.slots:
                self._write(slot, grant, hardware)

    def withdraw(self, slot: str, unused: Callable[[], bool]) -> None:
        """Removes the slot's spec if it is still `unused` by then. Raises OSError."""
        with self._lock:
            if unused():
                cdi.remove(self._folder, slot)

    def restore(self, grants: GrantStore, hardware: Hardware) -> None:
        """Makes the folder anew from the grants: after a reboot it is empty, after a crash it may be behind."""
        # What is granted after this look is delivered after the lock, over what is written here.
        with self._lock:
            slots = {slot for grant in grants.all() for slot in grant.slots}
            for path in cdi.stale(self._folder, slots):
                path.unlink(missing_ok=True)
            self._rewrite(slots, grants, hardware)

    def refresh(self, slots: Iterable[str], grants: GrantStore, hardware: Hardware) -> None:
        """As `restore`, for some slots."""
        with self._lock:
            self._rewrite(slots, grants, hardware)

    def _rewrite(self, slots: Iterable[str], grants: GrantStore, hardware: Hardware) -> None:
        for slot in slots:
            grant = grants.owner(slot)
            if grant is None:
                continue
            try:
                self._write(slot, grant, hardware)
            except (cdi.NoDevice, OSError, KeyError) as error:
                told = {"slot": slot, "pod": grant.pod, "uid": grant.pod_uid, "error": repr(error)}
                _log.error("no CDI spec for a granted slot", **told)

    def _write(self, slot: str, grant: Grant, hardware: Hardware) -> None:
        cards = [hardware.cards[share.uuid] for share in grant.shares]
        edits, version = self.edits(cards)
        devices = [hardware.devices[device.uuid] for device in grant.devices]
        edits = cdi.merged([edits, *map(cdi.device_edits, devices), cdi.mps_edits(grant, cards)])
        cdi.write(self._folder, slot, cdi.spec(slot, grant, edits, version, devices))


def device_trouble(device: OtherDevice, access: Access | None) -> str:
    """Why no container can be given a device at present, "" when one can."""
    if device.problem:
        return device.problem
    if access is Access.ENV:
        return NO_CDI
    try:
        cdi.device_edits(device)
    except (cdi.NoDevice, OSError) as error:
        return str(error)
    return ""
