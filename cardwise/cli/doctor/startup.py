"""Checks that the pods of Cardwise's own components are created, start, and keep running.

Kubernetes reports the cause of a failure in three places. If pods are refused, it is an event of their controller. If
containers fail, it is their state and last termination (with the end of the log, `terminationMessagePolicy`). If no
container has started, it is an event of the pod. Pods with the same cause share one finding.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from cardwise.cli.cluster import nodestates, podevents, workloads
from cardwise.cli.doctor import finding, repairs
from cardwise.cli.doctor.facts import Facts, is_recent, nvidia_runtimes
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.shellcommand import command
from cardwise.core.values.timestamps import parse_timestamp

CHECK_NAME: Final = "components"
_CREATOR_KINDS: Final = ("DaemonSet", "ReplicaSet", "Job")
_NAME_PREFIX: Final = "cardwise-"  # the prefix of the names of all objects of the chart
_COMPONENT: Final = "app.kubernetes.io/component"
_LONG_RUNNING_PARTS: Final = ("webhook", "extender", "scheduler", "deviceplugin", "mps")
_NODE_PARTS: Final = ("deviceplugin", "mps")
# Components that are Jobs. Failed pods of a Job stay. After a failure of `kubeadm`, kube-scheduler's configuration is
# unchanged.
_JOB_PARTS: Final = ("kubeadm",)
_RETRY_MINUTES: Final = 17  # maximum time that a controller waits before it tries again
_CREATION_MAX_AGE: Final = timedelta(minutes=_RETRY_MINUTES + 3)
_EVENT_MAX_AGE: Final = timedelta(minutes=10)
_STARTING_TIME: Final = timedelta(minutes=1)  # a younger pod may still be starting
_MIN_RESTARTS: Final = 3  # with fewer restarts a running container counts as recovered
_BACK_OFF: Final = "CrashLoopBackOff"
_OUT_OF_MEMORY: Final = "OOMKilled"
_MAX_REASON_BYTES: Final = 300  # maximum length of a reason
_MAX_LISTED: Final = 3

# Reasons of the events that explain why no container starts.
_START_EVENTS: Final = (
    "FailedMount",
    "FailedCreatePodSandBox",
    "FailedScheduling",
)


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a pod of one of Cardwise's components is not ready.

    state: the words after the pod's name in a finding, such as "does not start".
    reason: the message of Kubernetes or of the component; "" if there is none.
    """

    component: str
    state: str
    reason: str
    hint: str = ""  # the command that shows more about one of the pods


def check_uncreated_pods(facts: Facts) -> Iterator[Finding]:
    """Find controllers of Cardwise whose pods Kubernetes refuses, for example by Pod Security or a quota."""
    message_by_controller: dict[tuple[str, str], str] = {}
    for event in sorted(facts.own_events, key=lambda event: event.time):
        kind, name = event.kind, event.name
        is_own_refusal = (
            event.reason == podevents.CREATION_REFUSED and kind in _CREATOR_KINDS and name.startswith(_NAME_PREFIX)
        )
        if is_own_refusal and is_recent(facts, event, _CREATION_MAX_AGE) and _has_too_few_pods(facts, kind, name):
            message_by_controller[kind, name] = event.message
    for (kind, name), message in message_by_controller.items():
        refusal_text = wording.sanitize_message(podevents.refusal_cause(message), _MAX_REASON_BYTES)
        text = f"{kind} {name} cannot create pods: {refusal_text}"
        remedy = _admission_remedy(facts, name, message)
        retry = workloads.retry_command(facts.cardwise_namespace, f"{kind.lower()} {name}")
        pauses = f"its controller waits longer after each failure, up to {_RETRY_MINUTES} minutes"
        remedy += f"{' &&' if remedy.startswith('kubectl') else '; then'} {retry} ({pauses})"
        yield Finding(CHECK_NAME, Severity.PROBLEM, text, remedy)


def _has_too_few_pods(facts: Facts, kind: str, name: str) -> bool:
    """Whether the controller has fewer pods than it should have; True if unknown, as for a Job."""
    for workload in facts.daemonsets if kind == "DaemonSet" else facts.deployments if kind == "ReplicaSet" else ():
        metadata, status = workload["metadata"], workload.get("status") or {}
        if kind == "DaemonSet" and metadata["name"] == name:
            return int(status.get("currentNumberScheduled", 0)) < int(status.get("desiredNumberScheduled", 0))
        if kind == "ReplicaSet" and metadata["name"] == name.rpartition("-")[0]:
            return int(status.get("replicas", 0)) < desired_replicas(workload) or bool(
                status.get("unavailableReplicas")
            )
    return kind == "Job" or bool(facts.unread_kinds.keys() & {"daemonsets", "deployments"})


def _admission_remedy(facts: Facts, name: str, message: str) -> str:
    component = name.removeprefix(_NAME_PREFIX).partition("-")[0]
    if "violates PodSecurity" in message:
        return repairs.label_namespace_command(facts.cardwise_namespace)
    if quota := re.search(r"exceeded quota: ([^,\s]+)", message):
        edit = command(
            "kubectl edit resourcequota {quota} -n {namespace}", quota=quota[1], namespace=facts.cardwise_namespace
        )
        return f"raise that quota: {edit}"
    if "insufficient quota to match these scopes" in message:
        return (
            f"a ResourceQuota of {facts.cardwise_namespace} has to allow the PriorityClass, as the chart's does for "
            f"system-node-critical and system-cluster-critical; recreate it: {repairs.upgrade_command(facts)}"
        )
    if "PriorityClass" in message:
        return f"set {component}.priorityClassName of the chart to one of: kubectl get priorityclasses"
    if "webhook" in message:
        return f"exempt the namespace {facts.cardwise_namespace} from that webhook, or start that webhook"
    return f"change the rule that refuses it, so that the rule admits the pods of namespace {facts.cardwise_namespace}"


def check_scaled_down(facts: Facts) -> Iterator[Finding]:
    """Find Cardwise's Deployments that are scaled to zero. `check_leader` reports the extender's Deployment."""
    for workload in facts.deployments:
        metadata = workload["metadata"]
        component = metadata["name"].removeprefix(_NAME_PREFIX)
        if component in ("webhook", "scheduler") and not desired_replicas(workload):
            text = f"Deployment {metadata['name']} is scaled to 0"
            yield Finding(CHECK_NAME, Severity.PROBLEM, text, repairs.scale_command(facts, metadata["name"]))


def desired_replicas(deployment: Json) -> int:
    """Return how many pods the Deployment should have."""
    number = (deployment.get("spec") or {}).get("replicas")
    return 1 if number is None else int(number)


def check_unready_pods(facts: Facts) -> Iterator[Finding]:
    """Find pods of Cardwise's components that crash, hang before their start, or stay unready."""
    pods_by_fault: dict[_Fault, list[Json]] = {}
    ready_components: set[str] = set()
    for pod in facts.own_pods:
        component = labels_of(pod).get(_COMPONENT, "")
        if component not in (*_LONG_RUNNING_PARTS, *_JOB_PARTS) or pod["metadata"].get("deletionTimestamp"):
            continue
        fault = _find_fault(facts, component, pod)
        if fault is not None:
            pods_by_fault.setdefault(fault, []).append(pod)
        elif _is_ready(pod):
            ready_components.add(component)
    for fault, pods in pods_by_fault.items():
        level = Severity.WARNING if fault.component in ready_components else Severity.PROBLEM
        text = f"{_describe_pods(fault.component, pods)} {fault.state}"
        text += f": {fault.reason}" if fault.reason else ""
        yield Finding(CHECK_NAME, level, text, _suggest_remedy(facts, fault, pods[0]))


def is_faulty(facts: Facts, component: str) -> bool:
    """Whether the component fails because its pods are refused, hang before their start, or crash."""
    has_refused_pods = any(f"{_NAME_PREFIX}{component}" in finding.text for finding in check_uncreated_pods(facts))
    pods = [pod for pod in facts.own_pods if labels_of(pod).get(_COMPONENT) == component]
    return has_refused_pods or any(_find_fault(facts, component, pod) is not None for pod in pods)


def _describe_pods(component: str, pods: list[Json]) -> str:
    nodes = sorted({str((pod.get("spec") or {}).get("nodeName") or "") for pod in pods} - {""})
    if component in _NODE_PARTS and nodes:
        return f"{_NAME_PREFIX}{component} on {finding.name_nodes(nodes)}"
    pod_names = [pod["metadata"]["name"] for pod in pods]
    if len(pods) == 1:
        return f"pod {pod_names[0]}"
    return f"{_NAME_PREFIX}{component} in {len(pods)} pods ({wording.enumerate_first(pod_names, _MAX_LISTED)})"


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


def _find_fault(facts: Facts, component: str, pod: Json) -> _Fault | None:
    """Return the pod's fault; None if the pod is ready, has just begun to start, or has ended without a fault."""
    status = pod.get("status") or {}
    if component in _JOB_PARTS:
        return _find_job_fault(component, status) if status.get("phase") == "Failed" else None
    if status.get("phase") in ("Succeeded", "Failed"):
        return None  # for example an evicted pod, which its controller has replaced
    if not _is_ready(pod) and (state := _find_not_ready_node_state(facts, pod)):
        # The check `nodes` reports a node with cards, so the component's pod needs no finding of its own.
        is_reported = component in _NODE_PARTS and pod["spec"]["nodeName"] in facts.card_nodes()
        return None if is_reported else _Fault(component, f"is not ready, because its node is {state}", "", "node")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        fault = _find_container_fault(facts, component, container)
        if fault is not None:
            return fault
    if _is_ready(pod):
        return None
    event = _last_start_event(facts, pod)
    if event:
        return _Fault(component, "does not start", event)
    created = parse_timestamp(pod["metadata"].get("creationTimestamp"))
    if created is not None and facts.now is not None and facts.now - created < _STARTING_TIME:
        return None
    if status.get("phase") == "Pending":
        return _Fault(component, "does not start", "", "describe")
    return _Fault(component, "is running but not ready", "", "readyz")


def _find_not_ready_node_state(facts: Facts, pod: Json) -> str | None:
    """Return the state of the pod's node if its kubelet does not report or does not run pods; None otherwise."""
    name = (pod.get("spec") or {}).get("nodeName")
    node = next((node for node in facts.nodes if name and node["metadata"]["name"] == name), None)
    state = nodestates.unschedulable_reason(node) if node is not None else None
    return state if state is not None and nodestates.NOT_READY in state else None


def _find_job_fault(component: str, status: Json) -> _Fault:
    ends = [(status.get("state") or {}).get("terminated") or {} for status in status.get("containerStatuses") or ()]
    reason = next((error for error in map(_last_error, ends) if error), str(status.get("message") or ""))
    return _Fault(component, "failed", wording.sanitize_message(reason, _MAX_REASON_BYTES), "log")


def _find_container_fault(facts: Facts, component: str, container: Json) -> _Fault | None:
    state = container.get("state") or {}
    waiting, terminated = state.get("waiting") or {}, state.get("terminated") or {}
    reason = str(waiting.get("reason") or "")
    if reason not in ("", _BACK_OFF, "ContainerCreating", "PodInitializing"):
        message, fault_name = (
            wording.sanitize_message(str(waiting.get("message") or ""), _MAX_REASON_BYTES),
            wording.quote_unless_name(reason),
        )
        return _Fault(component, "does not start", f"{fault_name}: {message}" if message else fault_name, "describe")
    end = terminated or (container.get("lastState") or {}).get("terminated") or {}
    if not (reason == _BACK_OFF or terminated.get("exitCode") or _has_just_crashed(facts, container, end)):
        return None
    error = _last_error(end) or f"exit code {end.get('exitCode')}, and its log is empty"
    if end.get("reason") == _OUT_OF_MEMORY:
        error = f"{_OUT_OF_MEMORY}: it uses more memory than its limit"
    return _Fault(component, "crashes, last error", wording.sanitize_message(error, _MAX_REASON_BYTES), "previous log")


def _has_just_crashed(facts: Facts, container: Json, end: Json) -> bool:
    """Whether a running container had an error a moment ago, and either had many errors before or is not ready yet."""
    finished = parse_timestamp(end.get("finishedAt"))
    if not end.get("exitCode") or finished is None or facts.now is None or facts.now - finished > _EVENT_MAX_AGE:
        return False
    return not container.get("ready") or int(container.get("restartCount", 0)) >= _MIN_RESTARTS


def _last_error(end: Mapping[str, object]) -> str | None:
    """Return a container's last error from its termination message, which is the end of its log; None if empty."""
    fallback: str | None = None
    for line in reversed(str(end.get("message") or "").splitlines()):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            event = str(entry.get("event", ""))
            if entry.get("level") in ("error", "critical"):
                traceback = str(entry.get("exception", "")).strip().splitlines()
                error = str(entry.get("error", "")) or (traceback[-1] if traceback else "")
                return f"{event}: {error}" if error else event or None
            fallback = fallback or event or None
        elif line.startswith("Error") or "[error" in line:
            return line.strip()
        else:
            fallback = fallback or line.strip()
    return fallback


def _last_start_event(facts: Facts, pod: Json) -> str | None:
    """Return the last event about a pod without a started container; None if there is none."""
    name = pod["metadata"]["name"]
    events = [
        event
        for event in facts.own_events
        if event.kind == "Pod"
        and event.name == name
        and event.reason in _START_EVENTS
        and is_recent(facts, event, _EVENT_MAX_AGE)
    ]
    if not events:
        return None
    last_event = max(events, key=lambda event: event.time)
    return (
        f"{wording.quote_unless_name(last_event.reason)}: "
        f"{wording.sanitize_message(last_event.message, _MAX_REASON_BYTES)}"
    )


def _suggest_remedy(facts: Facts, fault: _Fault, pod: Json) -> str:
    reason, component, name = fault.reason, fault.component, pod["metadata"]["name"]
    if "NVML does not start" in reason or "NVML Shared Library" in reason:
        return _driver_remedy(facts, pod)
    if "no runtime for" in reason or "RuntimeHandler" in reason:
        return (
            "the node's container runtime has no handler for nodes.runtimeClass: install NVIDIA's container "
            "toolkit there (docs/container-toolkit.md)"
        )
    if "FailedMount" in reason and "hostPath" in reason:
        return "set the folder as it is on that node: nodes.kubeletDir, nodes.criSocket of the chart"
    if any(reason_part in reason for reason_part in ("ImagePull", "ErrImage", "InvalidImageName")):
        return "check image.repository, image.tag and image.pullSecrets of the chart (of `own` scheduler.image too)"
    if reason.startswith(_OUT_OF_MEMORY):
        return f"raise its memory limit in {component}.resources of the chart"
    match fault.hint:
        case "readyz":
            ready = "kubectl get --raw /api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/readyz"
            return (
                "what is missing: "
                f"{command(ready, namespace=facts.cardwise_namespace, pod=name, port=_metrics_port(pod))}"
            )
        case "node":
            return nodestates.suggest_remedy(nodestates.NOT_READY, pod["spec"]["nodeName"]).replace("`", "")
        case "log":
            return f"full log: {repairs.log_command(facts, name)}"
        case "previous log":
            return f"full log: {repairs.log_command(facts, name, previous=True)}"
    describe = command("kubectl describe pod -n {namespace} {pod}", namespace=facts.cardwise_namespace, pod=name)
    return f"details: {describe}"


def _metrics_port(pod: Json) -> int:
    ports = [
        port for container in (pod.get("spec") or {}).get("containers") or () for port in container.get("ports") or ()
    ]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "metrics"), 9400)


def _driver_remedy(facts: Facts, pod: Json) -> str:
    """Return the remedy for a component that does not find NVIDIA's driver in its container."""
    runtime_names = [name for name, _ in nvidia_runtimes(facts)]
    runtime_class = (pod.get("spec") or {}).get("runtimeClassName")
    if runtime_names and not runtime_class:
        return (
            f"run it with NVIDIA's RuntimeClass: {repairs.upgrade_command(facts, nodes_runtimeClass=runtime_names[0])}"
        )
    if runtime_class:
        return "install NVIDIA's driver on that node (nvidia-smi has to work there), or remove the node's GPU label"
    return (
        "its containers cannot access NVIDIA's driver: install the driver and NVIDIA's container toolkit on that node, "
        "and set nodes.runtimeClass where NVIDIA's runtime is not the default (docs/container-toolkit.md)"
    )
