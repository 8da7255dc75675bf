"""What the cluster is told of MPS once its manager cannot tell it any more."""

import json

import pytest

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.gpus import mpsfiles
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import (
    ExtendedResource,
    ExtendedResourceSpec,
    ExtendedResourceStatus,
    MpsStatus,
)
from cardwise.kube.objects.meta import ObjectMeta
from deviceplugin.grants.mpswait import HasManager
from deviceplugin.publish import stalemps
from deviceplugin.publish.stalemps import StaleMpsStatus
from tests.deviceplugin.conftest import RESOURCES, card_uuid
from tests.fakes.clock import FakeClock

AGES = 5000.0  # seconds, in which nobody has looked


class Seen:
    """The device plugin's looks at one card, by clocks of ours: the manager's stands still."""

    def __init__(self, root, setting=HasManager.SEEN, *, managed=False) -> None:
        self.clock, self.mps_clock = FakeClock(), FakeClock()
        self.stale_status = StaleMpsStatus(setting, root, lambda: managed, self.clock, self.mps_clock)

    def patch_after(self, seconds, state="Ready", *, index=0, reason=""):
        self.clock.advance(seconds)
        mps_status = MpsStatus("card", state, reason, multi_user=False, max_clients=48) if state else None
        uuid = card_uuid(index)
        resource = ExtendedResource(
            ObjectMeta(name=uuid.lower()),
            ExtendedResourceSpec(node="n1", index=index, uuid=uuid),
            ExtendedResourceStatus(mps=mps_status),
        )
        return self.stale_status.correct_status(resource).get("mps", "stays")


def test_a_manager_that_is_gone_for_long_is_told_and_a_restart_is_not(world):
    seen = Seen(world.root)
    assert seen.patch_after(0) == "stays"
    world.end()
    assert seen.patch_after(0) == seen.patch_after(stalemps.GRACE_SECONDS - 1) == "stays"
    world.begin()
    assert seen.patch_after(2) == "stays"
    world.end()
    assert seen.patch_after(2) == "stays", "the time begins anew"
    mps_status = seen.patch_after(stalemps.GRACE_SECONDS)
    assert (mps_status["state"], mps_status["reason"]) == ("Down", "the node's MPS manager is gone or hangs")
    assert set(mps_status) == {"state", "reason", "lastTransitionTime"}, "the rest stays as the manager has said it"
    assert seen.patch_after(60, "Down") == "stays", "once"


@pytest.mark.parametrize("state", [MpsState.READY, MpsState.OFF])
def test_a_manager_that_hangs_is_told(world, state):
    seen = Seen(world.root)
    world.cards[0].says(state=state, checked=seen.mps_clock.now() - AGES)
    seen.patch_after(0, state)
    seen.patch_after(0, state, index=1)
    assert seen.patch_after(stalemps.GRACE_SECONDS, state)["state"] == "Down"
    assert seen.patch_after(0, index=1) == "stays", "the other is looked at"


@pytest.mark.parametrize("state", [MpsState.STARTING, MpsState.FAULT, MpsState.DRAINING])
def test_a_manager_that_is_busy_with_a_card_is_believed(world, state):
    seen = Seen(world.root)
    world.cards[0].says(state=state, checked=seen.mps_clock.now() - AGES)
    seen.patch_after(0, state)
    assert seen.patch_after(AGES, state) == "stays"


def test_where_mps_cannot_run_a_manager_that_is_gone_keeps_nobody_out(world):
    seen = Seen(world.root)
    world.cards[0].says(state=MpsState.UNAVAILABLE, checked=0.0)
    world.end()
    seen.patch_after(0, "Unavailable")
    assert seen.patch_after(AGES, "Unavailable") == "stays"
    (world.cards[0].home / mps.READY_FILE).unlink()
    seen.patch_after(0, "Unavailable")
    assert seen.patch_after(stalemps.GRACE_SECONDS, "Unavailable")["state"] == "Down", "after a reboot"


def test_what_a_former_manager_said_of_a_card_that_this_one_does_not_serve_is_taken_back(world):
    seen = Seen(world.root)
    (world.cards[0].home / mps.READY_FILE).unlink()
    seen.patch_after(0)
    assert seen.patch_after(stalemps.GRACE_SECONDS)["state"] == "Down"


def test_after_a_reboot_nothing_is_left_and_nothing_is_believed(tmp_path):
    seen = Seen(tmp_path / "gone")
    seen.patch_after(0)
    assert seen.patch_after(stalemps.GRACE_SECONDS)["state"] == "Down"
    assert seen.patch_after(AGES, "") == "stays", "of a card that no manager has spoken of nothing is said"


def test_a_node_that_has_had_a_manager_says_that_nothing_starts_without_one(world):
    """As after an installation with MPS and a later one without: the cards are new objects."""
    seen = Seen(world.root, managed=True)
    assert seen.patch_after(AGES, "") == "stays", "it lives, and will tell"
    world.end()
    assert seen.patch_after(0, "") == seen.patch_after(stalemps.GRACE_SECONDS - 1, "") == "stays"
    assert seen.patch_after(1, "")["state"] == "Down"


def test_where_no_manager_is_to_come_a_card_is_open_but_for_one_that_a_former_manager_left_closed(world):
    """As after an installation with MPS and a later one without: pods held the first card when the manager ended."""
    world.end()
    (world.cards[0].home / mps.MODES_FILE).write_text(json.dumps({card_uuid(0): "DEFAULT"}))
    seen = Seen(world.root, HasManager.NEVER)
    mps_status = seen.patch_after(0)
    assert (mps_status["state"], mps_status["reason"]) == ("Down", mps.CLOSED_BY_FORMER_MANAGER), (
        "at once: nobody can use it without MPS"
    )
    assert seen.patch_after(0, "")["state"] == "Down", "also where the card is a new object"
    assert seen.patch_after(0, index=1) is None, "what a manager said of the other counts no more"
    assert seen.patch_after(0, "", index=1) == "stays"
    assert seen.patch_after(AGES, "Down", reason=mps.CLOSED_BY_FORMER_MANAGER) == "stays", "once"
    (world.cards[0].home / mps.MODES_FILE).unlink()
    assert seen.patch_after(0, "Down", reason=mps.CLOSED_BY_FORMER_MANAGER) is None


def test_one_daemon_for_all_cards_is_known_for_each(world):
    world.one_for_all()
    seen = Seen(world.root)
    seen.patch_after(0, index=1)
    assert seen.patch_after(AGES, index=1) == "stays"
    assert mpsfiles.read_state(world.root / mps.NODE_FOLDER).scope is DaemonScope.NODE


def test_a_killed_managers_cards_take_no_pods_any_more(world):
    """In the cluster: its last word was Ready."""
    rig = world.rig
    rig.start()
    card = rig.card(1)
    stale_status = {
        "mode": "card",
        "state": "Ready",
        "reason": "",
        "multiUser": True,
        "ceilingMiB": 512,
        "maxClients": 48,
    }
    card["status"]["mps"] = stale_status
    rig.api.write_object(RESOURCES, card)
    world.end()
    rig.settle()
    assert rig.status(1)["mps"]["state"] == "Ready", "it may be back at once"
    rig.clock.advance(stalemps.GRACE_SECONDS)
    rig.settle()
    mps_status = rig.status(1)["mps"]
    assert mps_status | {"lastTransitionTime": ""} == stale_status | {
        "state": "Down",
        "reason": "the node's MPS manager is gone or hangs",
        "lastTransitionTime": "",
    }
    parse_settings = extendedresources.mps_of_card(
        MpsStatus(mps_status["mode"], mps_status["state"], "", mps_status["multiUser"], mps_status["maxClients"])
    )
    assert parse_settings is not None, "it has a manager"
    assert not parse_settings.ready
    assert rig.status(1)["health"] == "Healthy"
