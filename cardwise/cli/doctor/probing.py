"""Probe pods: a try tells whether the webhook is asked, and whether kube-scheduler asks the extender.

The probe is a pod that asks for 1 MiB, and says of MPS what pods of its namespace say by default. The webhook is asked
by a dry run in that namespace; what it has made of the pod, and nothing that others have, is created in Cardwise's own,
where no team's quota counts it, and with the chart's PriorityClass for probes: the lowest priority, and no preemption.
A pod that names none has the cluster's default, which may be above that of users' pods. The probe's image is never
pulled, so nothing runs. It is deleted in any case, and not by force: after a normal deletion its card is free at once,
after a forced one only half a minute later.
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
from cardwise.core.api import assignment, names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.refusals import Refusal
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.pods import eligible

_RENEW: Final = "give it the current ones and restart it (docs/operations.md#certificates)"
_SECONDS: Final = 15.0
_EVERY: Final = 0.2
_NAME: Final = "probe"  # of its container
_NOBODY: Final = 65534
_FEW: Final = 5  # taints that a line names
_TAINTED: Final = "untolerated taint"  # of kube-scheduler; of a node it says no more, such as a resource that it lacks
_REACH: Final = ("connection refused", "context deadline", "no such host", "i/o timeout", "x509", "EOF", "no route")


def send_probe(
    client: KubeClient,
    namespace: str,
    installed: str,
    clock: Clock = SYSTEM,
    *,
    wiring_remedy: str = "",
    renewal_remedy: str = _RENEW,
) -> Iterator[Finding]:
    """Create the probe pod in the namespace, and report how far it comes.

    installed: the namespace of Cardwise.
    wiring_remedy: the remedy that configures kube-scheduler to call the extender.
    renewal_remedy: the remedy that gives kube-scheduler the present certificates.
    """
    created = None
    try:
        admitted = client.create(paths.pods(namespace), _build_probe(), query={"dryRun": "All"})
        yield from _judge_admission(admitted)
        if names.SHARE not in _probe_limits(admitted):
            return  # the extender refuses it rightly
        created = client.create(paths.pods(installed), _build_plain_probe(admitted, installed))
        yield from _await_placement(client, created, clock, wiring_remedy, renewal_remedy)
    except errors.Forbidden as error:
        # RBAC, a quota, Pod Security, a missing PriorityClass, or the webhook itself: which, the message says.
        remedy = (
            f"get the right to create pods in {installed} and (as a dry run) in {namespace}, give another namespace "
            "with -n, or skip the probe with --no-probe"
        )
        if f"no PriorityClass with name {names.PROBE_PRIORITY_CLASS}" in error.message:
            remedy = (
                "upgrade the chart, which creates that PriorityClass: without it the probe might preempt a user's pod"
            )
        yield Finding("probe", Severity.NOTE, f"the probe pod was refused: {error.message}", remedy)
    except errors.KubeError as error:
        pods = repairs.get_pods(installed, "webhook")
        remedy = f"check that the webhook runs ({pods}) and that the API server can reach its Service or URL"
        yield Finding("webhook", Severity.PROBLEM, f"the probe pod was not admitted: {error.message}", remedy)
    finally:
        if created is not None:
            delete(client, installed, created["metadata"]["name"])


def _build_probe() -> Json:
    container = {
        "name": _NAME,
        "image": "cardwise-doctor-probe",
        "imagePullPolicy": "Never",
        "resources": {"limits": {names.GPU_MEM: "1Mi"}},
    }
    return pod_of(container, {names.SHARE_AGENT: "never"})


def pod_of(container: Json, annotations: Mapping[str, str], **spec: Any) -> Json:
    """A pod of doctor's, which namespaces admit that enforce the restricted profile."""
    restricted = {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{PROBE_POD_PREFIX}{secrets.token_hex(4)}", "annotations": dict(annotations)},
        "spec": {
            "containers": [container | restricted],
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": _NOBODY, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            **spec,
        },
    }  # fmt: skip


def delete(client: KubeClient, namespace: str, name: str, options: Json | None = None) -> None:
    with suppress(errors.NotFound):
        client.delete(paths.pods(namespace, name), options)


def _build_plain_probe(pod: Json, namespace: str) -> Json:
    """The probe with the changes of Cardwise's webhook, to be created in another namespace.

    Other additions of the user's namespace are left out: containers, volumes, a priority or a node of other webhooks
    would get the rights of Cardwise's namespace.
    """
    plain_probe, spec = _build_probe(), pod["spec"]
    annotations = {key: text for key, text in annotations_of(pod).items() if key.partition("/")[0] == names.GROUP}
    metadata = {"name": pod["metadata"]["name"], "namespace": namespace, "annotations": annotations}
    (container,) = plain_probe["spec"]["containers"]
    resources = _probe_container(pod).get("resources") or {}
    requested = {
        group: {name: amount for name, amount in (resources.get(group) or {}).items() if _is_own_resource(name)}
        for group in ("limits", "requests")
    }
    containers = [container | {"resources": requested}]
    placing = {key: spec[key] for key in ("schedulerName", "tolerations") if key in spec}
    placing["priorityClassName"] = names.PROBE_PRIORITY_CLASS
    return plain_probe | {"metadata": metadata, "spec": plain_probe["spec"] | placing | {"containers": containers}}


def _is_own_resource(resource: str) -> bool:
    return resource in (*names.REQUESTED, *names.OWN_RESOURCES) or resource.startswith(names.CLASS_PREFIX)


def _probe_container(pod: Json) -> Json:
    """The probe's own container; empty if another webhook has removed it."""
    return next((container for container in pod["spec"]["containers"] if container.get("name") == _NAME), {})


def _probe_limits(pod: Json) -> Mapping[str, str]:
    return (_probe_container(pod).get("resources") or {}).get("limits") or {}


def _judge_admission(pod: Json) -> Iterator[Finding]:
    if names.SHARE in _probe_limits(pod):
        yield Finding("webhook", Severity.OK, "the webhook rewrote the probe pod")
        return
    yield Finding(
        "webhook",
        Severity.PROBLEM,
        "the API server did not call the webhook for the probe pod: it got no share",
        "check that the webhook configurations exist and that this namespace is not exempt",
    )


def _await_placement(
    client: KubeClient, created: Json, clock: Clock, wiring_remedy: str, renewal_remedy: str
) -> Iterator[Finding]:
    namespace, name = created["metadata"]["namespace"], created["metadata"]["name"]
    deadline = clock.now() + _SECONDS
    while clock.now() < deadline:
        try:
            pod = client.get(paths.pods(namespace, name))
        except errors.NotFound:
            text = "the probe pod was deleted while it was pending: something had bound it without the extender"
            yield Finding("scheduler", Severity.PROBLEM, text, wiring_remedy)
            return
        if node := pod["spec"].get("nodeName"):
            yield _judge_binding(pod, node, wiring_remedy)
            return
        if message := workloads.scheduler_message(pod):
            yield _judge_refusal(message, pod, _list_nodes(client), renewal_remedy)
            return
        clock.sleep(_EVERY)
    yield _judge_silence(created, _count_pods_ahead(client, created))


def _count_pods_ahead(client: KubeClient, probe: Json) -> int | None:
    """How many other pods wait for the probe's scheduler, which tries them first: the probe has the lowest priority.

    None if they cannot be read.
    """
    scheduler = probe["spec"].get("schedulerName")
    try:
        pods = client.list_objects(paths.pods(), paths.field_query("spec.nodeName", ""))
        waiting = [
            pod
            for pod in pods
            if pod["spec"].get("schedulerName") == scheduler
            and pod["metadata"]["name"] != probe["metadata"]["name"]
            and not pod["spec"].get("nodeName")
            and not pod["spec"].get("schedulingGates")
        ]
    except errors.KubeError:
        return None
    return len(waiting)


def _judge_silence(probe: Json, pods_ahead: int | None) -> Finding:
    """The finding if kube-scheduler has not tried the probe in time."""
    scheduler = wording.quote_unless_name(probe["spec"].get("schedulerName"))
    text = f"kube-scheduler has not tried the probe pod for {_SECONDS:.0f} s"
    if pods_ahead == 0:
        remedy = f"check that {scheduler} runs, and that no extender delays it"
        return Finding("scheduler", Severity.PROBLEM, f"{text}, and no other pod waits", remedy)
    waiting = (
        "pods of higher priority may wait" if pods_ahead is None else f"{wording.pluralize(pods_ahead, 'pod')} ahead"
    )
    return Finding(
        "scheduler",
        Severity.WARNING,
        f"{text}: {waiting}",
        "run `cardwise doctor` again when fewer pods are pending; if they are never tried either, check that "
        f"{scheduler} runs",
    )


def _judge_binding(pod: Json, node: str, wiring_remedy: str) -> Finding:
    if assignment.decode(annotations_of(pod)) is not None:
        return Finding("scheduler", Severity.OK, f"the probe pod was placed on a GPU of {node} by the extender")
    text = (
        f"the probe pod was bound to {node} without a GPU: kube-scheduler does not call the extender, which deletes "
        "such pods"
    )
    return Finding("scheduler", Severity.PROBLEM, text, wiring_remedy)


def _list_nodes(client: KubeClient) -> Sequence[Json] | None:
    """The nodes; None if they cannot be read."""
    with suppress(errors.KubeError):
        return list(client.list_objects(paths.nodes()))
    return None


def _has_resource(node: Json, resource: str) -> bool:
    """Whether the node's kubelet has any of the resource, used or not."""
    return str((node.get("status", {}).get("capacity") or {}).get(resource, "0")) != "0"


def _barring_taints(nodes: Sequence[Json], pod: Json) -> Collection[str]:
    """Taints that keep the pod away from all nodes with cards; empty if it may use one."""
    tolerations = pod["spec"].get("tolerations") or ()
    taints = [eligible.untolerated_taints(node, tolerations) for node in nodes if _has_resource(node, names.SHARE)]
    return sorted({taint for of_node in taints for taint in of_node}) if all(taints) else ()


def _judge_refusal(message: str, pod: Json, nodes: Sequence[Json] | None, renew: str) -> Finding:
    """The finding from kube-scheduler's message. `nodes`: None if unknown."""
    shown = wording.sanitize_message(message)
    barring = _barring_taints(nodes or (), pod) if _TAINTED in message else ()
    if barring:
        taint_names = wording.enumerate_first([*map(wording.quote_unless_name, barring)], _FEW)
        text = f"every node with GPUs has a taint that pods with GPU requests do not tolerate: {taint_names}"
        return Finding(
            "scheduler",
            Severity.WARNING,
            text,
            "add it to webhook.toleratedTaints if all pods with GPU requests may run there",
        )
    if any(refusal.text in message for refusal in Refusal):
        return Finding(
            "scheduler", Severity.OK, f"kube-scheduler calls the extender, which has no capacity now: {shown}"
        )
    if f"Insufficient {names.GPU_MEM}" in message:
        if nodes is not None and not any(_has_resource(node, names.GPU_MEM) for node in nodes):
            text = f"no node offers {names.GPU_MEM}, so kube-scheduler did not call the extender: {shown}"
            remedy = "fix the findings about GPUs and the device plugin, then run `cardwise doctor` again"
            return Finding("scheduler", Severity.NOTE, text, remedy)
        text = f"no GPU is free, so kube-scheduler did not call the extender: {shown}"
        return Finding("scheduler", Severity.NOTE, text, "try again when a GPU has 1 MiB free")
    if any(sign in message for sign in _REACH):
        remedy = (
            f"its certificates belong to an earlier installation or have expired: {renew}"
            if "x509" in message
            else "check that the extender runs, and its URL in kube-scheduler's configuration"
        )
        return Finding("scheduler", Severity.PROBLEM, f"kube-scheduler cannot reach the extender: {shown}", remedy)
    return Finding(
        "scheduler", Severity.WARNING, f"the probe pod was not placed: {shown}", "see `kubectl describe nodes`"
    )
