"""The resources and the environment of each container, in the form that scheduler, extender and node read.

The variables are entries of `env`, which override `envFrom`, the image and the device plugin: the runtime uses the last
entry of a name. Values that depend on the card come through the downward API from annotations, which bind writes. With
CDI the node sets the same values again. On containerd a pod cannot override the node's values. On CRI-O a pod can,
because CRI-O puts the pod's values last.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cardwise.core.api import mps as mps_values
from cardwise.core.api import names, request
from cardwise.core.api.request import Container, ContainerRequest, PodRequest
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from webhook.pods import isolation, slots
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import added_later_error, changed_later_error, removed_count_error
from webhook.templates.containers import amount_lists
from webhook.templates.spellings import format_count

_MARKER_RESOURCES: Final = (names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)
# If the user sets one of these variables for JAX, it stays. With envFrom the webhook cannot see whether the user has
# set one, so the webhook sets none.
_XLA_FRACTION_VARIABLES = (names.ENV_XLA_FRACTION, names.ENV_XLA_FRACTION_NEW)
_CUDA_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"  # selects cards by their numbers in the container
_REFERENCE_TO_OWN_CARDS = (
    f"$({names.ENV_VISIBLE_DEVICES})"  # Kubernetes replaces it by the UUIDs of the container's cards
)
# Variables of every container with a share. The first has the same prefix as the count, the second is a plain value
# like the count. So if another webhook removes the count, by its prefix or its kind, it also removes one of these.
_COMMON_VARIABLES = (names.ENV_LIMIT_MIB, names.CONTAINER_MEM)
# The `env` entry with which NVIDIA's runtime adds no cards. It overrides the variable in envFrom and in the image.
_NO_CARD_VARIABLE = {"name": names.ENV_VISIBLE_DEVICES, "value": names.NO_CARDS}


def mutate_splits(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod whose split share has lost the number of cards, because the share would become a share of one card.
    Raises InvalidRequest.
    """
    counts = request.read_counts(pod.annotations)
    if counts and counts.keys() <= {container.spec.get("name") for container in pod.containers}:
        return  # the annotation belongs to this pod, and names all of its split shares
    for container in pod.containers:
        limits = (container.spec.get("resources") or {}).get("limits") or {}
        is_written = request.has_slot(container) and names.GPU_MEM in limits and names.GPU_COUNT not in limits
        if is_written and not is_gpu_count_intact(container.spec.get("env") or []):
            raise removed_count_error(f"{container.path}.env")


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Set the resources of Cardwise (gpu-mem in MiB, the slot, markers) and its environment variables in each
    container. Remove those that users must not write.
    """
    by_claim = context.settings.claims
    parts = _split_request(pod.request, in_gang=pod.gang is not None, by_claim=by_claim)
    if pod.agent:
        parts[pod.agent] = _ContainerPart(is_agent=True)
    mps = pod.isolation.uses_mps
    for i, container in enumerate(pod.containers):
        part = parts.get(container.key, _ContainerPart())
        changed = _rewrite_container(
            container, part, pod.warnings, has_request=pod.request is not None, mps=mps, by_claim=by_claim
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
    allowed_markers = _MARKER_RESOURCES if pod.labels.get(names.GANG) else ()
    for container in pod.containers:
        for name in (container.spec.get("resources") or {}).get("limits") or ():
            if name in slots.INTERNAL_RESOURCES and name not in allowed_markers:
                raise added_later_error(f"{container.path}.resources.limits[{name}]")


def validate_environment(pod: PodUnderReview, context: Context) -> None:
    """Check that each container has the variables that `resources` wrote. Raises InvalidRequest."""
    if pod.request is None:
        return
    mps = bool(pod.cards) and isolation.demand_of(pod.annotations).uses_mps
    for container in pod.containers:
        _check_environment(container.spec.get("env") or [], pod.cards.get(container.key), container.path, mps=mps)


@dataclass(frozen=True, slots=True)
class _ContainerPart:
    """The request of one container of the pod.

    is_agent: whether the container is the share agent, which requests nothing and needs a slot.
    markers: resources with which kube-scheduler calls the extender for a pod that requests no cards. Their amount is 0,
        because kube-scheduler checks only the name. With a larger amount kube-scheduler would not try the pod again
        when a node gets more CPU (NodeResourcesFit's queueing hint ignores `ignoredByScheduler`).
    """

    card: ContainerRequest | None = None
    devices: Mapping[str, int] = field(default_factory=dict)
    is_agent: bool = False
    markers: tuple[str, ...] = ()

    @property
    def needs_slot(self) -> bool:
        return self.card is not None or bool(self.devices) or self.is_agent


def is_marked(containers: Iterable[Container]) -> bool:
    """Whether kube-scheduler calls the extender for the pod although the pod requests no cards."""
    all_limits = [(container.spec.get("resources") or {}).get("limits") or {} for container in containers]
    return any(all(str(limits.get(name)) == "0" for name in _MARKER_RESOURCES) for limits in all_limits)


def _split_request(pod_request: PodRequest | None, *, in_gang: bool, by_claim: bool) -> dict[str, _ContainerPart]:
    """Each container's part of the request, by its key.

    by_claim: kube-scheduler calls no extender, so there are no markers.
    """
    if pod_request is None:
        # Members of a gang are planned together, so the extender must also see the members without a request.
        return {"0": _ContainerPart(markers=_MARKER_RESOURCES)} if in_gang and not by_claim else {}
    devices: dict[str, dict[str, int]] = {}
    for device in pod_request.devices:
        devices.setdefault(device.key, {})[names.CLASS_PREFIX + device.resource_class] = device.count
    cards = {container.key: container for container in pod_request.containers}
    # A requested card makes kube-scheduler call filter; the slot, which devices have too, makes it call bind.
    needs_marker = not pod_request.containers and not by_claim
    markers = {pod_request.devices[0].key: (names.FILTER_CALL_RESOURCE,)} if needs_marker else {}
    keys = dict.fromkeys((*cards, *devices))
    return {key: _ContainerPart(cards.get(key), devices.get(key, {}), markers=markers.get(key, ())) for key in keys}


def _rewrite_container(
    container: Container, part: _ContainerPart, warnings: list[str], *, has_request: bool, mps: bool, by_claim: bool
) -> Json:
    """The rewritten container.

    has_request: whether the pod requests cards or devices. Then a container without a request must see no card, also if
        its image requests cards.
    by_claim: whether the container's slot is an entry in the pod's claim.
    """
    changed, path = dict(container.spec), container.path
    resources = dict(changed.get("resources") or {})
    needs_entry = by_claim and part.needs_slot
    if request.names_claim(container) and not needs_entry:
        warnings.append(f"{path}.resources.claims[{names.POD_CLAIM}]: removed; only Cardwise may write this")
    resources = dict(slots.set_claim_entry(container, resources, needed=needs_entry))
    stored_amounts = _stored_amounts(part, resources.get("limits") or {}, by_claim=by_claim)
    if rounding := quantity.describe_rounding((resources.get("limits") or {}).get(names.GPU_MEM, "")):
        warnings.append(f"{path}.resources.limits[{names.GPU_MEM}]: {rounding}")
    for kind, amounts in amount_lists(resources):
        warnings += [
            f"{path}.resources.{kind}[{name}]: removed; only Cardwise may write this"
            for name in slots.INTERNAL_RESOURCES
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
    if resources or "resources" in changed:
        changed["resources"] = resources
    if has_request:
        env = changed.get("env") or []
        env_from, card = bool(changed.get("envFrom")), part.card
        changed["env"], overridden = merge_env_entries(env, card, env_from=env_from, mps=mps)
        warnings += [f"{path}.env[{name}]: {reason}" for name, reason in find_harmful_variables(env, card)]
        if overridden:
            warnings.append(
                f"{path}.env: {', '.join(overridden)} replaced, because Cardwise sets which GPUs the container may use"
            )
    return changed


def _stored_amounts(part: _ContainerPart, limits: Json, *, by_claim: bool) -> dict[str, int]:
    slot = {names.SHARE: 1} if part.needs_slot and not by_claim else {}
    return {**_card_amounts(part.card, limits), **part.devices, **slot, **dict.fromkeys(part.markers, 0)}


def _card_amounts(card_request: ContainerRequest | None, limits: Json) -> dict[str, int]:
    if card_request is None:
        return {}
    amounts_by_name: dict[str, int] = {}
    if card_request.resource_class:
        key = names.CLASS_PREFIX + card_request.resource_class
        # The requested number of units; with a class that has a share, units are not cards.
        amounts_by_name[key] = int(quantity.parse_amount(limits[key]).number) if key in limits else card_request.cards
    if card_request.whole:
        return {names.WHOLE_GPU: card_request.cards, **amounts_by_name}
    core = {names.GPU_CORE: int(card_request.core)} if card_request.core else {}
    return {names.GPU_MEM: int(card_request.mem), **core, **amounts_by_name}


def _is_own_resource(name: str) -> bool:
    return name in slots.INTERNAL_RESOURCES or name in names.REQUESTED


def env_from_annotation(name: str, annotation: str) -> Json:
    """An `env` entry that reads its value from a pod annotation through the downward API, written as the API server
    stores it.
    """
    path = f"metadata.annotations['{annotation}']"
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def own_env_entries(card_request: ContainerRequest | None, *, mps: bool = False) -> list[Json]:
    """The `env` entries that only Cardwise sets, in a stable order.

    card_request: the container's request; None for a container without a card.
    mps: whether the pod uses MPS.
    """
    if card_request is None:
        return [dict(_NO_CARD_VARIABLE)]
    limit = names.LIMIT_MIB_OF + card_request.key
    if card_request.whole:
        # The size of a whole card is unknown before placement.
        container_mem = env_from_annotation(names.CONTAINER_MEM, limit)
    else:
        container_mem = {"name": names.CONTAINER_MEM, "value": str(card_request.mem)}
    return [
        env_from_annotation(names.IDX, names.IDX),
        env_from_annotation(names.POD_MEM, names.POD_MEM),
        env_from_annotation(names.DEV_MEM, names.DEV_MEM),
        container_mem,
        env_from_annotation(names.ENV_VISIBLE_DEVICES, names.DEVICES_OF + card_request.key),
        {"name": names.ENV_DEVICE_ORDER, "value": names.ENV_PCI_BUS_ID},
        env_from_annotation(names.ENV_LIMIT_MIB, limit),
        env_from_annotation(names.ENV_FRACTION, names.FRACTION_OF + card_request.key),
        env_from_annotation(names.ENV_CUPY_LIMIT, names.LIMIT_BYTES_OF + card_request.key),
        *(
            [{"name": names.ENV_GPU_COUNT, "value": str(card_request.cards)}]
            if card_request.cards > 1 and not card_request.whole
            else []
        ),
        *(_mps_env_entries(card_request) if mps and not card_request.whole else []),
    ]


def _mps_env_entries(card_request: ContainerRequest) -> list[Json]:
    """The `env` entries with MPS limits that are known before placement. The node (CDI) sets the pipe's folder, and
    a percentage that follows from the memory, because no annotation has these in MPS's format.
    """
    limits = [card_request.mem_per_card] * card_request.cards
    variables = mps_values.container_environment(limits, card_request.core_per_card or None)
    return [{"name": name, "value": text} for name, text in variables.items() if name != mps_values.PIPE_ENV]


def _check_environment(entries: list[Json], card_request: ContainerRequest | None, path: str, *, mps: bool) -> None:
    """Check that the container has each variable of Cardwise once, as `merge_env_entries` writes it.

    Raises InvalidRequest.
    """
    own_by_name = {entry["name"]: [entry] for entry in own_env_entries(card_request, mps=mps)}
    entries_by_name: dict[str, list[Json]] = {name: [] for name in own_by_name}
    for entry in entries:
        if entry["name"] in own_by_name or _is_reserved_variable(entry["name"]):
            entries_by_name.setdefault(entry["name"], []).append(entry)
    changed_names = sorted(name for name in entries_by_name if entries_by_name[name] != own_by_name.get(name))
    if changed_names:
        raise changed_later_error(f"{path}.env", f"not as set by Cardwise: {', '.join(changed_names)}")


def is_gpu_count_intact(entries: list[Json]) -> bool:
    """Whether the entries of a container with a share have the number of its cards, or the share has only one card.

    A share of one card has no entry with the number. So if the entry is missing, Cardwise's other entries must be
    there, which shows that no other webhook has removed entries.
    """
    own_names = {entry["name"] for entry in entries if _is_own_env_entry(entry)}
    return names.ENV_GPU_COUNT in own_names or own_names.issuperset(_COMMON_VARIABLES)


def find_harmful_variables(entries: list[Json], card_request: ContainerRequest | None) -> list[tuple[str, str]]:
    """Variables of a container with cards that hide the cards from its program, each with the reason."""
    if card_request is None:
        return []
    visible_ordinals = {str(index) for index in range(card_request.cards)}
    return [
        (
            entry["name"],
            "the container sees only its own GPUs, numbered from 0; remove the variable, or CUDA may find no device",
        )
        for entry in entries
        if entry["name"] == _CUDA_VISIBLE_VARIABLE
        and entry.get("value") not in (None, "", _REFERENCE_TO_OWN_CARDS)
        and not set(entry["value"].split(",")) <= visible_ordinals
    ]


def merge_env_entries(
    entries: list[Json], card_request: ContainerRequest | None, *, env_from: bool, mps: bool = False
) -> tuple[list[Json], list[str]]:
    """Cardwise's entries, followed by the entries of the user that they do not replace; and the names of replaced
    entries that had other values.
    """
    own_by_name = {entry["name"]: entry for entry in own_env_entries(card_request, mps=mps)}
    if card_request is None or card_request.whole:
        # Leave JAX's own default: a fraction of 1 would leave no memory for the CUDA context and libraries. A copy of a
        # pod with a share may still have Cardwise's entry, which is removed here.
        entries = [
            entry for entry in entries if entry["name"] not in _XLA_FRACTION_VARIABLES or not _is_own_env_entry(entry)
        ]
    elif not env_from and all(
        _is_own_env_entry(entry) for entry in entries if entry["name"] in _XLA_FRACTION_VARIABLES
    ):
        fraction = names.FRACTION_OF + card_request.key
        own_by_name[names.ENV_XLA_FRACTION] = env_from_annotation(names.ENV_XLA_FRACTION, fraction)
    user_entries: list[Json] = []
    overridden: set[str] = set()
    for entry in entries:
        name = entry["name"]
        if name not in own_by_name and not _is_reserved_variable(name):
            user_entries.append(entry)
        elif entry != own_by_name.get(name) and not _is_own_env_entry(entry):
            overridden.add(name)
    # Cardwise's entries come first, because $(CARDWISE_MEM_FRACTION) can only be used after its definition.
    return [*own_by_name.values(), *user_entries], sorted(overridden)


def _is_reserved_variable(name: str) -> bool:
    """Whether only Cardwise may set the variable in a pod with cards."""
    return name in (names.ENV_GPU_COUNT, names.ENV_ISOLATION) or name.startswith(names.ENV_LIMIT_PREFIXES)


def _is_own_env_entry(entry: Json) -> bool:
    """Whether the `env` entry reads an annotation of Cardwise. In a copy of a pod, the annotation may be that of
    another container.
    """
    if entry["name"] in (names.CONTAINER_MEM, names.ENV_GPU_COUNT) and str(entry.get("value", "")).isdigit():
        return True
    reference = (entry.get("valueFrom") or {}).get("fieldRef") or {}
    path = reference.get("fieldPath", "") if isinstance(reference, dict) else ""
    prefixes = (f"metadata.annotations['{prefix}" for prefix in (f"{names.GROUP}/", names.GPUSHARE_PREFIX))
    return str(path).startswith(tuple(prefixes))
