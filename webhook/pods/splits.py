"""Refuses a split share whose number of cards is unknown: another webhook has removed it."""

from cardwise.core.api import names, request
from webhook.pods import environment
from webhook.pods.context import Context
from webhook.pods.order import count_removed
from webhook.pods.pod import PodUnderReview


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Refuse the pod instead of making its split share a share of one card. Raises InvalidRequest."""
    counts = request.read_counts(pod.annotations)
    if counts and counts.keys() <= {container.spec.get("name") for container in pod.containers}:
        return  # the annotation belongs to this pod, and names all of its split shares
    for container in pod.containers:
        limits = (container.spec.get("resources") or {}).get("limits") or {}
        is_written = str(limits.get(names.SHARE)) == "1" and names.GPU_MEM in limits and names.GPU_COUNT not in limits
        if is_written and not environment.is_gpu_count_intact(container.spec.get("env") or []):
            raise count_removed(f"{container.path}.env")
