"""With which pods a pod shares its GPUs: the namespace's demand is written into the pod, and values are checked.

Extender and CLI read the demand only from the pod. So pods keep it when the namespace's annotation changes.
"""

from cardwise.core.api import names
from cardwise.core.api.sharing import FIELD, NAMESPACE, check_share_with
from cardwise.core.values.invalid import InvalidRequest
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview


def is_required(context: Context) -> bool:
    """Whether the namespace demands that its pods share GPUs with each other only. Raises InvalidRequest."""
    text = context.defaults.share_with if context.defaults is not None else ""
    if text:
        check_share_with(text, f"namespace {context.namespace}: {FIELD}")
    return bool(text)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Write the namespace's demand into a pod that requests cards. Raises InvalidRequest."""
    if not pod.cards or pod.request is None:
        return
    annotations = pod.annotations
    if names.SHARE_WITH in annotations:
        check_share_with(annotations[names.SHARE_WITH])
    elif is_required(context):
        pod.annotations = annotations | {names.SHARE_WITH: NAMESPACE}


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod without its namespace's demand; where the namespace has a quota on GPUs, a demand of the pod alone.

    A quota counts what pods request, and not the rest of a GPU that no other namespace can use. Raises InvalidRequest.
    """
    if not pod.cards:
        return
    text, required = pod.annotations.get(names.SHARE_WITH), is_required(context)
    if text is None:
        if required:
            raise InvalidRequest(FIELD, "is missing, and the namespace requires it", f"write {NAMESPACE}")
        return
    check_share_with(text)
    quota = None if required else _quota_kind(context)
    if quota is not None:
        problem = f"the namespace has a {quota}, which does not count the rest of a GPU that others cannot use"
        remedy = "leave it out, or let an administrator set it on the namespace for all its pods"
        raise InvalidRequest(FIELD, problem, remedy)


def _quota_kind(context: Context) -> str | None:
    """The kind of a quota on GPUs in the pod's namespace; None if there is none."""
    if context.cluster.quotas(context.namespace):
        return "GPUQuota"
    return "ResourceQuota" if context.cluster.has_gpu_resource_quota(context.namespace) else None
