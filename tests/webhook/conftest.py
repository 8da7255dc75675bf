"""The API server that the webhook asks, in memory, and the clock that both live by."""

import pytest

from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(clock: FakeClock) -> ApiServer:
    return ApiServer(clock)
