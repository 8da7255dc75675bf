from collections.abc import Iterator

import pytest

from cardwise.kube.client import KubeClient
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.kube.leases.leases import World


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(clock: FakeClock) -> Iterator[ApiServer]:
    server = ApiServer(clock)
    yield server
    server.close()


@pytest.fixture
def client(api: ApiServer, clock: FakeClock) -> KubeClient:
    return api.client(clock=clock)


@pytest.fixture
def world() -> World:
    """An API server with a Lease without a holder."""
    lease_world = World()
    lease_world.released()
    return lease_world
