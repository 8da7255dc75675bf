"""The findings of the checks, and their output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from cardwise.cli import console
from cardwise.cli.doctor.facts import KIND_COUNT
from cardwise.core.values import wording


class Severity(StrEnum):
    """The severity of a finding.

    note: the check had no result, or the text is only information.
    warning: something works only partly.
    problem: something does not work.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


_MAX_LISTED = 3  # maximum number of nodes, or of pods, that a line names
_SEVERITY_WIDTH = max(map(len, Severity))


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    check: the name of the check.
    text: the result in words.
    remedy: the action that helps; "" if none is needed.

    unread_kinds: the number of kinds that could not be read.
    values: the proposed values of the chart, as KEY=VALUE.
    """

    check: str
    level: Severity
    text: str
    remedy: str = ""
    unread: int = 0
    values: tuple[str, ...] = ()


def report_unread_kinds(reasons: Mapping[str, str], kind_count: int) -> Iterator[Finding]:
    """Yield the note about lists that could not be read.

    reasons: the API server's message by kind; "" for a missing right.
    kind_count: the number of all lists.
    """
    for kind, reason in reasons.items():
        if reason:
            yield Finding(
                "rights", Severity.NOTE, f"could not read {_kind_title(kind)}: {reason}", "try again", unread=1
            )
    hidden_titles = [_kind_title(kind) for kind, reason in reasons.items() if not reason]
    if hidden_titles:
        text = (
            f"could not read {len(hidden_titles)} of {kind_count} kinds of objects, because you lack the rights: "
            f"{', '.join(hidden_titles)}"
        )
        yield Finding("rights", Severity.NOTE, text, "run this as an administrator", unread=len(hidden_titles))


def _kind_title(kind: str) -> str:
    if kind == "namespace":
        return "the namespace of Cardwise"
    return kind.replace("_", " ")


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings in the order in which to fix them: the most serious first, causes before their effects."""
    order = list(reversed(Severity))
    return sorted(findings, key=lambda finding: order.index(finding.level))


def name_nodes(node_names: Sequence[str]) -> str:
    """Name nodes in a sentence: "node n1", or "60 nodes (n1, n2, n3 and 57 more)"."""
    return (
        f"node {node_names[0]}"
        if len(node_names) == 1
        else f"{len(node_names)} nodes ({wording.enumerate_first(node_names, _MAX_LISTED)})"
    )


def name_pods(pod_names: Sequence[str]) -> str:
    """Name pods in a sentence: "1 pod (ns/a)", or "60 pods (ns/a, ns/b, ns/c and 57 more)"."""
    return f"{wording.pluralize(len(pod_names), 'pod')} ({wording.enumerate_first(pod_names, _MAX_LISTED)})"


def worst_severity(findings: Sequence[Finding]) -> Severity:
    """Return the highest severity; `ok` without findings."""
    order = list(Severity)
    return max((finding.level for finding in findings), key=order.index, default=Severity.OK)


def table(findings: Sequence[Finding], kind_count: int = KIND_COUNT) -> str:
    """Format one row per finding, followed by its remedy.

    `kind_count`: the number of lists that doctor tried to read.
    """
    check_width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        lines.append(
            f"{finding.level.upper():{_SEVERITY_WIDTH}}  {finding.check:{check_width}}  "
            f"{console.clean_line(finding.text)}"
        )
        if finding.remedy:
            lines.append(f"{'':{_SEVERITY_WIDTH}}  -> {console.clean_line(finding.remedy)}")
    counts = ", ".join(
        f"{count} ok" if severity is Severity.OK else wording.pluralize(count, severity)
        for severity in reversed(Severity)
        for count in [sum(finding.level is severity for finding in findings)]
    )
    if unread_count := sum(finding.unread for finding in findings):
        counts = f"could not read {unread_count} of {kind_count} kinds of objects; the others: {counts}"
    return "".join(f"{line}\n" for line in [*lines, counts])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The output as JSON, with all fields."""
    return {"worst": worst_severity(findings), "findings": [asdict(finding) for finding in findings]}
