"""`cardwise advise`: shares that fit what programs use. The engine is imported only when the command runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import yaml

from cardwise.cli import console, options
from cardwise.cli.cluster import liveworkload, published, recordeduse, usagehistory, workloads
from cardwise.cli.cluster.prometheus import Prometheus
from cardwise.cli.render import printing, tables
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.shellcommand import command
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.pods import record_of

if TYPE_CHECKING:
    from cardwise.cli.advice import Advice, Effect

_HELP: Final = """Show what each workload requests and uses of GPUs, and recommend shares that fit.

    The recommended share is the peak of the period with a margin. A framework that takes its whole share when it starts
    keeps its share: its peak says nothing. Below the table: what the shares would bring, computed by the extender's
    placement. Nothing is changed.

    Use is what the nodes' MPS managers have measured in the last hours, at most six; a manager that restarts begins
    again. With --prometheus it is the use of the last days. So give a workload time to meet its peak.

    \b
    cardwise advise                             the workloads of the namespace
    cardwise advise -n team-a deploy/web        one of them
    cardwise advise deploy/web -o yaml          a patch, and the command that applies it
    cardwise advise --prometheus http://localhost:9090 --since 14d
"""
_HEADS: Final = ("WORKLOAD", "CONTAINER", "PODS", "REQUESTED", "P50", "P99", "PEAK", "RECOMMENDED", "FRAMEWORK")
_UNKNOWN: Final = "unknown"
_MAX_MARGIN: Final = 300
# Workloads whose pod template can be changed, by kind: the API version and the path of the template in the object.
_PATCHED_KINDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Deployment": ("apps/v1", ("spec", "template")),
    "StatefulSet": ("apps/v1", ("spec", "template")),
    "DaemonSet": ("apps/v1", ("spec", "template")),
    "ReplicaSet": ("apps/v1", ("spec", "template")),
    "CronJob": ("batch/v1", ("spec", "jobTemplate", "spec", "template")),
}


@click.command("advise", help=_HELP)
@options.cluster
@options.namespace
@click.option(
    "--margin",
    type=click.FloatRange(0, _MAX_MARGIN),
    default=15.0,
    show_default=True,
    metavar="PERCENT",
    help="What a share has beyond the peak.",
)
@options.prometheus
@options.plain_output
@options.cardwise_namespace
@click.argument("workload", required=False, metavar="[KIND/NAME]")
def advise(
    *,
    namespace: str | None,
    margin: float,
    prometheus_url: str | None,
    since: float | None,
    output: str,
    cardwise_namespace: str,
    workload: str | None,
) -> None:
    from cardwise.cli import advice  # noqa: PLC0415 - numpy, for which no other command waits

    recorded_seconds = options.recorded_seconds(prometheus_url, since)
    client = options.load_client()
    namespace = namespace or client.namespace
    options.check_namespace(client, namespace)
    chosen_workload = parse_workload(workload) if workload else ""
    if prometheus_url is None:
        history = usagehistory.read_history(client, cardwise_namespace)
    else:
        history = recordeduse.read_peaks(Prometheus(prometheus_url), namespace, recorded_seconds)
    pods = list(client.list_objects(paths.pods(namespace)))
    advices = advice.advise(history.reports, namespace, pods, workload=chosen_workload, margin=margin)
    if chosen_workload and not advices and history.reports:
        raise click.ClickException(
            f"no use of {chosen_workload} in namespace {namespace} is remembered: it has had no share of a GPU "
            "in this time, or its node's MPS manager has just started"
        )
    notes = list(history.notes)
    if history.reports:
        observed = min(report.observed_seconds for report in history.reports)
        notes.append(
            f"use is what {history.source}: at least the last {tables.format_age(observed)}; the margin is {margin:g} %"
        )
    effects: dict[str, Effect] = {}
    changes = _changes_by_workload(advices)
    if changes and output != "yaml":
        live = liveworkload.read_cluster_for_simulation(client, cardwise_namespace)
        notes += live.notes
        policy = published.read_published(client, cardwise_namespace).policy
        for owner, shares in changes.items():
            pod_names = [pod["metadata"]["name"] for pod in pods if record_of(pod).workload == owner]
            if (effect := advice.compute_effect(live, policy, namespace, pod_names, shares)) is not None:
                effects[owner] = effect
    if output == "json":
        printing.print_object(_as_json(namespace, advices, effects, notes), output)
    elif output == "yaml":
        console.print_data(format_patches(client, namespace, changes), nl=False)
        for note in notes:
            console.print_text(f"note: {note}", err=True)
    else:
        _print_table(advices, effects, notes)


def parse_workload(text: str) -> str:
    """Kind and name as a pod names its workload, such as Deployment/web for deploy/web. Raises UsageError."""
    word, slash, name = text.partition("/")
    if not (word and slash and name):
        raise click.UsageError(f"{text!r} is not KIND/NAME: write, for example, deploy/web")
    kind = workloads.parse_kind(word)
    known_kinds = {known.lower(): known for known in (*_PATCHED_KINDS, "Job", "Pod")}
    return f"{known_kinds.get(kind or '', word)}/{name}"


def _changes_by_workload(advices: Iterable["Advice"]) -> dict[str, dict[str, int]]:
    """The recommended shares that differ from the present ones, by workload and container."""
    changes: dict[str, dict[str, int]] = {}
    for advice in advices:
        if advice.recommended is not None and advice.is_change and advice.container:
            changes.setdefault(advice.workload, {})[advice.container] = advice.recommended
    return changes


def _print_table(advices: Sequence["Advice"], effects: Mapping[str, "Effect"], notes: Sequence[str]) -> None:
    if advices:
        rows = [list(_HEADS), *map(_row, advices)]
        console.print_lines(tables.align_rows(rows))
    else:
        console.print_text("no container of this namespace has had a share of a GPU while its use was measured")
    lines = [
        f"{advice.workload}, container {advice.container or _UNKNOWN}: {advice.reason}"
        for advice in advices
        if advice.reason
    ]
    lines += [f"{workload}: {describe_effect(effect)}" for workload, effect in effects.items()]
    if lines:
        console.print_text("")
    for line in lines:
        console.print_text(line)
    for note in notes:
        console.print_text(f"note: {note}", err=True)


def _row(advice: "Advice") -> list[str]:
    amounts = (advice.requested, advice.p50, advice.p99, advice.peak, advice.recommended)
    cells = [_UNKNOWN if amount is None else str(amount) for amount in amounts]
    framework = _UNKNOWN
    if advice.framework is not None:
        framework = advice.framework.name + " (preallocates)" * advice.framework.preallocates
    return [advice.workload, advice.container or _UNKNOWN, str(advice.pods), *cells, framework]


def describe_effect(effect: "Effect") -> str:
    """What the shares would bring, as a sentence."""
    if effect.unplaced_pods:
        pods = wording.pluralize(effect.unplaced_pods, "pod")
        return f"with the recommended shares {pods} of it would find no GPU"
    more_or_fewer = "more" if effect.more_pods >= 0 else "fewer"
    sentence = f"{wording.pluralize(abs(effect.more_pods), f'{more_or_fewer} pod')} of this kind would fit"
    if effect.empty_gpus:
        change = "more" if effect.empty_gpus > 0 else "fewer"
        sentence += f"; {wording.pluralize(abs(effect.empty_gpus), f'{change} GPU')} would be empty"
    return sentence


def _as_json(
    namespace: str, advices: Sequence["Advice"], effects: Mapping[str, "Effect"], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "containers": [
            {
                "workload": advice.workload,
                "container": advice.container,
                "pods": advice.pods,
                "knownMinutes": advice.minutes,
                "requestedMiB": advice.requested,
                "p50MiB": advice.p50,
                "p99MiB": advice.p99,
                "peakMiB": advice.peak,
                "recommendedMiB": advice.recommended,
                "framework": None if advice.framework is None else {
                    "name": advice.framework.name,
                    "preallocates": advice.framework.preallocates,
                    "startMiB": advice.framework.start_mib,
                    "source": advice.framework.source,
                },
                "reason": advice.reason,
            }
            for advice in advices
        ],
        "effects": [
            {
                "workload": workload,
                "morePods": effect.more_pods,
                "moreEmptyGPUs": effect.empty_gpus,
                "unplacedPods": effect.unplaced_pods,
            }
            for workload, effect in effects.items()
        ],
        "notes": list(notes),
    }  # fmt: skip


def format_patches(client: KubeClient, namespace: str, changes: Mapping[str, Mapping[str, int]]) -> str:
    """A patch for each workload with the command that applies it, as YAML documents. Raises KubeError."""
    documents = [_format_patch(client, namespace, workload, shares) for workload, shares in changes.items()]
    return "---\n".join(documents) if documents else "# no other share is recommended\n"


def _format_patch(client: KubeClient, namespace: str, workload: str, shares: Mapping[str, int]) -> str:
    kind, _, name = workload.partition("/")
    wanted = ", ".join(f"{names.GPU_MEM}: {mib} in container {container}" for container, mib in shares.items())
    wanted = console.clean_line(f"write {wanted}")
    title = console.clean_line(f"# {workload}")
    if kind not in _PATCHED_KINDS:
        return f"{title}: what creates its pods cannot be patched this way; {wanted}\n"
    try:
        manifest = workloads.read_workload(client, kind.lower(), namespace, name)
    except errors.Forbidden as error:
        return f"{title}: {console.clean_line(error.message)}; {wanted}\n"
    if manifest is None:
        return f"{title}: it does not exist any more\n"
    version, path = _PATCHED_KINDS[kind]
    template: Json = manifest
    for field in path:
        template = template.get(field) or {}
    containers = {
        container.get("name"): container for container in (template.get("spec") or {}).get("containers") or ()
    }
    patched, others = [], []
    for container, mib in shares.items():
        resources = (containers.get(container) or {}).get("resources") or {}
        amounts = {
            section: {names.GPU_MEM: str(mib)}
            for section in ("limits", "requests")
            if names.GPU_MEM in (resources.get(section) or {})
        }
        if "limits" in amounts and names.GPU_COUNT not in resources["limits"]:
            patched.append({"name": container, "resources": amounts})
        else:
            others.append(container)
    notes = "".join(
        console.clean_line(f"# container {other}: its share is not an amount of its own in limits") + "\n"
        for other in others
    )
    if not patched:
        return f"{title}: {wanted}\n{notes}"
    patch: Json = {"spec": {"containers": patched}}
    for field in reversed(path):
        patch = {field: patch}
    identity = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}}
    patch_command = "kubectl patch {kind} {name} -n {namespace} --patch-file FILE"
    apply = command(patch_command, kind=kind.lower(), name=name, namespace=namespace)
    return f"{title}: save this as FILE, then {apply}\n{notes}{yaml.safe_dump(identity | patch, sort_keys=False)}"
