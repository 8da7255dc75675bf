"""The label on the leader's pod, by which a Service finds it among the standbys.

Only the Lease decides which extender binds: a label that comes late costs kube-scheduler one more try.
"""

import threading
from collections.abc import Callable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.2
_PAUSE_SECONDS = 2.0  # after a write that failed


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
        self._clock = clock
        self._marked: bool | None = None  # as it was last written; None: nobody knows
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="marking", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """To be called once the Lease was given back."""
        self._stopping.set()
        if self._thread.is_alive():
            self._clock.join(self._thread, 5.0)
        if self._marked is not False:
            self._write(marked=False)

    def step(self) -> bool:
        """Writes the label if it is wrong. Returns whether it is right now."""
        leads = self._leads()
        return leads == self._marked or self._write(marked=leads)

    def _write(self, *, marked: bool) -> bool:
        change = {"metadata": {"labels": {names.LEADER: "true" if marked else None}}}
        try:
            self._client.patch(self._path, change, "merge")
        except errors.KubeError as error:
            _log.warning("the label of the leader could not be written", marked=marked, error=str(error))
            return False
        self._marked = marked
        return True

    def _run(self) -> None:
        right = True
        while not self._clock.wait(self._stopping, _LOOK_SECONDS if right else _PAUSE_SECONDS):
            try:
                right = self.step()
            except Exception:  # noqa: BLE001 - the outermost loop: without it no label would ever change again
                right = False
                _log.exception("the label of the leader could not be written")
