"""Pods: the users and states of their containers, and how they use MPS."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from cardwise.core.api import mps, mpsprofile
from cardwise.core.api.mpsprofile import MpsClient


class ExistingObject(Struct):
    """An object whose fields are not read; only its presence matters."""


class ContainerState(Struct):
    """The state of a container: at most one field is set. If no field is set, the container is waiting."""

    running: ExistingObject | None = None
    terminated: ExistingObject | None = None


class RunAs(Struct, rename="camel"):
    """The user in the securityContext of a pod or a container."""

    run_as_user: int | None = None


class PodStatusHead(Struct, rename="camel"):
    phase: str = ""


class _ContainerUser(Protocol):
    @property
    def security_context(self) -> RunAs | None: ...


class RunAsSpec(_ContainerUser, Protocol):
    """The fields of a pod's spec that determine the users of its containers."""

    @property
    def containers(self) -> Sequence[_ContainerUser] | None: ...

    @property
    def init_containers(self) -> Sequence[_ContainerUser] | None: ...

    @property
    def host_users(self) -> bool | None: ...


def mps_client_of_pod(annotations: Mapping[str, str], spec: RunAsSpec, keys: Collection[str]) -> MpsClient:
    """The MPS client of a pod.

    keys: the keys of its containers with cards. If there are none (gpushare's pods), all containers count.
    """
    if spec.host_users is False:
        return mpsprofile.mps_client(mps.mode(annotations), mpsprofile.OWN_USERS)
    all_containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    if spec.security_context is None and all(container.security_context is None for container in all_containers):
        # Most pods. This saves the look-up by key, which takes a sixth of the time to decode a pod.
        return mpsprofile.mps_client(mps.mode(annotations), mpsprofile.IMAGE)
    by_key = {f"init-{i}": container for i, container in enumerate(spec.init_containers or ())}
    by_key |= {str(i): container for i, container in enumerate(spec.containers or ())}
    holders = [by_key[key] for key in keys if key in by_key] or [*by_key.values()]
    return mpsprofile.mps_client(mps.mode(annotations), mpsprofile.user(_run_as_user(spec), map(_run_as_user, holders)))


def _run_as_user(running: _ContainerUser) -> int | None:
    return running.security_context.run_as_user if running.security_context is not None else None
