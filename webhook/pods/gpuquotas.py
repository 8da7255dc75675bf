"""GPUQuotas at admission: early refusals of pods.

Which entries count a pod depends on its node, so only the extender can check quotas exactly. Here a pod is refused only
if the entry certainly counts it: the pod names the entry's class, or the entry is for all GPUs.
"""

from collections.abc import Callable, Iterable

from cardwise.core.api import quotas
from cardwise.core.api.quotas import NO_CHARGE, Charge, QuotaEntry
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.core.values.shellcommand import command
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import collect_warnings

MinShareOf = Callable[[ContainerRequest], MiB]


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod that the GPUQuotas of its namespace do not allow. Raises InvalidRequest, KubeError."""
    if (pod_request := pod.request) is None:
        return
    cluster, detailed = context.cluster, context.settings.callers_known
    quota_usages = cluster.quotas(context.namespace)

    def smallest(container: ContainerRequest) -> MiB:
        resource_class = cluster.resource_class(container.resource_class) if container.resource_class else None
        return max(cluster.cards(resource_class).smallest, MiB(1))

    def check_with_smallest_cards() -> tuple[str, ...]:
        check_request(pod_request, quota_usages, smallest, detailed=detailed)
        return ()

    check_request(pod_request, quota_usages, detailed=detailed)
    pod.warnings += collect_warnings(
        context.settings.oversize, check_with_smallest_cards, "a node with a smaller GPU joins or the quota is raised"
    )


def check_request(
    pod_request: PodRequest,
    quota_usages: Iterable[QuotaUsage],
    smallest: MinShareOf = lambda _: MiB(1),
    *,
    detailed: bool = True,
) -> None:
    """Refuse a pod that can never run under one of its quotas. A quota with `Refuse` also refuses pods that do not fit
    now.

    smallest: returns the MiB of the smallest card that a container could get.
    detailed: whether the caller may see the names of quotas and the used amounts.

    Raises InvalidRequest.
    """
    for quota_usage in quota_usages:
        quota = quota_usage.quota
        for i, entry in enumerate(quota.entries):
            requested = quotas.sum_charges(
                _least_charge(container, smallest)
                for container in pod_request.containers
                if _surely_counts(entry, container)
            )
            if requested == NO_CHARGE:
                continue
            used = quota_usage.used_by(entry)
            if exceeded_limits := quotas.exceeded_limits(entry, NO_CHARGE, requested):
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
                for limit in quotas.entry_limits(entry, used, requested)
                if limit.field in fields
            )
            raise InvalidRequest(
                f"GPUQuota {quota.name}: spec.hard[{i}] ({_describe_entry(entry)})" if detailed else "GPUQuota",
                f"{problem}: {exceeded}",
                f"{remedy}, or ask an administrator to raise the "
                f"quota{'' if detailed else _describe_usage_command(quota.namespace)}",
            )


def _surely_counts(entry: QuotaEntry, container: ContainerRequest) -> bool:
    """Whether the entry counts the container, whichever card the container gets."""
    if entry.resource_class:
        return entry.resource_class == container.resource_class
    return not entry.model


def _least_charge(container: ContainerRequest, smallest: MinShareOf) -> Charge:
    """The smallest charge that the container can cause. The card of a whole-card request is not known yet."""
    return quotas.min_charge_of_share(container.cards, container.mem, smallest(container) if container.whole else 0)


def _describe_usage_command(namespace: str) -> str:
    """The end of a remedy: a command that shows the used and the hard amounts, for users who may read the namespace's
    quotas.
    """
    show = command("kubectl get gpuquotas -n {namespace}", namespace=namespace)
    return f"; the GPUQuotas of namespace {namespace} show what is used and allowed: {show}"


def _describe_entry(entry: QuotaEntry) -> str:
    return f"class {entry.resource_class}" if entry.resource_class else "every GPU"
