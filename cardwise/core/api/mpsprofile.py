"""MPS profiles: how MPS runs on a card, and how a pod uses MPS. Placement compares the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from cardwise.core.api.isolation import Isolation
from cardwise.core.api.sharing import ANY_TENANT, Tenant

# Special values of a pod's user, and of the user whose pods a card serves. Other values are UIDs.
IMAGE_USER: Final = -1  # the image's user: unknown before the image is pulled, treated as the same user in all images
MIXED_USERS: Final = -2  # more than one user
OWN_USERS: Final = MIXED_USERS  # a pod with `hostUsers: false`: the same UID is another user on the node
NO_USER: Final = -3  # a pod without MPS, which uses no daemon


@dataclass(frozen=True, slots=True)
class CardMps:
    """The MPS of a card, as far as placement needs it. Most cards of a cluster have equal values.

    ready: whether the card takes new pods, because MPS is ready or off. The manager switches between the two as pods
        need it.
    serves_several: one daemon serves all cards of the node.
    multi_user: the daemon serves pods of several users.
    max_clients: maximum number of processes that MPS serves at once; 0 if unknown.
    """

    ready: bool
    serves_several: bool = False
    multi_user: bool = True
    max_clients: int = 0


class MpsClient(NamedTuple):
    """The settings of a pod that decide with which pods it can share a card and a daemon.

    off: the pod must not use MPS.
    wants: the pod uses MPS.
    user: a UID, or a special value of this module.
    tenant: the pod as a tenant of its cards.
    """

    off: bool
    wants: bool
    user: int
    tenant: Tenant = ANY_TENANT


@lru_cache(maxsize=4096)
def reported_only_client(namespace: str) -> MpsClient:
    """A deleted pod of the namespace that only its node still reports: no pod may share MPS with it. It may have been
    exclusive, so no pod of another namespace may share its cards.
    """
    return MpsClient(off=True, wants=True, user=MIXED_USERS, tenant=Tenant(namespace, exclusive=True))


# A holder of a card whose MPS settings are unknown: its memory counts, and all pods may share MPS with it.
CLIENT_WITH_UNKNOWN_SETTINGS: Final = MpsClient(off=False, wants=False, user=NO_USER)


@lru_cache(maxsize=65_536)
def mps_client(isolation: Isolation, user: int, tenant: Tenant = ANY_TENANT) -> MpsClient:
    """The settings of a pod. Equal settings are one shared object, to save memory for tens of thousands of pods."""
    return MpsClient(
        off=not isolation.uses_mps,
        wants=isolation.uses_mps,
        user=user if isolation.uses_mps else NO_USER,
        tenant=tenant,
    )


COMMON_CLIENT: Final = mps_client(Isolation.ADVISORY, IMAGE_USER)  # a pod without MPS settings


def user(pods: int | None, containers: Iterable[int | None]) -> int:
    """The user as which these containers run: a UID, IMAGE or MIXED.

    pods: the pod's `runAsUser`, which applies to containers without their own.
    containers: the `runAsUser` of each container.
    """
    users = {pods if container_user is None else container_user for container_user in containers}
    if len(users) > 1:
        return MIXED_USERS
    only = next(iter(users), pods)
    return IMAGE_USER if only is None else only
