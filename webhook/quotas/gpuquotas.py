"""GPUQuotas at admission: early refusals of pods, and errors in a quota itself.

The entries to which a pod counts depend on the pod's node, so only the extender can check them exactly. Here a pod is
refused only if it certainly counts to the entry: the pod names the entry's class, or the entry is for all GPUs.
"""

from collections.abc import Callable, Iterable

from cardwise.core.api import classes, lookalikes, names, quotas
from cardwise.core.api.quotas import NOTHING, Charge, QuotaEntry
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.values import amounts, quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.core.values.shellcommand import command
from webhook.cluster.gpuquotas import QuotaUsage, parse
from webhook.templates.spellings import Lookup

Smallest = Callable[[ContainerRequest], MiB]

_MAX_COMPARED = 2  # unknown class names of a quota that get a suggestion: each is compared with all classes


def check_pod(
    pod_request: PodRequest,
    quota_usages: Iterable[QuotaUsage],
    smallest: Smallest = lambda _: MiB(1),
    *,
    detailed: bool = True,
) -> None:
    """Refuse a pod that can never run under a quota, or that does not fit now under a quota with `Refuse`.

    smallest: returns the MiB of the smallest card that a container could get.
    detailed: whether the caller may see the names of quotas and the used amounts.

    Raises InvalidRequest.
    """
    for quota_usage in quota_usages:
        quota = quota_usage.quota
        for i, entry in enumerate(quota.entries):
            requested = quotas.total(
                _least_charge(container, smallest)
                for container in pod_request.containers
                if _surely_counts(entry, container)
            )
            if requested == NOTHING:
                continue
            used = _used(quota_usage, entry)
            if exceeded_limits := quotas.exceeded_limits(entry, NOTHING, requested):
                problem, remedy = "the pod alone requests more than the quota allows", "request less"
            elif quota.refuse and (exceeded_limits := quotas.exceeded_limits(entry, used, requested)):
                problem, remedy = (
                    "the quota has no capacity left for the pod",
                    "create it again when other pods of the namespace have ended",
                )
            else:
                continue
            fields = {limit.field for limit in exceeded_limits}
            exceeded = ", ".join(
                f"{limit.field} requested {limit.requested}"
                + (f", used {limit.used}, hard {limit.hard}" if detailed else "")
                for limit in quotas.limits(entry, used, requested)
                if limit.field in fields
            )
            raise InvalidRequest(
                f"GPUQuota {quota.name}: spec.hard[{i}] ({_describe_entry(entry)})" if detailed else "GPUQuota",
                f"{problem}: {exceeded}",
                f"{remedy}, or ask an administrator to raise the "
                f"quota{'' if detailed else _describe_usage_command(quota.namespace)}",
            )


def check_quota(manifest: Json, lookup: Lookup, known_classes: Iterable[str] = ()) -> tuple[str, ...]:
    """Check a GPUQuota. Returns warnings for its author. Raises InvalidRequest, KubeError.

    known_classes: names of classes, one of which may be suggested for a class that does not exist.
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
                lookalikes.suggest_class(entry.resource_class, candidates) if compared <= _MAX_COMPARED else ""
            )
            hint = f"did you mean {suggested_name}?" if suggested_name else "(kubectl get resourceclass)"
            warnings.append(
                f"{field}.class: there is no ResourceClass {entry.resource_class} now; until there is one, the entry "
                f"limits nothing{';' if suggested_name else ''} {hint}"
            )
        if rounding := quantity.describe_rounding(
            amounts.kubernetes(str(manifest["spec"]["hard"][i].get("memoryMiB", "")))
        ):
            warnings.append(f"{field}.memoryMiB: {rounding}")
        warnings += [
            f"{field}.{limit.field}: {limit.hard} is below the {limit.used} that are used now; running pods keep what "
            "they have, and no pod gets more"
            for limit in quotas.limits(entry, _used(quota_usage, entry))
            if limit.used > limit.hard
        ]
    return tuple(warnings)


def _surely_counts(entry: QuotaEntry, container: ContainerRequest) -> bool:
    """Whether the container counts to the entry with every card that it could get."""
    if entry.resource_class:
        return entry.resource_class == container.resource_class
    return not entry.model


def _least_charge(container: ContainerRequest, smallest: Smallest) -> Charge:
    """The smallest charge that the container can cause. The card of a whole-card request is not known yet."""
    return quotas.min_charge_of_share(container.cards, container.mem, smallest(container) if container.whole else 0)


def _used(quota_usage: QuotaUsage, entry: QuotaEntry) -> Charge:
    return quota_usage.used.get((entry.resource_class, entry.model), NOTHING)


def _describe_usage_command(namespace: str) -> str:
    """The end of a remedy: a command that shows the used and the hard amounts, for users who may read the namespace's
    quotas.
    """
    show = command("kubectl get gpuquotas -n {namespace}", namespace=namespace)
    return f"; the GPUQuotas of namespace {namespace} show what is used and allowed: {show}"


def _describe_entry(entry: QuotaEntry) -> str:
    return f"class {entry.resource_class}" if entry.resource_class else "every GPU"
