"""Each test of the contract runs against each kind of program that it holds for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.contract.programs import KINDS, PROGRAMS, World, make


def _world(request: pytest.FixtureRequest, folder: Path, python_first: None) -> Iterator[World]:
    world = make(request.param, folder)
    yield world
    world.close()


world = pytest.fixture(params=KINDS, name="world")(_world)  # any daemon, in memory unless it is a real one
program = pytest.fixture(params=PROGRAMS, name="program")(_world)  # one that is a process
_every = pytest.fixture(params=dict.fromkeys([*KINDS, *PROGRAMS]), name="_every")(_world)


@pytest.fixture
def running(world: World) -> World:
    return world.start()


@pytest.fixture
def process(program: World) -> World:
    return program.start()


@pytest.fixture
def every(_every: World) -> World:
    """What is the same in memory and as a process, and runs."""
    return _every.start()
