"""Blocks starts of containers with a ResourceClaim, by the checks that PreStartContainer makes in the other modes.

The kubelet calls no DRA plugin when a container restarts. But the container runtime reads the container's CDI spec at
each creation. So the spec decides. While the container may start, the spec has the device nodes and variables of
its grant. While it may not, the spec has one device node whose path on the host does not exist and is the reason in
words: the runtime then creates no container, `kubectl describe pod` shows the reason, no restart is counted, and a pod
with restartPolicy Never does not fail. The kubelet tries again by itself.

Theory of operation. Each pass reads hardware and health once. For each grant of a claim it asks what PreStart asks
(the cards are here, healthy, and MPS is ready with the container's limit), builds the spec that follows, and writes it
if it differs from the one written last. A pass depends on no earlier pass, so the first pass after a start of the
plugin, or after the folder was emptied by a reboot, makes all specs right.

Example: container A has 4096 MiB of card 0, container B 4096 MiB of card 1. The MPS daemon of card 0 dies. The next
pass, at most half a second later, blocks the start of A ("MPS on GPU … is Down, not Ready"), and not that of B.
The daemon is ready again, and allows 2048 MiB: A stays blocked. It allows 4096 MiB: the next pass allows A to start.
"""

from collections.abc import Callable, Mapping

import structlog

from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard, Health
from deviceplugin.grants.access import Access, Delivery
from deviceplugin.grants.cdi import NoDevice
from deviceplugin.grants.granting import StartRefused, check_cards, check_devices, check_health, kernel_obstacles
from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.hardware import Hardware
from deviceplugin.grants.mpswait import MpsWait

_log = structlog.get_logger(__name__)


class StartBlocks:
    """Keeps the CDI specs of all containers with a claim as they must be now. `update` is called again and again.

    health: returns the health of cards and devices, by UUID.
    """

    def __init__(
        self,
        *,
        grants: GrantStore,
        delivery: Delivery,
        hardware: Callable[[], Hardware],
        health: Callable[[list[GpuCard], list[OtherDevice]], Mapping[str, Health]],
        access: Callable[[], Access | None],
        mps_wait: MpsWait,
    ) -> None:
        self._grants = grants
        self._delivery = delivery
        self._hardware = hardware
        self._health = health
        self._access = access
        self._mps = mps_wait
        self._problems: dict[str, str] = {}  # slot -> why its container may not start

    @property
    def blocked(self) -> int:
        """The number of containers whose start is blocked."""
        return len(self._problems)

    def update(self) -> None:
        """Allow or block the start of all containers as follows from the node's present state."""
        grants = [grant for grant in self._grants.list_grants() if grant.claim]
        problems: dict[str, str] = {}
        if grants:
            hardware = self._hardware()
            health = self._health(list(hardware.cards.values()), list(hardware.devices.values()))
            obstacles = kernel_obstacles(hardware, self._access())
            for grant in grants:
                for slot in grant.slots:
                    if problem := self._update_start(grant, slot, hardware, health, obstacles):
                        problems[slot] = problem
        self._problems = problems

    def _update_start(
        self,
        grant: Grant,
        slot: str,
        hardware: Hardware,
        health: Mapping[str, Health],
        obstacles: Mapping[str, str | None],
    ) -> str | None:
        """Allow or block the start of a container; returns why it is blocked, None if it may start."""
        try:
            grant = self._check(grant, hardware, health, obstacles)
            self._delivery.allow_start(slot, grant, hardware)
            problem = None
        except (StartRefused, NoDevice, OSError) as error:
            problem = str(error)
            self._delivery.block_start(slot, problem)
        previous = self._problems.get(slot)
        if problem != previous:
            fields = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
            if problem is None:
                _log.info("the container may start again", **fields)
            else:
                _log.warning("the container may not start", **fields, reason=problem)
        return problem

    def _check(
        self,
        grant: Grant,
        hardware: Hardware,
        health: Mapping[str, Health],
        obstacles: Mapping[str, str | None],
    ) -> Grant:
        """Check that the container may start; returns its grant with its present MPS daemons.

        Raises StartRefused, or OSError if a changed grant cannot be written.
        """
        check_cards(grant.pod_shares, hardware.cards)
        check_devices(grant.pod_devices, hardware.devices)
        check_health(grant, hardware, health)
        readiness = self._mps.check_readiness(grant, obstacles)
        if readiness.problem:
            raise StartRefused(readiness.problem)
        if readiness.folders == grant.mps:
            return grant
        return self._grants.set_mps(grant, readiness.folders)
