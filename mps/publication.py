"""Publishes the MPS status of each card to the API server: `ExtendedResource.status.mps`, on change only.

The device plugin owns the ExtendedResources. It may create an ExtendedResource after the card's MPS status is known,
and may recreate the ExtendedResource without that status.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps, names
from cardwise.core.api.mps import Status
from cardwise.core.values import wording
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import MpsStatus
from cardwise.kube.watch.reflector import Reflector, WakeHandler
from cardwise.runtime.loops import Loop
from mps import metrics

_log = structlog.get_logger(__name__)

_PUBLISH_FAILED = "failed to publish the MPS statuses of this node"
_INTERVAL_SECONDS = 30.0
_STALE_RETRY_SECONDS = 1.0
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _PublishedStatus:
    """The status of a card in the API server, as of the watch.

    mps: its MPS status; None if the card has none yet.
    uuid: its UUID.
    memory_tier: what limits the memory of shares of it, as the device plugin reports; "" if unknown.
    """

    mps: MpsStatus | None
    uuid: str
    memory_tier: str


def _statuses_projection(node: str) -> Callable[[bytes], tuple[str, _PublishedStatus] | None]:
    """Returns a function for the watch that reads the MPS statuses of this node's cards and drops all others.

    The watch selects objects by label, but an object of another node can have the same label.
    """

    def project(content: bytes) -> tuple[str, _PublishedStatus] | None:
        resource = extendedresources.decode(content)
        if resource.spec.node != node:
            return None
        status = resource.status
        tier = status.isolation.memory if status.isolation is not None else ""
        return resource.metadata.name, _PublishedStatus(status.mps, resource.spec.uuid, tier)

    return project


def card_status(status: Status, uuid: str) -> MpsStatus:
    """The desired `status.mps` of a card. Pure."""
    fields = mps.status_fields(status, uuid)
    transition_time = datetime.fromtimestamp(status.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MpsStatus(
        **fields | {"reason": wording.sanitize_message(fields["reason"])}, last_transition_time=transition_time
    )


class MpsStatusPublisher:
    """Publishes the MPS status of each card. Call `wake` after a change.

    statuses: returns the statuses by UUID.
    clock: the clock of the times in the statuses.
    """

    def __init__(
        self, client: KubeClient, node: str, statuses: Callable[[], Mapping[str, Status]], clock: Clock = BOOT
    ) -> None:
        self._client = client
        self._statuses = statuses
        self._clock = clock
        self.problem = "the MPS statuses of this node are not published yet"
        self._loop = Loop(
            "publication",
            self._publish_if_synced,
            failed=_PUBLISH_FAILED,
            failures=metrics.THREAD_FAILURES,
            expected=(errors.KubeError,),
            every=_INTERVAL_SECONDS,
            clock=clock,
        )
        self._reflector: Reflector[_PublishedStatus] = Reflector(
            client,
            paths.extendedresources(),
            _statuses_projection(node),
            WakeHandler(self._loop.wake),
            query=paths.label_query(names.NODE_LABEL, node),
            name="extendedresources",
            clock=clock,
        )

    def start(self) -> None:
        self._reflector.start()
        self._loop.start()

    def wake(self) -> None:
        self._loop.wake()

    def memory_tiers(self) -> dict[str, str]:
        """What limits the memory of shares of each card, by UUID, as far as it is published."""
        return {status.uuid: status.memory_tier for status in self._reflector.store.snapshot().values()}

    def stop(self) -> None:
        """Stop, after publishing the last statuses if the API server answers."""
        self._loop.stop(_STOP_SECONDS)
        self._reflector.stop()
        try:
            self._publish()
        except errors.KubeError as error:
            _log.warning("failed to publish the shutdown status", error=str(error))

    def _publish_if_synced(self) -> None:
        if not self._reflector.synced.is_set():
            return
        try:
            self._publish()
        except Exception as error:
            self.problem = f"{_PUBLISH_FAILED}: {error}"
            raise
        self.problem = ""

    def _publish(self) -> None:
        published_statuses = self._reflector.store.snapshot()
        first_error: errors.KubeError | None = None
        for uuid, status in self._statuses().items():
            name = names.extended_resource_name(uuid)
            desired = card_status(status, uuid)
            # The watch triggers another pass when the missing object is created.
            if name not in published_statuses or published_statuses[name].mps == desired:
                continue
            # The device plugin sets a stale status to Down; publishing the stale status would undo that.
            if mps.is_stale(status, self._clock.now()):
                self._loop.run_within(_STALE_RETRY_SECONDS)
                continue
            try:
                patch = {"status": {"mps": msgspec.to_builtins(desired)}}
                self._client.patch(paths.extendedresources(name, "status"), patch, "merge")
            except errors.NotFound:
                continue
            except errors.KubeError as error:
                if errors.would_fail_other_writes(error):
                    raise
                first_error = first_error or error  # raised after the other cards are published
                continue
            _log.info("published the MPS status of a GPU", card=uuid, state=desired.state, ceiling=desired.ceiling_mib)
        if first_error is not None:
            raise first_error
