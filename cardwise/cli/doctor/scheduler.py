"""Checks that pods have a kube-scheduler, and that its configuration, if readable, calls the extender."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from cardwise.cli.cluster import schedulers
from cardwise.cli.doctor import claims, finding, repairs
from cardwise.cli.doctor.facts import PENDING_SELECTOR, PROBE_POD_PREFIX, Facts, is_recent, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity, name_pods
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name

_FILTERED_RESOURCES: Final = (names.GPU_MEM, names.WHOLE_GPU, names.FILTER_CALL_RESOURCE)
_BOUND_RESOURCES: Final = (names.SHARE, names.BIND_CALL_RESOURCE)
_MAX_LISTED: Final = 3  # maximum number of writers of events named in one line
_STRANDED_SELECTOR: Final = f"spec.schedulerName={names.SCHEDULER},{PENDING_SELECTOR}"
_EVENT_MAX_AGE: Final = timedelta(minutes=10)
# The option with the configuration file in kube-scheduler's command line.
_CONFIG_FLAG: Final = re.compile(r"(?<!\S)--?config(?:[=\s]|$)")
_MARKER_RESOURCES: Final = (names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)


def check_stranded_pods(facts: Facts) -> Iterator[Finding]:
    """Find pods that wait for the chart's own kube-scheduler although it no longer exists or has another name."""
    stranded_pods = [pod for pod in facts.pending_pods if pod["spec"].get("schedulerName") == names.SCHEDULER]
    pod_names = [namespaced_name(pod) for pod in stranded_pods]
    if (
        not pod_names
        or "deployments" in facts.unread_kinds
        or names.SCHEDULER in schedulers.scheduler_names(facts.deployments)
    ):
        return
    is_single = len(pod_names) == 1
    text = (
        f"{name_pods(pod_names)} "
        f"wait{'s' * is_single} for the scheduler "
        f"{names.SCHEDULER}, which no longer exists: nothing places {'it' if is_single else 'them'}"
    )
    delete = command("kubectl delete pods -A --field-selector={selector:text}", selector=_STRANDED_SELECTOR)
    remedy = repairs.recreate_command(stranded_pods, delete_all=delete, dropped_fields=["schedulerName"])
    yield Finding("scheduler", Severity.PROBLEM, text, remedy)


def check_unconfigured_control_planes(facts: Facts) -> Iterator[Finding]:
    """Find control plane nodes that joined after the chart had configured kube-scheduler (`scheduler.mode=kubeadm`).

    The chart has not configured the kube-scheduler of such a node. Only the leading kube-scheduler places pods; when
    this kube-scheduler becomes the leader, no pod gets a card.
    """
    static_pods = [pod for pod in facts.schedulers if names.MIRROR in annotations_of(pod)]
    annotations_by_node = {pod["spec"]["nodeName"]: annotations_of(pod) for pod in static_pods}
    if claims.uses_claims(facts):
        return
    configured_nodes = [
        node for node in sorted(annotations_by_node) if names.FORMER_CONFIG in annotations_by_node[node]
    ]
    unconfigured_nodes = [node for node in sorted(annotations_by_node) if node not in configured_nodes]
    if configured_nodes and unconfigured_nodes:
        text = (
            f"kube-scheduler calls the extender on {finding.name_nodes(configured_nodes)}, and does not on "
            f"{finding.name_nodes(unconfigured_nodes)}: while that one is leader, it binds pods without a GPU, and "
            "the extender "
            "deletes them"
        )
        remedy = (
            f"let the chart configure it too: {repairs.upgrade_command(facts)} (scheduler.controlPlaneNodes too, if "
            "it is set)"
        )
        yield Finding("scheduler", Severity.PROBLEM, text, remedy)


def check_deleted_pods(facts: Facts) -> Iterator[Finding]:
    """Find pods that the extender deleted because another scheduler had bound them. Their owners saw them disappear.

    Doctor's own pods are left out, because another check has created and reported them. The Events are in users'
    namespaces, and users may have written them. So the finding is only a warning. The remedy depends on
    kube-scheduler's configuration: only if it shows that the extender is not called, the remedy is the command that
    configures kube-scheduler.
    """
    recent_events = [
        event for event in facts.pod_events if event.kind == "Pod" and is_recent(facts, event, _EVENT_MAX_AGE)
    ]
    events = [event for event in recent_events if not event.name.startswith(PROBE_POD_PREFIX)]
    pods = sorted({f"{event.namespace}/{event.name}" for event in events})
    if pods:
        writers = sorted({quote_unless_name(event.reporter) if event.reporter else "no name" for event in events})
        text = (
            f"in the last 10 minutes {name_pods(pods)} disappeared: bound without the extender, so without a "
            "GPU, and "
            f"then deleted (Events of {wording.enumerate_first(writers, _MAX_LISTED)})"
        )
        may_lack_extender = _calls_no_extender(facts) and not claims.uses_claims(facts)
        level = Severity.WARNING if may_lack_extender else Severity.NOTE
        yield Finding("scheduler", level, text, _suggest_stop(facts, len(pods)))


def _suggest_stop(facts: Facts, pod_count: int) -> str:
    pods, were = ("the pod", "was") if pod_count == 1 else ("the pods", "were")
    if claims.uses_claims(facts):
        return (
            f"{pods} named a node (spec.nodeName), {were} bound by hand, or {were} created before "
            "scheduler.mode=claims: remove these fields"
        )
    if _calls_no_extender(facts):
        return (
            f"unless {pods} {were} bound by hand, kube-scheduler does not call the extender; "
            f"{repairs.suggest_scheduler_configuration(facts)}"
        )
    if not _calls_extender(facts):
        return (
            f"unless {pods} {were} bound by hand, check whether kube-scheduler calls the extender: cardwise doctor "
            "without --no-probe tests this with a pod"
        )
    return (
        f"kube-scheduler is set to call the extender, so {pods} named a node (spec.nodeName) or another scheduler "
        f"(spec.schedulerName), {were} bound by hand, or {were} created while the webhook was down: remove these fields"
    )


def _calls_extender(facts: Facts) -> bool:
    """Whether the chart has configured each kube-scheduler that places pods with cards to call the extender."""
    static_pods = [pod for pod in facts.schedulers if names.MIRROR in annotations_of(pod)]
    are_configured = bool(static_pods) and all(names.FORMER_CONFIG in annotations_of(pod) for pod in static_pods)
    return are_configured or bool(schedulers.scheduler_names(facts.deployments))


def _calls_no_extender(facts: Facts) -> bool:
    """Whether no kube-scheduler has a configuration file: extenders can be configured only in this file."""
    static_pods = [pod for pod in facts.schedulers if names.MIRROR in annotations_of(pod)]
    commands = [
        [str(word) for container in pod["spec"].get("containers") or () for word in _command_line(container)]
        for pod in static_pods
    ]
    lack_config = all(words and not any(map(_CONFIG_FLAG.search, words)) for words in commands)
    return bool(static_pods) and lack_config and not schedulers.scheduler_names(facts.deployments)


def _command_line(container: Json) -> tuple[Any, ...]:
    """Return the command and the arguments of a container."""
    return (*(container.get("command") or ()), *(container.get("args") or ()))


def check_scheduler_configuration(config: Json, title: str, remedy: str) -> Iterator[Finding]:
    """Check that a KubeSchedulerConfiguration has an extender for each resource of Cardwise, and ignores the markers.

    title: the name of kube-scheduler's pod, for findings.
    remedy: the remedy that configures kube-scheduler to call the extender.
    """
    stanzas = config.get("Extenders") or config.get("extenders") or ()
    stanza_by_resource = {
        _get_field(resource, "name"): (stanza, bool(_get_field(resource, "ignoredByScheduler")))
        for stanza in stanzas
        for resource in _get_field(stanza, "managedResources") or ()
    }
    missing_resources = [name for name in (*_FILTERED_RESOURCES, *_BOUND_RESOURCES) if name not in stanza_by_resource]
    if len(missing_resources) == len(_FILTERED_RESOURCES) + len(_BOUND_RESOURCES):
        yield Finding("scheduler", Severity.PROBLEM, f"{title} has no extender for Cardwise's resources", remedy)
        return
    if missing_resources:
        text = f"{title} does not call an extender for {', '.join(missing_resources)}"
        yield Finding("scheduler", Severity.PROBLEM, text, remedy)
    unignored_markers = [
        name for name in _MARKER_RESOURCES if name in stanza_by_resource and not stanza_by_resource[name][1]
    ]
    if unignored_markers:
        text = f"{title} does not ignore {', '.join(unignored_markers)}, which no node offers: gang members never start"
        yield Finding("scheduler", Severity.PROBLEM, text, f"set ignoredByScheduler: true there, or {remedy}")
    ignorable_stanzas = [stanza for stanza, _ in stanza_by_resource.values() if _get_field(stanza, "ignorable")]
    if ignorable_stanzas:
        text = (
            f"{title} ignores the extender when it does not answer (ignorable: true): pods are bound without a GPU "
            "and then deleted"
        )
        yield Finding("scheduler", Severity.PROBLEM, text, "set ignorable: false")
    percent = _get_field(config, "percentageOfNodesToScore")
    if percent not in (None, 100):
        text = f"{title} considers only {percent or 'some'} % of the nodes: pods are packed less tightly"
        yield Finding("scheduler", Severity.NOTE, text, "set percentageOfNodesToScore: 100")
    if not missing_resources and not unignored_markers and not ignorable_stanzas:
        yield Finding("scheduler", Severity.OK, f"{title} calls the extender for all of Cardwise's resources")


def _get_field(manifest: Json, key: str) -> Any:
    """Return a field, which YAML spells in lower case and kube-scheduler's own /configz in upper case."""
    return manifest.get(key, manifest.get(key[0].upper() + key[1:]))
