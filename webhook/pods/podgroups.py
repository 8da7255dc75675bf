"""The gang of a pod by what it requests: a PodGroup of Kubernetes, or the scheduler that the pod will get."""

from webhook.pods import membership
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Read the request, and find the gang of a pod that requests cards or devices. Raises InvalidRequest, KubeError."""
    if pod.read_request() is not None and pod.gang is None:
        scheduler = context.settings.scheduler
        pod.gang = membership.gang_of_requester(pod, context, scheduler)
        pod.names_unserved_podgroup = pod.gang is None and membership.names_podgroup(pod, context, scheduler)
