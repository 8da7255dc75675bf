"""Sets the label on the leader's pod. By this label a Service selects the leader and not the standbys.

Only the Lease decides which extender binds. So if the label is late, kube-scheduler only needs one more attempt.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.loops import Loop

_log = structlog.get_logger(__name__)

_FAILED_TEXT = "failed to write the leader label"
_CHECK_SECONDS = 0.2
# Seconds between two checks of all labels. Short, since kube-scheduler reaches no extender while the label is wrong.
_COMPARE_SECONDS = 5.0
_PAUSE_SECONDS = 2.0  # maximum seconds until a failed write is repeated


@contextlib.contextmanager
def _collect_failures(failures: list[errors.KubeError]) -> Iterator[None]:
    """Context manager: appends a KubeError to `failures` instead of raising it."""
    try:
        yield
    except errors.KubeError as error:
        failures.append(error)


class LeaderMark:
    """In its own thread, sets the label when a leader epoch of this extender begins, and removes it when the epoch is
    over.

    A former leader that is paused (a frozen container or node) cannot remove its label. Then the Service would send
    half of kube-scheduler's connections to this pod, where each call would time out. So the leader removes the label
    from all other pods. The label of a killed process stays until its container is started again. During that time the
    pod is not ready, so the Service sends no calls to it.

    A former leader that continues after a pause may write its label late. So the leader lists and repairs the labels
    when its epoch begins, and then every `_COMPARE_SECONDS`. The leader removes a label only if the pod still has the
    resourceVersion of the list. Before each write, the leader checks that its epoch is not over. So it never removes a
    label that a later leader wrote after the list.
    """

    def __init__(
        self, client: KubeClient, namespace: str, pod: str, epoch: Callable[[], int | None], clock: Clock = SYSTEM
    ) -> None:
        """pod: the name of this process's own pod, in `namespace`.
        epoch: returns the current leader epoch; None while this extender does not lead.
        """
        self._client = client
        self._namespace = namespace
        self._pod = pod
        self._epoch = epoch
        self._clock = clock
        self._written_epoch: int | Literal["unknown"] | None = (
            "unknown"  # the epoch for which this extender last wrote its label
        )
        self._compare_at = 0.0  # when the labels are compared next, while this extender leads
        self._loop = Loop(
            "marking",
            self.step,
            failed=_FAILED_TEXT,
            expected=(errors.KubeError,),
            every=_CHECK_SECONDS,
            cap=_PAUSE_SECONDS,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread and remove the label. Call it after the Lease was released."""
        self._loop.stop()
        try:
            self._set_own_label(None)
        except errors.KubeError as error:
            _log.warning(_FAILED_TEXT, error=str(error))

    def step(self) -> None:
        """Write the labels if they may be wrong.

        Tries all labels, and then raises the first KubeError. So if one label cannot be written, for example because a
        policy protects the pod, the other labels are still written.
        """
        epoch = self._epoch()
        failures: list[errors.KubeError] = []
        # Write the label in each new epoch, even if it was there in the last one: another leader may have removed it.
        if epoch != self._written_epoch:
            with _collect_failures(failures):
                self._set_own_label(epoch)
            self._compare_at = self._clock.now()
        if epoch is not None and self._clock.now() >= self._compare_at:
            self._repair_labels(epoch, failures)
            if not failures:
                self._compare_at = self._clock.now() + _COMPARE_SECONDS
        if failures:
            raise failures[0]

    def _set_own_label(self, epoch: int | None) -> None:
        """Set the label of our own pod, or remove it if `epoch` is None."""
        self._write_label(self._pod, None if epoch is None else "true")
        self._written_epoch = epoch

    def _repair_labels(self, epoch: int, failures: list[errors.KubeError]) -> None:
        """Label our own pod and no other, unless `epoch` is over. Errors of single pods are appended to `failures`."""
        leaders = self._client.list_objects(paths.pods(self._namespace), {"labelSelector": f"{names.LEADER}=true"})
        versions = {pod["metadata"]["name"]: pod["metadata"]["resourceVersion"] for pod in leaders}
        if self._pod not in versions and self._written_epoch == epoch and self._epoch() == epoch:
            with _collect_failures(failures):
                self._write_label(self._pod, "true")
        for pod, version in versions.items():
            if pod != self._pod and self._epoch() == epoch:
                with _collect_failures(failures):
                    self._write_label(pod, None, version)

    def _write_label(self, pod: str, text: str | None, version: str | None = None) -> None:
        """Set the label, or remove it if `text` is None.

        version: the resourceVersion that the pod must have; otherwise nothing is written. None: any version.
        """
        metadata: Json = {"labels": {names.LEADER: text}}
        if version is not None:
            metadata["resourceVersion"] = version
        with contextlib.suppress(errors.NotFound):  # a former leader's pod may have been deleted since
            self._client.patch(paths.pods(self._namespace, pod), {"metadata": metadata}, "merge")
