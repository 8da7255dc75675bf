"""Checks by a probe pod that the API server calls the webhook, and that kube-scheduler calls the extender.

The probe requests 1 MiB, with the default MPS setting of the user's namespace. First the probe is created by dry run in
this namespace. This shows whether the webhook is called. Then it is created in Cardwise's namespace, outside the quotas
of teams. It has the changes of Cardwise's webhook, but not those of other webhooks. The probe has the chart's
PriorityClass for probes: the lowest priority, without preemption. The cluster's default priority might be higher than
that of users' pods.

The probe's image is never pulled, so no container starts. The probe is always deleted, but not by force: after a normal
deletion its card is free at once. After a forced deletion, the card is free half a minute later.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from cardwise.cli.cluster import workloads
from cardwise.cli.doctor import repairs
from cardwise.cli.doctor.facts import PROBE_POD_PREFIX
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment, names, request
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.shellcommand import command
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.pods import eligible

_RENEWAL_REMEDY: Final = "give it the current ones and restart it (docs/operations.md#certificates)"
_TIMEOUT_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.2
_CONTAINER_NAME: Final = "probe"  # the name of the probe's container
_NOBODY_UID: Final = 65534
_MAX_LISTED: Final = 5  # maximum number of taints named in one line
# A part of kube-scheduler's message. The message has only one reason per node, so with this reason it names no resource
# that the node lacks too.
_TAINT_MESSAGE: Final = "untolerated taint"
_UNREACHABLE_MESSAGES: Final = (
    "connection refused",
    "context deadline",
    "no such host",
    "i/o timeout",
    "x509",
    "EOF",
    "no route",
)


def run_probe_pod(
    client: KubeClient,
    namespace: str,
    cardwise_namespace: str,
    clock: Clock = SYSTEM,
    *,
    configuration_remedy: str = "",
    renewal_remedy: str = _RENEWAL_REMEDY,
) -> Iterator[Finding]:
    """Create the probe pod, and report the first step that fails: admission, scheduling or binding.

    cardwise_namespace: the namespace of Cardwise.
    configuration_remedy: the remedy that configures kube-scheduler to call the extender.
    renewal_remedy: the remedy that gives kube-scheduler the present certificates.
    """
    created_pod = None
    try:
        admitted_pod = client.create(paths.pods(namespace), _build_probe_pod(), query={"dryRun": "All"})
        yield from _report_admission(admitted_pod)
        if not _is_rewritten(admitted_pod):
            return  # the extender is right to refuse this pod
        created_pod = client.create(
            paths.pods(cardwise_namespace), _build_placement_probe(admitted_pod, cardwise_namespace)
        )
        yield from _await_placement(client, created_pod, clock, configuration_remedy, renewal_remedy)
    except errors.Forbidden as error:
        # The message says whether RBAC, a quota, Pod Security, a missing PriorityClass or the webhook has refused it.
        remedy = (
            f"get the right to create pods in {cardwise_namespace} and (as a dry run) in {namespace}, give another "
            "namespace "
            "with -n, or skip the probe with --no-probe"
        )
        if f"no PriorityClass with name {names.PROBE_PRIORITY_CLASS}" in error.message:
            remedy = (
                "upgrade the chart, which creates that PriorityClass: without it the probe might preempt a user's pod"
            )
        yield Finding("probe", Severity.NOTE, f"the probe pod was refused: {error.message}", remedy)
    except errors.KubeError as error:
        pods = repairs.get_pods_command(cardwise_namespace, "webhook")
        remedy = f"check that the webhook runs ({pods}) and that the API server can reach its Service or URL"
        yield Finding("webhook", Severity.PROBLEM, f"the probe pod was not admitted: {error.message}", remedy)
    finally:
        if created_pod is not None:
            delete_pod(client, cardwise_namespace, created_pod["metadata"]["name"])


def _build_probe_pod() -> Json:
    container = {
        "name": _CONTAINER_NAME,
        "image": "cardwise-doctor-probe",
        "imagePullPolicy": "Never",
        "resources": {"limits": {names.GPU_MEM: "1Mi"}},
    }
    return build_restricted_pod(container, {names.SHARE_AGENT: "never"})


def build_restricted_pod(container: Json, annotations: Mapping[str, str], **spec: Any) -> Json:
    """Return a pod of doctor that namespaces with the Pod Security profile "restricted" admit."""
    restricted = {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{PROBE_POD_PREFIX}{secrets.token_hex(4)}", "annotations": dict(annotations)},
        "spec": {
            "containers": [container | restricted],
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": _NOBODY_UID, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            **spec,
        },
    }  # fmt: skip


def delete_pod(client: KubeClient, namespace: str, name: str, options: Json | None = None) -> None:
    with suppress(errors.NotFound):
        client.delete(paths.pods(namespace, name), options)


def _build_placement_probe(pod: Json, namespace: str) -> Json:
    """Return the probe with the changes of Cardwise's webhook, for creation in Cardwise's namespace.

    Changes of other webhooks in the user's namespace are left out: their containers, volumes, priority or node would
    get the rights of Cardwise's namespace.
    """
    probe, spec = _build_probe_pod(), pod["spec"]
    annotations = {key: text for key, text in annotations_of(pod).items() if key.partition("/")[0] == names.GROUP}
    metadata = {"name": pod["metadata"]["name"], "namespace": namespace, "annotations": annotations}
    (container,) = probe["spec"]["containers"]
    resources = _probe_container(pod).get("resources") or {}
    resources_by_kind = {
        group: {name: amount for name, amount in (resources.get(group) or {}).items() if _is_own_resource(name)}
        for group in ("limits", "requests")
    }
    own_claims = [entry for entry in resources.get("claims") or () if entry.get("name") == names.POD_CLAIM]
    containers = [container | {"resources": resources_by_kind | ({"claims": own_claims} if own_claims else {})}]
    scheduling_fields = {key: spec[key] for key in ("schedulerName", "tolerations") if key in spec}
    if own_claims:
        pod_claims = [entry for entry in spec.get("resourceClaims") or () if entry.get("name") == names.POD_CLAIM]
        gates = [{"name": names.ALLOCATION_GATE}]
        scheduling_fields |= {"resourceClaims": pod_claims, "schedulingGates": gates}
    scheduling_fields["priorityClassName"] = names.PROBE_PRIORITY_CLASS
    return probe | {"metadata": metadata, "spec": probe["spec"] | scheduling_fields | {"containers": containers}}


def _is_own_resource(resource: str) -> bool:
    return resource in (*names.REQUESTED, *names.OWN_RESOURCES) or resource.startswith(names.CLASS_PREFIX)


def _probe_container(pod: Json) -> Json:
    """Return the probe's own container; empty if another webhook has removed it."""
    return next(filter(_is_probe, pod["spec"]["containers"]), {})


def _is_probe(container: Json) -> bool:
    return bool(container.get("name") == _CONTAINER_NAME)


def _is_rewritten(pod: Json) -> bool:
    """Whether the webhook has given the probe's container a slot."""
    return any(request.has_slot(container) for container in request.containers(pod) if _is_probe(container.spec))


def _report_admission(pod: Json) -> Iterator[Finding]:
    if _is_rewritten(pod):
        yield Finding("webhook", Severity.OK, "the webhook rewrote the probe pod")
        return
    yield Finding(
        "webhook",
        Severity.PROBLEM,
        "the API server did not call the webhook for the probe pod: it got no share",
        "check that the webhook configurations exist and that this namespace is not exempt",
    )


def _await_placement(
    client: KubeClient, probe: Json, clock: Clock, configuration_remedy: str, renewal_remedy: str
) -> Iterator[Finding]:
    namespace, name = probe["metadata"]["namespace"], probe["metadata"]["name"]
    deadline, is_gated = clock.now() + _TIMEOUT_SECONDS, False
    while clock.now() < deadline:
        try:
            pod = client.get(paths.pods(namespace, name))
        except errors.NotFound:
            text = "the probe pod was deleted while it was pending: something had bound it without the extender"
            yield Finding("scheduler", Severity.PROBLEM, text, configuration_remedy)
            return
        if node := pod["spec"].get("nodeName"):
            yield _report_binding(pod, node, configuration_remedy)
            return
        is_gated = bool(pod["spec"].get("schedulingGates"))
        if (message := workloads.scheduler_message(pod)) and not is_gated:
            yield _explain_scheduler_message(message, pod, _list_nodes(client), renewal_remedy)
            return
        clock.sleep(_POLL_SECONDS)
    if is_gated:
        yield _explain_closed_gate(client, probe)
    else:
        yield _explain_timeout(probe, _count_pods_ahead(client, probe))


def _count_pods_ahead(client: KubeClient, probe: Json) -> int | None:
    """Count the other pods that wait for the probe's scheduler; None if they cannot be read.

    The scheduler tries these pods first, because the probe has the lowest priority.
    """
    scheduler = probe["spec"].get("schedulerName")
    try:
        pods = client.list_objects(paths.pods(), paths.field_query("spec.nodeName", ""))
        pending_pods = [
            pod
            for pod in pods
            if pod["spec"].get("schedulerName") == scheduler
            and pod["metadata"]["name"] != probe["metadata"]["name"]
            and not pod["spec"].get("nodeName")
            and not pod["spec"].get("schedulingGates")
        ]
    except errors.KubeError:
        return None
    return len(pending_pods)


def _explain_closed_gate(client: KubeClient, probe: Json) -> Finding:
    """Return the finding if the extender has not opened the probe's gate in time (scheduler.mode=claims)."""
    text = f"the extender has not allocated a claim for the probe pod for {_TIMEOUT_SECONDS:.0f} s"
    nodes = _list_nodes(client)
    if nodes is not None and not any(_has_resource(node, names.GPU_MEM) for node in nodes):
        remedy = "fix the findings about GPUs and the device plugin, then run `cardwise doctor` again"
        return Finding("scheduler", Severity.NOTE, f"{text}: no node offers {names.GPU_MEM}", remedy)
    namespace = probe["metadata"]["namespace"]
    log = command("kubectl logs -n {namespace} -l {leader:text}", namespace=namespace, leader=f"{names.LEADER}=true")
    remedy = f"on a full cluster it waits for 1 MiB; if GPUs are free, see the extender's log: {log}"
    return Finding("scheduler", Severity.WARNING, text, remedy)


def _explain_timeout(probe: Json, pods_ahead: int | None) -> Finding:
    """Return the finding if kube-scheduler has not tried the probe in time."""
    scheduler = wording.quote_unless_name(probe["spec"].get("schedulerName"))
    text = f"kube-scheduler has not tried the probe pod for {_TIMEOUT_SECONDS:.0f} s"
    if pods_ahead == 0:
        remedy = f"check that {scheduler} runs, and that no extender delays it"
        return Finding("scheduler", Severity.PROBLEM, f"{text}, and no other pod waits", remedy)
    pods_text = (
        "pods of higher priority may wait" if pods_ahead is None else f"{wording.pluralize(pods_ahead, 'pod')} ahead"
    )
    return Finding(
        "scheduler",
        Severity.WARNING,
        f"{text}: {pods_text}",
        "run `cardwise doctor` again when fewer pods are pending; if they are never tried either, check that "
        f"{scheduler} runs",
    )


def _report_binding(pod: Json, node: str, configuration_remedy: str) -> Finding:
    if assignment.decode(annotations_of(pod)) is not None:
        return Finding("scheduler", Severity.OK, f"the probe pod was placed on a GPU of {node} by the extender")
    text = (
        f"the probe pod was bound to {node} without a GPU: kube-scheduler does not call the extender, which deletes "
        "such pods"
    )
    return Finding("scheduler", Severity.PROBLEM, text, configuration_remedy)


def _list_nodes(client: KubeClient) -> Sequence[Json] | None:
    """Read the nodes; None if they cannot be read."""
    with suppress(errors.KubeError):
        return list(client.list_objects(paths.nodes()))
    return None


def _has_resource(node: Json, resource: str) -> bool:
    """Whether the node's kubelet offers the resource, used or not."""
    return str((node.get("status", {}).get("capacity") or {}).get(resource, "0")) != "0"


def _find_blocking_taints(nodes: Sequence[Json], pod: Json) -> Collection[str]:
    """Return the taints that keep the pod away from all nodes with cards; empty if it may use one of these nodes."""
    tolerations = pod["spec"].get("tolerations") or ()
    taints = [eligible.untolerated_taints(node, tolerations) for node in nodes if _has_resource(node, names.SHARE)]
    return sorted({taint for node_taints in taints for taint in node_taints}) if all(taints) else ()


def _explain_scheduler_message(message: str, pod: Json, nodes: Sequence[Json] | None, renewal_remedy: str) -> Finding:
    """Return the finding for kube-scheduler's message about the probe. `nodes`: None if unknown."""
    shown_message = wording.sanitize_message(message)
    blocking_taints = _find_blocking_taints(nodes or (), pod) if _TAINT_MESSAGE in message else ()
    if blocking_taints:
        taint_names = wording.enumerate_first([*map(wording.quote_unless_name, blocking_taints)], _MAX_LISTED)
        text = f"every node with GPUs has a taint that pods with GPU requests do not tolerate: {taint_names}"
        return Finding(
            "scheduler",
            Severity.WARNING,
            text,
            "add it to webhook.toleratedTaints if all pods with GPU requests may run there",
        )
    if any(refusal.text in message for refusal in Refusal):
        return Finding(
            "scheduler", Severity.OK, f"kube-scheduler calls the extender, which has no capacity now: {shown_message}"
        )
    if f"Insufficient {names.GPU_MEM}" in message:
        if nodes is not None and not any(_has_resource(node, names.GPU_MEM) for node in nodes):
            text = f"no node offers {names.GPU_MEM}, so kube-scheduler did not call the extender: {shown_message}"
            remedy = "fix the findings about GPUs and the device plugin, then run `cardwise doctor` again"
            return Finding("scheduler", Severity.NOTE, text, remedy)
        text = f"no GPU is free, so kube-scheduler did not call the extender: {shown_message}"
        return Finding("scheduler", Severity.NOTE, text, "try again when a GPU has 1 MiB free")
    if any(message_part in message for message_part in _UNREACHABLE_MESSAGES):
        remedy = (
            f"its certificates belong to an earlier installation or have expired: {renewal_remedy}"
            if "x509" in message
            else "check that the extender runs, and its URL in kube-scheduler's configuration"
        )
        return Finding(
            "scheduler", Severity.PROBLEM, f"kube-scheduler cannot reach the extender: {shown_message}", remedy
        )
    return Finding(
        "scheduler", Severity.WARNING, f"the probe pod was not placed: {shown_message}", "see `kubectl describe nodes`"
    )
