"""The annotations of a pod that only Cardwise may write, and the placement policy of its namespace.

Annotations that users may not set are removed with a warning instead of refused, so that copies of running pods and
restored backups can be created.
"""

from typing import Final

from cardwise.core.api import lookalikes, names, request
from cardwise.core.values import wording
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview

_MAX_SUGGESTIONS: Final = 8  # unknown annotations for which a suggestion is computed


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
