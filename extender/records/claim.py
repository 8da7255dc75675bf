"""Records of ResourceClaims of Cardwise's class, and of pending pods whose shares are allocated by claim."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cardwise.core.api import claims, names
from cardwise.core.api.claims import Allocation, ClaimingPod, InvalidClaim
from cardwise.core.values.decoded import Json
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef

_decode_any = msgspec.json.Decoder().decode


class ClaimRecord(NamedTuple):
    """A claim of Cardwise's class.

    pod: the pod that owns the claim; without name and UID if none does: the pod was deleted with --cascade=orphan.
    version: the claim's resourceVersion.
    allocation: None if the claim is not allocated.
    problem: why the allocation could not be read.
    """

    namespace: str
    name: str
    uid: str
    pod: PodRef
    version: str
    allocation: Allocation | None = None
    problem: str = ""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def is_allocated(self) -> bool:
        """Whether kube-scheduler may bind the pod by this claim."""
        return self.allocation is not None or bool(self.problem)


@dataclass(frozen=True, slots=True)
class PendingByClaim:
    """A pending pod that waits for its ResourceClaim, or a member of a gang whose pods wait for theirs.

    waiting: the pod's request and constraints.
    manifest: the pod's JSON.
    claim: its claim and the containers that use it; None for a member of a gang that requests no GPU.
    gated: whether the pod has the gate that the extender opens.
    is_schedulable: whether no other gate keeps the pod from kube-scheduler, and the pod is not being deleted.
    refused: whether kube-scheduler has tried the pod and found no node.
    scheduler: the name of the pod's scheduler.
    has_volumes: whether the pod names PersistentVolumeClaims, for which its scheduler may wait.
    """

    waiting: WaitingPod
    manifest: bytes
    claim: ClaimingPod | None
    gated: bool
    is_schedulable: bool
    refused: bool
    gang: str | None
    scheduler: str
    has_volumes: bool

    @property
    def ref(self) -> PodRef:
        return self.waiting.ref

    @property
    def order(self) -> tuple[int, str, str]:
        """The order of kube-scheduler's queue: the highest priority first, then the oldest pod."""
        return -self.waiting.request.priority, self.waiting.created, self.ref.uid

    @property
    def shape(self) -> object:
        """A key that is equal for pods that fit the same nodes."""
        waiting = self.waiting
        return self.ref.namespace, waiting.request, waiting.load, waiting.constraints, waiting.rank[:2]

    def read_manifest(self) -> Json:
        """The pod's JSON, decoded."""
        manifest: Json = _decode_any(self.manifest)
        return manifest


def decode_claim(raw: bytes) -> tuple[str, ClaimRecord] | None:
    """Decode a ResourceClaim; returns its key "namespace/name" and its record. None for claims of other classes."""
    if names.DRIVER.encode() not in raw:
        return None
    manifest = _decode_any(raw)
    return read_claim(manifest) if claims.is_ours(manifest) else None


def read_claim(manifest: Json) -> tuple[str, ClaimRecord] | None:
    """As `decode_claim`, from decoded JSON of a claim of Cardwise's class. None if the extender has not written it."""
    metadata = manifest["metadata"]
    owners = metadata.get("ownerReferences") or ()
    owner = next((entry for entry in owners if entry.get("kind") == "Pod"), {"uid": "", "name": ""})
    if not owner["uid"] and not claims.is_own_name(metadata["name"]):
        return None
    allocation, problem = None, ""
    try:
        allocation = claims.decode(manifest)
    except InvalidClaim as error:
        problem = str(error)
    namespace = metadata["namespace"]
    record = ClaimRecord(
        namespace,
        metadata["name"],
        metadata["uid"],
        PodRef(owner["uid"], namespace, owner["name"]),
        metadata["resourceVersion"],
        allocation,
        problem,
    )
    return record.key, record
