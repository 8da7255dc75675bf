"""The document that MPS managers serve at /usage: what containers have used of GPUs in the last hours.

`cardwise advise` and `cardwise idle` read it.
"""

from collections import Counter
from typing import Final

import msgspec
from msgspec import Struct

PATH: Final = "/usage"
WINDOW_SECONDS: Final = 6 * 3600.0  # how long use is remembered


class ContainerUsage(Struct, rename={"peaks_mib": "peaksMiB", "granted_mib": "grantedMiB"}, kw_only=True, frozen=True):
    """The use of one GPU by one container.

    container: its name; "" where the containers of the pod's shares are unknown (pods that gpushare placed).
    workload: kind and name of what created the pod, such as Deployment/web.
    gpu: the UUID of the GPU.
    granted_mib: its share; None for a container without a share of this GPU.
    peaks_mib: for each memory use in MiB, the number of minutes of which it was the peak. Minutes in which the use was
        unknown are left out.
    busy_percent: mean percent of the time in which the container computed; None if unknown for half of the time.
    idle_seconds: seconds since the container last computed, or since that is known; None if unknown.
    idle_is_minimum: whether it has not computed since that is known, so that it may be idle for longer.
    running: whether the container still holds its share.
    """

    namespace: str
    pod: str
    container: str
    workload: str
    gpu: str
    granted_mib: int | None = None
    peaks_mib: dict[int, int] = {}
    busy_percent: float | None = None
    idle_seconds: float | None = None
    idle_is_minimum: bool = True
    running: bool = True


class UsageReport(Struct, rename="camel", kw_only=True, frozen=True):
    """The use of the GPUs of one node.

    observed_seconds: how long the node has been observed; use is remembered for `WINDOW_SECONDS` at most.
    """

    node: str
    observed_seconds: float
    containers: list[ContainerUsage] = []


decode_report: Final = msgspec.json.Decoder(UsageReport).decode


def quantile(peaks: Counter[int], fraction: float) -> int | None:
    """The smallest use that at least this fraction of the minutes does not exceed; None without minutes."""
    total = peaks.total()
    covered = 0
    for mib in sorted(peaks):
        covered += peaks[mib]
        if covered >= fraction * total:
            return mib
    return None
