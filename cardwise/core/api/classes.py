"""ResourceClass: a named type of card. Decides which cards are in a class, and the size of one unit of the class.

A class is parsed once; the classes of every card are computed again whenever cards or classes change.
A class contains either GPUs or other devices. It cannot contain both, because a unit would have two meanings.

The automatic class of a model exists as soon as a card of the model is known, even while its ResourceClass object is
missing. Otherwise a quota on the class would not apply before the creation and after the deletion of the object. Once a
user has created or edited a class with this name, only the selector of that class decides.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cardwise.core.api import names, selectors
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.selectors import Expression, Selector
from cardwise.core.values import amounts, objectnames, quantity
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, MiB, Percent
from cardwise.core.values.wording import quote_text

GPU_KIND = "nvidia-gpu"  # the value of the label `kind` of all GPUs; other devices have other values
_KIND_LABEL, _MODEL_LABEL = "kind", "model"

# Cardwise's own spelling first, then the spellings of old proposals for ResourceClass
_SELECTOR_FIELDS = ("selector", "resourceSelector", "labelSelector")
_SPEC_FIELDS = (*_SELECTOR_FIELDS, "share", "priority")
_SHARE_FIELDS = ("memoryMiB", "corePercent")
_MAX_NAME_LENGTH = 48  # characters of a class name, which is a part of the names of resources and metrics
_MAX_LABEL_LENGTH = 63  # characters of a label's value; Kubernetes' limit
_RESERVED_NAMES = frozenset(
    {
        "cpu", "memory", "storage", "ephemeral-storage", "pods", "services", "secrets", "configmaps",
        "persistentvolumeclaims", "replicationcontrollers", "resourcequotas", "services.loadbalancers",
        "services.nodeports", *(name.removeprefix(names.CLASS_PREFIX) for name in names.OWN_RESOURCES),
    }
)  # fmt: skip
_RESERVED_PREFIXES = ("hugepages-", "requests.", "limits.")
_PRIORITIES = range(-(2**31), 2**31)  # int32, as the schema says
# Units per card in a node's capacity of a class. At least the maximum of `--max-clients`, so that this capacity never
# makes kube-scheduler reject a node with a free card.
CAPACITY_PER_CARD = 128
_MAX_CACHED_MODELS = 4096  # cached models; a cluster has tens, but a faulty node may report new ones again and again
_MAX_CACHED_LENGTH = 512  # characters of a cached combination; longer ones, which nodes could write, are not cached
# Cached combinations of labels. If a selector names nodes, each card may have its own: more than a big cluster's cards.
_MAX_CACHED = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """One unit of a class: MiB and percent of the SMs of one card."""

    memory: MiB
    core: Percent = Percent(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceClass:
    """One ResourceClass. Without a share, one unit is a whole card.

    other: the class contains devices other than GPUs, and one unit is one device. Without this flag it contains GPUs
        only.
    auto: Cardwise created the class.
    untouched: no user has edited the class, so Cardwise may change and delete it.
    """

    name: str
    selector: Selector
    share: ClassShare | None = None
    priority: int = 0
    other: bool = False
    auto: bool = False
    untouched: bool = False


class Classifier:
    """Computes the classes of a card. The classes are cached by the values of the labels that selectors use."""

    def __init__(self, classes: Iterable[ResourceClass]) -> None:
        self._classes = tuple(classes)
        self._priorities = {resource_class.name: resource_class.priority for resource_class in self._classes}
        self._by_name = {resource_class.name: resource_class for resource_class in self._classes}
        self._keys = sorted(
            {key for resource_class in self._classes for key in resource_class.selector.keys}
            | {_KIND_LABEL, _MODEL_LABEL}
        )
        self._classes_by_labels: dict[tuple[str | None, ...], frozenset[str]] = {}
        self._class_of_model: dict[str, frozenset[str]] = {}

    def classes_of(self, labels: Mapping[str, str]) -> frozenset[str]:
        """The names of the classes that select a card or device with these labels, as `card_labels` returns them."""
        selected_values = tuple(map(labels.get, self._keys))
        names_of_classes = self._classes_by_labels.get(selected_values)
        if names_of_classes is None:
            other = labels.get(_KIND_LABEL, GPU_KIND) != GPU_KIND
            names_of_classes = frozenset(
                resource_class.name
                for resource_class in self._classes
                if resource_class.other == other and resource_class.selector.matches(labels)
            )
            if not other:
                names_of_classes |= self.automatic_class_of(labels.get(_MODEL_LABEL, ""))
            if len(self._classes_by_labels) >= _MAX_CACHED:
                self._classes_by_labels.clear()
            if sum(len(text) for text in selected_values if text is not None) <= _MAX_CACHED_LENGTH:
                self._classes_by_labels[selected_values] = names_of_classes
        return names_of_classes

    def automatic_class_of(self, model: str) -> frozenset[str]:
        """The automatic class of a model's cards, even while its object is missing. Empty if a user's class has this
        name, since then the selector of that class decides.
        """
        automatic = self._class_of_model.get(model)
        if automatic is None:
            name = name_of_model(model)
            existing = self._by_name.get(name)
            is_automatic = model and (existing is None or existing.untouched)
            if len(self._class_of_model) >= _MAX_CACHED_MODELS:
                self._class_of_model.clear()
            automatic = self._class_of_model[model] = frozenset({name} if is_automatic else ())
        return automatic

    def select_classes(self, labels: Mapping[str, str]) -> list[ResourceClass]:
        """As `classes_of`, but returns the classes."""
        return [
            self._by_name.get(name) or _build_automatic_class(name, labels[_MODEL_LABEL])
            for name in self.classes_of(labels)
        ]

    def priority_of(self, classes: Iterable[str]) -> int:
        """The highest priority of these classes; 0 if there are none."""
        return max((self._priorities.get(name, 0) for name in classes), default=0)


def _build_automatic_class(name: str, model: str) -> ResourceClass:
    """The automatic class of the model, before its object is created."""
    selector = selectors.parse(auto_spec(model)["selector"], "spec.selector")
    return ResourceClass(name=name, selector=selector, auto=True, untouched=True)


def card_labels(
    *,
    node: str,
    index: int,
    uuid: str,
    model: str,
    memory: MiB = MiB(0),
    properties: Mapping[str, str],
    own: Mapping[str, str],
    kind: str = GPU_KIND,
) -> dict[str, str]:
    """The labels that selectors see on a card or on another device; keys in lower case. Only GPUs have a label for
    memory.

    own: the labels of the card's ExtendedResource. `names.NODE_LABEL` is left out, because `node` has the same value.
    """
    own_labels = {key: label_value for key, label_value in own.items() if key != names.NODE_LABEL}
    all_labels = {
        key.lower(): label_value for source in (own_labels, properties) for key, label_value in sorted(source.items())
    }
    all_labels |= {
        _KIND_LABEL: kind, "model": model, "node": node, "hostname": node, "index": str(index), "uuid": uuid,
    }  # fmt: skip
    return all_labels | {"memory": f"{memory}Mi"} if kind == GPU_KIND else all_labels


def max_shares(mem: MiB, resource_class: ResourceClass) -> int:
    """The maximum number of units of the class that the containers on one card can request together.

    A container counts 1 for each of its cards. If the class defines a share, a container that requests n units
    counts as n; the card's memory limits the sum of these units.
    """
    share = resource_class.share
    return CAPACITY_PER_CARD + (mem // share.memory if share is not None else 0)


def parse(manifest: Mapping[str, Any]) -> ResourceClass:
    """A ResourceClass object from its decoded JSON. Raises InvalidRequest."""
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec")
    name = metadata.get("name") or ""
    check_name(name)
    if not isinstance(spec, Mapping):
        raise InvalidRequest("spec", "is missing", "write spec.selector, which selects the GPUs of the class")
    _check_fields(spec, _SPEC_FIELDS, "spec", "a ResourceClass")
    written_fields = [field for field in _SELECTOR_FIELDS if field in spec]
    if len(written_fields) > 1:
        raise InvalidRequest(
            f"spec.{written_fields[1]}", f"spec.{written_fields[0]} is also set", "write only one of them"
        )
    field = written_fields[0] if written_fields else "selector"
    priority = spec.get("priority", 0)
    if type(priority) is not int or priority not in _PRIORITIES:
        raise InvalidRequest(
            "spec.priority", f"{quote_text(priority)} is out of range", "write a whole number such as 10"
        )
    selector = selectors.parse(spec.get(field), f"spec.{field}")
    share = _parse_share(spec["share"]) if spec.get("share") is not None else None
    other = _selects_other_devices(selector, f"spec.{field}")
    if other and share is not None:
        raise InvalidRequest("spec.share", "is only for GPUs; a device is always given whole", "leave it out")
    return ResourceClass(
        name=name,
        selector=selector,
        share=share,
        priority=priority,
        other=other,
        auto=_is_automatic_class(manifest),
        untouched=bool(auto_models(manifest)),
    )


def check_name(name: str, field: str = "metadata.name") -> None:
    """Check the name of a class. Raises InvalidRequest."""
    if len(name) > _MAX_NAME_LENGTH or not objectnames.is_subdomain(name):
        raise InvalidRequest(
            field,
            f"{quote_text(name)} is not a name of a class",
            f"write at most {_MAX_NAME_LENGTH} of a-z, 0-9, '-' and '.', such as nvidia.tesla.k80",
        )
    if name in _RESERVED_NAMES or name.startswith(_RESERVED_PREFIXES):
        raise InvalidRequest(
            field,
            f"{quote_text(name)} is reserved for another resource name",
            f"choose another name, such as nvidia.{name}",
        )


def is_name(name: str) -> bool:
    """Whether a class may have this name."""
    try:
        check_name(name)
    except InvalidRequest:
        return False
    return True


def is_bare_class_name(name: str, exists: Callable[[str], bool]) -> bool:
    """Whether a resource name without a domain means a class. Kubernetes would refuse such a name."""
    return is_name(name) and ("." in name or exists(name))


def _selects_other_devices(selector: Selector, field: str) -> bool:
    """Whether the selector selects devices other than GPUs. Raises InvalidRequest if it selects both."""
    kinds = frozenset().union(*map(_selected_kinds, selector.alternatives))
    other_kinds = kinds - {GPU_KIND}
    if other_kinds and GPU_KIND in kinds:
        raise InvalidRequest(
            field,
            f"selects GPUs and other devices ({', '.join(sorted(other_kinds))}), which cannot be in one class",
            f"write a class for each, and name the kind in every alternative; without a kind it selects {GPU_KIND}",
        )
    return bool(other_kinds)


def _selected_kinds(conditions: Iterable[Expression]) -> frozenset[str]:
    """The device kinds that an alternative of a selector selects; GPUs if no condition names a kind."""
    kinds_by_condition = [
        condition.texts for condition in conditions if (condition.key, condition.operator) == (_KIND_LABEL, "In")
    ]
    return frozenset.intersection(*kinds_by_condition) if kinds_by_condition else frozenset({GPU_KIND})


def _check_fields(mapping: Mapping[str, Any], fields: Iterable[str], field: str, noun: str) -> None:
    for name in mapping:
        if name not in fields:
            raise InvalidRequest(f"{field}.{name}", f"is not a field of {noun}", f"write {', '.join(fields)}")


def _parse_share(share: object) -> ClassShare:
    if not isinstance(share, Mapping):
        raise InvalidRequest(
            "spec.share", f"{quote_text(share)} is not a share", f"write a map with {', '.join(_SHARE_FIELDS)}"
        )
    _check_fields(share, _SHARE_FIELDS, "spec.share", "a share")
    memory, core = share.get("memoryMiB"), share.get("corePercent", 0)
    if type(memory) is not int and not isinstance(memory, str):
        problem = "is missing" if memory is None else f"{quote_text(memory)} is not an amount of memory"
        remedy = "write MiB such as 8138, or a quantity such as 8Gi; without a share, one of the class is a whole GPU"
        raise InvalidRequest("spec.share.memoryMiB", problem, remedy)
    try:
        mib = quantity.parse_mib(amounts.to_kubernetes_spelling(str(memory)))
    except InvalidQuantity as error:
        raise InvalidRequest("spec.share.memoryMiB", error.problem, error.remedy) from error
    if "corePercent" in share and (type(core) is not int or not 1 <= core <= FULL_CORE):
        remedy = f"write a whole number from 1 to {FULL_CORE}, or leave it out"
        raise InvalidRequest("spec.share.corePercent", f"{quote_text(core)} is out of range", remedy)
    return ClassShare(memory=mib, core=Percent(core))


def name_of_model(model: str) -> str:
    """The name of a model's automatic class, such as nvidia.tesla.k80 for Tesla K80."""
    return ".".join(_name_parts(model))[:_MAX_NAME_LENGTH].rstrip(".-")


def accelerator_of_model(model: str) -> str:
    """The value of a node's label `accelerator`, such as nvidia-tesla-k80 for Tesla K80."""
    return "-".join(_name_parts(model))[:_MAX_LABEL_LENGTH].rstrip("-")


def _name_parts(model: str) -> list[str]:
    cleaned = (re.sub(r"[^a-z0-9]", "-", part).strip("-") for part in re.split(r"[\s.]+", model.lower()))
    parts = [part for part in cleaned if part]
    if parts[:1] == ["nvidia"]:  # newer drivers write "NVIDIA" before the model, older drivers do not
        parts = parts[1:]
    return ["nvidia", *(parts or ["gpu"])]


def auto_spec(*models: str) -> dict[str, Any]:
    """The spec of the automatic class of a model, or of several models with the same class name."""
    if len(models) == 1:
        return {"selector": {"matchLabels": {_MODEL_LABEL: models[0]}}}
    return {"selector": {"matchExpressions": [{"key": _MODEL_LABEL, "operator": "In", "values": sorted(models)}]}}


def auto_models(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The models of an automatic class that no user has edited.

    Empty for a class that a user created or edited, and for a copy with another name, which belongs to the user.
    """
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec") or {}
    text = (metadata.get("annotations") or {}).get(names.AUTO_SPEC)
    if not _is_automatic_class(manifest) or text is None:
        return ()
    try:
        recorded_spec = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    models = _selected_models(spec.get("selector"))
    is_unchanged = isinstance(recorded_spec, dict) and recorded_spec == auto_spec(*models) == _drop_default_priority(
        spec
    )
    has_automatic_name = all(name_of_model(model) == metadata.get("name") for model in models)
    return models if models and is_unchanged and has_automatic_name else ()


def _selected_models(selector: object) -> tuple[str, ...]:
    """The models that the selector of an automatic class names; empty for other selectors."""
    match selector:
        case {"matchLabels": {"model": str(model)}}:
            return (model,)
        case {"matchExpressions": [{"values": [*models]}]} if all(isinstance(model, str) for model in models):
            return tuple(models)
    return ()


def _is_automatic_class(manifest: Mapping[str, Any]) -> bool:
    return ((manifest.get("metadata") or {}).get("labels") or {}).get(names.AUTO_LABEL) == "true"


def _drop_default_priority(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec without the default priority, which the API server adds."""
    return {key: setting for key, setting in spec.items() if (key, setting) != ("priority", 0)}
