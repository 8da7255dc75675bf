"""Puts together all that the extender writes for people to see: automatic classes, PodGroups, statuses and events."""

from collections.abc import Callable

from cardwise.clock import SYSTEM, Clock
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from extender.controllers.loops import Step
from extender.reporting.classcontroller import ClassController
from extender.reporting.listers import Listers
from extender.reporting.podevents import PodEvents
from extender.reporting.podgroupwriter import PodGroupWriter
from extender.reporting.statuswriter import StatusWriter
from extender.state import State


class Reporters:
    """`steps` are for one thread, `gangs` is for another: a tenant can make PodGroups slow to write, but no status of a
    card.

    `knows`: whether all lists are complete; before that no step is taken, since its numbers would be wrong. `leads`:
    whether this extender leads; a standby writes nothing.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        seen: Listers,
        events: Recorder,
        *,
        knows: Callable[[], bool],
        leads: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self.pod_events = PodEvents(events, seen, active=leads, waiting_for=state.waiting_for, clock=clock)
        classes = ClassController(client, seen, active=leads, in_use=state.class_in_use, clock=clock)
        no_class = self.pod_events.quota_without_class
        writer = StatusWriter(client, state, seen, active=leads, no_class=no_class, clock=clock)
        gangs = PodGroupWriter(client, seen.groups, events, gangs=state.gangs.views, active=leads, clock=clock)
        steps = (self.pod_events.step, classes.step, writer.step)
        self.steps = tuple(_when(knows, step) for step in steps)
        self.gangs = _when(knows, gangs.step)


def _when(knows: Callable[[], bool], step: Step) -> Step:
    def taken() -> None:
        if knows():
            step()

    return taken
