"""Each test of the contract runs against each kind of program that it holds for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.contract.programs import KINDS, PROGRAMS, World, make


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, folder: Path, python_first: None) -> Iterator[World]:
    """Any daemon."""
    made = make(request.param, folder)
    yield made
    made.close()


@pytest.fixture
def running(world: World) -> World:
    return world.start()


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, folder: Path, python_first: None) -> Iterator[World]:
    """One that is a process."""
    made = make(request.param, folder)
    yield made
    made.close()


@pytest.fixture
def process(program: World) -> World:
    return program.start()
