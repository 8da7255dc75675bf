"""The extender's limits per card, in its ConfigMap."""

import pytest

from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.values.quantity import MiB

WRITTEN = {"headroomMiB": "700", "maxClients": "16", "coreOvercommit": "200"}


@pytest.mark.parametrize(
    "limits", [CardLimits(), CardLimits(kept_back=None), CardLimits(kept_back=MiB(700), max_clients=16, core=200)]
)
def test_limits_are_read_back_as_written(limits):
    assert CardLimits.read(limits.configmap_data() | {"policy": "priced"}) == limits


def test_the_keys_are_the_settings_of_the_chart():
    assert CardLimits(kept_back=MiB(700), max_clients=16, core=200).configmap_data() == WRITTEN
    assert CardLimits(kept_back=None).configmap_data()["headroomMiB"] == "auto"
    assert CardLimits().configmap_data()["maxClients"] == "0"  # as MPS says


@pytest.mark.parametrize(
    "change",
    [
        {"headroomMiB": "-1"},
        {"headroomMiB": "much"},
        {"headroomMiB": ""},
        {"headroomMiB": "9" * 5000},
        {"maxClients": "1.5"},
        {"coreOvercommit": "99"},
        {"coreOvercommit": "1001"},
    ],
)
def test_impossible_limits_are_not_read(change):
    assert CardLimits.read(WRITTEN | change) is None


@pytest.mark.parametrize("key", WRITTEN)
def test_missing_limits_of_an_older_extender_are_none(key):
    assert CardLimits.read({name: text for name, text in WRITTEN.items() if name != key}) is None
