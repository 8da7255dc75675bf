from collections.abc import Iterator

import pytest

from cardwise.kube.client import KubeClient
from tests.kube.fakeapi import FakeApi


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
