"""MPS profiles: how MPS runs on a card, and how a pod uses MPS. Placement compares the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from cardwise.core.api.mps import Mode

# Beside the numbers of users: whom a pod runs as, or for whom a card is.
IMAGE: Final = -1  # the image's, which nobody knows before it is there; taken to be the same in all images
MIXED: Final = -2  # more than one
OWN_USERS: Final = MIXED  # of a pod with `hostUsers: false`: its numbers mean other users than everybody else's
NO_USER: Final = -3  # of a pod without MPS, which no daemon serves


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


# Of a pod that only its node still reports: no pod may share MPS with it.
UNKNOWN: Final = MpsClient(off=True, wants=True, user=MIXED)
UNKNOWN_SETTINGS: Final = MpsClient(
    off=False, wants=False, user=NO_USER
)  # who takes memory, and agrees with every other by MPS


@lru_cache(maxsize=65_536)
def mps_client(mode: Mode, user: int) -> MpsClient:
    """One object for all equal pods: there are tens of thousands."""
    return MpsClient(off=not mode.uses_mps, wants=mode.uses_mps, user=user if mode.uses_mps else NO_USER)


COMMON: Final = mps_client(Mode.PREFERRED, IMAGE)  # of a pod that says nothing


def user(pods: int | None, containers: Iterable[int | None]) -> int:
    """The user that these containers run as, by their own `runAsUser` and the pod's."""
    users = {pods if container_user is None else container_user for container_user in containers}
    if len(users) > 1:
        return MIXED
    only = next(iter(users), pods)
    return IMAGE if only is None else only
