"""The scheduler of pods that request cards or are in a gang, and name none."""

from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Assign the scheduler of the settings."""
    scheduler = context.settings.scheduler
    is_ours = pod.request is not None or pod.gang is not None
    if scheduler and is_ours and (pod.spec.get("schedulerName") or DEFAULT_SCHEDULER) == DEFAULT_SCHEDULER:
        pod.spec["schedulerName"] = scheduler
