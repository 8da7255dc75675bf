"""Checks that pods have a kube-scheduler, and that its configuration, if readable, calls the extender."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from cardwise.cli.cluster import schedulers
from cardwise.cli.doctor import finding, repairs
from cardwise.cli.doctor.facts import PROBE_POD_PREFIX, WAITING, Facts, is_recent, name_of
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name

_FAST: Final = (names.GPU_MEM, names.WHOLE_GPU, names.PLACE_MARKER)
_SLOW: Final = (names.SHARE, names.BIND_MARKER)
_FEW: Final = 3  # pods that a line names
_LEFT: Final = f"spec.schedulerName={names.SCHEDULER},{WAITING}"
_LATELY: Final = timedelta(minutes=10)
_CONFIG: Final = re.compile(r"(?<!\S)--?config(?:[=\s]|$)")  # in a command line of kube-scheduler
_MARKERS: Final = (names.PLACE_MARKER, names.BIND_MARKER)


def check_stranded_pods(facts: Facts) -> Iterator[Finding]:
    """Pods that wait for the chart's own kube-scheduler, which no longer exists or has another name."""
    waiting = [pod for pod in facts.waiting_pods if pod["spec"].get("schedulerName") == names.SCHEDULER]
    pods = [name_of(pod) for pod in waiting]
    if not pods or "deployments" in facts.unread or names.SCHEDULER in schedulers.scheduler_names(facts.deployments):
        return
    alone = len(pods) == 1
    text = (
        f"{wording.pluralize(len(pods), 'pod')} ({wording.enumerate_first(pods, _FEW)}) "
        f"wait{'s' * alone} for the scheduler "
        f"{names.SCHEDULER}, which no longer exists: nothing places {'it' if alone else 'them'}"
    )
    delete = command("kubectl delete pods -A --field-selector={selector:text}", selector=_LEFT)
    remedy = repairs.recreate(waiting, delete=delete, dropping=["schedulerName"])
    yield Finding("scheduler", Severity.PROBLEM, text, remedy)


def check_unwired_nodes(facts: Facts) -> Iterator[Finding]:
    """Control plane nodes that joined after the chart had configured the others (`scheduler.mode=kubeadm`).

    Only the leading kube-scheduler places pods: once one of these nodes' leads, no pod gets a card.
    """
    static = [pod for pod in facts.schedulers if names.MIRROR in annotations_of(pod)]
    nodes = {pod["spec"]["nodeName"]: annotations_of(pod) for pod in static}
    wired = [node for node in sorted(nodes) if names.FORMER_CONFIG in nodes[node]]
    late = [node for node in sorted(nodes) if node not in wired]
    if wired and late:
        text = (
            f"kube-scheduler calls the extender on {finding.name_nodes(wired)}, and does not on "
            f"{finding.name_nodes(late)}: while that one is leader, it binds pods without a GPU, and the extender "
            "deletes them"
        )
        remedy = (
            f"let the chart configure it too: {repairs.upgrade(facts)} (scheduler.controlPlaneNodes too, if it is set)"
        )
        yield Finding("scheduler", Severity.PROBLEM, text, remedy)


def check_deleted_pods(facts: Facts) -> Iterator[Finding]:
    """Pods that were bound without the extender, which deleted them: for their owners they just disappeared.

    Doctor's own pods are left out: the check that created one has reported it. The Events are in namespaces of users,
    who may have written them. So they are a warning, with the command that configures kube-scheduler only if its
    configuration shows that it does not call the extender.
    """
    recent_events = [event for event in facts.pod_events if event.kind == "Pod" and is_recent(facts, event, _LATELY)]
    events = [event for event in recent_events if not event.name.startswith(PROBE_POD_PREFIX)]
    pods = sorted({f"{event.namespace}/{event.name}" for event in events})
    if pods:
        writers = sorted({quote_unless_name(event.writer) if event.writer else "no name" for event in events})
        text = (
            f"in the last 10 minutes {wording.pluralize(len(pods), 'pod')} "
            f"({wording.enumerate_first(pods, _FEW)}) disappeared: bound without the extender, so without a GPU, and "
            f"then deleted (Events of {wording.enumerate_first(writers, _FEW)})"
        )
        level = Severity.WARNING if _lacks_extender(facts) else Severity.NOTE
        yield Finding("scheduler", level, text, _suggest_stop(facts, len(pods)))


def _suggest_stop(facts: Facts, number: int) -> str:
    them = "it" if number == 1 else "them"
    if _lacks_extender(facts):
        return (
            f"if no one bound {them} by hand, kube-scheduler does not call the extender; "
            f"{repairs.wire_scheduler(facts)}"
        )
    if not _asks_extender(facts):
        return (
            f"if no one bound {them} by hand, check whether kube-scheduler calls the extender: cardwise doctor "
            "without --no-probe tests that with a pod"
        )
    pods, were = ("the pod", "was") if number == 1 else ("the pods", "were")
    return (
        f"kube-scheduler is set to call the extender, so {pods} named a node (spec.nodeName) or another scheduler "
        f"(spec.schedulerName), {were} bound by hand, or {were} created while the webhook was down: remove these fields"
    )


def _asks_extender(facts: Facts) -> bool:
    """Whether the chart has configured each kube-scheduler that places pods with cards."""
    static = [pod for pod in facts.schedulers if names.MIRROR in annotations_of(pod)]
    wired = bool(static) and all(names.FORMER_CONFIG in annotations_of(pod) for pod in static)
    return wired or bool(schedulers.scheduler_names(facts.deployments))


def _lacks_extender(facts: Facts) -> bool:
    """Whether no kube-scheduler has a configuration file: extenders are nowhere but there."""
    static = [pod for pod in facts.schedulers if names.MIRROR in annotations_of(pod)]
    commands = [
        [str(word) for container in pod["spec"].get("containers") or () for word in _command_line(container)]
        for pod in static
    ]
    has_none = all(words and not any(map(_CONFIG.search, words)) for words in commands)
    return bool(static) and has_none and not schedulers.scheduler_names(facts.deployments)


def _command_line(container: Json) -> tuple[Any, ...]:
    """The command line of a container."""
    return (*(container.get("command") or ()), *(container.get("args") or ()))


def check_wiring(config: Json, title: str, remedy: str) -> Iterator[Finding]:
    """What a KubeSchedulerConfiguration lacks: a stanza for each of Cardwise's resources that ignores the markers.

    title: the pod of kube-scheduler.
    remedy: how to configure it to call the extender.
    """
    stanzas = config.get("Extenders") or config.get("extenders") or ()
    managed = {
        _get_field(resource, "name"): (stanza, bool(_get_field(resource, "ignoredByScheduler")))
        for stanza in stanzas
        for resource in _get_field(stanza, "managedResources") or ()
    }
    missing = [name for name in (*_FAST, *_SLOW) if name not in managed]
    if len(missing) == len(_FAST) + len(_SLOW):
        yield Finding("scheduler", Severity.PROBLEM, f"{title} has no extender for Cardwise's resources", remedy)
        return
    if missing:
        text = f"{title} does not call an extender for {', '.join(missing)}"
        yield Finding("scheduler", Severity.PROBLEM, text, remedy)
    unignored = [name for name in _MARKERS if name in managed and not managed[name][1]]
    if unignored:
        text = f"{title} does not ignore {', '.join(unignored)}, which no node offers: gang members never start"
        yield Finding("scheduler", Severity.PROBLEM, text, f"set ignoredByScheduler: true there, or {remedy}")
    ignorable = [stanza for stanza, _ in managed.values() if _get_field(stanza, "ignorable")]
    if ignorable:
        text = (
            f"{title} ignores the extender when it does not answer (ignorable: true): pods are bound without a GPU "
            "and then deleted"
        )
        yield Finding("scheduler", Severity.PROBLEM, text, "set ignorable: false")
    percent = _get_field(config, "percentageOfNodesToScore")
    if percent not in (None, 100):
        text = f"{title} considers only {percent or 'some'} % of the nodes: pods are packed less tightly"
        yield Finding("scheduler", Severity.NOTE, text, "set percentageOfNodesToScore: 100")
    if not missing and not unignored and not ignorable:
        yield Finding("scheduler", Severity.OK, f"{title} calls the extender for all of Cardwise's resources")


def _get_field(manifest: Json, key: str) -> Any:
    """A field as YAML spells it, or as kube-scheduler's own /configz does."""
    return manifest.get(key, manifest.get(key[0].upper() + key[1:]))
