"""`cardwise idle`: pods that hold a share of a GPU and do not compute."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import idlepods, recordeduse, usagehistory
from cardwise.cli.cluster.idlepods import IdlePod, IdlePods
from cardwise.cli.cluster.prometheus import Prometheus
from cardwise.cli.options import DURATION
from cardwise.cli.render import printing, tables
from cardwise.core.values import wording
from cardwise.core.values.timestamps import format_timestamp, subtract_seconds
from cardwise.kube import paths, wire
from cardwise.kube.objects.pods import Pod

_HELP: Final = """List pods that hold a share of a GPU and have not computed for a time, the longest idle first.

    A pod computes while its kernels run on the GPU; memory that it only keeps does not count. A pod of which this is
    unknown is never listed: the notes below the table name such pods and nodes. Nothing is changed.

    Use is what the nodes' MPS managers have measured; a manager that restarts begins again. So ">3h" means at least
    3 hours. With --prometheus it is the use of the last days.

    \b
    cardwise idle                               the namespace's pods that were idle for 2h
    cardwise idle -A --for 30m                  those of all namespaces, for 30 minutes
    cardwise idle --for 3d --prometheus http://localhost:9090
"""
_MAX_LISTED: Final = 3  # maximum number of pods that a note names


@click.command("idle", help=_HELP)
@options.cluster
@options.namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Show all namespaces.")
@click.option(
    "--for",
    "min_idle_seconds",
    type=DURATION,
    default="2h",
    show_default=True,
    metavar="DURATION",
    help="How long a pod must not have computed.",
)
@options.prometheus
@options.plain_output
@options.cardwise_namespace
def idle(
    *,
    namespace: str | None,
    all_namespaces: bool,
    min_idle_seconds: float,
    prometheus_url: str | None,
    since: float | None,
    output: str,
    cardwise_namespace: str,
) -> None:
    recorded_seconds = options.recorded_seconds(prometheus_url, since)
    if prometheus_url is not None and min_idle_seconds >= recorded_seconds:
        raise click.UsageError("--for must be shorter than --since")
    client = options.load_client()
    scope = "" if all_namespaces else namespace or client.namespace
    if scope:
        options.check_namespace(client, scope)
    if prometheus_url is None:
        history = usagehistory.read_history(client, cardwise_namespace)
    else:
        history = recordeduse.read_idle_times(Prometheus(prometheus_url), scope, recorded_seconds)
    pods = client.list_as(paths.pods(scope), wire.ListOf[Pod], {"resourceVersion": "0"}, 0)
    found_pods = idlepods.find_idle_pods(
        history.reports, pods, min_idle_seconds=min_idle_seconds, now=client.server_time()
    )
    notes = [*history.notes, *_describe_unknown(found_pods, min_idle_seconds)]
    if output == "table":
        _print_table(found_pods.idle, min_idle_seconds, scope, notes)
    else:
        document = _as_json(found_pods, min_idle_seconds, scope, notes, client.server_time())
        printing.print_object(document, output)


def _describe_unknown(found_pods: IdlePods, min_idle_seconds: float) -> list[str]:
    notes = []
    if found_pods.unknown:
        pods = wording.enumerate_first(found_pods.unknown, _MAX_LISTED, "pod")
        notes.append(f"whether these pods compute is unknown: {pods}")
    if found_pods.undecided:
        pods = wording.enumerate_first(found_pods.undecided, _MAX_LISTED, "pod")
        duration = tables.format_age(min_idle_seconds)
        notes.append(f"these pods have not computed since their use is known, which is less than {duration}: {pods}")
    return notes


def _print_table(idle_pods: Sequence[IdlePod], min_idle_seconds: float, scope: str, notes: Sequence[str]) -> None:
    duration = tables.format_age(min_idle_seconds)
    if idle_pods:
        heads = ["POD", "WORKLOAD", "NODE", "GPU", "MIB", "IDLE"]
        rows = [heads, *map(_row, idle_pods)]
        if not scope:
            rows = [["NAMESPACE", *heads], *([pod.namespace, *_row(pod)] for pod in idle_pods)]
        console.print_lines(tables.align_rows(rows))
        pods, mib = wording.pluralize(len(idle_pods), "pod"), sum(pod.granted_mib for pod in idle_pods)
        console.print_text("")
        console.print_text(f"{pods} idle for {duration} or longer, with {mib} MiB")
    else:
        place = f"namespace {scope}" if scope else "the cluster"
        console.print_text(f"no pod with a share in {place} is known to have been idle for {duration}")
    for note in notes:
        console.print_text(f"note: {note}", err=True)


def _row(pod: IdlePod) -> list[str]:
    indices = ",".join(str(gpu.index) for gpu in pod.gpus)
    idle_for = f"{'>' * pod.is_minimum}{tables.format_age(pod.idle_seconds)}"
    return [pod.name, pod.workload, pod.node, indices, str(pod.granted_mib), idle_for]


def _as_json(
    found_pods: IdlePods, min_idle_seconds: float, scope: str, notes: Sequence[str], now: datetime
) -> dict[str, Any]:
    return {
        "namespace": scope or None,
        "forSeconds": min_idle_seconds,
        "pods": [
            {
                "namespace": pod.namespace,
                "name": pod.name,
                "workload": pod.workload,
                "node": pod.node,
                "gpus": [{"index": gpu.index, "uuid": gpu.uuid, "grantedMiB": gpu.mem} for gpu in pod.gpus],
                "grantedMiB": pod.granted_mib,
                "idleSeconds": round(pod.idle_seconds),
                "idleSince": format_timestamp(subtract_seconds(now, pod.idle_seconds)),
                "mayBeLonger": pod.is_minimum,
            }
            for pod in found_pods.idle
        ],
        "undecided": found_pods.undecided,
        "unknown": found_pods.unknown,
        "notes": list(notes),
    }
