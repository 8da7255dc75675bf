"""Decodes the MPS fields of cards and pods for placement (`cardwise.core.api.mpsprofile`).

The survey and the extender use the same functions.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from cardwise.core.api import mps, mpsprofile
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.api.mpsprofile import CardMps, MpsClient
from cardwise.kube.wire import MpsStatus, RunAs

_TAKING = (MpsState.READY, MpsState.OFF)


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


def mps_of_card(status: MpsStatus | None) -> CardMps | None:
    """The MPS of a card; None if its node has no MPS manager. A card in an unknown MPS state takes no pods."""
    if status is None:
        return None
    return _interned_mps(
        status.state in _TAKING, status.mode == DaemonScope.NODE, status.multi_user, max(0, status.max_clients)
    )


@lru_cache(maxsize=1024)
def _interned_mps(ready: bool, serves_several: bool, multi_user: bool, max_clients: int) -> CardMps:
    """The MPS of a card, as one shared object for equal cards."""
    return CardMps(ready, serves_several, multi_user, max_clients)


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
