"""The label on the leader's pod, by which a Service finds it among the standbys.

Only the Lease decides which extender binds: a label that comes late costs kube-scheduler one more try.
"""

import contextlib
from collections.abc import Callable
from typing import Literal

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
    """Its thread sets the label when a term of this extender has begun, and removes it when the term is over.

    A former leader that stands still (a frozen container or node) cannot remove its label, and the Service would send
    it half of kube-scheduler's connections, each of which waits for its time-out. So the new leader removes the label
    from all other pods. The label of a process that was killed stays until its container is started again; until then
    the pod is not ready.
    """

    def __init__(
        self, client: KubeClient, namespace: str, pod: str, term: Callable[[], int | None], clock: Clock = SYSTEM
    ) -> None:
        """`term`: the present term, None while another extender leads."""
        self._client = client
        self._namespace = namespace
        self._pod = pod
        self._term = term
        self._written: int | Literal["unknown"] | None = "unknown"  # the term for which the label was last written
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
            self._write(None)
        except errors.KubeError as error:
            _log.warning(_FAILED, error=str(error))

    def step(self) -> None:
        """Writes the labels if they may be wrong. Raises KubeError."""
        self._write(self._term())

    def _write(self, term: int | None) -> None:
        if term == self._written:
            return
        # At each term, also when no time without one was seen: another leader may have removed the label meanwhile.
        self._label(self._pod, None if term is None else "true")
        if term is not None:
            leaders = self._client.objects(paths.pods(self._namespace), {"labelSelector": f"{names.LEADER}=true"})
            for name in [pod["metadata"]["name"] for pod in leaders]:
                if name != self._pod:
                    self._label(name, None)
        self._written = term

    def _label(self, pod: str, value: str | None) -> None:
        with contextlib.suppress(errors.NotFound):  # a former leader's pod may be deleted meanwhile
            self._client.patch(
                paths.pods(self._namespace, pod), {"metadata": {"labels": {names.LEADER: value}}}, "merge"
            )
