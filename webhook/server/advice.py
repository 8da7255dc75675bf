"""Warnings about objects that Kubernetes accepts but that have no effect, such as quotas that count nothing. Pods are
not checked here.

Never a refusal: a node, a scheduler or a class may be created later.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from webhook.pods import annotations as pod_annotations
from webhook.templates import containers, records
from webhook.templates.spellings import counted_resource, is_zero

KUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"  # the label of workloads that Kueue manages
_MAX_WARNINGS: Final = 8  # maximum number of warnings about names that no node offers
_RANGE_FIELDS: Final = ("max", "min", "default", "defaultRequest")  # of a LimitRange
_UPPER_RANGE_FIELDS: Final = ("max", "default", "defaultRequest")  # the ranges that set or limit the size of a share


def warn_namespace(manifest: Json) -> tuple[str, ...]:
    """Warnings about a namespace's defaults that have no effect."""
    annotations, labels = annotations_of(manifest), labels_of(manifest)
    warnings: list[str] = []
    for part, metadata in (("annotations", annotations), ("labels", labels)):
        for key in pod_annotations.keys_to_compare(metadata):
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
            for key in namespaces.DEFAULTS_ANNOTATIONS
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
    if shares := hard.get(quotas.SHARES_QUOTA_KEY):
        warnings += _warn_small_amount(f"spec.hard[{quotas.SHARES_QUOTA_KEY}]", shares, min_share)
    uncounted_entry = quotas.unlimited_amount_key(hard)
    if uncounted_entry is not None and any(
        quotas.counts_in_place_of(quota_usage.quota, uncounted_entry) for quota_usage in quota_usages
    ):
        uncounted_entry = None
    if (
        uncounted_entry == quotas.SHARES_QUOTA_KEY
        and quotas.WHOLE_CARDS_QUOTA_KEY in unchanged_amounts
        and not is_zero(hard[quotas.WHOLE_CARDS_QUOTA_KEY])
    ):
        warnings.append(
            f"spec.hard[{quotas.WHOLE_CARDS_QUOTA_KEY}]: counts whole GPUs only, so pods that request {names.GPU_MEM} "
            f"have no limit; add {uncounted_entry} or a GPUQuota, or ignore this if another quota limits such pods"
        )
    elif uncounted_entry == quotas.WHOLE_CARDS_QUOTA_KEY:
        warnings.append(
            f"spec.hard[{quotas.SHARES_QUOTA_KEY}]: counts shares only, so pods that request {names.GPU_COUNT} or a "
            f"class have no limit; add {uncounted_entry} or a GPUQuota, or ignore this if another quota limits such "
            "pods"
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
        for name in _RANGE_FIELDS
        for key, reason in _uncounted_keys(
            entry.get(name) or {}, offers, known_classes, comparisons, quota_key=lambda suggested_name: suggested_name
        )
    )
    warnings = list(islice(uncounted, _MAX_WARNINGS))
    for i, entry in enumerate(entries):
        for name in _UPPER_RANGE_FIELDS:
            if upper := (entry.get(name) or {}).get(names.GPU_MEM):
                warnings += _warn_small_amount(f"spec.limits[{i}].{name}[{names.GPU_MEM}]", upper, min_share)
    return tuple(warnings[:_MAX_WARNINGS])


def _warn_small_amount(field: str, amount: str | int, min_share: int) -> list[str]:
    """The warning about a stored gpu-mem amount that is too small for a useful share: its unit is probably missing."""
    try:
        mib = quantity.parse_mib(amount)
    except quantity.InvalidQuantity:
        return []  # zero is valid: it allows no share
    if mib >= min_share:
        return []
    problem = f"{mib} means {mib} MiB, less than most programs need to start on a GPU ({min_share} MiB)"
    return [f"{field}: {problem}; did you mean {mib}Gi?"]


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
                suggested_name = _suggest_class_resource(class_name, known_classes) if comparisons.begin() else None
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


def _suggest_class_resource(name: str, class_names: Iterable[str]) -> str | None:
    """The resource of an existing class with a similar name, for a resource of an unknown class; None for none."""
    if suggested_name := lookalikes.suggest_class(name, class_names):
        return names.CLASS_PREFIX + suggested_name
    return lookalikes.suggest_resource(names.CLASS_PREFIX + name)


def warn_kueue_amounts(template: Json, unit: Unit) -> tuple[str, ...]:
    """Warnings about a template whose workload is queued by Kueue. Kueue adds up the written numbers and knows no
    units, so it counts correctly only bare numbers of one `unit`.
    """
    warnings = []
    for container in request.containers(template):
        for kind, amounts in containers.amount_lists(container.spec.get("resources") or {}):
            amount = str(amounts.get(names.GPU_MEM, ""))
            try:
                number = quantity.parse_amount(amount).number
                in_unit = Fraction(quantity.parse_mib(quantity.with_unit(amount, unit)), unit.mib)
            except quantity.InvalidQuantity:
                continue  # the validation of the pod reports it
            if number != in_unit:
                field = f"{container.path}.resources.{kind}[{names.GPU_MEM}]"
                is_whole_number = in_unit.denominator == 1
                remedy = f"{in_unit}, which is the same in {unit}" if is_whole_number else f"whole {unit}"
                warnings.append(f"{field}: Kueue ignores units and would count {amount} as {number}; write {remedy}")
    return tuple(warnings)
