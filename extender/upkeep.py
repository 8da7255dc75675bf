"""What must happen with time and not by a call: plans and ghosts end, lost answers are looked up, pods are woken.

Apart because it is the one loop of the extender's own; everything that it decides is decided in the state.
"""

import threading
import time

import structlog

from cardwise.core import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender import binder
from extender.state import State

_log = structlog.get_logger(__name__)

_STEP_SECONDS = 0.5
_TOUCH_SECONDS = 2.0  # plans and ghosts wait for it to end


class Upkeep:
    """A thread; start it in the process that serves."""

    def __init__(self, client: KubeClient, state: State) -> None:
        self._client = client
        self._state = state
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def step(self) -> None:
        """One round."""
        binder.look_up(self._client, self._state)
        node = self._state.touch_due()
        if node is not None and not touch(self._client, node):
            self._state.touch_failed(node)

    def _run(self) -> None:
        while not self._stopping.wait(_STEP_SECONDS):
            try:
                self.step()
            except Exception:  # noqa: BLE001 - see below
                # The outermost loop: without it shares of lost pods would never be freed.
                _log.exception("upkeep failed; it goes on")


def touch(client: KubeClient, node: str) -> bool:
    """Changes an annotation of the node, which makes kube-scheduler try the waiting pods again; whether it could."""
    patch = {"metadata": {"annotations": {names.NODE_CHANGED: str(time.time_ns())}}}
    try:
        client.patch(paths.nodes(node), patch, "merge", timeout=_TOUCH_SECONDS)
    except errors.KubeError as error:
        _log.warning("cannot wake waiting pods", node=node, error=str(error))
        return False
    _log.debug("woke waiting pods", node=node)
    return True
