"""Audits the processes on the cards in a loop, and reports use that was not granted.

The audit detects processes that bypass the MPS daemon or its limits. A tenant can set an environment variable that
lifts every limit, create a device node in a container, or start a program several times. `findings` has the rules.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import CardControl, CardError, GpuCard, GpuProcess, Gpus
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.watch.nodepods import NodePods
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.audit import findings
from mps.audit.evicting import EVICTIONS_PER_HOUR, Evictor, Violator
from mps.audit.findings import PodGrant, ProcessUse, Reason, StandingViolation, Violation, ViolationKey
from mps.host.pods import PodView, uuids_by_index
from mps.host.processes import LOCAL, Host
from mps.host.processowners import ProcessOwner, ProcessOwners

_log = structlog.get_logger(__name__)

INTERVAL_SECONDS: Final = 10.0  # an audit asks the driver for the processes of each card, which takes milliseconds
# A process and its pod's grant are read one after the other, so one audit can find a process that ends or begins. Three
# in a row do not.
PASSES_TO_CONFIRM: Final = 3
EVICT_AFTER_SECONDS: Final = 300.0  # in which the pod's owner can see the event and act
_REPEAT_SECONDS = 600.0  # pause between reports of the same violation; the API server keeps events for an hour
_MAX_SHOWN_PIDS = 5
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Settings of the audit.

    interval: seconds between two audits.
    passes: consecutive audits that must find a violation before it is reported.
    tolerance: MiB that each process may use beyond the share.
    evict_after: seconds that a violation must last before the pod is evicted; None: no pod is evicted.
    evict_per_hour: maximum of evictions per hour.
    """

    interval: float = INTERVAL_SECONDS
    passes: int = PASSES_TO_CONFIRM
    tolerance: MiB = MiB(mps.MAX_CONTEXT_MIB)
    evict_after: float | None = None
    evict_per_hour: int = EVICTIONS_PER_HOUR


class Audit:
    """The audit of one node. The audit reports no violation before the node's pods are known.

    foreign_processes: returns card and PID of the processes on a closed card that are not clients of its MPS server.
    """

    def __init__(
        self,
        settings: AuditSettings,
        client: KubeClient,
        *,
        node: str,
        gpus: Gpus,
        card_control: CardControl,
        pods: NodePods[PodView],
        foreign_processes: Callable[[], Collection[tuple[str, int]]] = frozenset,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self._settings = settings
        self._node = node
        self._gpus = gpus
        self._card_control = card_control
        self._pods = pods
        self._foreign_processes = foreign_processes
        self._host = host
        self._clock = clock
        self._events = EventRecorder(client, "cardwise-mps", instance=node, clock=clock)
        self._evictor = Evictor(client, self._events, settings.evict_per_hour)
        self._remind_passes = max(1, round(_REPEAT_SECONDS / settings.interval))
        self._standing: dict[ViolationKey, StandingViolation] = {}
        self._unreadable_cards: set[str] = set()  # UUIDs of the cards that did not answer at the last audit
        self._loop = Loop(
            "audit",
            self.audit_once,
            failed="failed to audit the GPUs",
            failures=metrics.THREAD_FAILURES,
            every=settings.interval,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(_STOP_SECONDS)
        self._events.stop()

    def audit_once(self) -> None:
        """Audit all cards once, report violations, and evict pods. Waits until the pods are known."""
        if not self._pods.synced:
            return
        now = self._clock.now()
        cards = self._gpus.cards()
        card_processes: list[tuple[str, GpuProcess]] = []
        unreadable_cards: set[str] = set()
        for card in cards:
            try:
                card_processes += [(card.uuid, process) for process in self._card_control.processes(card.uuid)]
            except CardError as error:
                unreadable_cards.add(card.uuid)
                metrics.AUDIT_FAILURES.labels(card.uuid).inc()
                if card.uuid not in self._unreadable_cards:
                    _log.warning("failed to list the processes on a GPU", card=card.uuid, error=str(error))
        self._unreadable_cards = unreadable_cards
        # List pods after processes, so that the pods of all listed processes are known.
        pods = {pod.uid: pod for pod in self._pods.list_pods()}
        uuid_by_index = uuids_by_index(cards)
        grants = {uid: pod_grant(pod, uuid_by_index) for uid, pod in pods.items()}
        owners = ProcessOwners(pods.values())
        manager_owner = owners.find_owner(self._host.memberships(os.getpid()))
        foreign_processes = self._foreign_processes()
        uses = [
            replace(use, bypasses_mps=(card, process.pid) in foreign_processes)
            for card, process in card_processes
            if (use := self._process_use(card, process, owners, manager_owner))
        ]
        violations = findings.find_violations(uses, grants, self._settings.tolerance)
        self._standing = findings.update_standing_violations(self._standing, violations, now, unreadable_cards)
        self._count_violations(cards)
        violators = []
        for violation in violations:
            standing, pod = self._standing[violation.key], pods.get(violation.pod)
            if standing.is_report_due(self._settings.passes, self._remind_passes):
                self._report(violation, pod)
            if pod is not None and self._should_evict(standing, pod, now):
                violators.append(Violator(pod, standing.since, self._event_text(violation, pod)))
        self._evictor.evict(violators, {uid for uid, pod in pods.items() if not pod.finished}, now)

    def _count_violations(self, cards: Sequence[GpuCard]) -> None:
        reported = [
            standing.violation for standing in self._standing.values() if standing.passes >= self._settings.passes
        ]
        for card in cards:
            for reason in Reason:
                count = sum(violation.card == card.uuid and violation.reason is reason for violation in reported)
                metrics.AUDIT_OPEN_VIOLATIONS.labels(card.uuid, reason).set(count)

    def _report(self, violation: Violation, pod: PodView | None) -> None:
        text = self._event_text(violation, pod)
        metrics.AUDIT_VIOLATIONS.labels(violation.card, violation.reason).inc()
        pod_fields = {"pod": pod.pod if pod is not None else "", "uid": violation.pod}
        _log.warning(
            "a GPU is not used as granted", reason=violation.reason, card=violation.card, violation=text, **pod_fields
        )
        regarding = ObjectRef.node(self._node)
        if pod is not None:
            regarding = ObjectRef.pod(pod.namespace, pod.name, pod.uid)
        self._events.record(regarding, violation.reason, text, "Warning")

    def _should_evict(self, standing: StandingViolation, pod: PodView, now: float) -> bool:
        evict_after = self._settings.evict_after
        if (
            evict_after is None
            or standing.violation.reason not in findings.EVICTABLE_REASONS
            or standing.passes < self._settings.passes
        ):
            return False
        return now - standing.since >= evict_after and pod.ends_at is None and not pod.finished

    def _process_use(
        self, card: str, process: GpuProcess, owners: ProcessOwners, manager_owner: ProcessOwner | None
    ) -> ProcessUse | None:
        """The use of a card by a process; None if the process has ended, or is an MPS server of this manager.

        manager_owner: the pod and container in which this manager runs.
        """
        memberships = self._host.memberships(process.pid)
        owner = owners.find_owner(memberships)
        # The manager's server is identified by its name and its cgroup: a tenant can choose the name, but not the
        # cgroup.
        may_be_own_server = owner is None or (manager_owner is not None and owner.pod.uid == manager_owner.pod.uid)
        if (may_be_own_server and self._host.is_server(process.pid)) or self._host.activity(process.pid) is None:
            return None
        if owner is None:
            pod = memberships[-1].pod_uid if memberships else ""
            return ProcessUse(card=card, pid=process.pid, memory=process.memory, pod=pod)
        return ProcessUse(
            card=card, pid=process.pid, memory=process.memory, pod=owner.pod.uid, container=owner.container
        )

    def _event_text(self, violation: Violation, pod: PodView | None) -> str:
        return event_message(violation, pod, [self._host.name(pid) for pid in violation.pids[:_MAX_SHOWN_PIDS]])


def pod_grant(pod: PodView, uuid_by_index: dict[int, str]) -> PodGrant:
    """The shares of a pod, in the form that `findings.find_violations` needs. Pure."""
    # For pods that gpushare placed, the containers of the shares are unknown.
    has_containers = not pod.assignment.is_gpushare
    shares: dict[tuple[str, str], MiB] = {}
    for key, container_shares in pod.assignment.containers.items():
        for share in container_shares:
            key_and_uuid = (key if has_containers else "", share.resolve_uuid(uuid_by_index) or "")
            shares[key_and_uuid] = MiB(shares.get(key_and_uuid, 0) + share.mem)
    keys = (
        {container.runtime_id: container.key for container in pod.containers if container.runtime_id}
        if has_containers
        else {}
    )
    return PodGrant(shares, keys)


def event_message(violation: Violation, pod: PodView | None, names: Sequence[str | None]) -> str:
    """The text of an event about a violation. Pure.

    names: the names of the violation's first processes; None for a process that has ended.
    """
    shown_processes = [
        f"{pid} ({name})" if name else str(pid) for pid, name in zip(violation.pids, names, strict=False)
    ]
    hidden_count = len(violation.pids) - len(shown_processes)
    hidden_text = f" and {hidden_count} more" if hidden_count else ""
    processes = f"process{'es' if len(violation.pids) > 1 else ''} {', '.join(shown_processes)}{hidden_text}"
    card = f"card {violation.card}"
    container = (
        next((container.name for container in pod.containers if container.key == violation.container), "")
        if pod
        else ""
    )
    holder = f"container {container}" if container else "the pod"
    match violation.reason:
        case Reason.MEMORY_OVERRUN:
            return (
                f"{holder} uses {violation.used} MiB of {card} and has a share of {violation.granted} MiB: {processes}"
            )
        case Reason.WRONG_GPU:
            own_cards = (
                ", ".join(sorted({share.uuid or str(share.index) for share in pod.assignment.shares()})) if pod else ""
            )
            return (
                f"{holder} uses {violation.used} MiB of {card} without a share of it (it has {own_cards}): {processes}"
            )
        case Reason.MPS_BYPASSED:
            return (
                f"{holder} uses {card} without MPS, and no MPS server can start on the card until that process ends. "
                "If the process was a client of an MPS server that ended, end it; else remove CUDA_MPS_PIPE_DIRECTORY "
                f'from the program\'s environment, or create the pod with cardwise.dev/isolation: "none": {processes}'
            )
        case Reason.GPU_WITHOUT_GRANT:
            return f"{holder} uses {violation.used} MiB of {card} and has no share of any GPU: {processes}"
        case Reason.UNKNOWN_PROCESS:
            owner = f"of pod {violation.pod}, which does not exist any more," if violation.pod else "of no pod"
            return f"{processes} {owner} uses {violation.used} MiB of {card}, which pods share"
