"""Checks of scheduler.mode=claims: what it needs of the cluster, that all components are in the same mode, and pending
pods that were created in another mode.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from cardwise.cli.doctor import repairs
from cardwise.cli.doctor.facts import Facts, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity, name_pods
from cardwise.core.api import admissionpolicies, claims, names, request
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.shellcommand import command

_OPTION: Final = "--claims"
_PARTS: Final = ("webhook", "extender", "deviceplugin")
_CONTROLLER: Final = "resourceclaim-controller"  # of kube-controller-manager
_CONTROLLERS_FLAG: Final = "--controllers="
_PAGE: Final = "docs/reference/claims.md"


def uses_claims(facts: Facts) -> bool:
    """Whether the chart was installed with scheduler.mode=claims."""
    return any(claim_class["metadata"]["name"] == names.DRIVER for claim_class in facts.device_classes) or bool(
        _parts_with_option(facts)
    )


def check_claims(facts: Facts) -> Iterator[Finding]:
    """Check that the cluster and all components serve claims, if the installation uses them."""
    if not uses_claims(facts):
        return
    findings = [
        *_check_api(facts),
        *_check_parts(facts),
        *_check_protection(facts),
        *_check_controller(facts),
    ]
    yield from findings
    if not findings and "device_classes" not in facts.unread_kinds:
        text = "shares are ResourceClaims (scheduler.mode=claims): kube-scheduler needs no configuration"
        yield Finding("claims", Severity.OK, text)


def check_former_mode(facts: Facts) -> Iterator[Finding]:
    """Find pending pods that were created in another scheduler.mode: nothing gives them a GPU."""
    in_claims_mode = uses_claims(facts)
    pods = [
        pod
        for pod in facts.pending_pods
        if any(map(request.has_slot, request.containers(pod))) and _has_claim(pod) != in_claims_mode
    ]
    if not pods:
        return
    is_single = len(pods) == 1
    text = (
        f"{name_pods([namespaced_name(pod) for pod in pods])} "
        f"{'was' if is_single else 'were'} created in another scheduler.mode: "
        f"{'it gets' if is_single else 'they get'} no GPU"
    )
    yield Finding("claims", Severity.WARNING, text, repairs.recreate_command(pods))


def _has_claim(pod: Json) -> bool:
    try:
        return claims.claim_name(pod) is not None
    except InvalidRequest:
        return False


def _check_api(facts: Facts) -> Iterator[Finding]:
    if "device_classes" in facts.unknown_kinds:
        text = "the API server does not serve resource.k8s.io/v1, which scheduler.mode=claims needs: no pod gets a GPU"
        remedy = (
            "upgrade to Kubernetes 1.34, or turn it on (kube-apiserver --runtime-config=resource.k8s.io/v1=true, "
            f"feature gate DynamicResourceAllocation), or choose another scheduler.mode ({_PAGE})"
        )
        yield Finding("claims", Severity.PROBLEM, text, remedy)
    elif "device_classes" not in facts.unread_kinds and not any(
        claim_class["metadata"]["name"] == names.DRIVER for claim_class in facts.device_classes
    ):
        text = f"DeviceClass {names.DRIVER} is missing: the extender cannot create claims"
        yield Finding("claims", Severity.PROBLEM, text, f"let the chart recreate it: {repairs.upgrade_command(facts)}")


def _check_parts(facts: Facts) -> Iterator[Finding]:
    """Find components in another mode, as in the middle of an upgrade, or by `extraArgs`."""
    parts_with_option = _parts_with_option(facts)
    others = [part for part in _PARTS if _workloads_of(facts, part) and part not in parts_with_option]
    if others:
        text = f"{wording.enumerate_first(others, len(_PARTS))}: runs without {_OPTION} although the others have it"
        remedy = f"let the chart set the same mode: {repairs.upgrade_command(facts, scheduler_mode='claims')}"
        yield Finding("claims", Severity.PROBLEM, text, remedy)


def _check_protection(facts: Facts) -> Iterator[Finding]:
    if "policies" in facts.unread_kinds:
        return
    sound = {policy["metadata"]["name"] for policy in facts.policies if admissionpolicies.is_complete(policy)}
    if "policy_bindings" not in facts.unread_kinds:
        sound &= set(map(admissionpolicies.enforced_policy, facts.policy_bindings))
    faulty = [name for name in claims.POLICIES if name not in sound]
    if faulty:
        text = (
            f"{wording.enumerate_first(faulty, len(faulty))} missing or not enforced: a user could name, change or "
            "delete the claims of others, so the extender does not lead"
        )
        delete = command(
            "kubectl delete validatingadmissionpolicies,validatingadmissionpolicybindings --ignore-not-found {names}",
            names=faulty,
        )
        remedy = (
            f"delete what is left of them ({delete}), and let the chart recreate them (policies.enabled=true): "
            f"{repairs.upgrade_command(facts)}"
        )
        yield Finding("claims", Severity.PROBLEM, text, remedy)


def _check_controller(facts: Facts) -> Iterator[Finding]:
    """Find a kube-controller-manager that does not run the controller of claims, as far as its pod shows it."""
    for pod in facts.controller_managers:
        words = [word for container in pod["spec"].get("containers") or () for word in _command_line(container)]
        flags = [word.removeprefix(_CONTROLLERS_FLAG) for word in words if word.startswith(_CONTROLLERS_FLAG)]
        enabled = [name for flag in flags for name in flag.split(",")]
        if f"-{_CONTROLLER}" in enabled or (enabled and "*" not in enabled and _CONTROLLER not in enabled):
            text = (
                f"{pod['metadata']['name']} does not run {_CONTROLLER}: claims of finished pods stay allocated until "
                "the pods are deleted"
            )
            remedy = f"remove -{_CONTROLLER} from its {_CONTROLLERS_FLAG.rstrip('=')}"
            yield Finding("claims", Severity.WARNING, text, remedy)


def _parts_with_option(facts: Facts) -> list[str]:
    return [
        part
        for part in _PARTS
        if any(
            _OPTION in _command_line(container)
            for workload in _workloads_of(facts, part)
            for container in _containers_of(workload)
        )
    ]


def _containers_of(workload: Json) -> Sequence[Json]:
    """The containers in the workload's template; doctor may read any form of object."""
    template = (workload.get("spec") or {}).get("template") or {}
    return (template.get("spec") or {}).get("containers") or ()


def _workloads_of(facts: Facts, part: str) -> Sequence[Json]:
    return [
        workload
        for workload in (*facts.deployments, *facts.daemonsets)
        if workload["metadata"]["name"] == f"cardwise-{part}"
    ]


def _command_line(container: Json) -> list[str]:
    return [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
