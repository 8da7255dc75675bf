"""The label on the leader's pod, by which a Service finds it among the standbys.

Only the Lease decides which extender binds: a label that comes late costs kube-scheduler one more try.
"""

from collections.abc import Callable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.loops import Loop

_log = structlog.get_logger(__name__)

_FAILED = "the label of the leader could not be written"
_LOOK_SECONDS = 0.2
_PAUSE_SECONDS = 2.0  # at most, after a write that failed


class LeaderMark:
    """Its thread sets the label when `leads` has become true, and takes it away when it has become false.

    The label of a process that was killed stays until its container is started anew; until then the pod is not ready.
    """

    def __init__(
        self, client: KubeClient, namespace: str, pod: str, leads: Callable[[], bool], clock: Clock = SYSTEM
    ) -> None:
        self._client = client
        self._path = paths.pods(namespace, pod)
        self._leads = leads
        self._marked: bool | None = None  # as it was last written; None: nobody knows
        self._loop = Loop(
            "marking",
            self.step,
            failed=_FAILED,
            expected=(errors.KubeError,),
            every=_LOOK_SECONDS,
            cap=_PAUSE_SECONDS,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """To be called once the Lease was given back."""
        self._loop.stop()
        try:
            self._write(marked=False)
        except errors.KubeError as error:
            _log.warning(_FAILED, error=str(error))

    def step(self) -> None:
        """Writes the label if it is wrong. Raises KubeError."""
        self._write(marked=self._leads())

    def _write(self, *, marked: bool) -> None:
        if marked != self._marked:
            change = {"metadata": {"labels": {names.LEADER: "true" if marked else None}}}
            self._client.patch(self._path, change, "merge")
            self._marked = marked
