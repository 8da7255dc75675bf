import pytest

from tests.kube.leases.leases import World


@pytest.fixture
def world() -> World:
    """An API server with a Lease without a holder."""
    lease_world = World()
    lease_world.released()
    return lease_world
