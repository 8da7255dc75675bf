from collections.abc import Iterator

import pytest

from cardwise.kube.client import KubeClient
from tests.kube.fakeapi import FakeApi
from tests.kube.leases import World


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.close()


@pytest.fixture
def client(api: FakeApi) -> Iterator[KubeClient]:
    made = KubeClient(api.url)
    yield made
    made.close()


@pytest.fixture
def world() -> World:
    """With a Lease that nobody holds."""
    made = World()
    made.released()
    return made
