"""Warnings at creation about objects that Kubernetes accepts but that have no effect: pods that stay pending, unread
annotations, quotas that count nothing.

Never a refusal: a node, a scheduler or a class may be created later.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from typing import Final

from cardwise.core.api import lookalikes, names, quotas, request
from cardwise.core.values import quantity, wording
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.quantity import Unit
from webhook.cluster import namespaces
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.cluster.offers import NodeOffers
from webhook.pods.context import DEFAULT_SCHEDULER
from webhook.templates import containers, records
from webhook.templates.spellings import counted_resource, is_zero

QUEUE: Final = "kueue.x-k8s.io/queue-name"  # the label of workloads that Kueue manages
_MAX_WARNINGS: Final = 8  # the most warnings about names that no node offers
_MAX_SHOWN_KEYS: Final = 4  # the most keys of a node selector in a warning
# The most unknown keys of an object that get a suggestion, since each is compared with all keys that Cardwise reads.
_MAX_COMPARED: Final = 16
_RANGES: Final = ("max", "min", "default", "defaultRequest")  # of a LimitRange
_UPPER_RANGES: Final = ("max", "default", "defaultRequest")  # the ranges that set or limit the size of a share


def warn_foreign_resources(pod: Json, offers: NodeOffers, classes: Iterable[str]) -> tuple[str, ...]:
    """Warnings about GPU resources of other domains that no node offers: misspelled, or of another GPU sharer."""
    offered_names = offers.resources()
    known_names = (*sorted(offered_names), *classes)
    warnings: dict[str, str] = {}
    for container in request.containers(pod):
        for kind, amounts in containers.amount_lists(container.spec.get("resources") or {}):
            for name, amount in amounts.items():
                if name in warnings or name in offered_names or _is_known(name) or is_zero(amount):
                    continue
                if len(warnings) >= _MAX_WARNINGS:  # each suggestion compares the name with all known names
                    return tuple(warnings.values())
                suggested_name = lookalikes.suggest_resource(name, known_names)
                remedy = f"did you mean {suggested_name}?" if suggested_name else "the pod waits until a node does"
                if lookalikes.is_of_other_vendor(name):
                    remedy = f"{remedy}; Cardwise shares NVIDIA GPUs only"
                warnings[name] = f"{container.path}.resources.{kind}[{name}]: no node offers it; {remedy}"
    return tuple(warnings.values())


def warn_unread_keys(pod: Json, schedulers: Collection[str]) -> tuple[str, ...]:
    """Warnings about a pod's annotations and labels that no program reads: misspelled, or of another GPU sharer or gang
    scheduler.

    The gang keys of a pod with another scheduler may be meant for that scheduler.

    schedulers: the schedulers that call the extender.
    """
    scheduler = (pod.get("spec") or {}).get("schedulerName") or DEFAULT_SCHEDULER
    if schedulers and scheduler not in schedulers:
        return ()
    warnings = []
    for part, metadata in (("annotations", annotations_of(pod)), ("labels", labels_of(pod))):
        for key in _keys_to_compare(metadata):
            field = f"metadata.{part}[{key}]"
            if suggested_name := lookalikes.suggest_pod_key(key, metadata[key]):
                warnings.append(f"{field}: Cardwise does not read it; did you mean {suggested_name}?")
            elif part == "labels" and key in names.USER_ANNOTATIONS:
                warnings.append(f"{field}: Cardwise reads it as an annotation only")
    return tuple(warnings[:_MAX_WARNINGS])


def warn_namespace(manifest: Json) -> tuple[str, ...]:
    """Warnings about a namespace's defaults that have no effect."""
    annotations, labels = annotations_of(manifest), labels_of(manifest)
    warnings: list[str] = []
    for part, metadata in (("annotations", annotations), ("labels", labels)):
        for key in _keys_to_compare(metadata):
            field = f"metadata.{part}[{key}]"
            if suggested_name := lookalikes.suggest_namespace_key(key, label=part == "labels"):
                warnings.append(f"{field}: Cardwise does not read it; did you mean {suggested_name}?")
            elif lookalikes.is_unread_namespace_key(key, label=part == "labels"):
                warnings.append(f"{field}: Cardwise does not read it on a namespace")
    opted_in = labels.get(names.DEFAULTS_LABEL)
    if opted_in not in (None, namespaces.ENABLED, namespaces.DISABLED):
        field = f"metadata.labels[{names.DEFAULTS_LABEL}]"
        warnings.append(
            f"{field}: {wording.quote_text(opted_in)} does not enable the defaults; write {namespaces.ENABLED}"
        )
    elif opted_in is None:
        warnings += [
            f"metadata.annotations[{key}]: has no effect without the label {names.DEFAULTS_LABEL}={namespaces.ENABLED}"
            for key in namespaces.KEYS
            if key in annotations
        ]
    return tuple(warnings[:_MAX_WARNINGS])


def warn_resource_quota(
    manifest: Json,
    quota_usages: Iterable[QuotaUsage],
    offers: NodeOffers | None,
    known_classes: Mapping[str, object],
    min_share: int = 0,
) -> tuple[str, ...]:
    """Warnings about a ResourceQuota that counts less than it seems to, or allows less than one useful share.

    quota_usages: the GPUQuotas of its namespace.
    known_classes: the ResourceClasses.
    min_share: MiB below which most programs do not start.
    """
    hard = (manifest.get("spec") or {}).get("hard") or {}
    # The author has got a warning about these keys already.
    rewritten_keys = frozenset(records.read_record(manifest).get("hard", ()))
    unchanged_amounts = {key: amount for key, amount in hard.items() if key not in rewritten_keys}
    uncounted = islice(_uncounted_keys(unchanged_amounts, offers, known_classes, _Comparisons()), _MAX_WARNINGS)
    warnings = [f"spec.hard[{key}]: {reason}" for key, reason in uncounted]
    if shares := hard.get(quotas.SHARES):
        warnings += _warn_small_amount(f"spec.hard[{quotas.SHARES}]", shares, min_share)
    uncounted_entry = quotas.unlimited_amount_key(hard)
    if any(quotas.counts_in_place_of(quota_usage.quota, uncounted_entry) for quota_usage in quota_usages):
        uncounted_entry = ""
    if (
        uncounted_entry == quotas.SHARES
        and quotas.WHOLE_CARDS in unchanged_amounts
        and not is_zero(hard[quotas.WHOLE_CARDS])
    ):
        warnings.append(
            f"spec.hard[{quotas.WHOLE_CARDS}]: does not count shares: pods that request {names.GPU_MEM} are not "
            f"limited by it; add {uncounted_entry}, or a GPUQuota, unless another quota of the namespace counts them"
        )
    elif uncounted_entry == quotas.WHOLE_CARDS:
        warnings.append(
            f"spec.hard[{quotas.SHARES}]: does not count whole GPUs: pods that request {names.GPU_COUNT} or a class "
            f"are not limited by it; add {uncounted_entry}, or a GPUQuota, unless another quota of the namespace "
            "counts them"
        )
    return tuple(warnings[:_MAX_WARNINGS])


def warn_limit_range(
    manifest: Json, offers: NodeOffers | None, known_classes: Mapping[str, object], min_share: int = 0
) -> tuple[str, ...]:
    """Warnings about a LimitRange: resources that no container can have, and limits below any useful share.

    known_classes: the ResourceClasses.
    min_share: MiB below which most programs do not start.
    """
    entries = (manifest.get("spec") or {}).get("limits") or ()
    comparisons = _Comparisons()
    uncounted = (
        f"spec.limits[{i}].{name}[{key}]: {reason}"
        for i, entry in enumerate(entries)
        for name in _RANGES
        for key, reason in _uncounted_keys(
            entry.get(name) or {}, offers, known_classes, comparisons, quota_key=lambda suggested_name: suggested_name
        )
    )
    warnings = list(islice(uncounted, _MAX_WARNINGS))
    for i, entry in enumerate(entries):
        for name in _UPPER_RANGES:
            if upper := (entry.get(name) or {}).get(names.GPU_MEM):
                warnings += _warn_small_amount(f"spec.limits[{i}].{name}[{names.GPU_MEM}]", upper, min_share)
    return tuple(warnings[:_MAX_WARNINGS])


def _warn_small_amount(field: str, amount: str | int, min_share: int) -> list[str]:
    """The warning about a stored gpu-mem amount that is too small for a useful share: its unit is probably missing."""
    try:
        mib = quantity.memory(amount)
    except quantity.InvalidQuantity:
        return []  # zero is valid: it allows no share
    if mib >= min_share:
        return []
    problem = f"{mib} means {mib} MiB, less than most programs need to start on a GPU ({min_share} MiB)"
    return [f"{field}: {problem}; did you mean {mib}Gi?"]


def _keys_to_compare(metadata: Json) -> list[str]:
    return list(islice(filter(lookalikes.is_like_own, sorted(metadata)), _MAX_COMPARED))


class _Comparisons:
    """The number of names of one object that may still be compared with all known names."""

    def __init__(self) -> None:
        self._remaining = _MAX_WARNINGS

    def begin(self) -> bool:
        """Count one comparison; returns False if no more are allowed."""
        self._remaining -= 1
        return self._remaining >= 0


def _uncounted_keys(
    amounts: Json,
    offers: NodeOffers | None,
    known_classes: Mapping[str, object],
    comparisons: _Comparisons,
    quota_key: Callable[[str], str] = lambda suggested_name: f"requests.{suggested_name}",
) -> Iterator[tuple[str, str]]:
    """The GPU keys that have no effect, each with the reason. `quota_key`: the key of a resource."""
    offered_names = offers.resources() if offers is not None else None
    foreign = []
    for key in sorted(amounts):
        name = counted_resource(key)
        if not lookalikes.is_like_gpu(name) or name in (*names.REQUESTED, *names.OWN_RESOURCES):
            continue
        if class_name := names.class_of(name):
            if class_name not in known_classes:
                suggested_name = _suggest_class_resource(class_name, known_classes) if comparisons.begin() else ""
                hint = f"; did you mean {quota_key(suggested_name)}?" if suggested_name else ""
                yield key, f"there is no ResourceClass {class_name} now; until there is one, it counts nothing{hint}"
        elif offered_names is not None and name not in offered_names:
            foreign.append((key, name))
    candidates = (*sorted(offered_names or ()), *known_classes) if foreign else ()
    for key, name in foreign:
        if not comparisons.begin():
            return
        suggested_name = lookalikes.suggest_resource(name, candidates)
        if suggested_name:
            suggestion = quota_key(suggested_name if "/" in suggested_name else f"{names.CLASS_PREFIX}{suggested_name}")
            yield key, f"no node offers it, so it counts nothing; did you mean {suggestion}?"
        elif not is_zero(amounts[key]):
            yield key, "no node offers it, so it counts nothing until one does"


def _suggest_class_resource(name: str, class_names: Iterable[str]) -> str:
    """The resource of an existing class with a similar name, for a resource of an unknown class; "" for none."""
    if suggested_name := lookalikes.suggest_class(name, class_names):
        return names.CLASS_PREFIX + suggested_name
    return lookalikes.suggest_resource(names.CLASS_PREFIX + name)


def warn_placement(
    pod: Json, schedulers: Collection[str], offers: NodeOffers | None, admitting: Collection[str] | None
) -> tuple[str, ...]:
    """Warnings about a pod that requests cards: its scheduler, its gates, its nodes.

    schedulers: the schedulers that call the extender.
    admitting: as `NodeOffers.admitting_nodes`.
    """
    spec = pod.get("spec") or {}
    warnings = []
    scheduler = spec.get("schedulerName") or DEFAULT_SCHEDULER
    if schedulers and scheduler not in schedulers:
        own_scheduler = DEFAULT_SCHEDULER if DEFAULT_SCHEDULER in schedulers else min(schedulers)
        warnings.append(
            f"spec.schedulerName: {scheduler} does not call Cardwise, so the pod waits and never gets a GPU; remove "
            f"the field, or write {own_scheduler}"
        )
    warnings += [
        f"spec.schedulingGates[{gate['name']}]: the pod waits until this gate is removed{_gate_remover(gate['name'])}"
        for gate in spec.get("schedulingGates") or ()
        if gate.get("name") not in (None, "", names.GANG)
    ]
    if offers is not None and (unmatched := offers.unmatched_entries(spec.get("nodeSelector") or {})):
        shown_labels = ", ".join(unmatched[:_MAX_SHOWN_KEYS])
        warnings.append(
            f"spec.nodeSelector: no node with GPUs has {shown_labels} now; the pod waits until one does"
            f"{_hint_node_label(spec['nodeSelector'], unmatched, offers)}"
        )
    elif admitting is not None and not admitting:
        field = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        warnings.append(f"{field}: no node with GPUs matches it now; the pod waits until one does")
    return tuple(warnings)


def _hint_node_label(selector: Mapping[str, str], unmatched: Collection[str], offers: NodeOffers) -> str:
    """A hint about the label that was probably meant by a node selector's entry which no node with GPUs has; "" if
    unknown.
    """
    label_values = offers.label_values()
    for key, label_value in islice(selector.items(), _MAX_SHOWN_KEYS):
        if f"{key}={label_value}" not in unmatched or label_value in label_values.get(key, ()):
            continue
        if suggested_name := lookalikes.suggest_node_label(key, label_value, label_values):
            return f"; did you mean {suggested_name}?"
        if key not in label_values and (label := lookalikes.suggest_card_label(key) or key) in lookalikes.CARD_LABELS:
            return f"; nodes have no label {label}: to choose a GPU by its {label}, request a ResourceClass"
    return ""


def warn_kueue_amounts(template: Json, unit: Unit) -> tuple[str, ...]:
    """Warnings about a template whose workload is queued by Kueue. Kueue adds up the written numbers and knows no
    units, so it counts correctly only bare numbers of one `unit`.
    """
    warnings = []
    for container in request.containers(template):
        for kind, amounts in containers.amount_lists(container.spec.get("resources") or {}):
            amount = str(amounts.get(names.GPU_MEM, ""))
            try:
                number = quantity.parse(amount)[0]
                in_unit = Fraction(quantity.memory(quantity.with_unit(amount, unit)), unit.mib)
            except quantity.InvalidQuantity:
                continue  # the validation of the pod reports it
            if number != in_unit:
                field = f"{container.path}.resources.{kind}[{names.GPU_MEM}]"
                is_whole_number = in_unit.denominator == 1
                remedy = f"{in_unit}, which is the same in {unit}" if is_whole_number else f"whole {unit}"
                warnings.append(f"{field}: Kueue counts {number} of {amount}; write {remedy}")
    return tuple(warnings)


def _gate_remover(gate: str) -> str:
    return ", by Kueue" if gate.startswith("kueue.x-k8s.io/") else ""


def _is_known(name: str) -> bool:
    """Whether a resource name has a meaning even if no node offers it."""
    return not lookalikes.is_like_gpu(name) or name in names.REQUESTED or name.startswith(names.CLASS_PREFIX)
