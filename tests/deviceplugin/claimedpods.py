"""Pods whose shares are allocated by ResourceClaim, as webhook, extender and kube-scheduler leave them."""

import uuid
from collections.abc import Mapping, Sequence

from cardwise.core.api import assignment as codec
from cardwise.core.api import claims, names, shareagent
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.values.quantity import MiB, Percent
from deviceplugin.grants.claims import ClaimName, ContainerDevices, make_slot
from tests.deviceplugin.conftest import NODE, P100, PODS, Rig, card_uuid

CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"


class ClaimedPod:
    """A pod bound to the rig's node, and its allocated claim.

    shares: (card index, MiB) of each container, by its name; a container may have none.
    devices: (class, UUID) of the other devices of containers, by their names.
    whole: whether each share is a whole card.
    """

    def __init__(
        self,
        rig: Rig,
        name: str = "a",
        shares: Mapping[str, Sequence[tuple[int, int]]] | None = None,
        *,
        agent: bool = False,
        isolation: str = "",
        devices: Mapping[str, Sequence[tuple[str, str]]] | None = None,
        whole: bool = False,
    ) -> None:
        self.rig = rig
        shares, devices = shares or {"main": [(0, 8138)]}, devices or {}
        assignment = Assignment(
            {
                str(position): tuple(
                    CardShare(index, card_uuid(index), MiB(mib), Percent(0), MiB(P100), whole) for index, mib in held
                )
                for position, held in enumerate(shares.values())
                if held
            },
            {
                str(position): tuple(AssignedDevice(*device) for device in devices[container])
                for position, container in enumerate(shares)
                if container in devices
            },
        )
        annotations = codec.encode(assignment, assume_time_ns=1)
        if isolation:
            annotations[names.ISOLATION] = isolation
        sidecars = [_container(shareagent.CONTAINER_NAME, by_claim=True) | {"restartPolicy": "Always"}] if agent else []
        claim = claims.format_name(uuid.uuid4().bytes[:8])
        self.pod = {
            "metadata": {"name": name, "namespace": "default", "uid": str(uuid.uuid4()), "annotations": annotations},
            "spec": {
                "nodeName": NODE,
                "resourceClaims": [{"name": names.POD_CLAIM, "resourceClaimName": claim}],
                "initContainers": sidecars,
                "containers": [
                    _container(container, by_claim=bool(held) or container in devices)
                    for container, held in shares.items()
                ],
            },
            "status": {"phase": "Pending"},
        }
        claiming = claims.read_pod(self.pod)
        self.claim = claims.new_claim(claiming, assignment)
        self.claim["metadata"]["uid"] = str(uuid.uuid4())
        self.claim["status"] = claims.new_status(claiming, assignment, NODE, "2026-11-30T00:00:00Z")
        self.write()

    def write(self) -> None:
        """Make the API server have pod and claim as they are here."""
        self.pod = self.rig.api.write_object(PODS, self.pod)
        self.claim = self.rig.api.write_object(CLAIMS, self.claim)
        self.rig.see()

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def name(self) -> ClaimName:
        metadata = self.claim["metadata"]
        return ClaimName("default", metadata["name"], metadata["uid"])

    def prepare(self) -> Sequence[ContainerDevices]:
        """As the kubelet, before it creates the sandbox. Raises StartRefused."""
        self.rig.see()
        return self.rig.agent._run_timed_prepare(self.name, lambda: True)

    def run(self, *containers: str) -> None:
        """Prepare the claim, and run these containers."""
        self.prepare()
        for container in containers or ("main",):
            self.rig.runtime.run(self.pod, container)

    def slot(self, container: str = "main") -> str:
        return make_slot(self.name.uid, container)

    def env(self, container: str = "main") -> dict[str, str]:
        return self.rig.env(self.slot(container))

    def nodes(self, container: str = "main") -> list[str]:
        """The paths in the container of the device nodes that its spec has."""
        return [node["path"] for node in self.rig.edits(self.slot(container)).get("deviceNodes", ())]

    def blocked(self, container: str = "main") -> str:
        """Why the container cannot start, "" if it can."""
        (node, *_) = self.rig.edits(self.slot(container)).get("deviceNodes") or [{}]
        path = str(node.get("hostPath", ""))
        return path.removeprefix("/dev/cardwise: ") if path.startswith("/dev/cardwise: ") else ""

    def delete_claim(self) -> None:
        self.rig.api.remove(f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{self.name.name}")


def _container(name: str, *, by_claim: bool) -> dict:
    resources = {"claims": [{"name": names.POD_CLAIM, "request": name}]} if by_claim else {}
    return {"name": name, "resources": resources}
