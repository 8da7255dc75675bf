"""Publishes a decision as an allocated ResourceClaim: the calls of one pod, and how a lost answer is resolved.

Theory of operation. kube-scheduler binds the pod once its gate is open and its claim is allocated. The later of these
two writes is the point of no return, and all that the pod and its node need is written before. For a gated pod::

    nominate the node ─► create the claim ─► allocate it (status) ─► open the gate, with the pod's annotations

A gate cannot be closed again. So after a refusal the order is: the former claim is deleted, then::

    nominate the node ─► write the pod's annotations ─► create the claim ─► allocate it

The nomination fences the pod, as `leadership.fence` does: it contains the time, so it always gives the pod a new
resourceVersion, and each later write to the pod names this version or one that was read after it. So a gate that an
earlier attempt or a former leader opens late has no effect once a new claim exists.

Each write names the UID of its object and the version that was read, so each of them lands at most once, and a write of
a former leader fails: a new leader deletes the claims of all pods that are not bindable yet before it serves
(`fence_claims`), and a write that names a deleted object changes nothing. After a lost answer the object is read, and
the writer continues with what is missing. Nothing is undone here: the caller takes the claim back (`delete_claim`).

Example: the answer to the PATCH that allocates claim C is lost. C is read: it is allocated to the pod on the node that
was to be written, so the writer goes on with the gate. Had C not been allocated, the PATCH would be sent again with the
version just read: if the first PATCH arrives after all, one of the two gets 409.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple, Self

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import claims, names
from cardwise.core.api.assignment import Assignment, InvalidAssignment
from cardwise.core.api.claims import ClaimingPod, InvalidClaim
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient, PatchKind
from cardwise.kube.pods.nodeconstraints import REQUIRED_AFFINITY_FIELD, has_conditions
from extender.leadership.fence import fencing_metadata
from extender.leadership.leadership import Leadership
from extender.records.podref import PodRef

_log = structlog.get_logger(__name__)

_CALL_SECONDS: Final = 5.0  # seconds for one call
_FIELD_MANAGER: Final = "cardwise-extender"
# Answers after which it is unknown whether the request was carried out.
_LOST = (errors.TooManyRequests, errors.ServerError, errors.Unreachable)


class ClaimFailed(Exception):
    """The decision was not published. The text is for the pod's events.

    is_refusal: whether trying again would fail as well, until a quota, a policy or a name is changed.
    """

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class PodChanged(ClaimFailed):
    """The pod is gone, or another program has bound it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGrant:
    """The decision to publish.

    claim: None for a member of a gang that requests no GPU; then only the gate is opened.
    gated: whether the pod had its gate when it was last read.
    epoch: the leader epoch in which the decision was made.
    """

    pod: PodRef
    claim: ClaimingPod | None
    gated: bool
    node: str
    assignment: Assignment | None
    env_access: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class PreparedGrant:
    """A decision of which only the last write is missing.

    pod: the pod whose version the last write names; None to read it.
    """

    grant: ClaimGrant
    pod: Json | None


class ClaimVersion(NamedTuple):
    """One version of a claim. `version`: its resourceVersion."""

    namespace: str
    name: str
    uid: str
    version: str

    @classmethod
    def from_manifest(cls, manifest: Json) -> Self:
        metadata = manifest["metadata"]
        return cls(metadata["namespace"], metadata["name"], metadata["uid"], metadata["resourceVersion"])

    @property
    def delete_options(self) -> Json:
        """The options of a DELETE that fails if the claim has changed."""
        return {"preconditions": {"uid": self.uid, "resourceVersion": self.version}}


class ClaimWriter:
    """Writes claims and opens gates. Thread-safe.

    lowest_priority: returns the lowest priority of all pods on nodes. A pod above it is pinned to its node.
    """

    def __init__(
        self, client: KubeClient, leadership: Leadership, lowest_priority: Callable[[], int], clock: Clock = SYSTEM
    ) -> None:
        self._client = client
        self._leadership = leadership
        self._lowest_priority = lowest_priority
        self._clock = clock

    def prepare(self, grant: ClaimGrant, deadline: float) -> PreparedGrant:
        """Make all writes before the point of no return. Raises ClaimFailed."""
        pod = self._nominate(grant, deadline)
        if not grant.gated:
            self._write_pod(grant, pod, deadline)
        elif grant.claim is not None:
            self._allocate(grant, grant.claim, deadline)
        return PreparedGrant(grant, pod)

    def commit(self, prepared: PreparedGrant, deadline: float) -> None:
        """Make the write after which kube-scheduler may bind the pod. Raises ClaimFailed."""
        grant = prepared.grant
        if grant.gated:
            self._write_pod(grant, prepared.pod, deadline)
        elif grant.claim is not None:
            self._allocate(grant, grant.claim, deadline)

    def reallocate(self, grant: ClaimGrant, deadline: float) -> None:
        """Write the claim of a pod that is bound already, and that has lost its claim. Raises ClaimFailed."""
        if grant.claim is not None:
            self._allocate(grant, grant.claim, deadline)

    def delete_claim(self, claim: ClaimVersion, epoch: int) -> None:
        """Delete the claim in this version, so that no earlier write to it can change anything.

        Raises Conflict if the claim has changed, and other KubeErrors.
        """
        path = paths.resourceclaims(claim.namespace, claim.name)
        with contextlib.suppress(errors.NotFound):
            self._send(epoch, lambda seconds: self._client.delete(path, claim.delete_options, timeout=seconds))

    def read_claim(self, namespace: str, name: str) -> Json | None:
        """The claim; None if there is none. Raises KubeError."""
        try:
            return self._client.get(paths.resourceclaims(namespace, name), timeout=_CALL_SECONDS)
        except errors.NotFound:
            return None

    def read_pod(self, pod: PodRef) -> Json | None:
        """The pod; None if it is gone. Raises KubeError."""
        try:
            manifest = self._client.get(paths.pods(pod.namespace, pod.name), timeout=_CALL_SECONDS)
        except errors.NotFound:
            return None
        return manifest if manifest["metadata"]["uid"] == pod.uid else None

    # The claim.

    def _make_claim(self, grant: ClaimGrant, claim: ClaimingPod, deadline: float) -> Json:
        """Create the claim without an allocation, in place of an earlier one. Returns it."""
        body = self._encode(lambda: claims.new_claim(claim, _cards(grant), self._token(grant)))
        path = paths.resourceclaims(claim.namespace)
        backoff, present = Backoff(initial=0.05, cap=1.0), False
        problem = "the deadline passed"
        while self._clock.now() < deadline:
            try:
                if not present:
                    return self._send(grant.epoch, lambda seconds: self._client.create(path, body, timeout=seconds))
                manifest = self.read_claim(claim.namespace, claim.claim)
                present = manifest is not None
                if manifest is None:
                    continue
                if not is_claim_of(manifest, claim.uid):
                    text = f"another ResourceClaim has the name {claim.claim}; recreate the pod"
                    raise ClaimFailed(text, is_refusal=True)
                if _is_new(manifest, body):
                    return manifest
                self.delete_claim(ClaimVersion.from_manifest(manifest), grant.epoch)
                present = False
                continue
            except errors.Conflict:  # it exists already, or has changed
                present = True
                continue
            except _LOST as error:
                present, problem = True, str(error)
                self._back_off(backoff, error, deadline)
            except errors.KubeError as error:
                raise ClaimFailed(f"cannot create the ResourceClaim: {error}", is_refusal=True) from error
        raise ClaimFailed(f"cannot create the ResourceClaim in time: {problem}")

    def _allocate(self, grant: ClaimGrant, claim: ClaimingPod, deadline: float) -> None:
        """Create the claim if it is not there yet, and allocate it."""
        moment = datetime.fromtimestamp(self._clock.wall_ns() // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = self._encode(lambda: claims.new_status(claim, _cards(grant), grant.node, moment))
        path = paths.resourceclaims(claim.namespace, claim.claim, "status")
        manifest: Json | None = self._make_claim(grant, claim, deadline)
        backoff, problem = Backoff(initial=0.05, cap=1.0), "the deadline passed"
        while self._clock.now() < deadline:
            try:
                if manifest is None:
                    manifest = self.read_claim(claim.namespace, claim.claim)
                    if manifest is not None and _is_allocated_as(manifest, grant):
                        return
                    manifest = self._make_claim(grant, claim, deadline)
                precondition = {key: manifest["metadata"][key] for key in ("uid", "resourceVersion")}
                manifest = None  # whatever the answer is, the claim may have another version then
                self._patch(grant.epoch, path, {"metadata": precondition, "status": status})
            except (errors.Conflict, errors.NotFound) as error:
                problem = str(error)
            except _LOST as error:
                problem = str(error)
                self._back_off(backoff, error, deadline)
            except errors.KubeError as error:
                raise ClaimFailed(f"cannot allocate the ResourceClaim: {error}", is_refusal=True) from error
            else:
                return
        raise ClaimFailed(f"the ResourceClaim was not allocated in time: {problem}")

    # The pod.

    def _write_pod(self, grant: ClaimGrant, manifest: Json | None, deadline: float) -> None:
        """Write the annotations, and open the gate."""
        annotations = self._annotations(grant)
        path, backoff = paths.pods(grant.pod.namespace, grant.pod.name), Backoff(initial=0.05, cap=1.0)
        problem = "the deadline passed"
        while self._clock.now() < deadline:
            try:
                if manifest is None:
                    manifest = self._read_unwritten(grant, annotations)
                    if manifest is None:
                        return
                version = manifest["metadata"]["resourceVersion"]
                metadata: Json = {"uid": grant.pod.uid, "resourceVersion": version, "annotations": annotations}
                body: Json = {"metadata": metadata}
                if grant.gated:
                    body["spec"] = {"schedulingGates": [{"name": names.ALLOCATION_GATE, "$patch": "delete"}]}
                    if may_preempt(manifest["spec"], self._lowest_priority()):
                        body["spec"]["affinity"] = _pin(manifest["spec"], grant.node)
                manifest = None
                self._patch(grant.epoch, path, body, "strategic")
            except errors.NotFound as error:
                raise PodChanged("the pod no longer exists") from error
            except errors.Conflict as error:
                problem = str(error)
            except _LOST as error:
                problem = str(error)
                self._back_off(backoff, error, deadline)
            except errors.KubeError as error:
                raise ClaimFailed(f"cannot change the pod: {error}", is_refusal=True) from error
            else:
                return
        raise ClaimFailed(f"the pod was not changed in time: {problem}")

    def _read_unwritten(self, grant: ClaimGrant, annotations: Json) -> Json | None:
        """The pod; None if it is as it is to be written.

        Raises PodChanged and KubeError.
        """
        manifest = self.read_pod(grant.pod)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            raise PodChanged("the pod no longer exists")
        present = annotations_of(manifest)
        is_written = all(present.get(key) == text for key, text in annotations.items())
        if is_written and not (grant.gated and has_gate(manifest)):
            return None
        if manifest["spec"].get("nodeName"):
            raise PodChanged(f"another program bound the pod to node {manifest['spec']['nodeName']}")
        return manifest

    def _nominate(self, grant: ClaimGrant, deadline: float) -> Json:
        """Write the node into the pod's status, so that kube-scheduler tries it first and alone, and fence the pod.

        Returns the pod after that. Raises ClaimFailed.
        """
        metadata = fencing_metadata(grant.pod.uid, self._token(grant), self._clock)
        body: Json = {"metadata": metadata, "status": {"nominatedNodeName": grant.node}}
        path = paths.pods(grant.pod.namespace, grant.pod.name, "status")
        backoff, problem = Backoff(initial=0.05, cap=1.0), "the deadline passed"
        while self._clock.now() < deadline:
            try:
                manifest = self._patch(grant.epoch, path, body, manager=_FIELD_MANAGER)
            except (errors.NotFound, errors.Conflict) as error:
                raise PodChanged("the pod no longer exists") from error
            except _LOST as error:
                problem = str(error)
                self._back_off(backoff, error, deadline)
            except errors.KubeError as error:
                raise ClaimFailed(f"cannot nominate the node: {error}", is_refusal=True) from error
            else:
                if manifest["spec"].get("nodeName"):
                    raise PodChanged(f"another program bound the pod to node {manifest['spec']['nodeName']}")
                if manifest["metadata"].get("deletionTimestamp") or has_gate(manifest) != grant.gated:
                    raise PodChanged("the pod has changed")
                return manifest
        raise ClaimFailed(f"the node was not nominated in time: {problem}")

    def _annotations(self, grant: ClaimGrant) -> Json:
        if grant.assignment is None:
            return {}  # a member of a gang without a GPU: only its gate is opened
        now = self._clock.wall_ns()
        annotations: Json = dict(codec.encode(grant.assignment, assume_time_ns=now, env_access=grant.env_access))
        if token := self._token(grant):
            annotations[names.LEADER_EPOCH] = token
        return annotations

    # Calls.

    def _token(self, grant: ClaimGrant) -> str | None:
        return self._leadership.fencing_token(grant.epoch)

    def _encode(self, encode: Callable[[], Json]) -> Json:
        try:
            return encode()
        except InvalidRequest as error:
            raise ClaimFailed(str(error), is_refusal=True) from error

    def _back_off(self, backoff: Backoff, error: errors.KubeError, deadline: float) -> None:
        """Sleep before the next attempt, at most until the deadline."""
        self._clock.sleep(min(backoff.next_delay(error.retry_after), max(0.0, deadline - self._clock.now())))

    def _patch(self, epoch: int, path: str, body: Json, kind: PatchKind = "merge", manager: str | None = None) -> Json:
        return self._send(epoch, lambda seconds: self._client.patch(path, body, kind, manager, timeout=seconds))

    def _send(self, epoch: int, write: Callable[[float], Json]) -> Json:
        """Send one write, if this extender still leads. Raises KubeError, and ClaimFailed if the epoch is over."""
        with self._leadership.allow_post(epoch) as allowed_seconds:
            if allowed_seconds <= 0:
                raise ClaimFailed("this extender no longer holds the lease")
            return write(min(_CALL_SECONDS, allowed_seconds))


def has_gate(pod: Json) -> bool:
    """Whether the pod has the gate that the extender opens."""
    return any(gate.get("name") == names.ALLOCATION_GATE for gate in pod["spec"].get("schedulingGates") or ())


def may_preempt(spec: Json, lowest_priority: int) -> bool:
    """Whether kube-scheduler may evict pods of the lowest priority for the pod with this spec."""
    return spec.get("preemptionPolicy") != "Never" and (spec.get("priority") or 0) > lowest_priority


def is_pinned(spec: Json) -> bool:
    """Whether the pod's required affinity names its node. A controller may have written it, as for DaemonSets."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED_AFFINITY_FIELD) or {}
    terms = [term for term in required.get("nodeSelectorTerms") or () if has_conditions(term)]
    return bool(terms) and all(
        any(field.get("operator") == "In" and len(field["values"]) == 1 for field in term.get("matchFields") or ())
        for term in terms
    )


def _pin(spec: Json, node: str) -> Json:
    """The `affinity` that allows the pod only this node. Kubernetes lets a gated pod's affinity be tightened only.

    Without it: the node's cpu is taken between the plan and kube-scheduler's try. kube-scheduler evicts a pod there,
    and deallocates the claim in the same attempt. So the pod is planned elsewhere, and the eviction was in vain.
    """
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED_AFFINITY_FIELD) or {}
    name = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [
        # A term without conditions matches no node, and would match this one with a condition.
        term | {"matchFields": [*(term.get("matchFields") or ()), name]} if has_conditions(term) else term
        for term in required.get("nodeSelectorTerms") or ()
    ]
    return {"nodeAffinity": {REQUIRED_AFFINITY_FIELD: {"nodeSelectorTerms": terms or [{"matchFields": [name]}]}}}


def is_whole(pod: Json, claim: Json | None, node: str, assignment: Assignment | None) -> bool:
    """Whether everything is published: the gate is open, and claim and annotations give these cards of this node."""
    if has_gate(pod):
        return False
    if assignment is None:
        return True
    return claim is not None and gives(claim, node, assignment) and read_assignment(pod) == assignment


def _cards(grant: ClaimGrant) -> Assignment:
    return grant.assignment if grant.assignment is not None else Assignment({})


def read_assignment(pod: Json) -> Assignment | None:
    """The assignment in the pod's annotations; None if there is none that can be read."""
    try:
        return codec.decode(annotations_of(pod))
    except InvalidAssignment:
        return None


def is_claim_of(claim: Json, uid: str) -> bool:
    """Whether the claim is of Cardwise's class, and owned by the pod with this UID. A user may name that of another."""
    owners = claim["metadata"].get("ownerReferences") or ()
    return claims.is_ours(claim) and any(owner.get("uid") == uid for owner in owners)


def _is_new(claim: Json, body: Json) -> bool:
    """Whether the claim is as `body` creates it: not allocated, with these requests, and of this leader epoch."""
    metadata, status = claim["metadata"], claim.get("status") or {}
    if status.get("allocation") or status.get("reservedFor") or metadata.get("deletionTimestamp"):
        return False
    return annotations_of(claim).get(names.LEADER_EPOCH) == annotations_of(body).get(
        names.LEADER_EPOCH
    ) and _counts_by_request(claim) == _counts_by_request(body)


def _counts_by_request(claim: Json) -> list[tuple[str, int]]:
    return [
        (request["name"], (request.get("exactly") or {}).get("count", 1))
        for request in claim["spec"]["devices"]["requests"]
    ]


def _is_allocated_as(claim: Json, grant: ClaimGrant) -> bool:
    return grant.assignment is not None and gives(claim, grant.node, grant.assignment)


def gives(claim: Json, node: str, assignment: Assignment) -> bool:
    """Whether the claim is allocated on this node with these cards and devices."""
    try:
        allocation = claims.decode(claim)
    except InvalidClaim:
        return False
    return allocation is not None and (allocation.node, allocation.assignment) == (node, assignment)
