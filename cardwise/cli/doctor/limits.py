"""Checks of what names and limits cards: ResourceClasses without cards."""

from collections.abc import Iterator
from typing import Final

from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import labels_of

_FEW: Final = 5


def classes_without_cards(facts: Facts) -> Iterator[Finding]:
    """Automatic classes outlive their cards, so that pods may wait for a node group that is scaled to zero."""
    empty = [
        one["metadata"]["name"]
        for one in facts.classes
        if labels_of(one).get(names.AUTO_LABEL) == "true" and (one.get("status") or {}).get("cards") == 0
    ]
    if empty:
        text = f"no card is there of {wording.few(empty, _FEW)}: pods that ask for it wait until a node brings one"
        remedy = f"remove a type that does not come back: kubectl delete resourceclass {empty[0]}"
        yield Finding("classes", Severity.NOTE, text, remedy)
