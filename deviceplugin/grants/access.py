"""How containers of this node get their cards: closed access (CDI) or open access (environment only).

The access is published to users: with open access, a user who sets NVIDIA_VISIBLE_DEVICES in a shell sees the other
cards.
"""

import threading
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import structlog

from cardwise.core.api import names
from cardwise.core.api.cdiruntimes import CDI_SINCE
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard
from deviceplugin.grants import cdi
from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.hardware import Hardware
from deviceplugin.sources.containers import RuntimeContainers, RuntimeFacts, RuntimeUnavailable, serves_cdi

_log = structlog.get_logger(__name__)

NO_CDI_FOR_DEVICES_TEXT = (
    "devices other than GPUs need CDI, and on this node the container runtime does not support CDI, or "
    f"--gpu-access=env disables it; {CDI_SINCE}"
)
NO_CDI_FOR_MPS_TEXT = (
    "MPS needs CDI, and on this node the container runtime does not support CDI, or --gpu-access=env disables it; "
    f"annotate the pod {names.ISOLATION}: none, or run no MPS manager on such nodes"
)

NO_CDI_FOR_CLAIMS_TEXT = (
    "shares by ResourceClaim need CDI, and on this node the container runtime does not support CDI, or "
    f"--gpu-access=env disables it; {CDI_SINCE}, or use another scheduler.mode"
)


class Access(StrEnum):
    """How containers get their cards; the values of ExtendedResource.status.gpuAccess."""

    CDI = "cdi"
    ENV = "env"


class AccessChoice(NamedTuple):
    """The access to cards on a node, and the reason for the choice."""

    access: Access
    reason: str


def choose_access(runtime_info: RuntimeFacts) -> AccessChoice:
    """Choose the access to cards on this node.

    The access depends only on the runtime's features. If a card has no device node, the card becomes unhealthy, but the
    access to the other cards stays restricted.
    """
    runtime = f"{runtime_info.name} {runtime_info.version}"
    if not serves_cdi(runtime_info):
        return AccessChoice(Access.ENV, f"{runtime} does not support CDI ({CDI_SINCE}); access is open")
    return AccessChoice(Access.CDI, f"{runtime} supports CDI")


def choose_access_of_runtime(containers: RuntimeContainers, cdi_dir: Path) -> Access | None:
    """Choose the access from the runtime's settings; None if the runtime does not answer. Logs the reason."""
    try:
        runtime_info = containers.facts()
    except RuntimeUnavailable as error:
        _log.warning("the container runtime does not answer; check --cri-socket", error=str(error))
        return None
    access, reason = choose_access(runtime_info)
    (_log.info if access is Access.CDI else _log.warning)(
        "determined the GPU access", access=str(access), reason=reason
    )
    if access is Access.CDI and runtime_info.cdi_dirs and str(cdi_dir) not in runtime_info.cdi_dirs:
        _log.error(
            "the container runtime does not read --cdi-dir",
            cdi_dir=str(cdi_dir),
            runtime_reads=list(runtime_info.cdi_dirs),
        )
    return access


class Delivery:
    """Writes the CDI specs of grants.

    folder: the folder of the specs, which the runtime reads.
    nvidia: the node's own specs of NVIDIA's cards; None for simulated cards.
    """

    def __init__(self, folder: Path, nvidia: cdi.NvidiaSpecs | None) -> None:
        self._folder = folder
        self._nvidia = nvidia
        self._lock = threading.Lock()
        self._written: dict[str, cdi.Spec] = {}  # slot -> the spec that was written last
        self._remove_problem: str | None = None

    def merged_edits(self, cards: list[GpuCard]) -> tuple[cdi.Edits, str]:
        """The merged CDI edits of the cards, and the CDI version that they need. Raises NoDevice."""
        if self._nvidia is None:
            return cdi.merge_edits(cdi.card_node_edits(card) for card in cards), cdi.CDI_VERSION
        edits_and_versions = [self._nvidia.card_edits(card) for card in cards]
        return cdi.merge_edits(edits for edits, _ in edits_and_versions), max(
            (version for _, version in edits_and_versions), default=cdi.CDI_VERSION
        )

    def undeliverable_reasons_by_uuid(self, cards: list[GpuCard]) -> dict[str, str]:
        """The obstacle to giving a card to containers at present, by the card's UUID; usable cards are left out."""
        reasons = {}
        for card in cards:
            try:
                self.merged_edits([card])
            except (cdi.NoDevice, OSError) as error:
                reasons[card.uuid] = str(error)
        return reasons

    def write_problem(self) -> str | None:
        """The obstacle to writing specs at present; None if there is no obstacle."""
        return cdi.write_problem(self._folder)

    def deliver_grant(self, grant: Grant, hardware: Hardware) -> None:
        """Write the spec of each slot of the grant. Raises NoDevice, OSError, or KeyError for missing hardware."""
        with self._lock:
            for slot in grant.slots:
                self._write_spec(slot, grant, hardware)

    def allow_start(self, slot: str, grant: Grant, hardware: Hardware) -> None:
        """Write the spec of the slot of the grant, unless it is there. Raises NoDevice or OSError."""
        with self._lock:
            self._write_if_changed(slot, self._build_spec(slot, grant, hardware))

    def block_start(self, slot: str, reason: str) -> None:
        """Write a spec of the slot with which no container starts, unless it is there. Raises OSError.

        If the spec cannot be written, removes the present one: without a spec, no container starts either.
        """
        with self._lock:
            try:
                self._write_if_changed(slot, cdi.build_blocking_spec(slot, reason))
            except OSError:
                self._written.pop(slot, None)
                cdi.spec_path(self._folder, slot).unlink(missing_ok=True)

    def remove_unused_specs(self, grants: GrantStore) -> None:
        """Remove the specs of slots that no grant has.

        Such specs remain when a pod's grants are released, when a container restarts with another slot, or when an
        earlier call failed to remove them.
        """
        with self._lock:
            self._remove_unused_specs(grants)

    def restore_specs(self, grants: GrantStore, hardware: Hardware) -> None:
        """Recreate the specs from the grants: after a reboot the folder is empty, after a crash it may be outdated.

        Leaves out the specs of containers with a claim, which may start only if `startblocks` finds no problem.
        """
        # Grants that are added meanwhile are delivered after the lock is released, and overwrite these specs.
        with self._lock:
            self._remove_unused_specs(grants)
            slots = {slot for grant in grants.list_grants() for slot in grant.slots if not grant.claim}
            self._rewrite_specs(slots, grants, hardware)

    def rewrite_specs(self, slots: Iterable[str], grants: GrantStore, hardware: Hardware) -> None:
        """Write the specs of these slots again."""
        with self._lock:
            self._rewrite_specs(slots, grants, hardware)

    def _remove_unused_specs(self, grants: GrantStore) -> None:
        # A grant is added to the store before its spec is written, so under the lock each spec that is in use has a
        # grant.
        slots = {slot for grant in grants.list_grants() for slot in grant.slots}
        self._written = {slot: spec for slot, spec in self._written.items() if slot in slots}
        failures: list[OSError] = []
        try:
            for path in cdi.find_stale_specs(self._folder, slots):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # continue with the other specs
                    failures.append(error)
        except OSError as error:
            failures.append(error)
        previous, self._remove_problem = self._remove_problem, str(failures[0]) if failures else None
        if self._remove_problem not in (None, previous):
            _log.error("failed to remove the CDI spec of a free slot; trying again", error=self._remove_problem)

    def _rewrite_specs(self, slots: Iterable[str], grants: GrantStore, hardware: Hardware) -> None:
        for slot in slots:
            grant = grants.slot_owner(slot)
            if grant is None:
                continue
            try:
                self._write_spec(slot, grant, hardware)
            except (cdi.NoDevice, OSError, KeyError) as error:
                fields = {"slot": slot, "pod": grant.pod, "uid": grant.pod_uid, "error": repr(error)}
                _log.error("failed to write the CDI spec of a granted slot", **fields)

    def _write_spec(self, slot: str, grant: Grant, hardware: Hardware) -> None:
        self._written[slot] = spec = self._build_spec(slot, grant, hardware)
        cdi.write_spec(self._folder, slot, spec)

    def _write_if_changed(self, slot: str, spec: cdi.Spec) -> None:
        if self._written.get(slot) == spec and cdi.spec_path(self._folder, slot).exists():
            return
        cdi.write_spec(self._folder, slot, spec)
        self._written[slot] = spec

    def _build_spec(self, slot: str, grant: Grant, hardware: Hardware) -> cdi.Spec:
        cards = [hardware.cards[share.uuid] for share in grant.shares]
        edits, version = self.merged_edits(cards)
        devices = [hardware.devices[device.uuid] for device in grant.devices]
        device_edits = map(cdi.device_edits, devices)
        edits = cdi.merge_edits([edits, *device_edits, cdi.mps_edits(grant), cdi.memory_tier_edits(grant, cards)])
        return cdi.build_spec(slot, grant, edits, version, devices)


def device_problem(device: OtherDevice, access: Access | None) -> str | None:
    """The obstacle to giving the device to containers at present; None if there is no obstacle."""
    if device.problem:
        return device.problem
    if access is Access.ENV:
        return NO_CDI_FOR_DEVICES_TEXT
    try:
        cdi.device_edits(device)
    except (cdi.NoDevice, OSError) as error:
        return str(error)
    return None
