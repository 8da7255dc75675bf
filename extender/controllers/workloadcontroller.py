"""Keeps the engine of the scored policies ready.

It creates the engine, trains it on the workload, computes scores in advance, and saves the workload in a ConfigMap for
the next process (docs/design/0008-policies.md). It has its own thread, because learning takes a tenth of a second and
must not delay other work.
"""

from collections.abc import Callable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names, policies
from cardwise.core.api.cardlimits import CardLimits
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.cache.pacing import pause
from extender.state import State

_log = structlog.get_logger(__name__)

_NODES_PER_LOCK = 64  # nodes that are scored in one critical section: takes half a millisecond
_MAX_LOCKS_PER_STEP = 100  # maximum number of critical sections in one step
_TIMEOUT = 5.0
_SAVE_SECONDS = 60.0  # seconds between two saves of the workload
_SETTINGS_CHECK_SECONDS = 300.0  # seconds between two checks of whether the ConfigMap still has the settings
_NO_LIMITS = CardLimits()


class WorkloadController:
    """Keeps the engine of `State.policies`. All methods belong to one thread.

    namespace: the namespace of the ConfigMap.
    leads: returns whether this extender leads; only the leader writes.
    policy, limits: settings that are written into the ConfigMap, for people and the command line.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        namespace: str,
        *,
        leads: Callable[[], bool],
        policy: str = policies.DEFAULT_POLICY,
        limits: CardLimits = _NO_LIMITS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._state = state
        self._namespace = namespace
        self._leads = leads
        self._policy = policy
        self._settings = {names.WORKLOAD_POLICY: policy, **limits.configmap_data()}
        self._clock = clock
        self._published = False
        self._compare_at = float("inf")  # when the published settings are compared again
        self._unpublished = 0  # steps of this leader without published settings
        self._was_leader = False
        self._restored = False
        self._saved_text = ""
        self._save_at = float("-inf")  # the earliest time of the next save without a newly learned workload

    def step(self) -> None:
        """Publish the settings. If a scored policy is requested, also restore, learn and save the workload, and compute
        scores.
        """
        leads = self._leads()
        self._publish_if_needed(leads=leads)
        scored = self._state.policies
        if not scored.is_requested:
            return
        if not scored.is_active:
            from cardwise.core.placement.scored.engine import Engine  # noqa: PLC0415 - loads numpy, which `binpack` does not need

            scored.start_engine(Engine, self._policy)
        if leads and not self._was_leader:
            self._restored = False  # another extender may have led before, and may have saved a newer workload
        self._was_leader = leads
        if not self._restored:
            self._restored = self._restore_workload()
        for _ in range(_MAX_LOCKS_PER_STEP):
            if not scored.precompute_scores(_NODES_PER_LOCK):
                break
            pause(self._clock)
        learned = self._learn_workload()
        if leads and self._restored and (learned or self._clock.now() >= self._save_at):
            self._save_requests(scored.dump_workload() or "")

    def _learn_workload(self) -> bool:
        """Learn the workload. Returns whether there was anything to learn from."""
        from cardwise.core.placement.scored.workload import learn_workload  # noqa: PLC0415 - see above

        sample = self._state.policies.learning_input()
        if sample is None:
            return False
        self._state.policies.adopt_model(learn_workload(sample))
        _log.info(
            "updated the workload model", requests=len(sample.counts), arrivals=round(sum(sample.counts.values()))
        )
        return True

    def _save_requests(self, text: str) -> None:
        if text == self._saved_text or self._write_configmap({names.WORKLOAD_REQUESTS: text}):
            self._saved_text, self._save_at = text, self._clock.now() + _SAVE_SECONDS

    def _publish_if_needed(self, *, leads: bool) -> None:
        """Publish the settings when this extender begins to lead, and again if they were removed or changed since.

        After a failure, only the 2nd, 4th, 8th further call and so on tries again.
        """
        if self._clock.now() >= self._compare_at:
            self._published = False
        if not leads or self._published:
            self._published, self._unpublished = leads, 0
            return
        self._unpublished += 1
        if not self._unpublished & (self._unpublished - 1):
            self._published = self._publish_settings()
            self._compare_at = self._clock.now() + _SETTINGS_CHECK_SECONDS if self._published else float("inf")

    def _publish_settings(self) -> bool:
        """Write the settings. Returns whether the ConfigMap now has these settings."""
        try:
            document = self._client.get(paths.configmaps(self._namespace, names.WORKLOAD), timeout=_TIMEOUT)
            saved_data = document.get("data") or {}
        except errors.NotFound:
            saved_data = {}
        except errors.KubeError as error:
            _log.warning("failed to publish the settings; trying again", error=str(error))
            return False
        # Read again, so that a workload that was removed is saved again.
        self._saved_text = saved_data.get(names.WORKLOAD_REQUESTS, "")
        return self._settings.items() <= saved_data.items() or self._write_configmap(self._settings)

    def _restore_workload(self) -> bool:
        """Read the saved workload. Returns False if the read failed and must be repeated."""
        from cardwise.core.placement.scored.workload import InvalidWorkload  # noqa: PLC0415 - see above

        try:
            document = self._client.get(paths.configmaps(self._namespace, names.WORKLOAD), timeout=_TIMEOUT)
            text = (document.get("data") or {}).get(names.WORKLOAD_REQUESTS)
            if text:
                self._state.policies.load_workload(text)
        except errors.NotFound:
            return True
        except errors.KubeError as error:
            _log.warning("failed to read the saved workload model; trying again", error=str(error))
            return False
        except InvalidWorkload as error:
            _log.warning("ignored the saved workload model", error=str(error))
        return True

    def _write_configmap(self, data: dict[str, str]) -> bool:
        path = paths.configmaps(self._namespace, names.WORKLOAD)
        try:
            try:
                self._client.patch(path, {"data": data}, timeout=_TIMEOUT)
            except errors.NotFound:
                metadata = {"name": names.WORKLOAD}
                created = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
                self._client.create(paths.configmaps(self._namespace), created, timeout=_TIMEOUT)
        except errors.KubeError as error:
            _log.warning("failed to save the workload model", keys=sorted(data), error=str(error))
            return False
        return True
