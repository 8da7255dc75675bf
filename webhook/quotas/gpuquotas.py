"""Errors in GPUQuotas, and warnings for their authors."""

from collections.abc import Iterable

from cardwise.core.api import classes, lookalikes, names, quotas
from cardwise.core.values import amounts, quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from webhook.cluster.gpuquotas import parse
from webhook.templates.spellings import Lookup

_MAX_COMPARED = 2  # unknown class names of a quota that get a suggestion: each is compared with all classes


def check_quota(manifest: Json, lookup: Lookup, known_classes: Iterable[str] = ()) -> tuple[str, ...]:
    """Check a GPUQuota. Returns warnings for its author. Raises InvalidRequest, KubeError.

    known_classes: the names of existing classes. If the quota names an unknown class, the most similar one is
        suggested.
    """
    quota_usage = parse(manifest)
    candidates = sorted(known_classes)
    compared = 0
    warnings = []
    for i, entry in enumerate(quota_usage.quota.entries):
        field = f"spec.hard[{i}]"
        if entry.resource_class:
            classes.check_name(entry.resource_class, f"{field}.class")
        resource_class = lookup(entry.resource_class) if entry.resource_class else None
        if resource_class is not None and resource_class.other:
            raise InvalidRequest(
                f"{field}.class",
                f"{resource_class.name} is a class of devices other than GPUs, and a GPUQuota counts GPUs only",
                f"write requests.{names.CLASS_PREFIX}{resource_class.name} in spec.hard of a ResourceQuota",
            )
        if entry.resource_class and resource_class is None:
            compared += 1
            suggested_name = (
                lookalikes.suggest_class(entry.resource_class, candidates) if compared <= _MAX_COMPARED else None
            )
            hint = f"did you mean {suggested_name}?" if suggested_name else "(kubectl get resourceclass)"
            warnings.append(
                f"{field}.class: there is no ResourceClass {entry.resource_class} now; until there is one, the entry "
                f"limits nothing{';' if suggested_name else ''} {hint}"
            )
        if rounding := quantity.describe_rounding(
            amounts.to_kubernetes_spelling(str(manifest["spec"]["hard"][i].get("memoryMiB", "")))
        ):
            warnings.append(f"{field}.memoryMiB: {rounding}")
        warnings += [
            f"{field}.{limit.field}: {limit.hard} is below the {limit.used} that are used now; running pods keep what "
            "they have, and no pod gets more"
            for limit in quotas.entry_limits(entry, quota_usage.used_by(entry))
            if limit.used > limit.hard
        ]
    return tuple(warnings)
