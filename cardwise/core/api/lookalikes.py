"""Misspelled and foreign resource names: which resource was meant by a name that no node offers.

Kubernetes takes any name with a domain and lets the pod wait for ever, so the nearest name that means something is
told: by a table for the names of other GPU sharers, by edit distance for the rest.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from cardwise.core.api import names

# Names that other GPU sharers give to what we have.
_FOREIGN: Final[Mapping[str, str]] = {
    names.NVIDIA_GPU: names.GPU_COUNT,
    "aliyun.com/gpu": names.GPU_COUNT,
    "nvidia.com/gpu.shared": names.GPU_MEM,
    "nvidia.com/gpumem": names.GPU_MEM,  # HAMi
    "nvidia.com/gpumem-percentage": names.GPU_MEM,
    "nvidia.com/gpucores": names.GPU_CORE,
    "volcano.sh/gpu-memory": names.GPU_MEM,
    "volcano.sh/vgpu-memory": names.GPU_MEM,
    "volcano.sh/vgpu-number": names.GPU_COUNT,
    "volcano.sh/vgpu-cores": names.GPU_CORE,
    "tencent.com/vcuda-memory": names.GPU_MEM,
    "tencent.com/vcuda-core": names.GPU_CORE,
}
# Vendors of other GPUs, by the ends of their domains.
_VENDORS: Final = ("amd.com", "intel.com", "iluvatar.ai", "metax-tech.com", "mthreads.com")
_CORE: Final = names.GPU_CORE.removesuffix(".percentage")
# Near to these, another is meant: the name with its long end, and users' name of whole cards.
_SPELLED: Final[Mapping[str, str]] = {_CORE: names.GPU_CORE, names.WHOLE_GPU: names.GPU_COUNT}
# As the chart's `cardwise.cel.looksLikeGpu`, which decides what the webhook sees.
_LIKE_A_GPU: Final = re.compile(r"gpu|cuda|^aliyun\.com/|^nvidia\.com/|^cardwise\.dev/")
# What each card can be selected by, whatever its node says of it (`classes.labels`).
CARD_LABELS: Final = (
    "model", "memory", "node", "hostname", "index", "uuid", "kind",
    "driver", "clock", "architecture", "computecapability",
)  # fmt: skip
_LEAST: Final = 2  # edits that any name may be off
_PART: Final = 4  # of a longer name a quarter
_LONGEST: Final = 128  # Kubernetes takes no longer ones but for the domain; distance is quadratic


def like_a_gpu(name: str) -> bool:
    """Whether the resource, of whatever domain, is about GPUs by its name."""
    return "/" in name and _LIKE_A_GPU.search(name) is not None


def of_other_vendor(name: str) -> bool:
    """Whether the resource is by its domain a GPU that is not NVIDIA's."""
    domain = name.partition("/")[0]
    return any(domain == vendor or domain.endswith(f".{vendor}") for vendor in _VENDORS)


def meant(name: str, others: Iterable[str] = ()) -> str:
    """The resource that was probably meant, of ours and of `others` (offered resources, classes); "" for none."""
    if name in _FOREIGN:
        return _FOREIGN[name]
    if of_other_vendor(name):
        others = [other for other in others if of_other_vendor(other)]
        return min((other for other in others if _apart(name, other, _LEAST) <= _LEAST), default="")
    if len(name) > _LONGEST:
        return ""
    limit = max(_LEAST, len(name) // _PART)
    candidates = dict.fromkeys((names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, _CORE, *others))
    near = {one: found for one in candidates if (found := _apart(name, one, limit)) <= limit}
    nearest = min(near, key=lambda one: near[one], default="")
    return _SPELLED.get(nearest, nearest)


def card_label(key: str) -> str:
    """The label that every card has and that was probably meant by a key of a selector; "" for none."""
    if key in CARD_LABELS or len(key) > _LONGEST:
        return ""
    limit = max(1, len(key) // _PART)
    near = {label: found for label in CARD_LABELS if (found := _edits(key, label, limit)) <= limit}
    return min(near, key=lambda label: near[label], default="")


def annotation(key: str) -> str:
    """What users write that was probably meant by an annotation of our domain that they do not; "" for none."""
    if len(key) > _LONGEST:
        return ""
    limit = max(1, len(key.partition("/")[2]) // _PART)
    near = {one: found for one in sorted(names.USER_ANNOTATIONS) if (found := _edits(key, one, limit)) <= limit}
    return min(near, key=lambda one: near[one], default="")


def _apart(one: str, other: str, limit: int) -> int:
    """Edits between two names; another domain counts as two, however it differs, a class as of a domain as one."""
    whole = _edits(one, other, limit)
    domain, slash, rest = one.partition("/")
    if not slash:
        return whole
    if "/" not in other:
        return min(whole, 1 + _edits(f"{domain.partition('.')[0]}.{rest}", other, limit - 1))
    return min(whole, 2 + _edits(rest, other.partition("/")[2], limit - 2))


def _edits(one: str, other: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours from one to the other; more than `limit` if more."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        last, before, row = before, row, [i]
        for j, b in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return row[-1]
