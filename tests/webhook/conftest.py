"""The API server in memory that the webhook calls, and the clock of both."""

import pytest

from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(clock: FakeClock) -> ApiServer:
    return ApiServer(clock)
