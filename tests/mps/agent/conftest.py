from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.agent.pods import TWO, Card, Pod


@pytest.fixture
def pod(folder: Path) -> Iterator[Pod]:
    made = Pod(folder)
    yield made
    made.close()


@pytest.fixture
def card(pod: Pod) -> Iterator[Card]:
    """Ready, its daemon listens."""
    made = Card(pod.root, clock=pod.clock).runs().says()
    yield made
    made.dies()


@pytest.fixture
def other(pod: Pod) -> Iterator[Card]:
    made = Card(pod.root, TWO, pod.clock).runs().says()
    yield made
    made.dies()
