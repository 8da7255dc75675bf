"""Pods and nodes that do not exist yet: `cardwise simulate --pod` and `--add-nodes`, `cardwise defrag --fit`."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from cardwise.core.api import classes, names, request
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.request import Load
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, Unit
from cardwise.kube.objects import pods
from cardwise.kube.pods import loads, nodeconstraints
from cardwise.simulation.workload import UNLIMITED_LOAD, PodShape, SimulatedNode

CardClassifier = Callable[[Card, str], Card]  # sets the classes of a card, by the name of its node

_RESOURCE_BY_KEY: Final = {
    "gpu-mem": names.GPU_MEM, "gpu-count": names.GPU_COUNT, "gpu": names.WHOLE_GPU, "core": names.GPU_CORE,
}  # fmt: skip
_LOAD_KEYS: Final = ("cpu", "memory")
_KEYS: Final = ", ".join([*_RESOURCE_BY_KEY, *_LOAD_KEYS, "class"])
_CONTAINER_LISTS: Final = ("initContainers", "containers")
_POD_OPTION, _ADD_NODES_OPTION = "--pod", "--add-nodes"
_NODES_PATTERN: Final = re.compile(r"(\d+)x(\d+)x([^:,]+):([^,]+)((?:,[^,]*)*)")
_MAX_NODES: Final = 10_000  # maximum number of nodes that one option adds
_MAX_CARDS: Final = 1024  # maximum number of cards of each added node


class _Expression(msgspec.Struct):
    key: str
    operator: str
    values: list[str] | None = None


class _Term(msgspec.Struct, rename="camel"):
    match_expressions: list[_Expression] | None = None
    match_fields: list[_Expression] | None = None


class _Terms(msgspec.Struct, rename="camel"):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(msgspec.Struct):
    required: _Terms | None = msgspec.field(default=None, name=nodeconstraints.REQUIRED_AFFINITY_FIELD)


class _Affinity(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _NodeSpec(msgspec.Struct, rename="camel"):
    """The fields of a pod's spec that constrain its nodes."""

    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: list[dict[str, Any]] | None = None


class NamedPod(NamedTuple):
    """A pod that does not exist yet. `spec`: as the user has written it."""

    name: str
    shape: PodShape
    spec: Json


def parse_shapes(
    text: str, classes_by_name: Mapping[str, ResourceClass], *, unit: Unit = Unit.MIB
) -> list[tuple[str, PodShape]]:
    """Parse the pods of `--pod` into names and shapes. See `parse_pods`."""
    return [(named_pod.name, named_pod.shape) for named_pod in parse_pods(text, classes_by_name, unit=unit)]


def parse_pods(
    text: str, classes_by_name: Mapping[str, ResourceClass], option: str = _POD_OPTION, *, unit: Unit = Unit.MIB
) -> list[NamedPod]:
    """Parse the pods of `--pod`, such as `gpu-mem=8138,cpu=2` or a file of manifests. Raises InvalidRequest.

    classes_by_name: the classes of the cluster.
    option: the option's name, for messages.
    unit: the unit of gpu-mem numbers without a unit in the manifests.
    """
    field = f"{option} {text}"
    if "=" in text:
        pod = _parse_pod(text, field)
        return [NamedPod(text, _pod_shape(pod, classes_by_name, field), pod["spec"])]
    path = Path(text)
    if not path.is_file():
        raise InvalidRequest(
            field, "is neither a file nor a list of KEY=AMOUNT", "write, for example, gpu-mem=8138,cpu=2"
        )
    named_pods = [
        NamedPod(name, _pod_shape(pod, classes_by_name, f"{path.name}: {name}", unit), pod.get("spec") or {})
        for name, pod in _read_pods(path)
    ]
    if not named_pods:
        raise InvalidRequest(path.name, "contains no Pod and no object with a pod template", "name another file")
    return named_pods


def _parse_pod(text: str, field: str) -> Json:
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for part in text.split(","):
        key, _, amount = part.partition("=")
        key = key.strip()
        if key in _LOAD_KEYS:
            _check_amount(f"{field}: {key}", amount)
            requests[key] = amount
        elif key == "class":
            annotations[names.CLASS] = amount
        elif key in _RESOURCE_BY_KEY or "/" in key:
            limits[_RESOURCE_BY_KEY.get(key, key)] = amount
        else:
            raise InvalidRequest(field, f"{key!r} is unknown", f"write {_KEYS}, or the name of a resource")
    container = {"name": "main", "resources": {"limits": limits, "requests": requests}}
    return {"metadata": {"annotations": annotations}, "spec": {"containers": [container]}}


def _check_amount(field: str, amount_text: Any, remedy: str = "write for example cpu=2 or memory=4Gi") -> None:
    """Check that Kubernetes would accept an amount, since an invalid amount would count as 0. Raises InvalidRequest."""
    try:
        amount, _ = quantity.parse_amount(amount_text)
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, remedy) from error
    if amount < 0:
        raise InvalidRequest(field, f"{amount_text} is below zero", remedy)


def _read_pods(path: Path) -> Iterator[tuple[str, Json]]:
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if isinstance(document, dict)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(path.name, f"cannot be read ({error})", "write manifests as YAML") from error
    for manifest in (listed for document in documents for listed in _expand_list(document, path.name)):
        kind = manifest.get("kind")
        lower_kind = str(kind).lower()
        name = (
            f"{lower_kind}/{_get_mapping(manifest, 'metadata', f'{path.name}: {lower_kind}: metadata').get('name', '')}"
        )
        spec_field = f"{path.name}: {name}: spec"
        spec = _get_mapping(manifest, "spec", spec_field)
        job = _get_mapping(spec, "jobTemplate", f"{spec_field}.jobTemplate")
        template = (_get_mapping(job, "spec", f"{spec_field}.jobTemplate.spec") or spec).get("template")
        pod = manifest if kind == "Pod" else template
        if isinstance(pod, dict):
            yield name, pod


def _expand_list(manifest: Json, file: str) -> Iterator[Json]:
    """The objects in a List, as `kubectl get -o yaml` prints it; else the object itself."""
    kind = str(manifest.get("kind"))
    if kind.endswith("List") and "items" in manifest:
        for listed in _get_mappings(manifest, "items", f"{file}: {kind}: items"):
            yield {"kind": kind.removesuffix("List"), **listed}
    else:
        yield manifest


def _get_mapping(parent: Json, key: str, field: str) -> Json:
    """Get a mapping in a manifest; {} if it is missing. Raises InvalidRequest for another type."""
    return _check_mapping(parent.get(key) or {}, field)


def _check_mapping(content: Any, field: str) -> Json:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidRequest(field, f"{content!r} is not a map", "write it as in a Kubernetes manifest")
    return content


def _get_mappings(parent: Json, key: str, field: str) -> list[Json]:
    """Get a list of mappings in a manifest; [] if it is missing. Raises InvalidRequest for another type."""
    listed = parent.get(key) or []
    if not isinstance(listed, list):
        raise InvalidRequest(field, f"{listed!r} is not a list", "write it as in a Kubernetes manifest")
    return [_check_mapping(content, f"{field}[{i}]") for i, content in enumerate(listed)]


def _pod_shape(pod: Json, classes_by_name: Mapping[str, ResourceClass], source: str, unit: Unit = Unit.MIB) -> PodShape:
    """The pod's request after the webhook and the API server have completed it."""
    device_classes = request.write_device_classes(
        name for name, resource_class in classes_by_name.items() if resource_class.other
    )
    try:
        metadata = _get_mapping(pod, "metadata", "metadata")
        annotations = {
            **_get_annotations(metadata),
            **({names.DEVICE_CLASSES: device_classes} if device_classes else {}),
        }
        spec = _complete_spec(_get_mapping(pod, "spec", "spec"), classes_by_name, unit)
        load = _parse_load(spec)
        pod_request = _check_request(
            request.parse({"metadata": {**metadata, "annotations": annotations}, "spec": spec}), classes_by_name
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error.field}", error.problem, error.remedy) from error
    return PodShape(pod_request, load)


def _get_annotations(metadata: Json) -> Json:
    annotations = _get_mapping(metadata, "annotations", "metadata.annotations")
    for name, text in annotations.items():
        if not isinstance(text, str):
            raise InvalidRequest(f"metadata.annotations[{name}]", f"{text!r} is not a string", "write it in quotes")
    return annotations


def _parse_load(spec: Json) -> Load:
    """Parse the cpu and memory that the pod requests. Raises InvalidRequest, also for invalid constraints on nodes."""
    _check_amounts(_get_mapping(spec, "overhead", "spec.overhead"), "spec.overhead")
    _check_resources(spec, "spec")
    _get_mapping(spec, "securityContext", "spec.securityContext")
    try:
        msgspec.convert(spec, _NodeSpec)
        return loads.load_of_pod(pods.spec_of(spec))
    except msgspec.ValidationError as error:
        raise InvalidRequest("spec", str(error), "write it as in a Kubernetes manifest") from error


def _check_resources(parent: Json, field: str) -> None:
    """Check the `resources` of a container, or of the pod as a whole. Raises InvalidRequest."""
    resources = _get_mapping(parent, "resources", f"{field}.resources")
    for kind in ("limits", "requests"):
        _check_amounts(_get_mapping(resources, kind, f"{field}.resources.{kind}"), f"{field}.resources.{kind}")


def _check_amounts(amounts: Json, field: str) -> None:
    for key in _LOAD_KEYS:
        if key in amounts:
            _check_amount(f"{field}[{key}]", amounts[key], "write for example cpu: 2 or memory: 4Gi")


def _complete_spec(spec: Json, classes_by_name: Mapping[str, ResourceClass], unit: Unit) -> Json:
    """Complete a spec as the webhook and the API server would.

    gpu-mem gets its unit, class names get Cardwise's domain, and missing requests of cpu and memory become the limits.
    """
    containers = {
        key: [
            _complete_container(container, classes_by_name, f"spec.{key}[{i}]", unit)
            for i, container in enumerate(_get_mappings(spec, key, f"spec.{key}"))
        ]
        for key in _CONTAINER_LISTS
    }
    return {**spec, **containers}


def _complete_container(container: Json, classes_by_name: Mapping[str, ResourceClass], field: str, unit: Unit) -> Json:
    _check_resources(container, field)
    _get_mapping(container, "securityContext", f"{field}.securityContext")
    resources = container.get("resources") or {}
    # A container with a slot has passed the webhook, so its numbers are MiB.
    has_slot = request.has_slot(request.Container("", field, container, ordinary_init=False))
    number_unit = Unit.MIB if has_slot else unit
    limits, requests = (
        _add_unit(resources.get(kind) or {}, number_unit, f"{field}.resources.{kind}")
        for kind in ("limits", "requests")
    )
    limits_in_domain = {
        names.CLASS_PREFIX + name if classes.is_bare_class_name(name, classes_by_name.__contains__) else name: amount
        for name, amount in limits.items()
    }
    other_limits = {name: amount for name, amount in limits.items() if name in _LOAD_KEYS}
    return {
        **container,
        "resources": {**resources, "limits": limits_in_domain, "requests": {**other_limits, **requests}},
    }


def _add_unit(amounts: Json, unit: Unit, field: str) -> Json:
    if names.GPU_MEM not in amounts:
        return amounts
    try:
        return {**amounts, names.GPU_MEM: quantity.with_unit(amounts[names.GPU_MEM], unit)}
    except InvalidQuantity as error:
        raise InvalidRequest(f"{field}[{names.GPU_MEM}]", error.problem, error.remedy) from error


def _check_request(
    pod_request: request.PodRequest | None, classes_by_name: Mapping[str, ResourceClass]
) -> request.PodRequest:
    """Check that the pod requests a GPU, and names the amount of a class with a share. Raises InvalidRequest.

    The webhook would write that amount.
    """
    if pod_request is None:
        field = f"spec.containers[0].resources.limits[{names.GPU_MEM}]"
        raise InvalidRequest(field, "the pod requests no GPU", "write, for example, gpu-mem=8138")
    for container in pod_request.containers:
        resource_class = classes_by_name.get(container.resource_class)
        if container.whole and resource_class is not None and resource_class.share is not None:
            resource = names.CLASS_PREFIX + resource_class.name
            raise InvalidRequest(
                resource,
                f"one of this class is a share of {resource_class.share.memory} MiB",
                f"write gpu-mem={container.cards * resource_class.share.memory},class={resource_class.name}",
            )
    return pod_request


def check_classes(name: str, shape: PodShape, class_names: Collection[str], option: str = _POD_OPTION) -> None:
    """Check that the classes that the pod requests exist. Raises InvalidRequest."""
    containers = shape.request.containers if shape.request is not None else ()
    for missing_class in (
        container.resource_class
        for container in containers
        if container.resource_class and container.resource_class not in class_names
    ):
        available = ", ".join(sorted(class_names)) or "none"
        raise InvalidRequest(
            f"{option} {name}", f"no GPU or device matches class {missing_class}", f"write one of: {available}"
        )


def parse_nodes(text: str, number: int, models: Sequence[str], classify_card: CardClassifier) -> list[SimulatedNode]:
    """Parse the nodes of one option such as `--add-nodes 4x8xTesla-T4:16384`. Raises InvalidRequest.

    number: the number of the option, which becomes part of the nodes' names.
    models: the existing models; `Tesla-T4` may stand for a model with blanks in its name.
    """
    field = f"{_ADD_NODES_OPTION} {text}"
    match = _NODES_PATTERN.fullmatch(text)
    if match is None:
        remedy = "write NODES x GPUS x MODEL : MIB, for example 4x8xTesla-T4:16384,cpu=64,memory=256Gi"
        raise InvalidRequest(field, "cannot be read", remedy)
    count, cards = int(match[1]), int(match[2])
    if not 1 <= count <= _MAX_NODES or not 1 <= cards <= _MAX_CARDS:
        bounds = f"write 1 to {_MAX_NODES} x 1 to {_MAX_CARDS}"
        raise InvalidRequest(field, f"{count} nodes of {cards} GPUs are out of range", bounds)
    try:
        memory = quantity.parse_mib(match[4])
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, error.remedy) from error
    free_load = _parse_free_load(field, match[5])
    label = classes.accelerator_of_model(match[3])
    model = next(
        (known_model for known_model in models if classes.accelerator_of_model(known_model) == label), match[3]
    )
    card = Card(index=0, uuid="", mem=memory, model=model)
    return [_simulate_node(f"added-{number}-{i}", [card] * cards, free_load, classify_card) for i in range(count)]


def _parse_free_load(field: str, text: str) -> Load:
    """Parse the free cpu and memory of the nodes; unlimited if they are not given."""
    amounts: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, _, amount = part.partition("=")
        if key not in _LOAD_KEYS:
            raise InvalidRequest(field, f"{key!r} is unknown", f"write {' and '.join(_LOAD_KEYS)} after the GPUs")
        _check_amount(f"{field}: {key}", amount)
        amounts[key] = amount
    parsed = loads.load_of_node(amounts)
    return Load(
        parsed.cpu if "cpu" in amounts else UNLIMITED_LOAD.cpu,
        parsed.memory if "memory" in amounts else UNLIMITED_LOAD.memory,
        UNLIMITED_LOAD.pods,
    )


def _simulate_node(name: str, cards: Sequence[Card], free_load: Load, classify_card: CardClassifier) -> SimulatedNode:
    numbered = (dataclasses.replace(card, index=i, uuid=f"{name}-{i}") for i, card in enumerate(cards))
    return SimulatedNode(name, tuple(classify_card(card, name) for card in numbered), free_load)
