"""The ResourceClasses of the cluster, which determine the classes of this node's cards.

The device plugin also works in a cluster without this CRD, which has cards but no classes.
"""

from collections.abc import Callable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import resourceclasses
from cardwise.kube.objects.unreadable import Unreadable
from cardwise.kube.watch.reflector import Reflector

_log = structlog.get_logger(__name__)


def _project(content: bytes) -> tuple[str, ResourceClass | Unreadable]:
    record = resourceclasses.decode(content)
    return record.name, record.parsed


class Classes:
    """The ResourceClasses, kept up to date by a reflector.

    on_change: called from the reflector's thread on every change.
    """

    def __init__(self, client: KubeClient, on_change: Callable[[], None], clock: Clock = SYSTEM) -> None:
        self._on_change = on_change
        self._warned_missing = False
        self._reflector: Reflector[ResourceClass | Unreadable] = Reflector(
            client, paths.resourceclasses(), _project, self, name="resourceclasses", clock=clock
        )

    def start(self) -> None:
        self._reflector.start()

    def stop(self) -> None:
        self._reflector.stop()

    def classifier(self) -> Classifier | None:
        """A classifier with the current classes; None until the classes are known."""
        if not self._reflector.synced.is_set():
            if self._reflector.errors and not self._warned_missing:
                self._warned_missing = True
                _log.warning(
                    "cannot list ResourceClasses, so the node gets no capacities of classes; check that the CRD is "
                    "installed and that the device plugin may list them"
                )
            return None
        return Classifier(
            entry for entry in self._reflector.store.snapshot().values() if isinstance(entry, ResourceClass)
        )

    def on_change(self, key: str, old: ResourceClass | Unreadable | None, new: ResourceClass | Unreadable) -> None:  # noqa: ARG002
        # Called for changes only, so each problem is logged once.
        if isinstance(new, Unreadable):
            _log.warning("ignored an invalid ResourceClass", name=key, problem=new.problem)
        self._on_change()

    def on_delete(self, key: str, old: ResourceClass | Unreadable) -> None:  # noqa: ARG002
        self._on_change()

    def on_synced(self) -> None:
        self._on_change()
