"""An API server with pods on n1, the state that knows them, and a controller that deletes some."""

from collections.abc import Callable
from typing import Any

from cardwise.kube import paths
from tests.extender.states import make_state, with_cards
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.fakes.events import Events

PODS = paths.pods("default")


class DeletingCluster:
    def __init__(self, controller: Callable[..., Any], *, cards: int) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.state = with_cards(make_state(self.clock), n1=cards)
        self.leads = True
        self.events = Events()
        self.controller = controller(
            self.api.client(), self.state, self.events, active=lambda: self.leads, clock=self.clock
        )

    def step(self, rounds: int = 8) -> None:
        """Run the controller until all suspects were checked."""
        for _ in range(rounds):
            self.controller.step()
            self.clock.advance(1.0)

    def remaining_pods(self) -> list[str]:
        """Pods that are not being deleted."""
        pods = [pod["metadata"] for pod in self.api.all(PODS)]
        return sorted(metadata["name"] for metadata in pods if not metadata.get("deletionTimestamp"))
