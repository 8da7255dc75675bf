"""The environment that a container with a share gets.

Explicit entries, because a pod's `env` beats `envFrom`, the image and what a device plugin answers
(k8s-mechanisms.md section 3). What depends on the card comes by the downward API from the annotations that bind
writes; with CDI the node writes the same values once more, past the reach of the pod.
"""

from typing import Any

from cardwise.core import names
from cardwise.core.request import ContainerRequest

Json = dict[str, Any]

# Either of them is the user's own choice for JAX; one that comes by envFrom cannot be seen, so none is written then.
_XLA = (names.ENV_XLA_FRACTION, names.ENV_XLA_FRACTION_NEW)


def from_annotation(name: str, annotation: str) -> Json:
    """An entry by the downward API, spelled as the API server stores it."""
    path = f"metadata.annotations['{annotation}']"
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def owned(asked: ContainerRequest) -> list[Json]:
    """The entries that are ours alone, in a stable order."""
    limit = names.LIMIT_MIB_OF + asked.key
    if asked.whole:
        # Nobody knows before placement how much a whole card has.
        container_mem = from_annotation(names.CONTAINER_MEM, limit)
    else:
        container_mem = {"name": names.CONTAINER_MEM, "value": str(asked.mem)}
    return [
        from_annotation(names.IDX, names.IDX),
        from_annotation(names.POD_MEM, names.POD_MEM),
        from_annotation(names.DEV_MEM, names.DEV_MEM),
        container_mem,
        from_annotation(names.ENV_VISIBLE_DEVICES, names.DEVICES_OF + asked.key),
        {"name": names.ENV_DEVICE_ORDER, "value": names.ENV_PCI_BUS_ID},
        from_annotation(names.ENV_LIMIT_MIB, limit),
        from_annotation(names.ENV_FRACTION, names.FRACTION_OF + asked.key),
        from_annotation(names.ENV_CUPY_LIMIT, names.LIMIT_BYTES_OF + asked.key),
    ]


def merged(existing: list[Json], asked: ContainerRequest, *, env_from: bool) -> tuple[list[Json], list[str]]:
    """`existing` with our entries: replaced where a name stood first, appended else. And the names that a user had
    set otherwise, which their value has now lost.
    """
    ours = {entry["name"]: entry for entry in owned(asked)}
    if not env_from and all(_is_ours(entry) for entry in existing if entry["name"] in _XLA):
        fraction = names.FRACTION_OF + asked.key
        ours[names.ENV_XLA_FRACTION] = from_annotation(names.ENV_XLA_FRACTION, fraction)
    result: list[Json] = []
    overridden: list[str] = []
    placed: set[str] = set()
    for entry in existing:
        name = entry["name"]
        if name.startswith(names.ENV_MPS_PREFIX):
            overridden.append(name)
        elif name not in ours:
            result.append(entry)
        else:
            if entry != ours[name] and not _is_ours(entry):
                overridden.append(name)
            if name not in placed:
                result.append(ours[name])
                placed.add(name)
    result += [entry for name, entry in ours.items() if name not in placed]
    return result, sorted(set(overridden))


def _is_ours(entry: Json) -> bool:
    """Whether the entry reads one of our annotations, maybe that of another container: copies of pods have such."""
    if entry["name"] == names.CONTAINER_MEM and str(entry.get("value", "")).isdigit():
        return True
    reference = (entry.get("valueFrom") or {}).get("fieldRef") or {}
    path = reference.get("fieldPath", "") if isinstance(reference, dict) else ""
    prefixes = (f"metadata.annotations['{prefix}" for prefix in (f"{names.GROUP}/", names.GPUSHARE_PREFIX))
    return str(path).startswith(tuple(prefixes))
