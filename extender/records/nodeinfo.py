"""What a Node has for pods, and what a pod takes of it."""

from collections.abc import Mapping
from typing import NamedTuple

from cardwise.core.api.request import Load
from extender.records.aheadnodes import Ground


class Occupant(NamedTuple):
    """Who takes it, as far as preemption asks. `going`: it is being deleted; `fixed`: nobody can evict it; `grouped`:
    it names a PodGroup of Kubernetes.
    """

    uid: str
    namespace: str
    name: str
    priority: int = 0
    labels: Mapping[str, str] = {}
    going: bool = False
    fixed: bool = False
    grouped: bool = False


class Placed(NamedTuple):
    """A pod that counts: its node, and what it takes of it. `occupant`: None for one that is only planned there."""

    node: str
    load: Load
    occupant: Occupant | None = None


class NodeRecord(NamedTuple):
    """A Node: what it has for pods, and what it is to them: whether further ones may be put on it, and which. `offers`:
    not where it says that it has no slots for shares, as its device plugin does before it ends.
    """

    allocatable: Load | None = None
    open: bool = True
    offers: bool = True
    ground: Ground = Ground()
