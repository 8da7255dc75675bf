"""Findings of the checks, and their output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from cardwise.cli import console
from cardwise.cli.doctor.facts import KINDS
from cardwise.core.values import wording


class Severity(StrEnum):
    """`note`: unknown from here, or for information; `warning`: works in part; `problem`: does not work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


_FEW = 3  # nodes that a line names
_WIDTH = max(map(len, Severity))


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding.

    check: the name of the check.
    text: what was found.
    remedy: what to do; "" for nothing.
    unread: the number of kinds that could not be read.
    values: the proposed values of the chart, as KEY=VALUE.
    """

    check: str
    level: Severity
    text: str
    remedy: str = ""
    unread: int = 0
    values: tuple[str, ...] = ()


def report_unread(reasons: Mapping[str, str], kinds: int) -> Iterator[Finding]:
    """The note about lists that could not be read. `kinds`: the number of all lists.

    reasons: by kind, the API server's message; "" for a missing right.
    """
    for kind, reason in reasons.items():
        if reason:
            yield Finding(
                "rights", Severity.NOTE, f"could not read {_kind_title(kind)}: {reason}", "try again", unread=1
            )
    hidden = [_kind_title(kind) for kind, reason in reasons.items() if not reason]
    if hidden:
        text = (
            f"could not read {len(hidden)} of {kinds} kinds of objects, because you lack the rights: "
            f"{', '.join(hidden)}"
        )
        yield Finding("rights", Severity.NOTE, text, "run this as an administrator", unread=len(hidden))


def _kind_title(kind: str) -> str:
    if kind == "namespace":
        return "the namespace of Cardwise"
    return f"{kind} webhooks" if kind in ("mutating", "validating") else kind.replace("_", " ")


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings in the order in which to fix them: the most serious first, causes before their effects."""
    order = list(reversed(Severity))
    return sorted(findings, key=lambda finding: order.index(finding.level))


def name_nodes(node_names: Sequence[str]) -> str:
    """The nodes that a line is about: "node n1", or "60 nodes (n1, n2, n3 and 57 more)"."""
    return (
        f"node {node_names[0]}"
        if len(node_names) == 1
        else f"{len(node_names)} nodes ({wording.enumerate_first(node_names, _FEW)})"
    )


def worst_severity(findings: Sequence[Finding]) -> Severity:
    """The most serious level; `ok` without findings."""
    order = list(Severity)
    return max((finding.level for finding in findings), key=order.index, default=Severity.OK)


def table(findings: Sequence[Finding], kinds: int = KINDS) -> str:
    """One row per finding, followed by its remedy. `kinds`: the number of lists that were to be read."""
    widest = max((len(finding.check) for finding in findings), default=0)
    shown: list[str] = []
    for finding in findings:
        shown.append(f"{finding.level.upper():{_WIDTH}}  {finding.check:{widest}}  {console.clean_line(finding.text)}")
        if finding.remedy:
            shown.append(f"{'':{_WIDTH}}  -> {console.clean_line(finding.remedy)}")
    counts = ", ".join(
        f"{number} ok" if level is Severity.OK else wording.pluralize(number, level)
        for level in reversed(Severity)
        for number in [sum(finding.level is level for finding in findings)]
    )
    if hidden := sum(finding.unread for finding in findings):
        counts = f"could not read {hidden} of {kinds} kinds of objects; the others: {counts}"
    return "".join(f"{line}\n" for line in [*shown, counts])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The output as JSON, with all fields."""
    return {"worst": worst_severity(findings), "findings": [asdict(finding) for finding in findings]}
