"""Normalizes the amounts that a pod requests. Numbers get a unit, names of classes get their domain, and a class with a
share gets the amounts of the share. The classes of devices are written into an annotation of the pod.

Pure except for lookups, and idempotent. Runs before requests are read. Afterwards the containers contain the complete
request, so readers of a pod need neither the ResourceClasses nor the namespace's unit.

Units: `2` becomes `2Gi`. The stored number is in MiB, so scheduler, kubelet, quotas and all components of Cardwise read
the same number. Two kinds of numbers without a unit are in MiB already, and stay. First, numbers in a container with a
    share slot: the webhook has rewritten them before. This happens in a second call, in a copy of a running pod, or in
    a template that was made from a pod. Second, numbers that Kubernetes took from a LimitRange, because a LimitRange
    stores amounts in MiB.

Device classes (other than GPUs): with the annotation, readers of the pod's request do not need the ResourceClasses. It
is always written again, to replace a value that the user wrote or that was copied from another pod.
"""

import re
from typing import Final

from cardwise.core.api import classes, lookalikes, names, request
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.request import Container
from cardwise.core.values import quantity, wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, Unit
from webhook.pods import slots
from webhook.pods.context import Context, Lookups
from webhook.pods.pod import PodUnderReview, container_path
from webhook.templates import containers
from webhook.templates.spellings import Lookup, rename_keys

# In MiB. A CUDA context alone takes about this much; a smaller share often lacks its unit (8 for 8Gi).
MIN_SHARE_MIB: Final = 256
_LIMIT_RANGER: Final = "LimitRanger plugin set: "
# kubernetes plugin/pkg/admission/limitranger/admission.go: "cpu, example.com/x limit for init container main".
_LIMIT_RANGE_ENTRY: Final = re.compile(r"(.+) (request|limit) for (init )?container (\S+)")
# With one of these resources, the class only selects the type of card.
_AMOUNT_RESOURCES = (names.GPU_MEM, names.GPU_COUNT, names.WHOLE_GPU)
_NVIDIA_PREFIX = "nvidia.com/"
_KNOWN_RESOURCES = (*names.REQUESTED, *names.OWN_RESOURCES)
_MAX_SHOWN_CLASSES = 10  # classes that a refusal names


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Write units, stored names of classes, the amounts of their shares, and the annotation of device classes.

    Raises InvalidRequest, KubeError.
    """
    add_units(pod, context)
    translator = context.translator
    for i, container in enumerate(pod.containers):
        resources = dict(container.spec.get("resources") or {})
        for kind, amounts in containers.amount_lists(resources):
            field = f"{container.path}.resources.{kind}"
            resources[kind] = rename_keys(amounts, field, translator.translate_container_name)[0]
        pod.put_resources(i, resources)
    annotated_class = _annotated_class(pod)
    if annotated_class:
        requested = {name for container in pod.containers for name in _requested_resource_names(container)}
        _refuse_other_classes(annotated_class, requested, translator.lookup)
        _refuse_nvidia_alone(annotated_class, requested)
        if not requested:
            _request_annotated_class(pod, annotated_class)
    for i, container in enumerate(pod.containers):
        resources = dict(container.spec.get("resources") or {})
        added = _limits_added_by_class(container, resources, translator.lookup)
        if added:
            # With the slot, the parser reads the number of units as shares, not as cards.
            limits = resources["limits"] | added
            resources = slots.add_slot(container, resources | {"limits": limits}, by_claim=context.settings.claims)
            pod.put_resources(i, resources)
    annotations = _with_device_classes(pod, translator.lookup)
    if annotations != pod.annotations:
        pod.annotations = annotations


def mutate_device_annotation(pod: PodUnderReview, context: Context) -> None:
    """Warn the author if `mutate` has replaced or removed the author's own annotation of device classes."""
    old_text, new_text = (
        annotations_of(pod.manifest).get(names.DEVICE_CLASSES),
        pod.annotations.get(names.DEVICE_CLASSES),
    )
    if old_text in (None, new_text):
        return
    change = "removed" if new_text is None else f"replaced by {new_text}"
    pod.warnings.append(f"metadata.annotations[{names.DEVICE_CLASSES}]: {change}; only Cardwise may write this")


def validate_small_shares(pod: PodUnderReview, context: Context) -> None:
    """Warn about shares below the minimum of the settings, too small for most programs: often the unit is missing.

    Raises KubeError.
    """
    min_mib, cluster = context.settings.min_share, context.cluster
    for key, card in pod.cards.items():
        resource_class = cluster.resource_class(card.resource_class) if card.resource_class else None
        is_class_share = (
            resource_class is not None
            and resource_class.share is not None
            and not card.mem % resource_class.share.memory
        )
        if (
            card.whole or card.mem_per_card >= min_mib or is_class_share
        ):  # a class's author chose the size of its unit on purpose
            continue
        fits = card.mem_per_card * Unit.GIB.mib <= cluster.cards(resource_class).largest
        advice = f"did you mean {card.mem}Gi?" if fits else f"write at least {min_mib * card.cards}Mi"
        problem = f"{card.mem} means {card.mem} MiB, less than most programs need to start on a GPU ({min_mib} MiB)"
        pod.warnings.append(f"{container_path(key)}.resources.limits[{names.GPU_MEM}]: {problem}; {advice}")


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse names with Cardwise's domain that are not a ResourceClass, and a wrong annotation of device classes.

    Raises InvalidRequest, KubeError.
    """
    annotated_class = pod.annotations.get(names.CLASS)
    for container in pod.containers:
        resources = container.spec.get("resources") or {}
        for kind in ("limits", "requests"):
            for name in resources.get(kind) or ():
                class_name = names.class_of(name)
                if class_name is None or name in _KNOWN_RESOURCES:
                    continue
                field = f"{container.path}.resources.{kind}[{name}]"
                _check_class(
                    class_name,
                    f"metadata.annotations[{names.CLASS}]" if class_name == annotated_class else field,
                    context.cluster,
                )
    if _with_device_classes(pod, context.cluster.resource_class) != pod.annotations:
        raise InvalidRequest(
            f"metadata.annotations[{names.DEVICE_CLASSES}]",
            "does not match the device classes that the containers request: another webhook has changed it, or a "
            "class was created or changed a moment ago",
            "create the pod again; if that does not help, keep that webhook from changing the annotation",
        )


def add_units(pod: PodUnderReview, context: Context) -> None:
    """Add the unit to each number without a unit. Raises InvalidRequest.

    Refuses a number that, in the namespace's unit, is more than all GPUs of any node have: its author probably
    meant MiB.
    """
    unit = context.settings.unit
    if unit is Unit.MIB:
        return
    from_limit_range = _entries_of_limit_range(pod.annotations.get(names.LIMIT_RANGER, ""))
    for i, container in enumerate(pod.containers):
        resources = dict(container.spec.get("resources") or {})
        if request.has_slot(container):
            continue
        container_kind = "init" if container.key.startswith("init-") else ""
        for kind, amounts in containers.amount_lists(resources):
            if names.GPU_MEM in amounts and (container_kind, container.spec.get("name"), kind) not in from_limit_range:
                field = f"{container.path}.resources.{kind}[{names.GPU_MEM}]"
                text = amounts[names.GPU_MEM]
                resources[kind] = amounts | {names.GPU_MEM: add_unit(text, unit, field)}
                if resources[kind][names.GPU_MEM] != str(text):
                    _refuse_beyond_node(text, unit, _largest_node_mib(context), field)
        pod.put_resources(i, resources)


def add_unit(text: str | int, unit: Unit, field: str) -> str:
    """One amount with its unit. Raises InvalidRequest."""
    try:
        return quantity.with_unit(text, unit)
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, error.remedy) from error


def _largest_node_mib(context: Context) -> int:
    """The largest sum of MiB of one node's cards; 0 if unknown, or if larger requests may wait for a node."""
    cards = context.cluster.cards()
    return cards.largest * cards.max_cards if context.settings.oversize == "refuse" else 0


def _refuse_beyond_node(text: str | int, unit: Unit, largest_node: int, field: str) -> None:
    """Refuse a number that, with the unit, is more than any node has. Raises InvalidRequest.

    largest_node: MiB; 0 if unknown.
    """
    number, _ = quantity.parse_amount(text)
    if largest_node and number * unit.mib > largest_node:
        raise InvalidRequest(
            field,
            f"{text} means {unit} in this namespace ({names.GPU_MEM_UNIT}, or webhook.gpuMemUnit of the chart): "
            f"{int(number * unit.mib)} MiB, more than all GPUs of any node have ({largest_node})",
            f"write {int(number)}Mi where MiB are meant",
        )


def _entries_of_limit_range(annotation: str) -> set[tuple[str, str, str]]:
    """The entries of gpu-mem that Kubernetes took from a LimitRange: kind and name of the container, and the list."""
    lists = set()
    for sentence in annotation.removeprefix(_LIMIT_RANGER).split("; ") if annotation.startswith(_LIMIT_RANGER) else ():
        match = _LIMIT_RANGE_ENTRY.fullmatch(sentence)
        if match and names.GPU_MEM in match[1].split(", "):
            lists.add(((match[3] or "").strip(), match[4], f"{match[2]}s"))
    return lists


def _annotated_class(pod: PodUnderReview) -> str | None:
    """The class in the pod's annotation, for containers without a class; None without the annotation. Raises
    InvalidRequest.
    """
    name = str(pod.annotations.get(names.CLASS) or "")
    if name:
        classes.check_name(name, f"metadata.annotations[{names.CLASS}]")
    return name or None


def _request_annotated_class(pod: PodUnderReview, class_name: str) -> None:
    """Request one card of the annotated class in the first container."""
    first = next((i for i, container in enumerate(pod.containers) if container.key == "0"), None)
    if first is not None:
        resources = dict(pod.containers[first].spec.get("resources") or {})
        resources["limits"] = (resources.get("limits") or {}) | {names.CLASS_PREFIX + class_name: "1"}
        pod.put_resources(first, resources)


def _refuse_nvidia_alone(class_name: str, requested: set[str]) -> None:
    """Refuse a class in the pod's annotation if the containers request devices of NVIDIA's device plugin only.

    The pod would get no GPU of the class. class_name: the class. requested: the names that its containers request.

    Raises InvalidRequest.
    """
    if requested and all(name.startswith(_NVIDIA_PREFIX) for name in requested):
        name = wording.quote_unless_name(min(requested))
        raise InvalidRequest(
            f"metadata.annotations[{names.CLASS}]",
            f"no container requests a GPU of Cardwise, and {name} belongs to NVIDIA's device plugin",
            f"write {names.GPU_COUNT} in its place for whole GPUs of {class_name}, or remove the annotation",
        )


def _requested_resource_names(container: Container) -> set[str]:
    """The names of the resources by which the container requests cards or devices, of Cardwise or of NVIDIA's device
    plugin.
    """
    resources = container.spec.get("resources") or {}
    return {
        name
        for _, amounts in containers.amount_lists(resources)
        for name, amount in amounts.items()
        if name in names.REQUESTED or names.class_of(name) or (name.startswith(_NVIDIA_PREFIX) and str(amount) != "0")
    }


def _limits_added_by_class(container: Container, resources: Json, lookup: Lookup) -> Json:
    """The limits that a class with a share adds to a container that requests n units of it and no other amount.

    Errors in the request are not reported here: reading the request reports them.
    """
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    if any(name in limits or name in requests for name in _AMOUNT_RESOURCES):
        return {}
    # The container may also request devices. A class that does not exist is refused later.
    class_by_name = {
        name: gpu_class
        for name in limits
        if (gpu_class := _look_up_class(name, lookup)) is not None and not gpu_class.other
    }
    if len(class_by_name) != 1:
        return {}
    ((resource, gpu_class),) = class_by_name.items()
    if gpu_class.share is None:
        return {}
    try:
        count = quantity.parse_count(limits[resource], maximum=request.MAX_CARDS)
    except InvalidQuantity:
        return {}
    added = {names.GPU_MEM: str(count * gpu_class.share.memory)}
    if gpu_class.share.core and names.GPU_CORE not in limits:
        core = _class_core(
            gpu_class.name, count, gpu_class.share.core, f"{container.path}.resources.limits[{resource}]"
        )
        added[names.GPU_CORE] = str(core)
    return added


def _look_up_class(resource: str, lookup: Lookup) -> ResourceClass | None:
    name = names.class_of(resource)
    return lookup(name) if name else None


def _class_core(name: str, count: int, percent: int, field: str) -> int:
    if count * percent > FULL_CORE:
        raise InvalidRequest(
            field,
            f"{count} of {name} are {count * percent} percent of one GPU's SMs",
            f"request at most {FULL_CORE // percent}",
        )
    return count * percent


def _check_class(name: str, field: str, cluster: Lookups) -> None:
    classes.check_name(name, field)
    if cluster.resource_class(name) is not None:
        return
    known_classes = cluster.classes()
    suggested_name = lookalikes.suggest_resource(names.CLASS_PREFIX + name, known_classes)
    if suggested_name in names.REQUESTED:
        raise InvalidRequest(field, f"there is no ResourceClass {name}", f"did you mean {suggested_name}?")
    similar_names = lookalikes.select_alike(name, sorted(known_classes), _MAX_SHOWN_CLASSES)
    others_phrase = (
        f" or one of {len(known_classes) - len(similar_names)} more" if len(known_classes) > len(similar_names) else ""
    )
    any_card = f"{names.GPU_MEM} (such as 8Gi) or {names.WHOLE_GPU} (whole GPUs) for any GPU"
    raise InvalidRequest(
        field,
        f"there is no ResourceClass {name}",
        f"write {', '.join(similar_names)}{others_phrase} (kubectl get resourceclass), or request {any_card}"
        if similar_names
        else f"there are none yet (kubectl get resourceclass); request {any_card}",
    )


def _device_classes(pod: PodUnderReview, lookup: Lookup) -> list[str]:
    """The device classes that the containers request. Raises KubeError."""
    class_names = {
        names.class_of(name)
        for container in pod.containers
        for _, amounts in containers.amount_lists(container.spec.get("resources") or {})
        for name in amounts
    }
    return [name for name in class_names if name and _is_device_class(name, lookup)]


def _is_device_class(name: str, lookup: Lookup) -> bool:
    """Whether the class is of devices other than GPUs. Raises KubeError."""
    resource_class = lookup(name)
    return resource_class is not None and resource_class.other


def _with_device_classes(pod: PodUnderReview, lookup: Lookup) -> Json:
    annotations = {key: text for key, text in pod.annotations.items() if key != names.DEVICE_CLASSES}
    if class_names := _device_classes(pod, lookup):
        annotations[names.DEVICE_CLASSES] = request.write_device_classes(class_names)
    return annotations


def _refuse_other_classes(class_name: str, requested: set[str], lookup: Lookup) -> None:
    """Refuse a device class in the pod's annotation if containers request other classes: such an annotation has no
    meaning for cards.

    class_name: the class of the pod's annotation.
    requested: the names that its containers request.

    Raises InvalidRequest, KubeError.
    """
    other_names = requested - {names.CLASS_PREFIX + class_name}
    if other_names and _is_device_class(class_name, lookup):
        raise InvalidRequest(
            f"metadata.annotations[{names.CLASS}]",
            f"{class_name} is a class of devices other than GPUs, and a container requests {min(other_names)}",
            f"write {class_name}: 1 in the limits of the container that needs the device, and remove the annotation",
        )
