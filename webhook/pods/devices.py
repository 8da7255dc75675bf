"""Finds the device classes (other than GPUs) that a pod requests, and records them in its annotation.

With the annotation, readers of the pod's request do not need the ResourceClasses. The annotation is always written
again, to replace a value that the user wrote or that was copied from another pod. Runs before requests are read, as
`classes` does.
"""

from cardwise.core.api import names, request
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.templates import containers
from webhook.templates.spellings import Lookup


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Warn the author if their annotation was replaced or removed; `classes` writes it, before the request is read."""
    old_text, new_text = (
        annotations_of(pod.manifest).get(names.DEVICE_CLASSES),
        pod.annotations.get(names.DEVICE_CLASSES),
    )
    if old_text in (None, new_text):
        return
    change = "removed" if new_text is None else f"replaced by {new_text}"
    pod.warnings.append(f"metadata.annotations[{names.DEVICE_CLASSES}]: {change}; only Cardwise may write this")


def validate(pod: PodUnderReview, context: Context) -> None:
    """Check that the annotation is as `annotate_classes` writes it. Raises InvalidRequest, KubeError."""
    if _right_annotations(pod, context.cluster.resource_class) != pod.annotations:
        raise InvalidRequest(
            f"metadata.annotations[{names.DEVICE_CLASSES}]",
            "does not match the device classes that the containers request: another webhook has changed it, or a "
            "class was created or changed a moment ago",
            "create the pod again; if that does not help, keep that webhook from changing the annotation",
        )


def _device_classes(pod: PodUnderReview, lookup: Lookup) -> list[str]:
    """The device classes that the containers request. Raises KubeError."""
    class_names = {
        names.class_of(name)
        for container in pod.containers
        for _, amounts in containers.amount_lists(container.spec.get("resources") or {})
        for name in amounts
    }
    return [name for name in class_names - {""} if is_device_class(name, lookup)]


def is_device_class(name: str, lookup: Lookup) -> bool:
    """Whether the class is of devices other than GPUs. Raises KubeError."""
    resource_class = lookup(name)
    return resource_class is not None and resource_class.other


def annotate_classes(pod: PodUnderReview, lookup: Lookup) -> None:
    """Write the right annotation. Raises KubeError."""
    annotations = _right_annotations(pod, lookup)
    if annotations != pod.annotations:
        pod.annotations = annotations


def _right_annotations(pod: PodUnderReview, lookup: Lookup) -> Json:
    annotations = {key: text for key, text in pod.annotations.items() if key != names.DEVICE_CLASSES}
    if class_names := _device_classes(pod, lookup):
        annotations[names.DEVICE_CLASSES] = request.write_device_classes(class_names)
    return annotations


def refuse_other_classes(class_name: str, requested: set[str], lookup: Lookup) -> None:
    """Refuse a device class in the pod's annotation if containers request other classes: such an annotation has no
    meaning for cards.

    class_name: the class of the pod's annotation.
    requested: the names that its containers request.

    Raises InvalidRequest, KubeError.
    """
    other_names = requested - {names.CLASS_PREFIX + class_name}
    if other_names and is_device_class(class_name, lookup):
        raise InvalidRequest(
            f"metadata.annotations[{names.CLASS}]",
            f"{class_name} is a class of devices other than GPUs, and a container requests {min(other_names)}",
            f"write {class_name}: 1 in the limits of the container that needs the device, and remove the annotation",
        )
