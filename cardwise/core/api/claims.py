"""The codec of ResourceClaims: a pod's assignment as an allocated claim (docs/design/0038-claims.md).

With scheduler.mode=claims the leading extender publishes its decision as a claim of the class `names.DRIVER`, which the
unmodified kube-scheduler obeys. Extender, device plugin and command line read and write claims only with this module.

One claim has the shares of the whole pod, with one request for each container, named as the container: names do not
change when another webhook inserts a container. The parameters of a request are the container's part of the document
that the annotation `names.ASSIGNMENT` has, so pod and claim say the same. The share agent has a request without
parameters and without a share of its own.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cardwise.core.api import assignment as codec
from cardwise.core.api import names, shareagent
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare, InvalidAssignment
from cardwise.core.api.request import Container, containers, names_claim
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text

API_VERSION: Final = "resource.k8s.io/v1"
KIND: Final = "ResourceClaim"
# Kubernetes' limits on one claim: requests, and devices of all requests together.
MAX_REQUESTS: Final = 32
MAX_DEVICES: Final = 32
# The chart's ValidatingAdmissionPolicies without which a user can name, forge, change or delete the claims of others.
POLICIES: Final = tuple(f"{name}.{names.GROUP}" for name in ("allocation", "claims", "claimstatus", "fencing"))
_TOKEN_BYTES: Final = 8
_NAME: Final = re.compile(f"{names.CLAIM_PREFIX}[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
_REMEDY: Final = "delete the pod; its controller creates another one"


class InvalidClaim(InvalidRequest):
    """A claim of Cardwise's class that the extender has not written in this form: field, problem, remedy."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an allocated claim says.

    node: the node of the cards.
    pod_uid, pod_name: the only pod that may use them.
    assignment: the cards and devices of all containers, by container key, as in the pod's annotation.
    keys: the key of the container of each request, by request name; None for the share agent, which has no share.
    """

    node: str
    pod_uid: str
    pod_name: str
    assignment: Assignment
    keys: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class ClaimingPod:
    """What a claim needs of its pod.

    claim: the claim's name.
    containers: of each container that gets devices of the claim its name, which is that of its request, and its key.
    """

    namespace: str
    name: str
    uid: str
    claim: str
    containers: tuple[tuple[str, str], ...]


def format_name(token: bytes) -> str:
    """The name of a new claim.

    token: eight random bytes. The name is unpredictable, because the pod's author chooses the pod's other fields.
    """
    if len(token) != _TOKEN_BYTES:
        raise ValueError(f"{len(token)} bytes instead of {_TOKEN_BYTES}")
    return names.CLAIM_PREFIX + token.hex()


def is_own_name(name: str) -> bool:
    """Whether a claim with this name has been named by the webhook."""
    return _NAME.fullmatch(name) is not None


def claim_name(pod: Json) -> str | None:
    """The name of the pod's claim; None if its shares are not allocated by claim.

    Raises InvalidRequest if the pod names a claim as only the webhook may, but not as the webhook does.
    """
    for i, entry in enumerate((pod.get("spec") or {}).get("resourceClaims") or ()):
        if entry.get("name") == names.POD_CLAIM:
            name = entry.get("resourceClaimName")
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InvalidRequest(
                    f"spec.resourceClaims[{i}].resourceClaimName",
                    f"{quote_text(name)} is not a name that Cardwise gives",
                    f"leave the entry {names.POD_CLAIM} out; the webhook writes it",
                )
            return name
    return None


def claiming_containers(pod: Json) -> list[Container]:
    """The containers that get devices of the pod's claim, in the order of `request.containers`.

    Raises InvalidRequest if a container names the claim without its own request: it would get all devices of the claim.
    """
    claiming = []
    for container in filter(names_claim, containers(pod)):
        for i, entry in enumerate(container.spec["resources"]["claims"]):
            if entry.get("name") == names.POD_CLAIM and entry.get("request") != container.spec.get("name"):
                raise InvalidRequest(
                    f"{container.path}.resources.claims[{i}].request",
                    f"{quote_text(entry.get('request') or '')} is not the container's name",
                    "leave the entry out; the webhook writes it",
                )
        claiming.append(container)
    return claiming


def check_size(cards_by_container: Mapping[str, int], path: str = "spec.containers") -> None:
    """Check that one claim can have so many requests and devices. Raises InvalidRequest.

    cards_by_container: the number of cards and other devices of each container with a request.
    """
    devices = sum(max(number, 1) for number in cards_by_container.values())
    if len(cards_by_container) > MAX_REQUESTS:
        problem = f"{len(cards_by_container)} containers use a GPU, and a ResourceClaim has at most {MAX_REQUESTS}"
        raise InvalidRequest(path, f"{problem} requests", "use several pods")
    if devices > MAX_DEVICES:
        problem = f"the containers use {devices} GPUs and devices in total, and a ResourceClaim has at most"
        raise InvalidRequest(path, f"{problem} {MAX_DEVICES}", "use several pods")


def is_ours(claim: Json) -> bool:
    """Whether the claim requests devices of Cardwise's class."""
    requests = ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ()
    return any((request.get("exactly") or {}).get("deviceClassName") == names.DRIVER for request in requests)


def read_pod(pod: Json) -> ClaimingPod | None:
    """What the pod's claim needs; None if the pod's shares are not allocated by claim. Raises InvalidRequest."""
    name, claiming = claim_name(pod), claiming_containers(pod)
    if name is None:
        return None
    metadata = pod["metadata"]
    return ClaimingPod(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        name,
        tuple((container.spec["name"], container.key) for container in claiming),
    )


def new_claim(pod: ClaimingPod, assignment: Assignment, fencing_token: str | None = None) -> Json:
    """The claim to create for the pod, which owns it. Raises InvalidRequest.

    fencing_token: the leader epoch in which the claim is created; None without a Lease.
    """
    requests = _requests(pod, assignment)
    check_size({request.name: len(request.devices) for request in requests})
    annotations = {names.LEADER_EPOCH: fencing_token} if fencing_token else {}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": False}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": pod.claim,
            "namespace": pod.namespace,
            "annotations": annotations,
            "ownerReferences": [owner],
        },
        "spec": {"devices": {"requests": [request.spec() for request in requests]}},
    }


def new_status(pod: ClaimingPod, assignment: Assignment, node: str, timestamp: str) -> Json:
    """The claim's status that allocates the assignment on the node to the pod. Raises InvalidRequest.

    timestamp: the time of the allocation, as the API writes times. Without it kube-scheduler would try to add one, and
        the API server would refuse that.
    """
    requests = _requests(pod, assignment)
    node_field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "allocation": {
            "allocationTimestamp": timestamp,
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [node_field]}]},
            "devices": {
                "results": [
                    {"request": request.name, "driver": names.DRIVER, "pool": node, "device": device}
                    for request in requests
                    for device in request.devices
                ],
                "config": [
                    {
                        "source": "FromClaim",
                        "requests": [request.name],
                        "opaque": {"driver": names.DRIVER, "parameters": codec.encode_document(request.assignment)},
                    }
                    for request in requests
                    if request.assignment is not None
                ],
            },
        },
        "reservedFor": [{"resource": "pods", "name": pod.name, "uid": pod.uid}],
    }


def decode(claim: Json) -> Allocation | None:
    """The allocation of a claim of Cardwise's class; None if the claim is not allocated. Raises InvalidClaim."""
    status = claim.get("status") or {}
    allocation = status.get("allocation")
    if not allocation:
        return None
    try:
        return _decode_allocation(claim, status, allocation)
    except (TypeError, KeyError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, InvalidClaim):
            raise
        raise InvalidClaim("status.allocation", "has not the form that Cardwise writes", _REMEDY) from error


def card_device(index: int) -> str:
    """The name of a card in a claim: Kubernetes allows DNS labels only."""
    return f"gpu-{index}"


def other_device(uuid: str) -> str:
    """The name of a device other than a GPU in a claim."""
    return "device-" + hashlib.sha256(uuid.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _ClaimRequest:
    """A container's part of a claim. `assignment` is None for the share agent."""

    name: str
    assignment: Assignment | None
    devices: Sequence[str]

    def spec(self) -> Json:
        exactly: Json = {"deviceClassName": names.DRIVER}
        if len(self.devices) > 1:
            exactly |= {"allocationMode": "ExactCount", "count": len(self.devices)}
        return {"name": self.name, "exactly": exactly}


def _requests(pod: ClaimingPod, assignment: Assignment) -> list[_ClaimRequest]:
    """The requests of the pod's claim. Raises InvalidRequest if a container with a share does not name the claim."""
    unclaimed = {*assignment.containers, *assignment.devices} - {key for _, key in pod.containers}
    if unclaimed:
        problem = f"container {min(unclaimed)} has no entry {names.POD_CLAIM} although it has a GPU"
        raise InvalidRequest("spec.containers.resources.claims", problem, "recreate the pod")
    requests = []
    for name, key in pod.containers:
        shares, others = assignment.containers.get(key, ()), assignment.devices.get(key, ())
        if shares or others:
            part = Assignment({key: shares} if shares else {}, {key: others} if others else {})
            requests.append(_ClaimRequest(name, part, _device_names(shares, others)))
        elif name == shareagent.CONTAINER_NAME and assignment.shares():
            requests.append(_ClaimRequest(name, None, [card_device(assignment.shares()[0].index)]))
        else:
            problem = f"container {key} has the entry {names.POD_CLAIM} although it has no GPU"
            raise InvalidRequest("spec.containers.resources.claims", problem, "recreate the pod")
    return requests


def _device_names(shares: Sequence[CardShare], others: Sequence[AssignedDevice]) -> list[str]:
    return [card_device(share.index) for share in shares] + [other_device(device.uuid) for device in others]


def _decode_allocation(claim: Json, status: Json, allocation: Json) -> Allocation:
    node = _decode_node(allocation)
    reserved = status.get("reservedFor") or []
    if len(reserved) != 1 or reserved[0].get("resource") != "pods" or reserved[0].get("apiGroup"):
        raise InvalidClaim("status.reservedFor", "does not name exactly one pod", _REMEDY)
    pod_name, pod_uid = _text(reserved[0]["name"]), _text(reserved[0]["uid"])
    owners = (claim.get("metadata") or {}).get("ownerReferences") or []
    if not any(owner.get("kind") == "Pod" and owner.get("uid") == pod_uid for owner in owners):
        raise InvalidClaim("status.reservedFor", f"pod {quote_text(pod_name)} does not own the claim", _REMEDY)
    parts = _decode_parts(allocation["devices"].get("config") or [])
    devices: dict[str, list[str]] = {}
    for i, entry in enumerate(allocation["devices"].get("results") or []):
        if entry["driver"] != names.DRIVER or entry["pool"] != node:
            problem = f"is a device of {quote_text(entry['driver'])} in the pool {quote_text(entry['pool'])}"
            raise InvalidClaim(f"status.allocation.devices.results[{i}]", problem, _REMEDY)
        devices.setdefault(_text(entry["request"]), []).append(_text(entry["device"]))
    keys: dict[str, str | None] = {}
    shares: dict[str, tuple[CardShare, ...]] = {}
    others: dict[str, tuple[AssignedDevice, ...]] = {}
    for i, request in enumerate(claim["spec"]["devices"]["requests"]):
        name, part = _text(request["name"]), parts.pop(request["name"], None)
        if request["exactly"]["deviceClassName"] != names.DRIVER:
            raise InvalidClaim(f"spec.devices.requests[{i}]", f"is not of the class {names.DRIVER}", _REMEDY)
        if part is None:
            if name != shareagent.CONTAINER_NAME:
                raise InvalidClaim("status.allocation.devices.config", f"has no entry for {quote_text(name)}", _REMEDY)
            keys[name] = None
            continue
        key = next(iter({**part.containers, **part.devices}))
        if key in keys.values() or devices.get(name, []) != _device_names(part.shares(), part.non_gpu_devices()):
            problem = f"those of {quote_text(name)} differ from the parameters"
            raise InvalidClaim("status.allocation.devices.results", problem, _REMEDY)
        keys[name] = key
        shares |= part.containers
        others |= part.devices
    if parts or not (shares or others):
        problem = f"has an entry for {quote_text(next(iter(parts)))}, which is no request" if parts else "names no GPU"
        raise InvalidClaim("status.allocation.devices.config", problem, _REMEDY)
    return Allocation(node, pod_uid, pod_name, Assignment(shares, others), keys)


def _decode_node(allocation: Json) -> str:
    field = "status.allocation.nodeSelector"
    terms = (allocation.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    if len(terms) != 1 or terms[0].get("matchExpressions") or len(terms[0].get("matchFields") or ()) != 1:
        raise InvalidClaim(field, "does not name exactly one node", _REMEDY)
    requirement = terms[0]["matchFields"][0]
    if requirement["key"] != "metadata.name" or requirement["operator"] != "In" or len(requirement["values"]) != 1:
        raise InvalidClaim(field, "does not name exactly one node", _REMEDY)
    return _text(requirement["values"][0])


def _decode_parts(configs: Sequence[Json]) -> dict[str, Assignment]:
    """The part of the assignment that each request has. Raises InvalidClaim."""
    parts: dict[str, Assignment] = {}
    for i, config in enumerate(configs):
        field = f"status.allocation.devices.config[{i}]"
        opaque = config["opaque"]
        if config["source"] != "FromClaim" or opaque["driver"] != names.DRIVER or len(config["requests"]) != 1:
            raise InvalidClaim(field, "has not the form that Cardwise writes", _REMEDY)
        name = _text(config["requests"][0])
        try:
            part = codec.decode_document(opaque["parameters"], f"{field}.opaque.parameters")
        except InvalidAssignment as error:
            raise InvalidClaim(f"{field}.opaque.parameters", str(error), _REMEDY) from error
        if name in parts or len({*part.containers, *part.devices}) != 1:
            raise InvalidClaim(field, "does not describe exactly one container", _REMEDY)
        parts[name] = part
    return parts


def _text(text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise TypeError(f"{text!r} is not a non-empty string")
    return text
