"""The number of pods of a gang: all its members must name the same."""

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod if existing members of its gang name another number. Raises InvalidRequest."""
    gang = pod.gang
    if context.is_template or gang is None or gang.minimum is None:
        return
    conflict = context.cluster.conflicting_member(context.namespace, gang.name, gang.minimum)
    if conflict is not None:
        name, number = conflict
        detailed = context.settings.callers_known
        raise InvalidRequest(
            f"metadata.{'annotations' if names.GROUP_NUM in pod.annotations else 'labels'}[{names.GROUP_NUM}]",
            f"{gang.minimum} differs from the number of {f'pod {name}' if detailed else 'another pod'} of the same gang"
            + (f", {number}" if detailed else ""),
            f"write {number if detailed else 'that number'}, or another {names.GROUP_NAME}",
        )
