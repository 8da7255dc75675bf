"""What the extender's HTTP server is made of."""

from prometheus_client import CollectorRegistry

from cardwise.kube import paths
from extender.api.app import AppComponents
from extender.api.metrics import Metrics
from extender.api.verbs import AnswerSettings
from extender.binding.binder import Binder
from extender.leadership.leadership import Leadership
from tests.build import asking
from tests.extender.states import make_state, with_cards
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

POD = asking("p", gpu_mem=8138)


def parts(missing=(), leadership=None, clock=None, outdated=list, disconnected=dict):
    clock = clock or FakeClock()
    api = ApiServer(clock)
    api.write_object(paths.pods(), POD)
    state = with_cards(make_state(clock), n1=2)
    return AppComponents(
        state=state,
        binder=Binder(api.client(), state, policy="binpack", seconds=5, clock=clock),
        metrics=Metrics(CollectorRegistry(), clock),
        preferences=AnswerSettings(policy="binpack", one_best_node=True),
        unsynced_lists=lambda: list(missing),
        outdated_watches=outdated,
        disconnected_seconds=disconnected,
        leadership=leadership or Leadership(),
    )
