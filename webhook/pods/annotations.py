"""The annotations of a pod that only Cardwise may write, the placement policy of its namespace, and annotations and
labels that no program reads.

Annotations that only Cardwise may set are removed with a warning. They are not refused, because copies of running pods
and restored backups contain them.
"""

from itertools import islice
from typing import Final

from cardwise.core.api import lookalikes, names, request
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview

_MAX_SUGGESTIONS: Final = 8  # unknown annotations for which a suggestion is computed
_MAX_WARNINGS: Final = 8
# Maximum number of unknown keys of an object that get a suggestion, since each is compared with all keys that Cardwise
# reads.
_MAX_COMPARED: Final = 16


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Remove placement annotations, and write the numbers of cards of split shares and the placement policy."""
    before = pod.annotations
    counts = request.write_counts(pod.cards.values())
    count_annotation = {names.GPU_COUNTS: counts} if counts else {}
    # The annotation with the device classes is new: it is written before the request is parsed, which needs it.
    kept_keys = {names.DEVICE_CLASSES, *count_annotation}
    removed_keys = {key for key in before if names.is_placement_annotation(key) and key not in kept_keys}
    if removed_keys:
        _warn_removed(pod, removed_keys)
    after = {key: text for key, text in before.items() if key not in removed_keys} | count_annotation
    if pod.cards and pod.defaults.policy:
        after.setdefault(names.POLICY, pod.defaults.policy)
    if after != before:
        pod.annotations = after


def validate_unread(pod: PodUnderReview, context: Context) -> None:
    """Warn about annotations and labels that no program reads. The gang keys of a pod with another scheduler may be
    meant for that scheduler.
    """
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


def _warn_removed(pod: PodUnderReview, removed_keys: set[str]) -> None:
    # Each key is compared with all known annotations.
    suggestions = {
        key: suggested_name
        for key in sorted(removed_keys)[:_MAX_SUGGESTIONS]
        if (suggested_name := lookalikes.suggest_annotation(key))
    }
    pod.warnings += [
        f"metadata.annotations[{key}]: removed; did you mean {suggested_name}?"
        for key, suggested_name in sorted(suggestions.items())
    ]
    reasons: dict[str, list[str]] = {}
    for key in sorted(removed_keys - suggestions.keys()):
        reasons.setdefault(_reason_for_removal(key), []).append(key)
    pod.warnings += [
        f"metadata.annotations: removed {wording.enumerate_first(keys, 3)}; {reason}"
        for reason, keys in reasons.items()
    ]


def _reason_for_removal(key: str) -> str:
    """Why the webhook removes an annotation of the author."""
    if names.is_written_by_cardwise(key):
        return "only Cardwise may write this"
    if lookalikes.is_namespace_annotation(key):
        return "Cardwise reads this on namespaces only"
    return "Cardwise does not know this annotation"


def keys_to_compare(keys: Json) -> list[str]:
    """The annotations or labels that may be meant for Cardwise, at most as many as may be compared."""
    return list(islice(filter(lookalikes.is_like_own, sorted(keys)), _MAX_COMPARED))
