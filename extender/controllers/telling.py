"""Puts together all that the extender writes for people to see: automatic classes, PodGroups, statuses and events.

Here is who may write, and what the writers share.
"""

from collections.abc import Callable

from cardwise.clock import SYSTEM, Clock
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from extender.controllers.loops import Step
from extender.reporting.classkeeper import ClassKeeper
from extender.reporting.gangtelling import GangTelling
from extender.reporting.listers import Sightings
from extender.reporting.notices import Notices
from extender.reporting.statuswriter import StatusWriter
from extender.state import State


class Telling:
    """Take `steps` again and again in the process that serves, all in one thread, and `gangs` in another: a namespace
    can make its PodGroups slow to write, but no status of a card.

    `knows`: whether all that is watched has been listed; before, no step is taken, for what is counted of half a
    picture would be counted again. `leads`: whether this extender leads; others watch and say nothing.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        seen: Sightings,
        events: Recorder,
        *,
        knows: Callable[[], bool],
        leads: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self.notices = Notices(events, seen, active=leads, waiting_for=state.waiters.asking_for, clock=clock)
        keeper = ClassKeeper(client, seen, active=leads, in_use=state.class_in_use, clock=clock)
        writer = StatusWriter(client, state, seen, active=leads, no_class=self.notices.quota_without_class, clock=clock)
        gangs = GangTelling(client, seen.groups, events, gangs=state.gangs.views, active=leads, clock=clock)
        steps = (self.notices.step, keeper.step, writer.step)
        self.steps = tuple(_when(knows, step) for step in steps)
        self.gangs = _when(knows, gangs.step)


def _when(knows: Callable[[], bool], step: Step) -> Step:
    def taken() -> None:
        if knows():
            step()

    return taken
