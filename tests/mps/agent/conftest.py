from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.agent.pods import TWO, Card, Pod


@pytest.fixture
def pod(folder: Path) -> Iterator[Pod]:
    pod = Pod(folder)
    yield pod
    pod.close()


@pytest.fixture
def card(pod: Pod) -> Iterator[Card]:
    """Ready, its daemon listens."""
    card = Card(pod.root, clock=pod.clock).runs().says()
    yield card
    card.dies()


@pytest.fixture
def other(pod: Pod) -> Iterator[Card]:
    fixture = Card(pod.root, TWO, pod.clock).runs().says()
    yield fixture
    fixture.dies()
