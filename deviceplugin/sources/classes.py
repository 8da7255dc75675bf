"""The ResourceClasses of the cluster, for the question which of them a card of this node is in.

The inventory works without them: a cluster without this CRD has cards, and no classes.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import classes
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.reflector import Reflector

_log = structlog.get_logger(__name__)

_decode = msgspec.json.Decoder(dict[str, Any]).decode

ClassOrProblem = ResourceClass | str
"""A class, or why it cannot be read."""


def _project(content: bytes) -> tuple[str, ClassOrProblem]:
    obj = _decode(content)
    name = obj["metadata"]["name"]
    try:
        return name, classes.parse(obj)
    except InvalidRequest as error:
        return name, str(error)


class Classes:
    """Kept by a reflector, whose handler it is; `on_change` is called from the reflector's thread."""

    def __init__(self, client: KubeClient, on_change: Callable[[], None], clock: Clock = SYSTEM) -> None:
        self._wake = on_change
        self._told_missing = False
        self._reflector: Reflector[ClassOrProblem] = Reflector(
            client, paths.resourceclasses(), _project, self, name="resourceclasses", clock=clock
        )

    def start(self) -> None:
        self._reflector.start()

    def stop(self) -> None:
        self._reflector.stop()

    def classifier(self) -> Classifier | None:
        """A classifier for the present classes; None until they are known."""
        if not self._reflector.synced.is_set():
            if self._reflector.errors and not self._told_missing:
                self._told_missing = True
                _log.warning(
                    "the node gets no capacities of classes: ResourceClasses cannot be read; is their CRD installed, "
                    "and may the device plugin list them?"
                )
            return None
        return Classifier(one for one in self._reflector.store.snapshot().values() if isinstance(one, ResourceClass))

    def on_change(self, key: str, old: ClassOrProblem | None, new: ClassOrProblem) -> None:  # noqa: ARG002
        # Called for changes only, so each problem is told once.
        if isinstance(new, str):
            _log.warning("a ResourceClass cannot be read and is left out", name=key, problem=new)
        self._wake()

    def on_delete(self, key: str, old: ClassOrProblem) -> None:  # noqa: ARG002
        self._wake()

    def on_synced(self) -> None:
        self._wake()
