import pytest

from tests.deviceplugin.mps.managednode import World


@pytest.fixture
def world(idle_rig):
    world = World(idle_rig)
    yield world
    world.close()
