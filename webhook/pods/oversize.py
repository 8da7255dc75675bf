"""Requests that no present node can serve: refused, or a warning if the settings say that pods may wait for a node."""

from collections.abc import Callable, Iterable

from cardwise.core.values.invalid import InvalidRequest
from webhook.pods.context import OversizePolicy


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
