"""Takes a sample of what containers use of the GPUs each second, and remembers it."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import structlog

from cardwise.clock import BOOT, Clock
from cardwise.gpus.protocol import CardControl, CardError, Gpus, ProcessSample
from cardwise.gpus.usagereport import UsageReport
from cardwise.kube.watch.nodepods import NodePods
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.host.cgroups import CgroupMembership
from mps.host.pods import PodView, uuids_by_index
from mps.host.processes import LOCAL, Host
from mps.host.processowners import ProcessOwners
from mps.usage import usemetrics
from mps.usage.containeruse import ContainerKey, ContainerUse, OwnedSample, container_uses
from mps.usage.history import History
from mps.usage.usemetrics import ExportedUse

_log = structlog.get_logger(__name__)

INTERVAL_SECONDS: Final = 1.0
_MAX_ELAPSED_SECONDS = 10.0  # after a longer pause only this time counts as observed
_STOP_SECONDS = 5.0


@dataclass(slots=True)
class _BusySeconds:
    """Seconds of use since it is known; None while the driver does not report it."""

    sm: float | None = None
    bandwidth: float | None = None


class UseSampler:
    """Samples the use of one node's GPUs. Takes no sample before the node's pods are known.

    tiers: returns what limits the memory of shares of each card, by UUID.
    """

    def __init__(
        self,
        *,
        node: str,
        gpus: Gpus,
        card_control: CardControl,
        pods: NodePods[PodView],
        tiers: Callable[[], Mapping[str, str]] = dict,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self._node = node
        self._gpus = gpus
        self._card_control = card_control
        self._pods = pods
        self._tiers = tiers
        self._host = host
        self._clock = clock
        self._lock = threading.Lock()  # for the fields that metrics and the report read
        self._history = History(clock.now())
        self._busy: dict[ContainerKey, _BusySeconds] = {}
        self._last_sample = clock.now()
        self._accounted_peaks: dict[tuple[str, int], int] = {}  # of the last sample, by UUID and PID
        # Of the processes of the last sample. A process cannot leave its pod, and its PID is not given to another one
        # within a second; reading them all each second would be half of the cost.
        self._memberships: dict[int, Sequence[CgroupMembership]] = {}
        self._owners: tuple[list[PodView], ProcessOwners] = ([], ProcessOwners([]))
        self._loop = Loop(
            "usage",
            self.sample_once,
            failed="failed to measure the use of the GPUs",
            failures=metrics.THREAD_FAILURES,
            every=INTERVAL_SECONDS,
            clock=clock,
        )

    def start(self) -> None:
        usemetrics.USES.read_uses = self.exported_uses
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(_STOP_SECONDS)

    def sample_once(self) -> None:
        """Take one sample of all cards."""
        if not self._pods.synced:
            return
        now = self._clock.now()
        cards = self._gpus.cards()
        samples: dict[str, list[ProcessSample]] = {}
        for card in cards:
            try:
                samples[card.uuid] = self._card_control.sample_processes(card.uuid)
            except CardError:  # the audit and the probes of the card's health report it
                metrics.USE_FAILURES.labels(card.uuid).inc()
        # List pods after processes, so that the pods of all listed processes are known.
        pods = self._pods.list_pods()
        uses = container_uses(
            pods,
            self._own_samples(pods, samples),
            readable_cards=samples,
            uuid_by_index=uuids_by_index(cards),
            tiers=self._tiers(),
        )
        with self._lock:
            elapsed = min(now - self._last_sample, _MAX_ELAPSED_SECONDS)
            self._last_sample = now
            self._history.record(uses, now, elapsed)
            self._busy = {key: _add_busy(self._busy.get(key), use, elapsed) for key, use in uses.items()}

    def exported_uses(self) -> list[ExportedUse]:
        """The present use of all containers."""
        with self._lock:
            return [
                ExportedUse(key, use, recent_peak, self._busy[key].sm, self._busy[key].bandwidth)
                for key, use, recent_peak in self._history.present()
            ]

    def report(self) -> bytes:
        """The use of the last hours as JSON (`UsageReport`)."""
        with self._lock:
            now, history = self._clock.now(), self._history.copy()
        # Without the lock: thousands of containers take a second, and the sampler must not wait.
        report = UsageReport(
            node=self._node,
            observed_seconds=history.observed_seconds(now),
            containers=list(history.containers(now)),
        )
        return msgspec.json.encode(report)

    def _own_samples(self, pods: list[PodView], samples: Mapping[str, list[ProcessSample]]) -> list[OwnedSample]:
        """The samples of processes of pods. Processes of the node and of this manager are left out."""
        if self._owners[0] != pods:
            self._owners = pods, ProcessOwners(pods)
        owners = self._owners[1]
        manager = owners.find_owner(self._host.memberships(os.getpid()))
        pids = {sample.pid for card_samples in samples.values() for sample in card_samples}
        self._memberships = {pid: self._memberships.get(pid) or self._host.memberships(pid) for pid in pids}
        owned_samples: list[OwnedSample] = []
        accounted_peaks: dict[tuple[str, int], int] = {}
        for uuid, card_samples in samples.items():
            card_owned: list[OwnedSample] = []
            is_server_busy = False
            for sample in card_samples:
                owner = owners.find_owner(self._memberships[sample.pid])
                if owner is None or (manager is not None and owner.pod.uid == manager.pod.uid):
                    is_server_busy |= bool(sample.sm_percent) and self._host.is_server(sample.pid)
                    continue
                grown_peak = None
                if sample.peak_memory is not None:
                    # The driver's peak is that of the process' whole life. If it has grown, it belongs to this moment.
                    accounted_peaks[uuid, sample.pid] = sample.peak_memory
                    former_peak = self._accounted_peaks.get((uuid, sample.pid), -1)
                    grown_peak = sample.peak_memory if sample.peak_memory > former_peak else None
                recent_sample = replace(sample, peak_memory=grown_peak)
                card_owned.append(OwnedSample(uuid, owner.pod.uid, owner.container, recent_sample))
            owned_samples += [_without_idle(owned) for owned in card_owned] if is_server_busy else card_owned
        self._accounted_peaks = accounted_peaks
        return owned_samples


def _without_idle(owned: OwnedSample) -> OwnedSample:
    """The sample, unknown where it is zero: the driver reports the use of clients as that of their server."""
    if owned.sample.sm_percent:
        return owned
    return owned._replace(sample=replace(owned.sample, sm_percent=None, bandwidth_percent=None))


def _add_busy(busy: _BusySeconds | None, use: ContainerUse, elapsed: float) -> _BusySeconds:
    former = busy or _BusySeconds()
    return _BusySeconds(
        _add_seconds(former.sm, use.sm_percent, elapsed), _add_seconds(former.bandwidth, use.bandwidth_percent, elapsed)
    )


def _add_seconds(seconds: float | None, percent: float | None, elapsed: float) -> float | None:
    # A counter that stood still while the use is unknown would look as no use.
    return None if percent is None else (seconds or 0.0) + elapsed * percent / 100
