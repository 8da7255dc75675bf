"""ResourceClass objects: one spelling of the selector, and what is wrong with them."""

from collections.abc import Callable
from typing import Any

from cardwise.core import classes
from cardwise.core.selectors import Selector

Json = dict[str, Any]

_SELECTOR = "selector"
_OTHER_SPELLINGS = ("resourceSelector", "labelSelector")  # of the proposals that ResourceClass follows


def normal(obj: Json, old: Json | None) -> Json:
    """The class with its selector under `spec.selector`. `old` is the stored one at an update.

    Two spellings that differ are left to be refused, but where an update brings one and leaves the stored selector as
    it was: `kubectl apply` does so for a manifest with the other spelling, and that one is meant.
    """
    spec = obj.get("spec") or {}
    others = [name for name in _OTHER_SPELLINGS if name in spec]
    if len(others) != 1:
        return obj
    brought, stored = spec[others[0]], ((old or {}).get("spec") or {}).get(_SELECTOR)
    if _SELECTOR in spec and spec[_SELECTOR] not in (brought, stored):
        return obj
    kept = {name: value for name, value in spec.items() if name != others[0]}
    return obj | {"spec": kept | {_SELECTOR: brought}}


def warnings(obj: Json, selects: Callable[[Selector], bool]) -> tuple[str, ...]:
    """What the author of a class should know. Raises InvalidRequest."""
    parsed = classes.parse(obj)
    if selects(parsed.selector):
        return ()
    return (f"spec.selector: selects no card now; pods that ask for {parsed.name} wait until one comes",)
