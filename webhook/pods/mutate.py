"""Rewrites a pod that requests a share or devices into the form that scheduler, extender and node read.

Pure, and a fixed point: a rewritten pod stays as it is, because the API server calls the webhook again after other
webhooks. Fields that users may not set are removed with a warning instead of refused, so that copies of running pods
and restored backups can be created.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cardwise.core.api import lookalikes, names, request
from cardwise.core.api.request import Container, ContainerRequest, PodRequest
from cardwise.core.gangs.gangs import Membership
from cardwise.core.values import quantity, wording
from cardwise.core.values.decoded import Json
from webhook.pods import environment, mpsmode, tolerations
from webhook.pods.order import count_removed
from webhook.templates import containers

DEFAULT_SCHEDULER: Final = "default-scheduler"  # the scheduler of pods that name none
# Resources of Cardwise in limits and requests that users must not write.
INTERNAL_RESOURCES: Final = (names.SHARE, names.PLACE_MARKER, names.BIND_MARKER)
_MAX_SUGGESTIONS: Final = 8  # unknown annotations for which a suggestion is computed
_MARKERS: Final = (names.PLACE_MARKER, names.BIND_MARKER)
_COPY_ANNOTATIONS: Final = (names.ASSIGNMENT, names.IDX, names.GPUSHARE_ALLOCATION)
_DECIMAL_SUFFIXES: Final = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True)
class _ContainerPart:
    """The part of one container in the pod's request.

    markers: resources with which kube-scheduler calls the extender for a pod that requests no cards. Their amount is 0,
        because kube-scheduler checks only the name. With a larger amount kube-scheduler would not try the pod again
        when a node gets more CPU (NodeResourcesFit's queueing hint ignores `ignoredByScheduler`).
    """

    card: ContainerRequest | None = None
    devices: Mapping[str, int] = field(default_factory=dict)
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mutation:
    """The rewritten pod. Unchanged parts are the caller's objects."""

    pod: Json
    warnings: tuple[str, ...]


def mutate(
    pod: Json,
    *,
    runtime_class: str = "",
    policy: str = "",
    in_gang: bool = False,
    agent: str = "",
    scheduler: str = "",
    tolerated: Sequence[Json] = (),
) -> Mutation:
    """Rewrite a pod. Raises InvalidRequest before anything is changed.

    policy: the namespace's placement policy.
    agent: the key of the share agent's container, which has a slot but requests no cards.
    scheduler: the scheduler for pods that name no scheduler; "" for Kubernetes' default.
    tolerated: tolerations for pods with cards.
    """
    pod_request = request.parse(pod)
    warnings: list[str] = []
    metadata, spec = dict(pod.get("metadata") or {}), dict(pod.get("spec") or {})
    before = metadata.get("annotations") or {}
    after = _rewrite_annotations(before, pod_request, policy, warnings)
    if after != before:
        metadata["annotations"] = after
    parts = _split_request(pod_request, in_gang=in_gang)
    if agent:
        parts[agent] = _ContainerPart(markers=(names.SHARE,))
    mps = bool(pod_request and pod_request.containers) and mpsmode.mode_of(pod).uses_mps
    for container in request.containers(pod):
        changed = _rewrite_container(
            container, parts.get(container.key), warnings, has_request=pod_request is not None, mps=mps
        )
        if changed != container.spec:
            containers.put_container(spec, container, changed)
    if pod_request is not None and pod_request.containers:
        spec = tolerations.add_tolerations(spec, tolerated)
        if runtime_class and not spec.get("runtimeClassName"):
            spec["runtimeClassName"] = runtime_class
    rewritten_pod = pod | {"metadata": metadata, "spec": spec}
    return Mutation(
        assign_scheduler(rewritten_pod, scheduler) if pod_request is not None or in_gang else rewritten_pod,
        tuple(warnings),
    )


def assign_scheduler(pod: Json, scheduler: str) -> Json:
    """The pod with this scheduler, if the pod names no scheduler. The pod is unchanged if `scheduler` is ""."""
    spec = pod.get("spec") or {}
    if not scheduler or (spec.get("schedulerName") or DEFAULT_SCHEDULER) != DEFAULT_SCHEDULER:
        return pod
    return pod | {"spec": spec | {"schedulerName": scheduler}}


def remove_placement(pod: Json, gang: Membership | None) -> tuple[Json, tuple[str, ...]]:
    """The pod without its placement, with a warning, if it is a copy of a placed pod; other pods are unchanged.

    A node name that the extender did not write is refused later. Raises InvalidRequest.
    """
    metadata, spec = dict(pod.get("metadata") or {}), dict(pod.get("spec") or {})
    if not spec.get("nodeName"):
        return pod, ()
    annotations = metadata.get("annotations") or {}
    is_copy = any(key in annotations for key in _COPY_ANNOTATIONS) and request.parse(pod) is not None
    is_gang_copy = gang is not None and names.GANG in (metadata.get("labels") or {})
    if not is_copy and not is_gang_copy:
        return pod, ()
    del spec["nodeName"]
    metadata.pop("resourceVersion", None)
    warning = "spec.nodeName: removed, because the pod is a copy of a placed pod; the scheduler places it again"
    return pod | {"metadata": metadata, "spec": spec}, (warning,)


def check_counts(pod: Json) -> None:
    """Refuse a pod if another webhook has removed the number of cards of a split share, which would make it a share of
    one card. Call this before any rewriting. Raises InvalidRequest.
    """
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    counts, pod_containers = request.read_counts(annotations), list(request.containers(pod))
    if counts and counts.keys() <= {container.spec.get("name") for container in pod_containers}:
        return  # the annotation belongs to this pod, and names all of its split shares
    for container in pod_containers:
        limits = (container.spec.get("resources") or {}).get("limits") or {}
        is_written = str(limits.get(names.SHARE)) == "1" and names.GPU_MEM in limits and names.GPU_COUNT not in limits
        if is_written and not environment.has_count(container.spec.get("env") or []):
            raise count_removed(f"{container.path}.env")


def is_marked(pod: Json) -> bool:
    """Whether kube-scheduler calls the extender for the pod although the pod requests no cards."""
    all_limits = [(container.spec.get("resources") or {}).get("limits") or {} for container in request.containers(pod)]
    return any(all(str(limits.get(name)) == "0" for name in _MARKERS) for limits in all_limits)


def _rewrite_annotations(before: Json, pod_request: PodRequest | None, policy: str, warnings: list[str]) -> Json:
    counts = request.write_counts(pod_request.containers) if pod_request else ""
    count_annotation = {names.GPU_COUNTS: counts} if counts else {}
    # The annotation with the device classes is new: it is written before the request is parsed, which needs it.
    kept_keys = {names.DEVICE_CLASSES, *count_annotation}
    removed_keys = {key for key in before if names.is_placement_annotation(key) and key not in kept_keys}
    # Each key is compared with all known annotations.
    suggestions = {
        key: suggested_name
        for key in sorted(removed_keys)[:_MAX_SUGGESTIONS]
        if (suggested_name := lookalikes.suggest_annotation(key))
    }
    warnings += [
        f"metadata.annotations[{key}]: removed; did you mean {suggested_name}?"
        for key, suggested_name in sorted(suggestions.items())
    ]
    reasons: dict[str, list[str]] = {}
    for key in sorted(removed_keys - suggestions.keys()):
        reasons.setdefault(_reason_for_removal(key), []).append(key)
    warnings += [
        f"metadata.annotations: removed {wording.enumerate_first(keys, 3)}; {reason}"
        for reason, keys in reasons.items()
    ]
    after = {key: text for key, text in before.items() if key not in removed_keys} | count_annotation
    if pod_request is not None and pod_request.containers and policy:
        after.setdefault(names.POLICY, policy)
    return after


def _reason_for_removal(key: str) -> str:
    """Why the webhook removes an annotation of the author."""
    if names.is_written_by_cardwise(key):
        return "only Cardwise may write this"
    if lookalikes.is_namespace_annotation(key):
        return "Cardwise reads this on namespaces only"
    return "Cardwise does not know this annotation"


def _split_request(pod_request: PodRequest | None, *, in_gang: bool) -> dict[str, _ContainerPart]:
    """Each container's part of the request, by its key."""
    if pod_request is None:
        # Members of a gang are planned together, so the extender must also see the members without a request.
        return {"0": _ContainerPart(markers=_MARKERS)} if in_gang else {}
    devices: dict[str, dict[str, int]] = {}
    for device in pod_request.devices:
        devices.setdefault(device.key, {})[names.CLASS_PREFIX + device.resource_class] = device.count
    cards = {container.key: container for container in pod_request.containers}
    # A requested card makes kube-scheduler call filter; the slot, which devices have too, makes it call bind.
    markers = {} if pod_request.containers else {pod_request.devices[0].key: (names.PLACE_MARKER,)}
    keys = dict.fromkeys((*cards, *devices))
    return {key: _ContainerPart(cards.get(key), devices.get(key, {}), markers.get(key, ())) for key in keys}


def _rewrite_container(
    container: Container, part: _ContainerPart | None, warnings: list[str], *, has_request: bool, mps: bool
) -> Json:
    """The rewritten container.

    has_request: whether the pod requests cards or devices. Then a container without a request must see no card, also if
        its image requests cards.
    """
    changed, path = dict(container.spec), container.path
    resources = dict(changed.get("resources") or {})
    stored_amounts = _stored_amounts(part, resources.get("limits") or {})
    if rounding := quantity.describe_rounding((resources.get("limits") or {}).get(names.GPU_MEM, "")):
        warnings.append(f"{path}.resources.limits[{names.GPU_MEM}]: {rounding}")
    for kind, amounts in containers.amount_lists(resources):
        warnings += [
            f"{path}.resources.{kind}[{name}]: removed; only Cardwise may write this"
            for name in INTERNAL_RESOURCES
            if name in amounts and not (name in stored_amounts and str(amounts[name]) == str(stored_amounts[name]))
        ]
    lists: dict[str, Json] = (
        {"limits": {}} if stored_amounts else {}
    )  # a container that gets only a marker may have no limits
    for kind, amounts in (lists | dict(containers.amount_lists(resources))).items():
        remaining = {
            name: amount for name, amount in amounts.items() if name in stored_amounts or not _is_own_resource(name)
        }
        # Kubernetes sets missing requests to the limits, so only requests that the user wrote are corrected.
        names_of_kind = stored_amounts if kind == "limits" else [name for name in stored_amounts if name in amounts]
        resources[kind] = remaining | {
            name: format_count(amounts.get(name), stored_amounts[name]) for name in names_of_kind
        }
    if resources:
        changed["resources"] = resources
    if has_request:
        env = changed.get("env") or []
        env_from, card = bool(changed.get("envFrom")), part.card if part is not None else None
        changed["env"], overridden = environment.merge_entries(env, card, env_from=env_from, mps=mps)
        warnings += [f"{path}.env[{name}]: {reason}" for name, reason in environment.find_harmful_variables(env, card)]
        if overridden:
            warnings.append(
                f"{path}.env: {', '.join(overridden)} replaced, because Cardwise sets which GPUs the container may use"
            )
    return changed


def _stored_amounts(part: _ContainerPart | None, limits: Json) -> dict[str, int]:
    if part is None:
        return {}
    slot = {names.SHARE: 1} if part.card or part.devices else {}
    markers = {name: int(name == names.SHARE) for name in part.markers}
    return {**_card_amounts(part.card, limits), **part.devices, **slot, **markers}


def _card_amounts(card_request: ContainerRequest | None, limits: Json) -> dict[str, int]:
    if card_request is None:
        return {}
    amounts_by_name: dict[str, int] = {}
    if card_request.resource_class:
        key = names.CLASS_PREFIX + card_request.resource_class
        # The requested number of units; with a class that has a share, units are not cards.
        amounts_by_name[key] = int(quantity.parse(limits[key])[0]) if key in limits else card_request.cards
    if card_request.whole:
        return {names.WHOLE_GPU: card_request.cards, **amounts_by_name}
    core = {names.GPU_CORE: int(card_request.core)} if card_request.core else {}
    return {names.GPU_MEM: int(card_request.mem), **core, **amounts_by_name}


def _is_own_resource(name: str) -> bool:
    return name in INTERNAL_RESOURCES or name in names.REQUESTED


def format_count(text: object, number: int) -> str:
    """The number in digits, or in the API server's spelling if `text` has it: 8k for 8000."""
    suffix, shortened = 0, number
    while shortened and shortened % 1000 == 0 and suffix < len(_DECIMAL_SUFFIXES) - 1:
        suffix, shortened = suffix + 1, shortened // 1000
    stored = f"{shortened}{_DECIMAL_SUFFIXES[suffix]}"
    return stored if text == stored else str(number)
