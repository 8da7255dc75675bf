"""Findings of the checks, and how they are shown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from cardwise.cli import console
from cardwise.cli.doctor.facts import KINDS
from cardwise.core.values import wording


class Severity(StrEnum):
    """`note`: nobody can tell from here, or good to know; `warning`: works in part; `problem`: does not work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


_FEW = 3  # nodes that a line names
_WIDTH = max(map(len, Severity))


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is the name of the check, `text` what was seen, `remedy` what to do ("" where there is nothing to do),
    `unread` how many kinds of objects could not be read. `values`: what it proposes to install with, as KEY=VALUE.
    """

    check: str
    level: Severity
    text: str
    remedy: str = ""
    unread: int = 0
    values: tuple[str, ...] = ()


def report_unread(reasons: Mapping[str, str], kinds: int) -> Iterator[Finding]:
    """What could not be read: by kind, what the API server said, "" for a missing right. `kinds`: of all there are."""
    for kind, why in reasons.items():
        if why:
            yield Finding("rights", Severity.NOTE, f"could not look at {_called(kind)}: {why}", "try again", unread=1)
    hidden = [_called(kind) for kind, why in reasons.items() if not why]
    if hidden:
        text = f"could not look at {len(hidden)} of {kinds} things, for want of rights: {', '.join(hidden)}"
        yield Finding("rights", Severity.NOTE, text, "ask as an administrator", unread=len(hidden))


def _called(kind: str) -> str:
    if kind == "namespace":
        return "the namespace of Cardwise"
    return f"{kind} webhooks" if kind in ("mutating", "validating") else kind.replace("_", " ")


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The order in which to mend: the gravest first, and of equal ones what others stand on."""
    order = list(reversed(Severity))
    return sorted(findings, key=lambda finding: order.index(finding.level))


def nodes(some: Sequence[str]) -> str:
    """The nodes that a line is about: "node n1", or "60 nodes (n1, n2, n3 and 57 more)"."""
    return f"node {some[0]}" if len(some) == 1 else f"{len(some)} nodes ({wording.few(some, _FEW)})"


def worst(findings: Sequence[Finding]) -> Severity:
    """The gravest level of all; `ok` where there are none."""
    order = list(Severity)
    return max((finding.level for finding in findings), key=order.index, default=Severity.OK)


def table(findings: Sequence[Finding], kinds: int = KINDS) -> str:
    """One row for each, and below each that needs something done, what. `kinds`: of objects that were to be read."""
    widest = max((len(one.check) for one in findings), default=0)
    shown: list[str] = []
    for one in findings:
        shown.append(f"{one.level.upper():{_WIDTH}}  {one.check:{widest}}  {console.line(one.text)}")
        if one.remedy:
            shown.append(f"{'':{_WIDTH}}  -> {console.line(one.remedy)}")
    counts = ", ".join(
        f"{number} ok" if level is Severity.OK else wording.count(number, level)
        for level in reversed(Severity)
        for number in [sum(one.level is level for one in findings)]
    )
    if hidden := sum(one.unread for one in findings):
        counts = f"could not look at {hidden} of {kinds} things; of the others: {counts}"
    return "".join(f"{line}\n" for line in [*shown, counts])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """All of it, for programs."""
    return {"worst": worst(findings), "findings": [asdict(one) for one in findings]}
