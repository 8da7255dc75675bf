"""The pod's ResourceClaim, and the gate behind which the pod waits for it (scheduler.mode=claims).

A pod that requests a share gets the name of a claim that does not exist yet, and a scheduling gate. The leading
extender plans the pod, creates and allocates the claim, and removes the gate. kube-scheduler then finds an allocated
claim and obeys it. The name has 64 random bits: users who could predict it could create the claim first, for another
pod. The webhook chooses the name once: the API server may call the webhook again, and the second call must not change
the name.

A copy of an existing pod (`kubectl get pod -o yaml`) looks the same, but needs a claim of its own. It differs from a
new pod in at least one of three ways:
- Its gate has been removed.
- It has the annotations of a placement.
- Its status has a phase, as in every stored pod.

Example: a new pod gets `cardwise-3f…`. The second call sees the gate, the name and no phase, and keeps the name. A copy
of this pending pod has `status.phase: Pending`, and gets `cardwise-a1…`. Its status is removed, so that a second call
keeps that name too.
"""

import secrets
from typing import Final

from cardwise.core.api import claims, names, shareagent
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import changed_later_error

_TOKEN_BYTES: Final = 8
_GATE_FIELD: Final = f"spec.schedulingGates[{names.ALLOCATION_GATE}]"
_REMEDY: Final = f"leave the entry out, and request a share with limits {names.GPU_MEM}"


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Give the pod a claim if it requests cards or devices, and a gate if it requests them or is in a gang.

    Without `settings.claims`, remove the claims and gates that Cardwise wrote. Raises InvalidRequest if a user wrote
    a claim of Cardwise, or its gate in a pod that needs none.
    """
    if not context.settings.claims:
        _remove(pod)
        return
    needs_claim, needs_gate = pod.request is not None, pod.request is not None or pod.gang is not None
    name = _own_name(pod, needs_claim=needs_claim)
    gates = pod.spec.get("schedulingGates") or []
    is_gated = any(gate.get("name") == names.ALLOCATION_GATE for gate in gates)
    if is_gated and not needs_gate:
        problem = "the pod requests no GPU, so Cardwise would never remove the gate"
        raise InvalidRequest(_GATE_FIELD, problem, f"leave it out, or request a share with limits {names.GPU_MEM}")
    if needs_claim and (name is None or not is_gated or _is_copy(pod.manifest)):
        entry = {"name": names.POD_CLAIM, "resourceClaimName": claims.format_name(secrets.token_bytes(_TOKEN_BYTES))}
        entries = pod.spec.get("resourceClaims") or []
        pod.spec["resourceClaims"] = [*(other for other in entries if other.get("name") != names.POD_CLAIM), entry]
        pod.has_status = False
    if needs_gate and not is_gated:
        pod.spec["schedulingGates"] = [*gates, {"name": names.ALLOCATION_GATE}]


def validate(pod: PodUnderReview, context: Context) -> None:
    """Check that the pod has claim and gate as `mutate` wrote them, and that one claim can hold its request.

    Raises InvalidRequest.
    """
    if not context.settings.claims:
        return
    name = claims.claim_name(pod.manifest)
    gates = pod.spec.get("schedulingGates") or ()
    if pod.request is None:
        if name is not None:
            raise _foreign_claim_error("spec.resourceClaims", name)
        return
    if name is None:
        raise changed_later_error("spec.resourceClaims", f"has no entry {names.POD_CLAIM}")
    if not any(gate.get("name") == names.ALLOCATION_GATE for gate in gates):
        raise changed_later_error(_GATE_FIELD, "is missing")
    numbers = {card.name: card.cards for card in pod.request.containers}
    names_by_key = {container.key: container.spec.get("name", "") for container in pod.containers}
    for device in pod.request.devices:
        container_name = names_by_key[device.key]
        numbers[container_name] = numbers.get(container_name, 0) + device.count
    claiming = [container.spec.get("name", "") for container in claims.claiming_containers(pod.manifest)]
    others = {container_name: 1 for container_name in claiming if container_name == shareagent.CONTAINER_NAME}
    if {*claiming} != {*numbers, *others}:
        raise changed_later_error("spec.containers", f"the entries {names.POD_CLAIM} of resources.claims do not match")
    claims.check_size(numbers | others)


def is_by_claim(manifest: Json) -> bool:
    """Whether the webhook has given the pod a claim."""
    entries = (manifest.get("spec") or {}).get("resourceClaims") or ()
    return any(entry.get("name") == names.POD_CLAIM and _is_own(entry) for entry in entries)


def _own_name(pod: PodUnderReview, *, needs_claim: bool) -> str | None:
    """The name of the claim that the pod has; None without one. Raises InvalidRequest if a user wrote it."""
    name = None
    for i, entry in enumerate(pod.spec.get("resourceClaims") or ()):
        field = f"spec.resourceClaims[{i}]"
        claim = str(entry.get("resourceClaimName") or "")
        if entry.get("name") == names.POD_CLAIM:
            if not _is_own(entry):
                problem = f"{names.POD_CLAIM} is the name of the entry that Cardwise writes"
                raise InvalidRequest(f"{field}.name", problem, "give your claim another name in the pod")
            if not needs_claim:
                raise _foreign_claim_error(f"{field}.resourceClaimName", claim)
            name = claim
        elif _is_own({"name": names.POD_CLAIM, "resourceClaimName": claim}):
            raise _foreign_claim_error(f"{field}.resourceClaimName", claim)
    return name


def _foreign_claim_error(field: str, claim: str) -> InvalidRequest:
    problem = f"{quote_text(claim)} is a claim of Cardwise, which serves only the pod that Cardwise gave it to"
    return InvalidRequest(field, problem, _REMEDY)


def _is_own(entry: Json) -> bool:
    """Whether the entry of the pod is as the webhook writes it."""
    try:
        return claims.claim_name({"spec": {"resourceClaims": [entry]}}) is not None
    except InvalidRequest:
        return False


def _is_copy(manifest: Json) -> bool:
    """Whether the manifest is that of a pod which exists already."""
    is_stored = bool((manifest.get("status") or {}).get("phase"))
    return is_stored or names.ASSIGNMENT in annotations_of(manifest)


def _remove(pod: PodUnderReview) -> None:
    """Remove claim and gate from a copy of a pod that was created with claims, with a warning."""
    entries = pod.spec.get("resourceClaims") or []
    kept_entries = [entry for entry in entries if not (entry.get("name") == names.POD_CLAIM and _is_own(entry))]
    if len(kept_entries) < len(entries):
        _set_or_drop(pod.spec, "resourceClaims", kept_entries)
        pod.warnings.append(
            f"spec.resourceClaims[{names.POD_CLAIM}]: removed, because shares are not allocated by claim"
        )
    gates = pod.spec.get("schedulingGates") or []
    kept_gates = [gate for gate in gates if gate.get("name") != names.ALLOCATION_GATE]
    if len(kept_gates) < len(gates):
        _set_or_drop(pod.spec, "schedulingGates", kept_gates)
        pod.warnings.append(f"{_GATE_FIELD}: removed, because shares are not allocated by claim")


def _set_or_drop(spec: Json, field: str, entries: list[Json]) -> None:
    spec.pop(field)
    if entries:
        spec[field] = entries
