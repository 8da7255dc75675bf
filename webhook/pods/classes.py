"""Rewrites pods that request a type of card: adds the domain to bare names, applies the class annotation, and converts
units of a class to MiB.

Pure except for the lookup, and idempotent. Runs before requests are read: afterwards the container itself says what
it requests, so that no reader of a pod needs the ResourceClasses.
"""

from cardwise.core.api import classes, lookalikes, names, request
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.request import Container
from cardwise.core.values import quantity, wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity
from webhook.pods import devices
from webhook.pods.context import Context, Lookups
from webhook.pods.pod import PodUnderReview
from webhook.templates import containers
from webhook.templates.spellings import Lookup, rename_keys

# With one of these resources, the class only selects the type of card.
_AMOUNTS = (names.GPU_MEM, names.GPU_COUNT, names.WHOLE_GPU)
_NVIDIA = "nvidia.com/"
_KNOWN_RESOURCES = (*names.REQUESTED, *names.OWN_RESOURCES)
_MAX_SHOWN_CLASSES = 10  # classes that a refusal names


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Write stored names of classes, the amounts of their shares, and the annotation of device classes.

    Raises InvalidRequest, KubeError.
    """
    translator = context.translator
    for i, container in enumerate(pod.containers):
        resources = dict(container.spec.get("resources") or {})
        for kind, amounts in containers.amount_lists(resources):
            field = f"{container.path}.resources.{kind}"
            resources[kind] = rename_keys(amounts, field, translator.translate_container_name)[0]
        pod.put_resources(i, resources)
    annotated_class = _annotated_class(pod)
    if annotated_class:
        requested = {name for container in pod.containers for name in _requested_names(container)}
        devices.refuse_other_classes(annotated_class, requested, translator.lookup)
        _refuse_nvidia_alone(annotated_class, requested)
        if not requested:
            _request_annotated_class(pod, annotated_class)
    for i, container in enumerate(pod.containers):
        resources = dict(container.spec.get("resources") or {})
        added = _class_limits(container, resources, translator.lookup)
        if added:
            resources["limits"] = resources["limits"] | added
            pod.put_resources(i, resources)
    devices.annotate_classes(pod, translator.lookup)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse names with Cardwise's domain that are not a ResourceClass. Raises InvalidRequest, KubeError."""
    annotated_class = pod.annotations.get(names.CLASS)
    for container in pod.containers:
        resources = container.spec.get("resources") or {}
        for kind in ("limits", "requests"):
            for name in resources.get(kind) or ():
                if not name.startswith(names.CLASS_PREFIX) or name in _KNOWN_RESOURCES:
                    continue
                class_name = names.class_of(name)
                field = f"{container.path}.resources.{kind}[{name}]"
                _check_class(
                    class_name,
                    f"metadata.annotations[{names.CLASS}]" if class_name == annotated_class else field,
                    context.cluster,
                )


def _annotated_class(pod: PodUnderReview) -> str:
    """The class in the pod's annotation, for containers without a class; "" without the annotation. Raises
    InvalidRequest.
    """
    name = str(pod.annotations.get(names.CLASS) or "")
    if name:
        classes.check_name(name, f"metadata.annotations[{names.CLASS}]")
    return name


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
    if requested and all(name.startswith(_NVIDIA) for name in requested):
        name = wording.quote_unless_name(min(requested))
        raise InvalidRequest(
            f"metadata.annotations[{names.CLASS}]",
            f"no container requests a GPU of Cardwise, and {name} belongs to NVIDIA's device plugin",
            f"write {names.GPU_COUNT} in its place for whole GPUs of {class_name}, or remove the annotation",
        )


def _requested_names(container: Container) -> set[str]:
    """The names of the resources by which the container requests cards or devices, of Cardwise or of NVIDIA's device
    plugin.
    """
    resources = container.spec.get("resources") or {}
    return {
        name
        for _, amounts in containers.amount_lists(resources)
        for name, amount in amounts.items()
        if name in names.REQUESTED or names.class_of(name) or (name.startswith(_NVIDIA) and str(amount) != "0")
    }


def _class_limits(container: Container, resources: Json, lookup: Lookup) -> Json:
    """The limits that a class with a share adds to a container that requests n units of it and no other amount.

    Errors in the request are not reported here: reading the request reports them.
    """
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    if any(name in limits or name in requests for name in _AMOUNTS):
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
        count = quantity.count(limits[resource], maximum=request.MAX_CARDS)
    except InvalidQuantity:
        return {}
    # With the slot in the limits, the parser reads the number of units as shares, not as cards.
    added = {names.GPU_MEM: str(count * gpu_class.share.memory), names.SHARE: "1"}
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
