"""MPS profiles: how MPS runs on a card, and how a pod uses MPS. Placement compares the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from cardwise.core.api.mps import Mode

# Special values of a pod's user, or of the user whose pods a card serves. Other values are UIDs.
IMAGE: Final = -1  # the image's user: unknown before the image is pulled, treated as the same user in all images
MIXED: Final = -2  # more than one
OWN_USERS: Final = MIXED  # a pod with `hostUsers: false`, whose UIDs mean other users on the node
NO_USER: Final = -3  # a pod without MPS, which uses no daemon


@dataclass(frozen=True, slots=True)
class CardMps:
    """The MPS of a card, as far as placement needs it. Equal for most cards of a cluster.

    ready: it is ready or off, and may be switched to the other.
    serves_several: one daemon serves all cards of the node.
    max_clients: 0 if unknown.
    """

    ready: bool
    serves_several: bool = False
    multi_user: bool = True
    max_clients: int = 0


class MpsClient(NamedTuple):
    """A pod as a client of MPS, as far as pods with the same daemon need it. `user`: as above."""

    off: bool
    wants: bool
    user: int


# A deleted pod that only its node still reports: no pod may share MPS with it.
UNKNOWN: Final = MpsClient(off=True, wants=True, user=MIXED)
UNKNOWN_SETTINGS: Final = MpsClient(
    off=False, wants=False, user=NO_USER
)  # a holder with unknown MPS settings: it takes memory and is compatible with all pods


@lru_cache(maxsize=65_536)
def mps_client(mode: Mode, user: int) -> MpsClient:
    """One object for all equal pods: there are tens of thousands."""
    return MpsClient(off=not mode.uses_mps, wants=mode.uses_mps, user=user if mode.uses_mps else NO_USER)


COMMON: Final = mps_client(Mode.PREFERRED, IMAGE)  # a pod without MPS settings


def user(pods: int | None, containers: Iterable[int | None]) -> int:
    """The user that these containers run as, by their own `runAsUser` and the pod's."""
    users = {pods if container_user is None else container_user for container_user in containers}
    if len(users) > 1:
        return MIXED
    only = next(iter(users), pods)
    return IMAGE if only is None else only
