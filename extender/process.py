"""Creates, starts and stops the components of the extender: `Extender`, and `Process`, which runs one.

`Extender` has all behaviour that kube-scheduler and the API server can observe. It is created from a client, a clock
and settings, so tests can run several complete extenders in one process (tests/property/blackbox.py).
"""

import gc
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api import names, policies
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.gangs import gangs
from cardwise.core.values.quantity import MiB, Unit
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder
from cardwise.runtime.http.health import HealthServer, HealthSettings
from cardwise.runtime.http.httpcalls import WsgiApp
from cardwise.runtime.tls import tls
from cardwise.runtime.tls.expiry import Expiry
from extender.api.app import AppComponents, create_app, watch_lines
from extender.api.metrics import GaugeReaders, Metrics
from extender.api.verbs import AnswerSettings
from extender.binding.binder import Binder
from extender.cache import statelock
from extender.cache.reservations import TERMINATING_SECONDS, Timeouts
from extender.claims.claimscheduler import ClaimScheduler
from extender.controllers.directbinds import DirectBindController
from extender.controllers.evictions import Evictions
from extender.controllers.fragmetrics import FragMetrics
from extender.controllers.gangcontroller import GangController
from extender.controllers.loops import Loops, Step
from extender.controllers.nominationwriter import NominationWriter
from extender.controllers.overcommit import OvercommitController
from extender.controllers.workloadcontroller import WorkloadController
from extender.gangs import gangtypes
from extender.informers import Informers
from extender.leadership import leadership
from extender.leadership.fence import Fence
from extender.leadership.leadership import Leadership
from extender.leadership.marking import LeaderMark
from extender.nomination import nominator
from extender.reporting.classcontroller import ClassController
from extender.reporting.listers import Listers
from extender.reporting.podevents import PodEvents
from extender.reporting.podgroupwriter import PodGroupWriter
from extender.reporting.statuswriter import StatusWriter
from extender.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtenderSettings:
    """The settings of the command line, without the settings of the HTTP server.

    Units: `bind_deadline`, `lease_duration` and names that end in `_seconds` are seconds; `headroom` is MiB of each
    card; None for the headroom that each card has; `core_overcommit` is percent.
    """

    policy: str
    headroom: MiB | None
    max_clients: int | None
    core_overcommit: int
    bind_deadline: float
    max_gang_permit_seconds: float
    gang_reserve_seconds: float
    namespace: str  # Cardwise's own
    lease_duration: float
    no_lease: bool
    claims: bool = False
    # The next three are other than the defaults only in tests. Filter returns the one best node: kube-scheduler's own
    # scores know no cards. A pod for which they count more has soft preferences, or the annotation `names.ONE_NODE`.
    one_best_node: bool = True
    nominate_above_nodes: int = nominator.MIN_NODES
    terminating_seconds: float = TERMINATING_SECONDS
    pod: str = ""  # the name of the pod in which this process runs
    inspect_unit: str = Unit.MIB


class Extender:
    """A whole extender: `app` serves kube-scheduler, and its threads run between `start` and `stop`.

    max_waiting: maximum number of members of gangs that can wait in bind.
    lease_clock: the clock for the expiry of the Lease.
    listed: called after each list of all pods.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: ExtenderSettings,
        *,
        max_waiting: int = 0,
        clock: Clock = SYSTEM,
        lease_clock: Clock = BOOT,
        listed: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = State(
            headroom=settings.headroom,
            max_clients=settings.max_clients,
            core=settings.core_overcommit,
            timeouts=Timeouts(terminating=settings.terminating_seconds),
            gang_settings=_gang_settings(settings, max_waiting),
            nomination_settings=_nomination_settings(settings),
            clock=clock,
        )
        self._events = EventRecorder(client, "cardwise-extender", instance=socket.gethostname(), clock=clock)
        listers = Listers()
        self._informers = Informers(
            client, self._state, listers, self._events, clock, listed=listed, claims=settings.claims
        )
        self._serves_claims = settings.claims
        self._leadership: Leadership = Leadership()
        fence = Fence(client, clock, self._events)
        if not settings.no_lease:
            self._leadership = leadership.make_lease_leadership(
                client,
                settings.namespace,
                names.LEASE,
                duration=settings.lease_duration,
                state=self._state,
                catch_up=self._informers.catch_up,
                fence=fence,
                blockers=self._informers.lease_blockers,
                fence_claims=self._fence_claims,
                clock=clock,
                lease_clock=lease_clock,
            )
        self._mark = (
            LeaderMark(client, settings.namespace, settings.pod, self._leadership.epoch, clock)
            if settings.pod
            else None
        )
        self._binder = Binder(
            client,
            self._state,
            policy=settings.policy,
            seconds=settings.bind_deadline,
            leadership=self._leadership,
            outdated_watches=self._informers.outdated_watches,
            clock=clock,
        )
        self._pod_events = PodEvents(
            self._events, listers, active=self._leads, waiting_for=self._state.pods_requesting_class, clock=clock
        )
        no_class = self._pod_events.record_missing_class
        self._statuses = StatusWriter(client, self._state, listers, active=self._leads, no_class=no_class, clock=clock)
        classes = ClassController(client, listers, active=self._leads, in_use=self._state.is_class_in_use, clock=clock)
        podgroups = PodGroupWriter(
            client, listers.groups, self._events, gangs=self._state.gangs.views, active=self._leads, clock=clock
        )
        self._fragments = FragMetrics(self._state, clock)
        workload = WorkloadController(
            client,
            self._state,
            settings.namespace,
            leads=self._leads,
            policy=settings.policy,
            limits=CardLimits(
                kept_back=settings.headroom, max_clients=settings.max_clients, core=settings.core_overcommit
            ),
            clock=clock,
        )
        if policies.find_policy(settings.policy).is_scored:
            self._state.policies.is_requested = True
        nominating = NominationWriter(client, self._state.nominator, active=self._is_synced_and_leads, clock=clock)
        evictions = Evictions(
            client, self._state.preemption, self._events, active=self._is_synced_and_leads, clock=clock
        )
        overcommit = OvercommitController(
            client, self._state, self._events, active=self._is_synced_and_leads, clock=clock
        )
        direct_binds = DirectBindController(
            client, self._state, self._events, active=self._is_synced_and_leads, clock=clock
        )
        self._preferences = AnswerSettings(policy=settings.policy, one_best_node=settings.one_best_node)
        self._claims = ClaimScheduler(
            client,
            self._state,
            self._events,
            leadership=self._leadership,
            preferences=self._preferences,
            active=self._is_synced_and_leads,
            notice=self._pod_events.record_quota_wait,
            clock=clock,
        )
        self._loops = Loops(
            client,
            self._state,
            reports=[self._informers.hand_over_waiting],
            statuses=[
                self._skip_until_synced(controller.step) for controller in (self._pod_events, classes, self._statuses)
            ],
            podgroups=[self._skip_until_synced(podgroups.step)],
            gangs=GangController(client, self._state, self._events, active=self._is_synced_and_leads, clock=clock),
            evictions=[
                overcommit.step,
                direct_binds.step,
                *([] if settings.claims else [self._skip_until_synced(self._state.reserve_allocated_pods)]),
            ],
            preemption=[evictions.step],
            nominating=nominating,
            workload=[workload.step, self._fragments.step],
            claims=[self._claims.step] if settings.claims else [],
            leadership=self._leadership,
            fence=fence,
            clock=clock,
        )
        self._inspect_unit = Unit(settings.inspect_unit)
        self._clock = clock

    def app(self, registry: CollectorRegistry) -> WsgiApp:
        """Make the WSGI application; its metrics go to `registry`."""
        levels = GaugeReaders(
            reservations=self._state.reservation_counts,
            gangs=self._state.gangs.phase_counts,
            refused_pods=self._state.refusal_counts,
            disagreements=self._statuses.ledger_check.counts,
            staleness_seconds=self._informers.staleness_seconds,
            disconnected_seconds=self._informers.disconnected_seconds,
            leads=self._leads,
        )
        registry.register(levels)
        registry.register(self._fragments)
        metrics = Metrics(registry, self._clock)
        self._state.gangs.on_permit_ended, self._state.gangs.on_binding_started = (
            metrics.observe_permit,
            metrics.observe_gang_wait,
        )
        self._state.nominator.on_outcome = metrics.count_nomination
        self._claims.on_outcome = metrics.count_claim
        components = AppComponents(
            state=self._state,
            binder=self._binder,
            metrics=metrics,
            preferences=self._preferences,
            unsynced_lists=self._informers.unsynced_lists,
            outdated_watches=self._informers.outdated_watches,
            disconnected_seconds=self._informers.disconnected_seconds,
            leadership=self._leadership,
            notice=self._pod_events.record_quota_wait,
            inspect_unit=self._inspect_unit,
        )
        return create_app(components)

    def start(self) -> None:
        self._informers.start()
        self._leadership.start()
        if self._mark is not None:
            self._mark.start()
        self._loops.start()

    def begin_stop(self) -> None:
        """Cancel the waiting binds, and release the Lease in another thread."""
        self._state.gangs.cancel_permits("the extender is shutting down")
        # Release the Lease now, so that the next leader can begin: closing the last connections takes seconds.
        threading.Thread(target=self._leadership.stop, name="lease-release", daemon=True).start()

    def stop(self) -> None:
        self._leadership.stop()
        if self._mark is not None:
            self._mark.stop()
        self._loops.stop()
        self._claims.stop()
        self._informers.stop()
        self._events.stop()

    def unsynced_lists(self) -> list[str]:
        """The lists that are not complete yet, one line for each."""
        return self._informers.unsynced_lists()

    def watch_lines(self) -> list[str]:
        """Lines for people: for each kind of object, the seconds since its watch was interrupted."""
        return watch_lines(self._informers.disconnected_seconds())

    def lock_held_seconds(self) -> float:
        """For how many seconds the present holder has held the state's lock; 0 while the lock is free."""
        return self._state.lock_held_seconds()

    def _fence_claims(self, still_leads: Callable[[], bool]) -> bool:
        """As `ClaimScheduler.fence_claims`; in other modes, reserve what was allocated before a change of the mode."""
        if self._serves_claims:
            return self._claims.fence_claims(still_leads)
        self._state.reserve_allocated_pods()
        return True

    def _leads(self) -> bool:
        return self._leadership.epoch() is not None

    def _skip_until_synced(self, step: Step) -> Step:
        """A step that does nothing until all lists are complete, since before that it would publish wrong data."""

        def taken() -> None:
            if self._is_synced():
                step()

        return taken

    def _is_synced(self) -> bool:
        return not self._informers.unsynced_lists() and not self._informers.outdated_watches()

    def _is_synced_and_leads(self) -> bool:
        return self._leads() and self._is_synced()


class Process:
    """The serving process, a fork of the process that read the settings.

    It has an extender, its health port, its certificates, and the settings of the Python interpreter.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: ExtenderSettings,
        health_settings: HealthSettings,
        rotator: tls.Rotator | None,
        max_waiting: int,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._extender = Extender(client, settings, max_waiting=max_waiting, clock=clock, listed=_freeze_objects)
        self._clock = clock
        self._checked_at = clock.now()  # when `is_alive` was called last
        self._resumed = float("-inf")  # when this process last resumed after a pause of the whole process
        self._health_settings = health_settings
        self._health: HealthServer | None = None
        self._rotator = rotator

    def app(self) -> WsgiApp:
        registry = prometheus_client.REGISTRY
        if self._health_settings.certificates is not None:
            registry.register(Expiry(self._health_settings.certificates))
        return self._extender.app(registry)

    def start(self) -> None:
        # Reading the lists of a large cluster leaves no garbage. So garbage collection is off until the lists are
        # complete; `_freeze_objects` starts it.
        gc.disable()
        # Seconds for which a computing thread (statuses, watch events) may delay filter's thread. With the default,
        # 5 ms, filter had a p99 of 5 ms while statuses were written.
        sys.setswitchinterval(0.0005)
        self._health = HealthServer(
            self._health_settings.bind,
            ready=self._extender.unsynced_lists,
            alive=self._lock_problems,
            notes=self._extender.watch_lines,
            config=self._health_settings.config,
        )
        self._health.start()
        self._extender.start()
        if self._rotator is not None:
            self._rotator.start()

    def is_alive(self) -> bool:
        """Whether the process works. The serving thread checks this several times a second, so it must not block."""
        now = self._clock.now()
        if now - self._checked_at > statelock.PAUSED_SECONDS:
            self._resumed = now
        self._checked_at = now
        return not self._lock_problems()

    def begin_stop(self) -> None:
        self._extender.begin_stop()

    def stop(self) -> None:
        self._extender.stop()
        if self._rotator is not None:
            self._rotator.stop()
        if self._health is not None:
            self._health.stop()

    def _lock_problems(self) -> list[str]:
        held_seconds = min(self._extender.lock_held_seconds(), self._clock.now() - self._resumed)
        return (
            [f"a thread has held the state for {held_seconds:.0f} s"] if held_seconds > statelock.STUCK_SECONDS else []
        )


def _freeze_objects() -> None:
    # The listed objects stay for long. Without this call, each full garbage collection would visit all of them.
    if gc.isenabled():
        gc.collect()
    gc.freeze()
    gc.enable()


def _nomination_settings(settings: ExtenderSettings) -> nominator.NominationSettings:
    return nominator.NominationSettings(
        above_nodes=settings.nominate_above_nodes,
        policy=settings.policy,
        one_best_node=settings.one_best_node,
    )


def _gang_settings(settings: ExtenderSettings, max_waiting: int) -> gangtypes.GangSettings:
    patience = gangs.GangPatience(max_permit=settings.max_gang_permit_seconds, reserve=settings.gang_reserve_seconds)
    return gangtypes.GangSettings(patience=patience, policy=settings.policy, max_waiting=max_waiting)
