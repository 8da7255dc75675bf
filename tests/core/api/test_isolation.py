"""The tiers of a card, by driver, access and the state of MPS."""

import pytest

from cardwise.core.api import isolation
from cardwise.core.api.mps import MpsState

WITH_MPS = [MpsState.READY, MpsState.STARTING, MpsState.FAULT, MpsState.DRAINING, MpsState.DOWN]
OLD_DRIVERS = ["535.261.03", "550.163.01", "580.95.05", "595.99.02", "", "nonsense"]
NEW_DRIVERS = ["615.71.09", "620.1"]


@pytest.mark.parametrize("driver", OLD_DRIVERS)
@pytest.mark.parametrize("has_cdi", [True, False])
@pytest.mark.parametrize("state", WITH_MPS)
def test_mps_limits_shares_below_driver_615(state, driver, has_cdi):
    tiers = isolation.compute_tiers(state, "", driver=driver, has_cdi=has_cdi)
    assert (tiers.memory, tiers.compute, tiers.compute_reason) == ("mps", "mps", "")
    assert "615" in tiers.memory_reason, "what would be stronger"


@pytest.mark.parametrize("driver", OLD_DRIVERS)
@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("", "", isolation.NO_MANAGER),
        (MpsState.OFF, "", isolation.MPS_OFF),
        ("Unavailable", "nvidia-cuda-mps-control is not installed", "nvidia-cuda-mps-control is not installed"),
    ],
)
def test_without_mps_and_an_old_driver_shares_are_advisory(state, reason, expected, driver):
    tiers = isolation.compute_tiers(state, reason, driver=driver, has_cdi=True)
    assert tiers == isolation.Tiers(isolation.MemoryTier.ADVISORY, isolation.ComputeTier.NONE, expected, expected)


@pytest.mark.parametrize("driver", NEW_DRIVERS)
@pytest.mark.parametrize("state", ["", MpsState.OFF, *WITH_MPS])
def test_the_driver_limits_memory_from_615_on_with_and_without_mps(state, driver):
    tiers = isolation.compute_tiers(state, "", driver=driver, has_cdi=True)
    assert (tiers.memory, tiers.memory_reason) == ("kernel", isolation.UNVERIFIED)
    assert tiers.compute == ("mps" if state in WITH_MPS else "none")


@pytest.mark.parametrize(("state", "memory"), [(MpsState.READY, "mps"), ("", "advisory")])
def test_the_driver_limits_nothing_without_cdi(state, memory):
    tiers = isolation.compute_tiers(state, "", driver="615.71.09", has_cdi=False)
    assert tiers.memory == memory
    assert tiers.memory_reason == (isolation.NO_CDI if memory == "mps" else isolation.NO_MANAGER)
