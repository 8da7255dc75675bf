"""Refusals that several rules share. They refuse requests that no present node can serve, and pods that another
mutating webhook has changed after Cardwise's webhook (docs/design/0030-order-of-webhooks.md).
"""

from collections.abc import Callable, Iterable
from typing import Final

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest
from webhook.pods.context import OversizePolicy

_REMEDY: Final = (
    "keep that webhook from changing it, or give its MutatingWebhookConfiguration a name that sorts before "
    f"{names.WEBHOOK_CONFIGURATION} (kubectl get mutatingwebhookconfigurations)"
)


def collect_warnings(oversize: OversizePolicy, check: Callable[[], Iterable[str]], wait_note: str) -> tuple[str, ...]:
    """The warnings of a check. If `oversize` is "wait", a refusal becomes a warning that the pod waits until
    `wait_note`.

    Raises InvalidRequest.
    """
    try:
        return tuple(check())
    except InvalidRequest as error:
        if oversize == "refuse":
            raise
        return (f"{error.field}: {error.problem}; the pod waits until {wait_note}",)


def changed_later_error(field: str, problem: str) -> InvalidRequest:
    """The error about a field that differs from what Cardwise's webhook wrote. `problem`: the part of the pod that is
    wrong now, and how.
    """
    return InvalidRequest(field, f"{problem}: a mutating webhook that runs after Cardwise's has changed it", _REMEDY)


def removed_count_error(field: str) -> InvalidRequest:
    """The error about a split share without the number of its cards."""
    problem = (
        "lacks the variables with the number of the share's GPUs: a mutating webhook that runs after Cardwise's has "
        "removed them"
    )
    return InvalidRequest(field, problem, f"{_REMEDY}; if you wrote {names.SHARE} yourself, leave it out")


def added_later_error(field: str) -> InvalidRequest:
    """The error about a field that Cardwise's webhook would have rewritten: it was added later."""
    problem = (
        "was not rewritten by the Cardwise webhook: a mutating webhook that runs after Cardwise's has added it, or "
        f"MutatingWebhookConfiguration {names.WEBHOOK_CONFIGURATION} or {names.LATE_CONFIGURATION} is missing"
    )
    return InvalidRequest(field, problem, f"{_REMEDY}; `cardwise doctor` shows whether they exist")
