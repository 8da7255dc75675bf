import pytest

from tests.deviceplugin.mps.worlds import World


@pytest.fixture
def world(idle_rig):
    made = World(idle_rig)
    yield made
    made.close()
