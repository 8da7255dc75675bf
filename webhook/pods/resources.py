"""The resources and the environment of each container, in the form that scheduler, extender and node read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cardwise.core.api import names, request
from cardwise.core.api.request import Container, ContainerRequest, PodRequest
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from webhook.pods import environment, mpsmode
from webhook.pods.context import Context
from webhook.pods.order import added_later_error
from webhook.pods.pod import PodUnderReview
from webhook.templates.containers import amount_lists
from webhook.templates.spellings import format_count

# Resources of Cardwise in limits and requests that users must not write.
INTERNAL_RESOURCES: Final = (names.SHARE, names.PLACE_MARKER, names.BIND_MARKER)
_MARKERS: Final = (names.PLACE_MARKER, names.BIND_MARKER)


@dataclass(frozen=True, slots=True)
class _ContainerPart:
    """The request of one container of the pod.

    markers: resources with which kube-scheduler calls the extender for a pod that requests no cards. Their amount is 0,
        because kube-scheduler checks only the name. With a larger amount kube-scheduler would not try the pod again
        when a node gets more CPU (NodeResourcesFit's queueing hint ignores `ignoredByScheduler`).
    """

    card: ContainerRequest | None = None
    devices: Mapping[str, int] = field(default_factory=dict)
    markers: tuple[str, ...] = ()


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Write amounts in MiB, slots, markers and variables of Cardwise, and remove those that users must not write."""
    parts = _split_request(pod.request, in_gang=pod.gang is not None)
    if pod.agent:
        parts[pod.agent] = _ContainerPart(markers=(names.SHARE,))
    mps = bool(pod.cards) and mpsmode.mode_of(pod.annotations).uses_mps
    for i, container in enumerate(pod.containers):
        changed = _rewrite_container(
            container, parts.get(container.key), pod.warnings, has_request=pod.request is not None, mps=mps
        )
        if changed != container.spec:
            pod.replace_container(i, changed)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Read the request, and refuse a pod that the webhook has not rewritten. Raises InvalidRequest."""
    try:
        pod_request = pod.read_request()
    except request.NotRewritten as error:
        raise added_later_error(error.field) from error
    if pod_request is not None:
        return
    if pod.annotations.get(names.CLASS):
        raise added_later_error(f"metadata.annotations[{names.CLASS}]")
    allowed_markers = _MARKERS if pod.labels.get(names.GANG) else ()
    for container in pod.containers:
        for name in (container.spec.get("resources") or {}).get("limits") or ():
            if name in INTERNAL_RESOURCES and name not in allowed_markers:
                raise added_later_error(f"{container.path}.resources.limits[{name}]")


def is_marked(containers: Iterable[Container]) -> bool:
    """Whether kube-scheduler calls the extender for the pod although the pod requests no cards."""
    all_limits = [(container.spec.get("resources") or {}).get("limits") or {} for container in containers]
    return any(all(str(limits.get(name)) == "0" for name in _MARKERS) for limits in all_limits)


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
    for kind, amounts in amount_lists(resources):
        warnings += [
            f"{path}.resources.{kind}[{name}]: removed; only Cardwise may write this"
            for name in INTERNAL_RESOURCES
            if name in amounts and not (name in stored_amounts and str(amounts[name]) == str(stored_amounts[name]))
        ]
    lists: dict[str, Json] = (
        {"limits": {}} if stored_amounts else {}
    )  # a container that gets only a marker may have no limits
    for kind, amounts in (lists | dict(amount_lists(resources))).items():
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
