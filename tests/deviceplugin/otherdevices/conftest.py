import pytest

from tests.deviceplugin.otherdevices.machines import Machine


@pytest.fixture
def machine(idle_rig):
    return Machine(idle_rig)


@pytest.fixture
def rig(machine):
    return machine.start()
