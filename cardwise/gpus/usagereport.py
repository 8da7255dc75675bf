"""The document that MPS managers serve at /usage: what containers have used of GPUs in the last hours.

`cardwise advise` and `cardwise idle` read it.
"""

from collections import Counter
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

PATH: Final = "/usage"
WINDOW_SECONDS: Final = 6 * 3600.0  # how long use is remembered

# What a node may send: a report with other values is malformed.
_Name = Annotated[str, Meta(max_length=317)]  # characters; the longest is a kind of 63, a slash and a name of 253
_Count = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=2**40)]


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

    namespace: _Name
    pod: _Name
    container: _Name
    workload: _Name
    gpu: _Name
    granted_mib: _Count | None = None
    peaks_mib: dict[_Count, _Count] = {}
    busy_percent: Annotated[float, Meta(ge=0)] | None = None
    idle_seconds: _Seconds | None = None
    idle_is_minimum: bool = True
    running: bool = True


class UsageReport(Struct, rename="camel", kw_only=True, frozen=True):
    """The use of the GPUs of one node.

    observed_seconds: how long the node has been observed; use is remembered for `WINDOW_SECONDS` at most.
    """

    node: _Name
    observed_seconds: _Seconds
    containers: list[ContainerUsage] = []


_decoder: Final = msgspec.json.Decoder(UsageReport)


def decode_report(content: bytes) -> UsageReport:
    """The report from its JSON. Raises ValueError if it is malformed."""
    try:
        return _decoder.decode(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def quantile(peaks: Counter[int], fraction: float) -> int | None:
    """The smallest use that at least this fraction of the minutes does not exceed; None without minutes."""
    total = peaks.total()
    covered = 0
    for mib in sorted(peaks):
        covered += peaks[mib]
        if covered >= fraction * total:
            return mib
    return None
