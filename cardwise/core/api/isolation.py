"""Tiers of isolation: what enforces a share on a card, and what pods require (docs/design/0037-isolation.md).

The device plugin computes the tiers and publishes them in `status.isolation` of the card. Pods, namespaces and the
cluster require a minimum tier of memory isolation: `Isolation`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cardwise.core.api import names
from cardwise.core.api.mps import MpsState
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text

FIELD: Final = f"metadata.annotations[{names.ISOLATION}]"

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

    NONE: the pod must run without MPS. ADVISORY: the best that the card offers. MPS: at least MPS. The driver's limit
    is stricter than this demand, and so meets it. KERNEL: the driver's limit. MPS is used as well where the card has
    it.
    """

    NONE = "none"
    ADVISORY = "advisory"
    MPS = "mps"
    KERNEL = "kernel"

    @property
    def uses_mps(self) -> bool:
        """Whether the pod runs with MPS where the card has it."""
        return self is not Isolation.NONE

    @property
    def strength(self) -> int:
        """A higher number is a stronger demand."""
        return list(Isolation).index(self)


def strongest_demand(*demands: Isolation) -> Isolation:
    """The strongest of these demands."""
    return max(demands, key=lambda demand: demand.strength)


def parse_isolation(text: str, field: str = FIELD) -> Isolation:
    """Parse a demand. Raises InvalidRequest.

    field: where the text is, for the error.
    """
    try:
        return Isolation(text)
    except ValueError:
        problem, remedy = f"{quote_text(text)} is not a tier of isolation", f"write one of: {', '.join(Isolation)}"
        raise InvalidRequest(field, problem, remedy) from None


def isolation_of(annotations: Mapping[str, str]) -> Isolation:
    """What an admitted pod demands; `Isolation.ADVISORY` if the annotation is missing or invalid.

    The webhook refuses an invalid annotation, and the device plugin starts no container with it.
    """
    text = annotations.get(names.ISOLATION)
    if text is None:
        return Isolation.ADVISORY
    try:
        return parse_isolation(text)
    except InvalidRequest:
        return Isolation.ADVISORY


def is_met(demand: Isolation, *, whole: bool, has_mps: bool, has_kernel_limit: bool) -> bool:
    """Whether a container on a card has at least the memory tier that its pod demands.

    whole: whether the container has its cards for itself. No other pod can use their memory, so each demand is met.
    has_mps: whether MPS limits its processes.
    has_kernel_limit: whether the driver limits the container. It limits only containers with a share of a single card.
    """
    if whole or demand.strength < Isolation.MPS.strength:
        return True
    return has_kernel_limit or (has_mps and demand is Isolation.MPS)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers that a container gets which starts on the card now.

    memory_reason, compute_reason: why a stronger tier is not possible, or which fact about this tier is uncertain; ""
        for nothing.
    """

    memory: MemoryTier
    compute: ComputeTier
    memory_reason: str = ""
    compute_reason: str = ""


def has_kernel_limit(driver: str) -> bool:
    """Whether this version of NVIDIA's driver, such as "615.71.09", can limit the memory of a container."""
    major = driver.partition(".")[0]
    return major.isdigit() and int(major) >= KERNEL_MIN_DRIVER


def kernel_limit_obstacle(driver: str, *, has_cdi: bool) -> str | None:
    """Why the driver limits no container's memory on a card; None if it can. Arguments as for `compute_tiers`."""
    if not has_kernel_limit(driver):
        return _describe_old_driver(driver)
    return None if has_cdi else NO_CDI


def compute_tiers(mps_state: str, mps_reason: str, *, driver: str, has_cdi: bool) -> Tiers:
    """The tiers of a card.

    mps_state, mps_reason: as in the card's status; "" for both on a node without an MPS manager.
    driver: the version of the node's driver; "" if unknown.
    has_cdi: whether containers get the card by CDI. The limit of the driver is set through CDI.

    In a state that ends by itself (Starting, Down), containers wait until MPS is ready again. So the tier is that of
    MPS.
    """
    if mps_state in _SERVED_BY_MPS:
        without_mps, compute = "", ComputeTier.MPS
    else:
        without_mps = _reason_without_mps(mps_state, mps_reason)
        compute = ComputeTier.NONE
    why_not_kernel = kernel_limit_obstacle(driver, has_cdi=has_cdi)
    if why_not_kernel is None:
        return Tiers(MemoryTier.KERNEL, compute, UNVERIFIED, without_mps)
    memory = MemoryTier.ADVISORY if without_mps else MemoryTier.MPS
    return Tiers(memory, compute, without_mps or why_not_kernel, without_mps)


def _reason_without_mps(mps_state: str, mps_reason: str) -> str:
    """Why containers on the card start without MPS."""
    if mps_state == MpsState.OFF:
        return MPS_OFF
    return mps_reason or NO_MANAGER


def _describe_old_driver(driver: str) -> str:
    present = f"this is {driver}" if driver else "its version is unknown"
    return f"limits by the driver need driver {KERNEL_MIN_DRIVER} or later; {present}"
