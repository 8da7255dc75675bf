"""NodePrepareResources: checks the allocated ResourceClaim of a pod, and grants its containers their cards.

With scheduler.mode=claims the kubelet calls this once for a pod, before it creates the pod's sandbox. The claim names
everything that a slot does not: pod, container and cards. The grant is still built from the pod's annotations, as in
the other modes, because all other readers on the node use them; and it is refused unless the claim says the same.

The kubelet does not call again when a container restarts: it remembers the CDI devices of this answer. What has to hold
at each start is up to the container's CDI spec, which the runtime reads each time (`startblocks`).

Grants are kept by pod, not by claim, and are released as in the other modes (`release`): the claim may be deleted while
its pod runs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import claims, names
from cardwise.core.api.claims import Allocation
from cardwise.core.values.wording import quote_text
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from deviceplugin.grants import cdi
from deviceplugin.grants.granting import Granting, IsActive, StartRefused, build_grant
from deviceplugin.sources.kubelet import CheckpointContainer
from deviceplugin.sources.pods import NodePod

_GET_TIMEOUT = 3.0  # maximum seconds of a GET; the kubelet waits 45 s for NodePrepareResources


class ClaimName(NamedTuple):
    """A ResourceClaim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ContainerDevices(NamedTuple):
    """The devices that a container of a pod gets by its request of the claim.

    pool, devices: the pool and the devices as the claim names them.
    cdi_device: the CDI device that gives the container all of them.
    """

    request: str
    pool: str
    devices: Sequence[str]
    cdi_device: str


def make_slot(claim_uid: str, request: str) -> str:
    """The slot of a container with a claim: what its CDI device and its grant are named by."""
    return f"{claim_uid}-{request}"


def check_pod(claim: ClaimName, allocation: Allocation, pod: NodePod, node: str) -> None:
    """Check that claim, pod and node belong together, and that pod and claim name the same cards. Pure.

    Raises StartRefused.
    """
    if allocation.node != node:
        raise StartRefused(f"claim {claim} is allocated on node {allocation.node}, not on {node}")
    if pod.node != node:
        raise StartRefused(f"pod {pod.pod} of claim {claim} is not bound to node {node}")
    if pod.claim != claim.name:
        raise StartRefused(
            f"pod {pod.pod} uses claim {quote_text(pod.claim or 'none')}, and {claim} is allocated to it; create the "
            "pod again"
        )
    for request, key in allocation.keys.items():
        if request not in pod.keys or (key is not None and pod.keys[request] != key):
            raise StartRefused(
                f"claim {claim} has a request for container {quote_text(request)} (key {key}), which pod {pod.pod} "
                "does not have; create the pod again"
            )
    try:
        assignment = codec.decode(pod.annotations)
    except codec.InvalidAssignment as error:
        raise StartRefused(f"pod {pod.pod}: {error}; create the pod again") from error
    if assignment != allocation.assignment:
        raise StartRefused(
            f"the annotation {names.ASSIGNMENT} of pod {pod.pod} and its claim {claim} name different GPUs; the "
            "kubelet tries again, and if this lasts, create the pod again"
        )


class ClaimPreparation:
    """Handles NodePrepareResources.

    client: reads claims.
    read_pod: returns the pod with a namespace, name and UID, None if it does not exist. Raises KubeError.
    """

    def __init__(
        self,
        client: KubeClient,
        node: str,
        read_pod: Callable[[str, str, str], NodePod | None],
        granting: Granting,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._node = node
        self._read_pod = read_pod
        self._granting = granting
        self._clock = clock

    def __call__(self, claim: ClaimName, is_active: IsActive) -> list[ContainerDevices]:
        """Add the grants of all containers of the claim, and write their CDI specs. Raises StartRefused.

        May be called again at any time, and then changes nothing.
        """
        started = self._clock.now()
        allocation, devices = self._read_allocation(claim)
        structlog.contextvars.bind_contextvars(pod=f"{claim.namespace}/{allocation.pod_name}", uid=allocation.pod_uid)
        try:
            pod = self._read_pod(claim.namespace, allocation.pod_name, allocation.pod_uid)
        except errors.KubeError as error:
            raise StartRefused(f"pod {allocation.pod_name} of claim {claim} cannot be read: {error}") from error
        if pod is None:
            raise StartRefused(
                f"pod {claim.namespace}/{allocation.pod_name} (uid {allocation.pod_uid}), to which claim {claim} is "
                "allocated, does not exist any more"
            )
        check_pod(claim, allocation, pod, self._node)
        for request in allocation.keys:
            grant = build_grant(pod, request, (make_slot(claim.uid, request),))
            self._granting.add(grant, pod, is_active, started)
        return [
            ContainerDevices(request, self._node, devices[request], cdi.device_name(make_slot(claim.uid, request)))
            for request in allocation.keys
        ]

    def list_slots(self, pods: Iterable[NodePod], uids: Collection[str]) -> dict[str, list[CheckpointContainer]]:
        """The containers of the pods with these UIDs that have a claim, by slot. Raises KubeError.

        The kubelet's device checkpoint has the other containers in this form.
        """
        containers_by_slot = {}
        for pod in pods:
            if not pod.claim or pod.uid not in uids:
                continue
            try:
                claim = self._client.get(paths.resourceclaims(pod.namespace, pod.claim), timeout=_GET_TIMEOUT)
            except (errors.NotFound, errors.InvalidName, errors.Forbidden):
                # The pod's sandbox still says what it holds. Forbidden: the chart has another scheduler.mode by now.
                continue
            for container in pod.keys:
                slot = make_slot(claim["metadata"]["uid"], container)
                containers_by_slot[slot] = [CheckpointContainer(pod.uid, container)]
        return containers_by_slot

    def _read_allocation(self, claim: ClaimName) -> tuple[Allocation, Mapping[str, Sequence[str]]]:
        """What the claim says, and the devices of each of its requests. Raises StartRefused."""
        try:
            manifest = self._client.get(paths.resourceclaims(claim.namespace, claim.name), timeout=_GET_TIMEOUT)
        except (errors.NotFound, errors.InvalidName) as error:
            raise StartRefused(f"claim {claim} does not exist any more") from error
        except errors.KubeError as error:
            raise StartRefused(f"claim {claim} cannot be read: {error}") from error
        if manifest["metadata"]["uid"] != claim.uid:
            raise StartRefused(f"claim {claim} has been replaced by another one of this name")
        try:
            allocation = claims.decode(manifest)
        except claims.InvalidClaim as error:
            raise StartRefused(f"claim {claim}: {error}") from error
        if allocation is None:
            raise StartRefused(f"claim {claim} is not allocated any more")
        devices: dict[str, list[str]] = {}
        for device in manifest["status"]["allocation"]["devices"]["results"]:
            devices.setdefault(device["request"], []).append(device["device"])
        return allocation, devices
