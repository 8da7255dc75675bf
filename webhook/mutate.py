"""Rewrites a pod that asks for a share into the form that the scheduler, the extender and the node understand.

Pure, and a fixed point: what it has rewritten it leaves alone, since the API server calls again whenever another
webhook changed the pod. What a user may not set is taken out with a warning, not refused, so that copies of running
pods and restored backups stay usable (architecture.md section 6).
"""

from dataclasses import dataclass
from typing import Any, Final

from cardwise.core import names, quantity, request
from cardwise.core.request import ContainerRequest, PodRequest
from webhook import containers, environment

Json = dict[str, Any]

# Ours in limits and requests, but not for users to write.
INTERNAL: Final = (names.SHARE, names.PLACE_MARKER, names.BIND_MARKER)
_COPY_MARKS: Final = (names.ASSIGNMENT, names.IDX, names.GPUSHARE_ALLOCATION)
_SUFFIXES: Final = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True)
class Mutation:
    """The pod as it should be. Parts that did not change are the caller's own objects."""

    pod: Json
    warnings: tuple[str, ...]


def mutate(pod: Json, *, runtime_class: str = "", policy: str = "") -> Mutation:
    """`policy` is that of the namespace. Raises InvalidRequest, before anything is changed."""
    asked = request.parse(pod)
    warnings: list[str] = []
    metadata, spec = dict(pod.get("metadata") or {}), dict(pod.get("spec") or {})
    before = metadata.get("annotations") or {}
    if asked is not None and spec.get("nodeName") and any(mark in before for mark in _COPY_MARKS):
        # A copy of a placed pod: it is placed anew. (A nodeName without an assignment is refused later.)
        del spec["nodeName"]
        metadata.pop("resourceVersion", None)
        warnings.append("spec.nodeName: removed, since the pod is a copy of a placed one and will be scheduled anew")
    after = _annotations(before, asked, policy, warnings)
    if after != before:
        metadata["annotations"] = after
    by_key = {container.key: container for container in asked.containers} if asked else {}
    for container in request.containers(pod):
        changed = _container(dict(container.spec), container.path, by_key.get(container.key), warnings)
        if changed != container.spec:
            containers.put(spec, container, changed)
    if asked is not None and runtime_class and not spec.get("runtimeClassName"):
        spec["runtimeClassName"] = runtime_class
    return Mutation(pod | {"metadata": metadata, "spec": spec}, tuple(warnings))


def _annotations(before: Json, asked: PodRequest | None, policy: str, warnings: list[str]) -> Json:
    split = {
        names.GPU_COUNT_OF + container.key: str(container.cards)
        for container in (asked.containers if asked else ())
        if not container.whole and container.cards > 1
    }
    stripped = [key for key in before if names.is_placement_annotation(key) and key not in split]
    if stripped:
        shown = ", ".join(sorted(stripped)[:3]) + (f" and {len(stripped) - 3} more" if len(stripped) > 3 else "")
        warnings.append(f"metadata.annotations: removed {shown}, which only Cardwise writes")
    after = {key: value for key, value in before.items() if key not in stripped} | split
    if asked is not None and policy:
        after.setdefault(names.POLICY, policy)
    return after


def _container(container: Json, path: str, asked: ContainerRequest | None, warnings: list[str]) -> Json:
    resources = dict(container.get("resources") or {})
    for kind, amounts in containers.lists(resources):
        warnings += [
            f"{path}.resources.{kind}[{name}]: removed, which only Cardwise writes"
            for name in INTERNAL
            if name in amounts and not (asked and name == names.SHARE and str(amounts[name]) == "1")
        ]
    wanted = _wanted(asked, resources.get("limits") or {})
    for kind, amounts in containers.lists(resources):
        kept = {name: amount for name, amount in amounts.items() if name in wanted or not _written_by_us(name)}
        # Requests follow from limits when they are missing, so only what a user wrote there is put right.
        names_of_kind = wanted if kind == "limits" else [name for name in wanted if name in amounts]
        resources[kind] = kept | {name: spelling(amounts.get(name), wanted[name]) for name in names_of_kind}
    if resources:
        container["resources"] = resources
    if asked is not None:
        existing = container.get("env") or []
        container["env"], overridden = environment.merged(existing, asked, env_from=bool(container.get("envFrom")))
        if overridden:
            warnings.append(f"{path}.env: {', '.join(overridden)} replaced, since Cardwise sets the access to cards")
    return container


def _wanted(asked: ContainerRequest | None, limits: Json) -> dict[str, int]:
    if asked is None:
        return {}
    typed: dict[str, int] = {}
    if asked.device_class:
        key = names.CLASS_PREFIX + asked.device_class
        # As many as were asked for: of a class with a share they are no cards.
        typed[key] = int(quantity.parse(limits[key])[0]) if key in limits else asked.cards
    if asked.whole:
        return {names.WHOLE_GPU: asked.cards, **typed, names.SHARE: 1}
    core = {names.GPU_CORE: int(asked.core)} if asked.core else {}
    return {names.GPU_MEM: int(asked.mem), **core, **typed, names.SHARE: 1}


def _written_by_us(name: str) -> bool:
    return name in INTERNAL or name in names.REQUESTED


def spelling(text: object, value: int) -> str:
    """The number as digits, or as the API server has already spelled it: it stores 8000 as 8k."""
    suffix, rest = 0, value
    while rest and rest % 1000 == 0 and suffix < len(_SUFFIXES) - 1:
        suffix, rest = suffix + 1, rest // 1000
    stored = f"{rest}{_SUFFIXES[suffix]}"
    return stored if text == stored else str(value)
