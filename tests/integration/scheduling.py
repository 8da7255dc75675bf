"""Which worker of pytest-xdist runs which file: files of one kind of cluster one after the other on the same worker, so
that a cluster is started once for all of them; and files of another kind where there are no more.

The longest come first, so that the workers end together: files with a cluster of their own, then the kinds in order.
"""

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


def group(kind: str, file: str) -> str:
    """The name of the group of tests that `ByCluster` gives to one worker."""
    return f"{kind}:{file}"


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

        def rank(scope: str) -> tuple[bool, bool]:
            """First those for which the worker has its cluster, then those of which nobody has one."""
            return _kind(scope) != mine, _kind(scope) in last.values()

        self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
        super()._assign_work_unit(node)
