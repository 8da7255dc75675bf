"""GPU resources of other domains that no node offers: misspelled, or of another GPU sharer."""

from typing import Final

from cardwise.core.api import lookalikes, names
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.templates.containers import amount_lists
from webhook.templates.spellings import is_zero

_MAX_WARNINGS: Final = 8


def validate(pod: PodUnderReview, context: Context) -> None:
    """Warn about such resources. Never a refusal: a node may offer them later."""
    offers = context.cluster.offers()
    if offers is None:
        return
    offered_names = offers.resources()
    known_names = (*sorted(offered_names), *context.cluster.classes())
    warnings: dict[str, str] = {}
    for container in pod.containers:
        for kind, amounts in amount_lists(container.spec.get("resources") or {}):
            for name, amount in amounts.items():
                if name in warnings or name in offered_names or _is_known(name) or is_zero(amount):
                    continue
                if len(warnings) >= _MAX_WARNINGS:  # each suggestion compares the name with all known names
                    break
                suggested_name = lookalikes.suggest_resource(name, known_names)
                remedy = f"did you mean {suggested_name}?" if suggested_name else "the pod waits until a node does"
                if lookalikes.is_of_other_vendor(name):
                    remedy = f"{remedy}; Cardwise shares NVIDIA GPUs only"
                warnings[name] = f"{container.path}.resources.{kind}[{name}]: no node offers it; {remedy}"
    pod.warnings += warnings.values()


def _is_known(name: str) -> bool:
    """Whether a resource name has a meaning even if no node offers it."""
    return not lookalikes.is_like_gpu(name) or name in names.REQUESTED or name.startswith(names.CLASS_PREFIX)
