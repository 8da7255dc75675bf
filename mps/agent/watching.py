"""Checks one card's MPS from within a pod: by the files that are mounted there, and by its socket."""

from dataclasses import dataclass
from pathlib import Path

from cardwise.clock import Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus import mpsnode


@dataclass(frozen=True, slots=True)
class CardLook:
    """`problem`: why no container may start on the card yet, "" if one may. `state` is None where none can be read."""

    problem: str
    state: MpsState | None


def look(root: Path, uuid: str, need: MiB, clock: Clock) -> CardLook:
    """As `mpsnode.problem`, but for the manager's lock, which no pod may open: who can open it can lock it."""
    home, status = mpsnode.find(root, uuid)
    if home is None or status is None:
        return CardLook(f"the MPS manager of the node does not serve card {uuid} (yet)", None)
    why = mps.unusable(status, uuid, now=clock.now(), need=need)
    if not why and not mpsnode.answers(home / mps.CLIENTS):
        why = f"the MPS daemon of card {uuid} takes no connection"
    return CardLook(why, status.state)
