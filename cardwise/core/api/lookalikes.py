"""Suggests the name of Cardwise that a misspelled or foreign name of a resource, annotation or label probably means.

Kubernetes accepts any name with a domain and leaves the pod pending, so warnings suggest the nearest valid name. Names
of other GPU sharers and gang schedulers are in a table; for other names the edit distance decides.

An edit distance takes at least a tenth of a millisecond, and tenants choose the names. So if there are many candidates,
edit distance is computed only for those with the most letter pairs in common with the name. Comparing sets of letter
pairs takes microseconds. Example: nvidia.tesla.k8 has 13 pairs; nvidia.tesla.k80 contains all 13, and
nvidia.tesla.p100 contains 11 of them.
"""

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice, pairwise
from typing import Final

from cardwise.core.api import names

# Resources of other GPU sharers, with the corresponding resource of Cardwise.
_FOREIGN_RESOURCES: Final[Mapping[str, str]] = {
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
_MEMORY_LIMIT: Final = f"the limit {names.GPU_MEM}"
_COUNT_LIMIT: Final = f"the limit {names.GPU_COUNT}"
# Annotations and labels of other GPU sharers and gang schedulers, with the corresponding key of Cardwise.
_FOREIGN_KEYS: Final[Mapping[str, str]] = {
    "gpu-fraction": _MEMORY_LIMIT,  # KAI, Run:ai
    "gpu-memory": _MEMORY_LIMIT,
    "gpu-fraction-num-devices": _COUNT_LIMIT,
    "nvidia.com/use-gputype": names.CLASS,  # HAMi
    "nvidia.com/nouse-gputype": names.CLASS,
    "nvidia.com/use-gpuuuid": names.CLASS,
    "nvidia.com/nouse-gpuuuid": names.CLASS,
    "hami.io/gpu-scheduler-policy": names.POLICY,
    "hami.io/node-scheduler-policy": names.POLICY,
    "pod-group.scheduling.sigs.k8s.io": names.COSCHEDULING,
    "pod-group.scheduling.sigs.k8s.io/name": names.COSCHEDULING,
    "pod-group.scheduling.sigs.k8s.io/min-available": names.GROUP_NUM,
    "gang.scheduling.koordinator.sh/name": names.GROUP_NAME,
    "gang.scheduling.koordinator.sh/min-available": names.GROUP_NUM,
}
_GANG_KEYS: Final = (names.GROUP_NAME, names.GROUP_NUM, names.COSCHEDULING)
_GANG_DOMAINS: Final = tuple(dict.fromkeys(key.partition("/")[0] for key in _GANG_KEYS))
_GANG_WORD: Final = re.compile(r"group|pod-?group|gang")
# Annotations and labels that may be meant for Cardwise. The same pattern as the chart's `cardwise.cel.keysAboutUs`: the
# API server calls the webhook for a pod without a GPU request only if a key of the pod matches.
_OWN_KEY: Final = re.compile(
    r"(?i:cardwise)|^gpu-(fraction|memory)|/(no)?use-gpu|^hami\.io/|^scheduling\.(x-)?k8s\.io/(pod-?)?(group|gang)|"
    r"^pod-group\.scheduling\.|^gang\.scheduling\."
)
# Keys for which a suggestion is searched: those of `_OWN_KEY`, and keys whose domain may be a misspelling.
_POSSIBLY_OWN_KEY: Final = re.compile(rf"{_OWN_KEY.pattern}|^scheduling\.|^[^/]{{6,12}}\.dev/")
# The annotations and labels that Cardwise reads on namespaces.
_NAMESPACE_ANNOTATIONS: Final = (
    names.DEFAULT_GPU_MEM, names.POLICY, names.ISOLATION, names.SHARE_WITH, names.SM_PERCENT, names.FRAMEWORKS,
)  # fmt: skip
_NAMESPACE_LABELS: Final = (names.DEFAULTS_LABEL, names.GPU_MEM_UNIT)
# Vendors of other GPUs, by the ends of their domains.
_OTHER_VENDORS: Final = ("amd.com", "intel.com", "iluvatar.ai", "metax-tech.com", "mthreads.com")
_CORE_RESOURCE_START: Final = names.GPU_CORE.removesuffix(".percentage")
# By name, the name to suggest instead: for the short form of the core percentage and the internal name of whole cards.
_SUGGESTED_NAMES: Final[Mapping[str, str]] = {_CORE_RESOURCE_START: names.GPU_CORE, names.WHOLE_GPU: names.GPU_COUNT}
# Resource names that suggest a GPU. The same pattern as the chart's `cardwise.cel.looksLikeGpu`: the API server calls
# the webhook for objects with such a resource.
_GPU_NAME: Final = re.compile(r"gpu|cuda|^aliyun\.com/|^nvidia\.com/|^cardwise\.dev/")
# The keys of the labels that every card has, for selectors (`classes.card_labels`).
CARD_LABEL_KEYS: Final = (
    "model", "memory", "node", "hostname", "index", "uuid", "kind",
    "driver", "clock", "architecture", "computecapability",
)  # fmt: skip
_MIN_EDITS: Final = 2  # edits between a resource name, of any length, and its suggestion
_LENGTH_PER_EDIT: Final = 4  # characters of a name per allowed edit
# Characters of a name for which suggestions are searched: the time for an edit distance grows with their square.
_MAX_COMPARED_LENGTH: Final = 128
_MAX_COMPARED: Final = 32  # candidates for which the edit distance is computed: the most similar ones
_MAX_RANKED: Final = 1024  # candidates that are compared by letter pairs; clusters have tens of them


def is_like_gpu(name: str) -> bool:
    """Whether the resource's name, in any domain, suggests a GPU."""
    return "/" in name and _GPU_NAME.search(name) is not None


def is_of_other_vendor(name: str) -> bool:
    """Whether the resource's domain belongs to a GPU vendor other than NVIDIA."""
    domain = name.partition("/")[0]
    return any(domain == vendor or domain.endswith(f".{vendor}") for vendor in _OTHER_VENDORS)


def suggest_resource(name: str, others: Iterable[str] = ()) -> str | None:
    """The resource that `name` probably means; None for none.

    others: the candidates besides Cardwise's own resources, such as resources that nodes offer, and classes.
    """
    if name in _FOREIGN_RESOURCES:
        return _FOREIGN_RESOURCES[name]
    if is_of_other_vendor(name):
        vendors = [other for other in others if is_of_other_vendor(other)]
        return min(
            (other for other in select_alike(name, vendors) if _name_distance(name, other, _MIN_EDITS) <= _MIN_EDITS),
            default=None,
        )
    if len(name) > _MAX_COMPARED_LENGTH:
        return None
    limit = max(_MIN_EDITS, len(name) // _LENGTH_PER_EDIT)
    candidates = (names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, _CORE_RESOURCE_START, *select_alike(name, others))
    nearest = _choose_nearest(candidates, limit, partial(_name_distance, name))
    return _SUGGESTED_NAMES.get(nearest, nearest) if nearest is not None else None


def suggest_class(name: str, class_names: Iterable[str]) -> str | None:
    """The class of `class_names` that an unknown name probably means; None for none."""
    if len(name) > _MAX_COMPARED_LENGTH:
        return None
    limit = max(1, len(name) // _LENGTH_PER_EDIT)
    return _choose_nearest(select_alike(name, sorted(class_names)), limit, partial(_edit_distance, name))


def suggest_card_label(key: str) -> str | None:
    """The key of `CARD_LABEL_KEYS` that an unknown key of a selector probably means; None for none."""
    if key in CARD_LABEL_KEYS or len(key) > _MAX_COMPARED_LENGTH:
        return None
    return _choose_nearest(CARD_LABEL_KEYS, max(1, len(key) // _LENGTH_PER_EDIT), partial(_edit_distance, key))


def suggest_annotation(key: str) -> str | None:
    """The key in `names.USER_ANNOTATIONS` that an unknown key of Cardwise's domain probably means; None for none."""
    return _find_nearest(key, names.USER_ANNOTATIONS)


def is_like_own(key: str) -> bool:
    """Whether an annotation or label could be meant for Cardwise. Cheap, unlike `suggest_pod_key`."""
    return len(key) <= _MAX_COMPARED_LENGTH and _POSSIBLY_OWN_KEY.search(key) is not None


def suggest_pod_key(key: str, text: str = "") -> str | None:
    """For an annotation or label of a pod that Cardwise does not read: the key or resource that it probably means; None
    for none.

    Unknown keys of Cardwise's own domain are handled by `suggest_annotation`, because the webhook removes them.
    """
    if key in _FOREIGN_KEYS:
        return _FOREIGN_KEYS[key]
    domain, _, name = key.rpartition("/")
    if not domain or domain == names.GROUP or key in _GANG_KEYS or len(key) > _MAX_COMPARED_LENGTH:
        return None
    if own_key := _suggest_own_key(domain, name):
        return suggest_annotation(own_key) or (own_key if own_key in names.USER_ANNOTATIONS else None)
    is_gang_key = min(_edit_distance(domain, known, _MIN_EDITS) for known in _GANG_DOMAINS) <= _MIN_EDITS
    if not is_gang_key or not _GANG_WORD.match(name):
        return None
    if text.isdigit():
        return names.GROUP_NUM
    return names.COSCHEDULING if name.startswith("pod") else names.GROUP_NAME


def suggest_namespace_key(key: str, *, label: bool) -> str | None:
    """The key that an unknown annotation or label of a namespace probably means, if any."""
    domain, _, name = key.rpartition("/")
    own_key = _suggest_own_key(domain, name)
    read_keys = _NAMESPACE_LABELS if label else _NAMESPACE_ANNOTATIONS
    keys_of_other_part = _NAMESPACE_ANNOTATIONS if label else _NAMESPACE_LABELS
    if not own_key or key in read_keys or len(key) > _MAX_COMPARED_LENGTH:
        return None
    if key in keys_of_other_part:
        return f"the {'annotation' if label else 'label'} {key}"
    return own_key if own_key in read_keys else _find_nearest(own_key, read_keys)


def is_unread_namespace_key(key: str, *, label: bool) -> bool:
    """Whether an annotation (or label) of a namespace has Cardwise's domain, but no meaning on namespaces."""
    return key.startswith(f"{names.GROUP}/") and key not in (_NAMESPACE_LABELS if label else _NAMESPACE_ANNOTATIONS)


def is_namespace_annotation(key: str) -> bool:
    """Whether Cardwise reads this annotation on namespaces."""
    return key in _NAMESPACE_ANNOTATIONS


def suggest_node_label(key: str, text: str, label_values: Mapping[str, Collection[str]]) -> str | None:
    """The entry of a node selector that `key=text` probably means, as `key=value` or a key; None for none.

    label_values: the labels of nodes, each with its values.
    """
    if key not in label_values:
        return _find_nearest_label_value(key, label_values)
    nearest = _find_nearest_label_value(text, label_values[key])
    return f"{key}={nearest}" if nearest else None


def _find_nearest_label_value(text: str, candidates: Iterable[str]) -> str | None:
    """The nearest candidate for a label's key or value within two edits (fewer for short texts), ignoring case; None if
    there is none.
    """
    lower = text.lower()
    return _choose_nearest(
        select_alike(text, sorted(candidates)),
        min(_MIN_EDITS, len(text) // _LENGTH_PER_EDIT),
        lambda candidate, limit: _edit_distance(lower, candidate.lower(), limit),
    )


def _suggest_own_key(domain: str, name: str) -> str | None:
    """The key with Cardwise's domain, if the given domain is Cardwise's or a misspelling of it; else None."""
    plain = domain.lower()
    is_ours = "cardwise" in plain or _edit_distance(plain, names.GROUP, _MIN_EDITS) <= _MIN_EDITS
    return f"{names.GROUP}/{name.lower()}" if is_ours else None


def _find_nearest(key: str, candidates: Iterable[str]) -> str | None:
    if len(key) > _MAX_COMPARED_LENGTH:
        return None
    limit = max(1, len(key.partition("/")[2]) // _LENGTH_PER_EDIT)
    return _choose_nearest(sorted(candidates), limit, partial(_edit_distance, key))


def select_alike(name: str, candidates: Iterable[str], count: int = _MAX_COMPARED) -> list[str]:
    """The `count` most similar candidates, in order of similarity."""
    name_pairs = _letter_pairs(name)

    def difference(candidate: str) -> float:
        candidate_pairs = _letter_pairs(candidate)
        return len(name_pairs ^ candidate_pairs) / (len(name_pairs) + len(candidate_pairs) + 1)

    return heapq.nsmallest(count, islice(candidates, _MAX_RANKED), key=difference)


def _letter_pairs(name: str) -> frozenset[tuple[str, str]]:
    return frozenset(pairwise(name.lower()))


def _choose_nearest(candidates: Iterable[str], limit: int, distance: Callable[[str, int], int]) -> str | None:
    """The nearest candidate within `limit` edits, the first if several are equally near; None if there is none.

    distance: returns the edits for a candidate and a limit; above the limit, the number need not be exact.
    """
    nearest: str | None = None
    for candidate in candidates:
        if limit < 0:
            break
        if (edits := distance(candidate, limit)) <= limit:
            nearest, limit = candidate, edits - 1
    return nearest


def _name_distance(name: str, other: str, limit: int) -> int:
    """The number of edits between two names. A different domain counts as two edits."""
    name_edits = _edit_distance(name, other, limit)
    domain, slash, rest = name.partition("/")
    if not slash:
        return name_edits
    if "/" not in other:
        return min(name_edits, 1 + _edit_distance(f"{domain.partition('.')[0]}.{rest}", other, limit - 1))
    return min(name_edits, 2 + _edit_distance(rest, other.partition("/")[2], limit - 2))


def _edit_distance(name: str, other: str, limit: int) -> int:
    """The number of insertions, deletions, substitutions and swaps of neighbours that turn one name into the other. A
    number above `limit` only means "more than `limit`".

    Only the table's cells within `limit` of the diagonal are computed, since all other cells exceed `limit`.
    """
    beyond = limit + 1
    if abs(len(name) - len(other)) > limit:
        return beyond
    row_before_last: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(name, start=1):
        last_row, row_before_last, row = row_before_last, row, [min(i, beyond), *[beyond] * len(other)]
        for j in range(max(1, i - limit), min(len(other), i + limit) + 1):
            b = other[j - 1]
            cost = min(row_before_last[j] + 1, row[j - 1] + 1, row_before_last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and name[i - 2] == b:
                cost = min(cost, last_row[j - 2] + 1)
            row[j] = cost
        if min(row) > limit:
            return beyond
    return row[-1]
