"""The audit's loop: looks at the processes on the cards, and reports what was not granted.

Finds processes that avoid their MPS daemon or its limits: by a variable that lifts every limit, by a device node that a
container brought itself, by starting a program twice. `findings` decides what is wrong; it is pure.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import CardError, CardUse, GpuCard, GpuProcess, Gpus
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.watch.nodepods import NodePods
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.audit import findings
from mps.audit.evicting import Evictor, Violator
from mps.audit.findings import About, PodGrant, ProcessUse, Reason, StandingViolation, Violation
from mps.audit.owners import Owner, Owners
from mps.audit.usage import Usage, measured
from mps.host.pods import PodView, indexed
from mps.host.processes import LOCAL, Host

_log = structlog.get_logger(__name__)

_REMIND_SECONDS = 600.0  # of what goes on; events are kept for an hour
_SHOWN_PIDS = 5
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """`tolerance` is for each process. `evict_after`: seconds after which a pod has to go, None: never; then so many of
    the node an hour.
    """

    interval: float = 10.0
    looks: int = 3
    tolerance: MiB = MiB(mps.CONTEXT)
    evict_after: float | None = None
    evict_per_hour: int = 6


class Audit:
    """`start`, then `stop`. It says nothing before the pods of the node are known. `past`: card and PID of the
    processes on a closed card that are no clients of its server.
    """

    def __init__(
        self,
        settings: AuditSettings,
        client: KubeClient,
        *,
        node: str,
        gpus: Gpus,
        use: CardUse,
        pods: NodePods[PodView],
        past: Callable[[], Collection[tuple[str, int]]] = frozenset,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self._settings = settings
        self._node = node
        self._gpus = gpus
        self._use = use
        self._pods = pods
        self._past = past
        self._host = host
        self._clock = clock
        self._events = EventRecorder(client, "cardwise-mps", instance=node, clock=clock)
        self._evictor = Evictor(client, self._events, settings.evict_per_hour)
        self._remind = max(1, round(_REMIND_SECONDS / settings.interval))
        self._usage = Usage()
        self._standing: dict[About, StandingViolation] = {}
        self._unseen: set[str] = set()  # cards that did not answer at the last look
        self._loop = Loop(
            "audit",
            self.look,
            failed="nobody looks at who uses the cards",
            failures=metrics.THREADS,
            every=settings.interval,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(_STOP_SECONDS)
        self._events.stop()

    def look(self) -> None:
        """Compares, tells and evicts; nothing while the pods are not known."""
        if not self._pods.synced:
            return
        now = self._clock.now()
        cards = self._gpus.cards()
        there: list[tuple[str, GpuProcess]] = []
        unseen: set[str] = set()
        for card in cards:
            try:
                there += [(card.uuid, process) for process in self._use.processes(card.uuid)]
            except CardError as error:
                unseen.add(card.uuid)
                metrics.AUDIT_BLIND.labels(card.uuid).inc()
                if card.uuid not in self._unseen:
                    _log.warning("a card does not say who is on it", card=card.uuid, error=str(error))
        self._unseen = unseen
        # The pods after the processes: whoever is on a card was known by then.
        pods = {pod.uid: pod for pod in self._pods.all()}
        by_index = indexed(cards)
        grants = {uid: granted(pod, by_index) for uid, pod in pods.items()}
        owners = Owners(pods.values())
        own = owners.of(self._host.memberships(os.getpid()))
        past = self._past()
        uses = [
            replace(use, past=(card, process.pid) in past)
            for card, process in there
            if (use := self._use_of(card, process, owners, own))
        ]
        self._usage.tell(measured(uses, pods))
        found = findings.compare(uses, grants, self._settings.tolerance)
        self._standing = findings.follow(self._standing, found, now, unseen)
        self._count(cards)
        violators = []
        for finding in found:
            standing, pod = self._standing[finding.about], pods.get(finding.pod)
            if standing.to_tell(self._settings.looks, self._remind):
                self._tell(finding, pod)
            if pod is not None and self._has_to_go(standing, pod, now):
                violators.append(Violator(pod, standing.since, self._said(finding, pod)))
        self._evictor.evict(violators, {uid for uid, pod in pods.items() if not pod.finished}, now)

    def _count(self, cards: Sequence[GpuCard]) -> None:
        loud = [one.finding for one in self._standing.values() if one.looks >= self._settings.looks]
        for card in cards:
            for reason in Reason:
                count = sum(finding.card == card.uuid and finding.reason is reason for finding in loud)
                metrics.AUDIT_STANDING.labels(card.uuid, reason).set(count)

    def _tell(self, finding: Violation, pod: PodView | None) -> None:
        text = self._said(finding, pod)
        metrics.AUDIT_FOUND.labels(finding.card, finding.reason).inc()
        who = {"pod": pod.pod if pod is not None else "", "uid": finding.pod}
        _log.warning("a card is not used as granted", reason=finding.reason, card=finding.card, said=text, **who)
        about = ObjectRef.node(self._node)
        if pod is not None:
            about = ObjectRef.pod(pod.namespace, pod.name, pod.uid)
        self._events.record(about, finding.reason, text, "Warning")

    def _has_to_go(self, standing: StandingViolation, pod: PodView, now: float) -> bool:
        after = self._settings.evict_after
        if (
            after is None
            or standing.finding.reason not in findings.OF_A_HOLDER
            or standing.looks < self._settings.looks
        ):
            return False
        return now - standing.since >= after and pod.ends is None and not pod.finished

    def _use_of(self, card: str, process: GpuProcess, owners: Owners, own: Owner | None) -> ProcessUse | None:
        """None for one that has ended, and for the MPS server."""
        memberships = self._host.memberships(process.pid)
        owner = owners.of(memberships)
        # Ours is a server by its name and its place: a tenant can take the one, not the other.
        ours = owner is None or (own is not None and owner.pod.uid == own.pod.uid)
        if (ours and self._host.is_server(process.pid)) or self._host.pulse(process.pid) is None:
            return None
        if owner is None:
            pod = memberships[-1].pod_uid if memberships else ""
            return ProcessUse(card=card, pid=process.pid, memory=process.memory, pod=pod)
        return ProcessUse(
            card=card, pid=process.pid, memory=process.memory, pod=owner.pod.uid, container=owner.container
        )

    def _said(self, finding: Violation, pod: PodView | None) -> str:
        return message(finding, pod, [self._host.name(pid) for pid in finding.pids[:_SHOWN_PIDS]])


def granted(pod: PodView, by_index: dict[int, str]) -> PodGrant:
    """What the pod has, for the comparison. Pure."""
    # Where gpushare placed it, nobody knows which container has what.
    told = not pod.assignment.legacy
    shares: dict[tuple[str, str], MiB] = {}
    for key, theirs in pod.assignment.containers.items():
        for share in theirs:
            place = (key if told else "", share.uuid_by(by_index))
            shares[place] = MiB(shares.get(place, 0) + share.mem)
    keys = {one.runtime_id: one.key for one in pod.containers if one.runtime_id} if told else {}
    return PodGrant(shares, keys)


def message(finding: Violation, pod: PodView | None, names: Sequence[str]) -> str:
    """For the event. `names` are those of the first processes. Pure."""
    shown = [f"{pid} ({name})" if name else str(pid) for pid, name in zip(finding.pids, names, strict=False)]
    more = len(finding.pids) - len(shown)
    who = f"process{'es' if len(finding.pids) > 1 else ''} {', '.join(shown)}{f' and {more} more' if more else ''}"
    card = f"card {finding.card}"
    container = next((one.name for one in pod.containers if one.key == finding.container), "") if pod else ""
    holder = f"container {container}" if container else "the pod"
    match finding.reason:
        case Reason.MEMORY_OVERRUN:
            return f"{holder} uses {finding.used} MiB of {card} and was given {finding.granted} MiB: {who}"
        case Reason.WRONG_CARD:
            has = (
                ", ".join(sorted({share.uuid or str(share.index) for share in pod.assignment.shares()})) if pod else ""
            )
            return f"{holder} uses {finding.used} MiB of {card}, which it was not given (it has {has}): {who}"
        case Reason.PAST_MPS:
            return (
                f"{holder} is on {card} past MPS, whose server cannot start while it is; end it, where it was a client "
                "of a server that ended; else take CUDA_MPS_PIPE_DIRECTORY out of the program's environment, or create "
                f'the pod with cardwise.dev/mps: "off": {who}'
            )
        case Reason.CARD_WITHOUT_GRANT:
            return f"{holder} uses {finding.used} MiB of {card} and has no share of any card: {who}"
        case Reason.UNKNOWN_PROCESS:
            whose = f"of pod {finding.pod}, which does not exist any more," if finding.pod else "of no pod"
            return f"{who} {whose} uses {finding.used} MiB of {card}, which pods share"
