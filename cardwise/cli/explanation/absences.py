"""Why a workload makes no pods now, and what became of a pod that is gone, in sentences."""

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

_FEW: Final = 5
_KUEUE: Final = "kueue.x-k8s.io/queue-name"  # the label of what Kueue admits
_JOB_CONTROLLER: Final = "kubernetes.io/job-controller"  # Kubernetes' own
_UNWIRED: Final = (
    "something other than Cardwise's extender had bound {them}. If nobody did so by hand (spec.nodeName, a Binding), "
    "kube-scheduler may not ask the extender: your administrator runs `cardwise doctor`, which tries that with a pod"
)


def explain_workload(workload: WorkloadState) -> list[str]:
    """A line for each thing that keeps the workload from making pods, or that makes its pods vanish."""
    if workload.manifest["metadata"].get("deletionTimestamp"):
        metadata = workload.manifest["metadata"]
        since, kept = workloads.deleted_at(metadata), workloads.kept_by_finalizers(metadata)
        return [f"It is being deleted (since {since}){kept}: no more pods are made."]
    lines = [*_explain_stopped(workload)]
    running = sum(workloads.pod_state(pod) != "ended" for pod in workload.pods)
    wanted = _desired_pods(workload)
    if workload.refused and (wanted is None or running < wanted):
        lines.append(
            f"Kubernetes could not create one: {wording.sanitize_message(podevents.refusal_cause(workload.refused))}"
        )
        namespace = workload.manifest["metadata"]["namespace"]
        retry = workloads.retry_command(namespace, workload.refused_maker)
        lines.append(
            "Its controller pauses longer after each failure, up to 17 minutes. Once the cause is gone, "
            f"`{retry}` makes it try at once."
        )
    if workload.directly_bound:
        listed = wording.enumerate_first(workload.directly_bound, _FEW, "pod")
        lines.append(f"The extender has deleted pods of it within the hour ({listed}): {_UNWIRED.format(them='them')}.")
    if not workload.pods and not lines:
        metadata = workload.manifest["metadata"]
        fields = {"kind": workload.kind, "namespace": metadata["namespace"], "name": metadata["name"]}
        lines.append(
            "Its controller has not made one yet, or the reason is older than an hour, which is how long events are "
            f"kept: `{command('kubectl describe {kind} -n {namespace} {name}', **fields)}`"
        )
    return lines


def explain_nodes(pods: Iterable[Json], closed: Mapping[str, str]) -> list[str]:
    """A line for each of these nodes on which some of the pods are. `closed`: by node, why it takes no new pods."""
    lines = []
    on_node: dict[str, list[str]] = {}
    for pod in pods:
        node = str((pod.get("spec") or {}).get("nodeName") or "")
        if node in closed and workloads.pod_state(pod) != "ended":
            on_node.setdefault(node, []).append(pod["metadata"]["name"])
    for node, names_of in on_node.items():
        old = ", so that what they say of themselves may be old" if nodestates.NOT_READY in closed[node] else ""
        lines.append(f"Node {node} is {closed[node]}{old}: {wording.enumerate_first(names_of, _FEW, 'pod')}.")
    return lines


def _desired_pods(workload: WorkloadState) -> int | None:
    """How many pods there should be; None where only its controller knows."""
    spec, status = workload.manifest.get("spec") or {}, workload.manifest.get("status") or {}
    match workload.kind:
        case "deployment" | "statefulset" | "replicaset":
            return int(spec.get("replicas", 1))
        case "daemonset":
            return status.get("desiredNumberScheduled")
    return None


def _explain_stopped(workload: WorkloadState) -> Iterator[str]:
    """What its own fields say of why there are none, or no new ones."""
    spec, status = workload.manifest.get("spec") or {}, workload.manifest.get("status") or {}
    metadata = workload.manifest["metadata"]
    fields = {"kind": workload.kind, "namespace": metadata["namespace"], "name": metadata["name"]}
    match workload.kind:
        case "deployment" | "statefulset" | "replicaset":
            if spec.get("replicas") == 0:
                scale = command("kubectl scale {kind} -n {namespace} {name} --replicas=1", **fields)
                owner = workloads.controller_of(workload.manifest)
                maker = " ".join(quote_unless_name(owner[key]) for key in ("kind", "name") if owner)
                of = f"{maker} has another one now, or wants no pod" if owner else ""
                yield f"It is to have none (spec.replicas is 0): {of or f'`{scale}` asks for one'}."
            if spec.get("paused"):
                resume = command("kubectl rollout resume {kind} -n {namespace} {name}", **fields)
                yield f"It is paused (spec.paused): `{resume}`."
        case "daemonset":
            if status.get("desiredNumberScheduled") == 0:
                yield "No node is right for it: its nodeSelector, node affinity and tolerations leave none."
        case "job":
            yield from _explain_job(workload.manifest)
        case "cronjob":
            yield from _explain_cronjob(workload)


def _explain_job(job: Json) -> Iterator[str]:
    spec = job.get("spec") or {}
    if (manager := spec.get("managedBy") or _JOB_CONTROLLER) != _JOB_CONTROLLER:
        controller = quote_unless_name(manager)
        yield f"It is left to the controller {controller} (spec.managedBy), which may make pods elsewhere."
    if spec.get("suspend"):
        namespace = job["metadata"]["namespace"]
        if _KUEUE in labels_of(job):
            workloads_of = command("kubectl get workloads -n {namespace}", namespace=namespace)
            yield f"It is suspended until Kueue admits it: `{workloads_of}` says why it waits."
        else:
            yield "It is suspended (spec.suspend): whoever has suspended it sets that to false."
    if spec.get("parallelism") == 0:
        yield "It is to have none at a time (spec.parallelism is 0)."
    if end := _end_condition(job):
        reason = ": ".join(filter(None, (end.get("reason"), end.get("message"))))
        says = f" Its status says: {wording.sanitize_message(reason)}" if end["type"] == "Failed" and reason else ""
        yield f"It {'is complete' if end['type'] == 'Complete' else 'has failed'}: no more pods are made.{says}"


def _end_condition(job: Json) -> Json:
    """The condition that says how the job has ended; an empty one where it has not."""
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
        yield "It is suspended (spec.suspend): it makes no job until that is false."
        return
    unfinished = [job for job in workload.makers if not _end_condition(job)]
    for job in unfinished:
        yield from (f"Of its job {job['metadata']['name']}: {line}" for line in _explain_job(job))
    if not unfinished:
        zone = f" {quote_unless_name(spec['timeZone'])}" if spec.get("timeZone") else ""
        last = status.get("lastScheduleTime")
        when = f"its last job was made at {quote_unless_name(last)}" if last else "it has not made a job yet"
        yield f"It is not due: its schedule is {wording.quote_text(spec.get('schedule', '?'))}{zone}, and {when}."


def explain_gone_pod(namespace: str, name: str, events: Sequence[Event]) -> list[str]:
    """What became of a pod that is not there any more; empty where no event tells. `events`: the oldest first."""
    if not events:
        return []
    lines = [f"pod {namespace}/{name} is gone. Its last events:"]
    for event in events[-_FEW:]:
        by = f"{event.kind} {event.name}: " if event.kind != "Pod" else ""
        reason = quote_unless_name(event.reason)
        lines.append(f"  {event.at} {reason}: {by}{wording.sanitize_message(event.message)}")
    if any(event.reason == names.BOUND_WITHOUT_EXTENDER for event in events):
        lines.append(
            f"It got no GPU, since {_UNWIRED.format(them='it')}; until then a pod that is made in its place is deleted "
            "too."
        )
    deleters = dict.fromkeys((event.kind, event.name) for event in events if event.kind != "Pod")
    for kind, owner in deleters:
        if word := workloads.kind_of(kind):
            again = command("cardwise explain -n {namespace} {kind}/{name}", namespace=namespace, kind=word, name=owner)
            lines.append(f"What its {kind} does now: {again}")
    return lines


def as_json(namespace: str, name: str, text: str) -> Json:
    """The same for programs, as of a pod that is there."""
    gone: Json = {"phase": "Gone", "node": None, "cards": [], "nodes": []}
    return {"namespace": namespace, "name": name} | gone | {"text": text.splitlines()}
