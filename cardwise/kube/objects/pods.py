"""Pods: their requests, their containers and the states of these, and how they use MPS."""

import re
from collections.abc import Collection, Iterator
from typing import Final

import msgspec
from msgspec import Struct, field

from cardwise.core.api import mpsprofile, names
from cardwise.core.api.isolation import isolation_of
from cardwise.core.api.mpsprofile import MpsClient
from cardwise.core.api.sharing import tenant_of
from cardwise.core.values import objectnames
from cardwise.core.values.decoded import Json
from cardwise.kube.objects.meta import ObjectMeta
from cardwise.kube.wire import prepare_types

# A CronJob names its Jobs after the minute, counted since 1970: 8 digits, which dates such as 20261201 do not exceed.
_CRON_JOB_PATTERN: Final = re.compile(r"(.+)-(\d{8})")
_MIN_CRON_MINUTE: Final = 25_000_000  # in the year 2017

Amounts = dict[str, str | int | float]
"""Amounts of resources by name, as sent; `cardwise.core.values.quantity` parses them."""


class Resources(Struct, frozen=True, gc=False, omit_defaults=True):
    limits: Amounts | None = None
    requests: Amounts | None = None


class RunAs(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    """The user in the securityContext of a pod or a container."""

    run_as_user: int | None = None


class Container(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    name: str = ""
    resources: Resources | None = None
    restart_policy: str = ""
    security_context: RunAs | None = None

    @property
    def is_sidecar(self) -> bool:
        """Whether this init container is a native sidecar, which runs beside the pod's containers."""
        return self.restart_policy == "Always"


class SchedulingGroup(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    """The PodGroup of Kubernetes that a pod names."""

    pod_group_name: str = ""


class PodClaim(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    """A ResourceClaim that a pod uses: its name inside the pod, and the name of the object."""

    name: str = ""
    resource_claim_name: str = ""


class PodSpec(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    """The spec of a pod.

    node_name: the node that the pod is bound to; "" while it is pending.
    resources: the resources of the pod as a whole.
    host_users: False for a pod with a user namespace of its own.
    """

    node_name: str = ""
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    overhead: Amounts | None = None
    resources: Resources | None = None
    priority: int | None = None
    security_context: RunAs | None = None
    host_users: bool | None = None
    scheduling_group: SchedulingGroup | None = None
    resource_claims: tuple[PodClaim, ...] | None = None
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: int | None = None

    @property
    def claim_name(self) -> str | None:
        """The name of the ResourceClaim with the pod's shares; None if they are not allocated by claim."""
        claims = (claim.resource_claim_name for claim in self.resource_claims or () if claim.name == names.POD_CLAIM)
        return next(claims, None)

    def containers_by_key(self) -> Iterator[tuple[str, Container]]:
        """All containers, init containers first, with the keys of `core/api/request.py`."""
        for i, container in enumerate(self.init_containers or ()):
            yield f"init-{i}", container
        for i, container in enumerate(self.containers or ()):
            yield str(i), container


class ExistingObject(Struct, frozen=True, gc=False):
    """An object whose fields are not read; only its presence matters."""


class ContainerState(Struct, frozen=True, gc=False, omit_defaults=True):
    """The state of a container: at most one field is set. If no field is set, the container is waiting."""

    running: ExistingObject | None = None
    terminated: ExistingObject | None = None


class ContainerStatus(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    """The status of a container.

    container_id: the ID in the container runtime, such as containerd://ID; "" until the container has started.
    allocated_resources, resources: the allocated and the actual resources, as the kubelet reports them.
    """

    name: str = ""
    container_id: str = field(default="", name="containerID")
    state: ContainerState = ContainerState()
    allocated_resources: Amounts | None = None
    resources: Resources | None = None


class PodCondition(Struct, frozen=True, gc=False, omit_defaults=True):
    type: str = ""
    reason: str = ""


class PodStatus(Struct, rename="camel", frozen=True, gc=False, omit_defaults=True):
    """The status of a pod. `allocated_resources`, `resources`: the amounts of the whole pod; containers have fields of
    the same names.
    """

    phase: str = ""
    nominated_node_name: str = ""
    start_time: str | None = None
    conditions: tuple[PodCondition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None
    allocated_resources: Amounts | None = None
    resources: Resources | None = None

    def all_containers(self) -> tuple[ContainerStatus, ...]:
        """The statuses of all containers, init containers first."""
        return (*(self.init_container_statuses or ()), *(self.container_statuses or ()))


class Pod(Struct, frozen=True, gc=False, omit_defaults=True):
    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def full_name(self) -> str:
        """The pod as "namespace/name"."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def workload(self) -> str:
        """Kind and name of what created the pod, such as Deployment/web or CronJob/report; Pod/NAME for a bare pod.

        A pod names its ReplicaSet or Job only; the Deployment or CronJob is derived from the name. Users may write any
        text as an owner: one that cannot be an object of Kubernetes does not count.
        """
        controller = self.metadata.controller
        if (
            controller is None
            or not objectnames.is_kind(controller.kind)
            or not objectnames.is_subdomain(controller.name)
        ):
            return f"Pod/{self.metadata.name}"
        if controller.kind == "ReplicaSet":
            suffix = f"-{self.metadata.labels.get('pod-template-hash', '')}"
            if len(suffix) > 1 and controller.name.endswith(suffix):
                return f"Deployment/{controller.name.removesuffix(suffix)}"
        if controller.kind == "Job":
            match = _CRON_JOB_PATTERN.fullmatch(controller.name)
            if match is not None and int(match[2]) >= _MIN_CRON_MINUTE:
                return f"CronJob/{match[1]}"
        return f"{controller.kind}/{controller.name}"

    @property
    def finished(self) -> bool:
        """Whether the pod's phase is final."""
        return self.status.phase in names.FINISHED_PHASES

    @property
    def terminating(self) -> bool:
        """Whether the pod is being deleted."""
        return self.metadata.deletion_timestamp is not None

    @property
    def static(self) -> bool:
        """Whether this is the mirror pod of a static pod. Such a pod is never scheduled, and its annotations are
        ignored.
        """
        return names.MIRROR in self.metadata.annotations

    def to_json(self) -> Json:
        """The pod as decoded JSON, with the fields of this record only."""
        manifest: Json = msgspec.to_builtins(self)
        return manifest


decode: Final = msgspec.json.Decoder(Pod).decode
prepare_types(Pod, PodSpec)


def record_of(manifest: Json) -> Pod:
    """The record of a pod that is decoded already. Raises msgspec.ValidationError."""
    return msgspec.convert(manifest, Pod)


def spec_of(spec: Json) -> PodSpec:
    """The record of a pod's spec that is decoded already. Raises msgspec.ValidationError."""
    return msgspec.convert(spec, PodSpec)


def mps_client_of_pod(meta: ObjectMeta, spec: PodSpec, keys: Collection[str]) -> MpsClient:
    """The MPS client of a pod.

    keys: the keys of its containers with cards. If there are none (gpushare's pods), all containers count.
    """
    isolation, tenant = isolation_of(meta.annotations), tenant_of(meta.annotations, meta.namespace)
    if spec.host_users is False:
        return mpsprofile.mps_client(isolation, mpsprofile.OWN_USERS, tenant)
    all_containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    if spec.security_context is None and all(container.security_context is None for container in all_containers):
        # Most pods. This saves the look-up by key, which takes a sixth of the time to decode a pod.
        return mpsprofile.mps_client(isolation, mpsprofile.IMAGE_USER, tenant)
    by_key = dict(spec.containers_by_key())
    holders = [by_key[key] for key in keys if key in by_key] or [*by_key.values()]
    return mpsprofile.mps_client(isolation, mpsprofile.user(_run_as_user(spec), map(_run_as_user, holders)), tenant)


def _run_as_user(running: PodSpec | Container) -> int | None:
    return running.security_context.run_as_user if running.security_context is not None else None
