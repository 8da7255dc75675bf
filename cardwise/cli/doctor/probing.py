"""What only a try can tell: whether the webhook is asked, and whether kube-scheduler asks the extender.

The probe is a pod that asks for 1 MiB. Its image is never pulled, so nothing runs, and it is deleted in any case.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cardwise.cli.doctor.finding import Finding, Level
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment, names
from cardwise.core.values.verdict import Refusal
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

Json = Mapping[str, Any]

_SECONDS: Final = 15.0
_EVERY: Final = 0.2
_NOBODY: Final = 65534  # namespaces that enforce the restricted profile admit it
_WIRE: Final = "give kube-scheduler the stanzas that `cardwise scheduler-config` prints, and restart it"
_REACH: Final = ("connection refused", "context deadline", "no such host", "i/o timeout", "x509", "EOF", "no route")


def probe(client: KubeClient, namespace: str, clock: Clock = SYSTEM) -> Iterator[Finding]:
    """Sends the probe and tells how far it came."""
    made = None
    try:
        made = client.create(paths.pods(namespace), _pod())
        yield from _admitted(made)
        yield from _placed(client, namespace, made, clock)
    except errors.Forbidden as error:
        # RBAC, a quota, Pod Security, or the webhook itself: which, the message says.
        yield Finding(
            "probe",
            Level.NOTE,
            f"the probe pod was refused: {error.message}",
            "name a namespace where you may create pods with -n, or leave the probe out with --no-probe",
        )
    except errors.KubeError as error:
        remedy = "start the webhook, and see that the API server reaches its Service or URL"
        yield Finding("webhook", Level.PROBLEM, f"the probe pod was not admitted: {error.message}", remedy)
    finally:
        if made is not None:
            _delete(client, namespace, made)


def _pod() -> Json:
    container = {
        "name": "probe",
        "image": "cardwise-doctor-probe",
        "imagePullPolicy": "Never",
        "resources": {"limits": {names.GPU_MEM: "1"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    metadata = {
        "name": f"cardwise-doctor-{secrets.token_hex(4)}",
        "annotations": {names.SHARE_AGENT: "never", names.MPS: "off"},
    }
    spec = {
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "runAsUser": _NOBODY, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _admitted(pod: Json) -> Iterator[Finding]:
    limits = pod["spec"]["containers"][0]["resources"].get("limits") or {}
    if names.SHARE in limits:
        yield Finding("webhook", Level.OK, "the webhook rewrote the probe pod")
        return
    yield Finding(
        "webhook",
        Level.PROBLEM,
        "the webhook was not asked for the probe pod: it got no share",
        "see that the webhook configurations are there and that this namespace is not exempt",
    )


def _placed(client: KubeClient, namespace: str, made: Json, clock: Clock) -> Iterator[Finding]:
    if names.SHARE not in (made["spec"]["containers"][0]["resources"].get("limits") or {}):
        return  # the extender refuses it rightly
    name, deadline = made["metadata"]["name"], clock.now() + _SECONDS
    said = ""
    while clock.now() < deadline:
        pod = client.get(paths.pods(namespace, name))
        if node := pod["spec"].get("nodeName"):
            yield _bound(pod, node)
            return
        said = _unscheduled(pod)
        if said:
            yield _refused(said)
            return
        clock.sleep(_EVERY)
    yield Finding(
        "scheduler",
        Level.PROBLEM,
        f"kube-scheduler has not looked at the probe pod for {_SECONDS:.0f} s",
        f"see that {made['spec'].get('schedulerName')} runs, and that no extender keeps it waiting",
    )


def _bound(pod: Json, node: str) -> Finding:
    if assignment.decode(pod["metadata"].get("annotations") or {}) is not None:
        return Finding("scheduler", Level.OK, f"the probe pod was placed on a card of {node} by the extender")
    text = f"the probe pod was bound to {node} without a card: kube-scheduler does not ask the extender"
    return Finding("scheduler", Level.PROBLEM, text, _WIRE)


def _unscheduled(pod: Json) -> str:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c.get("message") or "" for c in conditions if c.get("type") == "PodScheduled"), "")


def _refused(said: str) -> Finding:
    if any(refusal.text in said for refusal in Refusal):
        return Finding("scheduler", Level.OK, f"kube-scheduler asks the extender, which has no room now: {said}")
    if f"Insufficient {names.GPU_MEM}" in said:
        text = f"no card is free, so kube-scheduler had nothing to ask the extender: {said}"
        return Finding("scheduler", Level.NOTE, text, "try again when a card has 1 MiB left")
    if any(sign in said for sign in _REACH):
        remedy = "see that the extender runs, and its URL and certificates in kube-scheduler's configuration"
        return Finding("scheduler", Level.PROBLEM, f"kube-scheduler does not reach the extender: {said}", remedy)
    return Finding("scheduler", Level.WARNING, f"the probe pod was not placed: {said}", "see `kubectl describe nodes`")


def _delete(client: KubeClient, namespace: str, made: Json) -> None:
    try:
        client.delete(paths.pods(namespace, made["metadata"]["name"]), {"gracePeriodSeconds": 0})
    except errors.NotFound:
        return
