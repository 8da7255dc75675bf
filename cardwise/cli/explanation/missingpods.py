"""Explains in sentences why a workload has no pods now, and what happened to a deleted pod."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from cardwise.cli.cluster import nodestates, podevents, workloads
from cardwise.cli.cluster.podevents import Event
from cardwise.cli.cluster.workloads import WorkloadState
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name

_MAX_LISTED: Final = 5
_KUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"  # the label of workloads that Kueue must admit
_JOB_CONTROLLER: Final = "kubernetes.io/job-controller"  # the value of `managedBy` for Kubernetes' own controller
_BOUND_BY_OTHERS_TEXT: Final = (
    "something other than Cardwise's extender had bound {them}. Unless this was done by hand (spec.nodeName, a "
    "Binding), kube-scheduler may not call the extender: ask your administrator to run `cardwise doctor`, which tests "
    "this with a pod"
)


def explain_workload(workload: WorkloadState) -> list[str]:
    """Return a line for each reason why the workload creates no pods, or why its pods are deleted."""
    if workload.manifest["metadata"].get("deletionTimestamp"):
        metadata = workload.manifest["metadata"]
        deleted_since, finalizer_note = workloads.deletion_time(metadata), workloads.finalizers_suffix(metadata)
        return [f"It is being deleted (since {deleted_since}){finalizer_note}: it creates no more pods."]
    lines = [*_explain_stopped(workload)]
    running_count = sum(workloads.pod_state(pod) != "ended" for pod in workload.pods)
    desired_count = _count_desired_pods(workload)
    if workload.refusal is not None and (desired_count is None or running_count < desired_count):
        lines.append(
            "Kubernetes could not create a pod: "
            f"{wording.sanitize_message(podevents.refusal_cause(workload.refusal.message))}"
        )
        namespace = workload.manifest["metadata"]["namespace"]
        retry = workloads.retry_command(namespace, workload.refusal.creator)
        lines.append(
            f"Its controller waits longer after each failure, up to 17 minutes. Once the cause is removed, `{retry}` "
            "makes it try at once."
        )
    if workload.directly_bound:
        pod_names = wording.enumerate_first(workload.directly_bound, _MAX_LISTED, "pod")
        lines.append(
            f"The extender has deleted pods of this workload within the last hour ({pod_names}): "
            f"{_BOUND_BY_OTHERS_TEXT.format(them='them')}."
        )
    if not workload.pods and not lines:
        metadata = workload.manifest["metadata"]
        fields = {"kind": workload.kind, "namespace": metadata["namespace"], "name": metadata["name"]}
        lines.append(
            "Its controller has not created a pod yet, or the event with the reason is older than an hour and no "
            f"longer kept: `{command('kubectl describe {kind} -n {namespace} {name}', **fields)}`"
        )
    return lines


def explain_nodes(pods: Iterable[Json], reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each node of the pods that takes no new pods. `reasons`: why a node takes none, by node."""
    lines = []
    pods_by_node: dict[str, list[str]] = {}
    for pod in pods:
        node = str((pod.get("spec") or {}).get("nodeName") or "")
        if node in reasons and workloads.pod_state(pod) != "ended":
            pods_by_node.setdefault(node, []).append(pod["metadata"]["name"])
    for node, pod_names in pods_by_node.items():
        outdated_note = ", so their reported state may be outdated" if nodestates.NOT_READY in reasons[node] else ""
        lines.append(
            f"Node {node} is {reasons[node]}{outdated_note}: {wording.enumerate_first(pod_names, _MAX_LISTED, 'pod')}."
        )
    return lines


def _count_desired_pods(workload: WorkloadState) -> int | None:
    """Return how many pods the workload should have; None if the workload's object does not show it."""
    spec, status = workload.manifest.get("spec") or {}, workload.manifest.get("status") or {}
    match workload.kind:
        case "deployment" | "statefulset" | "replicaset":
            return int(spec.get("replicas", 1))
        case "daemonset":
            return status.get("desiredNumberScheduled")
    return None


def _explain_stopped(workload: WorkloadState) -> Iterator[str]:
    """Yield the reasons, from the workload's own fields, for which it has no pods or creates no new ones."""
    spec, status = workload.manifest.get("spec") or {}, workload.manifest.get("status") or {}
    metadata = workload.manifest["metadata"]
    fields = {"kind": workload.kind, "namespace": metadata["namespace"], "name": metadata["name"]}
    match workload.kind:
        case "deployment" | "statefulset" | "replicaset":
            if spec.get("replicas") == 0:
                scale = command("kubectl scale {kind} -n {namespace} {name} --replicas=1", **fields)
                owner = workloads.controller_of(workload.manifest)
                creator = " ".join(quote_unless_name(owner[key]) for key in ("kind", "name") if owner)
                owner_note = f"{creator} uses a newer one, or is scaled to zero" if owner else ""
                yield f"It is scaled to zero (spec.replicas is 0): {owner_note or f'`{scale}` creates one'}."
            if spec.get("paused"):
                resume = command("kubectl rollout resume {kind} -n {namespace} {name}", **fields)
                yield f"It is paused (spec.paused): `{resume}`."
        case "daemonset":
            if status.get("desiredNumberScheduled") == 0:
                yield "No node is suitable: its nodeSelector, node affinity and tolerations exclude all nodes."
        case "job":
            yield from _explain_job(workload.manifest)
        case "cronjob":
            yield from _explain_cronjob(workload)


def _explain_job(job: Json) -> Iterator[str]:
    spec = job.get("spec") or {}
    if (manager := spec.get("managedBy") or _JOB_CONTROLLER) != _JOB_CONTROLLER:
        controller = quote_unless_name(manager)
        yield f"The controller {controller} manages it (spec.managedBy) and may create its pods elsewhere."
    if spec.get("suspend"):
        namespace = job["metadata"]["namespace"]
        if _KUEUE_LABEL in labels_of(job):
            workloads_of = command("kubectl get workloads -n {namespace}", namespace=namespace)
            yield f"It is suspended until Kueue admits it: `{workloads_of}` shows why it waits."
        else:
            yield "It is suspended (spec.suspend): it creates pods once that is set to false."
    if spec.get("parallelism") == 0:
        yield "It runs no pods (spec.parallelism is 0)."
    if end_condition := _end_condition(job):
        reason = ": ".join(filter(None, (end_condition.get("reason"), end_condition.get("message"))))
        status_note = (
            f" Its status: {wording.sanitize_message(reason)}" if end_condition["type"] == "Failed" and reason else ""
        )
        yield (
            f"It {'is complete' if end_condition['type'] == 'Complete' else 'has failed'}: it creates no more "
            f"pods.{status_note}"
        )


def _end_condition(job: Json) -> Json:
    """Return the condition by which a Job has ended; empty if the Job has not ended."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    ends = (
        condition
        for condition in conditions
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True"
    )
    return next(ends, {})


def _explain_cronjob(workload: WorkloadState) -> Iterator[str]:
    spec, status = workload.manifest.get("spec") or {}, workload.manifest.get("status") or {}
    if spec.get("suspend"):
        yield "It is suspended (spec.suspend): it creates no Job until that is false."
        return
    unfinished_jobs = [job for job in workload.pod_creators if not _end_condition(job)]
    for job in unfinished_jobs:
        yield from (f"About its Job {job['metadata']['name']}: {line}" for line in _explain_job(job))
    if not unfinished_jobs:
        time_zone = f" {quote_unless_name(spec['timeZone'])}" if spec.get("timeZone") else ""
        last_schedule = status.get("lastScheduleTime")
        last_job_note = (
            f"its last Job was created at {quote_unless_name(last_schedule)}"
            if last_schedule
            else "it has not created a Job yet"
        )
        yield (
            f"It is not due yet: its schedule is {wording.quote_text(spec.get('schedule', '?'))}{time_zone}, and "
            f"{last_job_note}."
        )


def explain_gone_pod(namespace: str, name: str, events: Sequence[Event]) -> list[str]:
    """Explain from events what happened to a deleted pod; empty if no event shows it. `events`: the oldest first."""
    if not events:
        return []
    lines = [f"pod {namespace}/{name} no longer exists. Its last events:"]
    for event in events[-_MAX_LISTED:]:
        author = f"{event.kind} {event.name}: " if event.kind != "Pod" else ""
        reason = quote_unless_name(event.reason)
        lines.append(f"  {event.last_timestamp} {reason}: {author}{wording.sanitize_message(event.message)}")
    if any(event.reason == names.BOUND_WITHOUT_EXTENDER for event in events):
        lines.append(
            f"It got no GPU, because {_BOUND_BY_OTHERS_TEXT.format(them='it')}; until that is fixed, "
            "replacement pods are deleted too."
        )
    deleters = dict.fromkeys((event.kind, event.name) for event in events if event.kind != "Pod")
    for kind, owner in deleters:
        if word := workloads.parse_kind(kind):
            explain_command = command(
                "cardwise explain -n {namespace} {kind}/{name}", namespace=namespace, kind=word, name=owner
            )
            lines.append(f"The current state of its {kind}: {explain_command}")
    return lines


def as_json(namespace: str, name: str, text: str) -> Json:
    """Return the JSON of the explanation, in the form of an existing pod's."""
    document: Json = {"phase": "Gone", "node": None, "gpus": [], "nodes": []}
    return {"namespace": namespace, "name": name} | document | {"text": text.splitlines()}
