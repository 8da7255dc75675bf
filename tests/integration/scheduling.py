"""Which worker of pytest-xdist runs which file: files of one kind of cluster one after the other on the same worker, so
that a cluster is started once for all of them.

The longest come first, so that the workers end together: files with a cluster of their own, then the kinds in order.
Files without a cluster fill what time is left.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

NONE = "none"
_NOT = 5
# So many files of a kind for each worker are worth another cluster, which takes as long to start as two files of `sim`:
# beside files without one, and when nothing else is left.
_WORTH, _WORTH_AT_LAST = 6, 3


def group(kind: str, file: str) -> str:
    """The name of the group of tests that `ByCluster` gives to one worker."""
    return f"{kind}:{file}"


def choose(queue: Sequence[str], mine: str, others: Iterable[str]) -> str:
    """Which of these groups a worker takes that has a cluster of the kind `mine`, beside others with theirs; "" where
    they had better do the rest.
    """
    remaining, busy = Counter(map(_kind, queue)), Counter(others)

    def rank(scope: str) -> int:
        kind = _kind(scope)
        if kind == mine:
            return 0
        if kind == NONE:
            return 3
        if not busy[kind]:
            return 1
        per_worker = remaining[kind] / (busy[kind] + 1)
        return 2 if per_worker >= _WORTH else 4 if per_worker >= _WORTH_AT_LAST else _NOT

    first = min(queue, key=rank)
    return "" if rank(first) == _NOT else first


def _kind(scope: str) -> str:
    return scope.partition(":")[0]


class ByCluster(LoadGroupScheduling):
    """Hands out files; they are in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _assign_work_unit(self, node: WorkerController) -> None:
        last = {worker: _kind(list(units)[-1]) for worker, units in self.assigned_work.items() if units}
        mine = last.pop(node, "")
        if chosen := choose(list(self.workqueue), mine, last.values()):
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)
        else:
            node.shutdown()
