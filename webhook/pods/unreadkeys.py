"""Annotations and labels that no program reads: misspelled, or of another GPU sharer or gang scheduler."""

from itertools import islice
from typing import Final

from cardwise.core.api import lookalikes, names
from cardwise.core.values.decoded import Json
from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview

_MAX_WARNINGS: Final = 8
# Maximum number of unknown keys of an object that get a suggestion, since each is compared with all keys that Cardwise
# reads.
_MAX_COMPARED: Final = 16


def validate(pod: PodUnderReview, context: Context) -> None:
    """Warn about such keys. The gang keys of a pod with another scheduler may be meant for that scheduler."""
    schedulers = context.settings.gang_schedulers
    if schedulers and (pod.spec.get("schedulerName") or DEFAULT_SCHEDULER) not in schedulers:
        return
    warnings = []
    for part, keys in (("annotations", pod.annotations), ("labels", pod.labels)):
        for key in keys_to_compare(keys):
            field = f"metadata.{part}[{key}]"
            if suggested_name := lookalikes.suggest_pod_key(key, keys[key]):
                warnings.append(f"{field}: Cardwise does not read it; did you mean {suggested_name}?")
            elif part == "labels" and key in names.USER_ANNOTATIONS:
                warnings.append(f"{field}: Cardwise reads it as an annotation only")
    pod.warnings += warnings[:_MAX_WARNINGS]


def keys_to_compare(keys: Json) -> list[str]:
    """The annotations or labels that may be meant for Cardwise, at most as many as may be compared."""
    return list(islice(filter(lookalikes.is_like_own, sorted(keys)), _MAX_COMPARED))
