"""Drivers, states of MPS and demands of pods in one table: the memory tier of the card, where a share is placed, and
how it starts there.
"""

import msgspec
import pytest

from cardwise.core.api import names, request
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import MpsState
from cardwise.core.placement import placement
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from cardwise.core.values.refusals import Refusal
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ExtendedResource
from tests.build import asking
from tests.deviceplugin.conftest import P100, RESOURCES
from tests.deviceplugin.mps.managednode import HALF, PIPE_ENV, World, bound, refusal_message, start

DRIVERS = {"535": "535.261.03", "550": "550.163.01", "580": "580.95.05", "615": "615.71.09"}
NO_MANAGER = "-"

# How a share runs: "mps" through MPS, "driver" with the driver's limit, "free" with no limit, "-" if its pod waits.
TABLE = """
driver MPS         tier     none   advisory   mps        kernel
535    -           advisory free   free       -          -
535    Unavailable advisory free   free       -          -
535    Off         advisory free   mps        mps        -
535    Ready       mps      free   mps        mps        -
550    -           advisory free   free       -          -
550    Unavailable advisory free   free       -          -
550    Off         advisory free   mps        mps        -
550    Ready       mps      free   mps        mps        -
580    -           advisory free   free       -          -
580    Unavailable advisory free   free       -          -
580    Off         advisory free   mps        mps        -
580    Ready       mps      free   mps        mps        -
615    -           kernel   driver driver     driver     driver
615    Unavailable kernel   driver driver     driver     driver
615    Off         kernel   driver mps+driver mps+driver mps+driver
615    Ready       kernel   driver mps+driver mps+driver mps+driver
"""
HEADS, *ROWS = [line.split() for line in TABLE.strip().splitlines()]


class Node:
    """A node with this driver, whose MPS is in this state."""

    def __init__(self, rig, driver: str, state: str) -> None:
        for card in rig.cards:
            card["properties"] = {"driver": DRIVERS[driver]}
        rig.write_cards()
        self.rig, self.state = rig, state
        self.world = None if state == NO_MANAGER else World(rig)
        if self.world is not None:
            self.world.cards[0].says(state=MpsState(state))
        rig.start()
        if self.world is not None:
            mps_status = {"mode": "card", "state": state, "reason": "", "multiUser": int(driver) >= 580}
            rig.api.write_object(RESOURCES, rig.card(0) | {"status": rig.status(0) | {"mps": mps_status}})
            rig.settle()

    def place(self, demand: str, **amounts: int) -> Placement | Refusal:
        """Where the extender places such a pod, by what the node has published."""
        card = extendedresources.card_of(msgspec.convert(self.rig.card(0), ExtendedResource))
        ledger = Ledger()
        ledger.set_cards("n1", [card])
        pod_request = request.parse(asking("a", annotations={names.ISOLATION: demand}, **amounts))
        return placement.place_on(ledger.kinds, ledger.node("n1"), pod_request, "binpack")

    def switch_mps(self, *, with_mps: bool) -> None:
        """Switch MPS between Off and Ready, as the manager does for the pods of a card."""
        if self.world is not None and self.state != MpsState.UNAVAILABLE:
            self.world.cards[0].says(state=MpsState.READY if with_mps else MpsState.OFF)

    def start(self, demand: str) -> str:
        """How a share runs, as in the table."""
        self.switch_mps(with_mps=demand != Isolation.NONE)
        env = self.rig.env(start(self.rig, bound(self.rig, demand, [(0, 1000)], isolation=demand)))
        limits = ["mps"] * (PIPE_ENV in env) + ["driver"] * (names.ENV_GPU_MEMORY_LIMIT in env)
        return "+".join(limits) or "free"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_tiers_placement_and_starts_by_driver_mps_and_demand(idle_rig, row):
    driver, state, tier, *outcomes = row
    node = Node(idle_rig, driver, state)
    try:
        assert idle_rig.status(0)["isolation"]["memory"] == tier
        for demand, outcome in zip(HEADS[3:], outcomes, strict=True):
            place = node.place(demand, gpu_mem=HALF)
            if outcome == "-":
                assert place is (Refusal.KERNEL_MISSING if demand == "kernel" else Refusal.MPS_MISSING)
                pod = bound(idle_rig, f"refused-{demand}", [(0, 1000)], isolation=demand)
                refusal_message(idle_rig, pod)  # also one that was bound before the card lost its tier
            else:
                assert isinstance(place, Placement)
                assert node.start(demand) == outcome
    finally:
        if node.world is not None:
            node.world.close()


@pytest.mark.parametrize("demand", list(Isolation))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_whole_card_meets_each_demand_with_each_driver_and_without_mps(idle_rig, row, demand):
    node = Node(idle_rig, row[0], row[1])
    try:
        assert isinstance(node.place(demand, gpu_count=1), Placement)
        node.switch_mps(with_mps=False)
        env = idle_rig.env(start(idle_rig, bound(idle_rig, "a", [(0, P100)], whole=[0], isolation=demand)))
        assert env.keys().isdisjoint({PIPE_ENV, names.ENV_GPU_MEMORY_LIMIT})
    finally:
        if node.world is not None:
            node.world.close()


def test_a_start_that_demands_the_drivers_limit_reads_why_there_is_none(idle_rig):
    node = Node(idle_rig, "580", "Ready")
    _, message = refusal_message(idle_rig, bound(idle_rig, "a", [(0, 1000)], isolation="kernel"))
    reason = "limits by the driver need driver 615 or later; this is 580.95.05"
    assert (
        f"pod default/a demands cardwise.dev/isolation: kernel, and the driver does not limit its memory: {reason};"
        in (message)
    )
    split = bound(idle_rig, "b", [(0, 1000), (1, 1000)], isolation="kernel")
    assert "the driver limits shares of a single GPU only" in refusal_message(idle_rig, split)[1]
    node.world.close()
