"""Every test of the contract runs against each kind of program that is here."""

import os

import pytest

from tests.mps import fetch
from tests.mps.contract.programs import GIVEN, KINDS, World
from tests.mps.worlds import DOUBLE


@pytest.fixture(params=KINDS)
def world(request, folder):
    flavour, _, name = request.param.partition("-")
    (folder / "log").mkdir()
    real = flavour == "real"
    program = fetch.programs()[name] if real else DOUBLE
    driver = GIVEN.get(name, int(os.environ.get("CARDWISE_MPS_REAL_DRIVER", "550"))) if real else int(name)
    made = World(folder, program, driver, real)
    yield made
    made.close()


@pytest.fixture
def running(world):
    world.start()
    return world
