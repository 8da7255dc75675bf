"""What holds for every test, and fixtures that many folders use. What a test has set up ends with it."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import structlog

from cardwise.kube.client import KubeClient
from tests.examples import SOAK, examples
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

if TYPE_CHECKING:
    from tests.cluster.controlplane import ControlPlane
    from tests.integration.conftest import Clusters

# Images of Python set it. All that is imported would be compiled anew by each of the many programs that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Go's collector runs a quarter as often in the programs of Kubernetes: a quarter less CPU for each of their starts.
os.environ.setdefault("GOGC", "400")

# The same examples for everybody, and no clock: what is green stays green, on a busy machine too. `make soak` draws
# others, and more. A fixture of a function may serve many examples: those that are used so keep nothing between them.
_CALM = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "cardwise",
    derandomize=not SOAK,
    max_examples=examples(40, soak=400),
    deadline=None,
    suppress_health_check=_CALM,
)
hypothesis.settings.load_profile("cardwise")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests with all that they import stay to the end: looking for garbage among them is in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Tracebacks as Python writes them: with the values of all variables each takes a tenth of a second and more.
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.stdlib.add_log_level, plain])
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still until the test moves it."""
    return FakeClock()


@pytest.fixture
def api(clock: FakeClock) -> Iterator[ApiServer]:
    """An API server in memory, empty."""
    server = ApiServer(clock)
    yield server
    server.close()


@pytest.fixture
def client(api: ApiServer, clock: FakeClock) -> KubeClient:
    """Reaches `api` without sockets."""
    return api.client(clock=clock)


_SHARED: "pytest.StashKey[Clusters]" = pytest.StashKey()


@pytest.fixture(scope="session")
def clusters(pytestconfig: pytest.Config) -> "Iterator[Clusters]":
    """Those of this process that files share: tests/cluster/README.md."""
    from tests.integration.conftest import Clusters

    pytestconfig.stash[_SHARED] = new_clusters = Clusters()
    yield new_clusters
    new_clusters.stop()


@pytest.fixture(scope="module")
def plane(clusters: "Clusters") -> "ControlPlane":
    """That of the kind `api`."""
    api_plane: ControlPlane = clusters.cluster_of("api")
    return api_plane


def pytest_runtest_setup(item: pytest.Item) -> None:
    if shared := item.config.stash.get(_SHARED, None):
        mark = item.get_closest_marker("cluster")
        shared.stop_unless(str(mark.args[0]) if mark and mark.args else "")
