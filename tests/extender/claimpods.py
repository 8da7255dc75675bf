"""Pods as the webhook leaves them with scheduler.mode=claims, their claims, and decisions about them."""

import json

from cardwise.core.api import claims, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.values.decoded import Json
from extender.binding.claimwriter import ClaimGrant
from extender.records.claim import ClaimRecord, decode_claim
from extender.records.podref import PodRef
from tests.build import asking, shares

REFUSED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]


def claiming(name: str = "p", mem: int = 900, *, gated: bool = True, number: int = 1, gang: str = "") -> Json:
    """A pending pod with a share by claim."""
    manifest = asking(name, gpu_mem=mem)
    spec, metadata = manifest["spec"], manifest["metadata"]
    resources = spec["containers"][0]["resources"]
    del resources["limits"][names.SHARE]
    resources["claims"] = [{"name": names.POD_CLAIM, "request": "main"}]
    claim = claims.format_name(number.to_bytes(8, "big"))
    spec["resourceClaims"] = [{"name": names.POD_CLAIM, "resourceClaimName": claim}]
    spec["schedulingGates"] = [{"name": names.ALLOCATION_GATE}] if gated else []
    metadata["creationTimestamp"] = f"2026-11-30T10:00:{number:02}Z"
    manifest["status"] = {"phase": "Pending"}
    if gang:
        metadata["labels"] = {names.GANG: gang}
        metadata["annotations"] |= {names.GROUP_NAME: gang, names.GROUP_NUM: "2"}
    return manifest


def grant_for(manifest: Json, node: str = "n1", index: int = 0, mem: int = 900, *, epoch: int = 0) -> ClaimGrant:
    """The decision to give the pod this share."""
    metadata = manifest["metadata"]
    return ClaimGrant(
        pod=PodRef(metadata["uid"], metadata["namespace"], metadata["name"]),
        claim=claims.read_pod(manifest),
        gated=bool(manifest["spec"]["schedulingGates"]),
        node=node,
        assignment=Assignment({"0": shares(mem, index, node=node)}),
        env_access=False,
        epoch=epoch,
    )


def claim_record(manifest: Json, node: str | None = "n1", *, uid: str = "claim-1", owned: bool = True) -> ClaimRecord:
    """The record of the pod's claim, allocated on the node; None: not allocated. `owned`: whether the pod owns it."""
    pod, assignment = claims.read_pod(manifest), Assignment({"0": shares(900, 0, node=node or "n1")})
    claim = claims.new_claim(pod, assignment)
    claim["metadata"] |= {"uid": uid, "resourceVersion": "7"}
    if node is not None:
        claim["status"] = claims.new_status(pod, assignment, node, "2026-11-30T10:00:00Z")
    if not owned:
        del claim["metadata"]["ownerReferences"]
    decoded = decode_claim(json.dumps(claim).encode())
    assert decoded is not None
    return decoded[1]
