"""That the black box finds what is planted: short histories that hold, and with the fault do not."""

import pytest

from cardwise.kube import paths
from tests.build import P100
from tests.property import plantedclaims, replay
from tests.property.planted import FAULTS

ONE_CARD = {"seed": 1, "nodes": {"n1": [P100]}}
P1, P2 = {"do": "creates", "gpu_mem": P100}, {"do": "creates", "gpu_mem": P100 // 2}
TEAMS = [{"do": "creates", "gpu_mem": 1000, "namespace": "team"}] * 2
SOON = {"do": "passes", "seconds": 2.0, "stride": 0.25}


def tries(pod):
    return {"do": "tries", "choice": pod, "to": 0}


INSIST = [step for _ in range(3) for step in (tries("p2"), SOON)]
LOST = [
    P1,
    P2,
    {"do": "stands", "times": 1},
    tries("p1"),
    SOON,
    *INSIST,
    {"do": "arrives", "choice": 0, "behind": False},
]
GONE = [
    P1, P2, tries("p1"), SOON, {"do": "runs", "choice": "p1"}, {"do": "lag", "collection": paths.extendedresources()},
    {"do": "deletes_by_force", "choice": "p1"}, SOON, *INSIST,
]  # fmt: skip
UNHEALTHY_CARD = [
    {"do": "card_changes", "node": "n1", "index": 0, "change": "healthy"},
    {"do": "passes", "seconds": 61.0, "stride": 5.0},
    P1,
    P2,
    *INSIST,
]
QUOTA = [*TEAMS, tries("p1"), SOON, *INSIST]


@pytest.mark.parametrize(
    ("fault", "history", "message"),
    [
        ("a Binding whose answer was lost is forgotten", LOST, "over-full"),
        ("what vanished pods hold is free at once", GONE, "over-full"),
        ("a sick card takes new pods", UNHEALTHY_CARD, "takes nothing new"),
        ("quotas are not known", QUOTA, "above the quota"),
    ],
)
def test_a_fault_is_found(fault, history, message):
    history = [ONE_CARD | {"quotas": {"team": {"shares": 1}}}, *history]
    assert replay.broken(history) == ""
    assert message in replay.broken(history, FAULTS[fault].build())


@pytest.mark.parametrize("fault", plantedclaims.FAULTS)
def test_a_fault_of_claims_can_be_planted(fault):
    planted = plantedclaims.FAULTS[fault]
    before = getattr(planted.owner, planted.name)
    with planted.patch():
        assert getattr(planted.owner, planted.name) != before
