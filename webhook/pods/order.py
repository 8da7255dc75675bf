"""Errors about pods that another mutating webhook changed after Cardwise's: docs/design/0030-order-of-webhooks.md."""

from typing import Final

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest

_REMEDY: Final = (
    "keep that webhook from changing it, or give its MutatingWebhookConfiguration a name that sorts before "
    f"{names.WEBHOOK_CONFIGURATION} (kubectl get mutatingwebhookconfigurations)"
)


def changed_later_error(field: str, problem: str) -> InvalidRequest:
    """The refusal of what is not as our mutating webhook leaves it. `problem`: what is wrong with the field."""
    return InvalidRequest(field, f"{problem}: a mutating webhook that runs after Cardwise's has changed it", _REMEDY)


def count_removed(field: str) -> InvalidRequest:
    """The refusal of a share of which nothing says any more over how many cards it is split."""
    problem = (
        f"has {names.SHARE} without the variables that Cardwise writes with it, so the number of GPUs for the share "
        "is unknown: a mutating webhook that runs after Cardwise's has removed them"
    )
    return InvalidRequest(field, problem, f"{_REMEDY}; if you wrote {names.SHARE} yourself, remove it")


def added_later_error(field: str) -> InvalidRequest:
    """The refusal of what our mutating webhook would have rewritten: it has not seen it."""
    problem = (
        "was not rewritten by the Cardwise webhook: a mutating webhook that runs after Cardwise's has added it, or "
        f"MutatingWebhookConfiguration {names.WEBHOOK_CONFIGURATION} or {names.LATE_CONFIGURATION} is missing"
    )
    return InvalidRequest(field, problem, f"{_REMEDY}; `cardwise doctor` shows whether they exist")
