"""What the extender tells the cluster: automatic classes, statuses and events, put together.

Apart from the process that starts it, and from what each of them does: here is who may speak, and what they share.
"""

from collections.abc import Callable

from cardwise.kube.client import KubeClient
from extender.classkeeper import ClassKeeper
from extender.notices import Notices, Recorder
from extender.sightings import Sightings
from extender.state import State
from extender.statuswriter import StatusWriter


class Telling:
    """Start it in the process that serves, and take `steps` again and again, all in one thread.

    `leads`: whether this extender leads, and its state knows all pods, nodes and cards. Others watch and say nothing.
    """

    def __init__(self, client: KubeClient, state: State, events: Recorder, *, leads: Callable[[], bool]) -> None:
        self._leads = leads
        seen = Sightings()
        self._reflectors = seen.reflectors(client)
        self.notices = Notices(events, seen, active=self._active, waiting_for=state.waiting_for)
        self._keeper = ClassKeeper(client, seen, active=self._active, in_use=state.class_in_use)
        self._writer = StatusWriter(client, state, seen, active=self._active, clashes=lambda: self._keeper.clashes)
        self.steps = (self.notices.step, self._keeper.step, self._writer.step)

    def start(self) -> None:
        for reflector in self._reflectors:
            reflector.start()

    def stop(self) -> None:
        for reflector in self._reflectors:
            reflector.stop()

    def _active(self) -> bool:
        return all(reflector.synced.is_set() for reflector in self._reflectors) and self._leads()
