"""Tiers of isolation: what enforces a share on a card, and what pods demand (docs/design/0037-isolation.md).

The device plugin computes the tiers and publishes them in `status.isolation` of the card. Pods, namespaces and the
cluster demand a least tier of memory: `Isolation`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cardwise.core.api import names
from cardwise.core.api.mps import MpsState

KERNEL_MIN_DRIVER: Final = 615  # the first driver that can limit the memory of a container (its release notes)

# MPS states in which containers start only with MPS.
_SERVED_BY_MPS = (MpsState.READY, MpsState.STARTING, MpsState.FAULT, MpsState.DRAINING, MpsState.DOWN)

NO_MANAGER: Final = "no MPS manager runs on the node (mps.enabled of the chart)"
MPS_OFF: Final = "MPS is off on this GPU, because a pod without MPS or a whole GPU uses it"
NO_CDI: Final = "limits by the driver need CDI"
UNVERIFIED: Final = "the driver sets the limit, but no test has shown yet that it refuses more memory"


class MemoryTier(StrEnum):
    """What limits the memory of a share; the weakest first.

    ADVISORY: nothing; programs are told their share.
    MPS: MPS, each process by itself.
    KERNEL: the driver, the container as a whole.
    """

    ADVISORY = "advisory"
    MPS = "mps"
    KERNEL = "kernel"


class ComputeTier(StrEnum):
    """What limits the SMs of a share; the weakest first.

    NONE: nothing.
    MPS: MPS, to the percentage of the share.
    """

    NONE = "none"
    MPS = "mps"


class Isolation(StrEnum):
    """What a pod demands, from the annotation `names.ISOLATION`; the weakest first.

    NONE: the pod must run without MPS.
    ADVISORY: the best that the card offers.
    MPS: at least MPS.
    """

    NONE = "none"
    ADVISORY = "advisory"
    MPS = "mps"

    @property
    def uses_mps(self) -> bool:
        """Whether the pod runs with MPS where the card has it."""
        return self is not Isolation.NONE

    @property
    def strength(self) -> int:
        """A higher number is a stronger demand."""
        return list(Isolation).index(self)


def strongest(*demands: Isolation) -> Isolation:
    """The strongest of these demands."""
    return max(demands, key=lambda demand: demand.strength)


def isolation_of(annotations: Mapping[str, str]) -> Isolation:
    """What an admitted pod demands; `Isolation.ADVISORY` if the annotation is missing or invalid."""
    try:
        return Isolation(annotations.get(names.ISOLATION, Isolation.ADVISORY))
    except ValueError:
        return Isolation.ADVISORY


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers that a container gets which starts on the card now.

    memory_reason, compute_reason: why the tier is not stronger, or what is not certain about it; "" for nothing.
    """

    memory: MemoryTier
    compute: ComputeTier
    memory_reason: str = ""
    compute_reason: str = ""


def has_kernel_limit(driver: str) -> bool:
    """Whether this version of NVIDIA's driver, such as "615.71.09", can limit the memory of a container."""
    major = driver.partition(".")[0]
    return major.isdigit() and int(major) >= KERNEL_MIN_DRIVER


def tiers(mps_state: str, mps_reason: str, *, driver: str, has_cdi: bool) -> Tiers:
    """The tiers of a card.

    mps_state, mps_reason: as in the card's status; "" for both on a node without an MPS manager.
    driver: the version of the node's driver; "" if unknown.
    has_cdi: whether containers get the card by CDI. The limit of the driver is set through CDI.

    In a state that ends by itself (Starting, Down) no container starts, except with MPS once it is ready again. So the
    tier is that of MPS.
    """
    if mps_state in _SERVED_BY_MPS:
        without_mps, compute = "", ComputeTier.MPS
    else:
        without_mps = _why_without_mps(mps_state, mps_reason)
        compute = ComputeTier.NONE
    if has_kernel_limit(driver) and has_cdi:
        return Tiers(MemoryTier.KERNEL, compute, UNVERIFIED, without_mps)
    why_not_kernel = NO_CDI if has_kernel_limit(driver) else _describe_old_driver(driver)
    memory = MemoryTier.ADVISORY if without_mps else MemoryTier.MPS
    return Tiers(memory, compute, without_mps or why_not_kernel, without_mps)


def _why_without_mps(mps_state: str, mps_reason: str) -> str:
    """Why containers on the card start without MPS."""
    if mps_state == MpsState.OFF:
        return MPS_OFF
    return mps_reason or NO_MANAGER


def _describe_old_driver(driver: str) -> str:
    present = f"this is {driver}" if driver else "its version is unknown"
    return f"limits by the driver need driver {KERNEL_MIN_DRIVER} or later; {present}"
