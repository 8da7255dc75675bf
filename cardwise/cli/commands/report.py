"""`cardwise report`: what was granted, used and idle over days, from Prometheus."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Final

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import recordedtotals
from cardwise.cli.cluster.prometheus import Prometheus
from cardwise.cli.cluster.recordedtotals import RecordedTotals, Totals
from cardwise.cli.options import DURATION
from cardwise.cli.render import printing, tables
from cardwise.core.values import wording

_HELP: Final = """Sum up what was granted, used and idle over days, by namespace, class or workload.

    GRANTED is in MiB-hours; in GPU-HOURS a share counts by its part of the GPU. USED, IDLE and UNKNOWN are parts of
    GRANTED: what programs used, and what containers held that did not compute for ten minutes or longer, or of which
    that is unknown.

    The numbers come from the recording rules in helm/cardwise/files/rules, from the time when they were loaded.

    \b
    cardwise report --prometheus http://localhost:9090
    cardwise report --prometheus http://localhost:9090 -n team-a --since 7d --by workload -o csv
"""
_MIN_SECONDS: Final = 3600.0
_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "namespace": ("namespace",),
    "class": ("class",),
    "workload": ("namespace", "workload"),
}
_ANY_CLASS: Final = "(any)"


@click.command("report", help=_HELP)
@click.option("-n", "--namespace", default="", help="Only this namespace. Default: all.")
@click.option("--prometheus", "prometheus_url", metavar="URL", help="The Prometheus to read.")
@click.option(
    "--since", type=DURATION, default="30d", show_default=True, metavar="DURATION", help="How far back, at least 1h."
)
@click.option("--by", type=click.Choice([*_LABELS]), default="namespace", show_default=True, help="What to sum up by.")
@options.report_output
def report(*, namespace: str, prometheus_url: str | None, since: float, by: str, output: str) -> None:
    if prometheus_url is None:
        raise click.UsageError("a report needs Prometheus: add --prometheus URL, for example http://localhost:9090")
    if since < _MIN_SECONDS:
        raise click.UsageError("--since: write at least 1h, for example 7d")
    totals = recordedtotals.read_totals(Prometheus(prometheus_url), _LABELS[by], namespace, since)
    if output == "json":
        document = {
            "sinceSeconds": since,
            "capacityMiBHours": round(totals.capacity, 1),
            "groups": [dict(zip(_LABELS[by], group.names, strict=True)) | _as_json(group) for group in totals.groups],
        }
        printing.print_object(document, output)
    elif output == "csv":
        console.print_data(_format_csv(_LABELS[by], totals.groups), nl=False)
    elif totals.groups:
        _print_table(_LABELS[by], totals, since, is_whole_cluster=not namespace)
    if not totals.groups:
        place = f" of namespace {namespace}" if namespace else ""
        console.print_text(
            f"note: Prometheus has no recorded use{place} in this time: it must load the recording rules of the chart "
            "(monitoring.alerts, helm/cardwise/files/rules)",
            err=True,
        )


def _as_json(totals: Totals) -> dict[str, float]:
    return {
        "grantedMiBHours": round(totals.granted, 1),
        "grantedGPUHours": round(totals.gpu_hours, 2),
        "usedMiBHours": round(totals.used, 1),
        "idleMiBHours": round(totals.idle, 1),
        "unknownMiBHours": round(totals.unknown, 1),
    }


def _format_csv(labels: Sequence[str], groups: Sequence[Totals]) -> str:
    """A table with one line for each group; the numbers have the names that they have in JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for i, totals in enumerate(groups):
        numbers = _as_json(totals)
        if not i:
            writer.writerow([*labels, *numbers])
        writer.writerow([*map(wording.sanitize_line, totals.names), *numbers.values()])
    return text.getvalue()


def _print_table(labels: Sequence[str], totals: RecordedTotals, since: float, *, is_whole_cluster: bool) -> None:
    rows = [[*(label.upper() for label in labels), "GRANTED", "GPU-HOURS", "USED", "IDLE", "UNKNOWN"]]
    rows += [
        [
            *(name or _ANY_CLASS for name in group.names),
            f"{group.granted:.0f}",
            f"{group.gpu_hours:.1f}",
            *(_format_percent(part, group.granted) for part in (group.used, group.idle, group.unknown)),
        ]
        for group in totals.groups
    ]
    console.print_lines(tables.align_rows(rows))
    granted = sum(group.granted for group in totals.groups)
    summary = f"{granted:.0f} MiB-hours granted in the last {tables.format_age(since)}"
    if is_whole_cluster and totals.capacity:
        summary += f", {_format_percent(granted, totals.capacity)} of the {totals.capacity:.0f} of all GPUs"
    console.print_text("")
    console.print_text(summary)


def _format_percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
