"""The scheduler of pods that request cards or are in a gang, and name none."""

from cardwise.core.api import names
from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Assign the scheduler of the settings."""
    scheduler = context.settings.scheduler
    is_ours = pod.request is not None or pod.gang is not None
    if scheduler and is_ours and (pod.spec.get("schedulerName") or DEFAULT_SCHEDULER) == DEFAULT_SCHEDULER:
        pod.spec["schedulerName"] = scheduler


def validate(pod: PodUnderReview, context: Context) -> None:
    """Warn about a scheduler that does not call Cardwise, and about scheduling gates of other controllers."""
    if pod.request is None:
        return
    schedulers, scheduler = context.settings.gang_schedulers, pod.spec.get("schedulerName") or DEFAULT_SCHEDULER
    if schedulers and scheduler not in schedulers:
        own_scheduler = DEFAULT_SCHEDULER if DEFAULT_SCHEDULER in schedulers else min(schedulers)
        pod.warnings.append(
            f"spec.schedulerName: {scheduler} does not call Cardwise, so the pod waits and never gets a GPU; remove "
            f"the field, or write {own_scheduler}"
        )
    pod.warnings += [
        f"spec.schedulingGates[{gate['name']}]: the pod waits until this gate is removed{_gate_remover(gate['name'])}"
        for gate in pod.spec.get("schedulingGates") or ()
        if gate.get("name") not in (None, "", names.GANG)
    ]


def _gate_remover(gate: str) -> str:
    return ", by Kueue" if gate.startswith("kueue.x-k8s.io/") else ""
